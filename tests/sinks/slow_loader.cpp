// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/sinks/slow_loader.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "core/tensor/cast.hpp"

namespace m2n::testing {
namespace {

/// From an index of the checkpoint's dimension to one of the parameter's, if it is this worker's.
using Axis = std::function<std::optional<Index>(Index)>;

struct Target {
  std::string parameter;
  std::vector<Axis> axes;          ///< One a dimension of the tensor.
  std::vector<std::size_t> order;  ///< Parameter dimension p is tensor dimension order[p].
  std::vector<Index> lead = {};    ///< Parameter indices before those.
};

Axis all(Index offset = 0) {
  return [offset](Index i) { return std::optional(i + offset); };
}

/// Every worker has @p extent / n neighbours.
Axis even(Index extent, Index n, Index rank, Index offset = 0) {
  const Index each = extent / n;
  return
      [=](Index i) { return i / each == rank ? std::optional(i % each + offset) : std::nullopt; };
}

/// Ceiling division over units, the last workers have fewer.
Axis uneven(Index units, Index unit, Index n, Index rank) {
  const Index each = (units + n - 1) / n * unit;
  return [=](Index i) { return i / each == rank ? std::optional(i % each) : std::nullopt; };
}

/// Key and value heads: fewer than workers are repeated.
Axis kv_axis(Index heads, Index head, Index n, Index rank, Index offset) {
  const Index each = heads >= n ? heads / n : 1;
  const Index first = heads >= n ? rank * each : rank / (n / heads);
  return [=](Index i) {
    const Index h = i / head - first;
    return h >= 0 && h < each ? std::optional(h * head + i % head + offset) : std::nullopt;
  };
}

/// An axis of scales: block b belongs to whoever has an element of it, counted in own blocks.
Axis scaled(const Axis& axis, Index block, Index extent, Index offset = 0) {
  return [=](Index b) -> std::optional<Index> {
    for (Index i = b * block; i < std::min((b + 1) * block, extent); ++i) {
      if (const auto local = axis(i)) {
        return *local / block + offset;
      }
    }
    return std::nullopt;
  };
}

long double f8(std::byte weight) {
  const auto bits = std::to_integer<int>(weight);
  const int exponent = bits >> 3 & 15;
  const long double size =
      exponent == 0 ? (bits & 7) / 512.0L : (8 + (bits & 7)) * std::pow(2.0L, exponent - 10);
  return bits > 127 ? -size : size;
}

/// All finite elements are tried.
std::byte nearest(long double value) {
  static const std::vector<long double> kSizes = [] {
    std::vector<long double> all;
    for (int bits = 0; bits < 127; ++bits) {
      all.push_back(f8(std::byte(bits)));
    }
    return all;
  }();
  const long double size = std::fabs(value);
  std::size_t best = 0;
  for (std::size_t bits = 1; bits < kSizes.size(); ++bits) {
    const long double now = std::fabs(kSizes[bits] - size);
    const long double before = std::fabs(kSizes[best] - size);
    if (now < before || (now == before && bits % 2 == 0)) {
      best = bits;
    }
  }
  return std::byte(static_cast<int>(best) | (std::signbit(value) ? 128 : 0));
}

float power_of_two(float scale) {
  if (scale == 0) {
    return 0;
  }
  float power = std::ldexp(1.0F, -127);
  while (power < scale) {
    power *= 2;
  }
  return power;
}

bool ends(const std::string& name, const std::string& tail) { return name.ends_with(tail); }

class Loader {
 public:
  Loader(const SlowModel& model, const SlowSeat& seat, const std::vector<LiveParameter>& parameters)
      : m_(model), s_(seat) {
    for (const LiveParameter& parameter : parameters) {
      shapes_[parameter.name] = parameter.shape;
      dtypes_[parameter.name] = parameter.dtype;
      bytes[parameter.name].resize(static_cast<std::size_t>(element_count(parameter.shape)) *
                                   bytes_of(parameter.dtype));
    }
  }

  using Bytes = std::map<std::string, std::vector<std::byte>>;

  void load(const TensorInfo& tensor, const Bytes& checkpoint) {
    for (const Target& target : targets(tensor)) {
      copy(tensor, checkpoint, target);
    }
  }

  /// Weights under the scales that the worker's kernels want.
  void requantise() {
    for (auto& [parameter, scales] : scales_of_) {
      const Shape& shape = shapes_.at(parameter);
      const std::size_t experts = shape.size() == 3 ? static_cast<std::size_t>(shape[0]) : 1;
      const std::size_t each = scales.size() / experts;
      for (std::size_t i = 0; i < scales.size(); ++i) {
        const auto first = scales.begin() + static_cast<std::ptrdiff_t>(i / each * each);
        const float to = m_.scales == SlowModel::Scales::one
                             ? *std::max_element(first, first + static_cast<std::ptrdiff_t>(each))
                             : power_of_two(scales[i]);
        if (scales[i] > 0) {  // not of padding
          std::byte& weight = bytes.at(parameter)[i];
          weight = nearest(f8(weight) * scales[i] / to);
        }
      }
    }
    for (auto& [parameter, data] : bytes) {
      if (ends(parameter, "_scale_parts") || ends(parameter, "_scale_inv")) {
        std::vector<float> scales(data.size() / sizeof(float));
        std::memcpy(scales.data(), data.data(), data.size());
        const Shape& shape = shapes_.at(parameter);
        const auto parts = static_cast<std::size_t>(shape[shape.size() - 1]);
        for (std::size_t i = 0; i < scales.size(); i += parts) {
          const auto end = scales.begin() + static_cast<std::ptrdiff_t>(i + parts);
          const float most = *std::max_element(end - static_cast<std::ptrdiff_t>(parts), end);
          for (std::size_t j = i; j < i + parts; ++j) {
            scales[j] = m_.scales == SlowModel::Scales::one ? most : power_of_two(scales[j]);
          }
        }
        std::memcpy(data.data(), scales.data(), data.size());
      }
    }
  }

  Bytes bytes;

 private:
  struct Name {
    std::string prefix;  // up to the module
    std::string module;
    std::string leaf;
    bool scale = false;
  };

  std::vector<Target> targets(const TensorInfo& tensor) const {
    const std::string& full = tensor.name;
    const std::size_t dot = full.rfind('.');
    Name name;
    name.leaf = full.substr(dot + 1);
    name.scale = name.leaf == "weight_scale_inv";
    const std::string path = full.substr(0, dot);
    const std::size_t before = path.rfind('.');
    name.module = before == std::string::npos ? path : path.substr(before + 1);
    name.prefix = before == std::string::npos ? "" : path.substr(0, before + 1);
    if (!on_stage(full) || ends(full, "rotary_emb.inv_freq")) {
      return {};
    }
    if (m_.gpt2) {
      return gpt2(tensor, name);
    }
    if (name.leaf == "weight_scale") {
      return one_number(name);
    }
    if (full.find(".experts.") != std::string::npos) {
      return m_.alternating ? stacked(tensor, name) : expert(tensor, full);
    }
    return dense(tensor, name);
  }

  /// The scale of a whole tensor: among those of its parameter, and of every slot of its expert.
  std::vector<Target> one_number(const Name& n) const {
    const bool one = m_.scales == SlowModel::Scales::one;
    const std::map<std::string, std::pair<std::string, Index>> fused = {
        {"q_proj", {"qkv_proj", 0}},
        {"k_proj", {"qkv_proj", 1}},
        {"v_proj", {"qkv_proj", 2}},
        {"gate_proj", {"gate_up_proj", 0}},
        {"up_proj", {"gate_up_proj", 1}}};
    const auto part = fused.find(n.module);
    const std::size_t at = n.prefix.find(".experts.");
    if (at == std::string::npos) {
      if (part == fused.end()) {
        return {{n.prefix + n.module + ".weight_scale", {}, {}}};
      }
      return {{n.prefix + part->second.first + (one ? ".weight_scale_parts" : ".weight_scale"),
               {},
               {},
               {part->second.second}}};
    }
    const Index number = std::stoll(n.prefix.substr(at + 9));
    const std::string module = n.prefix.substr(0, at + 9);
    std::vector<Target> targets;
    for (std::size_t slot = 0; slot < s_.slots.size(); ++slot) {
      if (s_.slots[slot] != number) {
        continue;
      }
      const auto local = static_cast<Index>(slot);
      if (part == fused.end()) {
        targets.push_back({module + "w2_weight_scale", {}, {}, {local}});
      } else {
        targets.push_back({module + (one ? "w13_weight_scale_parts" : "w13_weight_scale"),
                           {},
                           {},
                           {local, part->second.second}});
      }
    }
    return targets;
  }

  /// The scale of each element of f8 tensor @p name; nothing when that is of no interest.
  std::function<float(const std::vector<Index>&)> scale_of(const TensorInfo& tensor,
                                                           const Bytes& checkpoint) const {
    if (m_.scales == SlowModel::Scales::as_stored || tensor.dtype != DType::f8_e4m3) {
      return {};
    }
    const bool one = m_.scales == SlowModel::Scales::one;
    const std::vector<std::byte>& data =
        checkpoint.at(tensor.name + (one ? "_scale" : "_scale_inv"));
    const Index columns = one ? 0 : (tensor.shape[1] + m_.block - 1) / m_.block;
    return [this, &data, columns](const std::vector<Index>& at) {
      const Index block = columns == 0 ? 0 : at[0] / m_.block * columns + at[1] / m_.block;
      float scale = 0;
      std::memcpy(&scale, data.data() + static_cast<std::size_t>(block) * sizeof scale,
                  sizeof scale);
      return scale;
    };
  }

  /// The number behind "layers.", "layer." or "h.", of the language model.
  std::optional<Index> layer_of(const std::string& name) const {
    if (name.find("vision_tower") != std::string::npos) {
      return std::nullopt;
    }
    for (const std::string list : {"layers.", "layer.", "h."}) {
      const std::size_t at = name.find(list);
      if (at != std::string::npos && (at == 0 || name[at - 1] == '.') &&
          std::isdigit(static_cast<unsigned char>(name[at + list.size()])) != 0) {
        return std::stoll(name.substr(at + list.size()));
      }
    }
    return std::nullopt;
  }

  bool on_stage(const std::string& name) const {
    if (const auto layer = layer_of(name)) {
      return *layer >= s_.first_layer && *layer < s_.end_layer;
    }
    const bool behind = ends(name, "model.norm.weight") || ends(name, "lm_head.weight") ||
                        name.find("ln_f") != std::string::npos || name.starts_with("pooler.");
    const bool embedding = ends(name, "embed_tokens.weight") || ends(name, "wte.weight");
    return behind ? s_.last_stage : s_.first_stage || (embedding && m_.tied && s_.last_stage);
  }

  Target as_is(const TensorInfo& tensor, const std::string& parameter) const {
    Target target{parameter, {}, {}};
    for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
      target.axes.push_back(all());
      target.order.push_back(d);
    }
    return target;
  }

  /// Dimension @p d by @p axis; in a tensor of scales by its blocks.
  Target cut(const TensorInfo& tensor, const Name& name, const std::string& module, std::size_t d,
             const Axis& axis, Index extent, Index scale_offset = 0) const {
    Target target = as_is(tensor, name.prefix + module + "." + name.leaf);
    target.axes[d] = name.scale ? scaled(axis, m_.block, extent, scale_offset) : axis;
    return target;
  }

  Index extent(const TensorInfo& tensor, const Name& name, std::size_t d) const {
    return tensor.shape[d] * (name.scale ? m_.block : 1);
  }

  std::vector<Target> dense(const TensorInfo& tensor, const Name& n) const {
    const Index at = s_.attention;
    const Index ar = s_.attention_rank;
    const bool vision = tensor.name.find("vision_tower") != std::string::npos;
    if (n.module == "embed_tokens" || n.module == "lm_head" || n.module == "position_embedding") {
      const Index padded =
          (tensor.shape[0] + m_.vocab_padding - 1) / m_.vocab_padding * m_.vocab_padding;
      std::string module = n.module;
      if (m_.alternating && module == "embed_tokens") {
        module = "embedding";
      }
      return {cut(tensor, n, module, 0, even(padded, at, ar), 0)};
    }
    if (n.leaf == "sinks") {
      Target target = as_is(tensor, n.prefix + "attn.sinks");
      target.axes[0] = even(m_.heads, at, ar);
      return {target};
    }
    Name name = n;
    const std::size_t self = name.prefix.find("self_attn.");
    if (m_.alternating && self != std::string::npos) {
      name.prefix.replace(self, 10, "attn.");
    }
    const Index head = vision ? tensor.shape[0] / m_.heads : m_.head;
    const Index kv = vision ? m_.heads : m_.kv_heads;
    const Index q_rows = m_.heads / at * head;
    const Index kv_rows = (kv >= at ? kv / at : 1) * head;
    if (n.module == "q_proj" || n.module == "query") {
      return {cut(tensor, name, "qkv_proj", 0, even(m_.heads * head, at, ar), m_.heads * head)};
    }
    if (n.module == "k_proj" || n.module == "key") {
      return {cut(tensor, name, "qkv_proj", 0, kv_axis(kv, head, at, ar, q_rows), kv * head)};
    }
    if (n.module == "v_proj" || n.module == "value") {
      return {
          cut(tensor, name, "qkv_proj", 0, kv_axis(kv, head, at, ar, q_rows + kv_rows), kv * head)};
    }
    if (n.module == "q_a_proj" || n.module == "kv_a_proj_with_mqa") {
      Target target = as_is(
          tensor,
          n.prefix + (s_.sglang ? "fused_qkv_a_proj_with_mqa." : "fused_qkv_a_proj.") + n.leaf);
      if (n.module == "kv_a_proj_with_mqa") {  // behind the rows of q_a
        target.axes[0] = all(shapes_.at(target.parameter)[0] - tensor.shape[0]);
      }
      return {target};
    }
    const bool attention_out = n.module == "o_proj" || n.module == "out_proj" ||
                               tensor.name.find("attention.output.dense") != std::string::npos;
    const bool columns = n.module == "q_b_proj" || n.module == "kv_b_proj";
    if (columns) {
      const Index rows = extent(tensor, n, 0);
      return {cut(tensor, n, n.module, 0, even(rows, at, ar), rows)};
    }
    if (n.module == "gate_proj" || n.module == "up_proj") {
      const Index rows = extent(tensor, n, 0);
      const Index mine = rows / s_.tp;
      const bool up = n.module == "up_proj";
      const Index offset = up && !n.scale ? mine : 0;
      return {cut(tensor, n, "gate_up_proj", 0, even(rows, s_.tp, s_.tp_rank, offset), rows,
                  up ? (mine + m_.block - 1) / m_.block : 0)};
    }
    const bool out =
        n.module == "down_proj" || n.module == "fc2" || ends(n.prefix + n.module, ".output.dense");
    if ((attention_out || out) && tensor.shape.size() == 2) {
      const Index width = extent(tensor, n, 1);
      const Axis axis = attention_out ? even(width, at, ar) : even(width, s_.tp, s_.tp_rank);
      return {cut(tensor, name, n.module, 1, axis, width)};
    }
    if (n.module == "fc1" || ends(n.prefix + n.module, "intermediate.dense")) {
      return {cut(tensor, n, n.module, 0, even(tensor.shape[0], s_.tp, s_.tp_rank), 0)};
    }
    return {as_is(tensor, name.prefix + n.module + "." + n.leaf)};
  }

  /// "...experts.<e>.<name>.<leaf>" into every slot of the expert.
  std::vector<Target> expert(const TensorInfo& tensor, const std::string& full) const {
    const std::size_t at = full.find(".experts.") + 9;
    const Index number = std::stoll(full.substr(at));
    const std::string rest = full.substr(full.find('.', at) + 1);
    const std::string what = rest.substr(0, rest.find('.'));
    const std::string leaf = rest.substr(rest.find('.') + 1);
    const bool scale = leaf == "weight_scale_inv";
    const bool down = what == "down_proj" || what == "w2";
    const bool up = what == "up_proj" || what == "w3";
    const std::string parameter = full.substr(0, at) + (down ? "w2_" : "w13_") + leaf;
    const std::size_t d = down ? 1 : 0;
    const Index whole = tensor.shape[d] * (scale ? m_.block : 1);
    const Index mine = whole / s_.moe_tp;
    Axis axis = even(whole, s_.moe_tp, s_.moe_tp_rank, up && !scale ? mine : 0);
    if (scale) {
      axis = scaled(axis, m_.block, whole, up ? (mine + m_.block - 1) / m_.block : 0);
    }
    std::vector<Target> targets;
    for (std::size_t slot = 0; slot < s_.slots.size(); ++slot) {
      if (s_.slots[slot] == number) {
        Target target = as_is(tensor, parameter);
        target.axes[d] = axis;
        target.lead = {static_cast<Index>(slot)};
        targets.push_back(target);
      }
    }
    return targets;
  }

  /// gpt-oss: all experts in one tensor, gate and up in turn, blocks of 32.
  std::vector<Target> stacked(const TensorInfo& tensor, const Name& n) const {
    const std::string& leaf = n.leaf;
    const bool wide = leaf.starts_with("gate_up_proj");
    const std::string prefix = n.prefix + "experts." + (wide ? "w13_" : "w2_");
    Target target = as_is(tensor, prefix);
    const Index n_ranks = s_.moe_tp;
    const Index r = s_.moe_tp_rank;
    if (ends(leaf, "_bias")) {
      target.parameter += s_.sglang ? "weight_bias" : "bias";
      if (!wide && r != 0) {  // added once
        return {};
      }
    } else {
      target.parameter += ends(leaf, "_scales") ? "weight_scale" : "weight";
    }
    const bool plain = leaf == "gate_up_proj" || leaf == "down_proj";  // stored [in, out]
    const std::size_t d = wide == plain ? 2 : 1;
    if (plain) {
      target.order = {0, 2, 1};
    }
    if (wide) {
      target.axes[d] = uneven(tensor.shape[d] / 2 / m_.together, 2 * m_.together, n_ranks, r);
    } else if (!ends(leaf, "_bias")) {
      target.axes[d] = uneven(tensor.shape[d], 1, n_ranks, r);
    }
    std::vector<Target> targets;
    for (std::size_t slot = 0; slot < s_.slots.size(); ++slot) {
      target.axes[0] = [slot, expert = s_.slots[slot]](Index e) {
        return e == expert ? std::optional(static_cast<Index>(slot)) : std::nullopt;
      };
      targets.push_back(target);
    }
    return targets;
  }

  /// Weights stored [in, out]; c_attn is q | k | v along out.
  std::vector<Target> gpt2(const TensorInfo& tensor, const Name& n) const {
    const std::string parameter = "transformer." + n.prefix + n.module + "." + n.leaf;
    if (ends(tensor.name, ".attn.bias")) {
      return {};
    }
    Target target = as_is(tensor, parameter);
    if (n.module == "wte") {
      target.axes[0] = even((tensor.shape[0] + 63) / 64 * 64, s_.tp, s_.tp_rank);
      return {target};
    }
    const bool weight = tensor.shape.size() == 2;
    const std::size_t out = weight ? 1 : 0;
    if (n.module == "c_attn") {
      const Index third = tensor.shape[out] / 3;
      const Axis one = even(third, s_.tp, s_.tp_rank);
      target.axes[out] = [=, mine = third / s_.tp](Index i) -> std::optional<Index> {
        const auto local = one(i % third);
        return local ? std::optional(i / third * mine + *local) : std::nullopt;
      };
    } else if (n.module == "c_fc") {
      target.axes[out] = even(tensor.shape[out], s_.tp, s_.tp_rank);
    } else if (n.module == "c_proj" && weight) {
      target.axes[0] = even(tensor.shape[0], s_.tp, s_.tp_rank);
    }
    if (weight && n.module.starts_with("c_")) {
      target.order = {1, 0};
    }
    return {target};
  }

  void copy(const TensorInfo& tensor, const Bytes& checkpoint, const Target& target) {
    const std::vector<std::byte>& data = checkpoint.at(tensor.name);
    const auto scale = scale_of(tensor, checkpoint);
    const auto found = shapes_.find(target.parameter);
    if (found == shapes_.end()) {
      throw std::logic_error("tensor " + tensor.name + " wants parameter " + target.parameter);
    }
    const Shape& shape = found->second;
    const std::uint64_t from_item = bytes_of(tensor.dtype);
    const DType to = dtypes_.at(target.parameter);
    const Index count = element_count(tensor.shape);
    std::vector<Index> at(tensor.shape.size());
    std::vector<Index> global(at.size());
    for (Index flat = 0; flat < count; ++flat) {
      Index rest = flat;
      bool mine = true;
      for (std::size_t d = at.size(); d-- > 0;) {
        global[d] = rest % tensor.shape[d];
        const auto local = target.axes[d](rest % tensor.shape[d]);
        rest /= tensor.shape[d];
        mine = mine && local.has_value();
        at[d] = local.value_or(0);
      }
      if (!mine) {
        continue;
      }
      std::vector<Index> index = target.lead;
      for (const std::size_t d : target.order) {
        index.push_back(at[d]);
      }
      if (index.size() == shape.size() + 1) {  // bytes of blocks are one dimension at the worker
        const Index inner = tensor.shape[tensor.shape.size() - 1];
        index[index.size() - 2] = index[index.size() - 2] * inner + index.back();
        index.pop_back();
      }
      Index element = 0;
      for (std::size_t d = 0; d < shape.size(); ++d) {
        if (index.at(d) < 0 || index.at(d) >= shape[d]) {
          throw std::logic_error("tensor " + tensor.name + " leaves parameter " + target.parameter);
        }
        element = element * shape[d] + index[d];
      }
      cast_elements(
          tensor.dtype, data.data() + static_cast<std::uint64_t>(flat) * from_item, to,
          bytes.at(target.parameter).data() + static_cast<std::uint64_t>(element) * bytes_of(to),
          1);
      if (scale) {
        std::vector<float>& scales = scales_of_[target.parameter];
        scales.resize(bytes.at(target.parameter).size());
        scales[static_cast<std::size_t>(element)] = scale(global);
      }
    }
  }

  const SlowModel& m_;
  const SlowSeat& s_;
  std::map<std::string, Shape> shapes_;
  std::map<std::string, DType> dtypes_;
  std::map<std::string, std::vector<float>> scales_of_;  ///< Of each f8 element, as stored.
};

}  // namespace

std::map<std::string, std::vector<std::byte>> slowly_load(
    const SlowModel& model, const SlowSeat& seat, const std::vector<LiveParameter>& parameters,
    const TensorValues& checkpoint) {
  Loader loader(model, seat, parameters);
  std::map<std::string, std::vector<std::byte>> bytes;
  for (const TensorInfo& tensor : checkpoint.catalogue()) {
    std::vector<std::byte>& data = bytes[tensor.name];
    data.resize(static_cast<std::size_t>(element_count(tensor.shape)) * bytes_of(tensor.dtype));
    checkpoint.read(tensor.name, Box::whole(tensor.shape), data.data(), row_major(tensor.shape));
  }
  for (const TensorInfo& tensor : checkpoint.catalogue()) {
    loader.load(tensor, bytes);
  }
  if (model.scales != SlowModel::Scales::as_stored) {
    loader.requantise();
  }
  return std::move(loader.bytes);
}

}  // namespace m2n::testing
