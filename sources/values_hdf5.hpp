// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Values from a dump, for those that also want what else the dump says.

#include <string_view>

#include "core/api/registry.hpp"
#include "core/io/dump_tensors.hpp"
#include "sources/values_common.hpp"

namespace m2n {

class Hdf5Values final : public TensorValues {
 public:
  /// @param options  "path", "side", "verify". @throws Error{usage, bad_argument, io}.
  explicit Hdf5Values(const Options& options);

  std::string_view name() const noexcept override;
  const Catalogue& catalogue() const override { return tensors_.catalogue(); }
  void read(std::string_view tensor, const Box& box, std::byte* data,
            const Strides& strides) const override;

  const DumpReader& dump() const noexcept { return tensors_.dump(); }

 private:
  DumpTensors tensors_;
};

}  // namespace m2n
