// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Source "megatron": Megatron-LM's tensor, pipeline, expert and data parallel ranks, offering
/// Hugging Face names (Llama, Qwen, Mixtral and DeepSeek decoders, GPT-2). A name that is not known
/// is refused: how a tensor is cut follows from its layer kind, never from its shape.
///
///   tensor_parallel, pipeline_parallel, context_parallel, expert_parallel   default 1
///   expert_tensor_parallel   default: tensor_parallel
///   heads, groups, head_dim  attention heads, key/value heads (default: heads) and their size; for
///                            models with linear_qkv
///   vocab_divisor            embedding and head are padded to a multiple of this times
///                            tensor_parallel; default 128
///   layers                   of the whole model; default: one more than the largest in a name
///   first_stage_layers, last_stage_layers     uneven ends; the stages between share evenly
///   account_embedding, account_loss=true      count them as layers of the first and last stage
///   virtual_pipeline         interleaved chunks a stage
///   stage_layers=7,8,...     layers of each stage, or of run k, which is of stage k mod stages
///   skip=<pattern>,...       tensors that the trainer does not hold
///
/// The ranks of a stage share its layers; data and context parallel ranks hold the same. Buffers
/// are named like the checkpoint's, with global layer and expert numbers; q, k and v lie in
/// `...linear_qkv`, gate and up in `...linear_fc1`. An embedding without a head is tied: the last
/// stage has a copy.

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sources/megatron/grid.hpp"
#include "sources/megatron/names.hpp"
#include "sources/sharded_source.hpp"

namespace m2n {

namespace {

using sources::OptionReader;
using sources::refuse_tensor;
using sources::megatron::Grid;
using sources::megatron::Holding;
using sources::megatron::Kind;
using sources::megatron::Place;

/// A run of rows of a fused parameter, and the rows of one member that it holds.
struct Run {
  Index fused = 0;
  Index member = 0;
  Index rows = 0;
};

struct Attention {
  Index heads = 0;
  Index groups = 0;
  Index head_dim = 0;

  Index rows() const { return checked_mul(heads + 2 * groups, head_dim); }

  /// For each group: its query heads, its key, its value.
  std::vector<Run> runs(Kind member, Index member_begin) const {
    const Index queries = heads / groups * head_dim;
    const Index stride = queries + 2 * head_dim;
    const Index length = member == Kind::query ? queries : head_dim;
    const Index skip = member == Kind::query ? 0
                       : member == Kind::key ? queries
                                             : queries + head_dim;
    std::vector<Run> runs;
    for (Index group = 0; group < groups; ++group) {
      runs.push_back({group * stride + skip, member_begin + group * length, length});
    }
    return runs;
  }
};

Interval even(Index extent, Index parts, Index part) {
  return {extent / parts * part, extent / parts * (part + 1)};
}

class MegatronSharding {
 public:
  explicit MegatronSharding(const SourceContext& context)
      : context_(context),
        options_("megatron", context.options,
                 {"tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel",
                  "expert_tensor_parallel", "heads", "groups", "head_dim", "vocab_divisor",
                  "layers", "first_stage_layers", "last_stage_layers", "account_embedding",
                  "account_loss", "virtual_pipeline", "stage_layers", "skip"}),
        grid_(sources::megatron::read_grid(options_, context.ranks)),
        vocab_divisor_(options_.number("vocab_divisor", 128)) {
    for (Rank rank = 0; rank < context_.ranks; ++rank) {
      ranks_.push_back(rank);
    }
  }

  sources::Sharding make() {
    tensors_ = sources::held_tensors(context_, options_);
    read_attention();
    classify();
    check_fused();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      add(tensors_[i], holdings_[i]);
    }
    return std::move(sharding_);
  }

 private:
  void read_attention() {
    if (options_.has("heads") != options_.has("head_dim") ||
        (options_.has("groups") && !options_.has("heads"))) {
      options_.refuse("give heads and head_dim together (and groups with them)");
    }
    if (!options_.has("heads")) {
      return;
    }
    Attention attention;
    attention.heads = options_.number("heads", 1);
    attention.groups = options_.number("groups", attention.heads);
    attention.head_dim = options_.number("head_dim", 1);
    if (attention.heads % attention.groups != 0) {
      options_.refuse("groups",
                      "which does not divide the " + std::to_string(attention.heads) + " heads");
    }
    (void)attention.rows();  // overflow shows here
    attention_ = attention;
  }

  void classify() {
    std::unordered_set<std::string> mla;
    for (const auto& tensor : tensors_) {
      if (auto prefix = sources::megatron::mla_prefix(tensor.name)) {
        mla.insert(std::move(*prefix));
      }
    }
    Index layers = 0;
    std::map<Index, std::set<Index>> experts;
    for (const auto& tensor : tensors_) {
      auto holding = sources::megatron::holding_of(tensor.name, mla);
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
      has_head_ = has_head_ || holding->kind == Kind::head;
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
      if (count % grid_.expert != 0) {
        throw Error(Errc::bad_argument,
                    "the " + std::to_string(count) + " experts of layer " + std::to_string(layer) +
                        " do not divide by expert_parallel=" + std::to_string(grid_.expert));
      }
      experts_[layer] = count;
    }
    const Index all = options_.number("layers", layers);
    if (all < layers) {
      options_.refuse("layers", "but a parameter is of layer " + std::to_string(layers - 1));
    }
    stages_ = sources::megatron::read_stages(options_, grid_, all);
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

  static void require_divides(const TensorInfo& tensor, std::size_t d, Index parts,
                              const char* what) {
    if (tensor.shape[d] % parts != 0) {
      refuse_tensor(tensor, "dimension " + std::to_string(d) + " does not divide by " + what + "=" +
                                std::to_string(parts));
    }
  }

  static void require_rank(const TensorInfo& tensor, std::size_t least, std::size_t most) {
    if (tensor.shape.size() < least || tensor.shape.size() > most) {
      refuse_tensor(tensor, "expected " + std::to_string(least) +
                                (least == most ? "" : " or " + std::to_string(most)) +
                                (most == 1 ? " dimension" : " dimensions") +
                                " for this layer kind");
    }
  }

  /// The attention that @p tensor's rows (@p d) must agree with.
  const Attention& attention_for(const TensorInfo& tensor, Kind kind, std::size_t d,
                                 Index parts) const {
    if (!attention_) {
      options_.refuse("parameter '" + tensor.name +
                      "' lies in linear_qkv, which needs options heads, groups and head_dim");
    }
    const Attention& attention = *attention_;
    if (attention.heads % parts != 0 ||
        (attention.groups % parts != 0 && parts % attention.groups != 0) ||
        attention.rows() % parts != 0) {
      refuse_tensor(
          tensor,
          std::to_string(attention.heads) + " heads in " + std::to_string(attention.groups) +
              " groups, " + std::to_string(attention.rows()) +
              " rows of linear_qkv, do not divide by tensor_parallel=" + std::to_string(parts));
    }
    const Index rows = kind == Kind::conv_qkv ? attention.rows()
                       : kind == Kind::query  ? attention.heads * attention.head_dim
                                              : attention.groups * attention.head_dim;
    if (tensor.shape[d] != rows) {
      refuse_tensor(tensor, "heads=" + std::to_string(attention.heads) +
                                ", groups=" + std::to_string(attention.groups) + " and head_dim=" +
                                std::to_string(attention.head_dim) + " ask for " +
                                std::to_string(rows) + " in dimension " + std::to_string(d));
    }
    return attention;
  }

  Index padded_vocabulary(Index rows) const {
    const Index multiple = checked_mul(vocab_divisor_, grid_.tensor);
    return checked_mul(ceil_div(rows, multiple), multiple);
  }

  /// What part @p part of @p parts holds. Called for valid shapes only; see check().
  std::vector<Piece> pieces(const TensorInfo& tensor, Kind kind, Index parts, Index part) const {
    const std::uint64_t item = bytes_of(tensor.dtype);
    const Shape& shape = tensor.shape;
    std::vector<Piece> out;
    const auto add = [&](const Box& box, Index offset, const Strides& strides) {
      if (!box.empty()) {
        out.push_back(
            {box, {0, checked_mul_bytes(static_cast<std::uint64_t>(offset), item), strides}});
      }
    };
    const auto slice = [&](std::size_t d, Interval range) {
      Box box = Box::whole(shape);
      box.lo[d] = range.begin;
      box.hi[d] = range.end;
      return box;
    };
    const bool transposed = shape.size() == 2;  // for the conv_ kinds: weights, not biases
    switch (kind) {
      case Kind::replicated:
        add(Box::whole(shape), 0, row_major(shape));
        break;
      case Kind::column: {
        const Box box = slice(0, even(shape[0], parts, part));
        add(box, 0, row_major(box.extents()));
        break;
      }
      case Kind::row: {
        const Box box = slice(1, even(shape[1], parts, part));
        add(box, 0, row_major(box.extents()));
        break;
      }
      case Kind::gate:
      case Kind::up: {
        const Box box = slice(0, even(shape[0], parts, part));
        add(box, kind == Kind::gate ? 0 : box.volume(), row_major(box.extents()));
        break;
      }
      case Kind::embedding:
      case Kind::head: {
        const Box box = slice(
            0, intersect(even(padded_vocabulary(shape[0]), parts, part), Interval{0, shape[0]}));
        add(box, 0, row_major(box.extents()));
        break;
      }
      case Kind::query:
      case Kind::key:
      case Kind::value:
        for (const auto& [begin, range] : own_rows(*attention_, kind, 0, parts, part)) {
          const Box box = slice(0, range);
          add(box, begin * width(tensor), row_major(box.extents()));
        }
        break;
      case Kind::conv_column: {
        const std::size_t d = transposed ? 1 : 0;
        add(slice(d, even(shape[d], parts, part)), 0,
            transposed ? Strides{1, shape[0]} : Strides{1});
        break;
      }
      case Kind::conv_row:
        add(slice(0, even(shape[0], parts, part)), 0, Strides{1, shape[0] / parts});
        break;
      case Kind::conv_qkv: {
        const std::size_t d = transposed ? 1 : 0;
        const Index row = transposed ? shape[0] : 1;
        const Index queries = attention_->heads * attention_->head_dim;
        const Index keys = attention_->groups * attention_->head_dim;
        const std::pair<Kind, Index> members[] = {
            {Kind::query, 0}, {Kind::key, queries}, {Kind::value, queries + keys}};
        for (const auto& [member, first] : members) {
          for (const auto& [begin, range] : own_rows(*attention_, member, first, parts, part)) {
            add(slice(d, range), begin * row, transposed ? Strides{1, row} : Strides{1});
          }
        }
        break;
      }
    }
    return out;
  }

  /// Rows of a member of linear_qkv on one rank: local row of the fused parameter, member's rows.
  static std::vector<std::pair<Index, Interval>> own_rows(const Attention& attention, Kind member,
                                                          Index member_begin, Index parts,
                                                          Index part) {
    const Interval own = even(attention.rows(), parts, part);
    std::vector<std::pair<Index, Interval>> rows;
    for (const auto& run : attention.runs(member, member_begin)) {
      const Interval common = intersect(own, {run.fused, run.fused + run.rows});
      if (!common.empty()) {
        const Index shift = run.member - run.fused;
        rows.push_back({common.begin - own.begin, {common.begin + shift, common.end + shift}});
      }
    }
    return rows;
  }

  /// Refuses shapes that the kind does not fit or that do not divide.
  void check(const TensorInfo& tensor, Kind kind, Index parts, const char* what) const {
    switch (kind) {
      case Kind::replicated:
        break;
      case Kind::column:
      case Kind::gate:
      case Kind::up:
        require_rank(tensor, 1, 2);
        require_divides(tensor, 0, parts, what);
        break;
      case Kind::row:
        require_rank(tensor, 2, 2);
        require_divides(tensor, 1, parts, what);
        break;
      case Kind::embedding:
      case Kind::head:
        require_rank(tensor, 2, 2);
        break;
      case Kind::query:
      case Kind::key:
      case Kind::value:
        require_rank(tensor, 1, 2);
        (void)attention_for(tensor, kind, 0, parts);
        break;
      case Kind::conv_column:
        require_rank(tensor, 1, 2);
        require_divides(tensor, tensor.shape.size() - 1, parts, what);
        break;
      case Kind::conv_row:
        require_rank(tensor, 2, 2);
        require_divides(tensor, 0, parts, what);
        break;
      case Kind::conv_qkv:
        require_rank(tensor, 1, 2);
        (void)attention_for(tensor, kind, tensor.shape.size() - 1, parts);
        break;
    }
  }

  /// Elements of the local parameter, where it holds more than this tensor; else 0.
  Index storage_elements(const TensorInfo& tensor, Kind kind, Index parts) const {
    switch (kind) {
      case Kind::gate:
      case Kind::up:
        return checked_mul(2 * (tensor.shape[0] / parts), width(tensor));
      case Kind::embedding:
      case Kind::head:
        return checked_mul(padded_vocabulary(tensor.shape[0]) / parts, width(tensor));
      case Kind::query:
      case Kind::key:
      case Kind::value:
        return checked_mul(attention_->rows() / parts, width(tensor));
      default:
        return 0;
    }
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

  void add(const TensorInfo& tensor, const Holding& holding) {
    const Index parts = holding.expert ? grid_.expert_tensor : grid_.tensor;
    const char* const what = holding.expert ? "expert_tensor_parallel" : "tensor_parallel";
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
    if (owner) {
      key.append(" expert rank ").append(std::to_string(*owner));
    }
    auto layout = layouts_.get(key, [&] {
      check(tensor, holding.kind, parts, what);
      std::vector<RankPiece> all;
      for (const Rank rank : ranks_) {
        if (!holds(rank, stages, owner)) {
          continue;
        }
        const Index part = owner ? grid_.expert_tensor_of(rank) : grid_.tensor_of(rank);
        for (const auto& piece : pieces(tensor, holding.kind, parts, part)) {
          all.push_back({rank, piece});
        }
      }
      return Layout::explicit_pieces(tensor.shape, tensor.dtype, ranks_, std::move(all));
    });
    if (holds(context_.rank, stages, owner)) {
      if (const Index elements = storage_elements(tensor, holding.kind, parts)) {
        sharding_.storage_bytes[holding.buffer] =
            checked_mul_bytes(static_cast<std::uint64_t>(elements), bytes_of(tensor.dtype));
      }
    }
    sharding_.params.push_back(
        {tensor.name, tensor.dtype, tensor.shape, {std::move(layout), {holding.buffer}}});
  }

  bool holds(Rank rank, const std::vector<Index>& stages, std::optional<Index> owner) const {
    return std::find(stages.begin(), stages.end(), grid_.stage_of(rank)) != stages.end() &&
           (!owner || grid_.expert_of(rank) == *owner);
  }

  const SourceContext& context_;
  OptionReader options_;
  Grid grid_;
  Index vocab_divisor_;
  std::vector<Rank> ranks_;
  Catalogue tensors_;
  std::vector<Holding> holdings_;       ///< Beside tensors_.
  std::optional<Attention> attention_;  ///< When heads is given.
  std::vector<Index> stages_;           ///< By global layer.
  std::map<Index, Index> experts_;      ///< By global layer.
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
