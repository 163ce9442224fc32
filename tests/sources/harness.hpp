// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the tests of sources share: values that name their own element, and pictures of a rank's
/// memory to compare with an oracle.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/source.hpp"
#include "core/error.hpp"

namespace m2n::testing {

inline std::string text(Index value) { return std::to_string(value); }

/// An element of a parameter as text: "w3" is element 3 (row-major) of w; "-" is padding.
using Picture = std::vector<std::string>;

/// Values that say which parameter and element they are; types of 2, 4 and 8 bytes.
class TellingValues final : public TensorValues {
 public:
  explicit TellingValues(Catalogue catalogue) : catalogue_(std::move(catalogue)) {}
  std::string_view name() const noexcept override { return "telling"; }
  const Catalogue& catalogue() const override { return catalogue_; }
  void read(std::string_view tensor, const Box& box, std::byte* data,
            const Strides& strides) const override;

  /// Bits of element @p index of the @p number-th tensor.
  static std::uint64_t bits(std::uint64_t number, Index index, std::uint64_t item_bytes);

 private:
  Catalogue catalogue_;
};

/// One source for every trainer rank.
struct Trainers {
  Trainers(const std::string& kind, const Options& options, Rank ranks, const Catalogue& catalogue);

  const ParamSpec& param(const std::string& name) const;
  /// The whole buffer behind @p name on @p rank, element by element.
  Picture picture(Rank rank, const std::string& name);
  /// Elements of @p name that the layout gives to @p rank, sorted.
  std::vector<Index> held(Rank rank, const std::string& name) const;
  /// Indices of dimension @p d that the layout gives to @p rank, sorted.
  std::vector<Index> rows(Rank rank, const std::string& name, std::size_t d = 0) const;

  Catalogue catalogue;
  std::vector<std::unique_ptr<WeightSource>> ranks;
};

/// "w0", "w1", ... for each index.
Picture elements(const std::string& name, const std::vector<Index>& indices);
/// a followed by b.
Picture operator+(Picture a, const Picture& b);
Picture padding(std::size_t count);

/// [begin, end).
std::vector<Index> range(Index begin, Index end);
/// Part @p i of @p list cut like torch.chunk, computed by cutting pieces off the front.
std::vector<Index> chunk_list(const std::vector<Index>& list, Index parts, Index i);
/// Calls @p body with every row-major index of a tensor of @p shape.
void for_each_index(const Shape& shape, const std::function<void(const Dims&, Index)>& body);

/// What every source promises, checked element by element for all ranks: params() is the same on
/// every rank and equal layouts are one object; each element is held by some rank; no two elements
/// of a rank share an address; borrow() puts the element's value there. Returns the first breach.
std::string breach(Trainers& trainers);

/// True when making @p kind throws @p code with @p part in its text; else prints what happened.
bool refuses(const std::string& kind, const Options& options, Rank ranks,
             const Catalogue& catalogue, Errc code, const std::string& part);

}  // namespace m2n::testing
