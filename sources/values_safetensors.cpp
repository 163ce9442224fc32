// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Values from a checkpoint in safetensors files.

#include "core/api/plugins.hpp"
#include "core/io/safetensors.hpp"
#include "core/tensor/copy.hpp"
#include "sources/values_common.hpp"

namespace m2n {
namespace {

constexpr const char* kSafetensors = "safetensors";

std::string checkpoint_path(const Options& options) {
  expect_options(kSafetensors, options, {"path"});
  const auto path = options.find("path");
  if (path == options.end() || path->second.empty()) {
    throw Error(Errc::usage,
                "values 'safetensors' need the option 'path': a file, an index or a "
                "folder");
  }
  return path->second;
}

class SafetensorsValues : public TensorValues {
 public:
  explicit SafetensorsValues(const Options& options) : checkpoint_(checkpoint_path(options)) {}

  std::string_view name() const noexcept override { return kSafetensors; }
  const Catalogue& catalogue() const override { return checkpoint_.catalogue(); }

  void read(std::string_view tensor, const Box& box, std::byte* data,
            const Strides& strides) const override {
    const StoredTensor& stored = checkpoint_.tensor(tensor);
    const TensorInfo& info = stored.info;
    expect_readable(info, box, strides);
    if (box.empty()) {
      return;
    }
    const Strides stored_strides = row_major(info.shape);
    Index offset = 0;
    for (std::size_t d = 0; d < box.rank(); ++d) {
      offset += box.lo[d] * stored_strides[d];
    }
    copy_region({.extents = box.extents(),
                 .source_strides = stored_strides,
                 .destination_strides = strides,
                 .source_dtype = info.dtype,
                 .destination_dtype = info.dtype},
                stored.data + static_cast<std::uint64_t>(offset) * bytes_of(info.dtype), data);
  }

 private:
  Checkpoint checkpoint_;
};

}  // namespace

void add_values_safetensors(Registries& registries) {
  registries.values.add(kSafetensors,
                        "tensors of a checkpoint; needs path: a file, an index or a folder",
                        [](const ValuesContext& context) {
                          return std::make_unique<SafetensorsValues>(context.options);
                        });
}

}  // namespace m2n
