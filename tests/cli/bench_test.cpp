// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n bench`: the matrix and its figures, cells that are refused, and transports that lie.

#include <algorithm>
#include <boost/json.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <set>
#include <sstream>

#include "core/io/dump.hpp"
#include "tests/cli/support.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace json = boost::json;
using testing::m2n;
using testing::Outcome;
using testing::TemporaryFolder;

std::string liar() {
  const char* const file = std::getenv("M2N_LIAR");  // NOLINT(concurrency-mt-unsafe)
  BOOST_TEST_REQUIRE(file != nullptr, "M2N_LIAR names the plug-in of the transport that lies");
  return file;
}

std::vector<std::string> bench(std::vector<std::string> more) {
  std::vector<std::string> words{"bench",      "--rounds", "3",           "--warm-ups", "1",
                                 "--deadline", "60",       "--limit-mib", "1"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// The lines of cells, behind that of the machine.
std::vector<json::object> cells_of(const Outcome& outcome) {
  std::istringstream lines(outcome.out);
  std::vector<json::object> cells;
  for (std::string line; std::getline(lines, line);) {
    cells.push_back(json::parse(line).as_object());
  }
  BOOST_TEST_REQUIRE(!cells.empty(), outcome.err);
  BOOST_TEST_REQUIRE(cells.front().contains("env"), "the first line is about the machine");
  cells.erase(cells.begin());
  return cells;
}

std::string text(const json::object& cell, const char* key) {
  return std::string(cell.at(key).as_string());
}
double number(const json::object& cell, const char* key) {
  return cell.at(key).to_number<double>();
}

BOOST_AUTO_TEST_SUITE(cli)
BOOST_AUTO_TEST_SUITE(bench_command)

BOOST_AUTO_TEST_CASE(every_planner_goes_with_every_transport_and_workload) {
  const TemporaryFolder folder;
  const Outcome outcome =
      m2n(folder, bench({"--planner", "all", "--transport", "loopback,simulated", "--trainers", "3",
                         "--workers", "2", "--workload",
                         "5x6KiB:rows,5x6KiB:columns,5x6KiB:cross,5x6KiB:replicated_sources,"
                         "5x6KiB:replicated_destinations,5x6KiB:slices-64,5x6KiB:cast",
                         "--json"}));
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  std::set<std::string> planners;
  std::set<std::string> seen;
  for (const json::object& cell : cells_of(outcome)) {
    BOOST_TEST_CONTEXT(json::serialize(cell)) {
      const bool moves = text(cell, "transport") == "loopback";
      BOOST_TEST(text(cell, "status") == "ok");
      BOOST_TEST(cell.at("verified").as_bool() == moves);
      BOOST_TEST(cell.at("moves_bytes").as_bool() == moves);
      const bool twice = text(cell, "workload").ends_with("replicated_destinations") ||
                         text(cell, "workload").ends_with("slices-64");
      BOOST_TEST(number(cell, "payload_bytes") == 5 * 6 * 1024 * (twice ? 2 : 1));
      BOOST_TEST(number(cell, "tensors") == 5);
      BOOST_TEST(number(cell, "rounds") == 3);
      BOOST_TEST(number(cell, "trainers") == 3);
      BOOST_TEST(number(cell, "workers") == 2);
      const double median = number(cell, "transfer_seconds_p50");
      BOOST_TEST(number(cell, "transfer_seconds_min") > 0);
      BOOST_TEST(number(cell, "transfer_seconds_min") <= median);
      BOOST_TEST(median <= number(cell, "transfer_seconds_max"));
      BOOST_TEST(number(cell, "gb_per_s") == number(cell, "payload_bytes") / (median * 1e9),
                 boost::test_tools::tolerance(1e-9));
      BOOST_TEST(cell.at("of_limit").is_null() == !moves);
    }
    planners.insert(text(cell, "planner"));
    seen.insert(text(cell, "planner") + " " + text(cell, "transport") + " " +
                text(cell, "workload"));
  }
  BOOST_TEST(planners.contains("balanced"));
  BOOST_TEST(planners.contains("relay"));
  BOOST_TEST(planners.contains("broadcast"));
  BOOST_TEST(seen.size() == planners.size() * 2 * 7);
}

BOOST_AUTO_TEST_CASE(quantised_tensors_are_verified_and_counted_as_they_arrive) {
  const TemporaryFolder folder;
  const Outcome outcome =
      m2n(folder, bench({"--planner", "direct,relay", "--transport", "loopback", "--trainers", "2",
                         "--workers", "2", "--workload", "3x512KiB:quantised", "--json"}));
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const std::vector<json::object> cells = cells_of(outcome);
  BOOST_TEST_REQUIRE(cells.size() == 2U);
  for (const json::object& cell : cells) {
    BOOST_TEST(text(cell, "status") == "ok");
    BOOST_TEST(cell.at("verified").as_bool());
    // [512, 512] bytes to one of the workers, 4 x 4 scales to both.
    BOOST_TEST(number(cell, "payload_bytes") == 3 * (512 * 512 + 2 * 16 * 4));
  }
  // 96 rows each: the second ones begin inside of a block.
  const Outcome cut = m2n(folder, bench({"--trainers", "2", "--workers", "2", "--transport",
                                         "loopback", "--workload", "1x96KiB:quantised", "--json"}));
  BOOST_TEST((cut.out + cut.err).find("holds whole blocks") != std::string::npos,
             cut.out + cut.err);
}

/// Experts by name, fewer key heads than workers, a padded vocabulary.
const std::string kExperts = R"({"model_type": "qwen3_moe", "hidden_size": 32,
  "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
  "intermediate_size": 96, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2,
  "vocab_size": 130, "tie_word_embeddings": false, "torch_dtype": "bfloat16"})";

BOOST_AUTO_TEST_CASE(a_model_moves_tensor_by_tensor_scaled_as_told) {
  const TemporaryFolder folder;
  folder.write("experts.json", kExperts);
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words{"--workload", "./experts.json", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = m2n(folder, bench(words));
    BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
    const auto cells = cells_of(outcome);
    BOOST_TEST_REQUIRE(cells.size() == 1U);
    BOOST_TEST(cells[0].at("verified").as_bool(), json::serialize(cells[0]));
    return cells[0];
  };
  constexpr int kLayer = 9 + 3 * 8;  // tensors of one
  const auto whole = run({});
  BOOST_TEST(text(whole, "scaled").empty());
  BOOST_TEST(number(whole, "tensors") == 3 + 6 * kLayer);
  const auto half = run({"--scale", "0.5"});
  BOOST_TEST(text(half, "scaled") == "3 of 6 layers");
  BOOST_TEST(number(half, "tensors") == 3 + 3 * kLayer);
  // Norms, router and one half of the key heads lie at more than one of four workers.
  const auto cut = run({"--trainers", "3", "--workers", "4"});
  BOOST_TEST(number(cut, "tensors") == 3 + 6 * kLayer);
  BOOST_TEST(number(cut, "payload_bytes") > number(whole, "payload_bytes"));
  BOOST_TEST(number(cut, "payload_bytes") < 2 * number(whole, "payload_bytes"));
}

BOOST_AUTO_TEST_CASE(published_models_go_by_name) {
  const TemporaryFolder folder;
  const Outcome outcome =
      m2n(folder, {"bench", "--workload", "gpt2", "--scale", "0.05", "--rounds", "1", "--warm-ups",
                   "0", "--run.verify", "no", "--limit-mib", "1", "--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const auto cells = cells_of(outcome);
  BOOST_TEST_REQUIRE(cells.size() == 1U);
  BOOST_TEST(text(cells[0], "scaled") == "1 of 12 layers");
}

BOOST_AUTO_TEST_CASE(a_cut_that_a_model_does_not_allow_is_a_row_with_the_reason) {
  const TemporaryFolder folder;
  folder.write("experts.json", kExperts);
  const Outcome outcome =
      m2n(folder, bench({"--workload", "./experts.json,2x4KiB", "--workers", "3", "--json"}));
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const auto cells = cells_of(outcome);
  BOOST_TEST_REQUIRE(cells.size() == 2U);
  BOOST_TEST(text(cells[0], "status") == "refused");
  BOOST_TEST(text(cells[0], "reason").find("num_attention_heads") != std::string::npos,
             text(cells[0], "reason"));
  BOOST_TEST(text(cells[1], "status") == "ok");
}

BOOST_AUTO_TEST_CASE(an_experiment_of_its_own_is_a_workload) {
  const TemporaryFolder folder;
  folder.write("mine.json", R"json({"parameters": [
    {"name": "w", "dtype": "f32", "shape": [8, 6],
     "source": {"mesh": {"dims": [2], "start": 0}, "placements": ["Shard(0)"]},
     "destination": {"mesh": {"dims": [3], "start": 1}, "placements": ["Shard(1)"]}}]})json");
  const Outcome outcome =
      m2n(folder, bench({"mine.json", "--json", "--planner", "direct,striped"}));
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const auto cells = cells_of(outcome);
  BOOST_TEST_REQUIRE(cells.size() == 2U);
  BOOST_TEST(text(cells[1], "workload") == "mine");
  BOOST_TEST(text(cells[1], "planner") == "striped");
  BOOST_TEST(cells[1].at("verified").as_bool());
  BOOST_TEST(number(cells[1], "workers") == 3);
}

BOOST_AUTO_TEST_CASE(a_word_without_a_key_belongs_to_the_value_before_it) {
  const TemporaryFolder folder;
  const std::string islands = R"({"islands": [{"ranks": [0, 1]}], "link_gb_per_s": 10})";
  folder.write("a:b.json", islands);
  const Outcome outcome = m2n(folder, bench({"--workload", "1x1MiB", "--json", "--transport",
                                             "simulated:topology=./a:b.json"}));
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const auto cells = cells_of(outcome);
  BOOST_TEST_REQUIRE(cells.size() == 1U);
  BOOST_TEST(text(cells[0], "transport") == "simulated:topology=./a:b.json");
  // 1 MiB over such a link, and no faster one.
  BOOST_TEST(number(cells[0], "transfer_seconds_p50") == 1048576 / 10e9,
             boost::test_tools::tolerance(0.05));
}

struct Lie {
  std::string why;
  std::string transport;
  int status;
  std::string cell;    ///< Status in its row.
  std::string reason;  ///< Part of it.
};
std::ostream& operator<<(std::ostream& os, const Lie& c) { return os << c.why; }

const std::vector<Lie> kLies = {
    {"one wrong bit", "liar", 1, "wrong", "rank 1, buffer "},
    {"one wrong bit in the last round alone", "liar:from=5", 1, "wrong",
     "has another digest than at its source"},
    {"what the cell before left does not count", "liar:mode=nothing", 1, "wrong",
     "rank 1, buffer "},
    {"nor what the verified round left", "liar:mode=nothing:from=2", 1, "wrong",
     "has another digest than at its source"},
    {"a round that breaks", "liar:mode=break:from=3", 1, "failed", "the liar's link broke"},
    {"a refusal is no failure", "liar:mode=refuse", 0, "refused", "the liar moves nothing today"},
};

BOOST_DATA_TEST_CASE(a_lying_transport_is_found_out_and_the_others_go_on, bdata::make(kLies), lie) {
  const TemporaryFolder folder;
  const Outcome outcome =
      m2n(folder, bench({"--plugin", liar(), "--workload", "20x4KiB", "--transport",
                         "loopback," + lie.transport + ",loopback", "--json"}));
  BOOST_TEST(outcome.status == lie.status);
  const auto cells = cells_of(outcome);
  BOOST_TEST_REQUIRE(cells.size() == 3U);
  BOOST_TEST(text(cells[0], "status") == "ok");
  BOOST_TEST(text(cells[1], "status") == lie.cell);
  BOOST_TEST_INFO(json::serialize(cells[1]));
  BOOST_TEST(text(cells[1], "reason").find(lie.reason) != std::string::npos);
  BOOST_TEST(!cells[1].at("verified").as_bool());
  BOOST_TEST(cells[1].at("transfer_seconds_p50").is_null());
  BOOST_TEST(text(cells[2], "status") == "ok");
  BOOST_TEST(cells[2].at("verified").as_bool());
  if (lie.status == 1) {
    BOOST_TEST_INFO(outcome.err);
    BOOST_TEST(outcome.err.find("m2n: 1 of 3 cells are wrong or failed, first 20x4KiB by planner "
                                "'direct' over transport '" +
                                lie.transport) != std::string::npos);
  }
}

BOOST_AUTO_TEST_CASE(a_workload_that_does_not_fit_is_rows_with_the_reason) {
  const TemporaryFolder folder;
  const Outcome outcome = m2n(folder, bench({"--workload", "2x1048576GiB,3x4KiB", "--scale", "1",
                                             "--planner", "direct,balanced", "--json"}));
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const auto cells = cells_of(outcome);
  BOOST_TEST_REQUIRE(cells.size() == 4U);
  for (const std::size_t i : {0U, 1U}) {
    BOOST_TEST(text(cells[i], "status") == "refused");
    BOOST_TEST(text(cells[i], "reason").find("the buffers take 4503599.6 GB of host memory") !=
               std::string::npos);
    BOOST_TEST(text(cells[i + 2], "status") == "ok");
  }
}

BOOST_AUTO_TEST_CASE(the_table_lines_up_and_the_dump_has_its_figures) {
  const TemporaryFolder folder;
  const Outcome outcome = m2n(folder, bench({"--workload", "7x64KiB,2x1MiB:cross", "--planner",
                                             "direct,balanced", "--dump", "bench.h5"}));
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  std::istringstream lines(outcome.out);
  std::string line;
  std::vector<std::string> table;
  while (std::getline(lines, line)) {
    if (line.starts_with("workload") || !table.empty()) {
      table.push_back(line);
    }
  }
  BOOST_TEST_REQUIRE(table.size() == 5U, outcome.out);
  const std::size_t result = table[0].find("result");
  BOOST_TEST_REQUIRE(result != std::string::npos);
  for (std::size_t i = 1; i < table.size(); ++i) {
    BOOST_TEST(table[i].substr(result) == "verified");
  }

  const DumpReader dump(folder.path() / "bench.h5");
  BOOST_TEST(dump.fact("kind").value_or("") == "bench");
  std::set<std::string> columns;
  for (const DumpEntry& entry : dump.entries()) {
    if (entry.path.starts_with("/results/")) {
      columns.insert(entry.path);
      const bool rounds = entry.path.starts_with("/results/bench_rounds/");
      BOOST_TEST(entry.shape[0] == (rounds ? 4 * 2 * 3 : 4), entry.path);
    }
  }
  BOOST_TEST(columns.contains("/results/bench/transfer_seconds_p50"));
  BOOST_TEST(columns.contains("/results/bench_rounds/seconds"));
}

struct Refusal {
  std::string why;
  std::vector<std::string> words;
  int status;
  std::string part;
};
std::ostream& operator<<(std::ostream& os, const Refusal& c) { return os << c.why; }

const std::vector<Refusal> kRefusals = {
    {"an unknown workload", {"--workload", "bert"}, 2, "no workload 'bert'; expected COUNTxSIZE"},
    {"a size without a unit", {"--workload", "3x4096"}, 2, "no workload '3x4096'"},
    {"a layout that is none",
     {"--workload", "3x4KiB:diagonal"},
     2,
     "no workload '3x4KiB:diagonal'"},
    {"slices that do not divide", {"--workload", "3x4KiB:slices-60"}, 2, "no workload"},
    {"an unknown planner", {"--planner", "direct,fast"}, 2, "no planner 'fast'; the choices are"},
    {"an unknown transport", {"--transport", "loopback,fast"}, 2, "no transport 'fast'"},
    {"a setting that a transport lacks", {"--transport", "loopback:speed=9"}, 2, "'speed'"},
    {"a setting without a value",
     {"--transport", "loopback:speed"},
     2,
     "transport 'loopback:speed' has 'speed' where KEY=VALUE was expected"},
    {"an empty name", {"--planner", "direct,,relay"}, 2, "has an empty name"},
    {"another kind of memory",
     {"--memory", "tape"},
     2,
     "--memory is 'tape'; the choices are host, device"},
    {"another order",
     {"--order", "random"},
     2,
     "--order is 'random'; the choices are shuffled, declared"},
    {"no rounds", {"--rounds", "0"}, 2, "--rounds is 0; it must be 1 to"},
    {"no trainers", {"--trainers", "0"}, 2, "--trainers is 0; it must be 1 to"},
    {"too large a scale", {"--scale", "2"}, 2, "--scale must be above 0 and at most 1"},
    {"a number that is none", {"--workers", "two"}, 2, "workers"},
    {"an unknown flag", {"--color", "red"}, 2, "unknown key 'color'"},
    {"a missing experiment", {"none.ini"}, 1, "cannot open none.ini"},
};

BOOST_DATA_TEST_CASE(wrong_requests_are_one_sentence, bdata::make(kRefusals), row) {
  const TemporaryFolder folder;
  std::vector<std::string> words{"bench"};
  words.insert(words.end(), row.words.begin(), row.words.end());
  const Outcome outcome = m2n(folder, words);
  BOOST_TEST(outcome.status == row.status);
  BOOST_TEST_INFO(outcome.err);
  BOOST_TEST(outcome.err.find(row.part) != std::string::npos);
  BOOST_TEST(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  BOOST_TEST(outcome.out.empty());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
