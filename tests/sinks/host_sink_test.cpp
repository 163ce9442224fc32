// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <ostream>
#include <set>

#include "core/tensor/cast.hpp"
#include "tests/sinks/fixtures.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::Checkpoint;
using testing::CheckpointStream;
using testing::kFirstWorker;
using testing::live_bytes;
using testing::make_checkpoint;
using testing::make_model;
using testing::make_sink;
using testing::Models;
using testing::models_of;
using testing::run_round;
using testing::specs_of;
using testing::thrown_by;

using Live = std::map<std::string, std::vector<std::byte>>;

/// Sizes of a model under test; kv is 0 for BERT.
struct Size {
  const char* why;
  Index hidden, layers, heads, kv, head, inner, vocab;
  Index align = 1;
  Options more = {};
};
std::ostream& operator<<(std::ostream& os, const Size& s) { return os << s.why; }

std::unique_ptr<ModelFamily> model_of(const Size& s) {
  Options options = {{"hidden_size", std::to_string(s.hidden)},
                     {"num_hidden_layers", std::to_string(s.layers)},
                     {"num_attention_heads", std::to_string(s.heads)},
                     {"intermediate_size", std::to_string(s.inner)},
                     {"vocab_size", std::to_string(s.vocab)},
                     {"intermediate_align", std::to_string(s.align)}};
  if (s.kv == 0) {
    options.merge(Options{{"max_position_embeddings", "11"}, {"type_vocab_size", "2"}});
  } else {
    options.merge(Options{{"num_key_value_heads", std::to_string(s.kv)},
                          {"head_dim", std::to_string(s.head)}});
  }
  for (const auto& [key, value] : s.more) {
    options[key] = value;
  }
  return make_model(s.kv == 0 ? "bert" : "llama", options);
}

const std::vector<Size> kSizes = {
    {"llama, head size apart from hidden size", 12, 2, 8, 8, 3, 40, 200, 1, {}},
    {"llama, 2 key heads and an odd vocabulary", 10, 1, 8, 2, 3, 24, 65, 1, {}},
    {"llama, 1 key head, every bias",
     6,
     1,
     8,
     1,
     2,
     16,
     7,
     1,
     {{"attention_bias", "true"}, {"mlp_bias", "true"}}},
    {"llama, padded shares", 6, 2, 8, 4, 2, 24, 130, 16, {{"mlp_bias", "true"}}},
    {"qwen2, biases of query, key and value", 8, 1, 8, 4, 2, 8, 64, 1, {{"model_type", "qwen2"}}},
    {"qwen3, norms of query and key", 5, 2, 8, 2, 4, 8, 100, 1, {{"model_type", "qwen3"}}},
    {"qwen3 in f32, tied",
     5,
     1,
     8,
     4,
     4,
     16,
     33,
     1,
     {{"model_type", "qwen3"}, {"dtype", "f32"}, {"tie_word_embeddings", "true"}}},
    {"bert", 24, 2, 8, 0, 3, 40, 37, 1, {}},
    {"bert, padded shares", 8, 1, 8, 0, 1, 24, 9, 32, {}},
};

/// What belongs at (row, column) of a local parameter, by the rules of its name, element by
/// element; a tensor without a name stands for 0. A vector has columns only, in `row`.
struct Origin {
  std::string tensor;
  Index row = 0;
  Index column = 0;
};

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  return text.replace(text.find(what), what.size(), by);
}

/// Rows of a fused parameter: the parts' rows of this worker, one part after another.
Origin fused_origin(const std::vector<std::pair<std::string, std::pair<Index, Index>>>& parts,
                    Index room, Index row, Index column) {
  for (const auto& [tensor, rows] : parts) {
    const Index mine = rows.second - rows.first;
    const Index size = room == 0 ? mine : room;
    if (row < size) {
      return row < mine ? Origin{tensor, rows.first + row, column} : Origin{};
    }
    row -= size;
  }
  throw std::logic_error("row outside");
}

Origin origin_of(const Size& s, Index tp, Index rank, const std::string& name, Index row,
                 Index column) {
  const auto ends = [&](const char* part) { return name.find(part) != std::string::npos; };
  const Index head = s.kv == 0 ? s.hidden / s.heads : s.head;
  const Index inner = s.inner / tp;
  const Index room = (inner + s.align - 1) / s.align * s.align;
  if (ends("qkv_proj")) {
    const Index kv_all = s.kv == 0 ? s.heads : s.kv;
    const Index q = s.heads / tp * head;
    const Index kv = std::max<Index>(kv_all / tp, 1) * head;
    const Index q0 = rank * q;
    const Index kv0 = (kv_all >= tp ? rank : rank / (tp / kv_all)) * kv;
    const char* const llama_names[] = {"q_proj", "k_proj", "v_proj"};
    const char* const bert_names[] = {"query", "key", "value"};
    const auto* names = s.kv == 0 ? bert_names : llama_names;
    return fused_origin({{replaced(name, "qkv_proj", names[0]), {q0, q0 + q}},
                         {replaced(name, "qkv_proj", names[1]), {kv0, kv0 + kv}},
                         {replaced(name, "qkv_proj", names[2]), {kv0, kv0 + kv}}},
                        0, row, column);
  }
  if (ends("gate_up_proj")) {
    return fused_origin(
        {{replaced(name, "gate_up_proj", "gate_proj"), {rank * inner, (rank + 1) * inner}},
         {replaced(name, "gate_up_proj", "up_proj"), {rank * inner, (rank + 1) * inner}}},
        room, row, column);
  }
  if (ends("intermediate.dense")) {
    return row < inner ? Origin{name, rank * inner + row, column} : Origin{};
  }
  if (ends("o_proj.weight") || ends("attention.output.dense.weight")) {
    return {name, row, rank * (s.heads / tp) * head + column};
  }
  if (ends("down_proj.weight") || ends("output.dense.weight")) {
    return column < inner ? Origin{name, row, rank * inner + column} : Origin{};
  }
  if (s.kv != 0 && (ends("embed_tokens") || ends("lm_head"))) {
    const Index padded = (s.vocab + 63) / 64 * 64;
    const Index token = rank * (padded / tp) + row;
    return token < s.vocab ? Origin{name, token, column} : Origin{};
  }
  return {name, row, column};
}

std::vector<std::byte> slowly_loaded(const Size& s, Index tp, Index rank,
                                     const LiveParameter& parameter, const Checkpoint& checkpoint) {
  const std::uint64_t item = bytes_of(parameter.dtype);
  const Index columns = parameter.shape.size() == 2 ? parameter.shape[1] : 1;
  std::vector<std::byte> bytes(static_cast<std::uint64_t>(element_count(parameter.shape)) * item);
  for (Index row = 0; row < parameter.shape[0]; ++row) {
    for (Index column = 0; column < columns; ++column) {
      const Origin origin = origin_of(s, tp, rank, parameter.name, row, column);
      if (origin.tensor.empty()) {
        continue;
      }
      const TensorInfo& tensor = checkpoint.info(origin.tensor);
      const Index width = tensor.shape.size() == 2 ? tensor.shape[1] : 1;
      const auto from = static_cast<std::uint64_t>(origin.row * width + origin.column);
      const auto to = static_cast<std::uint64_t>(row * columns + column);
      cast_elements(tensor.dtype, checkpoint.bytes.at(tensor.name).data() + from * item,
                    parameter.dtype, bytes.data() + to * item, 1);
    }
  }
  return bytes;
}

/// A sink that has resolved the whole checkpoint.
struct Ready {
  std::unique_ptr<WeightSink> sink;
  std::vector<Resolution> resolutions;
  Rank rank = 0;

  void round(const Checkpoint& checkpoint, std::uint64_t version) {
    run_round(*sink, resolutions, rank, checkpoint, version);
  }
};

Ready ready(const std::string& name, const std::shared_ptr<const Models>& models, Rank worker,
            const Catalogue& catalogue, const Options& options = {}) {
  Ready result{make_sink(name, models, worker, options, kFirstWorker), {}, kFirstWorker + worker};
  result.resolutions = result.sink->resolve(specs_of(catalogue));
  return result;
}

std::map<std::string, Resolution> by_name(const Ready& ready, const Catalogue& catalogue) {
  std::map<std::string, Resolution> result;
  for (std::size_t i = 0; i < catalogue.size(); ++i) {
    result.emplace(catalogue[i].name, ready.resolutions[i]);
  }
  return result;
}

/// Parameters made by hand: name, tensor, shape; each is one tensor as it is.
std::shared_ptr<const Models> copies(
    const std::vector<std::pair<std::string, TensorInfo>>& parameters, Rank workers = 1) {
  WorkerModel model;
  for (const auto& [name, tensor] : parameters) {
    WorkerParameter parameter;
    parameter.name = name;
    parameter.dtype = tensor.dtype;
    parameter.shape = tensor.shape;
    parameter.sections = {{tensor.name, Box::whole(tensor.shape), 0, row_major(tensor.shape)}};
    model.parameters.push_back(parameter);
  }
  return std::make_shared<const Models>(static_cast<std::size_t>(workers), model);
}

std::vector<float> floats(const std::vector<std::byte>& bytes) {
  std::vector<float> result(bytes.size() / sizeof(float));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

Checkpoint checkpoint_of(const std::string& name, const std::vector<float>& values) {
  Checkpoint checkpoint{{{name, DType::f32, {static_cast<Index>(values.size())}}}, {}};
  std::vector<std::byte> bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  checkpoint.bytes.emplace(name, bytes);
  return checkpoint;
}

void fill_with_nan(WeightSink& sink) {
  for (const LiveParameter& parameter : sink.live()) {
    std::fill_n(parameter.buffer.data, parameter.buffer.bytes, std::byte{0xff});
  }
}

const Size& size_named(const char* part) {
  for (const Size& s : kSizes) {
    if (std::string(s.why).find(part) != std::string::npos) {
      return s;
    }
  }
  throw std::logic_error(part);
}

}  // namespace

BOOST_AUTO_TEST_SUITE(sinks)
BOOST_AUTO_TEST_SUITE(host_sink)

BOOST_DATA_TEST_CASE(every_sink_ends_with_the_bytes_of_the_slow_loader,
                     bdata::make(kSizes) * bdata::make({1, 2, 4, 8}), s, tp) {
  const auto model = model_of(s);
  const Checkpoint checkpoint = make_checkpoint(model->catalogue());
  const auto models = models_of(*model, tp, tp, checkpoint.catalogue);
  for (Rank worker = 0; worker < tp; ++worker) {
    Live expected;
    for (const auto& [name, options] : std::vector<std::pair<std::string, Options>>{
             {"load_weights", {}}, {"inplace", {}}, {"inplace", {{"direct", "strict"}}}}) {
      Ready side = ready(name, models, worker, checkpoint.catalogue, options);
      fill_with_nan(*side.sink);
      side.round(checkpoint, 1);
      if (expected.empty()) {
        for (const LiveParameter& parameter : side.sink->live()) {
          expected.emplace(parameter.name, slowly_loaded(s, tp, worker, parameter, checkpoint));
        }
      }
      const Live live = live_bytes(*side.sink);
      BOOST_TEST(live.size() == models->front().parameters.size());
      for (const auto& [parameter, bytes] : expected) {
        BOOST_TEST((live.at(parameter) == bytes),
                   name << ", worker " << worker << ": " << parameter);
      }
    }
  }
}

// A35
BOOST_AUTO_TEST_CASE(padding_is_zero_after_every_round_also_where_no_data_comes) {
  // 7 tokens on 8 workers: most have padding alone.
  const Size& s = size_named("1 key head");
  const auto model = model_of(s);
  const auto models = models_of(*model, 8, 8, model->catalogue());
  for (Rank worker = 0; worker < 8; ++worker) {
    Ready side = ready("inplace", models, worker, model->catalogue());
    for (int round = 1; round <= 2; ++round) {
      fill_with_nan(*side.sink);
      const Checkpoint checkpoint = make_checkpoint(model->catalogue(), round);
      side.round(checkpoint, static_cast<std::uint64_t>(round));
      for (const LiveParameter& parameter : side.sink->live()) {
        BOOST_TEST((live_bytes(*side.sink).at(parameter.name) ==
                    slowly_loaded(s, 8, worker, parameter, checkpoint)));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(the_same_projection_of_every_layer_shares_one_layout) {
  for (const char* sink : {"inplace", "null", "load_weights"}) {
    const auto model = model_of({"", 12, 6, 8, 2, 3, 40, 200, 1, {}});
    const auto models = models_of(*model, 4, 4, model->catalogue());
    const auto side = by_name(ready(sink, models, 0, model->catalogue()), model->catalogue());
    std::set<const Layout*> layouts;
    for (const auto& [name, resolution] : side) {
      layouts.insert(resolution.side.layout.get());
      if (const auto at = name.find(".layers.0."); at != std::string::npos) {
        for (const char* layer : {".layers.1.", ".layers.5."}) {
          const auto other = replaced(name, ".layers.0.", layer);
          BOOST_TEST(resolution.side.layout == side.at(other).side.layout);
        }
      }
    }
    BOOST_TEST(layouts.size() <= 10u);
  }
}

BOOST_AUTO_TEST_CASE(every_worker_resolves_alike_and_knows_every_rank) {
  const auto model = model_of(size_named("padded shares"));
  const auto models = models_of(*model, 4, 2, model->catalogue());
  for (const char* mode : {"fused", "strict"}) {
    const Ready first = ready("inplace", models, 0, model->catalogue(), {{"direct", mode}});
    for (Rank worker = 0; worker < 4; ++worker) {
      const Ready other = ready("inplace", models, worker, model->catalogue(), {{"direct", mode}});
      for (std::size_t i = 0; i < first.resolutions.size(); ++i) {
        BOOST_TEST((*first.resolutions[i].side.layout == *other.resolutions[i].side.layout));
        BOOST_TEST((first.resolutions[i].mode == other.resolutions[i].mode));
        BOOST_TEST(first.resolutions[i].side.buffers == other.resolutions[i].side.buffers);
        BOOST_TEST((other.resolutions[i].side.layout->ranks() == std::vector<Rank>{3, 4, 5, 6}));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(scalars_are_loaded_and_tensors_without_elements_have_nothing_to_load) {
  const Catalogue catalogue = {{"scale", DType::f32, {}}, {"none", DType::f32, {0, 4}}};
  const auto models = copies({{"scale", catalogue[0]}, {"none", catalogue[1]}}, 2);
  const Checkpoint checkpoint = make_checkpoint(catalogue);
  for (const char* name : {"inplace", "load_weights"}) {
    Ready side = ready(name, models, 1, catalogue);
    BOOST_TEST(to_string(side.resolutions[1].mode) == "direct");
    BOOST_TEST(side.resolutions[1].side.layout->pieces().empty());
    side.round(checkpoint, 1);
    BOOST_TEST(floats(live_bytes(*side.sink).at("scale")) == (std::vector<float>{1}),
               boost::test_tools::per_element());
    BOOST_TEST(live_bytes(*side.sink).at("none").empty());
  }
}

// A42
BOOST_AUTO_TEST_CASE(a_row_cut_is_described_by_strides) {
  // (4, 8) cut along dimension 1 over 2 workers, each with room for 5 columns.
  const TensorInfo tensor = {"x.weight", DType::f32, {4, 8}};
  auto models = std::make_shared<Models>();
  for (Index w = 0; w < 2; ++w) {
    WorkerParameter parameter;
    parameter.name = "x.weight";
    parameter.shape = {4, 5};
    parameter.sections = {{"x.weight", {{0, 4 * w}, {4, 4 * w + 4}}, 0, {5, 1}}};
    parameter.padding = {{{0, 4}, {4, 5}}};
    models->push_back({{parameter}});
  }
  Ready side = ready("inplace", models, 1, {tensor});
  const auto pieces = side.resolutions[0].side.layout->pieces_of(kFirstWorker + 1);
  BOOST_REQUIRE(pieces.size() == 1u);
  BOOST_TEST(to_string(pieces[0].piece.box) == "[0:4, 4:8]");
  BOOST_TEST(to_string(pieces[0].piece.view.strides) == "[5, 1]");
  const Checkpoint checkpoint = make_checkpoint({tensor});
  side.round(checkpoint, 1);
  const std::vector<float> expected = {5,  6,  7,  8,  0, 13, 14, 15, 16, 0,
                                       21, 22, 23, 24, 0, 29, 30, 31, 32, 0};
  BOOST_TEST(floats(live_bytes(*side.sink).at("x.weight")) == expected,
             boost::test_tools::per_element());
}

struct StrictCase {
  const char* size;
  const char* tensor;
  Mode mode;
  const char* reason;
};
std::ostream& operator<<(std::ostream& os, const StrictCase& c) {
  return os << c.size << ": " << c.tensor;
}

const std::vector<StrictCase> kStrictCases = {
    {"llama, head size", "model.layers.0.self_attn.q_proj.weight", Mode::fallback, "qkv_proj"},
    {"llama, head size", "model.layers.1.mlp.up_proj.weight", Mode::fallback, "gate_up_proj"},
    {"llama, head size", "model.layers.0.self_attn.o_proj.weight", Mode::direct, "straight"},
    {"llama, head size", "model.layers.0.mlp.down_proj.weight", Mode::direct, "straight"},
    {"llama, head size", "model.norm.weight", Mode::direct, "straight"},
    {"llama, head size", "model.embed_tokens.weight", Mode::fallback, "padded"},
    {"qwen2", "model.embed_tokens.weight", Mode::fallback, "loader of its own"},
    {"bert", "encoder.layer.0.attention.self.key.bias", Mode::fallback, "qkv_proj"},
    {"bert", "encoder.layer.0.intermediate.dense.bias", Mode::direct, "straight"},
    {"bert, padded", "encoder.layer.0.intermediate.dense.bias", Mode::fallback, "padded"},
    {"bert, padded", "encoder.layer.0.output.dense.weight", Mode::fallback, "padded"},
    {"bert, padded", "encoder.layer.0.output.dense.bias", Mode::fallback, "module"},
    {"bert, padded", "encoder.layer.0.output.LayerNorm.bias", Mode::direct, "straight"},
};

BOOST_DATA_TEST_CASE(strict_leaves_to_the_loader_what_is_not_alone_in_its_parameter,
                     bdata::make(kStrictCases), c) {
  const auto model = model_of(size_named(c.size));
  const auto models = models_of(*model, 2, 2, model->catalogue());
  const auto strict = by_name(
      ready("inplace", models, 0, model->catalogue(), {{"direct", "strict"}}), model->catalogue());
  BOOST_TEST(to_string(strict.at(c.tensor).mode) == to_string(c.mode));
  BOOST_TEST((strict.at(c.tensor).reason.find(c.reason) != std::string::npos),
             strict.at(c.tensor).reason);
  const auto fused = by_name(ready("inplace", models, 0, model->catalogue()), model->catalogue());
  BOOST_TEST(to_string(fused.at(c.tensor).mode) == "direct");
  const auto loaded =
      by_name(ready("load_weights", models, 0, model->catalogue()), model->catalogue());
  const Side& full = loaded.at(c.tensor).side;
  BOOST_TEST(to_string(loaded.at(c.tensor).mode) == "fallback");
  BOOST_TEST(full.buffers.at(0) == std::string("full:") + c.tensor);
  BOOST_TEST(full.layout->pieces().size() == 2u);
  for (const RankPiece& held : full.layout->pieces()) {
    BOOST_TEST((held.piece.box == Box::whole(full.layout->shape())));
    BOOST_TEST((held.piece.view.strides == row_major(full.layout->shape())));
    BOOST_TEST(held.piece.view.offset_bytes == 0u);
  }
}

BOOST_AUTO_TEST_CASE(padding_on_one_worker_makes_a_parameter_padded_for_strict) {
  // 64 tokens padded to 128: worker 0 keeps all of them, worker 1 padding alone.
  const auto model = model_of({"", 4, 1, 4, 4, 2, 8, 64, 1, Options{{"vocab_padding", "128"}}});
  const auto models = models_of(*model, 2, 2, model->catalogue());
  BOOST_TEST(testing::parameter_of((*models)[0], "lm_head.weight").padding.empty());
  BOOST_TEST(testing::parameter_of((*models)[1], "lm_head.weight").sections.empty());
  const auto modes = by_name(
      ready("inplace", models, 0, model->catalogue(), {{"direct", "strict"}}), model->catalogue());
  BOOST_TEST(to_string(modes.at("lm_head.weight").mode) == "fallback");
}

BOOST_AUTO_TEST_CASE(a_module_is_never_part_direct_and_part_fallback) {
  for (const Size& s : kSizes) {
    const auto model = model_of(s);
    const auto models = models_of(*model, 8, 8, model->catalogue());
    const auto modes =
        by_name(ready("inplace", models, 0, model->catalogue(), {{"direct", "strict"}}),
                model->catalogue());
    std::map<std::string, std::set<Mode>> of_module;
    for (const WorkerParameter& parameter : models->front().parameters) {
      for (const Section& section : parameter.sections) {
        of_module[parameter.name.substr(0, parameter.name.rfind('.'))].insert(
            modes.at(section.tensor).mode);
      }
    }
    for (const auto& [module, found] : of_module) {
      BOOST_TEST(found.size() == 1u, s.why << ": " << module);
    }
  }
}

// A33
BOOST_AUTO_TEST_CASE(two_parameters_of_one_tensor_are_equal_after_every_round) {
  const TensorInfo tensor = {"embed.weight", DType::bf16, {8, 3}};
  const auto models = copies({{"embed.weight", tensor}, {"head.weight", tensor}});
  for (const char* sink : {"inplace", "load_weights"}) {
    Ready side = ready(sink, models, 0, {tensor});
    for (int round = 1; round <= 2; ++round) {
      const Checkpoint checkpoint = make_checkpoint({tensor}, round);
      side.round(checkpoint, static_cast<std::uint64_t>(round));
      const Live live = live_bytes(*side.sink);
      BOOST_TEST((live.at("embed.weight") == checkpoint.bytes.at("embed.weight")));
      BOOST_TEST((live.at("head.weight") == checkpoint.bytes.at("embed.weight")));
    }
  }
}

// A33
BOOST_AUTO_TEST_CASE(a_repeated_tied_head_must_be_equal) {
  const auto model = model_of(size_named("tied"));
  Catalogue catalogue = model->catalogue();
  catalogue.push_back({"lm_head.weight", DType::f32, {33, 5}});
  const auto models = models_of(*model, 2, 2, catalogue);
  for (const char* name : {"inplace", "load_weights"}) {
    for (Rank worker = 0; worker < 2; ++worker) {
      Ready side = ready(name, models, worker, catalogue);
      Checkpoint checkpoint = make_checkpoint(catalogue);
      checkpoint.bytes["lm_head.weight"] = checkpoint.bytes["model.embed_tokens.weight"];
      side.round(checkpoint, 1);
      BOOST_TEST((side.sink->version() == 1u));
      BOOST_TEST(live_bytes(*side.sink).count("lm_head.weight") == 0u);

      auto& head = checkpoint.bytes["lm_head.weight"];
      head[worker == 0 ? 0 : head.size() - 1] ^= std::byte{1};  // in this worker's part
      const auto result = thrown_by([&] { side.round(checkpoint, 2); });
      BOOST_TEST((result.code == Errc::bad_argument));
      BOOST_TEST(result.mentions("'lm_head.weight' differs from 'model.embed_tokens.weight'"),
                 result.text);
      BOOST_TEST(!side.sink->version());
    }
  }
}

BOOST_AUTO_TEST_CASE(what_is_needed_and_not_sent_and_what_is_sent_and_not_known_is_listed) {  // C17
  std::vector<std::pair<std::string, TensorInfo>> parameters;
  Catalogue sent;
  for (int i = 0; i < 10; ++i) {
    const std::string name = "w" + std::to_string(i);
    parameters.push_back({name, {name, DType::f32, {4}}});
    sent.push_back({name, DType::f32, {4}});
  }
  const auto models = copies(parameters);
  for (const char* sink : {"inplace", "load_weights", "null"}) {
    BOOST_TEST(!thrown_by([&] { (void)ready(sink, models, 0, sent); }).any);

    Catalogue nine = sent;
    nine.erase(nine.begin() + 4);
    auto result = thrown_by([&] { (void)ready(sink, models, 0, nine); });
    BOOST_TEST((result.code == Errc::bad_argument));
    BOOST_TEST(result.mentions("need w4 as well"), result.text);

    Catalogue other = sent;
    other[4].name = "v4";
    result = thrown_by([&] { (void)ready(sink, models, 0, other); });
    BOOST_TEST(result.mentions("need w4 as well"), result.text);
    BOOST_TEST(result.mentions("no place for v4"), result.text);

    Catalogue twice = sent;
    twice.push_back(sent[0]);
    result = thrown_by([&] { (void)ready(sink, models, 0, twice); });
    BOOST_TEST(result.mentions("'w0' is sent twice"), result.text);

    Models short_by_a_row = *models;
    short_by_a_row[0].parameters[7].sections[0].box.hi[0] = 3;
    result = thrown_by(
        [&] { (void)ready(sink, std::make_shared<const Models>(short_by_a_row), 0, sent); });
    BOOST_TEST(result.mentions("'w7'"), result.text);
    BOOST_TEST(result.mentions("[3:4]"), result.text);
  }
}

BOOST_AUTO_TEST_CASE(a_buffer_that_nobody_needs_moves_nothing) {
  const auto model = model_of(size_named("bert"));
  Catalogue catalogue = model->catalogue();
  catalogue.insert(catalogue.begin(), {"embeddings.position_ids", DType::i64, {1, 11}});
  const auto models = models_of(*model, 2, 2, catalogue);
  const Checkpoint checkpoint = make_checkpoint(catalogue);
  for (const char* name : {"inplace", "load_weights"}) {
    Ready side = ready(name, models, 1, catalogue);
    BOOST_TEST(to_string(side.resolutions[0].mode) == "direct");
    BOOST_TEST(side.resolutions[0].side.layout->pieces().empty());
    BOOST_TEST(side.resolutions[0].reason == "no worker needs it");
    side.round(checkpoint, 1);
    BOOST_TEST((side.sink->version() == 1u));
  }
}

// A51, A52
BOOST_AUTO_TEST_CASE(another_dtype_is_refused_without_a_cast_and_rounded_with_one) {
  const TensorInfo bias = {"router.bias", DType::f32, {3}};
  const TensorInfo norm = {"norm.weight", DType::f32, {4}};
  auto keeping = *copies({{"router.bias", bias}, {"norm.weight", norm}});
  keeping[0].parameters[0].keep_dtype = true;
  const auto models = std::make_shared<const Models>(keeping);
  const Catalogue catalogue = {bias, norm};
  Checkpoint checkpoint = checkpoint_of("router.bias", {6.82F, 6.83F, 6.84F});
  checkpoint.catalogue = catalogue;
  checkpoint.bytes["norm.weight"] =
      checkpoint_of("", {3.14F, 1e-8F, 1.00390625F, 1.01171875F}).bytes.at("");
  for (const char* name : {"inplace", "load_weights"}) {
    const auto refused = thrown_by([&] {
      (void)ready(name, models, 0, catalogue, {{"dtype", "bf16"}});
    });
    BOOST_TEST((refused.code == Errc::bad_argument));
    BOOST_TEST(refused.mentions("'norm.weight' is f32"), refused.text);
    BOOST_TEST(refused.mentions("bf16"), refused.text);
    BOOST_TEST(refused.mentions("cast=nearest_even"), refused.text);

    Ready side = ready(name, models, 0, catalogue, {{"dtype", "bf16"}, {"cast", "nearest_even"}});
    BOOST_TEST(!side.resolutions[0].cast);
    BOOST_TEST(side.resolutions[1].cast == (std::string(name) == "inplace"));
    side.round(checkpoint, 1);
    const Live live = live_bytes(*side.sink);
    BOOST_TEST((live.at("router.bias") == checkpoint.bytes.at("router.bias")));
    std::vector<std::uint16_t> rounded(4);
    BOOST_REQUIRE(live.at("norm.weight").size() == 8u);
    std::memcpy(rounded.data(), live.at("norm.weight").data(), 8);
    BOOST_TEST(rounded == (std::vector<std::uint16_t>{0x4049, 0x322C, 0x3F80, 0x3F82}),
               boost::test_tools::per_element());

    Ready exact = ready(name, models, 0, catalogue);
    exact.round(checkpoint, 1);
    BOOST_TEST((live_bytes(*exact.sink).at("norm.weight") == checkpoint.bytes.at("norm.weight")));
  }
  // What has no cast is never taken for something else.
  Catalogue integers = catalogue;
  integers[1].dtype = DType::i32;
  const auto result = thrown_by([&] {
    (void)ready("inplace", models, 0, integers, {{"cast", "nearest_even"}});
  });
  BOOST_TEST(result.mentions("'norm.weight' is i32"), result.text);
  BOOST_TEST(result.mentions("no cast"), result.text);
}

BOOST_AUTO_TEST_CASE(weights_are_invalid_from_begin_until_commit_and_after_roll_back) {
  const TensorInfo tensor = {"w", DType::f32, {4}};
  for (const char* name : {"inplace", "load_weights", "null"}) {
    Ready side = ready(name, copies({{"w", tensor}}), 0, {tensor});
    const Checkpoint checkpoint = make_checkpoint({tensor});
    BOOST_TEST(!side.sink->version());
    BOOST_TEST(thrown_by([&] { side.sink->commit(1); }).mentions("no round has begun"));
    side.round(checkpoint, 4);
    BOOST_TEST((side.sink->version() == 4u));
    side.sink->begin(5);
    BOOST_TEST(!side.sink->version());
    BOOST_TEST(thrown_by([&] { side.sink->commit(6); }).mentions("version 5 is being written"));
    side.sink->roll_back();
    BOOST_TEST(!side.sink->version());
    BOOST_TEST(thrown_by([&] { side.sink->commit(5); }).any);
    side.round(checkpoint, 6);
    BOOST_TEST((side.sink->version() == 6u));
  }
}

BOOST_AUTO_TEST_CASE(buffers_stay_where_they_are_and_null_shows_none) {
  const auto model = model_of(size_named("bert"));
  const auto models = models_of(*model, 2, 2, model->catalogue());
  for (const char* name : {"inplace", "null"}) {
    Ready side = ready(name, models, 0, model->catalogue());
    const auto before = side.sink->lend();
    side.round(make_checkpoint(model->catalogue()), 1);
    const auto after = side.sink->lend();
    for (std::size_t i = 0; i < before.size(); ++i) {
      BOOST_TEST(before[i].name == model->catalogue()[i].name);
      BOOST_TEST((before[i].shape == model->catalogue()[i].shape));
      BOOST_REQUIRE(before[i].slots.size() == 1u);
      BOOST_TEST(before[i].slots[0].data == after[i].slots[0].data);
      BOOST_TEST(reinterpret_cast<std::uintptr_t>(before[i].slots[0].data) % 64 == 0u);
    }
    BOOST_TEST(side.sink->live().empty() == (std::string(name) == "null"));
  }
}

BOOST_AUTO_TEST_CASE(the_loader_takes_each_declared_tensor_once_as_it_was_declared) {
  const Catalogue catalogue = {{"a", DType::f32, {4}}, {"b", DType::f32, {2, 2}}};
  const auto models = copies({{"a", catalogue[0]}, {"b", catalogue[1]}});
  const Checkpoint checkpoint = make_checkpoint(catalogue);
  const auto load = [&](const Checkpoint& from, const std::vector<std::string>& names) {
    Ready side = ready("load_weights", models, 0, catalogue);
    side.sink->begin(1);
    CheckpointStream stream(from, names);
    auto result = thrown_by([&] { side.sink->load_weights(stream); });
    if (result.any) {
      BOOST_TEST(thrown_by([&] { side.sink->commit(1); }).mentions("not loaded"));
    }
    return result;
  };
  BOOST_TEST(!load(checkpoint, {"b", "a"}).any);
  BOOST_TEST(load(checkpoint, {"b"}).mentions("1 of 2 tensors did not come"));
  BOOST_TEST(load(checkpoint, {"b"}).mentions("'a'"));
  BOOST_TEST(load(checkpoint, {"b", "a", "b"}).mentions("'b' came twice"));
  Checkpoint other = make_checkpoint({{"a", DType::f32, {4}}, {"b", DType::f32, {4}}});
  BOOST_TEST(load(other, {"a", "b"}).mentions("[4], and was declared as f32 [2, 2]"));
  other = make_checkpoint({{"a", DType::bf16, {4}}});
  BOOST_TEST(load(other, {"a"}).mentions("'a' came as bf16"));
  other = make_checkpoint({{"c", DType::f32, {4}}});
  BOOST_TEST(load(other, {"c"}).mentions("'c' did not fall back"));

  Ready side = ready("load_weights", models, 0, catalogue);
  CheckpointStream stream(checkpoint, {"a", "b"});
  BOOST_TEST(thrown_by([&] { side.sink->load_weights(stream); }).mentions("inside a round"));
  side.sink->begin(1);
  BOOST_TEST(thrown_by([&] { side.sink->commit(1); }).mentions("2 tensors were not loaded"));
}

struct OptionCase {
  const char* sink;
  Options options;
  std::vector<const char*> mentions;
};
std::ostream& operator<<(std::ostream& os, const OptionCase& c) {
  return os << c.sink << " " << c.options.begin()->first << "=" << c.options.begin()->second;
}

const std::vector<OptionCase> kOptionCases = {
    {"inplace", {{"drect", "fused"}}, {"'inplace'", "'drect'", "direct"}},
    {"inplace", {{"direct", "loose"}}, {"'loose'", "fused, strict"}},
    {"inplace", {{"cast", "up"}}, {"'up'", "nearest_even"}},
    {"inplace", {{"dtype", "i32"}}, {"'i32'", "bf16"}},
    {"load_weights",
     {{"direct", "fused"}},
     {"'load_weights'", "'direct'", "cast, drain, dtype, dtypes"}},
    {"null", {{"keep", "1"}}, {"'null'", "'keep'"}},
};

BOOST_DATA_TEST_CASE(unknown_options_are_refused_with_the_choices, bdata::make(kOptionCases), c) {
  const TensorInfo tensor = {"w", DType::f32, {4}};
  const auto result = thrown_by([&] {
    (void)make_sink(c.sink, copies({{"w", tensor}}), 0, c.options);
  });
  BOOST_TEST((result.any && result.code == Errc::usage));
  for (const char* part : c.mentions) {
    BOOST_TEST(result.mentions(part), "'" << part << "' is not in: " << result.text);
  }
}

BOOST_AUTO_TEST_CASE(a_rank_that_is_no_worker_is_refused) {
  const TensorInfo tensor = {"w", DType::f32, {4}};
  BOOST_TEST(thrown_by([&] {
               (void)make_sink("inplace", copies({{"w", tensor}}), 1);
             }).mentions("rank 4 is no worker"));
}

/// Two parameters in one buffer of 16 f32, with a gap; one in a buffer of its own.
std::vector<Resolution> declared_sides() {
  const auto piece = [](const Box& box, std::uint32_t slot, std::uint64_t offset,
                        const Strides& strides) {
    return RankPiece{5, {box, {slot, offset, strides}}};
  };
  const auto layout = [](const Shape& shape, const RankPiece& held) {
    return std::make_shared<const Layout>(
        Layout::explicit_pieces(shape, DType::f32, {5, 6}, {held}));
  };
  std::vector<Resolution> sides(3);
  sides[0].side = {layout({2, 3}, piece({{0, 0}, {2, 3}}, 0, 0, {4, 1})), {"fused"}};
  sides[1].side = {layout({2, 4}, piece({{0, 0}, {2, 4}}, 0, 32, {4, 1})), {"fused"}};
  sides[2].side = {layout({3}, piece({{0}, {3}}, 0, 0, {1})), {"own"}};
  return sides;
}

BOOST_AUTO_TEST_CASE(a_problem_file_gives_one_buffer_a_name_and_its_gaps_are_zero) {
  const Catalogue catalogue = {
      {"a", DType::f32, {2, 3}}, {"b", DType::f32, {2, 4}}, {"c", DType::f32, {3}}};
  const Checkpoint checkpoint = make_checkpoint(catalogue);
  for (const char* name : {"inplace", "load_weights"}) {
    SinkContext context;
    context.rank = 5;
    context.first_worker = 5;
    context.declared = declared_sides();
    auto sink = testing::house_registries().sinks.create(name, context);
    const auto resolutions = sink->resolve(specs_of(catalogue));
    for (int round = 1; round <= 2; ++round) {
      fill_with_nan(*sink);
      run_round(*sink, resolutions, 5, checkpoint, static_cast<std::uint64_t>(round));
      const Live live = live_bytes(*sink);
      BOOST_TEST(live.size() == 2u);
      BOOST_TEST(floats(live.at("fused")) ==
                     (std::vector<float>{1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9, 10, 11, 12, 13, 14}),
                 boost::test_tools::per_element());
      BOOST_TEST(floats(live.at("own")) == (std::vector<float>{15, 16, 17}),
                 boost::test_tools::per_element());
    }
    // Rank 6 holds nothing of it.
    context.rank = 6;
    sink = testing::house_registries().sinks.create(name, context);
    (void)sink->resolve(specs_of(catalogue));
    BOOST_TEST(sink->live().empty());
    for (const ParamLoan& loan : sink->lend()) {
      for (const LocalBuffer& slot : loan.slots) {
        BOOST_TEST(slot.data == nullptr);
        BOOST_TEST(slot.bytes == 0u);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(declared_sides_must_fit_what_is_sent) {
  const Catalogue catalogue = {
      {"a", DType::f32, {2, 3}}, {"b", DType::f32, {2, 4}}, {"c", DType::f32, {3}}};
  const auto resolve = [](const Catalogue& sent, const Options& options = {}) {
    return thrown_by([&] {
      SinkContext context;
      context.options = options;
      context.rank = 5;
      context.declared = declared_sides();
      auto sink = testing::house_registries().sinks.create("inplace", context);
      (void)sink->resolve(specs_of(sent));
    });
  };
  BOOST_TEST(!resolve(catalogue).any);
  Catalogue two = catalogue;
  two.pop_back();
  BOOST_TEST(resolve(two).mentions("2 tensors are sent"));
  Catalogue other = catalogue;
  other[1].shape = {4, 2};
  BOOST_TEST(resolve(other).mentions("'b' has shape [4, 2]"));
  other = catalogue;
  other[2].dtype = DType::bf16;
  BOOST_TEST(resolve(other).mentions("'c' is bf16"));
  BOOST_TEST(!resolve(other, {{"cast", "nearest_even"}}).any);
  BOOST_TEST((resolve(catalogue, {{"direct", "strict"}}).code == Errc::usage));
  BOOST_TEST((resolve(catalogue, {{"dtype", "bf16"}}).code == Errc::usage));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
