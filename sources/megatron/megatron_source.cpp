// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Source "megatron": Megatron-LM's tensor, pipeline, expert and data parallel ranks, offering
/// Hugging Face names (Llama, Qwen, Mixtral, DeepSeek, gpt-oss and Gemma decoders, GPT-2, BERT). A
/// name that is not known is refused: how a tensor is cut follows from its layer kind, never from
/// its shape.
///
///   tensor_parallel, pipeline_parallel, context_parallel, expert_parallel   default 1
///   expert_tensor_parallel   default: tensor_parallel
///   heads, groups, head_dim  attention heads, key/value heads (default: heads) and their size; for
///                            models with linear_qkv
///   vocab_divisor            embedding and head are padded to a multiple of this times
///                            tensor_parallel; default 128
///   block                    one element of weight_scale_inv scales so many rows and columns;
///                            default 128
///   layers                   of the whole model, without prediction layers; default: one more than
///   the largest in a name first_stage_layers, last_stage_layers     uneven ends; the stages
///   between share evenly account_embedding, account_loss=true      count them as layers of the
///   first and last stage virtual_pipeline         interleaved chunks a stage stage_layers=7,8,...
///   layers of each stage, or of run k, which is of stage k mod stages skip=<pattern>,... tensors
///   that the trainer does not hold
///
/// The ranks of a stage share its layers; data and context parallel ranks hold the same. Buffers
/// are named like the checkpoint's, with global layer and expert numbers; q, k and v lie in
/// `...linear_qkv`, gate and up in `...linear_fc1`. An embedding without a head is tied: the last
/// stage has a copy, and it has prediction layers with copies of embedding and head. A vision tower
/// lies whole on every rank of the first stage. Scales of blocks are cut where their weights are.
/// Experts that share a tensor (gpt-oss) lie one after another, gate and up rows in turn as in the
/// checkpoint.

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sources/megatron/grid.hpp"
#include "sources/megatron/names.hpp"
#include "sources/megatron/slices.hpp"
#include "sources/sharded_source.hpp"

namespace m2n {

namespace {

using sources::OptionReader;
using sources::refuse_tensor;
using sources::megatron::Grid;
using sources::megatron::Held;
using sources::megatron::Holding;
using sources::megatron::Kind;
using sources::megatron::LayerKinds;
using sources::megatron::Part;
using sources::megatron::Place;

class MegatronSharding {
 public:
  explicit MegatronSharding(const SourceContext& context)
      : context_(context),
        options_("megatron", context.options,
                 {"tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel",
                  "expert_tensor_parallel", "heads", "groups", "head_dim", "vocab_divisor", "block",
                  "layers", "first_stage_layers", "last_stage_layers", "account_embedding",
                  "account_loss", "virtual_pipeline", "stage_layers", "skip"}),
        grid_(sources::megatron::read_grid(options_, context.ranks)),
        slicer_(options_, grid_.tensor) {
    for (Rank rank = 0; rank < context_.ranks; ++rank) {
      ranks_.push_back(rank);
    }
  }

  sources::Sharding make() {
    tensors_ = sources::held_tensors(context_, options_);
    classify();
    check_fused();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      add(held(i));
    }
    return std::move(sharding_);
  }

 private:
  void classify() {
    LayerKinds kinds;
    for (const auto& tensor : tensors_) {
      kinds.add(tensor.name);
    }
    Index layers = 0;
    std::map<Index, std::set<Index>> experts;
    for (const auto& tensor : tensors_) {
      auto holding = sources::megatron::holding_of(tensor.name, kinds);
      if (!holding) {
        refuse_tensor(tensor,
                      "Megatron's layer kind for this name is not known, and shapes do not tell "
                      "it; list the tensor in option 'skip' if the trainer does not hold it");
      }
      if (holding->place == Place::layer) {
        layers = std::max(layers, checked_add(holding->layer, 1));
      }
      if (holding->expert) {
        experts[holding->layer].insert(*holding->expert);
      }
      if (is_stacked(holding->kind) && !tensor.shape.empty()) {
        require_experts(holding->layer, tensor.shape[0]);
        experts_[holding->layer] = tensor.shape[0];
      }
      has_head_ = has_head_ || tensor.name.ends_with("lm_head.weight");
      if (!holding->weight.empty()) {
        weights_.emplace(holding->weight, nullptr);
      }
      holdings_.push_back(std::move(*holding));
    }
    for (const auto& [layer, found] : experts) {
      const Index count = *found.rbegin() + 1;
      if (count != static_cast<Index>(found.size())) {
        throw Error(Errc::bad_argument, "layer " + std::to_string(layer) + " offers " +
                                            std::to_string(found.size()) +
                                            " experts, but the largest is " +
                                            std::to_string(count - 1) + "; experts count from 0");
      }
      require_experts(layer, count);
      experts_[layer] = count;
    }
    find_weights();
    const Index all = options_.number("layers", layers);
    if (all < layers) {
      options_.refuse("layers", "but a parameter is of layer " + std::to_string(layers - 1));
    }
    stages_ = sources::megatron::read_stages(options_, grid_, all);
  }

  void require_experts(Index layer, Index count) const {
    if (count % grid_.expert != 0) {
      throw Error(Errc::bad_argument,
                  "the " + std::to_string(count) + " experts of layer " + std::to_string(layer) +
                      " do not divide by expert_parallel=" + std::to_string(grid_.expert));
    }
  }

  /// Scales are cut where their weights are.
  void find_weights() {
    for (const TensorInfo& tensor : tensors_) {
      if (const auto found = weights_.find(tensor.name); found != weights_.end()) {
        found->second = &tensor;
      }
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const std::string& weight = holdings_[i].weight;
      if (!weight.empty() && weights_.at(weight) == nullptr) {
        refuse_tensor(tensors_[i], "the weight '" + weight + "' that it scales is not offered");
      }
    }
  }

  Held held(std::size_t i) const {
    const std::string& weight = holdings_[i].weight;
    return {tensors_[i], holdings_[i], weight.empty() ? nullptr : weights_.at(weight)};
  }

  /// Members of one fused parameter must all be there, of one type and width.
  void check_fused() const {
    std::map<std::string, std::map<Kind, const TensorInfo*>> fused;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      switch (holdings_[i].kind) {
        case Kind::query:
        case Kind::key:
        case Kind::value:
        case Kind::gate:
        case Kind::up:
          fused[holdings_[i].buffer][holdings_[i].kind] = &tensors_[i];
          break;
        default:
          break;
      }
    }
    for (const auto& [buffer, members] : fused) {
      const auto& [kind, first] = *members.begin();
      const bool halves = kind == Kind::gate || kind == Kind::up;
      if (members.size() != (halves ? 2 : 3)) {
        refuse_tensor(*first, "its siblings in '" + buffer + "' are missing; " +
                                  (halves ? "gate and up" : "q, k and v") + " go together");
      }
      for (const auto& [other_kind, other] : members) {
        const bool alike =
            halves ? other->shape == first->shape
                   : other->shape.size() == first->shape.size() && width(*other) == width(*first);
        if (!alike || other->dtype != first->dtype) {
          refuse_tensor(*other, "does not fit to its sibling '" + first->name + "' (" +
                                    sources::geometry_key(*first) + ") in '" + buffer + "'");
        }
      }
    }
  }

  static Index width(const TensorInfo& tensor) {
    return tensor.shape.size() == 2 ? tensor.shape[1] : 1;
  }

  /// Pipeline stages that hold it: one, or two for a tied embedding.
  std::vector<Index> stages_of(const Holding& holding) const {
    const Index last = grid_.pipeline - 1;
    switch (holding.place) {
      case Place::layer:
        return {stages_[static_cast<std::size_t>(holding.layer)]};
      case Place::last_stage:
        return {last};
      case Place::first_stage:
        break;
    }
    if (holding.kind == Kind::embedding && !has_head_ && last > 0) {
      return {0, last};
    }
    return {0};
  }

  void add(const Held& held) {
    const TensorInfo& tensor = held.tensor;
    const Holding& holding = held.holding;
    const bool stacked = is_stacked(holding.kind);
    const bool of_experts = stacked || holding.expert.has_value();
    const Index parts = of_experts ? grid_.expert_tensor : grid_.tensor;
    const char* const what = of_experts ? "expert_tensor_parallel" : "tensor_parallel";
    const std::vector<Index> stages = stages_of(holding);
    std::optional<Index> owner;
    if (holding.expert) {
      owner = *holding.expert / (experts_[holding.layer] / grid_.expert);
    }
    std::string key = sources::geometry_key(tensor) + " kind " +
                      std::to_string(static_cast<int>(holding.kind)) + " stages";
    for (const Index stage : stages) {
      key.append(" ").append(std::to_string(stage));
    }
    if (of_experts) {
      key.append(" expert rank ").append(owner ? std::to_string(*owner) : "any");
    }
    if (held.weight != nullptr) {
      key.append(" of ").append(sources::geometry_key(*held.weight));
    }
    auto layout = layouts_.get(key, [&] {
      slicer_.check(held, parts, what);
      std::vector<RankPiece> all;
      for (const Rank rank : ranks_) {
        if (!holds(rank, stages, owner)) {
          continue;
        }
        Part part{parts, of_experts ? grid_.expert_tensor_of(rank) : grid_.tensor_of(rank), {}};
        if (stacked) {
          const Index each = tensor.shape[0] / grid_.expert;
          part.experts = {grid_.expert_of(rank) * each, (grid_.expert_of(rank) + 1) * each};
        }
        for (const auto& piece : slicer_.pieces(held, part)) {
          all.push_back({rank, piece});
        }
      }
      return Layout::explicit_pieces(tensor.shape, tensor.dtype, ranks_, std::move(all));
    });
    if (holds(context_.rank, stages, owner)) {
      if (const Index elements = slicer_.storage_elements(held, parts)) {
        sharding_.storage_bytes[holding.buffer] =
            checked_mul_bytes(static_cast<std::uint64_t>(elements), bytes_of(tensor.dtype));
      }
    }
    sharding_.params.push_back(
        {tensor.name, tensor.dtype, tensor.shape, {std::move(layout), {holding.buffer}}});
  }

  static bool is_stacked(Kind kind) {
    return kind == Kind::stacked || kind == Kind::stacked_rows || kind == Kind::stacked_columns ||
           kind == Kind::stacked_conv_rows || kind == Kind::stacked_conv_columns;
  }

  bool holds(Rank rank, const std::vector<Index>& stages, std::optional<Index> owner) const {
    return std::find(stages.begin(), stages.end(), grid_.stage_of(rank)) != stages.end() &&
           (!owner || grid_.expert_of(rank) == *owner);
  }

  const SourceContext& context_;
  OptionReader options_;
  Grid grid_;
  sources::megatron::Slicer slicer_;
  std::vector<Rank> ranks_;
  Catalogue tensors_;
  std::vector<Holding> holdings_;                               ///< Beside tensors_.
  std::vector<Index> stages_;                                   ///< By global layer.
  std::map<Index, Index> experts_;                              ///< By global layer.
  std::unordered_map<std::string, const TensorInfo*> weights_;  ///< That have scales.
  bool has_head_ = false;
  sources::Layouts layouts_;
  sources::Sharding sharding_;
};

}  // namespace

void add_source_megatron(Registries& registries) {
  registries.sources.add("megatron",
                         "Megatron-LM: tensor, pipeline, expert and data parallel ranks",
                         [](const SourceContext& context) {
                           return std::make_unique<sources::ShardedSource>(
                               "megatron", context, MegatronSharding(context).make());
                         });
}

}  // namespace m2n
