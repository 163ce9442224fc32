// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_m2n/calls.hpp"

#include <utility>

#include "core/error.hpp"

namespace m2n::nccl_m2n {
namespace {

/// The library only copies, so a type of the same size does for those that it does not know.
ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::i8:
      return ncclInt8;
    case DType::f8_e4m3:
      return ncclFloat8e4m3;
    case DType::f8_e5m2:
      return ncclFloat8e5m2;
    case DType::bf16:
      return ncclBfloat16;
    case DType::i32:
      return ncclInt32;
    case DType::f32:
      return ncclFloat32;
    case DType::i64:
      return ncclInt64;
    case DType::f64:
      return ncclFloat64;
    default:
      break;
  }
  switch (bytes_of(dtype)) {
    case 1:
      return ncclUint8;
    case 2:
      return ncclFloat16;
    case 4:
      return ncclUint32;
    default:
      return ncclUint64;
  }
}

}  // namespace

void Calls::SideCall::set(const SideForm& form, DType dtype, std::uint64_t address) {
  dims = form.dims;
  placements = form.placements;
  shape = form.local_shape;
  mesh.axes = static_cast<int>(dims.size());
  mesh.extents = dims.data();
  mesh.start = form.start;
  tensor.data = reinterpret_cast<void*>(address);
  tensor.local_shape = shape.data();
  tensor.rank = static_cast<int>(shape.size());
  tensor.dtype = nccl_type(dtype);
  tensor.mesh = &mesh;
  tensor.placements = placements.data();
}

void Calls::add(const Form& form, std::string name, std::uint64_t source,
                std::uint64_t destination) {
  Entry& entry = entries_.emplace_back();
  entry.name = std::move(name);
  entry.sides[0].set(form.source, form.dtype, source);
  entry.sides[1].set(form.destination, form.dtype, destination);
}

void Calls::queue(const Library& library, Handle handle, ncclComm_t comm, bool grouped,
                  cudaStream_t stream) {
  std::size_t in_group = 0;
  for (Entry& entry : entries_) {
    if (grouped && in_group == 0) {
      library.require(library.group_start(), "start a group");
    }
    const ncclResult_t result =
        library.reshard(handle, comm, &entry.sides[0].tensor, &entry.sides[1].tensor, stream);
    if (result != ncclSuccess && grouped) {
      const std::string why = library.last_error();
      library.group_abort();
      throw TransportError(Errc::peer_lost, "nccl_m2n: parameter '" + entry.name + "': " + why);
    }
    library.require(result, "parameter '" + entry.name + "'");
    if (grouped && ++in_group == kGroupTensors) {
      library.require(library.group_end(), "run a group that ends with '" + entry.name + "'");
      in_group = 0;
    }
  }
  if (in_group > 0) {
    library.require(library.group_end(), "run a group");
  }
}

}  // namespace m2n::nccl_m2n
