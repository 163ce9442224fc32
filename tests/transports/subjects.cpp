// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/transports/subjects.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include "core/api/builtin.hpp"

namespace m2n::testing {

std::ostream& operator<<(std::ostream& os, const Subject& subject) {
  os << subject.name << " between " << subject.world;
  for (const auto& [key, value] : subject.options) {
    os << ", " << key << '=' << value;
  }
  return os;
}

std::vector<Subject> subjects() {
  const char* const given = std::getenv("M2N_TEST_TRANSPORT");  // NOLINT(concurrency-mt-unsafe)
  if (given != nullptr) {
    return {{given}};
  }
  std::vector<Subject> out;
  for (const World world : {World::threads, World::processes}) {
    out.push_back({"loopback", world});
    if (builtin_registries().transports.contains("ucx")) {
      out.push_back({"ucx", world});
      out.push_back({"ucx", world, {{"tls", "tcp"}}});  // as between machines
      // As between machines with network cards that write memory; here UCX emulates them.
      out.push_back({"ucx", world, {{"tls", "tcp"}, {"puts", "on"}, {"put_bytes", "1024"}}});
    }
  }
  return out;
}

std::vector<Subject> subjects_between_processes() {
  std::vector<Subject> out;
  for (const Subject& subject : subjects()) {
    // Emulated puts do not outlive a lost peer.
    if (subject.world == World::processes && !subject.options.contains("puts")) {
      out.push_back(subject);
    }
  }
  return out;
}

std::unique_ptr<Transport> make(const Subject& subject) {
  return builtin_registries().transports.create(subject.name, {subject.options});
}

void require(bool ok, const std::string& what) {
  if (!ok) {
    throw std::runtime_error(what);
  }
}

void none_failed(const std::vector<RankEnd>& ends) {
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    BOOST_TEST(ends[rank].failure.empty(), "rank " << rank << ": " << ends[rank].failure);
  }
}

Case Case::make(Index elements) {
  const auto sharded = std::make_shared<const Layout>(
      Layout::sharded({elements}, DType::i64, Mesh({2}, 0), {Placement::shard(0)}));
  const auto whole = std::make_shared<const Layout>(
      Layout::sharded({elements}, DType::i64, Mesh({2}, 1), {Placement::replicate()}));
  Problem problem = Problem::make({{"w", {elements}, {sharded, {"w"}}, {whole, {"w"}}, false}});
  const Registries registries = builtin_registries();
  Plan plan = registries.planners.create("direct", {})->plan(problem, Topology::single_island(3));
  return {std::move(problem), std::move(plan)};
}

Memory::Memory(const Case& c, Rank rank)
    : source(c.problem.buffer_bytes(Role::source, rank)[0] / 8),
      destination(c.problem.buffer_bytes(Role::destination, rank)[0] / 8, -1) {}

void Memory::fill(Index begin, std::int64_t version) {
  std::iota(source.begin(), source.end(), version * 1'000'000 + begin);
}

Buffers Memory::lend() {
  const auto buffer = [](std::vector<std::int64_t>& values) {
    return LocalBuffer{reinterpret_cast<std::byte*>(values.data()), values.size() * 8,
                       MemorySpace::host, 0};
  };
  return {{buffer(source)}, {buffer(destination)}};
}

bool Memory::holds(std::int64_t version) const {
  for (std::size_t i = 0; i < destination.size(); ++i) {
    if (destination[i] != version * 1'000'000 + static_cast<std::int64_t>(i)) {
      return false;
    }
  }
  return true;
}

}  // namespace m2n::testing
