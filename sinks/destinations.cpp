// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "sinks/destinations.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/api/patterns.hpp"
#include "core/error.hpp"
#include "core/tensor/cast.hpp"
#include "sinks/fail.hpp"

namespace m2n::sinks {
namespace {

bool cast_or_fail(const std::string& name, DType from, DType to, bool may_cast) {
  if (from == to) {
    return false;
  }
  const std::string both = "tensor '" + name + "' is " + std::string(to_string(from)) +
                           " at the trainers and " + std::string(to_string(to)) + " at the workers";
  if (!can_cast(from, to)) {
    fail(both + ", between which there is no cast; keep one dtype");
  }
  if (!may_cast) {
    fail(both + "; keep one dtype, or allow the cast with cast=nearest_even");
  }
  return true;
}

/// A model, and the workers that keep it.
struct Keepers {
  const WorkerModel* model = nullptr;
  std::vector<Rank> ranks;
  std::vector<std::uint32_t> tensors;  ///< Number of each section's tensor, in order.
};

std::vector<Keepers> keepers_of(const WorkerModels& models, Rank first_worker) {
  std::vector<Keepers> all;
  std::unordered_map<const WorkerModel*, std::size_t> numbers;
  for (std::size_t w = 0; w < models.size(); ++w) {
    const auto [number, fresh] = numbers.emplace(models[w].get(), all.size());
    if (fresh) {
      all.push_back({models[w].get(), {}, {}});
    }
    all[number->second].ranks.push_back(first_worker + static_cast<Rank>(w));
  }
  return all;
}

/// Of a tensor, in the parameter of every worker that keeps a model.
struct KeptPiece {
  const Keepers* keepers;
  Piece piece;
};

/// What the workers do with one tensor.
struct Gathered {
  std::vector<KeptPiece> pieces;
  std::vector<std::string> parameters;  ///< By slot.
  DType dtype = DType::f32;
  bool may_cast = false;
  std::string not_strict;  ///< Why strict would fall back; empty when it would not.
  std::string not_direct;  ///< Why any route would.
  std::string rewritten;   ///< What the workers do to it afterwards; empty for nothing.
};

/// Worker by worker.
std::vector<RankPiece> by_rank(const std::vector<KeptPiece>& kept) {
  std::vector<RankPiece> pieces;
  for (const KeptPiece& one : kept) {
    for (const Rank rank : one.keepers->ranks) {
      pieces.push_back({rank, one.piece});
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const RankPiece& a, const RankPiece& b) { return a.rank < b.rank; });
  return pieces;
}

/// Tensors that must go the same way.
class Groups {
 public:
  explicit Groups(std::size_t count) : parent_(count) {
    std::iota(parent_.begin(), parent_.end(), std::size_t{0});
  }
  std::size_t find(std::size_t i) {
    while (parent_[i] != i) {
      parent_[i] = parent_[parent_[i]];
      i = parent_[i];
    }
    return i;
  }
  void unite(std::size_t a, std::size_t b) { parent_[find(a)] = find(b); }

 private:
  std::vector<std::size_t> parent_;
};

std::string_view module_of(std::string_view parameter) {
  return parameter.substr(0, std::min(parameter.rfind('.'), parameter.size()));
}

/// A tensor without elements has nothing to load: it is in place whatever the route.
bool moves(const ParamSpec& param) { return element_count(param.shape) > 0; }

/// The whole tensor on each of @p holders, who are among @p ranks.
Side full_side(const ParamSpec& param, const std::vector<Rank>& ranks,
               const std::vector<Rank>& holders, LayoutTable& table) {
  const Piece whole{Box::whole(param.shape), {0, 0, row_major(param.shape)}};
  std::vector<RankPiece> pieces;
  for (const Rank rank : holders) {
    pieces.push_back({rank, whole});
  }
  return {table.intern(Layout::explicit_pieces(param.shape, param.dtype, ranks, std::move(pieces))),
          {"full:" + param.name}};
}

/// Why the reference engine would not write @p parameter in place; empty when it would.
std::string not_strict(const WorkerModel& model, const WorkerParameter& parameter,
                       const ParamSpec& param, DType dtype, bool padded) {
  const std::size_t rank = param.shape.size();
  if (!model.not_plain.empty()) {
    return model.not_plain;
  }
  if (parameter.sections.size() != 1) {
    return "it shares parameter '" + parameter.name + "'";
  }
  if (padded) {
    return "parameter '" + parameter.name + "' is padded";
  }
  if (parameter.name != param.name) {
    return "it lies in parameter '" + parameter.name + "' of another name";
  }
  if (param.dtype != dtype) {
    return "parameter '" + parameter.name + "' has another dtype";
  }
  if (!parameter.plain) {
    return "parameter '" + parameter.name + "' has a loader of its own";
  }
  if (rank < 1 || rank > 3) {
    return "it has " + std::to_string(rank) + " dimensions, and 1 to 3 go in place";
  }
  return "";
}

/// Why nobody but a loader may write @p parameter; empty when anybody may.
std::string not_direct(const WorkerParameter& parameter) {
  if (parameter.kernel_form.empty()) {
    return parameter.loader_only;
  }
  if (!parameter.to_kernel_form) {
    fail("parameter '" + parameter.name + "' lives in the form '" + parameter.kernel_form +
         "', and nothing says how to make it; it needs a transform, or its plain form");
  }
  return "parameter '" + parameter.name + "' lives in the form '" + parameter.kernel_form + "'";
}

/// All workers must follow one expert map, and refresh what they derive.
void require_consistent(const std::vector<Keepers>& all) {
  for (const Keepers& keepers : all) {
    const WorkerModel& model = *keepers.model;
    if (model.arrangement != all.front().model->arrangement) {
      fail("workers follow expert maps of versions " +
           std::to_string(all.front().model->arrangement) + " and " +
           std::to_string(model.arrangement) + "; all must follow one");
    }
    for (const DerivedTensor& derived : model.derived) {
      if (!derived.refresh) {
        fail("tensor '" + derived.name + "' is derived from '" +
             (derived.inputs.empty() ? std::string() : derived.inputs.front()) +
             "', and nothing says how; without a refresh it would be stale after an update");
      }
    }
  }
}

/// Both sides of a misfit: what is needed and not sent, what is sent and not known. Numbers the
/// tensors of every section.
/// @return which tensors have a place.
std::vector<bool> require_fit(std::vector<Keepers>& all, std::span<const ParamSpec> params) {
  std::unordered_map<std::string_view, std::uint32_t> numbers(params.size());
  for (const ParamSpec& param : params) {
    if (!numbers.emplace(param.name, static_cast<std::uint32_t>(numbers.size())).second) {
      fail("tensor '" + param.name + "' is sent twice");
    }
  }
  std::vector<bool> placed(params.size(), false);
  std::vector<bool> known(params.size(), false);
  std::vector<std::string> missing;
  std::unordered_set<std::string_view> missed;
  for (Keepers& keepers : all) {
    for (const std::string& name : keepers.model->ignored) {
      if (const auto found = numbers.find(name); found != numbers.end()) {
        known[found->second] = true;
      }
    }
    for (const WorkerParameter& parameter : keepers.model->parameters) {
      for (const Section& section : parameter.sections) {
        if (const auto found = numbers.find(section.tensor); found != numbers.end()) {
          placed[found->second] = true;
          keepers.tensors.push_back(found->second);
        } else if (missed.insert(section.tensor).second) {
          missing.push_back(section.tensor);
        }
      }
    }
  }
  std::vector<std::string> unknown;
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!placed[i] && !known[i]) {
      unknown.push_back(params[i].name);
    }
  }
  if (!missing.empty() || !unknown.empty()) {
    fail("the workers' parameters do not fit what is sent: they need " +
         (missing.empty() ? std::string("nothing else") : list_of(missing) + " as well") +
         ", and have " +
         (unknown.empty() ? std::string("a place for everything")
                          : "no place for " + list_of(unknown)));
  }
  return placed;
}

/// What all workers do with each tensor, and which tensors go together.
class Gathering {
 public:
  Gathering(const std::vector<Keepers>& all, std::span<const ParamSpec> params,
            const DtypePolicy& dtypes)
      : tensors(params.size()),
        modules(params.size()),
        shared(params.size()),
        params_(params),
        dtypes_(dtypes) {
    for (const Keepers& keepers : all) {
      for (const WorkerParameter& parameter : keepers.model->parameters) {
        if (!parameter.padding.empty()) {
          padded_.insert(parameter.name);
        }
      }
    }
    for (const Keepers& keepers : all) {
      gather(keepers);
    }
  }

  std::vector<Gathered> tensors;
  Groups modules;
  Groups shared;  ///< Tensors that a loader needs at the same time.

 private:
  void gather(const Keepers& keepers) {
    std::unordered_map<std::string_view, std::string_view> rewritten;
    for (const Rewrite& rewrite : keepers.model->rewrites) {
      for (const std::string& name : rewrite.parameters) {
        rewritten.emplace(name, rewrite.change);
      }
    }
    std::size_t at = 0;
    for (const WorkerParameter& parameter : keepers.model->parameters) {
      if (parameter.sections.empty()) {
        continue;
      }
      const auto change = rewritten.find(parameter.name);
      const Target target{parameter,
                          keepers,
                          dtypes_.of(parameter),
                          dtypes_.may_cast(parameter.name),
                          not_direct(parameter),
                          change == rewritten.end() ? "" : change->second};
      const std::uint32_t first = keepers.tensors[at];
      const auto module = module_tensor_.emplace(module_of(parameter.name), first).first->second;
      for (const Section& section : parameter.sections) {
        const std::uint32_t number = keepers.tensors[at++];
        shared.unite(number, first);
        modules.unite(number, module);
        add(section, number, target);
      }
    }
  }

  struct Target {
    const WorkerParameter& parameter;
    const Keepers& keepers;
    DType dtype;
    bool may_cast;
    std::string not_direct;
    std::string_view rewritten;
  };

  void add(const Section& section, std::uint32_t number, const Target& target) {
    const WorkerParameter& parameter = target.parameter;
    Gathered& tensor = tensors[number];
    if (tensor.parameters.empty()) {
      tensor.dtype = target.dtype;
    } else if (tensor.dtype != target.dtype) {
      fail("tensor '" + section.tensor + "' feeds parameter '" + tensor.parameters.front() +
           "' as " + std::string(to_string(tensor.dtype)) + " and '" + parameter.name + "' as " +
           std::string(to_string(target.dtype)) + "; one dtype would do");
    }
    auto slot = std::find(tensor.parameters.begin(), tensor.parameters.end(), parameter.name);
    if (slot == tensor.parameters.end()) {
      slot = tensor.parameters.insert(slot, parameter.name);
    }
    tensor.may_cast = target.may_cast;
    if (tensor.rewritten.empty()) {
      tensor.rewritten = target.rewritten;
    }
    if (tensor.not_strict.empty()) {
      tensor.not_strict = tensor.parameters.size() > 1
                              ? "it lies in several parameters"
                              : not_strict(*target.keepers.model, parameter, params_[number],
                                           target.dtype, padded_.contains(parameter.name));
    }
    if (!target.not_direct.empty()) {
      tensor.not_direct = target.not_direct;
    }
    if (!section.box.empty()) {
      tensor.pieces.push_back(
          {&target.keepers,
           {section.box,
            {static_cast<std::uint32_t>(slot - tensor.parameters.begin()),
             checked_mul_bytes(static_cast<std::uint64_t>(section.offset), bytes_of(target.dtype)),
             section.strides}}});
    }
  }

  std::span<const ParamSpec> params_;
  const DtypePolicy& dtypes_;
  std::unordered_set<std::string_view> padded_;
  std::unordered_map<std::string_view, std::uint32_t> module_tensor_;
};

}  // namespace

std::vector<ParamSpec> arriving(std::span<const ParamSpec> params,
                                const std::vector<Resolution>* declared) {
  std::vector<ParamSpec> out(params.begin(), params.end());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool wanted = declared == nullptr || i >= declared->size() ||
                        (*declared)[i].side.layout->dtype() == DType::f8_e4m3;
    if (out[i].quantise && wanted) {
      out[i].dtype = DType::f8_e4m3;
    }
  }
  return out;
}

Destinations destinations_of_models(const WorkerModels& models, Rank first_worker,
                                    std::span<const ParamSpec> params, const DtypePolicy& dtypes,
                                    Route route) {
  std::vector<Keepers> all = keepers_of(models, first_worker);
  require_consistent(all);
  const std::vector<bool> placed = require_fit(all, params);
  Catalogue sent;
  for (const ParamSpec& param : params) {
    sent.push_back({param.name, param.dtype, param.shape});
  }
  check_worker_models(models, sent);
  Gathering gathering(all, params, dtypes);
  std::vector<Gathered>& gathered = gathering.tensors;
  std::vector<Rank> ranks(models.size());
  std::iota(ranks.begin(), ranks.end(), first_worker);

  // A module goes one way as a whole: one tensor that falls back takes its neighbours along.
  std::unordered_map<std::size_t, std::size_t> falls_back;  // group -> the tensor that decides
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!gathered[i].not_direct.empty() ||
        (route == Route::strict && !gathered[i].not_strict.empty())) {
      falls_back.emplace(gathering.modules.find(i), i);
    }
  }

  Destinations result;
  LayoutTable table;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const ParamSpec& param = params[i];
    Gathered& tensor = gathered[i];
    Resolution resolution;
    if (!placed[i]) {
      const Side nowhere = {
          table.intern(Layout::explicit_pieces(param.shape, param.dtype, ranks, {})),
          {"unused:" + param.name}};
      // The reference knows no such parameter, and sends the tensor whole for its loader to drop.
      const bool dropped = route == Route::strict && moves(param);
      resolution.mode = dropped ? Mode::fallback : Mode::direct;
      resolution.side = dropped ? full_side(param, ranks, ranks, table) : nowhere;
      resolution.reason =
          dropped ? "no worker needs it, and the loader drops it" : "no worker needs it";
      result.places.push_back(nowhere);
      result.resolutions.push_back(std::move(resolution));
      continue;
    }
    const bool cast = cast_or_fail(param.name, param.dtype, tensor.dtype, tensor.may_cast);
    const bool in_one_parameter = tensor.parameters.size() == 1;
    std::vector<Rank> holders;
    std::vector<RankPiece> pieces = by_rank(tensor.pieces);
    for (const RankPiece& held : pieces) {
      if (holders.empty() || holders.back() != held.rank) {
        holders.push_back(held.rank);
      }
    }
    result.places.push_back(
        {table.intern(Layout::explicit_pieces(param.shape, tensor.dtype, ranks, std::move(pieces))),
         std::move(tensor.parameters)});
    resolution.rewritten = !tensor.rewritten.empty();
    const auto decider = falls_back.find(gathering.modules.find(i));
    if (moves(param) && (route == Route::fallback || decider != falls_back.end())) {
      resolution.mode = Mode::fallback;
      // As the reference does, every worker gets it; where we decide, those that need it.
      resolution.side = full_side(param, ranks, route == Route::fused ? holders : ranks, table);
      resolution.together = "with " + params[gathering.shared.find(i)].name;
      if (route == Route::fallback) {
        resolution.reason = "this sink loads everything";
      } else if (!tensor.not_direct.empty()) {
        resolution.reason = tensor.not_direct;
      } else if (route == Route::strict && !tensor.not_strict.empty()) {
        resolution.reason = tensor.not_strict;
      } else {
        resolution.reason =
            "its module has '" + params[decider->second].name + "', which falls back";
      }
    } else {
      resolution.side = result.places.back();
      resolution.cast = cast;
      resolution.reason =
          in_one_parameter
              ? "straight into parameter '" + resolution.side.buffers[0] + "'"
              : "straight into " + std::to_string(resolution.side.buffers.size()) + " parameters";
    }
    if (!tensor.rewritten.empty()) {
      resolution.reason += ", and then " + tensor.rewritten;
    }
    result.resolutions.push_back(std::move(resolution));
  }
  return result;
}

Destinations destinations_of_declared(const std::vector<Resolution>& declared,
                                      std::span<const ParamSpec> params, const DtypePolicy& dtypes,
                                      Route route) {
  if (declared.size() != params.size()) {
    fail(std::to_string(params.size()) + " tensors are sent, and destinations are declared for " +
         std::to_string(declared.size()) + "; there must be one each");
  }
  Destinations result;
  LayoutTable table;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const ParamSpec& param = params[i];
    Resolution resolution = declared[i];
    const Layout& layout = *resolution.side.layout;
    if (layout.shape() != param.shape) {
      fail("tensor '" + param.name + "' has shape " + to_string(param.shape) +
           ", and its declared destination " + to_string(layout.shape()));
    }
    resolution.cast =
        cast_or_fail(param.name, param.dtype, layout.dtype(), resolution.cast || dtypes.cast);
    result.places.push_back(resolution.side);
    if (route == Route::fallback && moves(param)) {
      resolution = {Mode::fallback, full_side(param, layout.ranks(), layout.ranks(), table), false,
                    "this sink loads everything"};
    } else {
      resolution.mode = Mode::direct;
      resolution.reason = "as declared";
    }
    result.resolutions.push_back(std::move(resolution));
  }
  return result;
}

}  // namespace m2n::sinks
