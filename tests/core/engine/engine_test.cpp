// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A job in one process: loans that differ from what was declared, ranks that fail, and an oracle
/// that sees a single wrong byte.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <ostream>
#include <stdexcept>

#include "core/api/builtin.hpp"
#include "core/engine/binding.hpp"
#include "core/engine/local_job.hpp"
#include "core/engine/oracle.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

/// Two parameters, rows over ranks 0 and 1, to columns over ranks 2 and 3.
struct Setup {
  Setup() : registries(builtin_registries()) {
    LayoutTable table;
    const auto rows =
        table.intern(Layout::sharded({4, 6}, DType::f32, Mesh({2}, 0), {Placement::shard(0)}));
    const auto columns =
        table.intern(Layout::sharded({4, 6}, DType::f32, Mesh({2}, 2), {Placement::shard(1)}));
    std::vector<Parameter> parameters;
    Catalogue catalogue;
    for (const char* name : {"a", "b"}) {
      parameters.push_back({name, {4, 6}, {rows, {name}}, {columns, {name}}, false});
      params.push_back({name, DType::f32, {4, 6}, {rows, {name}}});
      resolutions.push_back({Mode::direct, {columns, {name}}, false, ""});
      catalogue.push_back({name, DType::f32, {4, 6}});
    }
    problem = std::make_unique<const Problem>(Problem::make(std::move(parameters)));
    values = registries.values.create("synthetic", {{}, catalogue});
    plan = registries.planners.create("direct", {})->plan(*problem, Topology::single_island(4));
  }

  std::unique_ptr<WeightSource> source(Rank rank) const {
    return registries.sources.create("declared", {{}, rank, 4, values, params});
  }

  std::vector<LocalRank> ranks() const {
    std::vector<LocalRank> all(4);
    for (Rank rank = 0; rank < 4; ++rank) {
      LocalRank& parts = all[static_cast<std::size_t>(rank)];
      parts.transport = registries.transports.create("loopback", {});
      if (rank < 2) {
        parts.source = source(rank);
      } else {
        parts.sink = registries.sinks.create("inplace", {{}, rank, 2, nullptr, resolutions});
        parts.sink->resolve(params);
      }
    }
    return all;
  }

  Registries registries;
  std::vector<ParamSpec> params;
  std::vector<Resolution> resolutions;
  std::unique_ptr<const Problem> problem;
  std::shared_ptr<const TensorValues> values;
  Plan plan;
};

/// A source whose loans are altered on the way.
class AlteredSource final : public WeightSource {
 public:
  using Alter = std::function<void(std::vector<ParamLoan>&)>;
  AlteredSource(std::unique_ptr<WeightSource> source, Alter alter)
      : source_(std::move(source)), alter_(std::move(alter)) {}

  std::string_view name() const noexcept override { return "altered"; }
  const std::vector<ParamSpec>& params() const override { return source_->params(); }
  std::vector<ParamLoan> borrow(std::uint64_t version) override {
    std::vector<ParamLoan> loans = source_->borrow(version);
    alter_(loans);
    return loans;
  }

 private:
  std::unique_ptr<WeightSource> source_;
  Alter alter_;
};

struct Altered {
  std::string why;
  AlteredSource::Alter alter;
  std::string part;
};
std::ostream& operator<<(std::ostream& os, const Altered& c) { return os << c.why; }

const std::vector<Altered> kAltered = {
    {"another name", [](auto& loans) { loans[1].name = "c"; },
     "source rank 1 lends parameter 'c' where 'b' was declared"},
    {"another order", [](auto& loans) { std::swap(loans[0], loans[1]); },
     "lends parameter 'b' where 'a' was declared"},
    {"another dtype", [](auto& loans) { loans[1].dtype = DType::bf16; },
     "'b' with dtype bf16, but declared f32"},
    {"another shape",
     [](auto& loans) {
       loans[0].shape = {6, 4};
     },
     "'a' with shape [6, 4], but declared [4, 6]"},
    {"one parameter too few", [](auto& loans) { loans.pop_back(); },
     "lends 1 parameters, but declared 2; the first missing one is 'b'"},
    {"one parameter too many", [](auto& loans) { loans.push_back(loans[0]); },
     "lends 3 parameters, but declared 2"},
    {"a buffer that is too small", [](auto& loans) { loans[0].slots[0].bytes -= 1; },
     "with 47 bytes for buffer 'a', which needs 48"},
    {"no buffer", [](auto& loans) { loans[0].slots.clear(); }, "with 0 buffers, but declared 1"},
    {"an exception", [](auto&) { throw std::runtime_error("the trainer is out of memory"); },
     "the trainer is out of memory"},
};

BOOST_AUTO_TEST_SUITE(engine)
BOOST_AUTO_TEST_SUITE(local_job)

BOOST_AUTO_TEST_CASE(a_job_moves_and_commits_every_round) {
  const Setup setup;
  std::vector<LocalRank> ranks = setup.ranks();
  LocalJobOptions options;
  options.rounds = 3;
  const LocalJobReport report =
      run_local_job(*setup.problem, setup.plan, setup.resolutions, ranks, options);
  BOOST_TEST(report.round_seconds.size() == 3U);
  BOOST_TEST(ranks[2].sink->version().value() == 3U);
}

/// The rank that is at fault is named, not those that only saw it leave; nothing is committed.
BOOST_DATA_TEST_CASE(a_loan_that_differs_ends_the_job_before_a_byte_moves, bdata::make(kAltered),
                     c) {
  const Setup setup;
  std::vector<LocalRank> ranks = setup.ranks();
  ranks[1].source = std::make_unique<AlteredSource>(setup.source(1), c.alter);
  LocalJobOptions options;
  options.deadline = std::chrono::seconds(20);
  BOOST_CHECK_EXCEPTION(
      run_local_job(*setup.problem, setup.plan, setup.resolutions, ranks, options), std::exception,
      [&](const std::exception& error) {
        BOOST_TEST_MESSAGE(error.what());
        return std::string(error.what()).find(c.part) != std::string::npos;
      });
  BOOST_TEST(!ranks[2].sink->version().has_value());
  BOOST_TEST(!ranks[3].sink->version().has_value());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE(oracle)

BOOST_AUTO_TEST_CASE(one_wrong_byte_is_found_and_named) {
  const Setup setup;
  std::vector<LocalRank> ranks = setup.ranks();
  LocalJobOptions options;
  options.inspect = [&](const RankView& view) {
    if (view.sink == nullptr) {
      return;
    }
    const auto& buffers = view.buffers->destination;
    const Comparison right = verify_pieces(*setup.problem, view.rank, buffers, *setup.values);
    if (!right.ok() || right.elements != 24) {
      throw std::runtime_error("right bytes were called wrong: " + right.first);
    }
    // Row 3, local column 2 of 'b': the last element of the buffer.
    buffers[1].data[buffers[1].bytes - 2] ^= std::byte{1};
    const Comparison wrong = verify_pieces(*setup.problem, view.rank, buffers, *setup.values);
    const std::string element = view.rank == 2 ? "[3, 2] of 'b'" : "[3, 5] of 'b'";
    if (wrong.wrong != 1 || wrong.first.find(element) == std::string::npos) {
      throw std::runtime_error("a wrong byte was not named: " + wrong.first);
    }
  };
  BOOST_CHECK_NO_THROW(
      run_local_job(*setup.problem, setup.plan, setup.resolutions, ranks, options));
}

BOOST_AUTO_TEST_CASE(padding_that_is_not_zero_is_wrong) {
  const Setup setup;
  std::vector<float> live(8, 0);  // 6 elements of row 0 of 'a', then 2 of padding
  setup.values->read("a", {{0, 0}, {1, 6}}, reinterpret_cast<std::byte*>(live.data()), {6, 1});
  const WorkerModel model{
      {{"a", DType::f32, {8}, {{"a", {{0, 0}, {1, 6}}, 0, {6, 1}}}, {{{6}, {8}}}}}};
  const std::vector<LiveParameter> parameters = {
      {"a", DType::f32, {8}, {reinterpret_cast<std::byte*>(live.data()), 32, {}, 0}}};
  const Comparison right = verify_model(model, 0, parameters, *setup.values);
  BOOST_TEST(right.ok(), right.first);
  BOOST_TEST(right.elements == 8U);
  live[7] = 1;
  const Comparison wrong = verify_model(model, 0, parameters, *setup.values);
  BOOST_TEST(wrong.wrong == 1U);
  BOOST_TEST(wrong.first.find("padding") != std::string::npos, wrong.first);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
