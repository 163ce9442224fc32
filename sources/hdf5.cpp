// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Source "hdf5": the trainers of a dump, with the layouts and the shards that they had. No
/// options; values come from the dump, too:
///
///   [source]
///   kind = hdf5
///   ranks = 4            as many as the dump's trainers, at least
///   values = hdf5
///   path = run.h5
///   [values]
///   side = source        or destination: the same elements, read from the workers' shards

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sources/sharded_source.hpp"
#include "sources/values_hdf5.hpp"

namespace m2n {
namespace {

sources::Sharding dumped_sharding(const SourceContext& context) {
  const sources::OptionReader options("hdf5", context.options, {});
  const auto* values = dynamic_cast<const Hdf5Values*>(context.values.get());
  if (values == nullptr) {
    throw Error(Errc::usage,
                "source 'hdf5' takes its layouts from the dump that its values come from; set "
                "source.values to hdf5 and source.path to the dump");
  }
  const Problem problem = values->dump().problem();
  if (!problem.source_ranks().empty() && problem.source_ranks().back() >= context.ranks) {
    throw Error(Errc::usage, "the dump '" + values->dump().file().string() +
                                 "' has trainers up to rank " +
                                 std::to_string(problem.source_ranks().back()) +
                                 ", so source.ranks must be at least " +
                                 std::to_string(problem.source_ranks().back() + 1));
  }
  sources::Sharding sharding;
  for (const Parameter& parameter : problem.parameters()) {
    sharding.params.push_back(
        {parameter.name, parameter.source_dtype(), parameter.shape, parameter.source});
  }
  return sharding;
}

}  // namespace

void add_source_hdf5(Registries& registries) {
  registries.sources.add("hdf5", "the trainers of a dump; needs values hdf5 of the same file",
                         [](const SourceContext& context) {
                           return std::make_unique<sources::ShardedSource>(
                               "hdf5", context, dumped_sharding(context));
                         });
}

}  // namespace m2n
