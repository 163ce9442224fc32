// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/world_buffers.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "core/api/scales.hpp"
#include "core/engine/oracle.hpp"
#include "core/error.hpp"
#include "core/plan/atoms.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

constexpr std::uint64_t kAlign = 16;
/// Left alone on a device and of host memory, for what a transport takes besides: a tenth.
constexpr std::uint64_t kSpareParts = 10;

std::uint64_t aligned_sum(const std::vector<std::uint64_t>& sizes) {
  std::uint64_t sum = 0;
  for (const std::uint64_t size : sizes) {
    sum += (size + kAlign - 1) / kAlign * kAlign;
  }
  return sum;
}

/// "12.3 GB" of 10^9 bytes.
std::string gigabytes(std::uint64_t bytes) {
  const std::uint64_t tenths = bytes / 100'000'000;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " GB";
}

std::vector<std::size_t> order_of(std::size_t count, BufferOrder order, Rank rank) {
  std::vector<std::size_t> out(count);
  std::iota(out.begin(), out.end(), std::size_t{0});
  if (order == BufferOrder::shuffled) {
    std::mt19937_64 random(static_cast<std::uint64_t>(rank) + 1);
    for (std::size_t i = count; i > 1; --i) {  // std::shuffle differs from library to library
      std::swap(out[i - 1], out[random() % i]);
    }
  }
  return out;
}

/// From the first element of @p view on.
LocalBuffer at(const LocalBuffer& buffer, const View& view) {
  return {buffer.data + view.offset_bytes, buffer.bytes - view.offset_bytes, buffer.space,
          buffer.device};
}

}  // namespace

std::map<int, std::uint64_t> needed_bytes(const Problem& problem, int devices) {
  std::map<int, std::uint64_t> out;
  for (Rank rank = 0; rank < problem.world_size(); ++rank) {
    out[static_cast<int>(rank) % devices] +=
        aligned_sum(problem.buffer_bytes(Role::source, rank)) +
        aligned_sum(problem.buffer_bytes(Role::destination, rank));
  }
  return out;
}

WorldBuffers::WorldBuffers(const Problem& problem, const TensorValues& values, MemorySpace space,
                           BufferOrder order)
    : problem_(problem), values_(values), space_(space), memory_(memory_of(space)) {
  devices_ = memory_.device_count();
  if (devices_ < 1) {
    throw Error(Errc::unavailable, "no device with memory of kind '" + std::string(memory_.name()) +
                                       "' works here, expected at least one");
  }
  for (const auto& [device, bytes] : needed_bytes(problem, devices_)) {
    const std::uint64_t free = memory_.free_bytes(device);
    if (bytes > free - free / kSpareParts) {
      throw Error(Errc::unavailable,
                  "the buffers take " + gigabytes(bytes) + " of " + std::string(memory_.name()) +
                      " memory" +
                      (space == MemorySpace::device ? " on device " + std::to_string(device) : "") +
                      ", where " + gigabytes(free) + " are free and a tenth stays so");
    }
  }
  const auto& parameters = problem.parameters();
  casts_ = std::any_of(parameters.begin(), parameters.end(), [](const Parameter& parameter) {
    return parameter.source_dtype() != parameter.destination_dtype();
  });
  buffers_.resize(static_cast<std::size_t>(problem.world_size()));
  expected_.resize(buffers_.size());
  for (Rank rank = 0; rank < problem.world_size(); ++rank) {
    Buffers& mine = buffers_[static_cast<std::size_t>(rank)];
    for (const Role role : {Role::source, Role::destination}) {
      const std::vector<std::uint64_t> sizes = problem.buffer_bytes(role, rank);
      auto& out = role == Role::source ? mine.source : mine.destination;
      out.resize(sizes.size());
      const std::uint64_t bytes = aligned_sum(sizes);
      if (bytes == 0) {
        continue;
      }
      arenas_.push_back(memory_.reserve(bytes, device_of(rank)));
      const BufferOrder its_order = role == Role::source ? BufferOrder::declared : order;
      for (const std::size_t i : order_of(sizes.size(), its_order, rank)) {
        if (sizes[i] > 0) {
          out[i] = arenas_.back()->take(sizes[i], kAlign);
        }
      }
    }
  }
}

void WorldBuffers::fill(Rank rank) const {
  const BufferTable& table = problem_.buffers(Role::source);
  for (std::size_t i = 0; i < problem_.parameters().size(); ++i) {
    const Parameter& parameter = problem_.parameters()[i];
    for (const RankPiece& entry : parameter.source.layout->pieces_of(rank)) {
      const View& view = entry.piece.view;
      const Box& box = entry.piece.box;
      memory_.fill_synthetic(
          parameter.shape, box, parameter.source_dtype(), synthetic_seed(parameter.name),
          at(of(rank).source[table.of_parameter[i][view.buffer]], view), view.strides);
    }
  }
  compute_scales(problem_, rank, of(rank).source);
}

void WorldBuffers::expect(Rank rank) {
  std::map<std::pair<const Layout*, const Layout*>, Atoms> known;
  const BufferTable& table = problem_.buffers(Role::source);
  std::vector<std::uint64_t>& out = expected_[static_cast<std::size_t>(rank)];
  out.clear();
  for (std::size_t i = 0; i < problem_.parameters().size(); ++i) {
    const Parameter& parameter = problem_.parameters()[i];
    const auto mine = parameter.destination.layout->pieces_of(rank);
    if (parameter.source_dtype() != parameter.destination_dtype() || mine.empty()) {
      continue;
    }
    const Geometry geometry{parameter.source.layout, parameter.destination.layout};
    const Atoms& atoms =
        known.try_emplace({geometry.source.get(), geometry.destination.get()}, geometry)
            .first->second;
    const auto first =
        geometry.source_count() +
        static_cast<std::uint32_t>(mine.data() - parameter.destination.layout->pieces().data());
    const std::size_t base = out.size();
    out.resize(base + mine.size(), 0);
    for (std::size_t a = 0; a < atoms.size(); ++a) {
      const Atom atom = atoms[a];
      std::uint64_t digest = 0;
      bool known_digest = false;
      for (const std::uint32_t receiver : atom.receivers) {
        if (receiver < first || receiver >= first + mine.size()) {
          continue;
        }
        if (!known_digest) {
          const RankPiece& held = parameter.source.layout->pieces()[atom.holders.front()];
          const View view = narrow(held.piece, atom.box, bytes_of(parameter.source_dtype()));
          digest = memory_.digest_of_box(
              parameter.shape, atom.box, parameter.source_dtype(),
              at(of(held.rank).source[table.of_parameter[i][view.buffer]], view), view.strides);
          known_digest = true;
        }
        out[base + receiver - first] += digest;
      }
    }
  }
}

void WorldBuffers::poison(Rank rank, std::uint64_t seed) const {
  for (const LocalBuffer& buffer : of(rank).destination) {
    if (buffer.bytes > 0) {
      const Shape shape{static_cast<Index>(buffer.bytes)};
      memory_.fill_synthetic(shape, Box::whole(shape), DType::u8, mix64(seed), buffer,
                             row_major(shape));
    }
  }
}

std::string WorldBuffers::check(Rank rank, bool oracle) const {
  if (oracle && (space_ == MemorySpace::host || casts_)) {
    if (std::string wrong = check_elements(rank); !wrong.empty()) {
      return wrong;
    }
  }
  const BufferTable& table = problem_.buffers(Role::destination);
  std::size_t next = 0;
  for (std::size_t i = 0; i < problem_.parameters().size(); ++i) {
    const Parameter& parameter = problem_.parameters()[i];
    const DType dtype = parameter.destination_dtype();
    if (parameter.source_dtype() != dtype) {
      continue;
    }
    for (const RankPiece& entry : parameter.destination.layout->pieces_of(rank)) {
      const View& view = entry.piece.view;
      const Box& box = entry.piece.box;
      const std::uint64_t digest = memory_.digest_of_box(
          parameter.shape, box, dtype,
          at(of(rank).destination[table.of_parameter[i][view.buffer]], view), view.strides);
      if (digest != expected_[static_cast<std::size_t>(rank)][next++]) {
        return "rank " + std::to_string(rank) + ": box " + to_string(box) + " of '" +
               parameter.name + "' has another digest than at its source";
      }
    }
  }
  return {};
}

std::string WorldBuffers::check_elements(Rank rank) const {
  const std::vector<LocalBuffer>& mine = of(rank).destination;
  if (space_ == MemorySpace::host) {
    return verify_pieces(problem_, rank, mine, values_).first;
  }
  std::vector<std::vector<std::byte>> bytes(mine.size());
  std::vector<LocalBuffer> copies(mine.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (mine[i].bytes > 0) {
      bytes[i].resize(mine[i].bytes);
      memory_.read(mine[i], bytes[i]);
      copies[i] = {bytes[i].data(), bytes[i].size(), MemorySpace::host, 0};
    }
  }
  return verify_pieces(problem_, rank, copies, values_).first;
}

}  // namespace m2n
