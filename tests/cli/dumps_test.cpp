// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What the program does with a dump once it is there: replay, diff, export, and reading it back.

#include <hdf5.h>

#include <algorithm>
#include <boost/json.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <fstream>

#include "core/api/builtin.hpp"
#include "core/io/dump_tensors.hpp"
#include "core/io/safetensors.hpp"
#include "core/tensor/digest.hpp"
#include "tests/cli/support.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace json = boost::json;
using testing::list;
using testing::m2n;
using testing::Outcome;
using testing::TemporaryFolder;

/// Replicated destinations, so that a relay has something to pass on; uneven and strided sources; a
/// cast; names that need escapes; a scalar and an empty tensor.
const std::string kProblem = R"json({"parameters": [
  {"name": "w", "dtype": "bf16", "shape": [67, 48],
   "source": {"mesh": {"dims": [2, 2], "start": 0},
              "placements": ["StridedShard(0,2)", "Shard(0)"]},
   "destination": {"mesh": {"dims": [4], "start": 4}, "placements": ["Replicate"]}},
  {"name": "a/b", "dtype": "f32", "shape": [31, 3],
   "source": {"mesh": {"dims": [4], "start": 0}, "placements": ["Shard(0)"]},
   "destination": {"mesh": {"dims": [2, 2], "start": 4}, "placements": ["Replicate", "Shard(1)"],
                   "dtype": "bf16", "cast": true}},
  {"name": "scale", "dtype": "f32", "shape": [],
   "source": {"mesh": {"dims": [4], "start": 0}, "placements": ["Replicate"]},
   "destination": {"mesh": {"dims": [4], "start": 4}, "placements": ["Replicate"]}},
  {"name": "none", "dtype": "i64", "shape": [0, 4],
   "source": {"mesh": {"dims": [4], "start": 0}, "placements": ["Shard(0)"]},
   "destination": {"mesh": {"dims": [4], "start": 4}, "placements": ["Shard(1)"]}}]})json";

/// Runs a relay plan of kProblem and dumps it as @p file.
void run(const TemporaryFolder& folder, const std::string& file,
         const std::vector<std::string>& more = {}) {
  folder.write("p.json", kProblem);
  std::vector<std::string> words{"run", "p.json", "--planner", "relay", "--dump", file};
  words.insert(words.end(), more.begin(), more.end());
  const Outcome outcome = m2n(folder, words);
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
}

/// A column of numbers, without m2n's reader.
std::vector<double> column(const std::filesystem::path& file, const char* name) {
  const hid_t opened = H5Fopen(file.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t dataset = H5Dopen2(opened, name, H5P_DEFAULT);
  BOOST_TEST_REQUIRE(dataset >= 0);
  const hid_t space = H5Dget_space(dataset);
  std::vector<double> values(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)));
  BOOST_TEST(H5Dread(dataset, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) >=
             0);
  H5Sclose(space);
  H5Dclose(dataset);
  H5Fclose(opened);
  return values;
}

/// Those that move bytes, whether or not this machine can run them.
std::vector<std::string> transports() {
  std::vector<std::string> names;
  const Registries registries = builtin_registries();
  for (const auto& entry : registries.transports.entries()) {
    if (entry.first != "simulated") {
      names.push_back(entry.first);
    }
  }
  return names;
}

BOOST_AUTO_TEST_SUITE(cli)
BOOST_AUTO_TEST_SUITE(dumps)

BOOST_DATA_TEST_CASE(a_relay_plan_replays_over_every_transport_with_the_same_bytes,
                     bdata::make(transports()), transport) {
  const TemporaryFolder folder;
  run(folder, "a.h5");
  const Outcome probe = m2n(folder, {"run", "p.json", "--transport", transport});
  if (probe.status != 0) {
    BOOST_TEST(transport != "loopback", probe.err);
    BOOST_TEST_MESSAGE(transport << " does not run here: " << probe.err);
    return;
  }
  const Outcome outcome =
      m2n(folder, {"replay", "a.h5", "--transport", transport, "--dump", "b.h5", "--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::object out = json::parse(outcome.out).as_object();
  BOOST_TEST((out.at("planner") == "relay"));
  BOOST_TEST((out.at("transport").as_string() == transport));
  BOOST_TEST((out.at("verified") == true));
  BOOST_TEST(out.at("digests_compared").to_number<int>() > 20);
  BOOST_TEST((out.at("digests_equal") == out.at("digests_compared")));
  const DumpReader a(folder / "a.h5");
  const DumpReader b(folder / "b.h5");
  BOOST_TEST((out.at("digest").as_string() == a.fact("plan_digest").value()));
  BOOST_TEST(a.fact("plan_digest").value() == b.fact("plan_digest").value());
  BOOST_TEST((a.digests() == b.digests()));
  const Outcome diff = m2n(folder, {"diff", "a.h5", "b.h5", "--only", "plan", "--only",
                                    "parameters", "--only", "traffic", "--only", "tensors"});
  BOOST_TEST(diff.status == 0, diff.out);
}

BOOST_AUTO_TEST_CASE(a_replay_without_shards_makes_synthetic_values_up_again) {
  const TemporaryFolder folder;
  run(folder, "a.h5", {"--dump.shards", "no"});
  BOOST_TEST(DumpReader(folder / "a.h5").shards(Role::source).empty());
  const Outcome outcome = m2n(folder, {"replay", "a.h5", "--json", "--rounds", "2"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::object out = json::parse(outcome.out).as_object();
  BOOST_TEST((out.at("verified") == true));
  BOOST_TEST(out.at("digests_compared").to_number<int>() > 20);
  BOOST_TEST((out.at("digests_equal") == out.at("digests_compared")));
}

BOOST_AUTO_TEST_CASE(a_model_with_fused_destinations_replays) {
  const TemporaryFolder folder;
  folder.write("e.ini",
               "[model]\nfamily = llama\nmodel_type = qwen3\nhidden_size = 32\n"
               "num_hidden_layers = 2\nnum_attention_heads = 4\nnum_key_value_heads = 2\n"
               "head_dim = 8\nintermediate_size = 48\nvocab_size = 101\n"
               "tie_word_embeddings = false\n[source]\nkind = fsdp\nversion = 1\nranks = 3\n"
               "[sink]\nworkers = 4\n[dump]\nfile = a.h5\n");
  const Outcome first = m2n(folder, {"run", "e.ini", "--planner", "balanced"});
  BOOST_TEST_REQUIRE(first.status == 0, first.err);
  const Outcome outcome = m2n(folder, {"replay", "a.h5", "--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::object out = json::parse(outcome.out).as_object();
  BOOST_TEST((out.at("verified") == true));
  BOOST_TEST(out.at("digests_compared").to_number<int>() > 50);
  BOOST_TEST(
      (out.at("digest").as_string() == DumpReader(folder / "a.h5").fact("plan_digest").value()));
}

BOOST_AUTO_TEST_CASE(one_file_a_rank_holds_what_one_file_holds) {
  const TemporaryFolder folder;
  run(folder, "one.h5");
  run(folder, "many.h5", {"--dump.per_rank", "yes"});
  const std::vector<std::string> parts = dump_parts(folder / "many.h5");
  BOOST_TEST(parts.size() == 8U);
  const Outcome diff = m2n(folder, {"diff", "one.h5", "many.h5"});
  BOOST_TEST(diff.status == 0, diff.out);
  BOOST_TEST(diff.out.find("the same in") == 0U, diff.out);
  DumpReader(folder / "many.h5").verify();
  // Again: the old parts go, the new ones come.
  run(folder, "many.h5", {"--dump.per_rank", "yes"});
  const std::vector<std::string> names = list(folder);
  for (const std::string& part : parts) {
    BOOST_TEST(std::count(names.begin(), names.end(), part) == 0);
  }
  BOOST_TEST(names.size() == 3 + 8U);
}

BOOST_AUTO_TEST_CASE(a_failed_run_leaves_no_part_behind) {
  const TemporaryFolder folder;
  run(folder, "a.h5");
  const std::vector<std::string> before = list(folder);
  const Outcome outcome =
      m2n(folder, {"replay", "a.h5", "--dump", "none/b.h5", "--dump.per_rank", "yes"});
  BOOST_TEST(outcome.status == 1);
  BOOST_TEST((list(folder) == before));
}

BOOST_AUTO_TEST_CASE(diff_says_where_and_how_much) {
  const TemporaryFolder folder;
  run(folder, "a.h5");
  // Another layout of one parameter, and another planner.
  std::string other = kProblem;
  other.replace(other.find("Replicate\"]}},\n  {\"name\": \"a/b\""), 9, "Shard(1)");
  folder.write("q.json", other);
  BOOST_TEST_REQUIRE(
      m2n(folder, {"run", "q.json", "--planner", "direct", "--dump", "b.h5"}).status == 0);
  const Outcome outcome = m2n(folder, {"diff", "a.h5", "b.h5", "--json"});
  BOOST_TEST(outcome.status == 1);
  const json::object out = json::parse(outcome.out).as_object();
  BOOST_TEST((out.at("same") == false));
  std::vector<std::string> sections;
  for (const json::value& one : out.at("differences").as_array()) {
    sections.push_back(std::string(one.at("section").as_string()) + " " +
                       std::string(one.at("subject").as_string()));
  }
  for (const char* part : {"experiment plan_digest", "experiment planner", "parameters 'w'",
                           "plan regions", "traffic pairs of ranks"}) {
    BOOST_TEST(std::count(sections.begin(), sections.end(), part) == 1,
               part << ": " << outcome.out);
  }
  BOOST_TEST((out.at("tensors") == json::array()), "values depend on names alone");
  const Outcome tensors = m2n(folder, {"diff", "a.h5", "b.h5", "--only=tensors"});
  BOOST_TEST(tensors.status == 0, tensors.out);
}

BOOST_AUTO_TEST_CASE(diff_counts_the_elements_that_differ) {
  const TemporaryFolder folder;
  // Two dumps by hand: rank 1 of the second is wrong in two elements; its replica is right.
  const Shape shape{6, 5};
  Parameter parameter;
  parameter.name = "w";
  parameter.shape = shape;
  parameter.source = {
      std::make_shared<const Layout>(Layout::sharded(
          shape, DType::f32, Mesh({2, 2}, 0), {Placement::replicate(), Placement::shard(0)})),
      {"w"}};
  parameter.destination = parameter.source;
  const auto write = [&](const std::string& file, bool wrong) {
    DumpWriter dump(folder / file);
    for (Rank rank = 0; rank < 4; ++rank) {
      const CompactShard shard = parameter.source.layout->compact(rank);
      std::vector<float> values(15);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(15 * (rank % 2)) + static_cast<float>(i);
      }
      if (wrong && rank == 1) {
        values[7] += 2.5F;
        values[11] -= 0.5F;
      }
      dump.shard(Role::destination, rank, parameter, shard,
                 reinterpret_cast<const std::byte*>(values.data()));
    }
    dump.commit();
  };
  write("a.h5", false);
  write("b.h5", true);
  const Outcome outcome = m2n(folder, {"diff", "a.h5", "b.h5", "--json"});
  BOOST_TEST(outcome.status == 1, outcome.err);
  const json::value tensor = json::parse(outcome.out).at("tensors").as_array().at(0);
  BOOST_TEST((tensor.at("side") == "destination"));
  BOOST_TEST((tensor.at("name") == "w"));
  BOOST_TEST(tensor.at("elements").to_number<int>() == 60);
  BOOST_TEST(tensor.at("wrong").to_number<int>() == 2);
  BOOST_TEST(tensor.at("rank").to_number<int>() == 1);
  BOOST_TEST((tensor.at("at") == json::array{4, 2}));
  BOOST_TEST(tensor.at("largest").to_number<double>() == 2.5);
  const Outcome table = m2n(folder, {"diff", "a.h5", "b.h5"});
  BOOST_TEST(
      table.out.find("2 of 60 elements differ, the first at [4, 2] of rank 1: 0x41b00000 and "
                     "0x41c40000; the largest difference is 2.5") != std::string::npos,
      table.out);
  BOOST_TEST(m2n(folder, {"diff", "a.h5", "a.h5"}).status == 0);
}

BOOST_AUTO_TEST_CASE(diff_fails_as_diff_does) {
  const TemporaryFolder folder;
  run(folder, "a.h5");
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"diff"},
                                             {"diff", "a.h5"},
                                             {"diff", "a.h5", "a.h5", "a.h5"},
                                             {"diff", "a.h5", "none.h5"},
                                             {"diff", "a.h5", "p.json"},
                                             {"diff", "a.h5", "a.h5", "--colour"},
                                             {"diff", "a.h5", "a.h5", "--only", "rounds"}}) {
    const Outcome outcome = m2n(folder, words);
    BOOST_TEST(outcome.status == 2, outcome.err);
    BOOST_TEST(outcome.out.empty());
    BOOST_TEST(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1, outcome.err);
  }
  BOOST_TEST(
      m2n(folder, {"diff", "--help"}).out.find("exit status 0 same, 1 different, 2 trouble") !=
      std::string::npos);
}

/// Elements of a synthetic tensor, as m2n makes them up.
std::vector<std::byte> synthetic(const TensorInfo& info) {
  std::vector<std::byte> out(stored_bytes(info));
  fill_synthetic(info.shape, Box::whole(info.shape), info.dtype, synthetic_seed(info.name),
                 out.data(), row_major(info.shape));
  return out;
}

BOOST_AUTO_TEST_CASE(export_writes_global_tensors_and_those_of_a_rank) {
  const TemporaryFolder folder;
  run(folder, "a.h5");
  const Outcome outcome = m2n(folder, {"export", "a.h5", "out", "--side", "source"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const Checkpoint checkpoint(folder / "out");
  BOOST_TEST(checkpoint.catalogue().size() == 4U);
  for (const TensorInfo& info : checkpoint.catalogue()) {
    const StoredTensor& tensor = checkpoint.tensor(info.name);
    const std::vector<std::byte> expected = synthetic(info);
    BOOST_TEST(
        std::equal(expected.begin(), expected.end(), tensor.data, tensor.data + tensor.bytes),
        info.name);
  }

  BOOST_TEST_REQUIRE(m2n(folder, {"export", "a.h5", "r5.safetensors", "--rank", "5"}).status == 0);
  const Checkpoint worker(folder / "r5.safetensors");
  const DumpTensors tensors(folder / "a.h5", Role::destination);
  BOOST_TEST(worker.catalogue().size() == 4U);
  for (const TensorInfo& info : worker.catalogue()) {
    for (const DumpShard& shard : tensors.shards(info.name)) {
      if (shard.rank == 5) {
        const std::vector<std::byte> expected = tensors.read(shard);
        const StoredTensor& tensor = worker.tensor(info.name);
        BOOST_TEST((info.shape == shard.compact.local_shape));
        BOOST_TEST(
            std::equal(expected.begin(), expected.end(), tensor.data, tensor.data + tensor.bytes),
            info.name);
      }
    }
  }
  BOOST_TEST((worker.tensor("a/b").info.shape == Shape{31, 1}));

  for (const auto& [words, part] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"export", "a.h5"}, "has 1 names"},
           {{"export", "a.h5", "x", "--rank", "-1"}, "no rank"},
           {{"export", "a.h5", "x", "--side", "left"}, "destination, source"},
           {{"export", "a.h5", "x", "--side"}, "needs a value"},
           {{"export", "a.h5", "x", "--all"}, "no flag --all"}}) {
    const Outcome refused = m2n(folder, words);
    BOOST_TEST(refused.status == 2);
    BOOST_TEST(refused.err.find(part) != std::string::npos, refused.err);
  }
  const Outcome nobody = m2n(folder, {"export", "a.h5", "x", "--rank", "77"});
  BOOST_TEST(nobody.status == 1);
  BOOST_TEST(nobody.err.find("no shards of the destination on rank 77") != std::string::npos);
  BOOST_TEST(!std::filesystem::exists(folder / "x"));
}

BOOST_AUTO_TEST_CASE(the_trainers_of_a_dump_are_a_source_again) {
  const TemporaryFolder folder;
  const std::string sizes =
      "[model]\nfamily = llama\nmodel_type = qwen3\nhidden_size = 32\nnum_hidden_layers = 1\n"
      "num_attention_heads = 4\nnum_key_value_heads = 2\nhead_dim = 8\nintermediate_size = 48\n"
      "vocab_size = 101\ntie_word_embeddings = false\n";
  folder.write("e.ini", sizes +
                            "[source]\nkind = fsdp\nranks = 3\n[sink]\nworkers = 2\n"
                            "[dump]\nfile = a.h5\n");
  BOOST_TEST_REQUIRE(m2n(folder, {"run", "e.ini"}).status == 0);
  const std::string again = sizes + "[sink]\nworkers = 4\n[source]\nkind = hdf5\nranks = 3\n";
  folder.write("f.ini", again +
                            "values = hdf5\npath = a.h5\n[values]\nside = source\n[dump]\n"
                            "file = b.h5\n");
  const Outcome outcome = m2n(folder, {"run", "f.ini", "--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  BOOST_TEST((json::parse(outcome.out).at("verified") == true));
  const Problem a = DumpReader(folder / "a.h5").problem();
  const Problem b = DumpReader(folder / "b.h5").problem();
  BOOST_TEST_REQUIRE(a.parameters().size() == b.parameters().size());
  for (std::size_t i = 0; i < a.parameters().size(); ++i) {
    BOOST_TEST((*a.parameters()[i].source.layout == *b.parameters()[i].source.layout));
  }
  const DumpTensors before(folder / "a.h5", Role::source);
  const DumpTensors after(folder / "b.h5", Role::source);
  for (const TensorInfo& info : before.catalogue()) {
    for (std::size_t i = 0; i < before.shards(info.name).size(); ++i) {
      BOOST_TEST(
          (before.read(before.shards(info.name)[i]) == after.read(after.shards(info.name).at(i))));
    }
  }

  folder.write("g.ini", again);
  const Outcome made_up = m2n(folder, {"run", "g.ini"});
  BOOST_TEST(made_up.status == 2);
  BOOST_TEST(made_up.err.find("set source.values to hdf5") != std::string::npos, made_up.err);
  const Outcome few = m2n(folder, {"run", "f.ini", "--source.ranks", "2"});
  BOOST_TEST(few.status == 2);
  BOOST_TEST(few.err.find("source.ranks must be at least 3") != std::string::npos, few.err);
}

BOOST_AUTO_TEST_CASE(replay_refuses_what_is_the_dumps_to_say) {
  const TemporaryFolder folder;
  run(folder, "a.h5");
  for (const auto& [words, part] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"replay"}, "needs a dump"},
           {{"replay", "--json", "a.h5"}, "needs a dump, before"},
           {{"replay", "a.h5", "--planner", "direct"}, "no flag --planner"},
           {{"replay", "a.h5", "--sink=null"}, "no flag --sink"},
           {{"replay", "a.h5", "p.json"}, "takes one file"},
           {{"replay", "a.h5", "--transport", "pigeon"}, "no transport 'pigeon'"}}) {
    const Outcome outcome = m2n(folder, words);
    BOOST_TEST(outcome.status == 2, outcome.err);
    BOOST_TEST(outcome.err.find(part) != std::string::npos, outcome.err);
    BOOST_TEST(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1, outcome.err);
  }
  const Outcome none = m2n(folder, {"replay", "p.json"});
  BOOST_TEST(none.status == 1);
  BOOST_TEST(none.err.find("'p.json' is not an HDF5 file") != std::string::npos, none.err);
}

BOOST_AUTO_TEST_CASE(a_damaged_shard_stops_a_replay_and_is_named) {
  const TemporaryFolder folder;
  run(folder, "a.h5", {"--dump.per_rank", "yes"});
  const std::string part = dump_parts(folder / "a.h5").front();
  std::string content = testing::read_file(folder / part);
  const std::vector<std::byte> w = [&] {
    const DumpTensors tensors(folder / part, Role::source);
    return tensors.read(tensors.shards("w").front());
  }();
  const std::string bytes(reinterpret_cast<const char*>(w.data()), w.size());
  const std::size_t at = content.find(bytes);
  BOOST_TEST_REQUIRE(at != std::string::npos);
  content[at + 3] ^= 4;
  folder.write(part, content);
  const Outcome outcome = m2n(folder, {"replay", "a.h5"});
  BOOST_TEST(outcome.status == 1);
  BOOST_TEST(outcome.err.find("/w' of '") != std::string::npos, outcome.err);
  BOOST_TEST(outcome.err.find(part) != std::string::npos, outcome.err);
  BOOST_TEST(outcome.err.find("is damaged") != std::string::npos, outcome.err);
}

/// Four relay ranks pass on what two rounds bring; each pair's row says when.
BOOST_AUTO_TEST_CASE(a_dump_tells_when_each_peers_bytes_moved) {
  const TemporaryFolder folder;
  run(folder, "a.h5", {"--rounds", "2"});
  const std::filesystem::path file = folder.path() / "a.h5";
  const std::vector<double> seconds = column(file, "/rounds/seconds");
  const std::vector<double> start = column(file, "/rounds/peers/start");
  const std::vector<double> end = column(file, "/rounds/peers/end");
  BOOST_TEST_REQUIRE(!start.empty());
  const double longest = *std::max_element(seconds.begin(), seconds.end());
  for (std::size_t row = 0; row < start.size(); ++row) {
    BOOST_TEST(start[row] >= 0);  // false for NaN
    BOOST_TEST(start[row] <= end[row]);
    BOOST_TEST(end[row] <= longest);
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
