// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n run --memory device` with device memory that crashes whoever touches it on the host: every
/// source, sink and kind of plan, checked by the oracle; and what other transports say to it.

#include <boost/json.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include "core/api/builtin.hpp"
#include "core/io/safetensors.hpp"
#include "tests/cli/support.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace json = boost::json;
using testing::Outcome;
using testing::TemporaryFolder;
using Words = std::vector<std::string>;

std::string plugin() {
  const char* const file = std::getenv("M2N_PAGED");  // NOLINT(concurrency-mt-unsafe)
  BOOST_TEST_REQUIRE(file != nullptr, "M2N_PAGED names the plug-in");
  return file;
}

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

Words paged(const Words& words) {
  return words + Words{"--memory", "device", "--transport", "paged", "--plugin", plugin()};
}

/// The object that a command printed, after it went well.
json::object result(const TemporaryFolder& folder, const Words& words) {
  const Outcome outcome = testing::m2n(folder, words + Words{"--json"});
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  return json::parse(outcome.out).as_object();
}

/// Runs on devices and in host memory: verified, and every rank holds the same in the end.
void check_both(const Words& words) {
  const TemporaryFolder folder;
  const json::object there =
      result(folder, paged(Words{"run"} + words + Words{"--dump", "device.h5"}));
  BOOST_TEST(there.at("memory").as_string() == "device");
  BOOST_TEST(there.at("verified").as_bool());
  BOOST_TEST(there.at("verified_elements").as_int64() > 0);
  const json::object here = result(folder, Words{"run"} + words + Words{"--dump", "host.h5"});
  BOOST_TEST(here.at("verified_elements") == there.at("verified_elements"));
  const Outcome difference = testing::m2n(folder, {"diff", "host.h5", "device.h5"});
  BOOST_TEST(difference.out.find("memory     'host' and 'device'") != std::string::npos);
  BOOST_TEST(difference.out.find("transport  'loopback' and 'paged'") != std::string::npos);
  BOOST_TEST(difference.out.find("\n2 differences in ") != std::string::npos, difference.out);
}

const Words kDecoder = {"--model",
                        "llama",
                        "--model.model_type",
                        "qwen3",
                        "--model.hidden_size",
                        "32",
                        "--model.num_hidden_layers",
                        "2",
                        "--model.num_attention_heads",
                        "8",
                        "--model.num_key_value_heads",
                        "2",
                        "--model.head_dim",
                        "4",
                        "--model.intermediate_size",
                        "48",
                        "--model.vocab_size",
                        "203",
                        "--rounds",
                        "2"};
const Words kExperts = {"--model",
                        "qwen3_moe",
                        "--model.hidden_size",
                        "16",
                        "--model.num_hidden_layers",
                        "2",
                        "--model.num_attention_heads",
                        "4",
                        "--model.num_key_value_heads",
                        "2",
                        "--model.head_dim",
                        "4",
                        "--model.moe_intermediate_size",
                        "8",
                        "--model.num_experts",
                        "6",
                        "--model.vocab_size",
                        "64",
                        "--rounds",
                        "2"};

/// Trainers in bf16, workers in blocks of f8.
const Words kQuantised = {"--model.quantization_config",
                          "{}",
                          "--model.quantization_config.quant_method",
                          "fp8",
                          "--model.quantization_config.weight_block_size",
                          "[4,4]",
                          "--source.quantise",
                          "f8_e4m3",
                          "--source.quantise_blocks",
                          "4x4"};

struct Case {
  const char* why;
  Words words;
};
std::ostream& operator<<(std::ostream& os, const Case& c) { return os << c.why; }

const Words kTwoToTwo = {"--source.ranks", "2", "--sink.workers", "2"};
const Words kFourToTwo = {"--source.ranks", "4", "--sink.workers", "2"};

const std::vector<Case> kCases = {
    {"FSDP2, in place", kDecoder + kFourToTwo + Words{"--source.version", "2"}},
    {"FSDP1, whose shards start in the middle of rows",
     kDecoder + kFourToTwo + Words{"--source.version", "1"}},
    {"shadow", kDecoder + kTwoToTwo + Words{"--sink", "shadow"}},
    {"full tensors in a small pool",
     kDecoder + kTwoToTwo + Words{"--sink", "load_weights", "--run.pool_bytes", "20000"}},
    {"strict: some in place, some as full tensors",
     kDecoder + kTwoToTwo + Words{"--sink.direct", "strict"}},
    {"experts, expert-parallel trainers", kExperts + kTwoToTwo + Words{"--source", "ep"}},
    {"experts to expert-parallel workers",
     kExperts + kTwoToTwo + Words{"--sink.expert_parallel", "2"}},
    {"Megatron",
     kDecoder + kTwoToTwo +
         Words{"--source", "megatron", "--source.tensor_parallel", "2", "--source.heads", "8",
               "--source.groups", "2", "--source.head_dim", "4"}},
    {"DTensor", kDecoder + kTwoToTwo + Words{"--source", "dtensor"}},
    {"relayed between replicas",
     kDecoder + Words{"--source.ranks", "2", "--sink.workers", "4", "--sink.tensor_parallel", "2",
                      "--planner", "relay"}},
    {"broadcast", kDecoder + kTwoToTwo + Words{"--planner", "broadcast"}},
    {"cast in the move",
     kDecoder + kTwoToTwo +
         Words{"--model.dtype", "f32", "--sink.dtype", "bf16", "--sink.cast", "nearest_even"}},
    {"quantised in the move", kDecoder + kTwoToTwo + kQuantised},
    {"quantised, as full tensors", kDecoder + kTwoToTwo + kQuantised +
                                       Words{"--sink", "load_weights", "--run.pool_bytes", "2000"}},
    {"a sink that dumps", kDecoder + kTwoToTwo + Words{"--sink", "hdf5"}},
};

}  // namespace

BOOST_AUTO_TEST_SUITE(device_program)

BOOST_DATA_TEST_CASE(a_run_on_devices_holds_what_a_run_in_host_memory_holds, bdata::make(kCases),
                     one) {
  check_both(one.words);
}

BOOST_AUTO_TEST_CASE(values_of_a_checkpoint_are_read_in_parts_and_written) {
  const TemporaryFolder folder;
  const std::string problem = R"json({"parameters": [
    {"name": "w", "dtype": "bf16", "shape": [9, 8],
     "source": {"mesh": {"dims": [2, 2], "start": 0},
                "placements": ["StridedShard(0,2)", "Shard(0)"]},
     "destination": {"mesh": {"dims": [2], "ranks": [4, 5]}, "placements": ["Shard(1)"]}}]})json";
  folder.write("p.json", problem);
  std::vector<std::uint16_t> values(72);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::uint16_t>(0x3f80 + i);
  }
  const std::vector<TensorToWrite> tensors = {
      {{"w", DType::bf16, {9, 8}}, reinterpret_cast<const std::byte*>(values.data())}};
  write_safetensors(folder.path() / "w.safetensors", tensors);
  const json::object out =
      result(folder, paged({"run", "--problem", "p.json", "--source.values", "safetensors",
                            "--source.path", "w.safetensors", "--dump", "d.h5"}));
  BOOST_TEST(out.at("verified_elements").as_int64() == 72);
  const json::object again = result(folder, paged({"replay", "d.h5"}));
  BOOST_TEST(again.at("digests_compared").as_int64() > 0);
  BOOST_TEST(again.at("digests_equal") == again.at("digests_compared"));
}

BOOST_AUTO_TEST_CASE(processes_move_device_memory_over_ucx) {
  if (!builtin_registries().transports.contains("ucx")) {
    return;
  }
  for (const Words& more : {Words{}, kQuantised}) {
    const TemporaryFolder folder;
    const json::object out =
        result(folder, Words{"launch"} + kDecoder + kTwoToTwo + more +
                           Words{"--memory", "device", "--transport", "ucx", "--plugin", plugin()});
    BOOST_TEST(out.at("digest_verified").as_bool());
    BOOST_TEST(out.at("verified_elements").as_int64() > 0);
  }
}

BOOST_AUTO_TEST_CASE(transports_of_host_memory_refuse_devices_before_anything_is_filled) {
  const Registries registries = builtin_registries();
  for (const auto& [name, entry] : registries.transports.entries()) {
    if (registries.transports.create(name, {})->moves(MemorySpace::device)) {
      continue;
    }
    for (const char* command : {"run", "trainer", "worker", "launch"}) {
      const TemporaryFolder folder;
      const Outcome outcome = testing::m2n(
          folder, Words{command} + kDecoder +
                      Words{"--memory", "device", "--plugin", plugin(), "--transport", name});
      BOOST_TEST(outcome.status == 2);
      BOOST_TEST(
          outcome.err.find("transport '" + name + "' moves host memory alone") != std::string::npos,
          outcome.err);
      BOOST_TEST(testing::list(folder).empty());
    }
  }
}

BOOST_AUTO_TEST_CASE(a_transport_of_devices_refuses_host_memory_by_the_buffers_name) {
  const TemporaryFolder folder;
  const Outcome outcome = testing::m2n(
      folder, Words{"run"} + kDecoder + Words{"--plugin", plugin(), "--transport", "paged"});
  BOOST_TEST(outcome.status == 1);
  BOOST_TEST(outcome.err.find("transport 'paged' does not move host memory, where buffer '") !=
                 std::string::npos,
             outcome.err);
}

BOOST_AUTO_TEST_CASE(flags_of_memory_are_checked) {
  const TemporaryFolder folder;
  const auto says = [&](const Words& words, const std::string& part) {
    const Outcome outcome = testing::m2n(folder, Words{"run"} + kDecoder + words);
    BOOST_TEST(outcome.status == 2);
    BOOST_TEST(outcome.err.find(part) != std::string::npos, outcome.err);
  };
  says({"--memory", "gpu"}, "run.memory is 'gpu'; the choices are host, device");
  says({"--devices", "0"}, "run.devices is for weights on GPUs");
  says({"--memory", "device", "--devices", "0,x"}, "run.devices is '0,x'; it must be numbers");
  const std::string devices = "0," + std::to_string(1 << 20);
  says(paged({"--devices", devices}), "run.devices names GPU 1048576; this machine has ");
}

BOOST_AUTO_TEST_CASE(a_plan_for_devices_needs_none) {
  const TemporaryFolder folder;
  const json::object out = result(folder, Words{"plan"} + kDecoder + Words{"--memory", "device"});
  BOOST_TEST(out.at("parameters").as_int64() > 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
