// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Published checkpoints: tensors, elements and bytes of what the families generate, and the worked
/// numbers of large deployments.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <ctime>
#include <map>
#include <ostream>
#include <set>

#include "core/error.hpp"
#include "tests/support/catalogues.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::published_model;

struct Published {
  const char* model;
  std::size_t tensors;
  Index elements;
  std::uint64_t bytes;
  const char* layer_prefix;
  Index layer_elements;
};
std::ostream& operator<<(std::ostream& os, const Published& p) { return os << p.model; }

const std::vector<Published> kPublished = {
    {"llama-3.1-8b", 291, 8'030'261'248, 16'060'522'496, "model.layers.7.", 218'112'000},
    {"llama-3.1-70b", 723, 70'553'706'496, 141'107'412'992, "model.layers.7.", 855'654'400},
    {"qwen3-8b", 399, 8'190'735'360, 16'381'470'720, "model.layers.7.", 192'946'432},
    {"qwen3-32b", 707, 32'762'123'264, 65'524'246'528, "model.layers.7.", 487'598'336},
    {"qwen3-30b-a3b", 18'867, 30'532'122'624, 61'064'245'248, "model.layers.7.", 623'120'640},
    {"qwen3-235b-a22b", 36'945, 235'093'634'560, 470'187'269'120, "model.layers.7.", 2'487'755'008},
    {"mixtral-8x7b", 995, 46'702'792'704, 93'405'585'408, "model.layers.7.", 1'451'270'144},
    {"kimi-k2", 139'644, 1'026'470'731'056, 1'029'173'256'720, "model.layers.7.", 17'060'406'384},
    {"kimi-k2", 139'644, 1'026'470'731'056, 1'029'173'256'720, "model.layers.0.", 497'530'608},
    {"gpt-oss-20b", 459, 11'956'805'184, 13'761'264'768, nullptr, 0},
    {"gpt-oss-120b", 687, 63'081'444'672, 65'248'815'744, nullptr, 0},
    {"gemma-3-1b", 340, 999'885'952, 1'999'771'904, "model.layers.7.", 26'842'112},
    {"gemma-3-4b", 883, 4'300'079'472, 8'600'158'944, "language_model.model.layers.7.", 94'382'592},
    {"gemma-3-4b", 883, 4'300'079'472, 8'600'158'944, "vision_tower.", 416'866'032},
    {"gemma-3-12b", 1065, 12'187'325'040, 24'374'650'080, "language_model.model.layers.7.",
     224'148'992},
    {"gemma-3-27b", 1247, 27'432'406'640, 54'864'813'280, "language_model.model.layers.7.",
     412'898'560},
    {"gpt2", 160, 137'022'720, 548'090'880, "h.7.", 8'136'448},
};

struct Sum {
  std::size_t tensors = 0;
  Index elements = 0;
  std::uint64_t bytes = 0;
};

Sum sum_of(const Catalogue& catalogue, const std::string& prefix = "") {
  Sum sum;
  for (const TensorInfo& tensor : catalogue) {
    if (tensor.name.starts_with(prefix)) {
      const Index count = element_count(tensor.shape);
      ++sum.tensors;
      sum.elements += count;
      sum.bytes += static_cast<std::uint64_t>(count) * bytes_of(tensor.dtype);
    }
  }
  return sum;
}

std::string shape_of(const WorkerModel& model, const std::string& name) {
  return to_string(parameter_of(model, name).shape);
}

}  // namespace

BOOST_AUTO_TEST_SUITE(sinks)
BOOST_AUTO_TEST_SUITE(published)

BOOST_DATA_TEST_CASE(totals_are_those_of_the_published_checkpoint, bdata::make(kPublished), p) {
  const auto model = published_model(p.model);
  const Catalogue& catalogue = model->catalogue();
  const Sum sum = sum_of(catalogue);
  BOOST_TEST(sum.tensors == p.tensors);
  BOOST_TEST(sum.elements == p.elements);
  BOOST_TEST(sum.bytes == p.bytes);
  std::set<std::string_view> names;
  for (const TensorInfo& tensor : catalogue) {
    names.insert(tensor.name);
  }
  BOOST_TEST(names.size() == p.tensors);
  if (p.layer_prefix != nullptr) {
    BOOST_TEST(sum_of(catalogue, p.layer_prefix).elements == p.layer_elements);
  }
}

/// Without the prediction layer: 671 billion, as published; its shares by type.
BOOST_AUTO_TEST_CASE(deepseek_v3_has_its_published_parameters_and_types) {
  const auto catalogue = published_model("deepseek-v3")->catalogue();
  std::map<DType, Index> elements;
  for (const TensorInfo& tensor : catalogue) {
    elements[tensor.dtype] += element_count(tensor.shape);
  }
  BOOST_TEST(catalogue.size() == 91'991U);
  BOOST_TEST(elements[DType::bf16] == 3'918'786'560);
  BOOST_TEST(elements[DType::f8_e4m3] == 680'571'043'840);
  BOOST_TEST(elements[DType::f32] == 41'555'600);
  BOOST_TEST(sum_of(catalogue).bytes == 688'574'839'360U);
}

BOOST_AUTO_TEST_CASE(kimi_k2_has_its_published_types) {
  const auto catalogue = published_model("kimi-k2")->catalogue();
  std::map<DType, Index> elements;
  for (const TensorInfo& tensor : catalogue) {
    elements[tensor.dtype] += element_count(tensor.shape);
  }
  BOOST_TEST(elements[DType::bf16] == 2'514'970'968);
  BOOST_TEST(elements[DType::f8_e4m3] == 1'023'893'241'856);
  BOOST_TEST(elements[DType::f32] == 62'518'232);
}

/// Fused rows of scales, q_a 12 and kv_a 5 (the last block has 64 rows).
BOOST_AUTO_TEST_CASE(scales_of_deepseek_v3_follow_their_blocks) {
  const auto family = published_model(
      "deepseek-v3",
      {{"num_hidden_layers", "4"}, {"num_nextn_predict_layers", "0"}, {"n_routed_experts", "4"}});
  const WorkerModel worker = family->worker({8, 8}, 3, family->catalogue());
  const std::string attention = "model.layers.3.self_attn.";
  BOOST_TEST(shape_of(worker, attention + "fused_qkv_a_proj.weight") == "[2112, 7168]");
  BOOST_TEST(shape_of(worker, attention + "fused_qkv_a_proj.weight_scale_inv") == "[17, 56]");
  BOOST_TEST(shape_of(worker, attention + "q_b_proj.weight") == "[3072, 1536]");
  BOOST_TEST(shape_of(worker, attention + "q_b_proj.weight_scale_inv") == "[24, 12]");
  BOOST_TEST(shape_of(worker, attention + "o_proj.weight_scale_inv") == "[56, 16]");
  const std::string experts = "model.layers.3.mlp.experts.";
  BOOST_TEST(shape_of(worker, experts + "w13_weight") == "[4, 512, 7168]");
  BOOST_TEST(shape_of(worker, experts + "w13_weight_scale_inv") == "[4, 4, 56]");
  BOOST_TEST(shape_of(worker, experts + "w2_weight_scale_inv") == "[4, 56, 2]");
  BOOST_TEST(worker.derived.size() == 8U);  // two a layer
  BOOST_TEST(worker.derived[0].name == "model.layers.0.self_attn.W_UK_T");
  BOOST_TEST(to_string(worker.derived[0].shape) == "[16, 128, 512]");
  BOOST_TEST(to_string(worker.derived[1].shape) == "[16, 512, 128]");
}

/// I = 2880 is 90 blocks of 32: 23 for each of four workers, and 21 for the last.
/// A36
BOOST_AUTO_TEST_CASE(blocks_of_gpt_oss_go_unevenly_to_the_workers) {
  const auto family = published_model("gpt-oss-20b", {{"num_hidden_layers", "1"}});
  struct Share {
    Index tp;
    std::vector<Index> rows;
  };
  for (const auto& [tp, rows] :
       {Share{4, {736, 736, 736, 672}}, Share{8, {384, 384, 384, 384, 384, 384, 384, 192}}}) {
    for (Rank rank = 0; rank < tp; ++rank) {
      const WorkerModel worker =
          family->worker({static_cast<Rank>(tp), tp}, rank, family->catalogue());
      check_worker_model(worker, family->catalogue());
      const std::string experts = "model.layers.0.mlp.experts.";
      const Index mine = rows[static_cast<std::size_t>(rank)];
      const auto& w13 = parameter_of(worker, experts + "w13_weight");
      BOOST_TEST(to_string(w13.shape) == to_string(Shape{32, 2 * rows[0], 1440}));
      BOOST_TEST(w13.sections.front().box[1].size() == 2 * mine);
      BOOST_TEST(w13.padding.empty() == (mine == rows[0]));
      const auto& w2 = parameter_of(worker, experts + "w2_weight");
      BOOST_TEST(to_string(w2.shape) == to_string(Shape{32, 2880, rows[0] / 2}));
      BOOST_TEST(w2.sections.front().box[2].size() == mine / 32);
      const auto& bias = parameter_of(worker, experts + "w2_bias");
      BOOST_TEST(bias.sections.empty() == (rank != 0));
      BOOST_TEST(bias.padding.empty() == (rank == 0));
      BOOST_TEST(shape_of(worker, "model.layers.0.attn.sinks") == to_string(Shape{64 / tp}));
    }
  }
}

struct Stages {
  Index layers;
  Index stages;
  Engine engine;
  std::vector<Index> expected;
};
std::ostream& operator<<(std::ostream& os, const Stages& s) {
  return os << s.layers << " layers on " << s.stages << " stages";
}

const std::vector<Stages> kStages = {
    {61, 4, Engine::vllm, {15, 15, 16, 15}},   {61, 2, Engine::vllm, {31, 30}},
    {94, 4, Engine::vllm, {23, 24, 24, 23}},   {36, 5, Engine::vllm, {7, 7, 7, 8, 7}},
    {61, 4, Engine::sglang, {15, 15, 15, 16}}, {94, 4, Engine::sglang, {23, 23, 24, 24}},
};

/// Layers keep their global numbers, each is on one stage, and together they are the whole model.
BOOST_DATA_TEST_CASE(layers_go_to_the_stages_of_the_engine, bdata::make(kStages), s) {
  const auto family =
      published_model("llama-3.1-8b", {{"num_hidden_layers", std::to_string(s.layers)}});
  Deployment deployment;
  deployment.workers = static_cast<Rank>(s.stages);
  deployment.pipeline_parallel = s.stages;
  deployment.engine = s.engine;
  std::set<std::string> all;
  Index first = 0;
  for (Rank stage = 0; stage < s.stages; ++stage) {
    const WorkerModel worker = family->worker(deployment, stage, family->catalogue());
    std::set<Index> layers;
    for (const WorkerParameter& parameter : worker.parameters) {
      BOOST_TEST(all.insert(parameter.name).second);
      if (parameter.name.starts_with("model.layers.")) {
        layers.insert(std::stoll(parameter.name.substr(13)));
      }
    }
    const Index count = s.expected[static_cast<std::size_t>(stage)];
    BOOST_TEST(static_cast<Index>(layers.size()) == count);
    BOOST_TEST(*layers.begin() == first);
    BOOST_TEST(*layers.rbegin() == first + count - 1);
    first += count;
  }
  BOOST_TEST(all.contains("model.embed_tokens.weight"));
  BOOST_TEST(all.contains("lm_head.weight"));
}

/// Twice the experts in at most about twice the time; a quadratic search would take four times.
/// A57
BOOST_AUTO_TEST_CASE(time_to_resolve_names_grows_with_the_experts) {
  const auto seconds = [](const char* experts) {
    double best = 1e9;
    for (int run = 0; run < 3; ++run) {
      const std::clock_t start = std::clock();
      const auto family =
          published_model("qwen3-30b-a3b", {{"num_experts", experts}, {"num_hidden_layers", "12"}});
      (void)family->worker({8, 8}, 0, family->catalogue());
      best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
    }
    return best;
  };
  const double small = seconds("128");
  BOOST_TEST(seconds("512") < 12 * small);  // 4 times when linear, 16 when quadratic
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
