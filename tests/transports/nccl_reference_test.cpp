// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The schedules of transport "nccl_reference", run step by step in host memory: no CUDA here.

#include <boost/test/unit_test.hpp>
#include <deque>
#include <map>
#include <random>

#include "core/api/builtin.hpp"
#include "core/error.hpp"
#include "tests/support/random_cases.hpp"
#include "tests/transports/placed_memory.hpp"
#include "transports/nccl_reference/options.hpp"
#include "transports/nccl_reference/schedule.hpp"

namespace m2n::nccl_reference {
namespace {

using testing::HostBytes;

/// All ranks of a schedule, in turn. Messages of a pair, and broadcasts, arrive in the order in
/// which they were sent.
class World {
 public:
  World(const testing::PlacedProblem& placed, std::vector<Schedule> schedules)
      : schedules_(std::move(schedules)) {
    for (std::size_t r = 0; r < schedules_.size(); ++r) {
      const Schedule& s = schedules_[r];
      ranks_.push_back({testing::placed_memory(placed, static_cast<Rank>(r)),
                        HostBytes(s.scratch_bytes),
                        {HostBytes(s.full_bytes), HostBytes(s.full_bytes)},
                        {HostBytes(s.outgoing_bytes), HostBytes(s.outgoing_bytes)},
                        {HostBytes(s.incoming_bytes), HostBytes(s.incoming_bytes)}});
    }
  }

  /// Runs until every rank is through, or none can go on. @return whether all are.
  bool run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        while (ranks_[r].step < schedules_[r].steps.size() && advance(r)) {
          progress = true;
        }
      }
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].step < schedules_[r].steps.size()) {
        return false;
      }
    }
    return true;
  }

  const std::vector<HostBytes>& destination(std::size_t rank) const {
    return ranks_[rank].memory.destination;
  }
  std::uint64_t moved(Rank from, Rank to) const {
    const auto found = moved_.find({from, to});
    return found == moved_.end() ? 0 : found->second;
  }
  bool nothing_left() const {
    return std::all_of(wire_.begin(), wire_.end(), [](const auto& e) { return e.second.empty(); });
  }

 private:
  struct RankState {
    testing::PlacedMemory memory;
    HostBytes scratch;
    HostBytes full[2];
    HostBytes outgoing[2];
    HostBytes incoming[2];
    std::size_t step = 0;
    int phase = 0;
  };

  std::byte* at(std::size_t r, const Place& place) {
    RankState& rank = ranks_[r];
    const std::size_t slot = rank.step % 2;
    HostBytes* memory = nullptr;
    switch (place.area) {
      case Area::source:
        memory = &rank.memory.source[place.buffer];
        break;
      case Area::destination:
        memory = &rank.memory.destination[place.buffer];
        break;
      case Area::scratch:
        memory = &rank.scratch;
        break;
      case Area::full:
        memory = &rank.full[slot];
        break;
      case Area::outgoing:
        memory = &rank.outgoing[slot];
        break;
      case Area::incoming:
        memory = &rank.incoming[slot];
        break;
    }
    BOOST_TEST_REQUIRE(place.offset_bytes <= memory->size());
    return memory->data() + place.offset_bytes;
  }

  void copy(std::size_t r, const std::vector<Copy>& copies) {
    for (const Copy& c : copies) {
      copy_region(c.copy, at(r, c.from), at(r, c.to));
    }
  }

  void send(std::size_t r, Rank to, const std::byte* data, std::uint64_t bytes) {
    wire_[{static_cast<Rank>(r), to}].emplace_back(data, data + bytes);
    moved_[{static_cast<Rank>(r), to}] += bytes;
  }
  bool receive(std::size_t r, Rank from, std::byte* data, std::uint64_t bytes) {
    auto& queue = wire_[{from, static_cast<Rank>(r)}];
    if (queue.empty()) {
      return false;
    }
    BOOST_TEST_REQUIRE(queue.front().size() == bytes);
    std::copy(queue.front().begin(), queue.front().end(), data);
    queue.pop_front();
    return true;
  }

  /// One phase of one step. @return false when it has to wait.
  bool advance(std::size_t r) {
    RankState& rank = ranks_[r];
    const Schedule& schedule = schedules_[r];
    const Step& step = schedule.steps[rank.step];
    switch (rank.phase) {
      case 0:
        copy(r, step.pack);
        for (const Transfer& t : step.sends) {
          send(r, t.peer, at(r, t.at), t.bytes);
        }
        break;
      case 1: {
        std::map<Rank, std::size_t> wanted;
        for (const Transfer& t : step.receives) {
          ++wanted[t.peer];
        }
        for (const auto& [peer, count] : wanted) {
          if (wire_[{peer, static_cast<Rank>(r)}].size() < count) {
            return false;
          }
        }
        for (const Transfer& t : step.receives) {
          BOOST_TEST_REQUIRE(receive(r, t.peer, at(r, t.at), t.bytes));
        }
        copy(r, step.gather);
        break;
      }
      case 2:
        if (step.broadcast_bytes > 0) {
          std::byte* const whole = at(r, step.whole);
          if (static_cast<Rank>(r) == schedule.root) {
            for (const Rank member : schedule.members) {
              if (member != schedule.root) {
                send(r, member, whole, step.broadcast_bytes);
              }
            }
          } else if (!receive(r, schedule.root, whole, step.broadcast_bytes)) {
            return false;
          }
        }
        break;
      default:
        copy(r, step.unpack);
        rank.phase = -1;
        ++rank.step;
        break;
    }
    ++rank.phase;
    return true;
  }

  std::vector<Schedule> schedules_;
  std::vector<RankState> ranks_;
  std::map<std::pair<Rank, Rank>, std::deque<HostBytes>> wire_;
  std::map<std::pair<Rank, Rank>, std::uint64_t> moved_;
};

void moves_every_byte(const testing::PlacedProblem& placed, const Plan& plan,
                      const std::function<Schedule(const Program&)>& schedule,
                      const std::string& what) {
  std::vector<Schedule> schedules;
  std::map<std::pair<Rank, Rank>, std::uint64_t> told;
  for (Rank rank = 0; rank < placed.problem.world_size(); ++rank) {
    schedules.push_back(schedule(make_program(plan, placed.problem, rank)));
    for (const auto& [pair, bytes] : schedules.back().traffic) {
      BOOST_TEST_REQUIRE((pair.first == rank || pair.second == rank));
      const auto [known, fresh] = told.emplace(pair, bytes);
      BOOST_TEST_REQUIRE(known->second == bytes, what);  // both ends tell the same
    }
  }
  World world(placed, std::move(schedules));
  BOOST_TEST_REQUIRE(world.run(), what << ": stuck");
  BOOST_TEST_REQUIRE(world.nothing_left(), what);
  for (Rank rank = 0; rank < placed.problem.world_size(); ++rank) {
    BOOST_TEST_REQUIRE((world.destination(static_cast<std::size_t>(rank)) ==
                        testing::placed_expectation(placed, rank)),
                       what << ": rank " << rank);
  }
  for (const auto& [pair, bytes] : told) {
    BOOST_TEST_REQUIRE(world.moved(pair.first, pair.second) == bytes, what);
  }
}

std::shared_ptr<const Layout> rows(const Shape& shape, Rank first, Rank count) {
  return std::make_shared<const Layout>(
      Layout::sharded(shape, DType::bf16, Mesh({count}, first), {Placement::shard(0)}));
}
std::shared_ptr<const Layout> whole(const Shape& shape, Rank first, Rank count,
                                    DType dtype = DType::bf16) {
  return std::make_shared<const Layout>(
      Layout::sharded(shape, dtype, Mesh({count}, first), {Placement::replicate()}));
}

Program program_of(const Problem& problem, Rank rank) {
  const Plan plan = builtin_registries()
                        .planners.create("direct", {})
                        ->plan(problem, Topology::single_island(problem.world_size()));
  return make_program(plan, problem, rank);
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(nccl_reference_schedules)

BOOST_AUTO_TEST_CASE(random_problems_arrive_byte_for_byte_by_every_method) {
  const std::uint64_t seed = testing::test_seed();
  const Registries registries = builtin_registries();
  std::vector<std::string> planners;
  for (const auto& entry : registries.planners.entries()) {
    planners.push_back(entry.first);
  }
  for (std::uint64_t i = 0; i < testing::random_cases() / 20; ++i) {
    std::mt19937_64 random(seed + i);
    testing::PlacedLimits limits;
    limits.casts = false;
    const auto placed = testing::placed_problem(random, limits);
    const std::string planner = planners[i % planners.size()];
    const Plan plan =
        registries.planners.create(planner, {})->plan(placed.problem, Topology::single_island(8));
    const std::string what = "M2N_TEST_SEED=" + std::to_string(seed + i) + " " + planner;
    for (const bool alone : {false, true}) {
      moves_every_byte(
          placed, plan, [&](const Program& program) { return by_messages(program, alone); },
          what + (alone ? " by calls" : " by groups"));
    }
    for (const std::uint64_t pack :
         {std::uint64_t{0}, std::uint64_t{700}, std::uint64_t{1} << 30}) {
      moves_every_byte(
          placed, plan, [&](const Program& program) { return by_broadcast(program, pack); },
          what + " by packs of " + std::to_string(pack));
    }
  }
}

BOOST_AUTO_TEST_CASE(a_tensor_at_a_time_goes_in_place_where_it_lies_whole) {
  const Shape shape = {4, 8};
  const Problem problem = Problem::make(
      {{"w", shape, {whole(shape, 0, 1), {"w"}}, {whole(shape, 1, 2), {"w"}}, false}});
  for (Rank rank = 0; rank < 3; ++rank) {
    const Schedule schedule = by_broadcast(program_of(problem, rank), 0);
    BOOST_TEST_REQUIRE(schedule.steps.size() == 1U);
    BOOST_TEST(schedule.full_bytes == 0U);
    BOOST_TEST((schedule.steps[0].whole.area == (rank == 0 ? Area::source : Area::destination)));
    BOOST_TEST(schedule.steps[0].broadcast_bytes == 64U);
    BOOST_TEST(schedule.steps[0].unpack.empty());
  }
}

BOOST_AUTO_TEST_CASE(packs_hold_several_tensors_up_to_their_size_and_one_that_is_larger) {
  const Shape small = {4, 32};   // 256 bytes
  const Shape large = {64, 32};  // 4096 bytes
  std::vector<Parameter> parameters;
  for (const auto& [name, shape] :
       {std::pair{"a", small}, {"b", small}, {"c", small}, {"d", large}, {"e", small}}) {
    parameters.push_back(
        {name, shape, {rows(shape, 0, 2), {name}}, {whole(shape, 2, 1), {name}}, false});
  }
  const Problem problem = Problem::make(std::move(parameters));
  const Schedule root = by_broadcast(program_of(problem, 0), 512);
  std::vector<std::uint64_t> bytes;
  for (const Step& step : root.steps) {
    bytes.push_back(step.broadcast_bytes);
  }
  BOOST_TEST(bytes == (std::vector<std::uint64_t>{512, 256, 4096, 256}));
  BOOST_TEST(root.full_bytes == 4096U);
  BOOST_TEST((root.members == std::vector<Rank>{0, 2}));
  // The other trainer only brings its rows.
  const Schedule other = by_broadcast(program_of(problem, 1), 512);
  BOOST_TEST(other.full_bytes == 0U);
  BOOST_TEST((other.traffic == std::map<std::pair<Rank, Rank>, std::uint64_t>{{{1, 0}, 2560}}));
}

BOOST_AUTO_TEST_CASE(a_group_holds_a_parameter_and_a_call_a_region) {
  const Shape shape = {8, 4};
  const Problem problem =
      Problem::make({{"v", shape, {rows(shape, 0, 2), {"v"}}, {rows(shape, 2, 4), {"v"}}, false},
                     {"w", shape, {rows(shape, 0, 2), {"w"}}, {rows(shape, 2, 4), {"w"}}, false}});
  const Program program = program_of(problem, 0);
  BOOST_TEST(by_messages(program, false).steps.size() == 2U);
  BOOST_TEST(by_messages(program, true).steps.size() == 4U);
}

BOOST_AUTO_TEST_CASE(casts_are_refused_by_every_method) {
  const Shape shape = {4};
  const Problem problem = Problem::make(
      {{"w", shape, {whole(shape, 0, 1), {"w"}}, {whole(shape, 1, 1, DType::f32), {"w"}}, true}});
  const Program program = program_of(problem, 0);
  for (const auto& refused : {refusal([&] { by_messages(program, false); }),
                              refusal([&] { by_broadcast(program, 0); })}) {
    BOOST_TEST(refused.find("does not cast") != std::string::npos, refused);
    BOOST_TEST(refused.find("bf16 to f32") != std::string::npos, refused);
  }
}

BOOST_AUTO_TEST_CASE(unknown_options_and_values_are_refused_with_the_choices) {
  BOOST_TEST(refusal([] {
               ReferenceOptions::parse({{"method", "telepathy"}});
             }).find("packed, broadcast, group or calls") != std::string::npos);
  BOOST_TEST(refusal([] {
               ReferenceOptions::parse({{"unpack", "no"}});
             }).find("fused or each") != std::string::npos);
  BOOST_TEST(refusal([] {
               ReferenceOptions::parse({{"pack_bytes", "1e9"}});
             }).find("a whole number") != std::string::npos);
  BOOST_TEST(refusal([] {
               ReferenceOptions::parse({{"speed", "9"}});
             }).find("speed") != std::string::npos);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n::nccl_reference
