// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/values.hpp"

#include "core/error.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl/kernels.hpp"

namespace m2n::nccl {
namespace {

BoxView view_of(const Shape& shape, const Box& box, std::uint64_t item_bytes,
                const Strides& strides) {
  expects(strides.size() == shape.size(), "a stride for each dimension of a box");
  if (!Box::whole(shape).contains(box)) {
    throw Error(Errc::bad_argument, "box " + to_string(box) + " of shape " + to_string(shape) +
                                        ", expected a box inside the shape");
  }
  BoxView view;
  view.rank = static_cast<int>(shape.size());
  view.count = static_cast<std::uint64_t>(box.volume());
  const Strides global = row_major(shape);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    view.extents[d] = static_cast<std::uint64_t>(box[d].size());
    view.index_steps[d] = static_cast<std::uint64_t>(global[d]);
    view.byte_steps[d] = strides[d] * static_cast<Index>(item_bytes);
    view.first_index += static_cast<std::uint64_t>(box.lo[d] * global[d]);
  }
  return view;
}

}  // namespace

static_assert(BoxView::kMaxRank == kMaxRank);

std::uint64_t device_digest_of_box(const Shape& shape, const Box& box, DType dtype,
                                   const std::byte* data, const Strides& strides) {
  const std::uint64_t item = bytes_of(dtype);
  const BoxView view = view_of(shape, box, item, strides);
  DeviceMemory sum(sizeof(std::uint64_t));
  launch_digest(view, static_cast<std::uint32_t>(item), data,
                reinterpret_cast<std::uint64_t*>(sum.data()), cudaStreamLegacy);
  check(cudaGetLastError(), "digest a tensor");
  std::uint64_t result = 0;
  check(cudaMemcpy(&result, sum.data(), sizeof result, cudaMemcpyDeviceToHost), "digest a tensor");
  return result;
}

void device_fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                           std::byte* data, const Strides& strides) {
  const std::uint64_t item = bytes_of(dtype);
  launch_fill(view_of(shape, box, item, strides), static_cast<std::uint32_t>(item),
              finite_rule(dtype), seed, data, cudaStreamLegacy);
  check(cudaGetLastError(), "fill a tensor");
  check(cudaStreamSynchronize(cudaStreamLegacy), "fill a tensor");
}

}  // namespace m2n::nccl
