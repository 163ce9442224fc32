// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Values from the shards of a dump: global tensors, put together as they are read.

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/api/plugins.hpp"
#include "core/io/dump.hpp"
#include "sources/values_common.hpp"

namespace m2n {
namespace {

constexpr const char* kName = "hdf5";

class Hdf5Values : public TensorValues {
 public:
  explicit Hdf5Values(const Options& options) : dump_(path_of(options)) {
    const std::string side = choice(options, "side", {"destination", "source"});
    verify_ = choice(options, "verify", {"yes", "no"}) == "yes";

    std::vector<DumpShard> all = dump_.shards(side == "source" ? Role::source : Role::destination);
    // A tensor that this side had no use for has shards without elements: there are no values of
    // it.
    std::unordered_set<std::string> held;
    for (const DumpShard& shard : all) {
      if (!shard.compact.pieces.empty() || element_count(shard.shape) == 0) {
        held.insert(shard.name);
      }
    }
    for (DumpShard& shard : all) {
      if (!held.contains(shard.name)) {
        continue;
      }
      const auto [entry, is_new] = by_name_.try_emplace(shard.name, catalogue_.size());
      if (is_new) {
        catalogue_.push_back({shard.name, shard.dtype, shard.shape});
        shards_.emplace_back();
      }
      const TensorInfo& info = catalogue_[entry->second];
      if (info.dtype != shard.dtype || info.shape != shard.shape) {
        throw Error(Errc::io, "the shards of '" + shard.name + "' in '" + dump_.file().string() +
                                  "' disagree about its dtype or its shape");
      }
      shards_[entry->second].push_back(std::move(shard));
    }
    if (catalogue_.empty()) {
      throw Error(Errc::bad_argument, "'" + dump_.file().string() + "' has no shards of the " +
                                          side + " to read values from");
    }
    in_declared_order();
  }

  std::string_view name() const noexcept override { return kName; }
  const Catalogue& catalogue() const override { return catalogue_; }

  void read(std::string_view tensor, const Box& box, std::byte* data,
            const Strides& strides) const override {
    const auto found = by_name_.find(std::string(tensor));
    if (found == by_name_.end()) {
      throw Error(Errc::bad_argument, "'" + dump_.file().string() + "' has no shard of a tensor '" +
                                          std::string(tensor) + "'");
    }
    const TensorInfo& info = catalogue_[found->second];
    expect_readable(info, box, strides);
    if (box.empty()) {
      return;
    }
    std::vector<Box> missing{box};
    for (const DumpShard& shard : shards_[found->second]) {
      for (std::size_t i = 0; i < shard.compact.pieces.size() && !missing.empty(); ++i) {
        missing = read_from(shard, i, missing, box, data, strides);
      }
    }
    if (!missing.empty()) {
      throw Error(Errc::bad_argument, "no shard in '" + dump_.file().string() + "' holds " +
                                          to_string(missing.front()) + " of tensor '" + info.name +
                                          "'");
    }
  }

 private:
  static std::string path_of(const Options& options) {
    require_known_options("values 'hdf5'", options, {"path", "side", "verify"});
    const auto path = options.find("path");
    if (path == options.end() || path->second.empty()) {
      throw Error(Errc::usage, "values 'hdf5' need the option 'path': the file of a dump");
    }
    return path->second;
  }

  /// The first of @p choices where the option is not given.
  static std::string choice(const Options& options, const char* key,
                            const std::vector<std::string>& choices) {
    const auto given = options.find(key);
    if (given == options.end()) {
      return choices.front();
    }
    if (std::find(choices.begin(), choices.end(), given->second) == choices.end()) {
      throw Error(Errc::usage, std::string("option '") + key + "' of values 'hdf5' is '" +
                                   given->second + "'; the choices are " + choices[0] + ", " +
                                   choices[1]);
    }
    return given->second;
  }

  /// The order of /params, where the dump has it; tensors that it lacks come last, by name.
  void in_declared_order() {
    std::vector<std::size_t> order;
    std::unordered_set<std::size_t> placed;
    for (const std::string& name : dump_.parameters()) {
      const auto found = by_name_.find(name);
      if (found != by_name_.end() && placed.insert(found->second).second) {
        order.push_back(found->second);
      }
    }
    for (std::size_t i = 0; i < catalogue_.size(); ++i) {
      if (!placed.contains(i)) {
        order.push_back(i);
      }
    }
    Catalogue catalogue;
    std::vector<std::vector<DumpShard>> shards;
    for (const std::size_t i : order) {
      by_name_[catalogue_[i].name] = catalogue.size();
      catalogue.push_back(std::move(catalogue_[i]));
      shards.push_back(std::move(shards_[i]));
    }
    catalogue_ = std::move(catalogue);
    shards_ = std::move(shards);
  }

  /// Reads what piece @p i has of @p missing. @return what is missing still.
  std::vector<Box> read_from(const DumpShard& shard, std::size_t i, const std::vector<Box>& missing,
                             const Box& box, std::byte* data, const Strides& strides) const {
    const std::uint64_t item_bytes = bytes_of(shard.dtype);
    std::vector<Box> rest;
    for (const Box& wanted : missing) {
      const std::optional<Box> part = intersect(wanted, shard.compact.pieces[i].box);
      if (!part || part->empty()) {
        rest.push_back(wanted);
        continue;
      }
      check_once(shard);
      Index at = 0;
      for (std::size_t d = 0; d < box.rank(); ++d) {
        at += (part->lo[d] - box.lo[d]) * strides[d];
      }
      dump_.read(shard, i, *part, data + at * static_cast<std::ptrdiff_t>(item_bytes), strides);
      subtract(wanted, *part, rest);
    }
    return rest;
  }

  void check_once(const DumpShard& shard) const {
    if (!verify_) {
      return;
    }
    {
      const std::scoped_lock lock(checked_mutex_);
      if (checked_.contains(shard.path)) {
        return;
      }
    }
    dump_.verify(shard.path);
    const std::scoped_lock lock(checked_mutex_);
    checked_.insert(shard.path);
  }

  DumpReader dump_;
  bool verify_ = true;
  Catalogue catalogue_;
  std::vector<std::vector<DumpShard>> shards_;  ///< By tensor.
  std::unordered_map<std::string, std::size_t> by_name_;
  mutable std::mutex checked_mutex_;
  mutable std::unordered_set<std::string> checked_;  ///< Paths whose checksum was right.
};

}  // namespace

void add_values_hdf5(Registries& registries) {
  registries.values.add(
      kName,
      "tensors from the shards of a dump; needs path: the file; side: destination "
      "or source; verify: yes or no",
      [](const ValuesContext& context) { return std::make_unique<Hdf5Values>(context.options); });
}

}  // namespace m2n
