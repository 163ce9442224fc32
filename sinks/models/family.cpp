// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "sinks/models/family.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/api/patterns.hpp"
#include "core/error.hpp"
#include "sinks/fail.hpp"
#include "sinks/models/names.hpp"
#include "sinks/models/parameter.hpp"

namespace m2n::models {
namespace {

void replace_all(std::string& text, std::string_view what, std::string_view by) {
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
}

bool of_a_layer(std::string_view name) { return name.find("{l}") != std::string_view::npos; }

/// Offered tensors by the family's names.
using Offered = std::unordered_map<std::string, const TensorInfo*>;

class TableFamily final : public ModelFamily {
 public:
  explicit TableFamily(Table table) : table_(std::move(table)), names_(table_.names) {
    for_each_row([&](const Row& row, Index layer) {
      for_each_tensor(row, [&](const Part& part, Index expert) {
        TensorInfo tensor{tensor_name(part.tensor, layer, expert),
                          part.dtype.value_or(table_.dtype), tensor_shape(part)};
        if (row.kept && row.same_as.empty()) {
          if (needed_.insert(tensor.name).second) {  // another row may take other rows of it
            catalogue_.push_back(std::move(tensor));
          }
        } else if (row.same_as.empty()) {
          spare_.insert(tensor.name);
          catalogue_.push_back(std::move(tensor));
        } else {
          repeated_.push_back(std::move(tensor));
        }
      });
    });
    for (const std::string& pattern : table_.ignored) {
      for (Index layer = 0; layer < (of_a_layer(pattern) ? table_.layers : 1); ++layer) {
        ignored_.insert(tensor_name(pattern, layer, 0));
      }
    }
    const auto layered = std::find_if(table_.rows.begin(), table_.rows.end(), in_its_layers_stage);
    first_layered_ = static_cast<std::size_t>(layered - table_.rows.begin());
  }

  std::string_view name() const noexcept override { return table_.family; }
  const Catalogue& catalogue() const override { return catalogue_; }

  WorkerModel worker(const Deployment& deployment, Rank worker_rank,
                     const Catalogue& checkpoint) const override {
    return worker(deployment, worker_rank, fit(checkpoint));
  }

  WorkerModels workers(const Deployment& deployment, const Catalogue& checkpoint) const override {
    const Fitted fitted = fit(checkpoint);
    WorkerModels models;
    for (Rank w = 0; w < deployment.workers; ++w) {
      const Rank twin = w % replica_workers(deployment);
      models.push_back(twin == w
                           ? std::make_shared<const WorkerModel>(worker(deployment, w, fitted))
                           : models[static_cast<std::size_t>(twin)]);
    }
    return models;
  }

 private:
  static bool in_its_layers_stage(const Row& row) {
    return of_a_layer(row.name) && row.place == Place::layer;
  }

  Interval layers_of(const Row& row) const {
    if (!of_a_layer(row.name)) {
      return {0, 1};
    }
    return row.layers.empty() ? Interval{0, table_.layers} : row.layers;
  }

  void for_each_row(const std::function<void(const Row&, Index)>& visit) const {
    const auto& rows = table_.rows;
    for (std::size_t begin = 0; begin < rows.size();) {
      const Interval layers = layers_of(rows[begin]);
      std::size_t end = begin + 1;
      while (of_a_layer(rows[begin].name) && end < rows.size() && of_a_layer(rows[end].name) &&
             layers_of(rows[end]) == layers) {
        ++end;
      }
      for (Index layer = layers.begin; layer < layers.end; ++layer) {
        for (std::size_t i = begin; i < end; ++i) {
          visit(rows[i], layer);
        }
      }
      begin = end;
    }
  }

  void for_each_tensor(const Row& row, const std::function<void(const Part&, Index)>& visit) const {
    const Index experts = row.experts == Experts::named ? table_.experts : 1;
    for (Index expert = 0; expert < experts; ++expert) {
      for (const Part& part : row.parts) {
        visit(part, expert);
      }
    }
  }

  static std::string expanded(std::string name, std::string_view root, Index layer, Index expert) {
    replace_all(name, "{root}", root);
    replace_all(name, "{l}", std::to_string(layer));
    replace_all(name, "{e}", std::to_string(expert));
    return name;
  }
  std::string tensor_name(const std::string& name, Index layer, Index expert) const {
    return expanded(name, table_.checkpoint_root, layer, expert);
  }

  /// A checkpoint that has what the model needs.
  struct Fitted {
    Offered offered;
    std::vector<std::string> ignored;
  };

  Fitted fit(const Catalogue& checkpoint) const {
    Fitted fitted;
    fitted.offered = offer(checkpoint, fitted.ignored);
    require_fit(checkpoint, fitted.offered, fitted.ignored);
    return fitted;
  }

  WorkerModel worker(const Deployment& deployment, Rank worker, const Fitted& fitted) const {
    const Seat seat = seat_of(deployment, worker);
    const std::vector<Index> stages = layers_of_stages(deployment, table_.layers);
    WorkerModel model;
    model.ignored = fitted.ignored;
    model.not_plain = deployment.pipeline_parallel > 1 ? "layers are spread over pipeline stages"
                                                       : table_.not_plain;
    model.arrangement = deployment.experts.version;
    Weights weights;
    for_each_row([&](const Row& row, Index layer) {
      const bool missing = !row.same_as.empty() && !fitted.offered.contains(tensor_name(
                                                       row.parts.front().tensor, layer, 0));
      if (row.kept && !missing && on_stage(row, layer, seat, stages)) {
        Made made = parameter(row, layer, deployment, seat, fitted.offered);
        if (table_.requantise != Requantise::no) {
          if (row.scales.empty()) {
            weights[expanded(row.name, table_.worker_root, layer, 0)] = {made.parameter.name,
                                                                         made.rooms};
          } else {
            requantise(model, row, layer, made, weights);
          }
        }
        model.parameters.push_back(std::move(made.parameter));
      }
    });
    if (table_.derive) {
      table_.derive(model, deployment, seat);
    }
    return model;
  }

  /// Weights by the names of their rows: the parameter's, and the rows of its parts (columns of its
  /// one part, where a row cut cuts them).
  struct Weight {
    std::string parameter;
    std::vector<Index> rooms;
  };
  using Weights = std::unordered_map<std::string, Weight>;

  /// Has a weight quantised anew for scales @p made of row @p row.
  void requantise(WorkerModel& model, const Row& row, Index layer, Made& made,
                  const Weights& weights) const {
    const Weight& scaled = weights.at(expanded(row.scales, table_.worker_root, layer, 0));
    const std::string& weight = scaled.parameter;
    const auto kept = std::find_if(model.parameters.rbegin(), model.parameters.rend(),
                                   [&](const WorkerParameter& p) { return p.name == weight; });
    expects(kept != model.parameters.rend(), "scales follow their weight");
    const Shape& shape = kept->shape;
    const bool rows_whole = row.cut == Cut::row || row.parts.size() == 1;
    FusedRows fused{weight, made.parameter.name,
                    rows_whole ? std::vector<Index>{shape[shape.size() - 2]} : scaled.rooms};
    if (table_.requantise == Requantise::power_of_two) {
      const Index block = row.parts.front().block;
      model.rewrites.push_back(rewrite_for_powers_of_two(fused,
                                                         row.cut == Cut::row ? block : made.block,
                                                         row.cut == Cut::row ? made.block : block));
    } else if (row.parts.size() > 1) {
      made.parameter.name += "_parts";
      model.derived.push_back(largest_scale(fused.scales, {weight, made.parameter.name, fused.rows},
                                            row.experts == Experts::none ? 0 : shape[0]));
      fused.scales = made.parameter.name;
      model.rewrites.push_back(rewrite_for_one_scale(fused));
    }
  }

  Offered offer(const Catalogue& checkpoint, std::vector<std::string>& dropped) const {
    Offered offered(checkpoint.size());
    for (const TensorInfo& tensor : checkpoint) {
      const auto name = names_(tensor.name);
      if (!name) {
        dropped.push_back(tensor.name);
        continue;
      }
      const auto [known, fresh] = offered.emplace(*name, &tensor);
      if (!fresh) {
        fail(known->second->name == tensor.name
                 ? "tensor '" + tensor.name + "' stands twice in the checkpoint"
                 : "tensors '" + known->second->name + "' and '" + tensor.name + "' are both '" +
                       *name + "' by the name rules; one must have another name");
      }
    }
    return offered;
  }

  /// Compares a checkpoint with what the model needs. Adds to @p ignored what it holds and nobody
  /// needs.
  void require_fit(const Catalogue& checkpoint, const Offered& offered,
                   std::vector<std::string>& ignored) const {
    std::unordered_set<std::string_view> known;
    std::vector<std::string> missing;
    for (const Catalogue* list : {&catalogue_, &repeated_}) {
      for (const TensorInfo& needed : *list) {
        const bool spare = spare_.contains(needed.name);
        known.insert(needed.name);
        const auto found = offered.find(needed.name);
        if (found == offered.end()) {
          if (list == &catalogue_ && !spare) {
            missing.push_back(needed.name);
          }
        } else if (spare) {
          ignored.push_back(found->second->name);
        } else if (found->second->shape != needed.shape) {
          fail("tensor '" + needed.name + "' has shape " + to_string(found->second->shape) +
               " in the checkpoint, and " + to_string(needed.shape) + " in this " + table_.family +
               " model");
        }
      }
    }
    std::vector<std::string> unknown;
    for (const TensorInfo& tensor : checkpoint) {
      const auto name = names_(tensor.name);
      if (name && !known.contains(*name)) {
        (ignored_.contains(*name) ? ignored : unknown).push_back(tensor.name);
      }
    }
    if (!missing.empty() || !unknown.empty()) {
      fail("the checkpoint does not fit this " + table_.family + " model: it " +
           (missing.empty() ? "lacks nothing" : "lacks " + list_of(missing)) + ", and " +
           (unknown.empty()
                ? "nothing is left over"
                : list_of(unknown) + (unknown.size() == 1 ? " is" : " are") + " left over"));
    }
  }

  bool on_stage(const Row& row, Index layer, const Seat& seat,
                const std::vector<Index>& stages) const {
    const Index last = seat.stages.workers - 1;
    const Index mine = seat.stages.worker;
    const auto number = static_cast<std::size_t>(&row - table_.rows.data());
    switch (row.place) {
      case Place::first:
        return mine == 0;
      case Place::ends:
        return mine == 0 || mine == last;
      case Place::layer:
        break;
    }
    if (!of_a_layer(row.name)) {
      return mine == (number < first_layered_ ? 0 : last);
    }
    Index stage = 0;
    for (Index end = stages[0]; stage < last && layer >= end;) {
      ++stage;
      end += stages[static_cast<std::size_t>(stage)];
    }
    return mine == stage;
  }

  Made parameter(const Row& row, Index layer, const Deployment& deployment, const Seat& seat,
                 const Offered& offered) const {
    const std::vector<Index> slots =
        row.experts == Experts::none
            ? std::vector<Index>{0}
            : experts_of(deployment, seat.experts, layer, table_.experts, table_.expert_groups);
    const Share& share = row.group == Group::experts     ? seat.inside
                         : row.group == Group::attention ? seat.attention
                                                         : seat.dense;
    const bool other_name = deployment.engine == Engine::sglang && !row.sglang.empty();
    Made result = make_parameter(
        {row, expanded(other_name ? row.sglang : row.name, table_.worker_root, layer, 0),
         table_.family, share, slots, table_.vocab_padding,
         [&](const Part& part, Index expert) -> const TensorInfo& {
           return *offered.at(tensor_name(part.tensor, layer, expert));
         }});
    result.parameter.same_as = expanded(row.same_as, table_.worker_root, layer, 0);
    return result;
  }

  Table table_;
  NameRules names_;
  std::size_t first_layered_ = 0;
  Catalogue catalogue_;
  Catalogue repeated_;  ///< Tied tensors that a checkpoint may repeat.
  std::unordered_set<std::string> needed_;
  std::unordered_set<std::string> spare_;  ///< In the catalogue, and not needed.
  std::unordered_set<std::string> ignored_;
};

}  // namespace

std::unique_ptr<ModelFamily> make_family(Table table) {
  return std::make_unique<TableFamily>(std::move(table));
}

}  // namespace m2n::models
