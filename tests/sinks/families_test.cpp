// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <ostream>
#include <set>

#include "sinks/models/family.hpp"
#include "tests/sinks/fixtures.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::make_model;
using testing::origins;
using testing::parameter_of;
using testing::thrown_by;

Options llama(Index hidden, Index layers, Index heads, Index kv, Index head, Index inner,
              Index vocab, Options more = {}) {
  Options options = {{"hidden_size", std::to_string(hidden)},
                     {"num_hidden_layers", std::to_string(layers)},
                     {"num_attention_heads", std::to_string(heads)},
                     {"num_key_value_heads", std::to_string(kv)},
                     {"head_dim", std::to_string(head)},
                     {"intermediate_size", std::to_string(inner)},
                     {"vocab_size", std::to_string(vocab)}};
  more.merge(options);
  return more;
}

struct Published {
  const char* model;
  Options options;
  std::size_t tensors;
  Index elements;
  std::uint64_t bytes;
  Index layer_elements;
};
std::ostream& operator<<(std::ostream& os, const Published& p) { return os << p.model; }

const std::vector<Published> kPublished = {
    {"Llama-3.1-8B", llama(4096, 32, 32, 8, 128, 14336, 128256), 291, 8'030'261'248, 16'060'522'496,
     218'112'000},
    {"Llama-3.1-70B", llama(8192, 80, 64, 8, 128, 28672, 128256), 723, 70'553'706'496,
     141'107'412'992, 855'654'400},
    {"Qwen3-8B", llama(4096, 36, 32, 8, 128, 12288, 151936, {{"model_type", "qwen3"}}), 399,
     8'190'735'360, 16'381'470'720, 192'946'432},
    {"Qwen3-32B", llama(5120, 64, 64, 8, 128, 25600, 151936, {{"model_type", "qwen3"}}), 707,
     32'762'123'264, 65'524'246'528, 487'598'336},
};

/// Rows of a parameter whose rows are whole rows of tensors: "<last but one name part><row>".
std::vector<std::string> rows_of(const WorkerParameter& parameter, const Catalogue& checkpoint) {
  const auto all = origins(parameter, checkpoint);
  const std::size_t width = all.size() / static_cast<std::size_t>(parameter.shape[0]);
  std::vector<std::string> rows;
  for (std::size_t i = 0; i < all.size(); i += width) {
    if (all[i] == "0") {
      rows.push_back("0");
      continue;
    }
    const auto open = all[i].find('[');
    const std::string tensor = all[i].substr(0, open);
    const std::string index = all[i].substr(open + 1, all[i].find_first_of(",]", open) - open - 1);
    const auto last = tensor.rfind('.');
    const auto before = tensor.rfind('.', last - 1);
    rows.push_back(tensor.substr(before + 1, 1) + index);
  }
  return rows;
}

std::vector<std::string> run(const std::string& name, Index begin, Index end) {
  std::vector<std::string> result;
  for (Index i = begin; i < end; ++i) {
    result.push_back(name + std::to_string(i));
  }
  return result;
}

std::vector<std::string> joined(std::initializer_list<std::vector<std::string>> parts) {
  std::vector<std::string> result;
  for (const auto& part : parts) {
    result.insert(result.end(), part.begin(), part.end());
  }
  return result;
}

/// "tensor's last but one part [lo:hi) at row" of each section, for parameters too large to visit.
struct Rows {
  std::string tensor;
  Index begin;
  Index end;
  Index at;
  friend bool operator==(const Rows&, const Rows&) = default;
  friend std::ostream& operator<<(std::ostream& os, const Rows& r) {
    return os << r.tensor << "[" << r.begin << ":" << r.end << ") at " << r.at;
  }
};

std::vector<Rows> section_rows(const WorkerParameter& parameter) {
  std::vector<Rows> result;
  for (const Section& section : parameter.sections) {
    const auto last = section.tensor.rfind('.');
    const auto before = section.tensor.rfind('.', last - 1);
    result.push_back({section.tensor.substr(before + 1, last - before - 1), section.box.lo[0],
                      section.box.hi[0], section.offset / section.strides[0]});
  }
  return result;
}

struct Worked {
  const char* why;
  Options options;
  Index tp;
  Rank worker;
  std::string parameter;
  Shape shape;
  std::vector<Rows> rows;
  std::vector<Box> padding;
};
std::ostream& operator<<(std::ostream& os, const Worked& w) { return os << w.why; }

const std::string kQkv = "model.layers.0.self_attn.qkv_proj.weight";
const std::string kEmbedding = "model.embed_tokens.weight";

Options only_vocab(Index vocab, Options more = {}) {
  return llama(2, 1, 8, 8, 1, 8, vocab, std::move(more));
}

const std::vector<Worked> kWorked = {
    {"Qwen3-235B attention, TP 8, rank 5: two ranks keep the same key head",
     llama(4096, 1, 64, 4, 128, 1536, 151936, {{"model_type", "qwen3"}}),
     8,
     5,
     kQkv,
     {1280, 4096},
     {{"q_proj", 5120, 6144, 0}, {"k_proj", 256, 384, 1024}, {"v_proj", 256, 384, 1152}},
     {}},
    {"Llama-3.1-70B, TP 16, rank 9",
     llama(8192, 1, 64, 8, 128, 28672, 128256),
     16,
     9,
     kQkv,
     {768, 8192},
     {{"q_proj", 4608, 5120, 0}, {"k_proj", 512, 640, 512}, {"v_proj", 512, 640, 640}},
     {}},
    {"Llama-3.1-8B, TP 4, rank 1",
     llama(4096, 1, 32, 8, 128, 14336, 128256),
     4,
     1,
     kQkv,
     {1536, 4096},
     {{"q_proj", 1024, 2048, 0}, {"k_proj", 256, 512, 1024}, {"v_proj", 256, 512, 1280}},
     {}},
    {"a vocabulary of 50257, TP 4, rank 3: 47 rows of padding",
     only_vocab(50257),
     4,
     3,
     kEmbedding,
     {12576, 2},
     {{"embed_tokens", 37728, 50257, 0}},
     {{{12529, 0}, {12576, 2}}}},
    {"a vocabulary of 10 padded to 16, TP 2, rank 0",
     only_vocab(10, {{"vocab_padding", "16"}}),
     2,
     0,
     kEmbedding,
     {8, 2},
     {{"embed_tokens", 0, 8, 0}},
     {}},
    {"a vocabulary of 10 padded to 16, TP 2, rank 1: padded once, not once a rank",
     only_vocab(10, {{"vocab_padding", "16"}}),
     2,
     1,
     kEmbedding,
     {8, 2},
     {{"embed_tokens", 8, 10, 0}},
     {{{2, 0}, {8, 2}}}},
    {"a vocabulary of 32008, TP 2, rank 0",
     only_vocab(32008),
     2,
     0,
     kEmbedding,
     {16032, 2},
     {{"embed_tokens", 0, 16032, 0}},
     {}},
    {"a vocabulary of 32008, TP 2, rank 1: 56 rows of padding",
     only_vocab(32008),
     2,
     1,
     kEmbedding,
     {16032, 2},
     {{"embed_tokens", 16032, 32008, 0}},
     {{{15976, 0}, {16032, 2}}}},
    {"a vocabulary of 49159, TP 2, rank 1: 57 rows of padding",
     only_vocab(49159),
     2,
     1,
     kEmbedding,
     {24608, 2},
     {{"embed_tokens", 24608, 49159, 0}},
     {{{24551, 0}, {24608, 2}}}},
    {"the head is padded like the embedding",
     only_vocab(49159),
     2,
     1,
     "lm_head.weight",
     {24608, 2},
     {{"lm_head", 24608, 49159, 0}},
     {{{24551, 0}, {24608, 2}}}},
    {"a worker past the end of the vocabulary has padding alone",
     only_vocab(10),
     8,
     5,
     kEmbedding,
     {8, 2},
     {},
     {{{0, 0}, {8, 2}}}},
};

}  // namespace

BOOST_AUTO_TEST_SUITE(sinks)
BOOST_AUTO_TEST_SUITE(families)

BOOST_DATA_TEST_CASE(catalogue_has_the_published_totals, bdata::make(kPublished), p) {
  const auto model = make_model("llama", p.options);
  Index elements = 0;
  Index layer = 0;
  std::uint64_t bytes = 0;
  std::set<std::string> names;
  for (const TensorInfo& tensor : model->catalogue()) {
    const Index count = element_count(tensor.shape);
    elements += count;
    bytes += static_cast<std::uint64_t>(count) * bytes_of(tensor.dtype);
    names.insert(tensor.name);
    layer += tensor.name.starts_with("model.layers.7.") ? count : 0;
  }
  BOOST_TEST(model->catalogue().size() == p.tensors);
  BOOST_TEST(names.size() == p.tensors);
  BOOST_TEST(elements == p.elements);
  BOOST_TEST(bytes == p.bytes);
  BOOST_TEST(layer == p.layer_elements);
}

BOOST_AUTO_TEST_CASE(the_config_of_a_sentence_encoder_gives_its_tensors) {
  const char* config = R"({"architectures": ["BertModel"], "hidden_act": "gelu",
    "hidden_size": 384, "intermediate_size": 1536, "max_position_embeddings": 512,
    "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 6,
    "layer_norm_eps": 1e-12, "type_vocab_size": 2, "use_cache": true, "vocab_size": 30522})";
  const auto model = make_model("bert", {{"config", config}});
  Index elements = 0;
  for (const TensorInfo& tensor : model->catalogue()) {
    elements += element_count(tensor.shape);
    BOOST_TEST((tensor.dtype == DType::f32));
  }
  BOOST_TEST(model->catalogue().size() == 103u);
  BOOST_TEST(elements == 22'713'216);
  BOOST_TEST(model->catalogue().front().name == "embeddings.word_embeddings.weight");
  BOOST_TEST(model->catalogue().back().name == "pooler.dense.bias");

  Catalogue checkpoint = model->catalogue();
  checkpoint.insert(checkpoint.begin(), {"embeddings.position_ids", DType::i64, {1, 512}});
  const WorkerModel worker = model->worker({2, 2}, 1, checkpoint);
  check_worker_model(worker, checkpoint);
  BOOST_TEST((worker.ignored == std::vector<std::string>{"embeddings.position_ids"}));
  const auto& qkv = parameter_of(worker, "encoder.layer.5.attention.self.qkv_proj.weight");
  BOOST_TEST(to_string(qkv.shape) == "[576, 384]");
  BOOST_TEST(section_rows(qkv) ==
                 (std::vector<Rows>{
                     {"query", 192, 384, 0}, {"key", 192, 384, 192}, {"value", 192, 384, 384}}),
             boost::test_tools::per_element());
  BOOST_TEST(to_string(parameter_of(worker, "encoder.layer.5.output.dense.weight").shape) ==
             "[384, 768]");
  BOOST_TEST(to_string(parameter_of(worker, "encoder.layer.5.output.dense.bias").shape) == "[384]");
  BOOST_TEST(to_string(parameter_of(worker, "embeddings.word_embeddings.weight").shape) ==
             "[30522, 384]");
}

BOOST_DATA_TEST_CASE(worked_numbers_of_the_worker_layout, bdata::make(kWorked), w) {
  const auto model = make_model("llama", w.options);
  const auto worker = model->worker({static_cast<Rank>(w.tp), w.tp}, w.worker, model->catalogue());
  check_worker_model(worker, model->catalogue());
  const auto& parameter = parameter_of(worker, w.parameter);
  BOOST_TEST(to_string(parameter.shape) == to_string(w.shape));
  BOOST_TEST(section_rows(parameter) == w.rows, boost::test_tools::per_element());
  BOOST_TEST((parameter.padding == w.padding));
}

BOOST_AUTO_TEST_CASE(vocabularies_that_need_no_padding_have_none) {
  for (const Index vocab : {128256, 151936, 201088, 129280, 163840, 32000, 262208}) {
    const auto model = make_model("llama", only_vocab(vocab));
    for (Rank rank = 0; rank < 8; ++rank) {
      const auto worker = model->worker({8, 8}, rank, model->catalogue());
      const auto& embedding = parameter_of(worker, kEmbedding);
      BOOST_TEST(embedding.padding.empty());
      BOOST_TEST(embedding.shape[0] == vocab / 8);
    }
  }
}

// A16
BOOST_AUTO_TEST_CASE(fewer_key_heads_than_workers_are_kept_whole_by_neighbours) {
  const auto model = make_model("llama", llama(3, 1, 8, 2, 2, 8, 64));
  const std::vector<Index> kv_begin = {0, 0, 2, 2};
  for (Rank rank = 0; rank < 4; ++rank) {
    const auto worker = model->worker({4, 4}, rank, model->catalogue());
    const auto kv = kv_begin[static_cast<std::size_t>(rank)];
    BOOST_TEST(
        rows_of(parameter_of(worker, kQkv), model->catalogue()) ==
            joined({run("q", 4 * rank, 4 * rank + 4), run("k", kv, kv + 2), run("v", kv, kv + 2)}),
        boost::test_tools::per_element());
  }
}

// A15, A16
BOOST_AUTO_TEST_CASE(rows_of_a_grouped_trainer_weight_reach_the_right_worker) {
  // 4 query heads, 2 groups, head size 2, rows of the trainer's weight: q0 q1 k0 v0, q2 q3 k1 v1.
  const auto trainer_row = [](const std::string& row) {
    const Index i = std::stoll(row.substr(1));
    const Index head = i / 2;
    if (row[0] == 'q') {
      return head / 2 * 8 + head % 2 * 2 + i % 2;
    }
    return head * 8 + (row[0] == 'k' ? 4 : 6) + i % 2;
  };
  const auto model = make_model("llama", llama(3, 1, 4, 2, 2, 8, 64));
  const auto rows = [&](Index tp, Rank rank) {
    const auto worker = model->worker({static_cast<Rank>(tp), tp}, rank, model->catalogue());
    std::vector<Index> result;
    for (const auto& row : rows_of(parameter_of(worker, kQkv), model->catalogue())) {
      result.push_back(trainer_row(row));
    }
    return result;
  };
  using Numbers = std::vector<Index>;
  const auto per_element = boost::test_tools::per_element();
  BOOST_TEST(rows(1, 0) == (Numbers{0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15}),
             per_element);
  BOOST_TEST(rows(4, 0) == (Numbers{0, 1, 4, 5, 6, 7}), per_element);
  BOOST_TEST(rows(4, 1) == (Numbers{2, 3, 4, 5, 6, 7}), per_element);
  BOOST_TEST(rows(4, 2) == (Numbers{8, 9, 12, 13, 14, 15}), per_element);
  BOOST_TEST(rows(4, 3) == (Numbers{10, 11, 12, 13, 14, 15}), per_element);
}

// A17
BOOST_AUTO_TEST_CASE(gate_and_up_are_cut_each_for_itself_and_so_is_their_bias) {
  const auto model = make_model("llama", llama(3, 1, 4, 4, 2, 4, 64, {{"mlp_bias", "true"}}));
  for (const Index tp : {1, 2, 4}) {
    for (Rank rank = 0; rank < tp; ++rank) {
      const auto worker = model->worker({static_cast<Rank>(tp), tp}, rank, model->catalogue());
      const Index share = 4 / tp;
      const auto expected = joined(
          {run("g", rank * share, (rank + 1) * share), run("u", rank * share, (rank + 1) * share)});
      for (const char* what : {"weight", "bias"}) {
        const auto& parameter =
            parameter_of(worker, std::string("model.layers.0.mlp.gate_up_proj.") + what);
        BOOST_TEST(rows_of(parameter, model->catalogue()) == expected,
                   boost::test_tools::per_element());
      }
    }
  }
}

// A18
BOOST_AUTO_TEST_CASE(the_order_of_expert_halves_is_what_the_table_says) {
  for (const bool up_first : {false, true}) {
    const models::Units inner{"moe_intermediate_size", 4};
    const models::Part w1{"e.w1.weight", {4, 3}, inner};
    const models::Part w3{"e.w3.weight", {4, 3}, inner};
    models::Table table;
    table.family = "one expert";
    table.rows.push_back({"e.w13_weight", models::Cut::column,
                          up_first ? std::vector{w3, w1} : std::vector{w1, w3}});
    const auto model = models::make_family(table);
    for (Rank rank = 0; rank < 2; ++rank) {
      const auto worker = model->worker({2, 2}, rank, model->catalogue());
      const auto sections = section_rows(parameter_of(worker, "e.w13_weight"));
      const Index begin = 2 * rank;
      BOOST_TEST(sections == (std::vector<Rows>{{up_first ? "w3" : "w1", begin, begin + 2, 0},
                                                {up_first ? "w1" : "w3", begin, begin + 2, 2}}),
                 boost::test_tools::per_element());
    }
  }
}

// A34
BOOST_AUTO_TEST_CASE(a_padded_share_does_not_move_where_the_next_worker_starts) {
  const auto model =
      make_model("llama", llama(2, 1, 8, 8, 1, 1536, 64, {{"intermediate_align", "256"}}));
  struct Row {
    Index tp;
    Index share;
    Index room;
  };
  for (const Row row : {Row{8, 192, 256}, Row{4, 384, 512}, Row{2, 768, 768}}) {
    for (Rank rank = 0; rank < row.tp; ++rank) {
      const auto worker =
          model->worker({static_cast<Rank>(row.tp), row.tp}, rank, model->catalogue());
      check_worker_model(worker, model->catalogue());
      const auto& up = parameter_of(worker, "model.layers.0.mlp.gate_up_proj.weight");
      const Index begin = rank * row.share;
      BOOST_TEST(up.shape[0] == 2 * row.room);
      BOOST_TEST(
          section_rows(up) == (std::vector<Rows>{{"gate_proj", begin, begin + row.share, 0},
                                                 {"up_proj", begin, begin + row.share, row.room}}),
          boost::test_tools::per_element());
      const auto& down = parameter_of(worker, "model.layers.0.mlp.down_proj.weight");
      BOOST_TEST(to_string(down.shape) == to_string(Shape{2, row.room}));
      BOOST_TEST(down.sections.front().box.lo[1] == begin);
      BOOST_TEST(down.padding.size() == (row.room == row.share ? 0u : 1u));
    }
  }
}

/// What replicas keep is described once, so that a deployment costs what is distinct in it.
BOOST_AUTO_TEST_CASE(replicas_share_one_model_and_it_is_that_of_each_worker) {
  const auto model = make_model("llama", llama(4, 2, 4, 2, 2, 8, 64));
  const WorkerModels workers = model->workers({6, 2}, model->catalogue());
  BOOST_TEST_REQUIRE(workers.size() == 6U);
  BOOST_TEST((workers[0] != workers[1]));
  for (std::size_t w = 0; w < workers.size(); ++w) {
    BOOST_TEST((workers[w] == workers[w % 2]));
    const WorkerModel own = model->worker({6, 2}, static_cast<Rank>(w), model->catalogue());
    BOOST_TEST_REQUIRE(own.parameters.size() == workers[w]->parameters.size());
    for (std::size_t i = 0; i < own.parameters.size(); ++i) {
      BOOST_TEST(own.parameters[i].name == workers[w]->parameters[i].name);
      BOOST_TEST(origins(own.parameters[i], model->catalogue()) ==
                 origins(workers[w]->parameters[i], model->catalogue()));
    }
  }
}

BOOST_AUTO_TEST_CASE(data_parallel_replicas_keep_the_same) {  // C15
  const auto model = make_model("llama", llama(4, 2, 4, 2, 2, 8, 64));
  for (Rank rank = 0; rank < 2; ++rank) {
    const auto first = model->worker({4, 2}, rank, model->catalogue());
    const auto second = model->worker({4, 2}, rank + 2, model->catalogue());
    BOOST_REQUIRE(first.parameters.size() == second.parameters.size());
    for (std::size_t i = 0; i < first.parameters.size(); ++i) {
      BOOST_TEST(origins(first.parameters[i], model->catalogue()) ==
                 origins(second.parameters[i], model->catalogue()));
    }
  }
}

struct Refusal {
  const char* why;
  const char* family;
  Options options;
  Deployment deployment;
  Errc code;
  std::vector<const char*> mentions;
};
std::ostream& operator<<(std::ostream& os, const Refusal& r) { return os << r.why; }

Options bert(Index hidden, Index heads, Index inner, Options more = {}) {
  Options options = {{"hidden_size", std::to_string(hidden)},
                     {"num_hidden_layers", "2"},
                     {"num_attention_heads", std::to_string(heads)},
                     {"intermediate_size", std::to_string(inner)},
                     {"vocab_size", "37"},
                     {"max_position_embeddings", "11"},
                     {"type_vocab_size", "2"}};
  more.merge(options);
  return more;
}

const std::vector<Refusal> kRefusals = {
    {"an odd intermediate size, though gate and up together are even",
     "llama",
     llama(4, 1, 4, 4, 2, 3, 64),
     {2, 2},
     Errc::bad_argument,
     {"intermediate_size is 3", "2 tensor-parallel workers"}},
    {"key heads that do not divide, though their rows do",
     "llama",
     llama(4, 1, 6, 3, 2, 4, 64),
     {2, 2},
     Errc::bad_argument,
     {"num_key_value_heads is 3", "multiple"}},
    {"workers that are no multiple of the key heads",
     "llama",
     llama(4, 1, 6, 2, 2, 6, 192),
     {3, 3},
     Errc::bad_argument,
     {"num_key_value_heads is 2", "3 tensor-parallel workers"}},
    {"query heads that do not divide",
     "llama",
     llama(4, 1, 4, 4, 2, 8, 64),
     {8, 8},
     Errc::bad_argument,
     {"num_attention_heads is 4", "8 tensor-parallel workers"}},
    {"a padded vocabulary that does not divide",
     "llama",
     llama(4, 1, 3, 3, 2, 3, 50),
     {3, 3},
     Errc::bad_argument,
     {"vocab_size is 50", "64 rows"}},
    {"12 heads for 8 workers",
     "bert",
     bert(24, 12, 48),
     {8, 8},
     Errc::bad_argument,
     {"num_attention_heads is 12"}},
    {"hidden size and heads that do not fit",
     "bert",
     bert(25, 12, 48),
     {1, 1},
     Errc::bad_argument,
     {"hidden_size 25", "num_attention_heads 12"}},
    {"workers that form no groups",
     "llama",
     llama(4, 1, 4, 4, 2, 8, 64),
     {3, 2},
     Errc::bad_argument,
     {"3 workers", "2 tensor-parallel"}},
    {"no workers", "llama", llama(4, 1, 4, 4, 2, 8, 64), {0, 1}, Errc::bad_argument, {"0 workers"}},
    {"a size is missing",
     "llama",
     {{"hidden_size", "4"}},
     {1, 1},
     Errc::bad_argument,
     {"'llama'", "needs the size '", "config"}},
    {"a size is no number",
     "bert",
     bert(24, 12, 48, {{"vocab_size", "many"}}),
     {1, 1},
     Errc::bad_argument,
     {"'vocab_size'", "'many'", "whole number"}},
    {"a size is negative",
     "bert",
     bert(24, 12, 48, {{"vocab_size", "-3"}}),
     {1, 1},
     Errc::bad_argument,
     {"'vocab_size'", "'-3'"}},
    {"a size is 0",
     "llama",
     llama(4, 0, 4, 4, 2, 8, 64),
     {1, 1},
     Errc::bad_argument,
     {"'num_hidden_layers'", "at least 1"}},
    {"sizes whose product does not fit",
     "llama",
     llama(4, 1, Index{1} << 40, 4, Index{1} << 40, 8, 64),
     {1, 1},
     Errc::bad_argument,
     {"element count"}},
    {"a flag is neither true nor false",
     "llama",
     llama(4, 1, 4, 4, 2, 8, 64, {{"mlp_bias", "maybe"}}),
     {1, 1},
     Errc::bad_argument,
     {"'mlp_bias'", "'maybe'"}},
    {"an option that is not known",
     "llama",
     llama(4, 1, 4, 4, 2, 8, 64, {{"hiden_size", "4"}}),
     {1, 1},
     Errc::usage,
     {"'hiden_size'", "hidden_size", "config"}},
    {"another family's config",
     "llama",
     {{"config", R"({"model_type": "gpt2"})"}},
     {1, 1},
     Errc::bad_argument,
     {"'gpt2'", "qwen3"}},
    {"a config that is no JSON",
     "bert",
     {{"config", "{"}},
     {1, 1},
     Errc::bad_argument,
     {"not a JSON object"}},
    {"a config that is a list",
     "bert",
     {{"config", "[]"}},
     {1, 1},
     Errc::bad_argument,
     {"not a JSON object"}},
    {"a dtype that is not known",
     "bert",
     bert(24, 12, 48, {{"dtype", "float8"}}),
     {1, 1},
     Errc::bad_argument,
     {"float8"}},
};

BOOST_DATA_TEST_CASE(what_does_not_fit_is_refused_by_name, bdata::make(kRefusals), r) {
  const auto result = thrown_by([&] {
    const auto model = make_model(r.family, r.options);
    (void)model->worker(r.deployment, 0, model->catalogue());
  });
  BOOST_REQUIRE(result.any);
  BOOST_TEST((result.code == r.code), result.text);
  for (const char* part : r.mentions) {
    BOOST_TEST(result.mentions(part), "'" << part << "' is not in: " << result.text);
  }
}

// A43
BOOST_AUTO_TEST_CASE(names_of_both_sides_follow_the_wrapper_class) {
  const std::string tensor = "model.language_model.layers.0.self_attn.q_norm.weight";
  for (const std::string root : {"model.", "language_model.model."}) {
    const auto model = make_model("llama", llama(4, 1, 4, 4, 2, 8, 64,
                                                 {{"model_type", "qwen3"},
                                                  {"checkpoint_root", "model.language_model."},
                                                  {"worker_root", root}}));
    const auto worker = model->worker({1, 1}, 0, model->catalogue());
    const auto& norm = parameter_of(worker, root + "layers.0.self_attn.q_norm.weight");
    BOOST_TEST(norm.sections.front().tensor == tensor);
  }
}

BOOST_AUTO_TEST_CASE(a_misfit_lists_what_is_missing_and_what_is_left_over) {
  const auto model = make_model("llama", llama(4, 2, 4, 4, 2, 8, 64));
  const auto text_of = [&](const Catalogue& checkpoint) {
    const auto result = thrown_by([&] { (void)model->worker({1, 1}, 0, checkpoint); });
    BOOST_TEST(result.any);
    BOOST_TEST((result.code == Errc::bad_argument));
    return result.text;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    BOOST_TEST((text.find(part) != std::string::npos), "'" << part << "' is not in: " << text);
  };
  Catalogue renamed = model->catalogue();
  for (TensorInfo& tensor : renamed) {
    tensor.name = "wrapper." + tensor.name;
  }
  std::string text = text_of(renamed);
  has(text, "lacks model.embed_tokens.weight, ");
  has(text, "wrapper.model.embed_tokens.weight, ");
  has(text, "left over");
  has(text, "more");

  Catalogue fused = model->catalogue();
  std::erase_if(fused, [](const TensorInfo& tensor) {
    return tensor.name.starts_with("model.layers.1.self_attn.q");
  });
  fused.push_back({"model.layers.1.self_attn.qgkv.weight", DType::bf16, {8, 4}});
  text = text_of(fused);
  has(text, "lacks model.layers.1.self_attn.q_proj.weight");
  has(text, "model.layers.1.self_attn.qgkv.weight is left over");

  Catalogue other = model->catalogue();
  other.back().shape = {65, 4};
  text = text_of(other);
  has(text, "lm_head.weight");
  has(text, "[65, 4]");
  has(text, "[64, 4]");

  Catalogue twice = model->catalogue();
  twice.push_back(twice.front());
  has(text_of(twice), "'model.embed_tokens.weight' stands twice");

  Catalogue mixed = model->catalogue();
  for (TensorInfo& tensor : mixed) {
    if (tensor.name == "model.layers.1.self_attn.k_proj.weight") {
      tensor.dtype = DType::f32;
    }
  }
  text = text_of(mixed);
  has(text, "model.layers.1.self_attn.k_proj.weight' is f32");
  has(text, "is bf16");
}

BOOST_AUTO_TEST_CASE(buffers_that_a_checkpoint_may_hold_are_known_and_left_alone) {
  const auto model = make_model("llama", llama(4, 2, 4, 4, 2, 8, 64));
  Catalogue checkpoint = model->catalogue();
  checkpoint.push_back({"model.layers.1.self_attn.rotary_emb.inv_freq", DType::f32, {1}});
  const auto worker = model->worker({1, 1}, 0, checkpoint);
  BOOST_TEST(
      (worker.ignored == std::vector<std::string>{"model.layers.1.self_attn.rotary_emb.inv_freq"}));
  for (const auto& parameter : worker.parameters) {
    BOOST_TEST((parameter.name.find("inv_freq") == std::string::npos));
  }
  checkpoint.back().name = "model.layers.2.self_attn.rotary_emb.inv_freq";  // there is no layer 2
  BOOST_TEST(thrown_by([&] { (void)model->worker({1, 1}, 0, checkpoint); }).mentions("left over"));
}

// A33
BOOST_AUTO_TEST_CASE(a_tied_head_is_no_parameter_and_only_its_exact_name_is_the_head) {
  const auto model =
      make_model("llama", llama(4, 1, 4, 4, 2, 8, 64, {{"tie_word_embeddings", "true"}}));
  const auto names = [](const WorkerModel& worker) {
    std::set<std::string> result;
    for (const auto& parameter : worker.parameters) {
      result.insert(parameter.name);
    }
    return result;
  };
  Catalogue checkpoint = model->catalogue();
  BOOST_TEST(names(model->worker({2, 2}, 0, checkpoint)).count("lm_head.weight") == 0u);
  checkpoint.push_back({"lm_head.weight", DType::bf16, {64, 4}});
  BOOST_TEST(parameter_of(model->worker({2, 2}, 0, checkpoint), "lm_head.weight").same_as ==
             kEmbedding);
  checkpoint.back().name = "mtp.lm_head.weight";
  BOOST_TEST(thrown_by([&] {
               (void)model->worker({2, 2}, 0, checkpoint);
             }).mentions("mtp.lm_head.weight is left over"));
  const auto untied = make_model("llama", llama(4, 1, 4, 4, 2, 8, 64));
  BOOST_TEST(thrown_by([&] {
               (void)untied->worker({2, 2}, 0, model->catalogue());
             }).mentions("lacks lm_head.weight"));
}

BOOST_AUTO_TEST_CASE(options_win_over_the_config_and_other_keys_of_it_do_not_matter) {
  const char* config = R"({"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8, "vocab_size": 64,
    "torch_dtype": "float16", "rope_scaling": {"type": "x"}, "head_dim": null,
    "tie_word_embeddings": true})";
  const auto model = make_model("llama", {{"config", config}, {"num_hidden_layers", "2"}});
  std::set<std::string> names;
  for (const auto& tensor : model->catalogue()) {
    names.insert(tensor.name);
    BOOST_TEST((tensor.dtype == DType::f16));
  }
  BOOST_TEST(names.count("model.layers.1.self_attn.k_proj.bias") == 1u);
  BOOST_TEST(names.count("model.layers.1.self_attn.o_proj.bias") == 0u);
  BOOST_TEST(names.count("model.layers.2.self_attn.k_proj.bias") == 0u);
  BOOST_TEST(names.count("lm_head.weight") == 0u);
  BOOST_TEST(names.size() == 2u + 2 * 12u);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
