// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Source "fsdp": PyTorch FSDP1 (flat parameters), FSDP2 (one DTensor a parameter), and their
/// hybrid forms.
///
///   version=1|2             default 2
///   replicas=R              hybrid sharding: rank = replica * (ranks / R) + shard; default 1
///   buffers=<pattern>,...   tensors that FSDP leaves alone: whole on every rank
///   skip=<pattern>,...      tensors that the trainer does not hold
/// FSDP2:
///   tensor_parallel=T       FSDP2 over tensor parallelism: mesh ([replicas,] shards, T); default 1
///   tensor_parallel_plan=<pattern>:column|row|replicate,...
///                           the first match decides, no match is replicate; column cuts dimension
///                           0, row dimension 1 (and replicates 1-D biases); default: the linear
///                           layers and embeddings of Llama, Qwen and BERT checkpoints
///   shard_dim=<pattern>:<dim>,...
///                           dimension that FSDP cuts; negative counts from the end; default 0
/// FSDP1:
///   units=layers|all        one flat unit a layer (layers.N., layer.N., h.N., blocks.N.) and one
///                           for the rest, or a single unit; default layers
///   use_orig_params=true|false
///                           true: members start at multiples of 16 bytes; default false
///   align=<elements>        instead of use_orig_params: members start at multiples of this

#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sources/fsdp2.hpp"
#include "sources/sharded_source.hpp"

namespace m2n {

namespace {

using sources::OptionReader;

constexpr std::string_view kDefaultPlan =
    "*.q_proj.*:column,*.k_proj.*:column,*.v_proj.*:column,*.o_proj.*:row,"
    "*.gate_proj.*:column,*.up_proj.*:column,*.down_proj.*:row,"
    "*.query.*:column,*.key.*:column,*.value.*:column,*.intermediate.dense.*:column,"
    "*.output.dense.*:row,*embed_tokens.weight:column,*word_embeddings.weight:column,"
    "lm_head.weight:column";

bool is_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// The name up to and including the number of its outermost layer; empty outside the layers.
std::string_view unit_of(std::string_view name) {
  bool after_list = false;
  std::size_t begin = 0;
  while (begin < name.size()) {
    const auto dot = name.find('.', begin);
    if (dot == std::string_view::npos) {
      return {};
    }
    const std::string_view part = name.substr(begin, dot - begin);
    if (after_list && is_digits(part)) {
      return name.substr(0, dot);
    }
    after_list = part == "layers" || part == "layer" || part == "h" || part == "blocks";
    begin = dot + 1;
  }
  return {};
}

class FsdpSharding {
 public:
  explicit FsdpSharding(const SourceContext& context)
      : context_(context),
        options_("fsdp", context.options,
                 {"version", "replicas", "buffers", "skip", "tensor_parallel",
                  "tensor_parallel_plan", "shard_dim", "units", "use_orig_params", "align"}) {}

  sources::Sharding make() {
    const bool flat = options_.choice("version", {"1", "2"}, "2") == "1";
    refuse_foreign(flat);
    const Index tensor = options_.number("tensor_parallel", 1);
    const Index replicas = options_.number("replicas", 1);
    const Index ranks = context_.ranks;
    if (replicas > ranks || tensor > ranks || ranks % checked_mul(replicas, tensor) != 0) {
      options_.refuse("replicas=" + std::to_string(replicas) +
                      " times tensor_parallel=" + std::to_string(tensor) + " must divide the " +
                      std::to_string(ranks) + " trainer ranks");
    }
    mesh_ = {
        .replicas = replicas, .shards = ranks / (replicas * tensor), .inner = tensor, .ranks = {}};
    for (Rank rank = 0; rank < context_.ranks; ++rank) {
      mesh_.ranks.push_back(rank);
    }
    tensors_ = sources::held_tensors(context_, options_);
    buffers_ = options_.patterns("buffers");
    sources::require_matches(options_, "buffers", buffers_, tensors_);
    sharding_.params.resize(tensors_.size());
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const auto& tensor_info = tensors_[i];
      sharding_.params[i] = {tensor_info.name, tensor_info.dtype, tensor_info.shape, {}};
    }
    flat ? make_flat() : make_dtensors();
    return std::move(sharding_);
  }

 private:
  void refuse_foreign(bool flat) const {
    const std::vector<std::string_view> foreign =
        flat ? std::vector<std::string_view>{"tensor_parallel", "tensor_parallel_plan", "shard_dim"}
             : std::vector<std::string_view>{"units", "use_orig_params", "align"};
    for (const auto key : foreign) {
      if (options_.has(key)) {
        options_.refuse("option '" + std::string(key) + "' needs version=" + (flat ? "2" : "1"));
      }
    }
    if (options_.has("align") && options_.has("use_orig_params")) {
      options_.refuse("options 'align' and 'use_orig_params' say the same; give one");
    }
  }

  bool is_buffer(const TensorInfo& tensor) const {
    return std::any_of(buffers_.begin(), buffers_.end(), [&](const std::string& pattern) {
      return sources::glob_matches(pattern, tensor.name);
    });
  }

  Side whole(const TensorInfo& tensor) {
    return {layouts_.get(sources::geometry_key(tensor) + " whole",
                         [&] {
                           return Layout::sharded(tensor.shape, tensor.dtype,
                                                  Mesh({Index{context_.ranks}}, Rank{0}),
                                                  {Placement::replicate()});
                         }),
            {tensor.name}};
  }

  // FSDP2 ---------------------------------------------------------------------------------------

  void make_dtensors() {
    const bool own_plan = options_.has("tensor_parallel_plan");
    const auto plan =
        own_plan ? options_.rules("tensor_parallel_plan", {"column", "row", "replicate"})
                 : OptionReader("fsdp", {{"tensor_parallel_plan", std::string(kDefaultPlan)}},
                                {"tensor_parallel_plan"})
                       .rules("tensor_parallel_plan", {});
    const auto dims = options_.rules("shard_dim", {});
    std::vector<std::string> patterns;
    for (const auto& rule : dims) {
      patterns.push_back(rule.pattern);
    }
    sources::require_matches(options_, "shard_dim", patterns, tensors_);
    if (own_plan) {
      patterns.clear();
      for (const auto& rule : plan) {
        patterns.push_back(rule.pattern);
      }
      sources::require_matches(options_, "tensor_parallel_plan", patterns, tensors_);
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const auto& tensor = tensors_[i];
      if (is_buffer(tensor)) {
        sharding_.params[i].side = whole(tensor);
        continue;
      }
      sources::Fsdp2Cut cut;
      if (const auto* rule = sources::first_match(dims, tensor.name)) {
        cut.shard_dim = dimension(*rule, tensor);
      }
      const auto* rule = sources::first_match(plan, tensor.name);
      if (mesh_.inner > 1 && rule != nullptr && rule->word != "replicate") {
        if (rule->word == "column") {
          cut.inner_dim = 0;
        } else if (tensor.shape.size() != 1) {
          cut.inner_dim = 1;
        }
      }
      sharding_.params[i].side = {
          layouts_.get(sources::geometry_key(tensor) + sources::fsdp2_key(mesh_, cut),
                       [&] { return sources::fsdp2_layout(tensor, mesh_, cut); }),
          {tensor.name}};
      sharding_.storage_bytes[tensor.name] =
          sources::fsdp2_storage_bytes(tensor, mesh_, cut, context_.rank);
    }
  }

  int dimension(const sources::NameRule& rule, const TensorInfo& tensor) const {
    int dim = 0;
    const char* const last = rule.word.data() + rule.word.size();
    const auto [end, code] = std::from_chars(rule.word.data(), last, dim);
    if (code != std::errc() || end != last) {
      options_.refuse("shard_dim", "expected a list of pattern:dimension");
    }
    const int rank = static_cast<int>(tensor.shape.size());
    const int counted = dim < 0 ? dim + rank : dim;
    if (counted < 0 || counted >= rank) {
      sources::refuse_tensor(tensor, "there is no dimension " + rule.word + " to shard");
    }
    return counted;
  }

  // FSDP1 ---------------------------------------------------------------------------------------

  void make_flat() {
    const bool layers = options_.choice("units", {"layers", "all"}, "layers") == "layers";
    std::vector<std::string> order;
    std::unordered_map<std::string, std::vector<std::size_t>> units;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const auto& tensor = tensors_[i];
      if (is_buffer(tensor)) {
        sharding_.params[i].side = whole(tensor);
        continue;
      }
      if (tensor.shape.empty()) {
        sources::refuse_tensor(tensor,
                               "a scalar cannot be sharded by FSDP; give it one dimension, or "
                               "list it in option 'buffers'");
      }
      std::string unit(layers ? unit_of(tensor.name) : "");
      auto& members = units[unit];
      if (members.empty()) {
        order.push_back(std::move(unit));
      }
      members.push_back(i);
    }
    for (const auto& unit : order) {
      make_unit(unit, units[unit]);
    }
  }

  void make_unit(const std::string& unit, const std::vector<std::size_t>& members) {
    const auto& first = tensors_[members.front()];
    std::vector<Shape> shapes;
    for (const std::size_t i : members) {
      const auto& tensor = tensors_[i];
      if (!is_floating(tensor.dtype)) {
        sources::refuse_tensor(tensor, "FSDP1 flattens floating-point parameters only, not " +
                                           std::string(to_string(tensor.dtype)) +
                                           "; list it in option 'buffers' if it is a buffer");
      }
      if (tensor.dtype != first.dtype) {
        sources::refuse_tensor(tensor, "is " + std::string(to_string(tensor.dtype)) +
                                           ", but its flat unit holds " +
                                           std::string(to_string(first.dtype)) + " ('" +
                                           first.name + "'); a unit has one type");
      }
      shapes.push_back(tensor.shape);
    }
    const auto item = static_cast<Index>(bytes_of(first.dtype));
    const Index align = options_.has("align") ? options_.number("align", 0, 0)
                        : options_.boolean("use_orig_params", false) ? 16 / item
                                                                     : 0;
    const FlatUnit flat = flat_unit(shapes, align, static_cast<std::size_t>(mesh_.shards));
    const std::string buffer = unit.empty() ? "_flat_param" : unit + "._flat_param";
    sharding_.storage_bytes[buffer] =
        checked_mul_bytes(static_cast<std::uint64_t>(ceil_div(flat.elements, mesh_.shards)),
                          static_cast<std::uint64_t>(item));
    for (std::size_t m = 0; m < members.size(); ++m) {
      const auto& tensor = tensors_[members[m]];
      const Index begin = flat.members[m].begin;
      sharding_.params[members[m]].side = {
          layouts_.get(sources::geometry_key(tensor) + " flat at " + std::to_string(begin) +
                           " of " + std::to_string(flat.elements),
                       [&] { return flat_layout(tensor, begin, flat.elements); }),
          {buffer}};
    }
  }

  static bool is_floating(DType dtype) {
    switch (dtype) {
      case DType::f4:
      case DType::f6_e2m3:
      case DType::f6_e3m2:
      case DType::f8_e5m2:
      case DType::f8_e4m3:
      case DType::f8_e8m0:
      case DType::f8_e4m3fnuz:
      case DType::f8_e5m2fnuz:
      case DType::f16:
      case DType::bf16:
      case DType::f32:
      case DType::f64:
        return true;
      case DType::boolean:
      case DType::u8:
      case DType::i8:
      case DType::i16:
      case DType::u16:
      case DType::i32:
      case DType::u32:
      case DType::c64:
      case DType::i64:
      case DType::u64:
        return false;
    }
    return false;
  }

  Layout flat_layout(const TensorInfo& tensor, Index begin, Index elements) const {
    const auto shards = static_cast<std::size_t>(mesh_.shards);
    const std::vector<Rank> group(mesh_.ranks.begin(),
                                  mesh_.ranks.begin() + static_cast<std::ptrdiff_t>(shards));
    Layout one = Layout::flat(tensor.shape, tensor.dtype, begin, elements, group);
    if (mesh_.replicas == 1) {
      return one;
    }
    std::vector<RankPiece> pieces;
    for (Index replica = 0; replica < mesh_.replicas; ++replica) {
      for (const auto& entry : one.pieces()) {
        pieces.push_back({static_cast<Rank>(entry.rank + replica * mesh_.shards), entry.piece});
      }
    }
    return Layout::explicit_pieces(tensor.shape, tensor.dtype, mesh_.ranks, std::move(pieces));
  }

  const SourceContext& context_;
  OptionReader options_;
  sources::Fsdp2Mesh mesh_;
  Catalogue tensors_;
  std::vector<std::string> buffers_;
  sources::Layouts layouts_;
  sources::Sharding sharding_;
};

}  // namespace

void add_source_fsdp(Registries& registries) {
  registries.sources.add("fsdp",
                         "PyTorch FSDP1, FSDP2 and HSDP, also FSDP2 over tensor parallelism",
                         [](const SourceContext& context) {
                           return std::make_unique<sources::ShardedSource>(
                               "fsdp", context, FsdpSharding(context).make());
                         });
}

}  // namespace m2n
