// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Families of models as tables: one row a parameter of a worker, with the checkpoint tensors in
/// it. A family's file reads its sizes and fills a table; everything else is done here.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/api/model.hpp"
#include "sinks/models/requantise.hpp"
#include "sinks/models/seat.hpp"

namespace m2n::models {

/// What a cut must not split: so many units, heads or rows, each as long as the others.
struct Units {
  std::string name = "";  ///< As in the config, for messages.
  Index count = 1;
  /// With fewer units than workers, neighbouring workers keep the same one (key and value heads).
  bool repeat = false;
  /// Units that the workers do not divide go ceil(count / workers) to each, the last ones fewer.
  bool uneven = false;
};

/// A checkpoint tensor, or a part of one. Its matrix is the tensor without a dimension of experts,
/// turned round when it is stored transposed.
struct Part {
  std::string tensor;
  Shape shape;                      ///< Of the tensor; with a block, of the matrix that it scales.
  Units units = {};                 ///< Of the dimension that is cut.
  std::optional<DType> dtype = {};  ///< Of the checkpoint, when it is not the table's.
  Index block = 1;                  ///< One element scales so many rows and columns.
  bool transposed = false;          ///< Stored [in, out].
  std::optional<Interval> rows = {};  ///< Of the matrix, when other rows are other parts.
};

/// How a group of workers shares a parameter.
enum class Cut : std::uint8_t {
  whole,   ///< Each keeps all of it; the parts follow one another in dimension 0.
  column,  ///< Dimension 0 of each part is cut; the parts follow one another there.
  row,     ///< Dimension 1 is cut.
  vocab,   ///< Dimension 0 is padded to a multiple of Table::vocab_padding, then cut evenly.
  first,   ///< The first keeps all of it, the others zeros: added once, after a row cut.
};

/// Which workers cut it among them.
enum class Group : std::uint8_t { dense, attention, experts };

/// What a parameter of dimension [experts, ...] is made of.
enum class Experts : std::uint8_t {
  none,
  named,    ///< A tensor an expert, "{e}" in its name.
  stacked,  ///< Tensors with a dimension of experts.
};

/// Pipeline stages that keep it.
enum class Place : std::uint8_t {
  layer,  ///< Its layer's; outside of layers, rows before them the first, behind them the last.
  first,
  ends,  ///< First and last.
};

/// A parameter of a worker. In names "{l}" is the layer, "{e}" the expert, and "{root}" what Table
/// says.
struct Row {
  std::string name;
  Cut cut = Cut::whole;
  std::vector<Part> parts = {};
  Index align = 1;  ///< Each worker's share of a part is padded up to a multiple.
  Group group = Group::dense;
  Experts experts = Experts::none;
  Interval layers = {};  ///< That have it; empty: all of the table's.
  Place place = Place::layer;
  bool keep_dtype = false;
  bool fold = false;         ///< The worker's last two dimensions are one.
  bool plain = true;         ///< Loaded by an engine's stock column, row or replicated loader.
  bool kept = true;          ///< False: a checkpoint may have it, and no worker needs it.
  std::string same_as = {};  ///< With this the tensor may be missing, and only has to be equal.
  std::string scales = {};   ///< The worker's weight that these scales belong to: a row before.
  std::string sglang = {};   ///< SGLang's name for it, when it is another.
};

/// A family for one size.
struct Table {
  std::string family;
  DType dtype = DType::bf16;  ///< Of catalogue().
  Index layers = 0;
  Index experts = 0;
  Index expert_groups = 1;
  Index vocab_padding = 64;
  std::string checkpoint_root = {};
  std::string worker_root = {};
  std::string names = {};  ///< Rules from offered names to the checkpoint's: see NameRules.
  std::string not_plain =
      {};  ///< Why an engine loads nothing of this model by stock loaders alone.
  Requantise requantise = Requantise::no;
  std::vector<Row> rows = {};  ///< In file order; neighbours with "{l}" and equal layers repeat.
  std::vector<std::string> ignored = {};  ///< Buffers that a checkpoint may hold and nobody needs.
  /// Adds what a worker computes from its parameters; may be empty.
  std::function<void(WorkerModel&, const Deployment&, const Seat&)> derive = {};
};

std::unique_ptr<ModelFamily> make_family(Table table);

}  // namespace m2n::models
