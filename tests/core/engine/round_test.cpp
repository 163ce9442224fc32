// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Full tensors in a bounded pool: how they are grouped, and loaders that misbehave.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <mutex>
#include <ostream>
#include <stdexcept>

#include "core/api/builtin.hpp"
#include "core/engine/local_job.hpp"
#include "core/engine/oracle.hpp"
#include "core/engine/round.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

constexpr Rank kTrainers = 2;
constexpr Rank kWorkers = 2;
constexpr Rank kWorld = kTrainers + kWorkers;

/// A tensor of a job: rows of 16 f32, and what it must arrive together with; "-" lands in place.
struct Tensor {
  std::string name;
  Index rows = 0;
  std::string together;

  bool direct() const { return together == "-"; }
};

using Loader = std::function<void(TensorStream&)>;

/// Keeps direct tensors whole, and gives the others to a loader.
class LoaderSink final : public WeightSink {
 public:
  LoaderSink(std::vector<Resolution> resolutions, Loader loader)
      : resolutions_(std::move(resolutions)), loader_(std::move(loader)) {}

  std::string_view name() const noexcept override { return "loader"; }
  std::vector<Resolution> resolve(std::span<const ParamSpec> params) override {
    for (std::size_t i = 0; i < params.size(); ++i) {
      loans_.push_back({params[i].name, params[i].dtype, params[i].shape, {}});
      if (resolutions_[i].mode == Mode::direct) {
        memory_.emplace_back(static_cast<std::size_t>(element_count(params[i].shape)) * 4);
        loans_.back().slots = {{memory_.back().data(), memory_.back().size(), {}, 0}};
      }
    }
    return resolutions_;
  }
  void begin(std::uint64_t) override { version_.reset(); }
  std::vector<ParamLoan> lend() override { return loans_; }
  void load_weights(TensorStream& stream) override { loader_(stream); }
  void commit(std::uint64_t version) override { version_ = version; }
  void roll_back() noexcept override { version_.reset(); }
  std::optional<std::uint64_t> version() const noexcept override { return version_; }
  std::vector<LiveParameter> live() override { return {}; }

 private:
  std::vector<Resolution> resolutions_;
  Loader loader_;
  std::vector<ParamLoan> loans_;
  std::vector<std::vector<std::byte>> memory_;
  std::optional<std::uint64_t> version_;
};

struct RoundSetup {
  explicit RoundSetup(const std::vector<Tensor>& tensors) : registries(builtin_registries()) {
    LayoutTable table;
    std::vector<Parameter> parameters;
    Catalogue catalogue;
    for (const Tensor& tensor : tensors) {
      const Shape shape{tensor.rows, 16};
      const auto rows = table.intern(
          Layout::sharded(shape, DType::f32, Mesh({kTrainers}, 0), {Placement::shard(0)}));
      const auto whole = table.intern(Layout::sharded(
          shape, DType::f32, Mesh({kWorkers}, kTrainers), {Placement::replicate()}));
      const Side side{whole, {"full:" + tensor.name}};
      parameters.push_back({tensor.name, shape, {rows, {tensor.name}}, side, false});
      params.push_back({tensor.name, DType::f32, shape, {rows, {tensor.name}}});
      resolutions.push_back({tensor.direct() ? Mode::direct : Mode::fallback, side, false, "",
                             tensor.direct() ? "" : tensor.together});
      catalogue.push_back({tensor.name, DType::f32, shape});
    }
    problem = std::make_unique<const Problem>(Problem::make(std::move(parameters)));
    values = registries.values.create("synthetic", {{}, catalogue});
  }

  std::vector<LocalRank> ranks(const Loader& loader) const {
    std::vector<LocalRank> all(kWorld);
    for (Rank rank = 0; rank < kWorld; ++rank) {
      LocalRank& parts = all[static_cast<std::size_t>(rank)];
      parts.transport = registries.transports.create("loopback", {});
      if (rank < kTrainers) {
        parts.source = registries.sources.create("declared", {{}, rank, kTrainers, values, params});
      } else {
        parts.sink = std::make_unique<LoaderSink>(resolutions, loader);
        parts.sink->resolve(params);
      }
    }
    return all;
  }

  LocalJobReport run(const std::string& planner, const Loader& loader,
                     const LocalJobOptions& options) const {
    const Plan plan =
        registries.planners.create(planner, {})->plan(*problem, Topology::single_island(kWorld));
    check_plan(plan, *problem);
    auto all = ranks(loader);
    return run_local_job(*problem, plan, resolutions, all, options);
  }

  Registries registries;
  std::vector<ParamSpec> params;
  std::vector<Resolution> resolutions;
  std::unique_ptr<const Problem> problem;
  std::shared_ptr<const TensorValues> values;
};

struct Grouping {
  const char* why;
  std::vector<Tensor> tensors;  // a row is 64 bytes: a line of the pool
  std::uint64_t pool_lines;
  std::vector<std::uint32_t> group_of;
  std::uint64_t largest_lines;
};
std::ostream& operator<<(std::ostream& os, const Grouping& g) { return os << g.why; }

const std::vector<Grouping> kGroupings = {
    {"nothing falls back", {{"a", 1, "-"}, {"b", 2, "-"}}, 1, {0, 0}, 0},
    {"everything fits at once", {{"a", 1, ""}, {"b", 2, ""}}, 3, {1, 1}, 3},
    {"touching the limit is inside", {{"a", 2, ""}, {"b", 2, ""}, {"c", 1, ""}}, 4, {1, 1, 2}, 4},
    {"parts of a pair are never split",
     {{"a", 3, ""}, {"q", 1, "qk"}, {"k", 1, "qk"}, {"b", 1, ""}},
     4,
     {1, 2, 2, 2},
     3},
    {"a pair over the limit is alone",
     {{"a", 1, ""}, {"q", 3, "qk"}, {"k", 3, "qk"}, {"b", 1, ""}},
     4,
     {1, 2, 2, 3},
     6},
    {"what stands between a pair comes with it; what lands in place does not count",
     {{"q", 1, "qk"}, {"b", 1, ""}, {"d", 50, "-"}, {"k", 1, "qk"}, {"e", 1, ""}},
     3,
     {1, 1, 0, 1, 2},
     3},
    {"pairs that overlap are one",
     {{"a", 1, "x"}, {"b", 1, "y"}, {"c", 1, "x"}, {"d", 1, "y"}, {"e", 1, ""}},
     1,
     {1, 1, 1, 1, 2},
     4},
    {"a limit of nothing gives each tensor its turn",
     {{"a", 1, ""}, {"b", 0, ""}, {"c", 2, ""}},
     0,
     {1, 2, 3},
     2},
};

/// Takes everything and lets go at once.
void take_all(TensorStream& stream) {
  while (stream.next()) {
  }
}

LocalJobOptions options_with_pool(std::uint64_t bytes) {
  LocalJobOptions options;
  options.rounds = 2;
  options.limits.pool_bytes = bytes;
  return options;
}

/// A fused pair, a tensor in place, and @p more pairs.
std::vector<Tensor> pairs(int count) {
  std::vector<Tensor> tensors;
  for (int i = 0; i < count; ++i) {
    const std::string number = std::to_string(i);
    tensors.push_back({"q" + number, 5, "qk" + number});
    tensors.push_back({"k" + number, 2, "qk" + number});
    tensors.push_back({"norm" + number, 3, "-"});
  }
  return tensors;
}

std::string error_of(const Loader& loader, const LocalJobOptions& options) {
  try {
    RoundSetup(pairs(4)).run("direct", loader, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

BOOST_AUTO_TEST_SUITE(engine)
BOOST_AUTO_TEST_SUITE(round)

BOOST_DATA_TEST_CASE(groups_keep_the_order_and_never_part_what_belongs_together,
                     bdata::make(kGroupings), c) {
  const RoundSetup setup(c.tensors);
  const RoundGroups groups = round_groups(*setup.problem, setup.resolutions, c.pool_lines * 64);
  BOOST_TEST(groups.group_of == c.group_of, boost::test_tools::per_element());
  BOOST_TEST(groups.largest_bytes() == c.largest_lines * 64);
}

/// Whatever the planner, its relays and stages included.
BOOST_DATA_TEST_CASE(full_tensors_come_in_declared_order_with_the_right_bytes,
                     bdata::make(std::vector<std::string>{"direct", "striped", "balanced", "relay",
                                                          "broadcast"}),
                     planner) {
  const RoundSetup setup(pairs(4));
  std::mutex mutex;
  Comparison verdict;
  std::vector<std::vector<std::string>> names(kWorld);
  LocalJobOptions options = options_with_pool(7 * 64);
  options.inspect_full = [&](Rank rank, std::size_t index, const FullTensor& tensor) {
    const Comparison one = verify_full(rank, tensor, *setup.values);
    const std::lock_guard lock(mutex);
    verdict.add(one);
    names[static_cast<std::size_t>(rank)].push_back(setup.params[index].name);
  };
  options.inspect = [&](const RankView& view) {
    if (view.sink != nullptr) {
      const Comparison one = verify_pieces(*setup.problem, view.rank, view.buffers->destination,
                                           *setup.values, setup.resolutions);
      const std::lock_guard lock(mutex);
      verdict.add(one);
    }
  };
  setup.run(planner, take_all, options);
  BOOST_TEST(verdict.ok(), verdict.first);
  BOOST_TEST(verdict.elements == std::uint64_t{kWorkers} * 4 * 10 * 16);
  const std::vector<std::string> expected = {"q0", "k0", "q1", "k1", "q2", "k2", "q3", "k3"};
  for (Rank rank = kTrainers; rank < kWorld; ++rank) {
    BOOST_TEST(names[static_cast<std::size_t>(rank)] == expected, boost::test_tools::per_element());
  }
}

/// Without it the peak would grow with the model.
BOOST_AUTO_TEST_CASE(the_pool_is_as_large_as_the_limit_or_one_group_for_any_number_of_tensors) {
  for (const int count : {1, 10, 300}) {
    const RoundSetup setup(pairs(count));
    const Plan plan = setup.registries.planners.create("direct", {})
                          ->plan(*setup.problem, Topology::single_island(kWorld));
    auto all = setup.ranks(take_all);
    for (const std::uint64_t limit : {std::uint64_t{64}, std::uint64_t{20 * 64}}) {
      const PreparedRound round(*setup.problem, plan, setup.resolutions, kTrainers,
                                {nullptr, all[kTrainers].sink.get()}, {limit, 0}, 1);
      BOOST_TEST(round.pool_bytes() <= std::max(limit, std::uint64_t{7 * 64}));
      BOOST_TEST(round.pool_bytes() >= 7 * 64U);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_loader_that_keeps_a_group_is_refused_the_next_and_sees_no_wrong_byte) {
  std::vector<FullTensor> kept;
  std::mutex mutex;
  const auto keeper = [&](TensorStream& stream) {
    while (const auto tensor = stream.next()) {
      const std::lock_guard lock(mutex);
      kept.push_back(*tensor);
    }
  };
  const std::string error = error_of(keeper, options_with_pool(7 * 64));
  BOOST_TEST(error.find("asks for tensor 'q1' and still holds one of the group before") !=
                 std::string::npos,
             error);
  kept.clear();
  BOOST_TEST(error_of(keeper, [] {
               LocalJobOptions options = options_with_pool(1 << 20);
               options.rounds = 1;
               return options;
             }()) == "");  // one group: it may keep all of it
}

/// Until both halves of a pair are there, as loaders that build a layer do.
BOOST_AUTO_TEST_CASE(a_loader_that_waits_for_the_second_half_reads_the_first_unchanged) {
  const RoundSetup setup(pairs(6));
  std::mutex mutex;
  Comparison verdict;
  const auto deferred = [&](TensorStream& stream) {
    std::vector<FullTensor> pair;
    while (auto tensor = stream.next()) {
      pair.push_back(*tensor);
      tensor.reset();
      if (pair.size() == 2) {
        for (const FullTensor& half : pair) {
          const Comparison one = verify_full(0, half, *setup.values);
          const std::lock_guard lock(mutex);
          verdict.add(one);
        }
        pair.clear();
      }
    }
  };
  setup.run("direct", deferred, options_with_pool(64));
  BOOST_TEST(verdict.ok(), verdict.first);
  BOOST_TEST(verdict.elements == std::uint64_t{kWorkers} * 2 * 6 * 7 * 16);
}

BOOST_AUTO_TEST_CASE(a_loader_that_stops_early_fails_the_round) {
  const std::string error =
      error_of([](TensorStream& stream) { (void)stream.next(); }, options_with_pool(7 * 64));
  BOOST_TEST(error.find("returned before it took tensor 'k0'") != std::string::npos, error);
}

BOOST_AUTO_TEST_CASE(a_rank_with_less_room_than_the_plan_brings_refuses_before_anything_moves) {
  LocalJobOptions options = options_with_pool(14 * 64);
  options.limits.budget_bytes = 10 * 64;
  const std::string error = error_of(take_all, options);
  BOOST_TEST(error.find("has room for 640 bytes of full tensors, but the plan brings 896") !=
                 std::string::npos,
             error);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
