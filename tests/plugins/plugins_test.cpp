// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/plugins.hpp"

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <string>
#include <vector>

#include "core/plan/problem.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace fs = std::filesystem;

/// The folder of the built plug-ins: the argument after "--".
fs::path folder() {
  const auto& suite = boost::unit_test::framework::master_test_suite();
  BOOST_REQUIRE(suite.argc > 1);
  return suite.argv[suite.argc - 1];
}

Problem replicated_to_sharded() {
  return Problem::parse(R"json({"parameters": [
    {"name": "w", "dtype": "bf16", "shape": [5, 6],
     "source": {"mesh": {"dims": [2, 2], "start": 0}, "placements": ["Replicate", "Shard(0)"]},
     "destination": {"mesh": {"dims": [2], "start": 4}, "placements": ["Shard(1)"]}},
    {"name": "b", "dtype": "f32", "shape": [],
     "source": {"mesh": {"dims": [3], "start": 0}, "placements": ["Replicate"]},
     "destination": {"mesh": {"dims": [2], "start": 4}, "placements": ["Replicate"]}}]})json",
                        "replicated_to_sharded");
}

struct Refusal {
  const char* why;
  const char* file;
  std::string text;  ///< Part of the message.
};
std::ostream& operator<<(std::ostream& out, const Refusal& row) { return out << row.why; }

const std::vector<Refusal> kRefusals = {
    {"another interface version", "other_version.so",
     "was built for interface version " + std::to_string(kInterfaceVersion + 1) +
         " and this m2n has version " + std::to_string(kInterfaceVersion)},
    {"no entry point", "no_register.so", "does not export m2n_plugin_register"},
    {"no version", "no_version.so", "does not export m2n_plugin_interface_version"},
    {"no such file", "nothing_here.so", "nothing_here.so: cannot open shared object file"},
    {"a folder", ".", "cannot load plug-in"},
};

}  // namespace

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(plugins)

BOOST_AUTO_TEST_CASE(a_planner_of_a_plugin_is_created_by_name_and_its_plan_is_proven) {
  Registries registries;
  load_plugin(folder() / "last_holder.so", registries);
  const auto planner = registries.planners.create("last_holder", {});
  BOOST_TEST(planner->name() == "last_holder");

  const Problem problem = replicated_to_sharded();
  const Topology topology = Topology::single_island(problem.world_size());
  const Plan plan = planner->plan(problem, topology);
  check_plan(plan, problem);
  const PlanSummary summary = summarize(plan, problem);
  BOOST_TEST(summary.bytes == 5 * 6 * 2 + 2 * 4);  // w once, b to both workers
  // Ranks 0 and 1 hold the same as 2 and 3, which come later; of b the last holder is rank 2.
  const std::vector<std::uint64_t> egress = {0, 0, 3 * 6 * 2 + 2 * 4, 2 * 6 * 2, 0, 0};
  BOOST_TEST(summary.egress_bytes == egress, boost::test_tools::per_element());
  for (Rank rank = 0; rank < problem.world_size(); ++rank) {
    BOOST_TEST(planner->plan_for(problem, topology, rank).digest == plan.digest);
  }
}

BOOST_AUTO_TEST_CASE(a_plugin_refuses_options_that_it_does_not_know) {
  Registries registries;
  load_plugin(folder() / "last_holder.so", registries);
  BOOST_CHECK_EXCEPTION(registries.planners.create("last_holder", {.options = {{"speed", "9"}}}),
                        Error, [](const Error& error) {
                          return error.code() == Errc::usage &&
                                 std::string(error.what()).find("'speed'") != std::string::npos;
                        });
}

BOOST_DATA_TEST_CASE(what_is_no_plugin_of_this_version_is_refused_by_name, bdata::make(kRefusals),
                     row) {
  Registries registries;
  const std::string path = (folder() / row.file).string();
  BOOST_CHECK_EXCEPTION(load_plugin(path, registries), Error, [&](const Error& error) {
    BOOST_TEST_INFO(error.what());
    const std::string text = error.what();
    return error.code() == Errc::usage && text.find(row.text) != std::string::npos &&
           text.find(path) != std::string::npos;
  });
  BOOST_TEST(registries.planners.entries().empty());
}

BOOST_AUTO_TEST_CASE(a_text_file_is_no_plugin) {
  const fs::path path = folder() / "text.so";
  std::ofstream(path) << "planner: fast\n";
  Registries registries;
  BOOST_CHECK_EXCEPTION(load_plugin(path, registries), Error, [&](const Error& error) {
    return error.code() == Errc::usage &&
           std::string(error.what()).find(path.string()) != std::string::npos;
  });
  fs::remove(path);
}

BOOST_AUTO_TEST_CASE(a_plugin_that_fails_halfway_adds_nothing) {
  Registries registries;
  const fs::path path = folder() / "taken_name.so";
  BOOST_CHECK_EXCEPTION(load_plugin(path, registries), Error, [&](const Error& error) {
    const std::string text = error.what();
    return error.code() == Errc::bad_argument && text.find(path.string()) != std::string::npos &&
           text.find("planner 'first_of_two' is registered twice") != std::string::npos;
  });
  BOOST_TEST(registries.planners.entries().empty());
}

BOOST_AUTO_TEST_CASE(a_relative_path_is_a_file_and_no_name_to_look_up) {
  Registries registries;
  load_plugin(fs::relative(folder() / "last_holder.so"), registries);
  BOOST_TEST(registries.planners.contains("last_holder"));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
