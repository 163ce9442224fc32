// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sinks/models/rows.hpp"

#include <charconv>
#include <utility>

#include "core/error.hpp"

namespace m2n::models {

Heads::Heads(const Sizes& sizes)
    : hidden(sizes.size("hidden_size")),
      head(sizes.has("head_dim") ? sizes.size("head_dim")
                                 : sizes.quotient("hidden_size", "num_attention_heads")),
      query(sizes.units("num_attention_heads")),
      kv{"num_key_value_heads", sizes.size_or("num_key_value_heads", query.count), true} {}

std::vector<std::string> Heads::keys() {
  return {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"};
}

Quantization::Quantization(const Sizes& sizes) {
  const std::string wanted = sizes.text("scales", "as_stored");
  const auto require = [&](Scales stored, const char* what) {
    if (scales != stored) {
      throw Error(Errc::bad_argument, "option 'scales' is '" + wanted + "', which is for f8 with " +
                                          what + "; this model has none");
    }
  };
  read(sizes);
  if (wanted == "one") {
    require(Scales::tensor, "one scale a tensor");
    requantise = Requantise::one_scale;
  } else if (wanted == "power_of_two") {
    require(Scales::blocks, "one scale a block");
    requantise = Requantise::power_of_two;
  } else if (wanted != "as_stored") {
    throw Error(Errc::bad_argument,
                "option 'scales' is '" + wanted + "'; it must be as_stored, one or power_of_two");
  }
}

void Quantization::mark(Table& table) const {
  if (scales != Scales::none) {
    table.not_plain = "the model is quantised";
  }
  table.requantise = requantise;
}

void Quantization::read(const Sizes& sizes) {
  if (!sizes.has("quantization_config")) {
    return;
  }
  const std::string method = sizes.text("quantization_config.quant_method", "");
  if (method != "fp8") {
    throw Error(Errc::bad_argument, "quantization method '" + method +
                                        "' is not known for this family; it must be fp8, or none");
  }
  const std::string size = sizes.text("quantization_config.weight_block_size", "");
  scales = size.empty() ? Scales::tensor : Scales::blocks;
  if (size.empty()) {
    return;
  }
  const std::size_t begin = size.find_first_of("0123456789");
  const char* const end = size.data() + size.size();
  if (begin == std::string::npos ||
      std::from_chars(size.data() + begin, end, block).ec != std::errc{} || block < 1 ||
      size != "[" + std::to_string(block) + "," + std::to_string(block) + "]") {
    throw Error(Errc::bad_argument, "weight_block_size is " + size +
                                        "; blocks must be as high as wide, like [128,128]");
  }
}

std::vector<std::string> Quantization::keys() {
  return {"quantization_config", "quantization_config.quant_method",
          "quantization_config.weight_block_size", "scales"};
}

Row& Rows::add(Row row) {
  row.layers = layers;
  row.place = place;
  return rows_.emplace_back(std::move(row));
}

Row& Rows::whole(const std::string& name, const Shape& shape) {
  return add({.name = name, .parts = {{name, shape}}});
}

void Rows::norm(const std::string& module, Index size, bool bias) {
  whole(module + ".weight", {size});
  if (bias) {
    whole(module + ".bias", {size});
  }
}

void Rows::vocab(const std::string& name, const std::string& tensor, const Units& words,
                 Index hidden) {
  add({.name = name,
       .cut = Cut::vocab,
       .parts = {{tensor, {words.count, hidden}, words}},
       .group = Group::attention});
}

void Rows::embedding(const Sizes& sizes, Index hidden, const std::string& module, bool tied) {
  vocab(module + ".weight", module + ".weight", sizes.units("vocab_size"), hidden);
  rows_.back().place = tied ? Place::ends : Place::first;
}

void Rows::head(const Sizes& sizes, Index hidden, const std::string& embedding, bool tied) {
  const bool separate = sizes.flag("head_separate", false);
  const std::string name = "lm_head.weight";
  vocab(name, tied && separate ? embedding + ".weight" : name, sizes.units("vocab_size"), hidden);
  if (tied && !separate) {
    rows_.back().same_as = embedding + ".weight";
  }
}

void Rows::linear(Cut cut, const std::string& module, const std::vector<Linear>& parts, bool bias) {
  Row weight{.name = module + ".weight", .cut = cut, .align = align, .group = group};
  Row scale{.name = module,
            .cut = cut,
            .align = align,
            .group = group,
            .keep_dtype = true,
            .plain = false,
            .scales = weight.name};
  Row biases{.name = module + ".bias",
             .cut = cut == Cut::row ? Cut::whole : cut,
             .align = align,
             .group = group};
  for (const Linear& part : parts) {
    const std::string& name = part.module;
    weight.parts.push_back({name + ".weight", {part.out, part.in}, part.units});
    biases.parts.push_back({name + ".bias", {part.out}, part.units});
    if (scales == Scales::blocks) {
      scale.parts.push_back(
          {name + ".weight_scale_inv", {part.out, part.in}, part.units, DType::f32, block});
    } else if (scales == Scales::tensor) {
      scale.parts.push_back({name + ".weight_scale", {}, {}, DType::f32});
    }
    if (scales != Scales::none) {
      weight.parts.back().dtype = DType::f8_e4m3;
    }
  }
  add(std::move(weight));
  if (scales != Scales::none) {
    scale.name += scales == Scales::blocks ? ".weight_scale_inv" : ".weight_scale";
    scale.cut = scales == Scales::blocks ? cut : Cut::whole;
    add(std::move(scale));
  }
  if (bias) {
    add(std::move(biases));
  }
}

void Rows::attention(const std::string& prefix, const Heads& heads, const AttentionStyle& style) {
  const Group before = std::exchange(group, Group::attention);
  const Index align_before = std::exchange(align, 1);
  const std::string worker = style.worker.empty() ? prefix : style.worker;
  const Index query = checked_mul(heads.query.count, heads.head);
  const Index kv = checked_mul(heads.kv.count, heads.head);
  linear(Cut::column, worker + "qkv_proj",
         {{prefix + "q_proj", query, heads.hidden, heads.query},
          {prefix + "k_proj", kv, heads.hidden, heads.kv},
          {prefix + "v_proj", kv, heads.hidden, heads.kv}},
         style.qkv_bias);
  if (style.norms) {
    norm(prefix + "q_norm", heads.head);
    norm(prefix + "k_norm", heads.head);
  }
  linear(Cut::row, worker + style.output,
         {{prefix + style.output, heads.hidden, query, heads.query}}, style.output_bias);
  group = before;
  align = align_before;
}

void Rows::gated_mlp(const std::string& prefix, Index hidden, const Units& inner, bool bias) {
  linear(Cut::column, prefix + "gate_up_proj",
         {{prefix + "gate_proj", inner.count, hidden, inner},
          {prefix + "up_proj", inner.count, hidden, inner}},
         bias);
  linear(Cut::row, prefix + "down_proj", {{prefix + "down_proj", hidden, inner.count, inner}},
         bias);
}

void Rows::experts(const std::string& module, Index hidden, const Units& inner,
                   const ExpertNames& names, bool up_first) {
  const std::string one = module + ".{e}.";
  const Shape wide{inner.count, hidden};
  const Shape tall{hidden, inner.count};
  std::vector<std::string> stacked = {one + names.gate, one + names.up};
  if (up_first) {
    std::swap(stacked[0], stacked[1]);
  }
  const auto add_pair = [&](const std::string& suffix, std::optional<DType> dtype, Index of_block) {
    Row w13{.name = module + ".w13_" + suffix, .cut = Cut::column, .align = align};
    Row w2{.name = module + ".w2_" + suffix, .cut = Cut::row, .align = align};
    for (const std::string& name : stacked) {
      w13.parts.push_back({name + "." + suffix, wide, inner, dtype, of_block});
    }
    w2.parts.push_back({one + names.down + "." + suffix, tall, inner, dtype, of_block});
    for (Row* row : {&w13, &w2}) {
      row->group = Group::experts;
      row->experts = Experts::named;
      if (suffix != "weight") {
        row->keep_dtype = true;
        row->scales = row->name.substr(0, row->name.size() - suffix.size()) + "weight";
      }
      if (suffix == "weight_scale") {  // one number a tensor
        row->cut = Cut::whole;
        row->fold = row == &w2;
        for (Part& part : row->parts) {
          part.shape = {};
          part.units = {};
        }
      }
      add(std::move(*row));
    }
  };
  add_pair("weight", scales == Scales::none ? std::nullopt : std::optional(DType::f8_e4m3), 1);
  if (scales == Scales::blocks) {
    add_pair("weight_scale_inv", DType::f32, block);
  } else if (scales == Scales::tensor) {
    add_pair("weight_scale", DType::f32, 1);
  }
}

}  // namespace m2n::models
