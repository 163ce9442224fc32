// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Values from the shards of a dump: global tensors, put together as they are read.

#include <algorithm>
#include <string>
#include <vector>

#include "core/api/plugins.hpp"
#include "sources/values_hdf5.hpp"

namespace m2n {
namespace {

constexpr const char* kName = "hdf5";

std::string path_of(const Options& options) {
  require_known_options("values 'hdf5'", options, {"path", "side", "verify"});
  const auto path = options.find("path");
  if (path == options.end() || path->second.empty()) {
    throw Error(Errc::usage, "values 'hdf5' need the option 'path': the file of a dump");
  }
  return path->second;
}

/// The first of @p choices where the option is not given.
std::string choice(const Options& options, const char* key,
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

Role side_of(const Options& options) {
  return choice(options, "side", {"destination", "source"}) == "source" ? Role::source
                                                                        : Role::destination;
}

}  // namespace

Hdf5Values::Hdf5Values(const Options& options)
    : tensors_(path_of(options), side_of(options),
               choice(options, "verify", {"yes", "no"}) == "yes") {
  if (catalogue().empty()) {
    throw Error(Errc::bad_argument,
                "'" + tensors_.dump().file().string() + "' has no shards of the " +
                    std::string(to_string(tensors_.side())) + " to read values from");
  }
}

std::string_view Hdf5Values::name() const noexcept { return kName; }

void Hdf5Values::read(std::string_view tensor, const Box& box, std::byte* data,
                      const Strides& strides) const {
  expect_readable(tensors_.info(tensor), box, strides);
  tensors_.read(tensor, box, data, strides);
}

void add_values_hdf5(Registries& registries) {
  registries.values.add(
      kName,
      "tensors from the shards of a dump; needs path: the file; side: destination "
      "or source; verify: yes or no",
      [](const ValuesContext& context) { return std::make_unique<Hdf5Values>(context.options); });
}

}  // namespace m2n
