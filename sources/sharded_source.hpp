// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What every source shares: memory, filling and lending. A plug-in adds only layout arithmetic.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/api/memory.hpp"
#include "core/api/source.hpp"
#include "sources/options.hpp"

namespace m2n::sources {

/// What a plug-in works out: who holds what, and how large this rank's buffers really are.
struct Sharding {
  std::vector<ParamSpec> params;
  /// Bytes of this rank's buffers whose storage is larger than what their pieces touch: padding.
  std::map<std::string, std::uint64_t, std::less<>> storage_bytes;
};

/// Layouts by a key that says all about them, so that a geometry is worked out once, and equal
/// geometries share a pointer.
class Layouts {
 public:
  std::shared_ptr<const Layout> get(const std::string& key, const std::function<Layout()>& make);

 private:
  std::unordered_map<std::string, std::shared_ptr<const Layout>> by_key_;
  LayoutTable table_;
};

/// "bf16 [4, 8]": the part of a key that every layout has.
std::string geometry_key(const TensorInfo& tensor);

/// Runs @p body. @throws Error of the same code with "parameter 'name': " before its text.
void naming(std::string_view name, const std::function<void()>& body);

/// @throws Error{bad_argument} "parameter 'name' [4, 8]: <what>".
[[noreturn]] void refuse_tensor(const TensorInfo& tensor, const std::string& what);

/// The catalogue without the tensors that option `skip` (name patterns) says the trainer does not
/// hold. @throws Error{usage} for a pattern that matches nothing; Error{bad_argument} for a tensor
/// whose elements are smaller than a byte.
Catalogue held_tensors(const SourceContext& context, const OptionReader& options);

/// @throws Error{usage} naming the first pattern of option @p key that matches none of @p tensors.
void require_matches(const OptionReader& options, std::string_view key,
                     const std::vector<std::string>& patterns, const Catalogue& tensors);

/// A source whose buffers are memory of its own, where SourceContext::place says, filled from
/// SourceContext::values.
///
/// Nothing is allocated before the first borrow(), so that plans can be made for models that do not
/// fit. Values do not depend on the version: the first borrow() fills, later ones lend the same
/// bytes again. A version may come again (a round that failed is repeated) but never go back.
/// Bytes that belong to no parameter hold 0x2a, so that padding that travels is noticed.
class ShardedSource final : public WeightSource {
 public:
  /// @throws Error{bad_argument} when rank is not in [0, ranks), a name comes twice, or a parameter
  ///         is not in the values' catalogue with the same type and shape.
  ShardedSource(std::string name, const SourceContext& context, Sharding sharding);

  std::string_view name() const noexcept override { return name_; }
  const std::vector<ParamSpec>& params() const override { return sharding_.params; }
  /// @throws Error{bad_argument} for a version that goes back, or elements of different values at
  ///         one address; Error{unavailable} when there is no memory.
  std::vector<ParamLoan> borrow(std::uint64_t version) override;

 private:
  struct Buffer {
    std::uint64_t bytes = 0;
    std::uint64_t used_bytes = 0;  ///< Sum over pieces.
    bool shared = false;           ///< Some bytes may belong to two elements.
    LocalBuffer data;              ///< Of the arena; nothing before it is filled.
  };

  void size_buffers();
  void allocate();
  void fill();
  void lend();
  void check_shared(const ParamSpec& param, const Piece& piece) const;

  std::string name_;
  Rank rank_;
  MemoryPlace place_;
  std::shared_ptr<const TensorValues> values_;
  Sharding sharding_;
  std::map<std::string, Buffer, std::less<>> buffers_;
  std::unique_ptr<Arena> arena_;
  std::optional<std::uint64_t> version_;
  std::vector<ParamLoan> loans_;  // once filled
};

}  // namespace m2n::sources
