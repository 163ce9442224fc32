// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/values.hpp"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/block_scales.hpp"
#include "core/tensor/blocks.hpp"
#include "core/tensor/changes.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl/tables.hpp"

namespace m2n::nccl {

static_assert(ElementView::kMaxRank == kMaxRank);

ElementView element_view(const Shape& shape, const Box& box, DType dtype, const std::byte* data,
                         const Strides& strides) {
  expects(strides.size() == shape.size(), "a stride for each dimension of a box");
  if (!Box::whole(shape).contains(box)) {
    throw Error(Errc::bad_argument, "box " + to_string(box) + " of shape " + to_string(shape) +
                                        ", expected a box inside the shape");
  }
  const auto item = static_cast<Index>(bytes_of(dtype));
  const Strides global = row_major(shape);
  ElementView view;
  view.item_bytes = static_cast<std::uint32_t>(item);
  view.count = static_cast<std::uint64_t>(box.volume());
  view.data = reinterpret_cast<std::uint64_t>(data);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    view.first_index += static_cast<std::uint64_t>(box.lo[d] * global[d]);
    const auto extent = static_cast<std::uint64_t>(box[d].size());
    if (extent == 1) {
      continue;
    }
    const auto index_step = static_cast<std::uint64_t>(global[d]);
    const std::int64_t byte_step = strides[d] * item;
    const int last = view.rank - 1;
    if (last >= 0 && view.index_steps[last] == index_step * extent &&
        view.byte_steps[last] == byte_step * static_cast<std::int64_t>(extent)) {
      view.extents[last] *= extent;  // the two are one dimension
    } else {
      view.extents[view.rank++] = extent;
    }
    view.index_steps[view.rank - 1] = index_step;
    view.byte_steps[view.rank - 1] = byte_step;
  }
  return view;
}

void append_digest_tasks(const DigestOf& box, std::vector<DigestTask>& tasks) {
  const auto& [placed, as, scales] = box;
  const Convert convert = convert_of(placed.dtype, as);
  if (!can_quantise(placed.dtype, as)) {
    const ElementView view = element_view(placed);
    if (view.count > 0) {
      tasks.push_back({view, convert, 0, 0, {}});
    }
    return;
  }
  const Strides global = row_major(placed.shape);
  const Dims origin = Dims::filled(placed.box.rank(), 0);
  const Dims first_block = placed.box.empty() ? origin : scale_box(placed.box, scales.blocks).lo;
  for (const ScaledPart& part : scaled_parts(placed.box, scales.blocks)) {
    const auto item = static_cast<Index>(bytes_of(placed.dtype));
    DigestTask task;
    task.convert = convert;
    task.box.item_bytes = static_cast<std::uint32_t>(item);
    task.box.count = static_cast<std::uint64_t>(element_count(part.extents));
    task.box.data =
        reinterpret_cast<std::uint64_t>(placed.at.data) +
        static_cast<std::uint64_t>(element_offset(origin, part.offset, placed.strides) * item);
    task.box.first_index =
        static_cast<std::uint64_t>(element_offset(origin, placed.box.lo, global) +
                                   element_offset(origin, part.offset, global));
    task.scales =
        reinterpret_cast<std::uint64_t>(scales.at.data) +
        static_cast<std::uint64_t>(element_offset(first_block, part.scale_offset, scales.strides) *
                                   Index{sizeof(float)});
    for (std::size_t d = 0; d < part.extents.size(); ++d) {
      if (part.extents[d] == 1) {
        continue;
      }
      const auto dim = static_cast<std::size_t>(part.dims[d]);
      const int at = task.box.rank++;
      task.box.extents[at] = static_cast<std::uint64_t>(part.extents[d]);
      task.box.index_steps[at] = static_cast<std::uint64_t>(part.steps[d] * global[dim]);
      task.box.byte_steps[at] = part.steps[d] * placed.strides[dim] * item;
      task.scale_steps[at] = part.scale_steps[d] * scales.strides[dim] * Index{sizeof(float)};
    }
    tasks.push_back(task);
  }
}

ValueRule value_rule(const Formula& formula) {
  return {finite_rule(formula.dtype), formula.seed, changeable_bits(formula.dtype),
          formula.version};
}

CopyView copy_view(const StridedCopy& region, const std::byte* source, std::byte* destination,
                   const std::byte* scales) {
  const StridedCopy simple = simplify(region);
  const auto source_item = static_cast<std::int64_t>(simple.source_item_bytes());
  const auto destination_item = static_cast<std::int64_t>(simple.destination_item_bytes());
  CopyView view;
  view.convert = convert_of(simple.source_dtype, simple.destination_dtype);
  view.source_bytes = static_cast<std::uint32_t>(source_item);
  view.destination_bytes = static_cast<std::uint32_t>(destination_item);
  view.source = reinterpret_cast<std::uint64_t>(source);
  view.destination = reinterpret_cast<std::uint64_t>(destination);
  view.scales = reinterpret_cast<std::uint64_t>(scales);
  view.rank = static_cast<int>(simple.extents.size());
  view.count = static_cast<std::uint64_t>(element_count(simple.extents));
  std::uint64_t all = view.source | view.destination;  // what divides it, divides every address
  for (std::size_t d = 0; d < simple.extents.size(); ++d) {
    view.extents[d] = static_cast<std::uint64_t>(simple.extents[d]);
    view.source_steps[d] = simple.source_strides[d] * source_item;
    view.destination_steps[d] = simple.destination_strides[d] * destination_item;
    if (simple.quantises()) {
      view.scale_steps[d] = simple.scale_strides[d] * static_cast<Index>(sizeof(float));
    }
    if (d + 1 < simple.extents.size()) {
      all |= static_cast<std::uint64_t>(view.source_steps[d]) |
             static_cast<std::uint64_t>(view.destination_steps[d]);
    }
  }
  const int inner = view.rank - 1;
  if (inner < 0 || view.convert != Convert::none || view.source_steps[inner] != source_item ||
      view.destination_steps[inner] != destination_item) {
    return view;
  }
  const std::uint64_t row = view.extents[inner] * static_cast<std::uint64_t>(source_item);
  for (const std::uint32_t wide : {16U, 8U, 4U, 2U}) {
    if (wide > view.source_bytes && (all | row) % wide == 0) {
      view.count = view.count / view.extents[inner] * (row / wide);
      view.extents[inner] = row / wide;
      view.source_steps[inner] = view.destination_steps[inner] = wide;
      view.source_bytes = view.destination_bytes = wide;
      break;
    }
  }
  return view;
}

bool is_plain(const CopyView& copy) {
  return copy.convert == Convert::none &&
         (copy.rank == 0 || (copy.rank == 1 && copy.source_steps[0] == copy.source_bytes &&
                             copy.destination_steps[0] == copy.destination_bytes));
}

ScaleTask scale_task(const ScalesOf& box, std::uint64_t first_scale) {
  const auto& [placed, scales] = box;
  const auto item = static_cast<Index>(bytes_of(placed.dtype));
  ScaleTask task;
  task.convert = convert_of(placed.dtype, DType::f8_e4m3);
  task.first_scale = first_scale;
  task.data = reinterpret_cast<std::uint64_t>(placed.at.data);
  task.scales = reinterpret_cast<std::uint64_t>(scales.at.data);
  std::vector<std::size_t> order;
  for (std::size_t d = 0; d < placed.box.rank(); ++d) {
    if (placed.box[d].size() != 1) {
      order.push_back(d);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::abs(placed.strides[a]) > std::abs(placed.strides[b]);
  });
  for (const std::size_t d : order) {
    const Index extent = placed.box[d].size();
    task.extents[task.rank] = static_cast<std::uint64_t>(extent);
    task.blocks[task.rank] = static_cast<std::uint64_t>(scales.blocks[d]);
    task.counts[task.rank] = static_cast<std::uint64_t>(ceil_div(extent, scales.blocks[d]));
    task.steps[task.rank] = placed.strides[d] * item;
    task.scale_steps[task.rank] = scales.strides[d] * static_cast<Index>(sizeof(float));
    ++task.rank;
  }
  return task;
}

std::uint64_t scale_count(const ScaleTask& task) {
  std::uint64_t count = 1;
  for (int d = 0; d < task.rank; ++d) {
    count *= task.counts[d];
  }
  return count;
}

std::uint64_t device_digest_of_box(const Shape& shape, const Box& box, DType dtype,
                                   const std::byte* data, const Strides& strides) {
  const DigestTask task{element_view(shape, box, dtype, data, strides), Convert::none, 0, 0, {}};
  DeviceMemory tables(sizeof task + sizeof(std::uint64_t));
  auto* const sum = reinterpret_cast<std::uint64_t*>(tables.data() + sizeof task);
  check(cudaMemcpy(tables.data(), &task, sizeof task, cudaMemcpyHostToDevice), "digest a tensor");
  launch_digests(reinterpret_cast<const DigestTask*>(tables.data()), 1,
                 (task.box.count + kDigestChunk - 1) / kDigestChunk, sum, cudaStreamLegacy);
  check(cudaGetLastError(), "digest a tensor");
  std::uint64_t result = 0;
  check(cudaMemcpy(&result, sum, sizeof result, cudaMemcpyDeviceToHost), "digest a tensor");
  return result;
}

void device_fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                           std::byte* data, const Strides& strides) {
  launch_fill(element_view(shape, box, dtype, data, strides), value_rule({dtype, seed, 0}),
              cudaStreamLegacy);
  check(cudaGetLastError(), "fill a tensor");
  check(cudaStreamSynchronize(cudaStreamLegacy), "fill a tensor");
}

}  // namespace m2n::nccl
