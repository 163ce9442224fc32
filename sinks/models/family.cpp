// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "sinks/models/family.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <charconv>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/error.hpp"

namespace m2n::models {
namespace {

[[noreturn]] void fail(const std::string& text) { throw Error(Errc::bad_argument, text); }

void replace_all(std::string& text, std::string_view what, std::string_view by) {
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
}

bool of_a_layer(std::string_view name) { return name.find("{l}") != std::string_view::npos; }

/// "a, b, c and 4 more".
std::string list_of(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kShown) {
    text += " and " + std::to_string(names.size() - kShown) + " more";
  }
  return text;
}

class TableFamily final : public ModelFamily {
 public:
  explicit TableFamily(Table table) : table_(std::move(table)) {
    for_each_row([&](const Row& row, Index layer) {
      for (const Part& part : row.parts) {
        auto& list = row.same_as.empty() ? catalogue_ : optional_;
        list.push_back({tensor_name(part.tensor, layer), table_.dtype, part.shape});
      }
    });
    for (const std::string& pattern : table_.ignored) {
      for (Index layer = 0; layer < (of_a_layer(pattern) ? table_.layers : 1); ++layer) {
        ignored_.insert(tensor_name(pattern, layer));
      }
    }
  }

  std::string_view name() const noexcept override { return table_.family; }
  const Catalogue& catalogue() const override { return catalogue_; }

  WorkerModel worker(const Deployment& deployment, Rank worker,
                     const Catalogue& checkpoint) const override {
    const Index tp = deployment.tensor_parallel;
    if (tp < 1 || deployment.workers < 1 || deployment.workers % tp != 0) {
      fail(std::to_string(deployment.workers) + " workers do not form groups of " +
           std::to_string(tp) + " tensor-parallel ones; a multiple would");
    }
    if (worker < 0 || worker >= deployment.workers) {
      fail("worker " + std::to_string(worker) + " is not one of " +
           std::to_string(deployment.workers));
    }
    std::unordered_map<std::string_view, const TensorInfo*> offered;
    for (const TensorInfo& tensor : checkpoint) {
      if (!offered.emplace(tensor.name, &tensor).second) {
        fail("tensor '" + tensor.name + "' stands twice in the checkpoint");
      }
    }
    WorkerModel model;
    model.ignored = require_fit(checkpoint, offered);
    for_each_row([&](const Row& row, Index layer) {
      const bool repeated = !row.same_as.empty();
      if (repeated && !offered.contains(tensor_name(row.parts.front().tensor, layer))) {
        return;
      }
      Share share{tp, worker % tp, table_.vocab_padding};
      model.parameters.push_back(parameter(row, layer, share, offered));
    });
    return model;
  }

 private:
  /// One worker's place in its group.
  struct Share {
    Index workers = 1;
    Index worker = 0;
    Index vocab_padding = 1;

    /// The part of dimension @p dim that the worker keeps.
    Interval of(const Part& part, std::size_t dim, const std::string& family) const {
      const auto& units = part.units;
      const Index length = part.shape[dim] / units.count;
      if (units.count % workers == 0) {
        const Index mine = units.count / workers * length;
        return {worker * mine, (worker + 1) * mine};
      }
      if (units.repeat && workers % units.count == 0) {
        const Index unit = worker / (workers / units.count);
        return {unit * length, (unit + 1) * length};
      }
      fail(units.name + " is " + std::to_string(units.count) + " in this " + family +
           " model, which " + std::to_string(workers) + " tensor-parallel workers do not divide" +
           (units.repeat ? " or are a multiple of" : "") + " (tensor '" + part.tensor + "')");
    }
  };

  void for_each_row(const std::function<void(const Row&, Index)>& visit) const {
    const auto& rows = table_.rows;
    for (std::size_t begin = 0; begin < rows.size();) {
      const bool layered = of_a_layer(rows[begin].name);
      std::size_t end = begin + 1;
      while (layered && end < rows.size() && of_a_layer(rows[end].name)) {
        ++end;
      }
      for (Index layer = 0; layer < (layered ? table_.layers : 1); ++layer) {
        for (std::size_t i = begin; i < end; ++i) {
          visit(rows[i], layer);
        }
      }
      begin = end;
    }
  }

  static std::string expanded(std::string name, std::string_view root, Index layer) {
    replace_all(name, "{root}", root);
    replace_all(name, "{l}", std::to_string(layer));
    return name;
  }
  std::string tensor_name(const std::string& name, Index layer) const {
    return expanded(name, table_.checkpoint_root, layer);
  }
  std::string worker_name(const std::string& name, Index layer) const {
    return expanded(name, table_.worker_root, layer);
  }

  /// Compares a checkpoint with what the model needs. @return what it holds and nobody needs.
  std::vector<std::string> require_fit(
      const Catalogue& checkpoint,
      const std::unordered_map<std::string_view, const TensorInfo*>& offered) const {
    std::unordered_set<std::string_view> known;
    std::vector<std::string> missing;
    for (const Catalogue* list : {&catalogue_, &optional_}) {
      for (const TensorInfo& needed : *list) {
        known.insert(needed.name);
        const auto found = offered.find(needed.name);
        if (found == offered.end()) {
          if (list == &catalogue_) {
            missing.push_back(needed.name);
          }
        } else if (found->second->shape != needed.shape) {
          fail("tensor '" + needed.name + "' has shape " + to_string(found->second->shape) +
               " in the checkpoint, and " + to_string(needed.shape) + " in this " + table_.family +
               " model");
        }
      }
    }
    std::vector<std::string> unknown;
    std::vector<std::string> ignored;
    for (const TensorInfo& tensor : checkpoint) {
      if (!known.contains(tensor.name)) {
        (ignored_.contains(tensor.name) ? ignored : unknown).push_back(tensor.name);
      }
    }
    if (!missing.empty() || !unknown.empty()) {
      fail("the checkpoint does not fit this " + table_.family + " model: it " +
           (missing.empty() ? "lacks nothing" : "lacks " + list_of(missing)) + ", and " +
           (unknown.empty()
                ? "nothing is left over"
                : list_of(unknown) + (unknown.size() == 1 ? " is" : " are") + " left over"));
    }
    return ignored;
  }

  WorkerParameter parameter(
      const Row& row, Index layer, const Share& share,
      const std::unordered_map<std::string_view, const TensorInfo*>& offered) const {
    WorkerParameter result;
    result.name = worker_name(row.name, layer);
    result.keep_dtype = row.keep_dtype;
    result.same_as = worker_name(row.same_as, layer);

    // What the worker takes of each part, and the room that it has for it.
    const std::size_t dim = row.cut == Cut::row ? 1 : 0;
    std::vector<Box> boxes;
    std::vector<Index> room;
    Index total = 0;
    for (const Part& part : row.parts) {
      Box box = Box::whole(part.shape);
      if (row.cut == Cut::vocab) {
        const Index padded = checked_mul(ceil_div(part.shape[0], share.vocab_padding),
                                         share.vocab_padding, "padded vocabulary");
        if (padded % share.workers != 0) {
          fail(part.units.name + " is " + std::to_string(part.shape[0]) + ", padded to " +
               std::to_string(padded) + " rows, which " + std::to_string(share.workers) +
               " tensor-parallel workers do not divide");
        }
        const Index rows = padded / share.workers;
        box.lo[0] = std::min(share.worker * rows, part.shape[0]);
        box.hi[0] = std::min((share.worker + 1) * rows, part.shape[0]);
        room.push_back(rows);
      } else if (row.cut == Cut::whole) {
        room.push_back(part.shape.empty() ? 1 : part.shape[0]);
      } else {
        const Interval mine = share.of(part, dim, table_.family);
        box.lo[dim] = mine.begin;
        box.hi[dim] = mine.end;
        room.push_back(
            checked_mul(ceil_div(mine.size(), row.align), row.align, "padded share of a tensor"));
      }
      boxes.push_back(box);
      total = checked_add(total, room.back());
    }

    result.shape = row.parts.front().shape;
    if (!result.shape.empty()) {
      result.shape[dim] = total;
    }
    const Strides strides = row_major(result.shape);
    Index at = 0;  // along dim
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const std::string tensor = tensor_name(row.parts[i].tensor, layer);
      const DType dtype = offered.at(tensor)->dtype;
      if (i > 0 && dtype != result.dtype) {
        fail("parameter '" + result.name + "' is made of tensors of one dtype, but '" + tensor +
             "' is " + std::string(to_string(dtype)) + " and '" + result.sections.front().tensor +
             "' is " + std::string(to_string(result.dtype)));
      }
      result.dtype = dtype;
      const bool scalar = strides.empty();
      if (!boxes[i].empty()) {
        result.sections.push_back({tensor, boxes[i], scalar ? 0 : at * strides[dim], strides});
      }
      const Index filled = scalar ? 1 : boxes[i][dim].size();
      if (filled < room[i]) {
        Box pad = Box::whole(result.shape);
        pad.lo[dim] = at + filled;
        pad.hi[dim] = at + room[i];
        result.padding.push_back(pad);
      }
      at += room[i];
    }
    return result;
  }

  Table table_;
  Catalogue catalogue_;
  Catalogue optional_;
  std::unordered_set<std::string> ignored_;
};

}  // namespace

Sizes::Sizes(std::string family, const Options& options, std::initializer_list<const char*> keys)
    : family_(std::move(family)) {
  const auto known = [&](std::string_view key) {
    return std::find(keys.begin(), keys.end(), key) != keys.end();
  };
  for (const auto& option : options) {
    if (option.first != "config" && !known(option.first)) {
      std::string text =
          "model '" + family_ + "' has no option '" + option.first + "'; the choices are config";
      for (const char* key : keys) {
        text += std::string(", ") + key;
      }
      throw Error(Errc::usage, text);
    }
  }
  if (const auto config = options.find("config"); config != options.end()) {
    boost::system::error_code failure;
    const auto parsed = boost::json::parse(config->second, failure);
    if (failure || !parsed.is_object()) {
      fail("the config of model '" + family_ + "' is not a JSON object" +
           (failure ? ": " + failure.message() : ""));
    }
    for (const auto& member : parsed.as_object()) {
      if (!known(member.key()) || member.value().is_null()) {
        continue;
      }
      const auto& value = member.value();
      values_[member.key()] =
          value.is_string() ? std::string(value.as_string()) : boost::json::serialize(value);
    }
  }
  for (const auto& [key, value] : options) {
    if (key != "config") {
      values_[key] = value;
    }
  }
}

const std::string* Sizes::find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

Index Sizes::size(std::string_view key) const {
  const std::string* value = find(key);
  if (value == nullptr) {
    fail("model '" + family_ + "' needs the size '" + std::string(key) +
         "'; give it as an option, or a config that has it");
  }
  Index number = 0;
  const auto [end, failure] = std::from_chars(value->data(), value->data() + value->size(), number);
  if (failure != std::errc{} || end != value->data() + value->size() || number < 1) {
    fail("size '" + std::string(key) + "' of model '" + family_ + "' is '" + *value +
         "'; it must be a whole number of at least 1");
  }
  return number;
}

Index Sizes::size_or(std::string_view key, Index otherwise) const {
  return find(key) == nullptr ? otherwise : size(key);
}

bool Sizes::flag(std::string_view key, bool otherwise) const {
  const std::string* value = find(key);
  if (value == nullptr) {
    return otherwise;
  }
  if (*value != "true" && *value != "false") {
    fail("'" + std::string(key) + "' of model '" + family_ + "' is '" + *value +
         "'; it must be true or false");
  }
  return *value == "true";
}

std::string Sizes::text(std::string_view key, std::string_view otherwise) const {
  const std::string* value = find(key);
  return value == nullptr ? std::string(otherwise) : *value;
}

DType Sizes::dtype(DType otherwise) const {
  const std::string name = text("dtype", text("torch_dtype", to_string(otherwise)));
  if (name == "bfloat16") {
    return DType::bf16;
  }
  if (name == "float16") {
    return DType::f16;
  }
  return name == "float32" ? DType::f32 : dtype_from_string(name);
}

Index Sizes::quotient(std::string_view whole, std::string_view parts) const {
  const Index a = size(whole);
  const Index b = size(parts);
  if (a % b != 0) {
    fail(std::string(whole) + " " + std::to_string(a) + " of model '" + family_ +
         "' is not a multiple of " + std::string(parts) + " " + std::to_string(b));
  }
  return a / b;
}

std::unique_ptr<ModelFamily> make_family(Table table) {
  return std::make_unique<TableFamily>(std::move(table));
}

}  // namespace m2n::models
