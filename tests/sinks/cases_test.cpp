// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Faults seen in the field, as small models with the right answer: names, ties, experts, scales.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <ostream>
#include <set>

#include "tests/sinks/fixtures.hpp"
#include "tests/sinks/small_models.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::Checkpoint;
using testing::kFirstWorker;
using testing::live_bytes;
using testing::make_checkpoint;
using testing::make_model;
using testing::make_sink;
using testing::Models;
using testing::models_of;
using testing::origins;
using testing::parameter_of;
using testing::run_round;
using testing::small_decoder;
using testing::small_mla;
using testing::specs_of;
using testing::thrown_by;
using testing::with_small_blocks;

Options one_layer(Options more = {}) {
  more.emplace("num_hidden_layers", "1");
  return more;
}

std::set<std::string> names_of(const WorkerModel& model) {
  std::set<std::string> names;
  for (const WorkerParameter& parameter : model.parameters) {
    names.insert(parameter.name);
  }
  return names;
}

/// First indices of what lies in dimension 0 of a parameter, row by row; "0" for padding.
std::vector<std::string> rows_of(const WorkerModel& model, const std::string& name,
                                 const Catalogue& checkpoint) {
  const WorkerParameter& parameter = parameter_of(model, name);
  const auto all = origins(parameter, checkpoint);
  const std::size_t width = all.size() / static_cast<std::size_t>(parameter.shape[0]);
  std::vector<std::string> rows;
  for (std::size_t i = 0; i < all.size(); i += width) {
    rows.push_back(all[i]);
  }
  return rows;
}

/// Live bytes of one worker after a round.
std::map<std::string, std::vector<std::byte>> after_round(
    const std::shared_ptr<const Models>& models, Rank worker, const Checkpoint& checkpoint,
    const Options& options = {}) {
  const auto sink = make_sink("inplace", models, worker, options, kFirstWorker);
  const auto resolutions = sink->resolve(specs_of(checkpoint.catalogue));
  run_round(*sink, resolutions, kFirstWorker + worker, checkpoint, 1);
  return live_bytes(*sink);
}

/// Experts whose gate is in a worker's w13, slot by slot.
std::vector<Index> experts_in(const WorkerModel& model, const std::string& w13) {
  std::vector<Index> experts;
  for (const Section& section : parameter_of(model, w13).sections) {
    const std::size_t at = section.tensor.find(".experts.") + 9;
    if (section.tensor.find("gate_proj") != std::string::npos) {
      experts.push_back(std::stoll(section.tensor.substr(at)));
    }
  }
  return experts;
}

std::unique_ptr<ModelFamily> moe(Index experts, Options more = {}) {
  more.emplace("num_experts", std::to_string(experts));
  more.emplace("moe_intermediate_size", "16");
  more = small_decoder(std::move(more));
  more.erase("intermediate_size");
  return make_model("qwen3_moe", more);
}

const std::string kW13 = "model.layers.0.mlp.experts.w13_weight";

BOOST_AUTO_TEST_SUITE(sinks)
BOOST_AUTO_TEST_SUITE(cases)

/// Half of a pair under another name is neither taken for the pair nor left out.
/// A23
BOOST_AUTO_TEST_CASE(an_unknown_fused_name_is_refused_with_both_sides) {
  const auto model = make_model("llama", small_decoder());
  Catalogue checkpoint = model->catalogue();
  for (TensorInfo& tensor : checkpoint) {
    if (tensor.name == "model.layers.1.self_attn.q_proj.weight") {
      tensor.name = "model.layers.1.self_attn.qg_proj.weight";
    }
  }
  const auto refused = thrown_by([&] { (void)model->worker({2, 2}, 0, checkpoint); });
  BOOST_TEST(refused.mentions("lacks model.layers.1.self_attn.q_proj.weight"), refused.text);
  BOOST_TEST(refused.mentions("qg_proj.weight is left over"), refused.text);
}

/// Stage 1 is ranks 2 and 3; in their group they are 0 and 1.
/// A25
BOOST_AUTO_TEST_CASE(expert_ranks_count_inside_their_stage) {
  const auto model = moe(8, {{"num_hidden_layers", "2"}});
  const Deployment deployment{
      .workers = 4, .tensor_parallel = 2, .pipeline_parallel = 2, .expert_parallel = 2};
  for (Rank worker = 0; worker < 4; ++worker) {
    const WorkerModel part = model->worker(deployment, worker, model->catalogue());
    const std::string layer = worker < 2 ? "0" : "1";
    BOOST_TEST(
        experts_in(part, "model.layers." + layer + ".mlp.experts.w13_weight") ==
            (worker % 2 == 0 ? std::vector<Index>{0, 1, 2, 3} : std::vector<Index>{4, 5, 6, 7}),
        boost::test_tools::per_element());
  }
}

struct Placement {
  const char* why;
  Index experts;
  Deployment deployment;
  const char* groups;  // n_group of the model
  std::vector<std::vector<Index>> expected;
};
std::ostream& operator<<(std::ostream& os, const Placement& p) { return os << p.why; }

Deployment ep(Rank workers, ExpertPlacement experts, Engine engine = Engine::vllm) {
  return {.workers = workers,
          .tensor_parallel = workers,
          .expert_parallel = workers,
          .engine = engine,
          .experts = std::move(experts)};
}

const std::vector<Placement> kPlacements = {
    {"linear: the remainder goes to the first ranks",
     10,
     ep(4, {}),
     "2",
     {{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}}},
    {"round-robin with expert groups",
     10,
     ep(4, {.round_robin = true}),
     "2",
     {{0, 4, 8}, {1, 5, 9}, {2, 6}, {3, 7}}},
    {"round-robin without groups is linear",
     10,
     ep(4, {.round_robin = true}),
     "1",
     {{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}}},
    {"redundant slots repeat the first experts",
     8,
     ep(4, {.redundant = 4}),
     "2",
     {{0, 1, 2}, {3, 4, 5}, {6, 7, 0}, {1, 2, 3}}},
    {"a map decides",
     4,
     ep(2, {.redundant = 2, .slots = {{0, {3, 3, 0, 1, 2, 3}}}, .version = 4}),
     "2",
     {{3, 3, 0}, {1, 2, 3}}},
    {"SGLang: in a row", 8, ep(4, {}, Engine::sglang), "2", {{0, 1}, {2, 3}, {4, 5}, {6, 7}}},
};

BOOST_DATA_TEST_CASE(experts_are_placed_as_the_engine_places_them, bdata::make(kPlacements), p) {
  const auto model = make_model(
      "deepseek_v3", small_mla(one_layer({{"first_k_dense_replace", "0"},
                                          {"n_routed_experts", std::to_string(p.experts)},
                                          {"n_group", p.groups}})));
  for (Rank worker = 0; worker < p.deployment.workers; ++worker) {
    const WorkerModel part = model->worker(p.deployment, worker, model->catalogue());
    check_worker_model(part, model->catalogue());
    BOOST_TEST(experts_in(part, kW13) == p.expected[static_cast<std::size_t>(worker)],
               boost::test_tools::per_element());
    BOOST_TEST(part.arrangement == p.deployment.experts.version);
  }
}

struct BadPlacement {
  const char* why;
  Deployment deployment;
  const char* part;
};
std::ostream& operator<<(std::ostream& os, const BadPlacement& p) { return os << p.why; }

const std::vector<BadPlacement> kBadPlacements = {
    {"slots that the workers do not divide", ep(4, {.redundant = 1}), "7 expert slots"},
    {"a map with too few slots", ep(2, {.slots = {{0, {0, 1, 2}}}, .version = 1}), "has 3 slots"},
    {"a map that forgets an expert", ep(2, {.slots = {{0, {0, 1, 2, 3, 4, 4}}}, .version = 1}),
     "no slot for expert 5"},
    {"a map with an expert that is none", ep(2, {.slots = {{0, {0, 1, 2, 3, 4, 6}}}, .version = 1}),
     "names expert 6"},
    {"vLLM spreads experts over all of TP and DP",
     {.workers = 4, .tensor_parallel = 4, .expert_parallel = 2},
     "expert_parallel is 2; in vLLM it is 1 or"},
    {"SGLang's groups lie inside TP",
     {.workers = 4, .tensor_parallel = 4, .expert_parallel = 3, .engine = Engine::sglang},
     "a multiple of data_parallel"},
    {"stages that do not add up",
     {.workers = 2, .pipeline_parallel = 2, .stage_layers = {1, 1}},
     "with 2 layers; there are 2 with 3"},
};

BOOST_DATA_TEST_CASE(deployments_that_do_not_fit_are_refused_with_the_numbers,
                     bdata::make(kBadPlacements), p) {
  const auto model = moe(6);
  const auto refused = thrown_by([&] { (void)model->worker(p.deployment, 0, model->catalogue()); });
  BOOST_TEST((refused.code == Errc::bad_argument));
  BOOST_TEST(refused.mentions(p.part), refused.text);
}

BOOST_AUTO_TEST_CASE(workers_of_two_expert_maps_are_refused) {
  const auto model = moe(4, one_layer());
  const auto models = std::make_shared<Models>();
  for (const Rank worker : {0, 1}) {
    models->push_back(model->worker(
        ep(2, {.slots = {{0, {3, 2, 1, 0}}}, .version = static_cast<std::uint64_t>(worker) + 6}),
        worker, model->catalogue()));
  }
  const auto refused = thrown_by(
      [&] { (void)make_sink("inplace", models, 0, {})->resolve(specs_of(model->catalogue())); });
  BOOST_TEST(refused.mentions("versions 6 and 7"), refused.text);
}

/// The shared expert follows tensor parallelism under a name of its own.
/// A28
BOOST_AUTO_TEST_CASE(a_shared_expert_is_no_slot_of_the_routed_ones) {
  const auto model =
      make_model("deepseek_v3",
                 small_mla(one_layer({{"first_k_dense_replace", "0"}, {"n_routed_experts", "4"}})));
  for (Rank worker = 0; worker < 2; ++worker) {
    const WorkerModel part = model->worker(ep(2, {}), worker, model->catalogue());
    BOOST_TEST(parameter_of(part, kW13).shape[0] == 2);
    const std::string shared = "model.layers.0.mlp.shared_experts.";
    BOOST_TEST(to_string(parameter_of(part, shared + "gate_up_proj.weight").shape) == "[32, 20]");
    BOOST_TEST(to_string(parameter_of(part, shared + "down_proj.weight").shape) == "[20, 16]");
  }
}

// A18
BOOST_AUTO_TEST_CASE(scales_of_expert_halves_follow_their_order) {
  for (const bool up_first : {false, true}) {
    const auto model = make_model(
        "deepseek_v3", with_small_blocks(small_mla(
                           one_layer({{"first_k_dense_replace", "0"},
                                      {"n_routed_experts", "1"},
                                      {"n_group", "1"},
                                      {"experts_order", up_first ? "up_gate" : "gate_up"}}))));
    const WorkerModel part = model->worker({2, 2}, 1, model->catalogue());
    for (const char* what : {"weight", "weight_scale_inv"}) {
      const auto& sections =
          parameter_of(part, std::string("model.layers.0.mlp.experts.w13_") + what).sections;
      const std::string expert = "model.layers.0.mlp.experts.0.";
      BOOST_TEST(sections.at(0).tensor == expert + (up_first ? "up" : "gate") + "_proj." + what);
      BOOST_TEST(sections.at(1).tensor == expert + (up_first ? "gate" : "up") + "_proj." + what);
    }
  }
}

/// With the embedding alone: an alias, a head on another stage, a head of its own.
/// A33
BOOST_AUTO_TEST_CASE(a_tied_head_is_an_alias_or_a_copy_of_the_embedding) {
  const Options tied = one_layer({{"tie_word_embeddings", "true"}});
  const auto model = make_model("llama", small_decoder(tied));
  const auto& catalogue = model->catalogue();
  const std::string embedding = "model.embed_tokens.weight";
  BOOST_TEST(!names_of(model->worker({2, 2}, 0, catalogue)).contains("lm_head.weight"));

  const Deployment stages{.workers = 2, .pipeline_parallel = 2};
  const WorkerModel last = model->worker(stages, 1, catalogue);
  BOOST_TEST(names_of(last).contains(embedding));
  BOOST_TEST(rows_of(last, embedding, catalogue) ==
                 rows_of(model->worker(stages, 0, catalogue), embedding, catalogue),
             boost::test_tools::per_element());

  Options apart = tied;
  apart["head_separate"] = "true";
  const auto separate = make_model("llama", small_decoder(apart));
  const WorkerModel both = separate->worker({2, 2}, 1, separate->catalogue());
  BOOST_TEST(rows_of(both, "lm_head.weight", separate->catalogue()) ==
                 rows_of(both, embedding, separate->catalogue()),
             boost::test_tools::per_element());
  const Checkpoint checkpoint = make_checkpoint(separate->catalogue());
  const auto live = after_round(models_of(*separate, 2, 2, separate->catalogue()), 1, checkpoint);
  BOOST_TEST((live.at("lm_head.weight") == live.at(embedding)));
}

/// A layer behind the last belongs to the draft model, and only it.
/// A55
BOOST_AUTO_TEST_CASE(prediction_layers_go_to_the_draft_or_nowhere) {
  const auto part = [](const char* draft) {
    const auto model =
        make_model("deepseek_v3", small_mla({{"num_nextn_predict_layers", "1"}, {"draft", draft}}));
    return std::pair(model->worker({2, 2}, 0, model->catalogue()), model->catalogue());
  };
  const auto of_draft = [](const std::string& name) { return name.starts_with("model.layers.3."); };
  const auto [none, catalogue] = part("none");
  for (const std::string& name : names_of(none)) {
    BOOST_TEST(!of_draft(name));
  }
  BOOST_TEST(none.derived.size() == 6U);
  const auto skipped = static_cast<std::size_t>(
      std::count_if(catalogue.begin(), catalogue.end(),
                    [&](const TensorInfo& tensor) { return of_draft(tensor.name); }));
  BOOST_TEST(none.ignored.size() == skipped);
  const auto only = part("only").first;
  BOOST_TEST(names_of(only).contains("model.layers.3.mtp_block.self_attn.o_proj.weight"));
  BOOST_TEST(names_of(only).contains("model.layers.3.eh_proj.weight"));
  for (const std::string& name : names_of(only)) {
    BOOST_TEST(of_draft(name));
  }
  BOOST_TEST(only.derived.size() == 2U);
  BOOST_TEST(names_of(part("also").first).size() == names_of(none).size() + names_of(only).size());
}

/// One prefix at the trainer; one worker class wants another, one the contrary.
/// A43
BOOST_AUTO_TEST_CASE(names_are_mapped_by_prefix_and_suffix) {
  const auto offer = [](const std::string& root) {
    return make_model("llama", small_decoder(one_layer({{"checkpoint_root", root}})))->catalogue();
  };
  const Catalogue wrapped = offer("model.language_model.");
  const Catalogue inner = offer("language_model.model.");
  const auto worker = [&](const std::string& root, const std::string& names,
                          const Catalogue& checkpoint) {
    const auto model = make_model(
        "llama", small_decoder(one_layer(
                     {{"checkpoint_root", root}, {"worker_root", root}, {"names", names}})));
    return model->worker({2, 2}, 0, checkpoint);
  };
  const WorkerModel a = worker("model.", "prefix:model.language_model.->model.", wrapped);
  BOOST_TEST(names_of(a).contains("model.layers.0.self_attn.qkv_proj.weight"));
  // Sections name what is sent.
  BOOST_TEST(parameter_of(a, "model.norm.weight").sections[0].tensor ==
             "model.language_model.norm.weight");
  const WorkerModel b = worker("language_model.model.",
                               "prefix:model.language_model.->language_model.model.", wrapped);
  BOOST_TEST(names_of(b).contains("language_model.model.norm.weight"));
  const WorkerModel c = worker("model.", "prefix:language_model.model.->model.", inner);
  BOOST_TEST(names_of(c) == names_of(a), boost::test_tools::per_element());

  const auto unmapped = thrown_by([&] { (void)worker("model.", "", wrapped); });
  BOOST_TEST(unmapped.mentions("lacks model.embed_tokens.weight"), unmapped.text);
  BOOST_TEST(unmapped.mentions("model.language_model.embed_tokens.weight"), unmapped.text);

  Catalogue twice = wrapped;
  twice.push_back(wrapped.front());
  twice.back().name = "model.embed_tokens.weight";
  const auto both =
      thrown_by([&] { (void)worker("model.", "prefix:model.language_model.->model.", twice); });
  BOOST_TEST(both.mentions("are both 'model.embed_tokens.weight'"), both.text);

  Catalogue more = offer("model.");
  more.push_back({"model.vision.weight", DType::bf16, {3}});
  for (TensorInfo& tensor : more) {
    if (tensor.name == "model.norm.weight") {
      tensor.name = "model.norm.gamma";
    }
  }
  const WorkerModel dropped = worker("model.", "suffix:.gamma->.weight,drop:*.vision.*", more);
  BOOST_TEST(dropped.ignored == std::vector<std::string>{"model.vision.weight"},
             boost::test_tools::per_element());
  BOOST_TEST((thrown_by([&] { (void)worker("model.", "regex:a->b", more); }).code == Errc::usage));
}

// A44
BOOST_AUTO_TEST_CASE(a_tensor_that_is_not_sent_is_named_before_anything_moves) {
  const auto model = make_model("llama", small_decoder());
  const auto models = models_of(*model, 2, 2, model->catalogue());
  auto specs = specs_of(model->catalogue());
  specs.erase(specs.begin() + 4);
  const auto refused =
      thrown_by([&] { (void)make_sink("inplace", models, 0, {})->resolve(specs); });
  BOOST_TEST(refused.mentions("they need " + model->catalogue()[4].name), refused.text);
}

/// K = 512 in blocks of 128 over eight workers: two share a column of scales.
/// A36
BOOST_AUTO_TEST_CASE(scales_are_shared_by_workers_inside_a_block) {
  const auto model =
      make_model("deepseek_v3",
                 small_mla(one_layer({{"q_lora_rank", "128"},
                                      {"qk_nope_head_dim", "64"},
                                      {"qk_rope_head_dim", "64"},
                                      {"v_head_dim", "64"},
                                      {"intermediate_size", "1024"},
                                      {"quantization_config", "{}"},
                                      {"quantization_config.quant_method", "fp8"},
                                      {"quantization_config.weight_block_size", "[128,128]"}})));
  for (Rank worker = 0; worker < 8; ++worker) {
    const WorkerModel part = model->worker({8, 8}, worker, model->catalogue());
    const std::string output = "model.layers.0.self_attn.o_proj.weight";
    const auto& scales = parameter_of(part, output + "_scale_inv");
    BOOST_TEST(to_string(scales.shape) == "[1, 1]");
    BOOST_TEST(scales.sections.at(0).box.lo[1] == worker / 2);
    BOOST_TEST(scales.loader_only == "");
    BOOST_TEST(parameter_of(part, output).sections[0].box.lo[1] == 64 * worker);
  }
}

/// Gate and up of 64 rows each would share a block of 128 that neither has a scale for.
BOOST_AUTO_TEST_CASE(parts_that_would_share_a_block_are_refused) {
  const auto model = make_model(
      "llama", small_decoder(one_layer({{"quantization_config", "{}"},
                                        {"quantization_config.quant_method", "fp8"},
                                        {"quantization_config.weight_block_size", "[128,128]"},
                                        {"num_key_value_heads", "8"},
                                        {"head_dim", "128"},
                                        {"intermediate_size", "512"}})));
  BOOST_TEST(!thrown_by([&] { (void)model->worker({4, 4}, 1, model->catalogue()); }).any);
  const auto refused = thrown_by([&] { (void)model->worker({8, 8}, 1, model->catalogue()); });
  BOOST_TEST(refused.mentions("64 rows"), refused.text);
  BOOST_TEST(refused.mentions("gate_up_proj.weight_scale_inv' would begin inside a block"),
             refused.text);
}

/// 258 columns over two workers: the second's blocks are not the checkpoint's.
/// A36
BOOST_AUTO_TEST_CASE(a_cut_through_a_block_is_refused) {
  const auto model = make_model(
      "llama", small_decoder(one_layer({{"quantization_config", "{}"},
                                        {"quantization_config.quant_method", "fp8"},
                                        {"quantization_config.weight_block_size", "[128,128]"},
                                        {"num_key_value_heads", "8"},
                                        {"head_dim", "128"},
                                        {"intermediate_size", "258"}})));
  const auto refused = thrown_by([&] { (void)model->worker({2, 2}, 1, model->catalogue()); });
  BOOST_TEST(refused.mentions("[129, 258)"), refused.text);
  BOOST_TEST(refused.mentions("quantised anew"), refused.text);
}

/// 768 over four workers is 192 each: blocks of 64, every scale as often as its block is cut.
BOOST_AUTO_TEST_CASE(experts_cut_inside_a_block_are_left_to_the_loader_which_repeats_scales) {
  const auto model =
      make_model("deepseek_v3",
                 small_mla(one_layer({{"first_k_dense_replace", "0"},
                                      {"n_routed_experts", "2"},
                                      {"q_lora_rank", "128"},
                                      {"n_shared_experts", "0"},
                                      {"n_group", "1"},
                                      {"num_attention_heads", "4"},
                                      {"qk_nope_head_dim", "128"},
                                      {"qk_rope_head_dim", "128"},
                                      {"v_head_dim", "128"},
                                      {"moe_intermediate_size", "768"},
                                      {"quantization_config", "{}"},
                                      {"quantization_config.quant_method", "fp8"},
                                      {"quantization_config.weight_block_size", "[128,128]"}})));
  const auto models = models_of(*model, 4, 4, model->catalogue());
  const std::string scales = "model.layers.0.mlp.experts.w13_weight_scale_inv";
  const auto block_rows = [&](Rank worker) {
    std::vector<Index> rows;
    for (const Section& section :
         parameter_of((*models)[static_cast<std::size_t>(worker)], scales).sections) {
      if (section.tensor.find("experts.0.gate") != std::string::npos) {
        for (Index row = section.box.lo[0]; row < section.box.hi[0]; ++row) {
          rows.push_back(row);
        }
      }
    }
    return rows;
  };
  // Also of the worker whose share begins with a block.
  BOOST_TEST(block_rows(0) == (std::vector<Index>{0, 0, 1}), boost::test_tools::per_element());
  BOOST_TEST(block_rows(1) == (std::vector<Index>{1, 2, 2}), boost::test_tools::per_element());
  BOOST_TEST(block_rows(2) == (std::vector<Index>{3, 3, 4}), boost::test_tools::per_element());
  BOOST_TEST(block_rows(3) == (std::vector<Index>{4, 5, 5}), boost::test_tools::per_element());
  const auto sink = make_sink("inplace", models, 1, {}, kFirstWorker);
  const auto resolutions = sink->resolve(specs_of(model->catalogue()));
  std::size_t loaded = 0;
  for (std::size_t i = 0; i < resolutions.size(); ++i) {
    // Weights and scales of the experts are one module, and go one way.
    const bool of_experts = model->catalogue()[i].name.find(".experts.") != std::string::npos;
    BOOST_TEST((resolutions[i].mode == Mode::fallback) == of_experts);
    loaded += of_experts ? 1 : 0;
  }
  BOOST_TEST(loaded == 12U);
  const Checkpoint checkpoint = make_checkpoint(model->catalogue());
  run_round(*sink, resolutions, kFirstWorker + 1, checkpoint, 1);
  const auto live = live_bytes(*sink).at(scales);
  const auto& gate =
      checkpoint.bytes.at("model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv");  // [6, 1]
  for (const auto& [local, global] : {std::pair(0, 1), {1, 2}, {2, 2}}) {
    BOOST_TEST(std::memcmp(live.data() + 4 * local, gate.data() + 4 * global, 4) == 0);
  }
}

/// A scale tensor packed for another consumer has another shape.
/// A37
BOOST_AUTO_TEST_CASE(packed_scales_are_refused_by_their_shape) {
  const auto model = make_model("deepseek_v3", with_small_blocks(small_mla()));
  Catalogue checkpoint = model->catalogue();
  for (TensorInfo& tensor : checkpoint) {
    if (tensor.name == "model.layers.0.self_attn.o_proj.weight_scale_inv") {
      tensor.shape = {tensor.shape[0], tensor.shape[1] / 4};
    }
  }
  BOOST_TEST(thrown_by([&] {
               (void)model->worker({2, 2}, 0, checkpoint);
             }).mentions("o_proj.weight_scale_inv' has shape"));
}

/// One scale a part of a fused weight: a list, in the order of the parts.
/// A53
BOOST_AUTO_TEST_CASE(scales_of_whole_tensors_are_a_list_in_a_fused_parameter) {
  const auto model =
      make_model("llama", small_decoder(one_layer({{"quantization_config", "{}"},
                                                   {"quantization_config.quant_method", "fp8"}})));
  const auto models = models_of(*model, 2, 2, model->catalogue());
  const Checkpoint checkpoint = make_checkpoint(model->catalogue());
  const auto live = after_round(models, 1, checkpoint);
  const std::string attention = "model.layers.0.self_attn.";
  const auto& list = live.at(attention + "qkv_proj.weight_scale");
  BOOST_REQUIRE(list.size() == 12U);
  std::size_t at = 0;
  for (const char* part : {"q_proj", "k_proj", "v_proj"}) {
    BOOST_TEST(std::memcmp(list.data() + at,
                           checkpoint.bytes.at(attention + part + ".weight_scale").data(), 4) == 0);
    at += 4;
  }
  BOOST_TEST(live.at("model.layers.0.mlp.gate_up_proj.weight_scale").size() == 8U);
}

/// Square tensors tell nothing by their shape; the table says which way they are stored.
/// A38
BOOST_AUTO_TEST_CASE(square_experts_are_turned_because_the_table_says_so) {
  const auto model = make_model("gpt_oss", small_decoder(one_layer({{"hidden_size", "8"},
                                                                    {"intermediate_size", "8"},
                                                                    {"num_local_experts", "2"}})));
  const WorkerModel part = model->worker({2, 2}, 1, model->catalogue());
  const std::string experts = "model.layers.0.mlp.experts.";
  const auto down = origins(parameter_of(part, experts + "w2_weight"), model->catalogue());
  // w2[e, h, i] of worker 1 is down_proj[e, 4 + i, h].
  BOOST_TEST(down.at(0) == experts + "down_proj[0,4,0]");
  BOOST_TEST(down.at(1) == experts + "down_proj[0,5,0]");
  BOOST_TEST(down.at(4) == experts + "down_proj[0,4,1]");
  const auto wide = origins(parameter_of(part, experts + "w13_weight"), model->catalogue());
  // Rows alternate: gate 4, up 4, gate 5, up 5, ...
  BOOST_TEST(wide.at(0) == experts + "gate_up_proj[0,0,8]");
  BOOST_TEST(wide.at(8) == experts + "gate_up_proj[0,0,9]");
}

BOOST_AUTO_TEST_CASE(a_rule_by_name_decides_the_dtype_of_one_parameter) {
  const auto model = make_model(
      "deepseek_v3", small_mla(one_layer({{"first_k_dense_replace", "0"}, {"dtype", "f32"}})));
  const auto models = models_of(*model, 1, 1, model->catalogue());
  const Checkpoint checkpoint = make_checkpoint(model->catalogue());
  const std::string bias = "model.layers.0.mlp.gate.e_score_correction_bias";
  const std::string gate = "model.layers.0.mlp.gate.weight";
  const auto sizes = [&](const Options& options) {
    const auto live = after_round(models, 0, checkpoint, options);
    return std::tuple(live.at(bias).size() / 6, live.at(gate).size() / 120,
                      live.at("model.norm.weight").size() / 20);
  };
  BOOST_TEST((sizes({}) == std::tuple(4, 4, 4)));
  // All but what keeps its own; then one by name; then one kept and the rest changed.
  BOOST_TEST((sizes({{"dtype", "bf16"}, {"cast", "nearest_even"}}) == std::tuple(4, 2, 2)));
  BOOST_TEST((sizes({{"dtypes", "*.gate.weight:bf16:nearest_even"}}) == std::tuple(4, 2, 4)));
  BOOST_TEST((sizes({{"dtypes", "*gate.weight:f32,*:bf16:nearest_even"}}) == std::tuple(2, 4, 2)));
  const auto exact = thrown_by([&] {
    sizes({{"dtypes", "*.gate.weight:bf16:exact"}, {"cast", "nearest_even"}});
  });
  BOOST_TEST(exact.mentions("'" + gate + "' is f32"), exact.text);
  BOOST_TEST((thrown_by([&] { sizes({{"dtypes", "gate"}}); }).code == Errc::usage));
}

/// As the published config of the 4B model: heads and vocabulary are its family's defaults.
BOOST_AUTO_TEST_CASE(a_config_that_leaves_defaults_out_is_complete) {
  const auto model = make_model("gemma3", {{"config", R"({"model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                      "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
    "torch_dtype": "bfloat16"})"}});
  Index elements = 0;
  for (const TensorInfo& tensor : model->catalogue()) {
    elements += element_count(tensor.shape);
  }
  BOOST_TEST(model->catalogue().size() == 883U);
  BOOST_TEST(elements == 4'300'079'472);
}

/// A buffer that the worker has and the checkpoint offers in vain stays what it is.
/// A56
BOOST_AUTO_TEST_CASE(rotary_buffers_are_not_parameters_and_are_left_alone) {
  const auto model = make_model("kimi_k2", small_mla(one_layer()));
  const auto models = models_of(*model, 1, 1, model->catalogue());
  const std::string buffer = "model.layers.0.self_attn.rotary_emb.inv_freq";
  BOOST_TEST(!names_of(models->front()).contains(buffer));
  BOOST_TEST(models->front().ignored == std::vector<std::string>{buffer},
             boost::test_tools::per_element());
  Catalogue without = model->catalogue();
  std::erase_if(without, [&](const TensorInfo& tensor) { return tensor.name == buffer; });
  BOOST_TEST(names_of(model->worker({1, 1}, 0, without)) == names_of(models->front()),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
