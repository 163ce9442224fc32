// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Source "declared": parameters and layouts of a problem file. No options.

#include <unordered_map>

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sources/sharded_source.hpp"

namespace m2n {

namespace {

sources::Sharding declared_sharding(const SourceContext& context) {
  const sources::OptionReader options("declared", context.options, {});
  sources::Sharding sharding{.params = context.declared, .storage_bytes = {}};
  LayoutTable table;
  std::unordered_map<const Layout*, std::shared_ptr<const Layout>> interned;
  for (auto& param : sharding.params) {
    const auto& given = param.side.layout;
    if (!given) {
      throw Error(Errc::bad_argument, "parameter '" + param.name + "' has no layout");
    }
    if (given->shape() != param.shape || given->dtype() != param.dtype) {
      throw Error(Errc::bad_argument,
                  "parameter '" + param.name + "' is declared as " +
                      sources::geometry_key({param.name, param.dtype, param.shape}) +
                      ", but its layout is of " +
                      sources::geometry_key({param.name, given->dtype(), given->shape()}));
    }
    if (param.side.buffers.size() < given->slot_count()) {
      throw Error(Errc::bad_argument, "parameter '" + param.name + "' names " +
                                          std::to_string(param.side.buffers.size()) +
                                          " buffers, but its layout uses " +
                                          std::to_string(given->slot_count()));
    }
    auto& shared = interned[given.get()];
    if (!shared) {
      shared = table.intern(*given);
    }
    param.side.layout = shared;
  }
  return sharding;
}

}  // namespace

void add_source_declared(Registries& registries) {
  registries.sources.add("declared", "the source side of a problem file",
                         [](const SourceContext& context) {
                           return std::make_unique<sources::ShardedSource>(
                               "declared", context, declared_sharding(context));
                         });
}

}  // namespace m2n
