// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/values.hpp"

#include "core/error.hpp"
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

ValueRule value_rule(const Formula& formula) {
  return {finite_rule(formula.dtype), formula.seed, changeable_bits(formula.dtype),
          formula.version};
}

CopyView copy_view(const StridedCopy& region, const std::byte* source, std::byte* destination) {
  const StridedCopy simple = simplify(region);
  const auto source_item = static_cast<std::int64_t>(simple.source_item_bytes());
  const auto destination_item = static_cast<std::int64_t>(simple.destination_item_bytes());
  CopyView view;
  view.convert = convert_of(simple.source_dtype, simple.destination_dtype);
  view.source_bytes = static_cast<std::uint32_t>(source_item);
  view.destination_bytes = static_cast<std::uint32_t>(destination_item);
  view.source = reinterpret_cast<std::uint64_t>(source);
  view.destination = reinterpret_cast<std::uint64_t>(destination);
  view.rank = static_cast<int>(simple.extents.size());
  view.count = static_cast<std::uint64_t>(element_count(simple.extents));
  std::uint64_t all = view.source | view.destination;  // what divides it, divides every address
  for (std::size_t d = 0; d < simple.extents.size(); ++d) {
    view.extents[d] = static_cast<std::uint64_t>(simple.extents[d]);
    view.source_steps[d] = simple.source_strides[d] * source_item;
    view.destination_steps[d] = simple.destination_strides[d] * destination_item;
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

std::uint64_t device_digest_of_box(const Shape& shape, const Box& box, DType dtype,
                                   const std::byte* data, const Strides& strides) {
  const DigestTask task{element_view(shape, box, dtype, data, strides), Convert::none, 0};
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
