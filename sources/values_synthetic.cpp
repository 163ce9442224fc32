// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Values that depend only on a tensor's name and the element's index.

#include <unordered_map>

#include "core/api/plugins.hpp"
#include "core/tensor/digest.hpp"
#include "sources/values_common.hpp"

namespace m2n {
namespace {

constexpr const char* kSynthetic = "synthetic";

class SyntheticValues : public TensorValues {
 public:
  explicit SyntheticValues(const ValuesContext& context) : catalogue_(context.catalogue) {
    expect_options(kSynthetic, context.options, {});
    for (const TensorInfo& info : catalogue_) {
      try {
        (void)element_count(info.shape);
      } catch (const Error& error) {
        throw Error(Errc::bad_argument, "tensor '" + info.name + "': " + error.what());
      }
      if (!by_name_.emplace(info.name, &info).second) {
        throw Error(Errc::bad_argument,
                    "tensor '" + info.name + "' is declared twice; names must differ");
      }
    }
  }

  std::string_view name() const noexcept override { return kSynthetic; }
  const Catalogue& catalogue() const override { return catalogue_; }

  void read(std::string_view tensor, const Box& box, std::byte* data,
            const Strides& strides) const override {
    const TensorInfo& info = info_of(tensor);
    expect_readable(info, box, strides);
    fill_synthetic(info.shape, box, info.dtype, synthetic_seed(info.name), data, strides);
  }
  std::optional<Formula> formula(std::string_view tensor) const override {
    const TensorInfo& info = info_of(tensor);
    return Formula{info.dtype, synthetic_seed(info.name), 0};
  }

 private:
  const TensorInfo& info_of(std::string_view tensor) const {
    const auto found = by_name_.find(tensor);
    if (found == by_name_.end()) {
      throw Error(Errc::bad_argument, "values 'synthetic' have no tensor '" + std::string(tensor) +
                                          "'; " + std::to_string(catalogue_.size()) +
                                          " others are declared");
    }
    return *found->second;
  }

  const Catalogue catalogue_;
  std::unordered_map<std::string_view, const TensorInfo*> by_name_;
};

}  // namespace

void add_values_synthetic(Registries& registries) {
  registries.values.add(
      kSynthetic, "made up from a tensor's name and the element's index",
      [](const ValuesContext& context) { return std::make_unique<SyntheticValues>(context); });
}

}  // namespace m2n
