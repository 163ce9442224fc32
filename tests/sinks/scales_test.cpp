// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Scales that a worker's kernels want otherwise than the checkpoint has them.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <map>
#include <utility>

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
using testing::models_of;
using testing::run_round;
using testing::small_decoder;
using testing::small_mla;
using testing::specs_of;
using testing::thrown_by;
using testing::with_small_blocks;
using testing::write_direct;

const std::string kAttention = "model.layers.0.self_attn.";

std::vector<float> floats(const std::vector<std::byte>& bytes) {
  std::vector<float> result(bytes.size() / sizeof(float));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

/// One layer of f8 with a scale a tensor.
std::unique_ptr<ModelFamily> tensor_scaled(const Options& more = {}) {
  Options options = more;
  options.merge(Options{{"quantization_config", "{}"},
                        {"quantization_config.quant_method", "fp8"},
                        {"num_hidden_layers", "1"}});
  return make_model("llama", small_decoder(std::move(options)));
}

/// Scales that may be multiplied with, and weights of 1.
Checkpoint ones(const ModelFamily& model) {
  Checkpoint checkpoint = make_checkpoint(model.catalogue());
  for (auto& [name, bytes] : checkpoint.bytes) {
    if (checkpoint.info(name).dtype == DType::f8_e4m3) {
      std::fill(bytes.begin(), bytes.end(), std::byte{0x38});
    }
  }
  return checkpoint;
}

void set_scale(Checkpoint& checkpoint, const std::string& module, float scale) {
  std::memcpy(checkpoint.bytes.at(kAttention + module + ".weight_scale").data(), &scale,
              sizeof scale);
}

struct ScaledWorker {
  std::unique_ptr<WeightSink> sink;
  std::vector<Resolution> resolutions;

  ScaledWorker(const std::string& name, const ModelFamily& model, Rank worker,
               const Options& options = {})
      : sink(make_sink(name, models_of(model, 2, 2, model.catalogue()), worker, options,
                       kFirstWorker)),
        resolutions(sink->resolve(specs_of(model.catalogue()))),
        rank(kFirstWorker + worker) {}

  void round(const Checkpoint& checkpoint, std::uint64_t version) {
    run_round(*sink, resolutions, rank, checkpoint, version);
  }

  Rank rank;
};

}  // namespace

BOOST_AUTO_TEST_SUITE(sinks)
BOOST_AUTO_TEST_SUITE(scales)

/// A53: q, k and v have scales 1, 2 and 4; the fused weight has 4, and q and k are quantised anew.
BOOST_DATA_TEST_CASE(one_scale_of_a_fused_weight_is_the_largest_of_its_parts,
                     bdata::make({"inplace", "shadow", "load_weights"}), name) {
  const auto model = tensor_scaled({{"scales", "one"}});
  Checkpoint checkpoint = ones(*model);
  set_scale(checkpoint, "q_proj", 1);
  set_scale(checkpoint, "k_proj", 2);
  set_scale(checkpoint, "v_proj", 4);
  ScaledWorker worker(name, *model, 1);
  worker.round(checkpoint, 1);
  worker.round(checkpoint, 2);  // the second starts from the checkpoint's weights, too
  const auto live = live_bytes(*worker.sink);
  const std::vector<std::byte>& weight = live.at(kAttention + "qkv_proj.weight");  // [16+4+4, 20]
  BOOST_REQUIRE(weight.size() == 480U);
  const auto all = [&](std::size_t first, std::size_t end, int bits) {
    return std::all_of(weight.begin() + static_cast<std::ptrdiff_t>(first) * 20,
                       weight.begin() + static_cast<std::ptrdiff_t>(end) * 20,
                       [&](std::byte b) { return b == std::byte(bits); });
  };
  BOOST_TEST(all(0, 16, 0x28));   // 0.25
  BOOST_TEST(all(16, 20, 0x30));  // 0.5
  BOOST_TEST(all(20, 24, 0x38));  // 1
  BOOST_TEST(
      floats(live.at(kAttention + "qkv_proj.weight_scale_parts")) == (std::vector<float>{4, 4, 4}),
      boost::test_tools::per_element());
  const ServedWeights served = worker.sink->serve();
  const auto one = std::find_if(
      served.parameters.begin(), served.parameters.end(),
      [](const LiveParameter& p) { return p.name == kAttention + "qkv_proj.weight_scale"; });
  BOOST_REQUIRE((one != served.parameters.end()));
  BOOST_TEST(one->shape.empty());
  float scale = 0;
  std::memcpy(&scale, one->buffer.data, sizeof scale);
  BOOST_TEST(scale == 4.0F);
  // A weight that is alone keeps its own.
  BOOST_TEST(live.at(kAttention + "o_proj.weight") ==
             std::vector<std::byte>(20 * 16, std::byte{0x38}));
}

BOOST_AUTO_TEST_CASE(what_is_quantised_anew_lands_in_place_and_says_so) {
  const auto model = tensor_scaled({{"scales", "one"}});
  const ScaledWorker worker("inplace", *model, 0);
  for (std::size_t i = 0; i < worker.resolutions.size(); ++i) {
    const Resolution& resolution = worker.resolutions[i];
    const std::string& name = model->catalogue()[i].name;
    const bool fused = name.find("proj.weight") != name.npos && name.find("o_proj") == name.npos &&
                       name.find("down_proj") == name.npos;
    BOOST_TEST((resolution.mode == Mode::direct), name);
    BOOST_TEST(resolution.rewritten == fused, name);
    BOOST_TEST(
        (resolution.reason.find("quantised anew for one scale") != std::string::npos) == fused,
        name << ": " << resolution.reason);
  }
}

/// A scale that nothing can be divided by fails the round before it is committed.
BOOST_AUTO_TEST_CASE(a_scale_that_is_none_fails_the_round) {
  const auto model = tensor_scaled({{"scales", "one"}});
  for (const char* name : {"inplace", "shadow"}) {
    ScaledWorker worker(name, *model, 0);
    Checkpoint checkpoint = ones(*model);
    worker.round(checkpoint, 1);
    const auto before = live_bytes(*worker.sink);
    set_scale(checkpoint, "k_proj", -1);
    worker.sink->begin(2);
    write_direct(*worker.sink, worker.resolutions, worker.rank, checkpoint);
    const auto refused = thrown_by([&] { worker.sink->accept(2); });
    BOOST_TEST(refused.mentions("qkv_proj.weight_scale_parts' has a scale of -1"), refused.text);
    worker.sink->roll_back();
    const bool shadow = std::string(name) == "shadow";
    BOOST_TEST(worker.sink->version().has_value() == shadow);
    if (shadow) {
      BOOST_TEST((live_bytes(*worker.sink) == before));
    }
  }
}

/// A37: 0.3, 0.7 and 1.0 become 0.5, 1 and 1, and the weights of the first two blocks change.
BOOST_AUTO_TEST_CASE(block_scales_become_powers_of_two_and_their_weights_follow) {
  for (const char* wanted : {"as_stored", "power_of_two"}) {
    const bool anew = std::string(wanted) == "power_of_two";
    const auto model = make_model(
        "llama", with_small_blocks(small_decoder(
                     {{"num_hidden_layers", "1"}, {"hidden_size", "12"}, {"scales", wanted}})));
    Checkpoint checkpoint = ones(*model);
    // [32, 12] in blocks of 4: worker 1 has rows 16 to 31, which are rows 4 to 7 of the scales.
    auto& scales = checkpoint.bytes.at(kAttention + "q_proj.weight_scale_inv");
    const float row[] = {0.3F, 0.7F, 1.0F};
    for (std::size_t block_row = 0; block_row < 8; ++block_row) {
      std::memcpy(scales.data() + block_row * sizeof row, row, sizeof row);
    }
    ScaledWorker worker("inplace", *model, 1);
    worker.round(checkpoint, 1);
    const auto live = live_bytes(*worker.sink);
    const auto kept = floats(live.at(kAttention + "qkv_proj.weight_scale_inv"));
    const auto& weight = live.at(kAttention + "qkv_proj.weight");
    for (std::size_t r = 0; r < 16; ++r) {
      // 0.3 / 0.5 = 0.6, nearest 0.625; 0.7, nearest 0.6875; 1.
      const std::byte expected[] = {std::byte(anew ? 0x32 : 0x38), std::byte(anew ? 0x33 : 0x38),
                                    std::byte{0x38}};
      for (std::size_t c = 0; c < 12; ++c) {
        BOOST_TEST((weight[r * 12 + c] == expected[c / 4]));
      }
      BOOST_TEST(kept[r / 4 * 3] == (anew ? 0.5F : 0.3F));
      BOOST_TEST(kept[r / 4 * 3 + 1] == (anew ? 1.0F : 0.7F));
      BOOST_TEST(kept[r / 4 * 3 + 2] == 1.0F);
    }
  }
}

/// Also those of prediction layers, and under the names of another engine.
BOOST_AUTO_TEST_CASE(every_weight_with_block_scales_is_quantised_anew) {
  for (const Engine engine : {Engine::vllm, Engine::sglang}) {
    const auto model = make_model(
        "deepseek_v3",
        with_small_blocks(small_mla(
            {{"num_nextn_predict_layers", "1"}, {"draft", "also"}, {"scales", "power_of_two"}})));
    const WorkerModel worker = model->worker({.workers = 2, .tensor_parallel = 2, .engine = engine},
                                             0, model->catalogue());
    check_worker_model(worker, model->catalogue());
    const auto scaled = std::count_if(
        worker.parameters.begin(), worker.parameters.end(),
        [](const WorkerParameter& p) { return p.name.ends_with("weight_scale_inv"); });
    BOOST_TEST(scaled > 20);
    BOOST_TEST(std::cmp_equal(worker.rewrites.size(), scaled));
  }
}

BOOST_AUTO_TEST_CASE(scales_that_a_model_does_not_have_cannot_be_changed) {
  const auto refused = [](const Options& options) {
    return thrown_by([&] { (void)tensor_scaled(options); });
  };
  BOOST_TEST(refused({{"scales", "power_of_two"}}).mentions("one scale a block"));
  BOOST_TEST(refused({{"scales", "largest"}}).mentions("as_stored, one or power_of_two"));
  BOOST_TEST(thrown_by([] {
               (void)make_model("llama", small_decoder({{"scales", "one"}}));
             }).mentions("one scale a tensor"));
}

BOOST_AUTO_TEST_CASE(a_parameter_is_rewritten_once_and_only_when_it_is_kept_as_it_came) {
  const TensorInfo tensor = {"w", DType::f8_e4m3, {4}};
  WorkerModel model;
  model.parameters = {{"w", DType::f8_e4m3, {4}, {{"w", {{0}, {4}}, 0, {1}}}, {}}};
  const auto nothing = [](std::span<const WritableView>) {};
  model.rewrites = {{{"w"}, "turned round", nothing}};
  BOOST_TEST(!thrown_by([&] { check_worker_model(model, {tensor}); }).any);
  model.rewrites.push_back(model.rewrites.front());
  BOOST_TEST(thrown_by([&] { check_worker_model(model, {tensor}); }).mentions("rewritten twice"));
  model.rewrites = {{{"v"}, "turned round", nothing}};
  BOOST_TEST(thrown_by([&] {
               check_worker_model(model, {tensor});
             }).mentions("'v' cannot be turned round"));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
