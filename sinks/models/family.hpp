// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Families of models as tables: one row a parameter of a worker, with the checkpoint tensors in
/// it. A family's file reads its sizes and fills a table; everything else is done here.

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/model.hpp"

namespace m2n::models {

/// What a cut must not split: so many units, heads or rows, each as long as the others.
struct Units {
  std::string name;  ///< As in the config, for messages.
  Index count = 1;
  /// With fewer units than workers, neighbouring workers keep the same one (key and value heads).
  bool repeat = false;
};

/// A checkpoint tensor, whole.
struct Part {
  std::string tensor;
  Shape shape;
  Units units = {};  ///< Of the dimension that is cut.
};

/// How tensor-parallel workers share a parameter.
enum class Cut : std::uint8_t {
  whole,   ///< Each keeps all of it.
  column,  ///< Dimension 0 of each part is cut; the parts follow one another there.
  row,     ///< Dimension 1 is cut.
  vocab,   ///< Dimension 0 is padded to a multiple of Table::vocab_padding, then cut evenly.
};

/// A parameter of a worker. In names "{l}" is the layer, and "{root}" what Table says.
struct Row {
  std::string name;
  Cut cut = Cut::whole;
  std::vector<Part> parts;  ///< One, but for column.
  Index align = 1;          ///< Each worker's share of a part is padded up to a multiple.
  bool keep_dtype = false;
  std::string same_as = {};  ///< With this the tensor may be missing, and only has to be equal.
};

/// A family for one size.
struct Table {
  std::string family;
  DType dtype = DType::bf16;  ///< Of catalogue().
  Index layers = 0;
  Index vocab_padding = 64;
  std::string checkpoint_root;
  std::string worker_root;
  std::vector<Row> rows;             ///< In file order; neighbours with "{l}" repeat as a block.
  std::vector<std::string> ignored;  ///< Buffers that a checkpoint may hold and nobody needs.
};

/// Sizes and switches by their names in a config.json, from its text ("config") or from options of
/// those names; an option wins. Keys of the config that nobody asks for do not matter.
class Sizes {
 public:
  /// @param keys  Every option that the family knows, besides "config".
  /// @throws Error{usage} for an option that is not among them, Error{bad_argument} for a config
  ///         that is no JSON object.
  Sizes(std::string family, const Options& options, std::initializer_list<const char*> keys);

  /// A number of at least 1. @throws Error{bad_argument} when it is missing or not one.
  Index size(std::string_view key) const;
  Index size_or(std::string_view key, Index otherwise) const;
  bool flag(std::string_view key, bool otherwise) const;
  std::string text(std::string_view key, std::string_view otherwise) const;
  /// "dtype" or "torch_dtype", spelled as in m2n or as in a config ("bfloat16").
  DType dtype(DType otherwise) const;
  /// size(whole) / size(parts). @throws Error{bad_argument} when it leaves a rest.
  Index quotient(std::string_view whole, std::string_view parts) const;

 private:
  const std::string* find(std::string_view key) const;

  std::string family_;
  Options values_;
};

std::unique_ptr<ModelFamily> make_family(Table table);

}  // namespace m2n::models
