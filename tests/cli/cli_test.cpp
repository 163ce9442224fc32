// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The program as a person or a script meets it: results, exit status, and one sentence for each
/// kind of bad input, with nothing written.

#include <algorithm>
#include <boost/json.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <sstream>

#include "core/api/builtin.hpp"
#include "core/io/dump.hpp"
#include "core/io/safetensors.hpp"
#include "core/tensor/digest.hpp"
#include "tests/cli/support.hpp"
#include "tests/support/run_program.hpp"
#include "tests/support/temporary_folder.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace json = boost::json;
using testing::list;
using testing::m2n;
using testing::Outcome;
using testing::TemporaryFolder;

/// FSDP2 over TP to column-parallel workers.
const std::string kProblem = R"json({"parameters": [
  {"name": "w", "dtype": "bf16", "shape": [8, 8],
   "source": {"mesh": {"dims": [2, 2], "start": 0},
              "placements": ["StridedShard(0,2)", "Shard(0)"]},
   "destination": {"mesh": {"dims": [2], "ranks": [4, 5]}, "placements": ["Shard(1)"]}}]})json";

/// A problem of one parameter with the given sides.
std::string problem(const std::string& source, const std::string& destination,
                    const std::string& dtype = "f32", const std::string& shape = "[4, 6]") {
  return R"({"parameters": [{"name": "w", "dtype": ")" + dtype + R"(", "shape": )" + shape +
         R"(, "source": )" + source + R"(, "destination": )" + destination + "}]}";
}
const std::string kHere =
    R"json({"mesh": {"dims": [2], "start": 0}, "placements": ["Shard(0)"]})json";
const std::string kThere =
    R"json({"mesh": {"dims": [2], "start": 2}, "placements": ["Shard(1)"]})json";

/// Input that must be refused: the files, the command, the exit status, and a part of the sentence.
struct Refusal {
  std::string why;
  std::string problem;  ///< Written as p.json.
  std::vector<std::string> words;
  int status;
  std::string part;
};
std::ostream& operator<<(std::ostream& os, const Refusal& c) { return os << c.why; }

std::vector<std::string> run(std::vector<std::string> more = {}) {
  std::vector<std::string> words{"run", "--problem", "p.json", "--dump", "dump.h5"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

const std::vector<Refusal> kRefusals = {
    {"an unknown command lists the commands", "", {"fly"}, 2, "no command 'fly'; the commands are"},
    {"an unknown planner lists the choices", kProblem, run({"--planner", "x"}), 2,
     "no planner 'x'; the choices are"},
    {"an unknown transport lists the choices", kProblem, run({"--transport", "x"}), 2,
     "no transport 'x'; the choices are"},
    {"an unknown sink lists the choices", kProblem, run({"--sink", "x"}), 2,
     "no sink 'x'; the choices are"},
    {"an unknown flag", kProblem, run({"--color", "red"}), 2, "unknown key 'color'"},
    {"an unknown option of a planner", kProblem, run({"--planner.speed", "9"}), 2,
     "has no option 'speed'"},
    {"a flag without its value", kProblem, {"run", "--problem"}, 2, "--problem needs a value"},
    {"a number that is none", kProblem, run({"--rounds", "many"}), 2, "run.rounds"},
    {"no rounds", kProblem, run({"--rounds", "0"}), 2, "run.rounds is 0; it must be 1 to"},
    {"nothing to run", "", {"run"}, 2, "no model: name an experiment file, --problem FILE"},
    {"a missing problem file", "", run(), 1, "cannot open p.json"},
    {"a missing experiment", "", {"run", "none.ini"}, 1, "cannot open none.ini"},
    {"a folder instead of a file", "", {"run", "."}, 1, ". is a folder"},
    {"text that is not JSON", "{\"parameters\": [", run(), 1,
     "p.json is not JSON (incomplete JSON) at line 1, column"},
    {"a key twice in one object", R"({"parameters": [], "parameters": []})", run(), 1,
     "has the key 'parameters' twice"},
    {"an unknown key", R"({"parameters": [], "extra": 1})", run(), 1, "unknown key 'extra'"},
    {"a parameter declared twice",
     R"({"parameters": [{"name": "w", "dtype": "f32", "shape": [4, 6], "source": )" + kHere +
         R"(, "destination": )" + kThere +
         R"(}, {"name": "w", "dtype": "f32", "shape": [4, 6], "source": )" + kHere +
         R"(, "destination": )" + kThere + "}]}",
     run(), 1, "declares parameter 'w' a second time"},
    {"a source that does not cover its tensor",
     problem(R"({"pieces": {"0": [{"box": [[0, 3], [0, 6]]}]}})", kThere), run(), 1,
     "'w': the source layout does not cover the tensor: no rank holds box [3:4, 0:6]"},
    {"a dtype mismatch without a cast",
     problem(kHere, R"json({"mesh": {"dims": [2], "start": 2}, "placements": ["Shard(1)"],
                          "dtype": "bf16"})json"),
     run(), 1, "the source has dtype f32 and the destination bf16, and no cast was asked for"},
    {"a cast that does not exist",
     problem(kHere, R"json({"mesh": {"dims": [2], "start": 2}, "placements": ["Shard(1)"],
                          "dtype": "i64", "cast": true})json"),
     run(), 1, "there is no cast between them"},
    {"two destination elements at one address",
     problem(kHere, R"({"pieces": {"2": [{"box": [[0, 2], [0, 6]], "buffer": "b"},
                                         {"box": [[2, 4], [0, 6]], "buffer": "b",
                                          "offset_bytes": 44}]}})"),
     run(), 1, "share byte 44 of a buffer on rank 2"},
    {"a piece outside of its tensor",
     problem(kHere, R"({"pieces": {"2": [{"box": [[0, 5], [0, 6]]}]}})"), run(), 1,
     "rank 2 piece [0:5, 0:6] leaves the tensor"},
    {"a pending reduction",
     problem(R"({"mesh": {"dims": [2], "start": 0}, "placements": ["Partial"]})", kThere), run(), 1,
     "'Partial' is a pending reduction"},
    {"a sharded scalar", problem(kHere, kThere, "f32", "[]"), run(), 1,
     "names dimension 0 of a tensor of rank 0"},
    {"a negative extent", problem(kHere, kThere, "f32", "[-4, 6]"), run(), 1, "negative extent"},
    {"more elements than 64 bits count", problem(kHere, kThere, "f32", "[4611686018427387904, 4]"),
     run(), 1, "does not fit"},
    {"an unknown dtype", problem(kHere, kThere, "bf17"), run(), 1, "bf17"},
    {"elements smaller than a byte", problem(kHere, kThere, "f4"), run(), 1, "f4"},
    {"a side in two forms",
     problem(
         R"json({"mesh": {"dims": [2], "start": 0}, "placements": ["Shard(0)"], "pieces": {}})json",
         kThere),
     run(), 1, "needs exactly one of"},
    {"an FSDP1 unit without its parameter",
     problem(R"({"fsdp1": {"unit": [], "ranks": [0, 1]}})", kThere), run(), 1, "without 'w'"},
    {"an FSDP1 unit that names a stranger",
     problem(R"({"fsdp1": {"unit": ["w", "v"], "ranks": [0, 1]}})", kThere), run(), 1,
     "names 'v', which is no parameter of this file"},
    {"a topology that leaves a rank out", kProblem, run({"--topology", "t.json"}), 1, "rank"},
    {"a plug-in that does not exist", kProblem, run({"--plugin", "./none.so"}), 2, "none.so"},
    {"a dump into a folder that does not exist",
     kProblem,
     {"run", "--problem", "p.json", "--dump", "none/dump.h5"},
     1,
     "none"},
};

/// A small BERT, enough to be a model: sizes as keys of an experiment.
std::string bert(const std::string& more) {
  return "[model]\nfamily = bert\nhidden_size = 8\nnum_hidden_layers = 1\n"
         "num_attention_heads = 2\nintermediate_size = 16\nvocab_size = 10\n"
         "max_position_embeddings = 6\ntype_vocab_size = 2\n" +
         more;
}

BOOST_AUTO_TEST_SUITE(cli)
BOOST_AUTO_TEST_SUITE(bad_input)

BOOST_DATA_TEST_CASE(is_one_sentence_and_an_exit_status, bdata::make(kRefusals), c) {
  const TemporaryFolder folder;
  if (!c.problem.empty()) {
    folder.write("p.json", c.problem);
  }
  folder.write("t.json", R"({"islands": [{"ranks": [0, 1]}], "link_gb_per_s": 100})");
  const std::vector<std::string> before = list(folder);
  const Outcome outcome = m2n(folder, c.words);
  BOOST_TEST(outcome.status == c.status);
  BOOST_TEST(outcome.out.empty());
  BOOST_TEST(outcome.err.find(c.part) != std::string::npos, outcome.err);
  BOOST_TEST(outcome.err.rfind("m2n: ", 0) == 0U);
  BOOST_TEST(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  BOOST_TEST((list(folder) == before), "a refusal leaves no file behind");
}

BOOST_AUTO_TEST_CASE(a_truncated_checkpoint_is_named) {
  const TemporaryFolder folder;
  folder.write("model.safetensors", std::string("\x40\0\0\0\0\0\0\0{\"a\":", 14));
  folder.write("e.ini", bert("[source]\nvalues = safetensors\npath = model.safetensors\n"
                             "[dump]\nfile = dump.h5\n"));
  const std::vector<std::string> before = list(folder);
  const Outcome outcome = m2n(folder, {"run", "e.ini"});
  BOOST_TEST(outcome.status == 1);
  BOOST_TEST(outcome.err.find("model.safetensors") != std::string::npos, outcome.err);
  BOOST_TEST(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  BOOST_TEST((list(folder) == before));
}

BOOST_AUTO_TEST_CASE(a_missing_shard_file_is_named) {
  const TemporaryFolder folder;
  folder.write("model.safetensors.index.json",
               R"({"weight_map": {"w": "model-00001-of-00002.safetensors"}})");
  folder.write("e.ini", bert("[source]\nvalues = safetensors\npath = .\n"));
  const Outcome outcome = m2n(folder, {"run", "e.ini"});
  BOOST_TEST(outcome.status == 1);
  BOOST_TEST(outcome.err.find("model-00001-of-00002.safetensors") != std::string::npos,
             outcome.err);
}

BOOST_AUTO_TEST_CASE(a_destination_section_that_nobody_feeds_is_named) {
  const TemporaryFolder folder;
  const std::vector<float> value(8, 1);
  const std::vector<TensorToWrite> tensors{{{"embeddings.LayerNorm.bias", DType::f32, {8}},
                                            reinterpret_cast<const std::byte*>(value.data())}};
  write_safetensors(folder.path() / "model.safetensors", tensors);
  folder.write("e.ini", bert("[source]\nvalues = safetensors\npath = model.safetensors\n"));
  const Outcome outcome = m2n(folder, {"run", "e.ini"});
  BOOST_TEST(outcome.status == 1);
  BOOST_TEST(outcome.err.find("embeddings.word_embeddings.weight") != std::string::npos,
             outcome.err);
}

BOOST_AUTO_TEST_CASE(an_unknown_option_of_a_source_lists_the_choices) {
  const TemporaryFolder folder;
  folder.write("e.ini", bert("[source]\nkind = fsdp\ncolour = red\n"));
  const Outcome outcome = m2n(folder, {"run", "e.ini"});
  BOOST_TEST(outcome.status == 2);
  BOOST_TEST(outcome.err.find("colour") != std::string::npos, outcome.err);
  BOOST_TEST(outcome.err.find("version") != std::string::npos, outcome.err);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE(results)

BOOST_AUTO_TEST_CASE(layout_prints_one_line_a_parameter_side_and_rank) {
  const TemporaryFolder folder;
  folder.write("p.json", kProblem);
  const Outcome outcome = m2n(folder, {"layout", "p.json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  std::istringstream lines(outcome.out);
  std::vector<json::object> parsed;
  for (std::string line; std::getline(lines, line);) {
    parsed.push_back(json::parse(line).as_object());
  }
  BOOST_TEST_REQUIRE(parsed.size() == 6U);
  const std::vector<std::int64_t> first_rows = {0, 4, 2, 6};  // field fault A01
  for (std::size_t rank = 0; rank < 4; ++rank) {
    BOOST_TEST((parsed[rank].at("side") == "source"));
    BOOST_TEST(parsed[rank].at("rank").as_int64() == static_cast<std::int64_t>(rank));
    const json::object& piece = parsed[rank].at("pieces").as_array().at(0).as_object();
    BOOST_TEST(piece.at("box").as_array().at(0).as_array().at(0).as_int64() == first_rows[rank]);
    BOOST_TEST((piece.at("strides") == json::array{8, 1}));
  }
  BOOST_TEST((parsed[5].at("local_shape") == json::array{8, 4}));
  BOOST_TEST((parsed[5].at("pieces").as_array().at(0).at("box") ==
              json::array{json::array{0, 8}, json::array{4, 8}}));
}

BOOST_AUTO_TEST_CASE(layout_lists_ranks_that_hold_nothing) {
  const TemporaryFolder folder;
  folder.write("p.json",
               problem(R"json({"mesh": {"dims": [4], "start": 0}, "placements": ["Shard(0)"]})json",
                       kThere, "f32", "[2, 6]"));
  const Outcome outcome = m2n(folder, {"layout", "p.json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  BOOST_TEST(outcome.out.find(R"("rank":3,"dtype":"f32","local_shape":[0,6],"pieces":[])") !=
             std::string::npos);
}

BOOST_AUTO_TEST_CASE(plan_prints_its_counts_as_json) {
  const TemporaryFolder folder;
  folder.write("p.json", kProblem);
  const Outcome outcome =
      m2n(folder, {"plan", "--problem", "p.json", "--planner", "direct", "--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::object plan = json::parse(outcome.out).as_object();
  BOOST_TEST((plan.at("planner") == "direct"));
  BOOST_TEST(plan.at("parameters").to_number<int>() == 1);
  BOOST_TEST(plan.at("regions").to_number<int>() == 8);
  BOOST_TEST(plan.at("messages").to_number<int>() == 8);
  BOOST_TEST(plan.at("bytes").to_number<int>() == 128);
  BOOST_TEST(plan.at("max_egress_bytes").to_number<int>() == 32);
  BOOST_TEST(plan.at("max_ingress_bytes").to_number<int>() == 64);
  BOOST_TEST(plan.at("digest").as_string().size() == 64U);
}

BOOST_AUTO_TEST_CASE(plan_prints_a_bound_beside_the_plan) {
  const TemporaryFolder folder;
  folder.write("p.json", kProblem);
  const Outcome outcome = m2n(folder, {"plan", "p.json", "--planner", "balanced", "--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::value certificate = json::parse(outcome.out).at("certificate");
  BOOST_TEST(certificate.at("bound_s").to_number<double>() > 0);
  BOOST_TEST(certificate.at("ratio").to_number<double>() >= 1);
  BOOST_TEST(m2n(folder, {"plan", "p.json"}).out.find("bound") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(simulate_says_how_long_and_which_port) {
  const TemporaryFolder folder;
  folder.write("p.json", kProblem);
  const Outcome outcome =
      m2n(folder, {"simulate", "p.json", "--planner", "relay", "--json", "--dump", "s.h5"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::value result = json::parse(outcome.out);
  BOOST_TEST(result.at("simulated_seconds").to_number<double>() > 0);
  BOOST_TEST(result.at("ratio").to_number<double>() >= 1);
  BOOST_TEST(!result.at("ports").as_array().empty());
  const DumpReader dump(folder.path() / "s.h5");
  BOOST_TEST(dump.verify() > 0U);
  std::vector<std::uint64_t> received(dump.bytes("/results/usage/received_bytes").size() / 8);
  const std::vector<std::byte> raw = dump.bytes("/results/usage/received_bytes");
  std::memcpy(received.data(), raw.data(), raw.size());
  BOOST_TEST(std::accumulate(received.begin(), received.end(), std::uint64_t{0}) == 128U);
  BOOST_TEST(!dump.bytes("/simulation/start").empty());
  BOOST_TEST(m2n(folder, {"inspect", "s.h5"}).status == 0);
}

BOOST_AUTO_TEST_CASE(simulated_ports_share_as_told) {
  const TemporaryFolder folder;
  folder.write("p.json", kProblem);
  const auto seconds = [&](const std::string& sharing) {
    const Outcome outcome = m2n(folder, {"simulate", "p.json", "--json", sharing});
    BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
    return json::parse(outcome.out).at("simulated_seconds").to_number<double>();
  };
  BOOST_TEST(seconds("--simulate.sharing=in_order") >= seconds("--simulate.sharing=fair"));
  BOOST_TEST(seconds("--simulate.in_flight=1") >= seconds("--simulate.sharing=proportional"));
  for (const auto& [flags, words] :
       {std::pair<std::vector<std::string>, std::string>{{"--simulate.sharing=loud"},
                                                         "proportional"},
        {{"--simulate.in_flight=-1"}, "in_flight"},
        {{"--simulate.in_flight=2", "--simulate.sharing=in_order"}, "in_order"}}) {
    std::vector<std::string> words_of_command = {"simulate", "p.json"};
    words_of_command.insert(words_of_command.end(), flags.begin(), flags.end());
    const Outcome refused = m2n(folder, words_of_command);
    BOOST_TEST(refused.status == 2);
    BOOST_TEST(refused.err.find(words) != std::string::npos, refused.err);
  }
}

BOOST_AUTO_TEST_CASE(relabel_keeps_bytes_local_where_ranks_are_on_both_sides) {
  const TemporaryFolder folder;  // rank r holds rows of part 1 - r: swapped, all is on the spot
  folder.write("p.json", problem(R"json({"mesh": {"dims": [2], "ranks": [0, 1]},
                                         "placements": ["Shard(0)"]})json",
                                 R"json({"mesh": {"dims": [2], "ranks": [1, 0]},
                                         "placements": ["Shard(0)"]})json"));
  const auto bytes = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"run", "p.json", "--json"});
    const Outcome outcome = m2n(folder, words);
    BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
    BOOST_TEST(json::parse(outcome.out).at("verified").as_bool());
    return json::parse(outcome.out).at("bytes").to_number<int>();
  };
  BOOST_TEST(bytes({}) == 96);
  BOOST_TEST(bytes({"--relabel"}) == 0);
}

BOOST_AUTO_TEST_CASE(run_verifies_and_reports_as_json) {
  const TemporaryFolder folder;
  folder.write("p.json", kProblem);
  const Outcome outcome = m2n(folder, {"run", "--problem", "p.json", "--planner", "direct",
                                       "--transport", "loopback", "--json", "--dump", "d.h5"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::object result = json::parse(outcome.out).as_object();
  BOOST_TEST(result.at("verified").as_bool());
  BOOST_TEST(result.at("verified_elements").to_number<int>() == 64);
  BOOST_TEST(result.at("bytes").to_number<int>() == 128);
  BOOST_TEST(result.at("seconds").to_number<double>() > 0);
  BOOST_TEST(result.at("gb_per_s").to_number<double>() > 0);
  BOOST_TEST((result.at("transport") == "loopback"));
  const Outcome inspected = m2n(folder, {"inspect", "d.h5"});
  BOOST_TEST(inspected.status == 0, inspected.err);
}

BOOST_AUTO_TEST_CASE(every_source_and_sink_runs_a_model) {
  struct Row {
    std::string source;
    std::string sink;
  };
  const std::vector<Row> rows = {
      {"kind = fsdp\nranks = 3\nversion = 1\n", "kind = inplace\nworkers = 2\n"},
      {"kind = fsdp\nranks = 4\nversion = 2\nreplicas = 2\n", "kind = load_weights\nworkers = 2\n"},
      {"kind = fsdp\nranks = 5\nversion = 2\n", "kind = null\nworkers = 1\n"},
      {"kind = fsdp\nranks = 2\n", "kind = inplace\nworkers = 4\ntensor_parallel = 2\n"},
  };
  for (const Row& row : rows) {
    BOOST_TEST_CONTEXT(row.source << row.sink) {
      const TemporaryFolder folder;
      folder.write("e.ini", bert("[source]\n" + row.source + "[sink]\n" + row.sink));
      const Outcome outcome = m2n(folder, {"run", "e.ini", "--json", "--rounds", "2"});
      BOOST_TEST(outcome.status == 0, outcome.err);
      BOOST_TEST(outcome.out.find("\"verified\":true") != std::string::npos, outcome.out);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_dump_gives_the_values_of_another_run) {
  const TemporaryFolder folder;
  folder.write("first.ini", bert("[source]\nkind = fsdp\nranks = 3\n[sink]\nworkers = 2\n"));
  BOOST_TEST_REQUIRE(m2n(folder, {"run", "first.ini", "--dump", "d.h5"}).status == 0);
  for (const char* side : {"source", "destination"}) {
    folder.write("second.ini", bert("[source]\nkind = fsdp\nversion = 1\nranks = 2\nvalues = hdf5\n"
                                    "path = d.h5\n[values]\nside = " +
                                    std::string(side) + "\n[sink]\nkind = load_weights\n"));
    const Outcome outcome = m2n(folder, {"run", "second.ini", "--json", "--dump", "e.h5"});
    BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
    BOOST_TEST(json::parse(outcome.out).at("verified").as_bool());
    // The oracle read the dump too: compare with what made it.
    const DumpReader dump(folder.path() / "e.h5");
    for (const DumpShard& shard : dump.shards(Role::destination)) {
      std::vector<float> values(static_cast<std::size_t>(element_count(shard.shape)));
      dump.read(shard, reinterpret_cast<std::byte*>(values.data()));
      std::vector<float> expected(values.size());
      fill_synthetic(shard.shape, Box::whole(shard.shape), DType::f32, synthetic_seed(shard.name),
                     reinterpret_cast<std::byte*>(expected.data()), row_major(shard.shape));
      BOOST_TEST((values == expected), shard.name);
    }
  }
  BOOST_TEST(m2n(folder, {"run", "second.ini", "--values.side", "left"}).status == 2);
}

BOOST_AUTO_TEST_CASE(a_dump_has_no_values_of_what_nobody_took) {
  const TemporaryFolder folder;
  const std::string w = problem(kHere, kThere);
  std::string both = w;
  both.insert(both.rfind("]}"), R"(, {"name": "v", "dtype": "f32", "shape": [4, 6], "source": )" +
                                    kHere + R"(, "destination": {"pieces": {"2": []}}})");
  folder.write("w.json", w);
  folder.write("both.json", both);
  BOOST_TEST_REQUIRE(m2n(folder, {"run", "both.json", "--dump", "d.h5"}).status == 0);
  const auto again = [&](const char* file) {
    return m2n(folder, {"run", file, "--source.values", "hdf5", "--source.path", "d.h5"});
  };
  BOOST_TEST(again("w.json").status == 0);
  const Outcome outcome = again("both.json");
  BOOST_TEST(outcome.status == 1);
  BOOST_TEST(outcome.err.find("'v'") != std::string::npos, outcome.err);
}

BOOST_AUTO_TEST_CASE(the_hdf5_sink_leaves_a_complete_dump_a_worker) {
  const TemporaryFolder folder;
  folder.write("p.json", kProblem);
  const Outcome outcome = m2n(folder, {"run", "p.json", "--sink", "hdf5", "--sink.path", "w.h5",
                                       "--rounds", "2", "--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  BOOST_TEST(json::parse(outcome.out).at("verified").as_bool());
  for (const Rank rank : {4, 5}) {
    const DumpReader dump(folder.path() / ("w.rank-" + std::to_string(rank) + ".h5"));
    BOOST_TEST(dump.fact("version").value() == "2");
    const std::vector<DumpShard> shards = dump.shards(Role::destination);
    BOOST_TEST_REQUIRE(shards.size() == 1U);
    BOOST_TEST((shards[0].compact.pieces[0].box == Box{{0, 4 * (rank - 4)}, {8, 4 * (rank - 3)}}));
    std::vector<std::uint16_t> values(32);
    dump.read(shards[0], reinterpret_cast<std::byte*>(values.data()));
    for (Index row = 0; row < 8; ++row) {
      for (Index column = 0; column < 4; ++column) {
        const auto flat = static_cast<std::uint64_t>(row * 8 + 4 * (rank - 4) + column);
        BOOST_TEST(values[static_cast<std::size_t>(row * 4 + column)] ==
                   synthetic_bits(DType::bf16, synthetic_seed("w"), flat));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(flags_win_over_the_file_and_paths_follow_the_file) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "sub");
  folder.write("sub/p.json", kProblem);
  folder.write("sub/e.ini", "[model]\nproblem = p.json\n[run]\nrounds = 3\n[dump]\nfile = d.h5\n");
  const Outcome outcome = m2n(folder, {"run", "sub/e.ini", "--rounds", "2", "--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  BOOST_TEST(json::parse(outcome.out).at("rounds").to_number<int>() == 2);
  BOOST_TEST(std::filesystem::exists(folder.path() / "sub/d.h5"));
}

BOOST_AUTO_TEST_CASE(list_shows_what_is_built_in) {
  const TemporaryFolder folder;
  const Outcome outcome = m2n(folder, {"list"});
  BOOST_TEST(outcome.status == 0, outcome.err);
  for (const char* name :
       {"direct", "loopback", "fsdp", "ep", "dtensor", "megatron", "safetensors", "synthetic",
        "hdf5", "inplace", "load_weights", "null", "bert", "llama"}) {
    BOOST_TEST(outcome.out.find(name) != std::string::npos, name);
  }
}

BOOST_AUTO_TEST_CASE(list_names_the_transports_that_commands_take_by_default) {
  const TemporaryFolder folder;
  const Outcome outcome = m2n(folder, {"list", "--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  std::map<std::string, std::string> transports;  // by command
  const json::value list = json::parse(outcome.out);
  for (const json::value& entry : list.as_array()) {
    if (const json::value* const commands = entry.as_object().if_contains("default_of")) {
      BOOST_TEST((entry.at("kind") == "transport"));
      for (const json::value& command : commands->as_array()) {
        transports[std::string(command.as_string())] = std::string(entry.at("name").as_string());
      }
    }
  }
  const bool ucx = builtin_registries().transports.contains("ucx");
  const std::string processes = ucx ? "ucx" : "loopback";
  const std::map<std::string, std::string> expected = {
      {"run", "loopback"},   {"replay", "loopback"}, {"bench", "loopback"},
      {"launch", processes}, {"trainer", processes}, {"worker", processes}};
  BOOST_TEST((transports == expected), outcome.out);
}

BOOST_AUTO_TEST_CASE(help_is_for_a_person) {
  const TemporaryFolder folder;
  for (const char* command : {"run", "plan", "simulate", "layout", "inspect", "list"}) {
    const Outcome outcome = m2n(folder, {command, "--help"});
    BOOST_TEST(outcome.status == 0);
    BOOST_TEST(outcome.out.find("usage: m2n " + std::string(command)) != std::string::npos);
  }
  BOOST_TEST(m2n(folder, {}).status == 2);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
