// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Source "ep": expert parallelism over FSDP2, as torchtitan arranges it. Dense parameters live on
/// the mesh ([replicas,] fsdp [, tensor_parallel]), experts on ([replicas,] efsdp, ep) over the
/// same ranks, both row-major, where efsdp * ep = fsdp * tensor_parallel.
///
///   expert_parallel=EP      default: all ranks of a replica
///   replicas=R              default 1
///   tensor_parallel=T       default 1
///   tensor_parallel_plan=<pattern>:column|row|replicate,...
///                           of dense parameters; the first match decides, no match is replicate
///   assignment=chunk|balanced|round_robin
///                           experts of an EP rank: ceil(E / EP) in a row, floor(E / EP) in a row
///                           and one more on the first ranks, or every EP-th; default chunk
///   buffers=<pattern>,...   tensors that FSDP leaves alone: whole on every rank of their layer or
///                           expert, as scalars must be
///   skip=<pattern>,...      tensors that the trainer does not hold
///
/// An expert is a tensor with "experts.<e>." in its name, or one row of dimension 0 of a tensor
/// with "experts." before something else. FSDP cuts a stacked tensor's experts, or its dimension 1
/// when there are more ranks than experts.

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sources/fsdp2.hpp"
#include "sources/sharded_source.hpp"

namespace m2n {

namespace {

using sources::OptionReader;

struct ExpertName {
  std::string module;          ///< Up to and including "experts".
  std::optional<Index> index;  ///< None: a stacked tensor.
  std::string rest;            ///< Behind module and index.
};

std::optional<ExpertName> expert_name(const std::string& name) {
  std::size_t at = name.starts_with("experts.") ? 0 : name.find(".experts.");
  if (at == std::string::npos) {
    return std::nullopt;
  }
  at = name.find("experts.", at) + std::string_view("experts").size();
  ExpertName expert{name.substr(0, at), std::nullopt, name.substr(at + 1)};
  Index index = 0;
  const char* const begin = expert.rest.data();
  const char* const last = begin + expert.rest.size();
  const auto [end, code] = std::from_chars(begin, last, index);
  if (code == std::errc() && end != last && *end == '.' && index >= 0) {
    expert.index = index;
    expert.rest.erase(0, static_cast<std::size_t>(end - begin) + 1);
  }
  return expert;
}

class EpSharding {
 public:
  explicit EpSharding(const SourceContext& context)
      : context_(context),
        options_("ep", context.options,
                 {"expert_parallel", "replicas", "tensor_parallel", "tensor_parallel_plan",
                  "assignment", "buffers", "skip"}) {}

  sources::Sharding make() {
    const Index ranks = context_.ranks;
    const Index replicas = options_.number("replicas", 1);
    if (ranks % replicas != 0) {
      options_.refuse("replicas",
                      "which does not divide the " + std::to_string(ranks) + " trainer ranks");
    }
    const Index each = ranks / replicas;
    const Index tensor = options_.number("tensor_parallel", 1);
    if (each % tensor != 0) {
      options_.refuse("tensor_parallel",
                      "which does not divide the " + std::to_string(each) + " ranks of a replica");
    }
    const Index experts = options_.number("expert_parallel", each);
    if (each % experts != 0) {
      options_.refuse("expert_parallel",
                      "which does not divide the " + std::to_string(each) + " ranks of a replica");
    }
    std::vector<Rank> all;
    for (Rank rank = 0; rank < context_.ranks; ++rank) {
      all.push_back(rank);
    }
    dense_ = {replicas, each / tensor, tensor, all};
    sparse_ = {replicas, each / experts, experts, all};
    assignment_ = options_.choice("assignment", {"chunk", "balanced", "round_robin"}, "chunk");
    plan_ = options_.rules("tensor_parallel_plan", {"column", "row", "replicate"});
    const Catalogue tensors = sources::held_tensors(context_, options_);
    std::vector<std::string> patterns;
    for (const auto& rule : plan_) {
      patterns.push_back(rule.pattern);
    }
    sources::require_matches(options_, "tensor_parallel_plan", patterns, tensors);
    buffers_ = options_.patterns("buffers");
    sources::require_matches(options_, "buffers", buffers_, tensors);
    count_experts(tensors);
    for (const auto& tensor_info : tensors) {
      add(tensor_info);
    }
    return std::move(sharding_);
  }

 private:
  /// The experts of each module that names them one by one must be 0 .. E - 1.
  void count_experts(const Catalogue& tensors) {
    std::map<std::string, std::map<std::string, std::vector<Index>>> indices;
    for (const auto& tensor : tensors) {
      const auto expert = expert_name(tensor.name);
      if (expert && expert->index) {
        indices[expert->module][expert->rest].push_back(*expert->index);
      }
    }
    for (auto& [module, parts] : indices) {
      for (auto& [rest, found] : parts) {
        std::sort(found.begin(), found.end());
        Index next = 0;
        for (const Index index : found) {
          if (index != next) {
            refuse_experts(module, std::to_string(next), rest,
                           "is missing: expert " + std::to_string(index) +
                               " is there, and experts count from 0");
          }
          ++next;
        }
        Index& count = experts_[module];
        if (count != 0 && count != next) {
          refuse_experts(module, "<expert>", rest,
                         "exists for " + std::to_string(next) + " experts, but its siblings for " +
                             std::to_string(count));
        }
        count = next;
      }
    }
  }

  [[noreturn]] static void refuse_experts(const std::string& module, const std::string& expert,
                                          const std::string& rest, const std::string& what) {
    std::string text = "parameter '";
    text.append(module).append(".").append(expert).append(".").append(rest).append("' ");
    throw Error(Errc::bad_argument, text.append(what));
  }

  /// EP rank of expert @p expert of @p count.
  Index owner(Index expert, Index count) const {
    if (assignment_ == "round_robin") {
      return expert % sparse_.inner;
    }
    if (assignment_ == "chunk") {
      return expert / ceil_div(count, sparse_.inner);
    }
    const Index small = count / sparse_.inner;
    const Index larger = count % sparse_.inner;  // ranks with one more
    return expert < larger * (small + 1) ? expert / (small + 1)
                                         : larger + (expert - larger * (small + 1)) / small;
  }

  void add(const TensorInfo& tensor) {
    ParamSpec param{tensor.name, tensor.dtype, tensor.shape, {}};
    const auto expert = expert_name(tensor.name);
    if (std::any_of(buffers_.begin(), buffers_.end(), [&](const std::string& pattern) {
          return glob_matches(pattern, tensor.name);
        })) {
      add_whole(std::move(param), tensor, expert);
      return;
    }
    if (!expert) {
      sources::Fsdp2Cut cut;
      const auto* rule = sources::first_match(plan_, tensor.name);
      if (dense_.inner > 1 && rule != nullptr && rule->word != "replicate") {
        if (rule->word == "column") {
          cut.inner_dim = 0;
        } else if (tensor.shape.size() != 1) {
          cut.inner_dim = 1;
        }
      }
      add_fsdp2(std::move(param), tensor, dense_, cut);
      return;
    }
    if (expert->index) {
      const Index ep = owner(*expert->index, experts_[expert->module]);
      sources::Fsdp2Mesh mesh{sparse_.replicas, sparse_.shards, 1, {}};
      for (Index i = 0; i < sparse_.replicas * sparse_.shards; ++i) {
        mesh.ranks.push_back(static_cast<Rank>(i * sparse_.inner + ep));
      }
      add_fsdp2(std::move(param), tensor, mesh, {});
      return;
    }
    if (tensor.shape.empty()) {
      sources::refuse_tensor(tensor, "a stacked tensor of experts needs dimension 0 for them");
    }
    const Index count = tensor.shape[0];
    const bool inside = checked_mul(sparse_.shards, sparse_.inner) > count && sparse_.shards > 1;
    if (assignment_ == "chunk") {
      add_fsdp2(std::move(param), tensor, sparse_, {0, inside ? 1 : 0});
    } else {
      add_stacked(std::move(param), tensor, inside ? 1 : 0);
    }
  }

  void add_fsdp2(ParamSpec param, const TensorInfo& tensor, const sources::Fsdp2Mesh& mesh,
                 const sources::Fsdp2Cut& cut) {
    param.side = {layouts_.get(sources::geometry_key(tensor) + sources::fsdp2_key(mesh, cut),
                               [&] { return sources::fsdp2_layout(tensor, mesh, cut); }),
                  {tensor.name}};
    if (const auto bytes = sources::fsdp2_storage_bytes(tensor, mesh, cut, context_.rank)) {
      sharding_.storage_bytes[tensor.name] = bytes;
    }
    sharding_.params.push_back(std::move(param));
  }

  void add_whole(ParamSpec param, const TensorInfo& tensor,
                 const std::optional<ExpertName>& expert) {
    std::vector<Rank> ranks = dense_.ranks;
    std::string key = sources::geometry_key(tensor) + " whole";
    if (expert && expert->index) {
      const Index ep = owner(*expert->index, experts_[expert->module]);
      std::erase_if(ranks, [&](Rank rank) { return rank % sparse_.inner != ep; });
      key.append(" on expert rank ").append(std::to_string(ep));
    }
    param.side = {
        layouts_.get(key,
                     [&] {
                       const Piece whole{Box::whole(tensor.shape), {0, 0, row_major(tensor.shape)}};
                       std::vector<RankPiece> pieces;
                       for (const Rank rank : ranks) {
                         pieces.push_back({rank, whole});
                       }
                       return Layout::explicit_pieces(tensor.shape, tensor.dtype, dense_.ranks,
                                                      std::move(pieces));
                     }),
        {tensor.name}};
    sharding_.params.push_back(std::move(param));
  }

  /// Assignments that no placement says: each EP rank's experts in slot order, then FSDP chunks of
  /// the slots or of dimension 1.
  void add_stacked(ParamSpec param, const TensorInfo& tensor, int shard_dim) {
    const Index count = tensor.shape[0];
    std::vector<std::vector<Index>> slots(static_cast<std::size_t>(sparse_.inner));
    for (Index expert = 0; expert < count; ++expert) {
      slots[static_cast<std::size_t>(owner(expert, count))].push_back(expert);
    }
    if (shard_dim == 1 && (tensor.shape.size() < 2 || tensor.shape[1] % sparse_.shards != 0)) {
      sources::refuse_tensor(tensor,
                             "there are more ranks than experts, so that FSDP2 cuts "
                             "dimension 1, which must be a multiple of " +
                                 std::to_string(sparse_.shards));
    }
    param.side = {layouts_.get(sources::geometry_key(tensor) + " stacked",
                               [&] { return stacked_layout(tensor, slots, shard_dim); }),
                  {tensor.name}};
    const auto own = static_cast<std::size_t>(context_.rank % sparse_.inner);
    Shape local = tensor.shape;
    local[0] = static_cast<Index>(slots[own].size());
    auto& extent = local[static_cast<std::size_t>(shard_dim)];
    extent = ceil_div(extent, sparse_.shards);
    sharding_.storage_bytes[tensor.name] =
        checked_mul_bytes(static_cast<std::uint64_t>(element_count(local)), bytes_of(tensor.dtype));
    sharding_.params.push_back(std::move(param));
  }

  Layout stacked_layout(const TensorInfo& tensor, const std::vector<std::vector<Index>>& slots,
                        int shard_dim) const {
    std::vector<RankPiece> pieces;
    for (const Rank rank : sparse_.ranks) {
      const auto& own = slots[static_cast<std::size_t>(rank % sparse_.inner)];
      const Index shard = rank / sparse_.inner % sparse_.shards;
      Interval range{0, static_cast<Index>(own.size())};
      Box box = Box::whole(tensor.shape);
      if (shard_dim == 0) {
        range = chunk(range.size(), sparse_.shards, shard);
      } else {
        const Interval part = chunk(tensor.shape[1], sparse_.shards, shard);
        box.lo[1] = part.begin;
        box.hi[1] = part.end;
      }
      Shape local = box.extents();
      local[0] = range.size();
      const Strides strides = row_major(local);
      for (Index slot = range.begin; slot < range.end;) {
        Index next = slot + 1;  // experts in a row are one piece
        while (next < range.end &&
               own[static_cast<std::size_t>(next)] == own[static_cast<std::size_t>(next - 1)] + 1) {
          ++next;
        }
        box.lo[0] = own[static_cast<std::size_t>(slot)];
        box.hi[0] = box.lo[0] + (next - slot);
        const auto offset = static_cast<std::uint64_t>(checked_mul(slot - range.begin, strides[0]));
        if (!box.empty()) {
          pieces.push_back(
              {rank, {box, {0, checked_mul_bytes(offset, bytes_of(tensor.dtype)), strides}}});
        }
        slot = next;
      }
    }
    return Layout::explicit_pieces(tensor.shape, tensor.dtype, sparse_.ranks, std::move(pieces));
  }

  const SourceContext& context_;
  OptionReader options_;
  sources::Fsdp2Mesh dense_;
  sources::Fsdp2Mesh sparse_;
  std::string assignment_;
  std::vector<sources::NameRule> plan_;
  std::map<std::string, Index> experts_;  ///< By module.
  sources::Layouts layouts_;
  std::vector<std::string> buffers_;
  sources::Sharding sharding_;
};

}  // namespace

void add_source_ep(Registries& registries) {
  registries.sources.add("ep", "expert parallelism over FSDP2, as torchtitan arranges it",
                         [](const SourceContext& context) {
                           return std::make_unique<sources::ShardedSource>(
                               "ep", context, EpSharding(context).make());
                         });
}

}  // namespace m2n
