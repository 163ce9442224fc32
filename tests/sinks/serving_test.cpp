// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What readers see while rounds run, fail and repeat: versions, addresses, derived tensors, and
/// parameters that live in a kernel's form.

#include <algorithm>
#include <atomic>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <set>
#include <thread>

#include "tests/sinks/fixtures.hpp"
#include "tests/sinks/small_models.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::Checkpoint;
using testing::CheckpointStream;
using testing::fallback_names;
using testing::live_bytes;
using testing::make_checkpoint;
using testing::make_model;
using testing::make_sink;
using testing::Models;
using testing::models_of;
using testing::run_round;
using testing::small_decoder;
using testing::small_mla;
using testing::specs_of;
using testing::thrown_by;
using testing::with_small_blocks;
using testing::write_direct;

constexpr Rank kRank = 3;  // the sinks' first worker

/// One worker of a small model, after a first round.
struct Worker {
  Worker(const std::string& sink_name, const std::shared_ptr<const Models>& models,
         const Catalogue& tensors, Options options = {})
      : catalogue(tensors) {
    options.emplace("drain", "0");
    sink = make_sink(sink_name, models, 0, options);
    resolutions = sink->resolve(specs_of(catalogue));
  }

  void round(std::uint64_t version, int values) {
    run_round(*sink, resolutions, kRank, make_checkpoint(catalogue, values), version);
  }

  Catalogue catalogue;
  std::unique_ptr<WeightSink> sink;
  std::vector<Resolution> resolutions;
};

Worker decoder_worker(const std::string& sink, const Options& options = {}) {
  const auto model = make_model("qwen3", small_decoder({{"num_hidden_layers", "1"}}));
  return {sink, models_of(*model, 2, 2, model->catalogue()), model->catalogue(), options};
}

/// Hands over some tensors, and then the trainer is gone.
class TornStream final : public TensorStream {
 public:
  TornStream(const Checkpoint& checkpoint, const std::vector<std::string>& names, std::size_t count)
      : whole_(checkpoint, names), count_(count) {}
  std::optional<FullTensor> next() override {
    if (count_-- == 0) {
      throw Error(Errc::peer_lost, "the trainer left");
    }
    return whole_.next();
  }

 private:
  CheckpointStream whole_;
  std::size_t count_;
};

/// A round that ends after @p count tensors, direct and full ones.
void failed_round(Worker& worker, std::uint64_t version, int values, std::size_t count) {
  const Checkpoint checkpoint = make_checkpoint(worker.catalogue, values);
  worker.sink->begin(version);
  write_direct(*worker.sink, worker.resolutions, kRank, checkpoint, count);
  const auto names = fallback_names(worker.resolutions, checkpoint.catalogue);
  if (!names.empty()) {
    TornStream stream(checkpoint, names, std::min(count, names.size() - 1));
    BOOST_TEST(thrown_by([&] { worker.sink->load_weights(stream); }).mentions("trainer left"));
  }
  worker.sink->roll_back();
}

std::map<std::string, std::vector<std::byte>> served_bytes(WeightSink& sink) {
  std::map<std::string, std::vector<std::byte>> result;
  const ServedWeights served = sink.serve();
  for (const LiveParameter& parameter : served.parameters) {
    result.emplace(parameter.name,
                   std::vector<std::byte>(parameter.buffer.data,
                                          parameter.buffer.data + parameter.buffer.bytes));
  }
  return result;
}

/// One tensor straight into one parameter, and what else is said of it.
std::shared_ptr<Models> one_parameter(const TensorInfo& tensor) {
  WorkerParameter parameter;
  parameter.name = tensor.name;
  parameter.dtype = tensor.dtype;
  parameter.shape = tensor.shape;
  parameter.sections = {{tensor.name, Box::whole(tensor.shape), 0, row_major(tensor.shape)}};
  WorkerModel model;
  model.parameters = {parameter};
  return std::make_shared<Models>(1, model);
}

std::vector<float> floats_of(WeightSink& sink, const std::string& name) {
  const auto bytes = live_bytes(sink).at(name);
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

DerivedTensor doubled(const std::string& input, const Shape& shape) {
  return {"doubled", {}, shape, {input}, [](std::span<const ParameterView> in, std::byte* out) {
            for (Index i = 0; i < element_count(in[0].shape); ++i) {
              float value = 0;
              std::memcpy(&value, in[0].data + 4 * i, 4);
              value *= 2;
              std::memcpy(out + 4 * i, &value, 4);
            }
          }};
}

BOOST_AUTO_TEST_SUITE(sinks)
BOOST_AUTO_TEST_SUITE(serving)

// C06
BOOST_DATA_TEST_CASE(a_round_that_fails_at_any_tensor_leaves_shadow_as_it_was_and_inplace_invalid,
                     bdata::make({"fused", "strict"}), direct) {
  const std::size_t tensors = decoder_worker("inplace").catalogue.size();
  for (std::size_t count = 0; count < tensors; ++count) {
    Worker shadow = decoder_worker("shadow", {{"direct", direct}});
    shadow.round(1, 1);
    const auto before = live_bytes(*shadow.sink);
    failed_round(shadow, 2, 2, count);
    BOOST_TEST((live_bytes(*shadow.sink) == before));
    BOOST_TEST((shadow.sink->version() == 1u));
    BOOST_TEST((served_bytes(*shadow.sink) == before));
    shadow.round(3, 3);
    BOOST_TEST((shadow.sink->version() == 3u));

    Worker inplace = decoder_worker("inplace", {{"direct", direct}});
    inplace.round(1, 1);
    failed_round(inplace, 2, 2, count);
    BOOST_TEST(!inplace.sink->version());
    BOOST_TEST((thrown_by([&] { (void)inplace.sink->serve(); }).code == Errc::unavailable));
    inplace.round(3, 3);
    BOOST_TEST((live_bytes(*inplace.sink) == live_bytes(*shadow.sink)));
    BOOST_TEST((inplace.sink->serve().version == 3u));
  }
}

BOOST_AUTO_TEST_CASE(shadow_serves_the_old_version_until_the_commit) {
  Worker worker = decoder_worker("shadow");
  BOOST_TEST((thrown_by([&] { (void)worker.sink->serve(); }).code == Errc::unavailable));
  worker.round(1, 1);
  const auto old = served_bytes(*worker.sink);
  const Checkpoint next = make_checkpoint(worker.catalogue, 2);
  worker.sink->begin(2);
  BOOST_TEST((served_bytes(*worker.sink) == old));
  write_direct(*worker.sink, worker.resolutions, kRank, next);
  BOOST_TEST((served_bytes(*worker.sink) == old));
  worker.sink->accept(2);
  BOOST_TEST((worker.sink->serve().version == 1u));
  BOOST_TEST((served_bytes(*worker.sink) == old));
  worker.sink->commit(2);
  BOOST_TEST((worker.sink->serve().version == 2u));
  BOOST_TEST((served_bytes(*worker.sink) != old));
}

BOOST_DATA_TEST_CASE(live_addresses_never_change, bdata::make({"inplace", "shadow"}), name) {
  Worker worker = decoder_worker(name);
  std::vector<const std::byte*> first;
  for (std::uint64_t version = 1; version <= 3; ++version) {
    worker.round(version, static_cast<int>(version));
    std::vector<const std::byte*> now;
    for (const LiveParameter& parameter : worker.sink->live()) {
      now.push_back(parameter.buffer.data);
    }
    first = first.empty() ? now : first;
    BOOST_TEST((now == first));
  }
}

BOOST_DATA_TEST_CASE(two_rounds_with_the_same_weights_leave_the_bytes_of_one,
                     bdata::make({"inplace", "shadow", "load_weights"}), name) {
  Worker worker = decoder_worker(name);
  worker.round(1, 1);
  const auto once = live_bytes(*worker.sink);
  worker.round(2, 1);
  BOOST_TEST((live_bytes(*worker.sink) == once));
}

BOOST_DATA_TEST_CASE(versions_only_grow, bdata::make({"inplace", "shadow"}), name) {
  Worker worker = decoder_worker(name);
  worker.round(5, 1);
  for (const std::uint64_t version : {0U, 1U, 5U}) {
    BOOST_TEST(thrown_by([&] { worker.sink->begin(version); }).mentions("versions only grow"));
    BOOST_TEST((worker.sink->version() == 5u));
  }
  worker.round(6, 2);
  BOOST_TEST((worker.sink->version() == 6u));
}

BOOST_AUTO_TEST_CASE(a_reader_holds_off_the_writer_and_may_come_back_afterwards) {
  for (const char* name : {"inplace", "shadow"}) {
    Worker worker = decoder_worker(name);
    worker.round(1, 1);
    const auto late = [&] { return thrown_by([&] { worker.round(2, 2); }); };
    {
      const ServedWeights served = worker.sink->serve();
      const ServedWeights again = served;  // one reader, however many copies
      const auto refused = late();
      BOOST_TEST((refused.code == Errc::timed_out));
      BOOST_TEST(refused.mentions("1 readers"), refused.text);
      BOOST_TEST((worker.sink->version() == 1u));
      BOOST_TEST((worker.sink->serve().version == 1u));
    }
    BOOST_TEST(!late().any);
    BOOST_TEST((worker.sink->serve().version == 2u));
  }
}

/// Readers in other threads see one version, whole, at every moment.
BOOST_AUTO_TEST_CASE(readers_of_a_shadow_never_see_a_mix_of_versions) {
  const TensorInfo tensor = {"w", DType::f32, {4096}};
  Worker worker("shadow", one_parameter(tensor), {tensor}, {{"drain", "60"}});
  const auto fill = [&](std::uint64_t version) {
    Checkpoint checkpoint{{tensor}, {}};
    std::vector<std::byte> bytes(4096 * 4);
    for (std::size_t i = 0; i < 4096; ++i) {
      const auto value = static_cast<float>(version);
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    }
    checkpoint.bytes.emplace("w", bytes);
    run_round(*worker.sink, worker.resolutions, kRank, checkpoint, version);
  };
  fill(1);
  std::atomic<bool> stop = false;
  std::atomic<int> mixed = 0;
  std::thread reader([&] {
    while (!stop) {
      try {
        const ServedWeights served = worker.sink->serve();
        for (std::size_t i = 0; i < 4096; ++i) {
          float value = 0;
          std::memcpy(&value, served.parameters[0].buffer.data + 4 * i, 4);
          mixed += value == static_cast<float>(served.version) ? 0 : 1;
        }
      } catch (const Error&) {  // the exchange is under way
        std::this_thread::yield();
      }
    }
  });
  for (std::uint64_t version = 2; version <= 30; ++version) {
    fill(version);
  }
  stop = true;
  reader.join();
  BOOST_TEST(mixed == 0);
}

// B13
BOOST_DATA_TEST_CASE(derived_tensors_follow_their_inputs_after_a_commit,
                     bdata::make({"inplace", "shadow", "load_weights"}), name) {
  const TensorInfo tensor = {"w", DType::f32, {2, 3}};
  const auto models = one_parameter(tensor);
  auto sink = make_sink(name, models, 0, {});
  sink->derive(doubled("w", {2, 3}));
  const auto resolutions = sink->resolve(specs_of({tensor}));
  for (int round = 1; round <= 2; ++round) {
    run_round(*sink, resolutions, kRank, make_checkpoint({tensor}, round),
              static_cast<std::uint64_t>(round));
    const auto w = floats_of(*sink, "w");
    const auto derived = floats_of(*sink, "doubled");
    for (std::size_t i = 0; i < w.size(); ++i) {
      BOOST_TEST(derived[i] == 2 * w[i]);
    }
  }
}

/// An engine that slept has thrown all of its memory away, with padding and what is derived.
BOOST_DATA_TEST_CASE(a_full_round_restores_every_byte_that_was_thrown_away,  // C17
                     bdata::make({"inplace", "shadow"}) * bdata::make({"fused", "strict"}), name,
                     direct) {
  // 7 tokens on 8 workers: this one has padding in its vocabulary, and in its padded shares.
  const auto model = make_model("llama", {{"hidden_size", "6"},
                                          {"num_hidden_layers", "2"},
                                          {"num_attention_heads", "8"},
                                          {"num_key_value_heads", "8"},
                                          {"head_dim", "2"},
                                          {"intermediate_size", "24"},
                                          {"intermediate_align", "16"},
                                          {"vocab_size", "7"}});
  const auto models = models_of(*model, 8, 8, model->catalogue());
  BOOST_REQUIRE(std::any_of(models->front().parameters.begin(), models->front().parameters.end(),
                            [](const auto& parameter) { return !parameter.padding.empty(); }));
  const auto sink = make_sink(name, models, 0, {{"direct", direct}});
  sink->derive({"doubled", DType::f32, {6}, {"model.norm.weight"}, [](auto inputs, std::byte* out) {
                  for (std::size_t i = 0; i < 6; ++i) {
                    std::memcpy(out + 4 * i, inputs[0].data + 2 * i, 2);
                    std::memcpy(out + 4 * i + 2, inputs[0].data + 2 * i, 2);
                  }
                }});
  const auto resolutions = sink->resolve(specs_of(model->catalogue()));
  const Checkpoint checkpoint = make_checkpoint(model->catalogue());
  run_round(*sink, resolutions, kRank, checkpoint, 1);
  const auto before = live_bytes(*sink);
  BOOST_REQUIRE(before.count("doubled") == 1U);
  // Every byte becomes another one, so that none is right by chance.
  for (const LiveParameter& parameter : sink->live()) {
    for (std::uint64_t i = 0; i < parameter.buffer.bytes; ++i) {
      parameter.buffer.data[i] ^= std::byte{0x5a};
    }
  }
  const auto lost = [&] {
    std::size_t bytes = 0;
    for (const auto& [parameter, now] : live_bytes(*sink)) {
      const auto& was = before.at(parameter);
      for (std::size_t i = 0; i < now.size(); ++i) {
        bytes += now[i] == was.at(i) ? 0U : 1U;
      }
    }
    return bytes;
  };
  std::size_t all = 0;
  for (const auto& [parameter, was] : before) {
    all += was.size();
  }
  BOOST_TEST(lost() == all);
  run_round(*sink, resolutions, kRank, checkpoint, 2);
  for (const auto& [parameter, now] : live_bytes(*sink)) {
    BOOST_TEST((now == before.at(parameter)), parameter << " was not restored");
  }
  BOOST_TEST(lost() == 0U);
  BOOST_TEST((sink->version() == 2U));
}

// B13
BOOST_AUTO_TEST_CASE(a_derived_tensor_without_a_refresh_is_refused) {
  const TensorInfo tensor = {"w", DType::f32, {2}};
  const auto models = one_parameter(tensor);
  models->front().derived.push_back({"absorbed", {}, {2}, {"w"}, {}});
  const auto sink = make_sink("inplace", models, 0, {});
  const auto refused = thrown_by([&] { (void)sink->resolve(specs_of({tensor})); });
  BOOST_TEST(refused.mentions("'absorbed' is derived from 'w'"), refused.text);
  BOOST_TEST(refused.mentions("stale"), refused.text);
  const auto other = make_sink("inplace", one_parameter(tensor), 0, {});
  BOOST_TEST(thrown_by([&] { other->derive({"d", {}, {2}, {"w"}, {}}); }).mentions("stale"));
  BOOST_TEST(thrown_by([&] { other->derive(doubled("v", {2})); }).mentions("no parameter 'v'"));
}

/// W_UK_T[h, i, k] = kv_b[h * (nope + v) + i, k]; W_UV[h, k, j] = kv_b[h * (nope + v) + nope + j,
/// k].
BOOST_AUTO_TEST_CASE(absorbed_projections_are_rebuilt_from_kv_b) {
  const auto model = make_model("deepseek_v3", small_mla({{"num_hidden_layers", "1"}}));
  Worker worker("inplace", models_of(*model, 2, 2, model->catalogue()), model->catalogue());
  for (int round = 1; round <= 2; ++round) {
    worker.round(static_cast<std::uint64_t>(round), round);
    const auto live = live_bytes(*worker.sink);
    const std::string attention = "model.layers.0.self_attn.";
    const auto at = [&](const std::string& name, std::size_t element) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, live.at(attention + name).data() + 2 * element, 2);
      return bits;
    };
    for (std::size_t h = 0; h < 4; ++h) {
      for (std::size_t k = 0; k < 6; ++k) {
        for (std::size_t i = 0; i < 4; ++i) {
          BOOST_TEST(at("W_UK_T", (h * 4 + i) * 6 + k) ==
                     at("kv_b_proj.weight", (h * 8 + i) * 6 + k));
          BOOST_TEST(at("W_UV", (h * 6 + k) * 4 + i) ==
                     at("kv_b_proj.weight", (h * 8 + 4 + i) * 6 + k));
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(absorbed_projections_of_f8_weights_are_scaled_by_their_blocks) {
  const auto model =
      make_model("deepseek_v3", with_small_blocks(small_mla({{"num_hidden_layers", "1"}})));
  Worker worker("shadow", models_of(*model, 1, 1, model->catalogue()), model->catalogue());
  Checkpoint checkpoint = make_checkpoint(worker.catalogue);
  const std::string kv_b = "model.layers.0.self_attn.kv_b_proj.weight";
  auto& weight = checkpoint.bytes.at(kv_b);                          // [64, 6]
  const std::uint8_t bits[] = {0x38, 0x40, 0x3c, 0xb8, 0x01, 0x7e};  // 1 2 1.5 -1 2^-9 448
  const float values[] = {1, 2, 1.5F, -1, 0.001953125F, 448};
  for (std::size_t i = 0; i < weight.size(); ++i) {
    weight[i] = std::byte{bits[i % 6]};
  }
  auto& scales = checkpoint.bytes.at(kv_b + "_scale_inv");  // [16, 2]
  for (std::size_t i = 0; i < scales.size() / 4; ++i) {
    const auto scale = static_cast<float>(1U << i % 8);
    std::memcpy(scales.data() + 4 * i, &scale, 4);
  }
  run_round(*worker.sink, worker.resolutions, kRank, checkpoint, 1);
  const auto live = live_bytes(*worker.sink);
  const auto& keys = live.at("model.layers.0.self_attn.W_UK_T");  // [8, 4, 6] bf16
  for (std::size_t h = 0; h < 8; ++h) {
    for (std::size_t i = 0; i < 4; ++i) {
      for (std::size_t k = 0; k < 6; ++k) {
        std::uint16_t bf16 = 0;
        std::memcpy(&bf16, keys.data() + 2 * ((h * 4 + i) * 6 + k), 2);
        const std::uint32_t wide = std::uint32_t{bf16} << 16;
        float value = 0;
        std::memcpy(&value, &wide, 4);
        const std::size_t block = (h * 8 + i) / 4 * 2 + k / 4;
        BOOST_TEST(value == values[k] * static_cast<float>(1U << block % 8));
      }
    }
  }
}

/// The kernel wants the halves the other way round: loading twice must not turn them back.
/// B12
BOOST_AUTO_TEST_CASE(a_kernels_form_is_made_from_what_is_loaded_and_never_written_in_place) {
  const TensorInfo tensor = {"w", DType::f32, {4}};
  const auto models = one_parameter(tensor);
  WorkerParameter& parameter = models->front().parameters.front();
  parameter.kernel_form = "halves swapped";
  BOOST_TEST(thrown_by([&] {
               (void)make_sink("inplace", models, 0, {})->resolve(specs_of({tensor}));
             }).mentions("lives in the form 'halves swapped'"));
  parameter.to_kernel_form = [](const ParameterView& loaded, std::byte* live) {
    std::memcpy(live, loaded.data + 8, 8);
    std::memcpy(live + 8, loaded.data, 8);
  };
  for (const char* name : {"inplace", "shadow", "load_weights"}) {
    Worker worker(name, models, {tensor});
    BOOST_TEST((worker.resolutions[0].mode == Mode::fallback));
    for (std::uint64_t version = 1; version <= 3; ++version) {
      worker.round(version, 0);
      BOOST_TEST(floats_of(*worker.sink, "w") == (std::vector<float>{3, 4, 1, 2}),
                 boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
