// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Whole jobs of scaled-down models: FSDP2, EP and Megatron trainers to workers under tensor,
/// expert, data and pipeline parallelism, every byte compared with a slow loader.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <map>
#include <optional>
#include <ostream>
#include <stdexcept>

#include "core/api/builtin.hpp"
#include "core/engine/binding.hpp"
#include "core/engine/local_job.hpp"
#include "core/engine/oracle.hpp"
#include "tests/sinks/slow_loader.hpp"
#include "tests/sinks/small_models.hpp"
#include "tests/support/sanitized.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::SlowModel;
using testing::SlowSeat;
using testing::small_decoder;
using testing::small_mla;
using testing::with_small_blocks;

struct Small {
  std::string family;
  Options options;
  SlowModel slow;
  Options megatron = {};  ///< What that source has to be told.
  Options fsdp = {};      ///< And this one, and "ep".
};
std::ostream& operator<<(std::ostream& os, const Small& s) { return os << s.family; }

Options without(Options options, const char* key) {
  options.erase(key);
  return options;
}

/// f8 with a scale a tensor.
Options with_tensor_scales(Options options) {
  options.merge(
      Options{{"quantization_config", "{}"}, {"quantization_config.quant_method", "fp8"}});
  return options;
}

/// Made-up values with scales that may be multiplied with: no two alike.
class ScaledValues final : public TensorValues {
 public:
  explicit ScaledValues(std::shared_ptr<const TensorValues> values) : values_(std::move(values)) {}
  std::string_view name() const noexcept override { return values_->name(); }
  const Catalogue& catalogue() const override { return values_->catalogue(); }
  void read(std::string_view tensor, const Box& box, std::byte* data,
            const Strides& strides) const override {
    values_->read(tensor, box, data, strides);
    if (tensor.find("weight_scale") == tensor.npos) {
      return;
    }
    const Shape extents = box.extents();
    const Strides inside = row_major(extents);
    for (Index i = 0; i < box.volume(); ++i) {
      Index at = 0;
      for (std::size_t d = 0; d < extents.size(); ++d) {
        at += i / inside[d] % extents[d] * strides[d];
      }
      std::byte* const place = data + at * static_cast<Index>(sizeof(float));
      std::uint32_t bits = 0;
      std::memcpy(&bits, place, sizeof bits);
      const float scale = 0.01F + static_cast<float>(bits >> 8) / 1e6F;
      std::memcpy(place, &scale, sizeof scale);
    }
  }

 private:
  std::shared_ptr<const TensorValues> values_;
};

const SlowModel kDecoder = {.heads = 8, .kv_heads = 2, .head = 4, .layers = 3};
const SlowModel kTied = {.heads = 8, .kv_heads = 2, .head = 4, .layers = 3, .tied = true};
const SlowModel kExperts = {.heads = 8, .kv_heads = 2, .head = 4, .experts = 6, .layers = 3};
const SlowModel kMla = {.heads = 8, .kv_heads = 8, .head = 8, .experts = 6, .layers = 3};

const std::vector<Small> kSmall = {
    {"llama", small_decoder({{"attention_bias", "true"}, {"mlp_bias", "true"}}), kDecoder},
    {"qwen2", small_decoder(), kDecoder},
    {"qwen3", small_decoder({{"tie_word_embeddings", "true"}}), kTied},
    {"qwen3_moe",
     without(small_decoder({{"moe_intermediate_size", "16"}, {"num_experts", "6"}}),
             "intermediate_size"),
     kExperts},
    {"mixtral", small_decoder({{"num_local_experts", "6"}}), kExperts},
    {"deepseek_v3", small_mla({{"num_nextn_predict_layers", "0"}}), kMla},
    {"deepseek_v3",
     with_small_blocks(small_mla({{"num_nextn_predict_layers", "1"}})),
     [] {
       SlowModel model = kMla;
       model.block = 4;
       return model;
     }(),
     {{"block", "4"}}},
    {"deepseek_v3",
     with_small_blocks(small_mla({{"num_nextn_predict_layers", "0"}, {"scales", "power_of_two"}})),
     [] {
       SlowModel model = kMla;
       model.block = 4;
       model.scales = SlowModel::Scales::power_of_two;
       return model;
     }(),
     {{"block", "4"}}},
    {"llama", with_tensor_scales(small_decoder()), kDecoder, {}, {{"buffers", "*.weight_scale"}}},
    {"qwen3_moe",
     with_tensor_scales(without(
         small_decoder({{"moe_intermediate_size", "16"}, {"num_experts", "6"}, {"scales", "one"}}),
         "intermediate_size")),
     [] {
       SlowModel model = kExperts;
       model.scales = SlowModel::Scales::one;
       return model;
     }(),
     {},
     {{"buffers", "*.weight_scale"}}},
    {"kimi_k2",
     with_small_blocks(small_mla()),
     [] {
       SlowModel model = kMla;
       model.block = 4;
       return model;
     }(),
     {{"block", "4"}, {"skip", "*.inv_freq"}}},
    {"gpt_oss",
     small_decoder({{"hidden_size", "32"},
                    {"intermediate_size", "160"},
                    {"num_local_experts", "6"},
                    {"quantization_config", "{}"}}),
     [] {
       SlowModel model = kExperts;
       model.alternating = true;
       return model;
     }(),
     {{"expert_parallel", "2"}, {"expert_tensor_parallel", "1"}}},
    {"gpt_oss",
     small_decoder(
         {{"hidden_size", "20"}, {"intermediate_size", "44"}, {"num_local_experts", "6"}}),
     [] {
       SlowModel model = kExperts;
       model.alternating = true;
       model.together = 1;
       return model;
     }()},
    {"gemma3_text", small_decoder(), kTied},
    {"gemma3",
     small_decoder({{"vision_config.hidden_size", "16"},
                    {"vision_config.num_hidden_layers", "2"},
                    {"vision_config.num_attention_heads", "8"},
                    {"vision_config.intermediate_size", "24"},
                    {"vision_config.image_size", "28"},
                    {"vision_config.patch_size", "14"}}),
     kTied},
    {"gpt2",
     {{"n_embd", "24"},
      {"n_layer", "3"},
      {"n_head", "8"},
      {"n_inner", "40"},
      {"n_positions", "5"},
      {"vocab_size", "203"}},
     {.heads = 8, .kv_heads = 8, .head = 3, .layers = 3, .gpt2 = true, .tied = true},
     {{"skip", "*.attn.bias"}}},
    {"bert",
     {{"hidden_size", "24"},
      {"num_hidden_layers", "3"},
      {"num_attention_heads", "8"},
      {"intermediate_size", "40"},
      {"vocab_size", "37"},
      {"max_position_embeddings", "11"},
      {"type_vocab_size", "2"}},
     {.heads = 8, .kv_heads = 8, .head = 3, .layers = 3}},
};

/// How workers share it, with what an engine would say of worker w.
struct Sharing {
  const char* why;
  Deployment deployment;
  bool experts = false;  ///< Only of interest for them.
  SlowSeat (*seat)(Rank w);
};
std::ostream& operator<<(std::ostream& os, const Sharing& s) { return os << s.why; }

SlowSeat tensor_seat(Index tp, Rank w) {
  SlowSeat seat;
  seat.tp = seat.attention = seat.moe_tp = tp;
  seat.tp_rank = seat.attention_rank = seat.moe_tp_rank = w % tp;
  seat.slots = {0, 1, 2, 3, 4, 5};
  seat.end_layer = 3;
  return seat;
}

SlowSeat with_experts(SlowSeat seat, std::vector<Index> slots, Index moe_tp = 1,
                      Index moe_tp_rank = 0) {
  seat.slots = std::move(slots);
  seat.moe_tp = moe_tp;
  seat.moe_tp_rank = moe_tp_rank;
  return seat;
}

const std::vector<Sharing> kSharings = {
    {"TP 1", {1, 1}, false, [](Rank w) { return tensor_seat(1, w); }},
    {"TP 2, two replicas", {4, 2}, false, [](Rank w) { return tensor_seat(2, w); }},
    {"TP 4", {4, 4}, false, [](Rank w) { return tensor_seat(4, w); }},
    {"TP 8", {8, 8}, false, [](Rank w) { return tensor_seat(8, w); }},
    // Three layers on two stages: the remainder goes to the first.
    {"PP 2, TP 2",
     {.workers = 4, .tensor_parallel = 2, .pipeline_parallel = 2},
     false,
     [](Rank w) {
       SlowSeat seat = tensor_seat(2, w);
       seat.first_stage = w < 2;
       seat.last_stage = !seat.first_stage;
       seat.first_layer = w < 2 ? 0 : 2;
       seat.end_layer = w < 2 ? 2 : 3;
       return seat;
     }},
    {"EP 2",
     {.workers = 2, .tensor_parallel = 2, .expert_parallel = 2},
     true,
     [](Rank w) {
       return with_experts(tensor_seat(2, w),
                           w == 0 ? std::vector<Index>{0, 1, 2} : std::vector<Index>{3, 4, 5});
     }},
    {"EP 4 over DP 2 and TP 2, six experts",
     {.workers = 4, .tensor_parallel = 2, .data_parallel = 2, .expert_parallel = 4},
     true,
     [](Rank w) {
       const std::vector<std::vector<Index>> slots = {{0, 1}, {2, 3}, {4}, {5}};
       return with_experts(tensor_seat(2, w), slots[static_cast<std::size_t>(w)]);
     }},
    {"DP 2 and TP 4 without EP: experts cut eight times",
     {.workers = 8, .tensor_parallel = 4, .data_parallel = 2},
     true,
     [](Rank w) {
       return with_experts(tensor_seat(4, w), {0, 1, 2, 3, 4, 5}, 8, w);
     }},
    {"EP 4 with two redundant slots, one expert twice on a worker",
     {.workers = 4,
      .tensor_parallel = 4,
      .expert_parallel = 4,
      .experts = {.redundant = 2,
                  .slots = {{0, {5, 5, 3, 2, 1, 0, 4, 1}},
                            {1, {5, 5, 3, 2, 1, 0, 4, 1}},
                            {2, {5, 5, 3, 2, 1, 0, 4, 1}}},
                  .version = 7}},
     true,
     [](Rank w) {
       const std::vector<std::vector<Index>> slots = {{5, 5}, {3, 2}, {1, 0}, {4, 1}};
       return with_experts(tensor_seat(4, w), slots[static_cast<std::size_t>(w)]);
     }},
    {"SGLang: attention DP 2, EP 2 inside TP 4",
     {.workers = 4,
      .tensor_parallel = 4,
      .data_parallel = 2,
      .expert_parallel = 2,
      .engine = Engine::sglang},
     true,
     [](Rank w) {
       SlowSeat seat = with_experts(
           tensor_seat(4, w), w < 2 ? std::vector<Index>{0, 1, 2} : std::vector<Index>{3, 4, 5}, 2,
           w % 2);
       seat.attention = 2;
       seat.attention_rank = w % 2;
       seat.sglang = true;
       return seat;
     }},
};

struct Trainer {
  const char* why;
  std::string kind;
  Options options;
  Rank ranks;
};

const std::vector<Trainer> kTrainers = {
    {"FSDP2 over three ranks", "fsdp", {}, 3},
    {"EP 2 over four ranks", "ep", {{"expert_parallel", "2"}}, 4},
    {"Megatron, TP 2 and PP 2",
     "megatron",
     {{"tensor_parallel", "2"}, {"pipeline_parallel", "2"}, {"stage_layers", "2,1"}},
     4},
};

Options trainer_options(const Trainer& trainer, const Small& small) {
  Options options = trainer.options;
  if (trainer.kind == "megatron") {
    options["heads"] = std::to_string(small.slow.heads);
    options["groups"] = std::to_string(small.slow.kv_heads);
    options["head_dim"] = std::to_string(small.slow.head);
    options["vocab_divisor"] = "8";
    for (const auto& [key, value] : small.megatron) {
      options[key] = value;
    }
  } else {
    options.insert(small.fsdp.begin(), small.fsdp.end());
  }
  return options;
}

/// Does what another sink does, and refuses the second version at the last moment.
class RefusingSink final : public WeightSink {
 public:
  explicit RefusingSink(std::unique_ptr<WeightSink> sink) : sink_(std::move(sink)) {}

  std::string_view name() const noexcept override { return sink_->name(); }
  std::vector<Resolution> resolve(std::span<const ParamSpec> params) override {
    return sink_->resolve(params);
  }
  void begin(std::uint64_t version) override { sink_->begin(version); }
  std::vector<ParamLoan> lend() override { return sink_->lend(); }
  void load_weights(TensorStream& stream) override { sink_->load_weights(stream); }
  void accept(std::uint64_t version) override {
    if (version == 2) {
      throw std::runtime_error("this worker is out of memory");
    }
    sink_->accept(version);
  }
  void commit(std::uint64_t version) override { sink_->commit(version); }
  void roll_back() noexcept override { sink_->roll_back(); }
  std::optional<std::uint64_t> version() const noexcept override { return sink_->version(); }
  ServedWeights serve() override { return sink_->serve(); }
  std::vector<LiveParameter> live() override { return sink_->live(); }

 private:
  std::unique_ptr<WeightSink> sink_;
};

/// A whole job; throws when a byte of a worker is not what the slow loader put there.
class Reshard {
 public:
  Reshard(const Small& small, const Sharing& shape, const Trainer& trainer)
      : small_(small), shape_(shape), trainer_(trainer), registries_(builtin_registries()) {
    const auto family = registries_.models.create(small.family, {small.options});
    values_ = std::make_shared<ScaledValues>(
        registries_.values.create("synthetic", {{}, family->catalogue()}));
    models_ = std::make_shared<const WorkerModels>(
        family->workers(shape.deployment, catalogue_of_source()));
  }

  /// @return how many tensors fell back.
  std::size_t run(const std::string& sink, const Options& options, std::uint64_t rounds = 1) {
    const auto source = make_source(0);
    const auto resolutions = make_sink(sink, options, 0)->resolve(source->params());
    const Problem problem = make_problem(source->params(), resolutions);
    const Plan plan = registries_.planners.create("striped", {})
                          ->plan(problem, Topology::single_island(problem.world_size()));
    check_plan(plan, problem);
    std::vector<LocalRank>& ranks = ranks_;
    ranks.resize(static_cast<std::size_t>(problem.world_size()));
    for (Rank rank = 0; rank < problem.world_size(); ++rank) {
      LocalRank& parts = ranks[static_cast<std::size_t>(rank)];
      parts.transport = registries_.transports.create("loopback", {});
      if (rank < trainer_.ranks) {
        parts.source = make_source(rank);
      } else {
        parts.sink = make_sink(sink, options, rank - trainer_.ranks);
        if (refusing_worker && *refusing_worker == rank - trainer_.ranks) {
          parts.sink = std::make_unique<RefusingSink>(std::move(parts.sink));
        }
        parts.sink->resolve(source->params());
      }
    }
    LocalJobOptions job;
    job.rounds = rounds;
    job.limits.pool_bytes = 4096;
    job.inspect = [&](const RankView& view) {
      if (view.sink != nullptr) {
        compare(view.rank - trainer_.ranks, *view.sink);
      }
    };
    run_local_job(problem, plan, resolutions, ranks, job);
    return static_cast<std::size_t>(std::count_if(
        resolutions.begin(), resolutions.end(),
        [](const Resolution& resolution) { return resolution.mode == Mode::fallback; }));
  }

  std::optional<Rank> refusing_worker;  ///< In the second round.

  /// After a job: a worker's sink.
  WeightSink& sink(Rank w) { return *ranks_[static_cast<std::size_t>(trainer_.ranks + w)].sink; }

  /// What the slow loader puts there is still there.
  void compare(Rank w) { compare(w, sink(w)); }

 private:
  Catalogue catalogue_of_source() {
    Catalogue held;
    const auto source = make_source(0);
    for (const ParamSpec& param : source->params()) {
      held.push_back({param.name, param.dtype, param.shape});
    }
    return held;
  }

  std::unique_ptr<WeightSource> make_source(Rank rank) {
    return registries_.sources.create(
        trainer_.kind, {trainer_options(trainer_, small_), rank, trainer_.ranks, values_, {}});
  }

  std::unique_ptr<WeightSink> make_sink(const std::string& name, const Options& options, Rank w) {
    SinkContext context;
    context.options = options;
    context.rank = trainer_.ranks + w;
    context.first_worker = trainer_.ranks;
    context.models = models_;
    return registries_.sinks.create(name, context);
  }

  void compare(Rank w, WeightSink& sink) const {
    std::vector<LiveParameter> live = sink.live();
    const WorkerModel& model = *(*models_)[static_cast<std::size_t>(w)];
    const Comparison oracle = verify_model(model, trainer_.ranks + w, live, *values_);
    if (!oracle.ok()) {
      throw std::logic_error("the oracle disagrees: " + oracle.first);
    }
    live.resize(live.size() - model.derived.size());
    const auto expected = testing::slowly_load(small_.slow, shape_.seat(w), live, *values_);
    for (const LiveParameter& parameter : live) {
      const auto& bytes = expected.at(parameter.name);
      const auto wrong =
          std::mismatch(bytes.begin(), bytes.end(), parameter.buffer.data).first - bytes.begin();
      if (static_cast<std::size_t>(wrong) != bytes.size()) {
        throw std::logic_error("worker " + std::to_string(w) + ", parameter " + parameter.name +
                               " " + to_string(parameter.shape) + ": byte " +
                               std::to_string(wrong) + " is wrong");
      }
    }
  }

  const Small& small_;
  const Sharing& shape_;
  const Trainer& trainer_;
  Registries registries_;
  std::shared_ptr<const TensorValues> values_;
  std::shared_ptr<const WorkerModels> models_;
  std::vector<LocalRank> ranks_;
};

std::string failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

bool fits(const Small& small, const Sharing& shape) {
  return small.slow.experts > 0 || !shape.experts;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(sinks)
BOOST_AUTO_TEST_SUITE(reshard)

/// Sanitizers make this a dozen times slower: there every case has one trainer, each in turn.
std::vector<Trainer> trainers_of_a_case() {
  if (!testing::kSanitized) {
    return kTrainers;
  }
  static std::size_t turn = 0;
  return {kTrainers[turn++ % kTrainers.size()]};
}

// C15
BOOST_DATA_TEST_CASE(every_byte_is_what_the_engines_loader_puts_there,
                     bdata::make(kSmall) * bdata::make(kSharings), small, shape) {
  if (!fits(small, shape)) {
    return;
  }
  for (const Trainer& trainer : trainers_of_a_case()) {
    const std::string error = failure_of([&] {
      const std::size_t fell_back = Reshard(small, shape, trainer).run("inplace", {});
      BOOST_TEST(fell_back == 0U);
    });
    BOOST_TEST(error == "", trainer.why << ": " << error);
  }
}

BOOST_DATA_TEST_CASE(strict_fused_loaded_and_shadowed_models_are_the_same_bytes,
                     bdata::make(kSmall), small) {
  struct Way {
    const char* sink;
    Options options;
    bool falls_back;
  };
  const std::vector<Way> ways = {{"inplace", {{"direct", "strict"}}, true},
                                 {"shadow", {{"direct", "fused"}}, false},
                                 {"shadow", {{"direct", "strict"}}, true},
                                 {"load_weights", {}, true}};
  for (const std::size_t s : {std::size_t{2}, std::size_t{4}}) {  // TP 4; PP 2 and TP 2
    for (const Way& way : ways) {
      const std::string error = failure_of([&] {
        // Two rounds with the same weights leave what one leaves.
        const std::size_t fell_back =
            Reshard(small, kSharings[s], kTrainers[0]).run(way.sink, way.options, 2);
        BOOST_TEST((fell_back > 0) == way.falls_back);
      });
      BOOST_TEST(error == "", way.sink << ", " << kSharings[s].why << ": " << error);
    }
  }
}

/// One worker that cannot take the second version keeps all of them on the first. C06, C08
BOOST_AUTO_TEST_CASE(no_worker_commits_what_one_of_them_refuses) {
  for (const char* sink : {"shadow", "inplace"}) {
    Reshard job(kSmall[0], kSharings[2], kTrainers[0]);
    job.refusing_worker = 1;
    const std::string error = failure_of([&] { job.run(sink, {{"direct", "strict"}}, 3); });
    BOOST_TEST(error == "this worker is out of memory");
    for (Rank w = 0; w < 4; ++w) {
      if (std::string(sink) == "shadow") {
        BOOST_TEST((job.sink(w).version() == 1u));
        BOOST_TEST((job.sink(w).serve().version == 1u));
        BOOST_TEST(failure_of([&] { job.compare(w); }) == "");
      } else {
        BOOST_TEST(!job.sink(w).version());
        BOOST_TEST(failure_of([&] { (void)job.sink(w).serve(); }) != "");
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
