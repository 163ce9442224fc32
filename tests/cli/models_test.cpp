// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A model that is a folder: its config names the family, its files are the values, and what every
/// tensor does is explained.

#include <boost/json.hpp>
#include <boost/test/unit_test.hpp>
#include <string>
#include <vector>

#include "core/io/safetensors.hpp"
#include "tests/cli/support.hpp"

namespace m2n {
namespace {

namespace json = boost::json;
using testing::m2n;
using testing::Outcome;
using testing::TemporaryFolder;

/// Fewer key heads than workers, and a vocabulary with padding.
const std::string kConfig = R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
  "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "head_dim": 4, "intermediate_size": 12, "vocab_size": 70, "tie_word_embeddings": true,
  "torch_dtype": "float32", "rope_scaling": null})";

/// The model's tensors, every element different.
void write_weights(const TemporaryFolder& folder) {
  const std::string layer = "model.layers.";
  std::vector<std::pair<std::string, Shape>> shapes = {{"model.embed_tokens.weight", {70, 8}},
                                                       {"model.norm.weight", {8}}};
  for (const std::string l : {"0.", "1."}) {
    for (const char* norm : {"input_layernorm", "post_attention_layernorm"}) {
      shapes.push_back({layer + l + norm + ".weight", {8}});
    }
    const std::string attention = layer + l + "self_attn.";
    shapes.push_back({attention + "q_proj.weight", {16, 8}});
    shapes.push_back({attention + "k_proj.weight", {8, 8}});
    shapes.push_back({attention + "v_proj.weight", {8, 8}});
    shapes.push_back({attention + "o_proj.weight", {8, 16}});
    shapes.push_back({attention + "q_norm.weight", {4}});
    shapes.push_back({attention + "k_norm.weight", {4}});
    shapes.push_back({layer + l + "mlp.gate_proj.weight", {12, 8}});
    shapes.push_back({layer + l + "mlp.up_proj.weight", {12, 8}});
    shapes.push_back({layer + l + "mlp.down_proj.weight", {8, 12}});
  }
  std::vector<std::vector<float>> values;
  std::vector<TensorToWrite> tensors;
  float next = 1;
  for (const auto& [name, shape] : shapes) {
    values.emplace_back();
    for (Index i = 0; i < element_count(shape); ++i) {
      values.back().push_back(next++);
    }
  }
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    tensors.push_back({{shapes[i].first, DType::f32, shapes[i].second},
                       reinterpret_cast<const std::byte*>(values[i].data())});
  }
  write_safetensors(folder.path() / "model" / "model.safetensors", tensors);
}

BOOST_AUTO_TEST_SUITE(cli)
BOOST_AUTO_TEST_SUITE(models)

BOOST_AUTO_TEST_CASE(a_folder_with_a_config_and_weights_needs_no_other_file) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "model");
  folder.write("model/config.json", kConfig);
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = {"run", "--model",        "./model", "--source.ranks",
                                      "3",   "--sink.workers", "4",       "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = m2n(folder, words);
    BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
    return json::parse(outcome.out).as_object();
  };
  BOOST_TEST(run({}).at("verified").as_bool());  // made-up values
  write_weights(folder);
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{},
        {"--sink.direct", "strict", "--run.pool_bytes", "1000"},
        {"--sink", "shadow", "--rounds", "2"},
        {"--sink", "load_weights", "--run.pool_bytes", "1"},
        {"--sink.pipeline_parallel", "2", "--sink.tensor_parallel", "2"}}) {
    const json::object result = run(more);
    BOOST_TEST(result.at("verified").as_bool());
    const json::object& coverage = result.at("coverage").as_object();
    BOOST_TEST(coverage.at("tensors").to_number<int>() == 24);
    const bool all = more.empty() || more[0] != "--sink.direct";
    BOOST_TEST((coverage.at("direct_tensors").to_number<int>() == 24) ==
               (all && (more.empty() || more[1] != "load_weights")));
  }
}

BOOST_AUTO_TEST_CASE(a_config_of_no_known_family_lists_the_choices) {
  const TemporaryFolder folder;
  folder.write("config.json", R"({"model_type": "unheard_of"})");
  Outcome outcome = m2n(folder, {"run", "--model", "config.json"});
  BOOST_TEST(outcome.status == 2);
  BOOST_TEST(outcome.err.find("no model 'unheard_of'; the choices are bert, deepseek_v3") !=
                 std::string::npos,
             outcome.err);
  folder.write("config.json", R"({"hidden_size": 4})");
  outcome = m2n(folder, {"run", "--model", "./"});
  BOOST_TEST(outcome.status == 1);
  BOOST_TEST(outcome.err.find("no JSON object with a 'model_type'") != std::string::npos,
             outcome.err);
}

BOOST_AUTO_TEST_CASE(explain_says_what_every_tensor_does_and_why) {
  const TemporaryFolder folder;
  folder.write("config.json", kConfig);
  const std::vector<std::string> words = {"plan",           "--explain", "--model",       "./",
                                          "--sink.workers", "4",         "--sink.direct", "strict"};
  const Outcome table = m2n(folder, words);
  BOOST_TEST_REQUIRE(table.status == 0, table.err);
  for (const char* part : {"model.layers.*.self_attn.q_proj.weight", "shares parameter",
                           "24 tensors", "in place", "a worker receives", "is padded"}) {
    BOOST_TEST(table.out.find(part) != std::string::npos, part << " in " << table.out);
  }
  std::vector<std::string> as_json = words;
  as_json.emplace_back("--json");
  const json::object result = json::parse(m2n(folder, as_json).out).as_object();
  BOOST_TEST(result.at("tensors").as_array().size() == 24U);
  // 70 rows of 8 f32, whole, on each worker.
  const json::object& embedding = result.at("tensors").as_array()[0].as_object();
  BOOST_TEST((embedding.at("name") == "model.embed_tokens.weight"));
  BOOST_TEST((embedding.at("mode") == "fallback"));
  BOOST_TEST(embedding.at("received_bytes").as_array()[3].to_number<int>() == 70 * 8 * 4);
}

BOOST_AUTO_TEST_CASE(an_expert_map_is_read_and_its_faults_are_named) {
  const TemporaryFolder folder;
  folder.write("config.json", R"({"model_type": "qwen3_moe", "hidden_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "moe_intermediate_size": 12, "num_experts": 4, "vocab_size": 70})");
  const auto run = [&](const std::string& map) {
    folder.write("map.json", map);
    return m2n(folder, {"run", "--model", "./", "--sink.workers", "2", "--sink.expert_parallel",
                        "2", "--sink.redundant_experts", "2", "--sink.expert_map",
                        (folder.path() / "map.json").string(), "--json"});
  };
  const Outcome good = run(R"({"version": 3, "layers": {"0": [3, 3, 0, 1, 2, 0]}})");
  BOOST_TEST(good.status == 0, good.err);
  BOOST_TEST(good.out.find("\"verified\":true") != std::string::npos, good.out);
  BOOST_TEST(run(R"({"layers": {}})").err.find("'version' is no whole number") !=
             std::string::npos);
  BOOST_TEST(run(R"({"version": 1, "layers": {"0": [0, 1]}})").err.find("has 2 slots") !=
             std::string::npos);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
