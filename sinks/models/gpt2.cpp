// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// GPT-2: Conv1D weights, stored [in, out]; q, k and v are columns of one tensor.

#include "core/api/plugins.hpp"
#include "sinks/models/rows.hpp"

namespace m2n {
namespace {

using models::Cut;
using models::Group;
using models::Part;
using models::Row;
using models::Rows;
using models::Sizes;
using models::Table;
using models::Units;

struct Conv {
  Index out = 1;
  Index in = 1;
  Units units;
};

/// @p thirds of the output are parts of their own.
void add_conv(Rows& rows, Group group, Cut cut, const std::string& module, const Conv& conv,
              Index thirds = 1) {
  Row weight{.name = module + ".weight", .cut = cut, .group = group, .plain = false};
  Row bias{.name = module + ".bias", .cut = cut == Cut::row ? Cut::whole : cut, .group = group};
  for (Index i = 0; i < thirds; ++i) {
    const Interval part{i * conv.out / thirds, (i + 1) * conv.out / thirds};
    weight.parts.push_back(
        {module + ".weight", {conv.in, conv.out}, conv.units, {}, 1, true, part});
    bias.parts.push_back({module + ".bias", {conv.out}, conv.units, {}, 1, false, part});
  }
  if (cut == Cut::row) {
    weight.parts.front().rows.reset();
  }
  rows.add(std::move(weight));
  rows.add(std::move(bias));
}

Table gpt2_table(const Options& options) {
  const Sizes sizes("gpt2", options,
                    {"n_embd", "n_layer", "n_head", "n_inner", "n_positions", "vocab_size"});
  sizes.choice("model_type", {"gpt2"});
  const Index hidden = sizes.size("n_embd");
  const Units heads = sizes.units("n_head");
  (void)sizes.quotient("n_embd", "n_head");
  const Units inner{"n_inner", sizes.size_or("n_inner", checked_mul(hidden, 4))};
  const Index positions = sizes.size("n_positions");

  Table table = sizes.table(DType::f32, "");
  table.worker_root = sizes.text("worker_root", "transformer.");
  table.layers = sizes.size("n_layer");
  table.ignored = {"{root}h.{l}.attn.masked_bias"};
  table.not_plain = "GPT-2's loader turns weights round";

  Rows rows(table);
  rows.embedding(sizes, hidden, "{root}wte", true);
  rows.whole("{root}wpe.weight", {positions, hidden});
  const std::string layer = "{root}h.{l}.";
  rows.norm(layer + "ln_1", hidden, true);
  rows.whole(layer + "attn.bias", {1, 1, positions, positions}).kept = false;  // a mask
  add_conv(rows, Group::attention, Cut::column, layer + "attn.c_attn",
           {checked_mul(hidden, 3), hidden, heads}, 3);
  add_conv(rows, Group::attention, Cut::row, layer + "attn.c_proj", {hidden, hidden, heads});
  rows.norm(layer + "ln_2", hidden, true);
  add_conv(rows, Group::dense, Cut::column, layer + "mlp.c_fc", {inner.count, hidden, inner});
  add_conv(rows, Group::dense, Cut::row, layer + "mlp.c_proj", {hidden, inner.count, inner});
  rows.norm("{root}ln_f", hidden, true);
  rows.head(sizes, hidden, "{root}wte", true);
  return table;
}

}  // namespace

void add_model_gpt2(Registries& registries) {
  registries.models.add(
      "gpt2", "GPT-2: weights stored the other way round",
      [](const ModelContext& context) { return models::make_family(gpt2_table(context.options)); });
}

}  // namespace m2n
