// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/transports/device_rounds.hpp"

#include <chrono>
#include <stdexcept>

#include "core/api/builtin.hpp"
#include "core/api/scales.hpp"

namespace m2n::testing {
namespace {

Deadline in_a_minute() { return deadline_in(std::chrono::seconds(60)); }

}  // namespace

LentMemory::LentMemory(const PlacedProblem& placed, Rank rank, OnDevice which, int device,
                       std::mt19937_64& random)
    : memory_(placed_memory(placed, rank)) {
  constexpr std::uint64_t kRoom = 32;  // for a shift, and alignment
  std::uint64_t bytes = 0;
  for (const auto* side : {&memory_.source, &memory_.destination}) {
    for (const HostBytes& buffer : *side) {
      bytes += buffer.size() + kRoom;
    }
  }
  std::vector<LocalBuffer> weights;
  for (HostBytes& buffer : memory_.source) {
    weights.push_back(host_buffer(buffer.data(), buffer.size()));
  }
  compute_scales(placed.problem, rank, weights);
  const Memory& on_device = memory_of(MemorySpace::device);
  arena_ = on_device.reserve(bytes, device);
  for (auto* side : {&memory_.source, &memory_.destination}) {
    const bool source = side == &memory_.source;
    for (HostBytes& buffer : *side) {
      LocalBuffer lent = host_buffer(buffer.data(), buffer.size());
      const bool here = which == OnDevice::all || (which == OnDevice::sources && source) ||
                        (which == OnDevice::destinations && !source) ||
                        (which == OnDevice::some && random() % 2 == 0);
      if (buffer.empty()) {
        lent = {};
      } else if (here) {
        const std::uint64_t shift = random() % 16;
        lent = arena_->take(buffer.size() + shift).from(shift);
        on_device.write(lent, buffer);
      }
      (source ? buffers_.source : buffers_.destination).push_back(lent);
    }
  }
}

void LentMemory::clear_destinations() {
  for (std::size_t i = 0; i < buffers_.destination.size(); ++i) {
    const HostBytes untouched(memory_.destination[i].size(), std::byte{0xCD});
    memory_of(buffers_.destination[i]).write(buffers_.destination[i], untouched);
  }
}

std::vector<HostBytes> LentMemory::destinations() const {
  std::vector<HostBytes> out = memory_.destination;
  for (std::size_t i = 0; i < out.size(); ++i) {
    memory_of(buffers_.destination[i]).read(buffers_.destination[i], out[i]);
  }
  return out;
}

std::set<std::string> move_random_problems(Group& group, Transport& transport, int device,
                                           std::uint64_t seed, std::uint64_t cases) {
  const Registries registries = builtin_registries();
  std::vector<std::string> planners;
  for (const auto& entry : registries.planners.entries()) {
    planners.push_back(entry.first);
  }
  transport.connect(group, in_a_minute());
  std::set<std::string> paths;
  for (std::uint64_t i = seed; i < seed + cases; ++i) {
    std::mt19937_64 random(i);
    PlacedLimits limits;
    limits.ranks = group.size();
    limits.elements = i % 3 == 0 ? 20'000 : 160;
    const PlacedProblem placed = placed_problem(random, limits);
    const Plan plan = registries.planners.create(planners[i % planners.size()], {})
                          ->plan(placed.problem, Topology::single_island(group.size()));
    const auto which = static_cast<OnDevice>(i % 4);
    LentMemory lent(placed, group.rank(), which, device, random);
    Program program = make_program(plan, placed.problem, group.rank());
    program.world_size = group.size();
    const auto session = transport.prepare(program, lent.buffers(), in_a_minute());
    for (std::uint64_t round = 1; round <= 2; ++round) {
      lent.clear_destinations();
      session->start(round, in_a_minute());
      for (const PeerTraffic& peer : session->wait(in_a_minute()).peers) {
        paths.insert(peer.path);
      }
      if (lent.destinations() != placed_expectation(placed, group.rank())) {
        throw std::runtime_error("bytes of M2N_TEST_SEED=" + std::to_string(i) +
                                 " differ in round " + std::to_string(round));
      }
      group.barrier("checked", in_a_minute());
    }
  }
  return paths;
}

}  // namespace m2n::testing
