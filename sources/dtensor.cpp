// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Source "dtensor": any mesh and placements, by name pattern.
///
///   mesh=2,4            extents; default: one axis over all trainer ranks
///   ranks=0,2,1,3,...   the mesh's ranks, row-major; default: 0, 1, 2, ...
///   default=Replicate,Shard(0)
///                       placements of parameters that no rule matches; default: all Replicate
///   rule.<pattern>=Shard(0),Replicate [; mesh=2,2 [; ranks=0,1,2,3]]
///                       placements of the parameters that the pattern matches, on a mesh of their
///                       own if one is given. Of several patterns that match, the longest decides;
///                       two that are equally long are refused.
///   skip=<pattern>,...  tensors that the trainer does not hold

#include <algorithm>
#include <optional>
#include <utility>

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sources/sharded_source.hpp"

namespace m2n {

namespace {

using sources::OptionReader;

struct Rule {
  std::string pattern;
  Mesh mesh;
  std::vector<std::string> placements;
  std::string key;  ///< Equal for rules that do the same.
};

Index product(const Dims& dims) { return element_count(dims); }

Mesh mesh_of(const OptionReader& options, const std::string& where,
             const std::vector<Index>& extents, const std::vector<Index>& listed, Rank ranks) {
  if (extents.size() > kMaxRank ||
      std::any_of(extents.begin(), extents.end(), [](Index extent) { return extent < 1; })) {
    options.refuse(where + " expects 1 to " + std::to_string(kMaxRank) +
                   " mesh extents of at least 1");
  }
  const Dims dims{std::span<const Index>(extents)};
  for (const Index rank : listed) {
    if (rank >= ranks) {
      options.refuse(where + " lists rank " + std::to_string(rank) + ", but there are " +
                     std::to_string(ranks) + " trainer ranks");
    }
  }
  const Index count = listed.empty() ? ranks : static_cast<Index>(listed.size());
  if (product(dims) != count && (!listed.empty() || product(dims) > count)) {
    options.refuse(where + " has a mesh of " + std::to_string(product(dims)) + " ranks for " +
                   std::to_string(count));
  }
  if (listed.empty()) {
    return {dims, Rank{0}};
  }
  std::vector<Rank> members;
  for (const Index rank : listed) {
    members.push_back(static_cast<Rank>(rank));
  }
  auto sorted = members;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    options.refuse(where + " lists a rank twice");
  }
  return {dims, std::move(members)};
}

Rule rule_of(const OptionReader& options, const std::string& where, std::string pattern,
             const std::string& text, const Mesh& default_mesh, Rank ranks) {
  const auto parts = sources::split(text, ';');
  std::optional<Mesh> mesh;
  if (parts.size() > 1) {
    // The parts behind the placements are options like those of the source.
    Options own;
    for (std::size_t i = 1; i < parts.size(); ++i) {
      const auto equals = parts[i].find('=');
      own[parts[i].substr(0, equals)] =
          equals == std::string::npos ? "" : parts[i].substr(equals + 1);
    }
    const OptionReader reader("dtensor', " + where + " of '" + pattern, own, {"mesh", "ranks"});
    if (!reader.has("mesh")) {
      reader.refuse("expected mesh=<extents> behind the placements");
    }
    mesh = mesh_of(options, where, reader.numbers("mesh", 1), reader.numbers("ranks"), ranks);
  }
  Rule rule{std::move(pattern), mesh.value_or(default_mesh),
            parts.empty() ? std::vector<std::string>{} : sources::split(parts[0], ','), text};
  if (rule.placements.size() != rule.mesh.dims().size()) {
    options.refuse(where + " has " + std::to_string(rule.placements.size()) +
                   " placements for a mesh of " + std::to_string(rule.mesh.dims().size()) +
                   " axes; expected one an axis");
  }
  for (const auto& placement : rule.placements) {
    try {
      (void)placement_from_string(placement, kMaxRank);
    } catch (const Error& error) {
      options.refuse(where + ": " + error.what());
    }
  }
  return rule;
}

sources::Sharding dtensor_sharding(const SourceContext& context) {
  const OptionReader options("dtensor", context.options, {"mesh", "ranks", "default", "skip"},
                             {"rule."});
  std::vector<Index> extents = options.numbers("mesh", 1);
  const auto listed = options.numbers("ranks");
  if (extents.empty()) {
    extents = {listed.empty() ? Index{context.ranks} : static_cast<Index>(listed.size())};
  }
  const Mesh mesh = mesh_of(options, "option 'mesh'", extents, listed, context.ranks);
  std::string everywhere;
  for (std::size_t axis = 0; axis < mesh.dims().size(); ++axis) {
    everywhere += axis == 0 ? "Replicate" : ",Replicate";
  }
  const Rule fallback = rule_of(options, "option 'default'", "*",
                                options.text("default", everywhere), mesh, context.ranks);
  std::vector<Rule> rules;
  std::vector<std::string> patterns;
  for (const auto& [pattern, text] : options.prefixed("rule.")) {
    rules.push_back(
        rule_of(options, "option 'rule." + pattern + "'", pattern, text, mesh, context.ranks));
    patterns.push_back(pattern);
  }
  const Catalogue tensors = sources::held_tensors(context, options);
  sources::require_matches(options, "rule.<pattern>", patterns, tensors);

  sources::Sharding sharding;
  sources::Layouts layouts;
  for (const auto& tensor : tensors) {
    const Rule* best = nullptr;
    const Rule* rival = nullptr;
    for (const auto& rule : rules) {
      if (!sources::glob_matches(rule.pattern, tensor.name)) {
        continue;
      }
      if (best == nullptr || rule.pattern.size() > best->pattern.size()) {
        best = &rule;
        rival = nullptr;
      } else if (rule.pattern.size() == best->pattern.size()) {
        rival = &rule;
      }
    }
    if (rival != nullptr) {
      options.refuse("parameter '" + tensor.name + "' matches 'rule." + best->pattern +
                     "' and 'rule." + rival->pattern + "', which are equally long");
    }
    const Rule& rule = best == nullptr ? fallback : *best;
    sources::naming(tensor.name, [&] {
      auto layout = layouts.get(sources::geometry_key(tensor) + " " + rule.key, [&] {
        std::vector<Placement> placements;
        for (const auto& placement : rule.placements) {
          placements.push_back(placement_from_string(placement, tensor.shape.size()));
        }
        return Layout::sharded(tensor.shape, tensor.dtype, rule.mesh, placements);
      });
      sharding.params.push_back(
          {tensor.name, tensor.dtype, tensor.shape, {std::move(layout), {tensor.name}}});
    });
  }
  return sharding;
}

}  // namespace

void add_source_dtensor(Registries& registries) {
  registries.sources.add("dtensor", "DTensors: any mesh and placements, by name pattern",
                         [](const SourceContext& context) {
                           return std::make_unique<sources::ShardedSource>(
                               "dtensor", context, dtensor_sharding(context));
                         });
}

}  // namespace m2n
