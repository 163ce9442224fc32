// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Trainers in bf16 and workers in block-scaled f8, from the command line: every way into a worker,
/// processes whose weights change, dumps, and what is refused.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <string>
#include <vector>

#include "tests/cli/support.hpp"

namespace m2n {
namespace {

using testing::m2n;
using testing::Outcome;
using testing::TemporaryFolder;
using Words = std::vector<std::string>;

/// Blocks of 4 x 4, some of them cut short; rows that two trainers share between blocks.
const std::string kDense = R"({"model_type": "qwen3", "hidden_size": 23, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 32,
  "vocab_size": 70, "torch_dtype": "bfloat16",
  "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}})";
const std::string kExperts = R"({"model_type": "deepseek_v3", "hidden_size": 16,
  "num_hidden_layers": 2, "num_attention_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 12,
  "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "intermediate_size": 32,
  "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
  "first_k_dense_replace": 1, "vocab_size": 70,
  "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}})";
const std::string kProblem = R"json({"parameters": [
  {"name": "w", "dtype": "f32", "shape": [3, 22, 17],
   "source": {"mesh": {"dims": [3], "start": 0}, "placements": ["Shard(0)"]},
   "destination": {"mesh": {"dims": [2], "start": 3}, "placements": ["Shard(2)"],
                   "dtype": "f8_e4m3", "quantise": {"blocks": [5, 4], "scales": "s"}}},
  {"name": "s", "dtype": "f32", "shape": [3, 5, 5],
   "destination": {"mesh": {"dims": [2], "start": 3}, "placements": ["Replicate"]}}]})json";

Words quantised(Words words, const Words& more = {}) {
  const Words common = {
      "--model", "config.json", "--source.quantise", "f8_e4m3", "--source.quantise_blocks",
      "4x4",     "--json"};
  words.insert(words.end(), common.begin(), common.end());
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

void verified(const Outcome& outcome) {
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  BOOST_TEST(outcome.out.find("\"verified\":true") != std::string::npos, outcome.out);
}

BOOST_AUTO_TEST_SUITE(cli)
BOOST_AUTO_TEST_SUITE(quantise)

BOOST_AUTO_TEST_CASE(a_model_of_bf16_arrives_in_blocks_of_f8_whichever_way_a_worker_takes_it) {
  const TemporaryFolder folder;
  folder.write("config.json", kDense);
  const Words run = {"run", "--source.ranks", "2", "--sink.workers", "4"};
  for (const Words& more :
       {Words{}, Words{"--source.quantise_from", "f32", "--planner", "relay"},
        Words{"--sink", "load_weights", "--run.pool_bytes", "1"},
        Words{"--sink", "shadow", "--rounds", "2", "--planner", "broadcast"},
        Words{"--sink.tensor_parallel", "1"}, Words{"--model.scales", "power_of_two"}}) {
    BOOST_TEST_CONTEXT((more.empty() ? "as it comes" : more.front() + " " + more[1])) {
      verified(m2n(folder, quantised(run, more)));
    }
  }
}

BOOST_AUTO_TEST_CASE(experts_arrive_in_blocks_of_f8) {
  const TemporaryFolder folder;
  folder.write("config.json", kExperts);
  verified(m2n(folder, quantised({"run", "--source.ranks", "1", "--sink.workers", "2"})));
}

/// The digests of what was sent and of what arrived are compared in every round.
BOOST_AUTO_TEST_CASE(weights_that_change_between_rounds_are_quantised_anew) {
  const TemporaryFolder folder;
  folder.write("config.json", kDense);
  const Outcome outcome = m2n(
      folder, quantised({"launch", "--source.ranks", "2", "--sink.workers", "2", "--rounds", "3"},
                        {"--log", "off"}));
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  for (const char* const said : {"\"ok\":true", "\"digest_verified\":true", "\"version\":3"}) {
    BOOST_TEST(outcome.out.find(said) != std::string::npos, said << " in " << outcome.out);
  }
}

BOOST_AUTO_TEST_CASE(a_problem_file_runs_and_its_dump_runs_again) {
  const TemporaryFolder folder;
  folder.write("p.json", kProblem);
  verified(m2n(folder, {"run", "p.json", "--json", "--dump.file", "one.h5"}));
  verified(m2n(folder, {"replay", "one.h5", "--json"}));
  verified(m2n(folder, {"run", "p.json", "--json", "--planner", "relay", "--relabel"}));
  const Outcome layout = m2n(folder, {"layout", "p.json"});
  BOOST_TEST(layout.status == 0, layout.err);
}

BOOST_AUTO_TEST_CASE(what_cannot_be_quantised_is_said_before_anything_moves) {
  const TemporaryFolder folder;
  folder.write("config.json", kDense);
  const auto says = [&](const Words& words, int status, const std::string& text) {
    const Outcome outcome = m2n(folder, words);
    BOOST_TEST(outcome.status == status, outcome.err);
    BOOST_TEST(outcome.err.find(text) != std::string::npos, outcome.err);
  };
  const Words run = {"run", "--source.ranks", "2", "--sink.workers", "2"};
  says(quantised({"run", "--source.ranks", "3", "--sink.workers", "2"}), 1,
       "a source that quantises holds whole blocks");
  says(quantised(run, {"--source.quantise_from", "f8_e5m2"}), 2, "expected f8_e4m3, of bf16");
  Words wrong = quantised(run);
  std::replace(wrong.begin(), wrong.end(), std::string("4x4"), std::string("4y4"));
  says(wrong, 2, "expected the extents of a block, like 128x128");
  std::replace(wrong.begin(), wrong.end(), std::string("4y4"), std::string("8x8"));
  says(wrong, 2, "blocks [8, 8] of");
  says({"run", "--model", "config.json", "--source.quantise_from", "bf16"}, 2,
       "expected source.quantise=f8_e4m3 as well");
  folder.write("config.json", R"({"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 70})");
  says(quantised(run), 2, "expected a model whose checkpoint is quantised in blocks");
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
