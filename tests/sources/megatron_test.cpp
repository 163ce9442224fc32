// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <random>
#include <set>

#include "tests/sources/harness.hpp"

namespace bdata = boost::unit_test::data;
using namespace m2n;
using namespace m2n::testing;

namespace {

const std::string kLayer = "model.layers.0.";
const std::string kQ = kLayer + "self_attn.q_proj.weight";
const std::string kK = kLayer + "self_attn.k_proj.weight";
const std::string kV = kLayer + "self_attn.v_proj.weight";

Index count(const TensorInfo& tensor) { return element_count(tensor.shape); }

Picture all_of(const TensorInfo& tensor) { return elements(tensor.name, range(0, count(tensor))); }

Picture slice(const Picture& whole, Index parts, Index part) {
  const auto each = static_cast<std::ptrdiff_t>(whole.size()) / parts;
  return {whole.begin() + part * each, whole.begin() + (part + 1) * each};
}

/// The columns of a row-major picture that part @p part of @p parts holds, row by row.
Picture columns(const Picture& whole, Index width, Index parts, Index part) {
  Picture out;
  for (std::size_t row = 0; row < whole.size(); row += static_cast<std::size_t>(width)) {
    const auto first = whole.begin() + static_cast<std::ptrdiff_t>(row);
    out = out + slice(Picture(first, first + width), parts, part);
  }
  return out;
}

Picture transposed(const Picture& whole, Index width) {
  Picture out;
  for (Index column = 0; column < width; ++column) {
    for (std::size_t row = 0; row < whole.size(); row += static_cast<std::size_t>(width)) {
      out.push_back(whole[row + static_cast<std::size_t>(column)]);
    }
  }
  return out;
}

/// linear_qkv of the whole model, group by group, taken off the fronts of q, k and v.
Picture fused_qkv(Picture q, Picture k, Picture v, Index heads, Index groups, Index head_elements) {
  Picture out;
  const auto take = [&](Picture& from, Index elements_) {
    out.insert(out.end(), from.begin(), from.begin() + elements_);
    from.erase(from.begin(), from.begin() + elements_);
  };
  for (Index group = 0; group < groups; ++group) {
    take(q, heads / groups * head_elements);
    take(k, head_elements);
    take(v, head_elements);
  }
  return out;
}

/// linear_fc1 with partition stride 2: blocks r and r + parts of [gate; up].
Picture fused_fc1(const Picture& gate, const Picture& up, Index parts, Index part) {
  const Picture both = gate + up;
  return slice(both, 2 * parts, part) + slice(both, 2 * parts, part + parts);
}

Catalogue attention(Index heads, Index groups, Index head_dim, Index hidden) {
  return {{kQ, DType::f64, {heads * head_dim, hidden}},
          {kK, DType::f64, {groups * head_dim, hidden}},
          {kV, DType::f64, {groups * head_dim, hidden}}};
}

Options attention_options(Index heads, Index groups, Index head_dim, Index tensor) {
  return {{"heads", text(heads)},
          {"groups", text(groups)},
          {"head_dim", text(head_dim)},
          {"tensor_parallel", text(tensor)}};
}

struct QkvCase {
  const char* why;
  Index heads;
  Index groups;
  Index head_dim;
  Rank tensor;
  Rank rank;
  Index rows;  ///< Of the local linear_qkv.
  std::vector<std::pair<char, Interval>> parts;
};
std::ostream& operator<<(std::ostream& os, const QkvCase& c) { return os << c.why; }

const std::vector<QkvCase> kQkv = {
    {"Llama-3.1-8B: whole groups",
     32,
     8,
     128,
     4,
     1,
     1536,
     {{'q', {1024, 1536}},
      {'k', {256, 384}},
      {'v', {256, 384}},
      {'q', {1536, 2048}},
      {'k', {384, 512}},
      {'v', {384, 512}}}},
    {"fewer groups than ranks, rank 0", 8, 2, 4, 4, 0, 12, {{'q', {0, 12}}}},
    {"fewer groups than ranks, rank 1",
     8,
     2,
     4,
     4,
     1,
     12,
     {{'q', {12, 16}}, {'k', {0, 4}}, {'v', {0, 4}}}},
    {"fewer groups than ranks, rank 2", 8, 2, 4, 4, 2, 12, {{'q', {16, 28}}}},
    {"fewer groups than ranks, rank 3",
     8,
     2,
     4,
     4,
     3,
     12,
     {{'q', {28, 32}}, {'k', {4, 8}}, {'v', {4, 8}}}},
    {"Qwen3-30B over 8, rank 0", 32, 4, 128, 8, 0, 640, {{'q', {0, 640}}}},
    {"Qwen3-30B over 8, rank 1",
     32,
     4,
     128,
     8,
     1,
     640,
     {{'q', {640, 1024}}, {'k', {0, 128}}, {'v', {0, 128}}}},
    {"two groups on one rank are not a concatenation",
     4,
     2,
     2,
     1,
     0,
     16,
     {{'q', {0, 4}}, {'k', {0, 2}}, {'v', {0, 2}}, {'q', {4, 8}}, {'k', {2, 4}}, {'v', {2, 4}}}},
};

}  // namespace

BOOST_AUTO_TEST_SUITE(sources)
BOOST_AUTO_TEST_SUITE(megatron)

// A15
BOOST_DATA_TEST_CASE(linear_qkv_interleaves_groups, bdata::make(kQkv), c) {
  Trainers trainers("megatron", attention_options(c.heads, c.groups, c.head_dim, c.tensor),
                    c.tensor, attention(c.heads, c.groups, c.head_dim, 1));
  Picture expected;
  for (const auto& [member, rows] : c.parts) {
    const auto& name = member == 'q' ? kQ : member == 'k' ? kK : kV;
    expected = expected + elements(name, range(rows.begin, rows.end));
  }
  BOOST_TEST(static_cast<Index>(expected.size()) == c.rows);
  BOOST_TEST(trainers.picture(c.rank, kQ) == expected, boost::test_tools::per_element());
  BOOST_TEST(trainers.param(kV).side.buffers.at(0) == kLayer + "self_attn.linear_qkv.weight");
  BOOST_TEST(trainers.param(kK).side.buffers.at(0) == trainers.param(kQ).side.buffers.at(0));
  BOOST_TEST(breach(trainers) == "");
}

BOOST_AUTO_TEST_CASE(linear_qkv_equals_an_even_cut_of_dealt_groups_for_every_size) {
  for (Index groups = 1; groups <= 4; ++groups) {
    for (Index per_group = 1; per_group <= 4; ++per_group) {
      for (Index tensor = 1; tensor <= 8; ++tensor) {
        const Index heads = groups * per_group;
        const Index head_dim = 2;
        const Index hidden = 3;
        const auto catalogue = attention(heads, groups, head_dim, hidden);
        const auto options = attention_options(heads, groups, head_dim, tensor);
        if (heads % tensor != 0 || (groups % tensor != 0 && tensor % groups != 0) ||
            (heads + 2 * groups) * head_dim % tensor != 0) {
          BOOST_TEST(refuses("megatron", options, static_cast<Rank>(tensor), catalogue,
                             Errc::bad_argument, "do not divide by tensor_parallel"));
          continue;
        }
        Trainers trainers("megatron", options, static_cast<Rank>(tensor), catalogue);
        BOOST_TEST(breach(trainers) == "");
        const Picture fused = fused_qkv(all_of(catalogue[0]), all_of(catalogue[1]),
                                        all_of(catalogue[2]), heads, groups, head_dim * hidden);
        for (Index rank = 0; rank < tensor; ++rank) {
          BOOST_TEST(trainers.picture(static_cast<Rank>(rank), kV) == slice(fused, tensor, rank));
        }
      }
    }
  }
}

// A17
BOOST_AUTO_TEST_CASE(fc1_holds_gate_and_up_of_one_range) {
  for (const auto& [rows, tensor] :
       std::vector<std::pair<Index, Index>>{{12, 2}, {4, 2}, {4, 4}, {4, 1}, {9, 3}}) {
    for (const char* leaf : {"weight", "bias"}) {
      const Shape shape = std::string_view(leaf) == "weight" ? Shape{rows, 2} : Shape{rows};
      const TensorInfo gate{kLayer + "mlp.gate_proj." + leaf, DType::f64, shape};
      const TensorInfo up{kLayer + "mlp.up_proj." + leaf, DType::f64, shape};
      Trainers trainers("megatron", {{"tensor_parallel", text(tensor)}}, static_cast<Rank>(tensor),
                        {up, gate});
      BOOST_TEST(breach(trainers) == "");
      BOOST_TEST(trainers.param(up.name).side.buffers.at(0) == kLayer + "mlp.linear_fc1." + leaf);
      for (Index rank = 0; rank < tensor; ++rank) {
        BOOST_TEST(trainers.picture(static_cast<Rank>(rank), up.name) ==
                   fused_fc1(all_of(gate), all_of(up), tensor, rank));
      }
    }
  }
  // I = 12 over 2: rank 1 holds rows [6, 12) of both.
  Trainers trainers("megatron", {{"tensor_parallel", "2"}}, 2,
                    {{kLayer + "mlp.gate_proj.weight", DType::f64, {12, 1}},
                     {kLayer + "mlp.up_proj.weight", DType::f64, {12, 1}}});
  BOOST_TEST(trainers.rows(1, kLayer + "mlp.gate_proj.weight") == range(6, 12));
  BOOST_TEST(trainers.rows(1, kLayer + "mlp.up_proj.weight") == range(6, 12));
}

// A20
BOOST_AUTO_TEST_CASE(divisibility_is_asked_of_the_section_not_of_the_fused_width) {
  BOOST_TEST(refuses("megatron", {{"tensor_parallel", "2"}}, 2,
                     {{kLayer + "mlp.gate_proj.weight", DType::f64, {3, 2}},
                      {kLayer + "mlp.up_proj.weight", DType::f64, {3, 2}}},
                     Errc::bad_argument, "dimension 0 does not divide by tensor_parallel=2"));
  // 3 key heads of 2 are 6 rows, but 3 heads do not divide by 2.
  BOOST_TEST(refuses("megatron", attention_options(6, 3, 2, 2), 2, attention(6, 3, 2, 1),
                     Errc::bad_argument,
                     "6 heads in 3 groups, 24 rows of linear_qkv, do not divide"));
  BOOST_TEST(refuses("megatron", {{"tensor_parallel", "2"}}, 2,
                     {{kLayer + "mlp.down_proj.weight", DType::f64, {2, 3}}}, Errc::bad_argument,
                     "dimension 1 does not divide"));
}

struct VocabCase {
  Index rows;
  Rank tensor;
  Index divisor;
  Index each;
};
std::ostream& operator<<(std::ostream& os, const VocabCase& c) {
  return os << c.rows << " over " << c.tensor;
}

const std::vector<VocabCase> kVocab = {
    {50257, 1, 128, 50304},   {50257, 4, 128, 12672},  {128256, 8, 128, 16128},
    {151936, 1, 128, 151936}, {151936, 8, 128, 19072}, {129280, 8, 128, 16256},
    {201088, 8, 128, 25216},  {10, 2, 8, 8},
};

// A31, A32
BOOST_DATA_TEST_CASE(vocabulary_is_padded_once_and_cut_evenly, bdata::make(kVocab), c) {
  Options options = {{"tensor_parallel", text(c.tensor)}, {"vocab_divisor", text(c.divisor)}};
  for (const std::string name : {"model.embed_tokens.weight", "lm_head.weight"}) {
    Trainers trainers("megatron", options, c.tensor, {{name, DType::f64, {c.rows, 1}}});
    BOOST_TEST(breach(trainers) == "");
    BOOST_TEST((trainers.param(name).shape == Shape{c.rows, 1}));
    for (Rank rank = 0; rank < c.tensor; ++rank) {
      const Index begin = std::min(c.rows, rank * c.each);
      const Index end = std::min(c.rows, (rank + 1) * c.each);
      BOOST_TEST(trainers.picture(rank, name) ==
                 elements(name, range(begin, end)) +
                     padding(static_cast<std::size_t>(c.each - (end - begin))));
    }
  }
}

struct StageCase {
  const char* why;
  Index layers;
  Rank stages;
  Options options;
  std::vector<std::vector<Index>> of_stage;
};
std::ostream& operator<<(std::ostream& os, const StageCase& c) { return os << c.why; }

const std::vector<StageCase> kStages = {
    {"even: stage 1 of 2 has layers 2 and 3", 4, 2, {}, {{0, 1}, {2, 3}}},
    {"uneven first and last",
     61,
     8,
     {{"first_stage_layers", "7"}, {"last_stage_layers", "6"}},
     {range(0, 7), range(7, 15), range(15, 23), range(23, 31), range(31, 39), range(39, 47),
      range(47, 55), range(55, 61)}},
    {"only the last is uneven", 7, 3, {{"last_stage_layers", "1"}}, {{0, 1, 2}, {3, 4, 5}, {6}}},
    {"interleaved",
     16,
     2,
     {{"virtual_pipeline", "2"}},
     {{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}}},
    {"the embedding counts as a layer",
     7,
     2,
     {{"account_embedding", "true"}},
     {{0, 1, 2}, {3, 4, 5, 6}}},
    {"embedding and loss count",
     10,
     3,
     {{"account_embedding", "true"}, {"account_loss", "true"}},
     {{0, 1, 2}, {3, 4, 5, 6}, {7, 8, 9}}},
    {"layers of each stage", 5, 3, {{"stage_layers", "1,0,4"}}, {{0}, {}, {1, 2, 3, 4}}},
    {"runs in rows", 6, 2, {{"stage_layers", "1,2,2,1"}}, {{0, 3, 4}, {1, 2, 5}}},
};

// A29
BOOST_DATA_TEST_CASE(stages_hold_global_layers, bdata::make(kStages), c) {
  Catalogue catalogue;
  for (Index layer = 0; layer < c.layers; ++layer) {
    catalogue.push_back(
        {"model.layers." + text(layer) + ".input_layernorm.weight", DType::f64, {2}});
  }
  catalogue.push_back({"model.embed_tokens.weight", DType::f64, {3, 2}});
  catalogue.push_back({"model.norm.weight", DType::f64, {2}});
  catalogue.push_back({"lm_head.weight", DType::f64, {3, 2}});
  Options options = c.options;
  options["pipeline_parallel"] = text(c.stages);
  Trainers trainers("megatron", options, c.stages, catalogue);
  BOOST_TEST(breach(trainers) == "");
  for (Rank stage = 0; stage < c.stages; ++stage) {
    std::vector<Index> held;
    for (Index layer = 0; layer < c.layers; ++layer) {
      if (!trainers.held(stage, catalogue[static_cast<std::size_t>(layer)].name).empty()) {
        held.push_back(layer);
      }
    }
    BOOST_TEST(held == c.of_stage[static_cast<std::size_t>(stage)],
               boost::test_tools::per_element());
    BOOST_TEST(trainers.held(stage, "model.embed_tokens.weight").empty() == (stage != 0));
    BOOST_TEST(trainers.held(stage, "model.norm.weight").empty() == (stage != c.stages - 1));
    BOOST_TEST(trainers.held(stage, "lm_head.weight").empty() == (stage != c.stages - 1));
  }
}

BOOST_AUTO_TEST_CASE(an_embedding_without_a_head_is_tied_to_the_last_stage) {
  Trainers trainers("megatron", {{"pipeline_parallel", "3"}, {"tensor_parallel", "2"}}, 6,
                    {{"model.embed_tokens.weight", DType::f64, {10, 2}}});
  BOOST_TEST(breach(trainers) == "");
  for (const Rank tensor : {0, 1}) {
    const auto first = trainers.picture(tensor, "model.embed_tokens.weight");
    BOOST_TEST(first == trainers.picture(tensor + 4, "model.embed_tokens.weight"));
    BOOST_TEST(trainers.picture(tensor + 2, "model.embed_tokens.weight").empty());
  }
}

// A24
BOOST_AUTO_TEST_CASE(dense_and_expert_ranks_follow_their_own_orders) {
  // 16 ranks, TP 2, PP 2, so DP 4; ETP 1, EP 4, so EDP 2; 8 experts.
  Catalogue catalogue;
  for (Index layer = 0; layer < 2; ++layer) {
    const std::string prefix = "model.layers." + text(layer) + ".";
    catalogue.push_back({prefix + "mlp.down_proj.weight", DType::f64, {2, 4}});
    for (Index e = 0; e < 8; ++e) {
      catalogue.push_back(
          {prefix + "mlp.experts." + text(e) + ".down_proj.weight", DType::f64, {2, 4}});
    }
  }
  Trainers trainers("megatron",
                    {{"tensor_parallel", "2"},
                     {"pipeline_parallel", "2"},
                     {"expert_tensor_parallel", "1"},
                     {"expert_parallel", "4"}},
                    16, catalogue);
  BOOST_TEST(breach(trainers) == "");
  const auto experts = [&](Rank rank, Index layer) {
    std::vector<Index> held;
    for (Index e = 0; e < 8; ++e) {
      if (!trainers
               .held(rank, "model.layers." + text(layer) + ".mlp.experts." + text(e) +
                               ".down_proj.weight")
               .empty()) {
        held.push_back(e);
      }
    }
    return held;
  };
  for (Rank rank = 0; rank < 16; ++rank) {
    const Index stage = rank / 8;
    const Index ep = rank % 4;  // groups {0-3} {4-7} {8-11} {12-15}
    BOOST_TEST(experts(rank, stage) == (std::vector<Index>{2 * ep, 2 * ep + 1}));
    BOOST_TEST(experts(rank, 1 - stage).empty());
    BOOST_TEST(trainers.rows(rank, "model.layers." + text(stage) + ".mlp.down_proj.weight", 1) ==
               range(rank % 2 * 2, rank % 2 * 2 + 2));
  }
  BOOST_TEST(experts(5, 0) == (std::vector<Index>{2, 3}));
}

// A25
BOOST_AUTO_TEST_CASE(expert_rank_counts_inside_the_stage) {
  Catalogue catalogue;
  for (const char* layer : {"0", "1"}) {
    for (Index e = 0; e < 8; ++e) {
      catalogue.push_back(
          {"model.layers." + std::string(layer) + ".mlp.experts." + text(e) + ".down_proj.weight",
           DType::f64,
           {2, 2}});
    }
  }
  Trainers trainers("megatron", {{"pipeline_parallel", "2"}, {"expert_parallel", "2"}}, 4,
                    catalogue);
  BOOST_TEST(breach(trainers) == "");
  for (Index e = 0; e < 8; ++e) {
    const auto name = "model.layers.1.mlp.experts." + text(e) + ".down_proj.weight";
    BOOST_TEST(trainers.held(2, name).empty() == (e >= 4));
    BOOST_TEST(trainers.held(3, name).empty() == (e < 4));
    BOOST_TEST(trainers.held(0, name).empty());
  }
}

// A27
BOOST_AUTO_TEST_CASE(expert_tensor_ranks_hold_halves_never_the_whole) {
  const auto expert = kLayer + "mlp.experts.0.";
  Trainers trainers("megatron", {{"expert_tensor_parallel", "2"}}, 2,
                    {{expert + "gate_proj.weight", DType::f64, {512, 3}},
                     {expert + "up_proj.weight", DType::f64, {512, 3}},
                     {expert + "down_proj.weight", DType::f64, {3, 512}}});
  BOOST_TEST(breach(trainers) == "");
  BOOST_TEST(trainers.rows(0, expert + "gate_proj.weight") == range(0, 256));
  BOOST_TEST(trainers.rows(1, expert + "gate_proj.weight") == range(256, 512));
  BOOST_TEST(trainers.rows(1, expert + "down_proj.weight", 1) == range(256, 512));
  BOOST_TEST(trainers.picture(0, expert + "gate_proj.weight").size() == 512U * 3);
  BOOST_TEST((trainers.param(expert + "gate_proj.weight").shape == Shape{512, 3}));
  BOOST_TEST(trainers.param(expert + "up_proj.weight").side.buffers.at(0) ==
             expert + "linear_fc1.weight");
}

BOOST_AUTO_TEST_CASE(a_whole_decoder_equals_its_picture_on_every_rank_for_random_grids) {
  std::mt19937_64 random(271828);
  const auto draw = [&](Index least, Index most) {
    return least + static_cast<Index>(random() % static_cast<std::uint64_t>(most - least + 1));
  };
  for (int round = 0; round < 30; ++round) {
    const Index tp = Index{1} << draw(0, 2);
    const Index pp = draw(1, 2);
    const Index cp = draw(1, 2);
    const Index etp = Index{1} << draw(0, 1);
    const Index ep = Index{1} << draw(0, 1);
    Index dp = draw(1, 2);
    while (tp * cp * dp % (etp * ep) != 0) {
      ++dp;
    }
    const Index groups = Index{1} << draw(0, 2);
    const Index heads = groups * tp;
    Index head_dim = draw(1, 2);
    while ((heads + 2 * groups) * head_dim % tp != 0) {
      head_dim *= 2;
    }
    const Index hidden = tp * etp * draw(1, 2);
    const Index wide = tp * draw(1, 2);
    const Index expert_wide = etp * draw(1, 2);
    const Index vocabulary = draw(1, 9);
    const Index layers = pp * draw(1, 2);
    const Index experts = ep * draw(1, 2);
    const Index multiple = 3 * tp;
    const Index padded = (vocabulary + multiple - 1) / multiple * multiple;

    Catalogue catalogue;
    const auto add = [&](const std::string& name, const Shape& shape) {
      catalogue.push_back({name, DType::f64, shape});
    };
    add("model.embed_tokens.weight", {vocabulary, hidden});
    for (Index layer = 0; layer < layers; ++layer) {
      const std::string p = "model.layers." + text(layer) + ".";
      add(p + "self_attn.q_proj.weight", {heads * head_dim, hidden});
      add(p + "self_attn.k_proj.weight", {groups * head_dim, hidden});
      add(p + "self_attn.v_proj.weight", {groups * head_dim, hidden});
      add(p + "self_attn.q_proj.bias", {heads * head_dim});
      add(p + "self_attn.k_proj.bias", {groups * head_dim});
      add(p + "self_attn.v_proj.bias", {groups * head_dim});
      add(p + "self_attn.q_norm.weight", {head_dim});
      add(p + "self_attn.o_proj.weight", {hidden, heads * head_dim});
      add(p + "self_attn.o_proj.bias", {hidden});
      add(p + "mlp.gate.weight", {experts, hidden});
      add(p + "mlp.gate.e_score_correction_bias", {experts});
      add(p + "mlp.shared_experts.gate_proj.weight", {wide, hidden});
      add(p + "mlp.shared_experts.up_proj.weight", {wide, hidden});
      add(p + "mlp.shared_experts.down_proj.weight", {hidden, wide});
      for (Index e = 0; e < experts; ++e) {
        const std::string x = p + "mlp.experts." + text(e) + ".";
        add(x + "gate_proj.weight", {expert_wide, hidden});
        add(x + "up_proj.weight", {expert_wide, hidden});
        add(x + "down_proj.weight", {hidden, expert_wide});
      }
    }
    add("model.norm.weight", {hidden});
    add("lm_head.weight", {vocabulary, hidden});
    const auto ranks = static_cast<Rank>(tp * cp * dp * pp);
    Options options = attention_options(heads, groups, head_dim, tp);
    options["pipeline_parallel"] = text(pp);
    options["context_parallel"] = text(cp);
    options["expert_parallel"] = text(ep);
    options["expert_tensor_parallel"] = text(etp);
    options["vocab_divisor"] = "3";
    Trainers trainers("megatron", options, ranks, catalogue);
    BOOST_TEST(breach(trainers) == "");

    const auto whole = [&](const std::string& name) {
      return all_of(*std::find_if(catalogue.begin(), catalogue.end(),
                                  [&](const TensorInfo& t) { return t.name == name; }));
    };
    const auto vocabulary_part = [&](const std::string& name, Index t) {
      return slice(whole(name) + padding(static_cast<std::size_t>((padded - vocabulary) * hidden)),
                   tp, t);
    };
    // Coordinates by counting ranks in both orders, leftmost fastest.
    std::vector<std::pair<Index, Index>> dense;  // tp, pp
    for (Index p = 0; p < pp; ++p) {
      for (Index i = 0; i < dp * cp; ++i) {
        for (Index t = 0; t < tp; ++t) {
          dense.emplace_back(t, p);
        }
      }
    }
    std::vector<std::pair<Index, Index>> sparse;  // etp, ep
    while (sparse.size() < static_cast<std::size_t>(ranks)) {
      for (Index e = 0; e < ep; ++e) {
        for (Index t = 0; t < etp; ++t) {
          sparse.emplace_back(t, e);
        }
      }
    }
    for (Rank rank = 0; rank < ranks; ++rank) {
      const auto [t, stage] = dense[static_cast<std::size_t>(rank)];
      const auto [et, e_rank] = sparse[static_cast<std::size_t>(rank)];
      const auto check = [&](const std::string& name, bool here, const Picture& expected) {
        BOOST_TEST_INFO(name << " on rank " << rank);
        BOOST_TEST(trainers.picture(rank, name) == (here ? expected : Picture{}));
      };
      check("model.embed_tokens.weight", stage == 0,
            vocabulary_part("model.embed_tokens.weight", t));
      check("lm_head.weight", stage == pp - 1, vocabulary_part("lm_head.weight", t));
      check("model.norm.weight", stage == pp - 1, whole("model.norm.weight"));
      for (Index layer = 0; layer < layers; ++layer) {
        const std::string p = "model.layers." + text(layer) + ".";
        const bool here = layer / (layers / pp) == stage;
        for (const auto& [leaf, width] :
             {std::pair<std::string, Index>{".weight", hidden}, {".bias", 1}}) {
          const auto fused =
              fused_qkv(whole(p + "self_attn.q_proj" + leaf), whole(p + "self_attn.k_proj" + leaf),
                        whole(p + "self_attn.v_proj" + leaf), heads, groups, head_dim * width);
          check(p + "self_attn.k_proj" + leaf, here, slice(fused, tp, t));
        }
        check(p + "self_attn.o_proj.weight", here,
              columns(whole(p + "self_attn.o_proj.weight"), heads * head_dim, tp, t));
        for (const char* name : {"self_attn.q_norm.weight", "self_attn.o_proj.bias",
                                 "mlp.gate.weight", "mlp.gate.e_score_correction_bias"}) {
          check(p + name, here, whole(p + name));
        }
        const std::string s = p + "mlp.shared_experts.";
        check(s + "up_proj.weight", here,
              fused_fc1(whole(s + "gate_proj.weight"), whole(s + "up_proj.weight"), tp, t));
        check(s + "down_proj.weight", here, columns(whole(s + "down_proj.weight"), wide, tp, t));
        for (Index e = 0; e < experts; ++e) {
          const std::string x = p + "mlp.experts." + text(e) + ".";
          const bool mine = here && e / (experts / ep) == e_rank;
          check(x + "gate_proj.weight", mine,
                fused_fc1(whole(x + "gate_proj.weight"), whole(x + "up_proj.weight"), etp, et));
          check(x + "down_proj.weight", mine,
                columns(whole(x + "down_proj.weight"), expert_wide, etp, et));
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(gpt2_tensors_are_transposed_into_place) {
  const Index heads = 4;
  const Index head_dim = 2;
  const Index hidden = heads * head_dim;
  const Index tp = 2;
  const TensorInfo attn{"h.0.attn.c_attn.weight", DType::f64, {hidden, 3 * hidden}};
  const TensorInfo attn_bias{"h.0.attn.c_attn.bias", DType::f64, {3 * hidden}};
  const TensorInfo proj{"h.0.attn.c_proj.weight", DType::f64, {hidden, hidden}};
  const TensorInfo fc{"h.0.mlp.c_fc.weight", DType::f64, {hidden, 4 * hidden}};
  const TensorInfo fc_bias{"h.0.mlp.c_fc.bias", DType::f64, {4 * hidden}};
  const TensorInfo out{"h.0.mlp.c_proj.weight", DType::f64, {4 * hidden, hidden}};
  Trainers trainers(
      "megatron",
      {{"heads", "4"}, {"head_dim", "2"}, {"tensor_parallel", "2"}, {"skip", "h.*.attn.bias"}}, 2,
      {attn,
       attn_bias,
       proj,
       fc,
       fc_bias,
       out,
       {"h.0.attn.bias", DType::f64, {1, 1, 4, 4}},
       {"h.0.ln_1.bias", DType::f64, {hidden}},
       {"wpe.weight", DType::f64, {5, hidden}},
       {"ln_f.weight", DType::f64, {hidden}}});
  BOOST_TEST(breach(trainers) == "");
  const auto fused = [&](const Picture& rows, Index width) {
    const auto third = [&](Index part) { return slice(rows, 3, part); };
    return fused_qkv(third(0), third(1), third(2), heads, heads, head_dim * width);
  };
  for (Rank rank = 0; rank < tp; ++rank) {
    BOOST_TEST(trainers.picture(rank, attn.name) ==
               slice(fused(transposed(all_of(attn), 3 * hidden), hidden), tp, rank));
    BOOST_TEST(trainers.picture(rank, attn_bias.name) ==
               slice(fused(all_of(attn_bias), 1), tp, rank));
    BOOST_TEST(trainers.picture(rank, proj.name) ==
               columns(transposed(all_of(proj), hidden), hidden, tp, rank));
    BOOST_TEST(trainers.picture(rank, fc.name) ==
               slice(transposed(all_of(fc), 4 * hidden), tp, rank));
    BOOST_TEST(trainers.picture(rank, fc_bias.name) == slice(all_of(fc_bias), tp, rank));
    BOOST_TEST(trainers.picture(rank, out.name) ==
               columns(transposed(all_of(out), hidden), 4 * hidden, tp, rank));
  }
}

BOOST_AUTO_TEST_CASE(latent_attention_cuts_only_the_up_projections) {
  const std::string p = "model.layers.2.self_attn.";
  Trainers trainers("megatron", {{"tensor_parallel", "2"}, {"layers", "3"}}, 2,
                    {{p + "q_proj.weight", DType::f64, {6, 2}},
                     {p + "kv_a_proj_with_mqa.weight", DType::f64, {5, 2}},
                     {p + "kv_a_layernorm.weight", DType::f64, {4}},
                     {p + "kv_b_proj.weight", DType::f64, {8, 4}}});
  BOOST_TEST(breach(trainers) == "");
  BOOST_TEST(trainers.rows(1, p + "q_proj.weight") == range(3, 6));
  BOOST_TEST(trainers.rows(1, p + "kv_b_proj.weight") == range(4, 8));
  BOOST_TEST(trainers.rows(1, p + "kv_a_proj_with_mqa.weight") == range(0, 5));
}

Catalogue norms(Index layers) {
  Catalogue catalogue;
  for (Index layer = 0; layer < layers; ++layer) {
    catalogue.push_back(
        {"model.layers." + text(layer) + ".input_layernorm.weight", DType::f32, {2}});
  }
  return catalogue;
}

TensorInfo scales_of(const std::string& weight, const Shape& shape) {
  return {weight + "_scale_inv", DType::f32, shape};
}

/// A36: one element a block of 4 rows and columns.
BOOST_AUTO_TEST_CASE(scales_of_blocks_are_cut_where_their_weights_are) {
  const TensorInfo down{kLayer + "mlp.down_proj.weight", DType::f64, {6, 16}};
  const TensorInfo gate{kLayer + "mlp.gate_proj.weight", DType::f64, {16, 6}};
  const TensorInfo up{kLayer + "mlp.up_proj.weight", DType::f64, {16, 6}};
  const TensorInfo down_scales = scales_of(down.name, {2, 4});
  const TensorInfo gate_scales = scales_of(gate.name, {4, 2});
  const TensorInfo up_scales = scales_of(up.name, {4, 2});
  const Catalogue catalogue = {down, down_scales, gate, gate_scales, up, up_scales};
  for (const Rank tp : {1, 2, 4}) {
    Trainers trainers("megatron", {{"tensor_parallel", text(tp)}, {"block", "4"}}, tp, catalogue);
    BOOST_TEST(breach(trainers) == "");
    for (Rank rank = 0; rank < tp; ++rank) {
      BOOST_TEST(trainers.picture(rank, down_scales.name) ==
                 columns(all_of(down_scales), 4, tp, rank));
      // The blocks of gate's rows, then those of up's.
      BOOST_TEST(trainers.picture(rank, gate_scales.name) ==
                 fused_fc1(all_of(gate_scales), all_of(up_scales), tp, rank));
    }
  }
  // 2 columns a rank: two ranks share a block, and both have its scale.
  Trainers shared("megatron", {{"tensor_parallel", "8"}, {"block", "4"}}, 8, {down, down_scales});
  BOOST_TEST(breach(shared) == "");
  for (Rank rank = 0; rank < 8; ++rank) {
    BOOST_TEST(shared.rows(rank, down_scales.name, 1) == range(rank / 2, rank / 2 + 1));
  }
}

/// Heads of 8 rows are two blocks each: scales are dealt out like the rows of linear_qkv.
BOOST_AUTO_TEST_CASE(scales_of_linear_qkv_interleave_groups_like_its_rows) {
  Catalogue catalogue = attention(8, 2, 8, 3);
  const TensorInfo q = scales_of(kQ, {16, 1});
  const TensorInfo k = scales_of(kK, {4, 1});
  const TensorInfo v = scales_of(kV, {4, 1});
  catalogue.insert(catalogue.end(), {q, k, v});
  for (const Rank tp : {1, 2, 4, 8}) {
    Options options = attention_options(8, 2, 8, tp);
    options["block"] = "4";
    Trainers trainers("megatron", options, tp, catalogue);
    BOOST_TEST(breach(trainers) == "");
    for (Rank rank = 0; rank < tp; ++rank) {
      BOOST_TEST(trainers.picture(rank, q.name) ==
                 slice(fused_qkv(all_of(q), all_of(k), all_of(v), 8, 2, 2), tp, rank));
    }
  }
}

/// gpt-oss: every expert in one tensor. Rank = etp + 2 * ep; plain weights are turned round.
BOOST_AUTO_TEST_CASE(experts_of_one_tensor_go_to_their_ranks_and_are_cut_inside) {
  const std::string p = kLayer + "mlp.experts.";
  const TensorInfo wide{p + "gate_up_proj", DType::f64, {4, 3, 8}};
  const TensorInfo tall{p + "down_proj", DType::f64, {4, 4, 3}};
  const TensorInfo wide_bias{p + "gate_up_proj_bias", DType::f64, {4, 8}};
  const TensorInfo tall_bias{p + "down_proj_bias", DType::f64, {4, 3}};
  const TensorInfo blocks{p + "gate_up_proj_blocks", DType::f64, {4, 8, 2, 2}};
  const TensorInfo down{p + "down_proj_scales", DType::f64, {4, 3, 2}};
  Trainers trainers("megatron", {{"expert_tensor_parallel", "2"}, {"expert_parallel", "2"}}, 4,
                    {wide, tall, wide_bias, tall_bias, blocks, down});
  BOOST_TEST(breach(trainers) == "");
  for (Rank rank = 0; rank < 4; ++rank) {
    const Index etp = rank % 2;
    const auto experts = [&](const TensorInfo& tensor) {  // of this rank, one after another
      return slice(all_of(tensor), 2, rank / 2);
    };
    const auto each = [&](const TensorInfo& tensor, const std::function<Picture(Picture)>& change) {
      const Picture both = experts(tensor);
      return change(slice(both, 2, 0)) + change(slice(both, 2, 1));
    };
    BOOST_TEST(trainers.picture(rank, wide.name) ==
               each(wide, [&](const Picture& one) { return slice(transposed(one, 8), 2, etp); }));
    BOOST_TEST(trainers.picture(rank, tall.name) ==
               each(tall, [&](const Picture& one) { return transposed(slice(one, 2, etp), 3); }));
    BOOST_TEST(trainers.picture(rank, wide_bias.name) ==
               each(wide_bias, [&](const Picture& one) { return slice(one, 2, etp); }));
    BOOST_TEST(trainers.picture(rank, tall_bias.name) == experts(tall_bias));
    BOOST_TEST(trainers.picture(rank, blocks.name) ==
               each(blocks, [&](const Picture& one) { return slice(one, 2, etp); }));
    BOOST_TEST(trainers.picture(rank, down.name) ==
               each(down, [&](const Picture& one) { return columns(one, 2, 2, etp); }));
  }
}

BOOST_AUTO_TEST_CASE(what_lies_outside_the_layers_is_of_the_first_or_the_last_stage) {
  const std::string tower = "vision_tower.vision_model.encoder.layers.1.self_attn.q_proj.weight";
  const std::string patches = "vision_tower.vision_model.embeddings.patch_embedding.weight";
  const std::string projector = "multi_modal_projector.mm_input_projection_weight";
  const std::string more = "model.layers.2.";  // a prediction layer behind the model's two
  const std::vector<std::string> first = {tower, patches, projector, "model.embed_tokens.weight"};
  const std::vector<std::string> last = {more + "eh_proj.weight", more + "enorm.weight",
                                         more + "embed_tokens.weight",
                                         more + "shared_head.head.weight", "lm_head.weight"};
  Catalogue catalogue = norms(2);
  for (const auto& names : {first, last}) {
    for (const std::string& name : names) {
      catalogue.push_back({name, DType::f64, {8, 2}});
    }
  }
  catalogue[3].shape = {2, 3, 2, 2};
  Trainers trainers("megatron",
                    {{"tensor_parallel", "2"}, {"pipeline_parallel", "2"}, {"vocab_divisor", "1"}},
                    4, catalogue);
  BOOST_TEST(breach(trainers) == "");
  for (Rank rank = 0; rank < 4; ++rank) {
    for (const std::string& name : first) {
      BOOST_TEST(trainers.held(rank, name).empty() == (rank >= 2));
    }
    for (const std::string& name : last) {
      BOOST_TEST(trainers.held(rank, name).empty() == (rank < 2));
    }
    if (rank < 2) {  // as they are, on every rank
      BOOST_TEST(trainers.held(rank, patches).size() == 24U);
      BOOST_TEST(trainers.rows(rank, tower) == range(0, 8));
    } else {  // a column-parallel layer, and a copy of the head
      BOOST_TEST(trainers.rows(rank, last[0]) == range(4 * (rank - 2), 4 * (rank - 1)));
      BOOST_TEST(trainers.rows(rank, last[3]) == range(4 * (rank - 2), 4 * (rank - 1)));
    }
  }
}

struct NameCase {
  const char* name;
};
std::ostream& operator<<(std::ostream& os, const NameCase& c) { return os << c.name; }

const std::vector<NameCase> kUnknown = {
    {"model.layers.0.self_attn.linear_qgkv.weight"},
    {"model.layers.0.self_attn.linear_qkv.weight"},
    {"model.layers.0.self_attn.qkv_proj.weight"},
    {"model.layers.0.self_attn.q_proj.weight_scales"},
    {"model.layers.0.mlp.experts.gate_up_projs"},
    {"model.layers.0.embed_tokens.weight"},
    {"model.layers.0.mlp.experts.1.w4.weight"},
    {"model.layers.x.mlp.down_proj.weight"},
    {"model.layers.0"},
    {"mtp.lm_head.weight"},
    {"weight"},
    {""},
};

// A23
BOOST_DATA_TEST_CASE(a_name_of_unknown_kind_is_refused_with_its_shape, bdata::make(kUnknown), c) {
  BOOST_TEST(refuses("megatron", {}, 1, {{c.name, DType::f64, {16, 8}}}, Errc::bad_argument,
                     "parameter '" + std::string(c.name) +
                         "' [16, 8]: Megatron's layer kind for this name is not known"));
}

struct RefusalCase {
  const char* why;
  Options options;
  Catalogue catalogue;
  Errc code;
  const char* part;
};
std::ostream& operator<<(std::ostream& os, const RefusalCase& c) { return os << c.why; }

const std::vector<RefusalCase> kRefusals = {
    {"unknown key", {{"tp", "2"}}, norms(1), Errc::usage, "the choices are account_embedding"},
    {"ranks do not divide", {{"tensor_parallel", "3"}}, norms(1), Errc::usage, "divide the 4"},
    {"expert ranks do not divide",
     {{"expert_parallel", "3"}},
     norms(1),
     Errc::usage,
     "expert_tensor_parallel * expert_parallel * pipeline_parallel = 3"},
    {"layers do not divide",
     {{"pipeline_parallel", "2"}},
     norms(3),
     Errc::usage,
     "3 layers do not"},
    {"fewer layers than names", {{"layers", "2"}}, norms(3), Errc::usage, "of layer 2"},
    {"layers do not add up",
     {{"pipeline_parallel", "2"}, {"stage_layers", "1,1"}},
     norms(3),
     Errc::usage,
     "with the sum 3"},
    {"ends leave nothing that divides",
     {{"pipeline_parallel", "4"}, {"first_stage_layers", "2"}, {"last_stage_layers", "2"}},
     norms(7),
     Errc::usage,
     "other 2 stages"},
    {"two ways at once",
     {{"pipeline_parallel", "2"}, {"virtual_pipeline", "2"}, {"account_loss", "true"}},
     norms(4),
     Errc::usage,
     "only one of"},
    {"heads without a size",
     {{"heads", "4"}},
     norms(1),
     Errc::usage,
     "heads and head_dim together"},
    {"groups do not divide",
     {{"heads", "4"}, {"groups", "3"}, {"head_dim", "2"}},
     norms(1),
     Errc::usage,
     "does not divide the 4 heads"},
    {"attention without heads", {}, attention(4, 2, 2, 2), Errc::usage, "needs options heads"},
    {"heads that do not fit the rows",
     {{"heads", "4"}, {"groups", "1"}, {"head_dim", "2"}},
     attention(4, 2, 2, 2),
     Errc::bad_argument,
     "ask for 2 in dimension 0"},
    {"gated attention has other rows",
     {{"heads", "4"}, {"groups", "2"}, {"head_dim", "2"}},
     {{kQ, DType::f32, {16, 2}}, {kK, DType::f32, {4, 2}}, {kV, DType::f32, {4, 2}}},
     Errc::bad_argument,
     "ask for 8 in dimension 0"},
    {"a key is missing",
     {{"heads", "4"}, {"groups", "2"}, {"head_dim", "2"}},
     {{kQ, DType::f32, {8, 2}}, {kV, DType::f32, {4, 2}}},
     Errc::bad_argument,
     "q, k and v go together"},
    {"an up is missing",
     {},
     {{kLayer + "mlp.gate_proj.weight", DType::f32, {4, 2}}},
     Errc::bad_argument,
     "gate and up go together"},
    {"halves of two sizes",
     {},
     {{kLayer + "mlp.gate_proj.weight", DType::f32, {4, 2}},
      {kLayer + "mlp.up_proj.weight", DType::f32, {8, 2}}},
     Errc::bad_argument,
     "does not fit to its sibling"},
    {"halves of two types",
     {},
     {{kLayer + "mlp.gate_proj.weight", DType::f32, {4, 2}},
      {kLayer + "mlp.up_proj.weight", DType::bf16, {4, 2}}},
     Errc::bad_argument,
     "does not fit to its sibling"},
    {"a row-parallel vector",
     {},
     {{kLayer + "mlp.down_proj.weight", DType::f32, {4}}},
     Errc::bad_argument,
     "expected 2 dimensions"},
    {"experts with a hole",
     {},
     {{kLayer + "mlp.experts.1.down_proj.weight", DType::f32, {4, 2}}},
     Errc::bad_argument,
     "experts count from 0"},
    {"scales without their weight",
     {},
     {scales_of(kLayer + "mlp.down_proj.weight", {1, 1})},
     Errc::bad_argument,
     "down_proj.weight' that it scales is not offered"},
    {"scales of other blocks",
     {{"block", "4"}},
     {{kLayer + "mlp.down_proj.weight", DType::f32, {8, 8}},
      scales_of(kLayer + "mlp.down_proj.weight", {1, 1})},
     Errc::bad_argument,
     "blocks of 4 (option block) of its weight [8, 8] ask for scales [2, 2]"},
    {"a cut inside blocks",
     {{"block", "4"}, {"tensor_parallel", "2"}},
     {{kLayer + "mlp.down_proj.weight", DType::f32, {8, 12}},
      scales_of(kLayer + "mlp.down_proj.weight", {2, 3})},
     Errc::bad_argument,
     "a rank's 6 of dimension 1 of its weight are no multiple of blocks of 4"},
    {"halves that share a block",
     {{"block", "4"}, {"tensor_parallel", "4"}},
     {{kLayer + "mlp.gate_proj.weight", DType::f32, {8, 4}},
      scales_of(kLayer + "mlp.gate_proj.weight", {2, 1}),
      {kLayer + "mlp.up_proj.weight", DType::f32, {8, 4}},
      scales_of(kLayer + "mlp.up_proj.weight", {2, 1})},
     Errc::bad_argument,
     "a rank's 2 of dimension 0 of its weight are no multiple of blocks of 4"},
    {"heads that do not fill blocks",
     {{"heads", "4"}, {"groups", "2"}, {"head_dim", "2"}, {"block", "4"}},
     [] {
       Catalogue catalogue = attention(4, 2, 2, 2);
       for (const auto& [name, rows] : {std::pair(kQ, 2), {kK, 1}, {kV, 1}}) {
         catalogue.push_back(scales_of(name, {rows, 1}));
       }
       return catalogue;
     }(),
     Errc::bad_argument,
     "heads of 2 rows do not fill blocks of 4"},
    {"stacked experts that do not divide",
     {{"expert_parallel", "2"}},
     {{kLayer + "mlp.experts.down_proj_bias", DType::f32, {3, 2}}},
     Errc::bad_argument,
     "the 3 experts of layer 0 do not divide by expert_parallel=2"},
    {"stacked experts without a matrix",
     {},
     {{kLayer + "mlp.experts.down_proj", DType::f32, {3, 2}}},
     Errc::bad_argument,
     "expected 3 dimensions"},
    {"experts that do not divide",
     {{"expert_parallel", "2"}},
     {{kLayer + "mlp.experts.0.down_proj.weight", DType::f32, {4, 2}}},
     Errc::bad_argument,
     "do not divide by expert_parallel=2"},
};

BOOST_DATA_TEST_CASE(bad_requests_are_refused, bdata::make(kRefusals), c) {
  BOOST_TEST(refuses("megatron", c.options, 4, c.catalogue, c.code, c.part));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()
