// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "core/api/model.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/error.hpp"

namespace m2n {
namespace {

[[noreturn]] void bad_model(const std::string& text) { throw Error(Errc::bad_argument, text); }

/// first, first + step, ... along one dimension; the step of a single index is 1.
struct Progression {
  Index first = 0;
  Index step = 1;
  Index count = 1;

  Index last() const { return first + step * (count - 1); }
};

/// True when some index is in both (a congruence modulo each step, inside both ranges).
bool meet(const Progression& a, const Progression& b) {
  const Index lo = std::max(a.first, b.first);
  const Index hi = std::min(a.last(), b.last());
  if (lo > hi) {
    return false;
  }
  const Index common = std::gcd(a.step, b.step);
  if ((b.first - a.first) % common != 0) {
    return false;
  }
  // From a's first index at or after lo, at most b.step / common steps reach one of b's.
  Index x = a.first + ceil_div(lo - a.first, a.step) * a.step;
  for (Index tries = b.step / common; tries > 0 && x <= hi; --tries, x += a.step) {
    if ((x - b.first) % b.step == 0) {
      return true;
    }
  }
  return false;
}

/// Elements of a local parameter: one progression a dimension. Sections are one of these, but for
/// those that cross a dimension of the parameter midway, which are a few.
struct Part {
  std::vector<Progression> along;
  Interval flat;           ///< First element, and one past the last.
  std::size_t origin = 0;  ///< Section, or sections + padding box.

  Index volume() const {
    Index product = 1;
    for (const auto& progression : along) {
      product *= progression.count;
    }
    return product;
  }
  bool is_box() const {
    return std::all_of(along.begin(), along.end(), [](const auto& p) { return p.step == 1; });
  }
  Box box() const {
    Box result{Dims::filled(along.size(), 0), Dims::filled(along.size(), 0)};
    for (std::size_t d = 0; d < along.size(); ++d) {
      result.lo[d] = along[d].first;
      result.hi[d] = along[d].last() + 1;
    }
    return result;
  }
};

bool meet(const Part& a, const Part& b) {
  for (std::size_t d = 0; d < a.along.size(); ++d) {
    if (!meet(a.along[d], b.along[d])) {
      return false;
    }
  }
  return true;
}

/// One dimension of a section that has more than one index.
struct Step {
  Index stride = 0;
  Index extent = 0;
};

/// The elements of one parameter that its sections and padding reach.
class Cover {
 public:
  explicit Cover(const WorkerParameter& parameter)
      : parameter_(parameter),
        strides_(row_major(parameter.shape)),
        elements_(element_count(parameter.shape)) {}

  void add_section(std::size_t number) {
    const Section& section = parameter_.sections[number];
    if (section.box.empty()) {
      return;
    }
    std::vector<Step> steps;
    Index base = section.offset;
    Index reach = 0;
    for (std::size_t d = 0; d < section.box.rank(); ++d) {
      const Index extent = section.box[d].size();
      Index stride = section.strides[d];
      if (extent < 2) {
        continue;
      }
      const Index span = checked_mul(stride, extent - 1, "offset inside a parameter");
      if (stride < 0) {
        base = checked_add(base, span, "offset inside a parameter");
        stride = -stride;
      }
      if (stride == 0) {
        bad_model(describe(number) + " puts several elements at one place; strides must not be 0");
      }
      reach = checked_add(reach, stride * (extent - 1), "offset inside a parameter");
      steps.push_back({stride, extent});
    }
    if (base < 0 || checked_add(base, reach, "offset inside a parameter") >= elements_) {
      bad_model(describe(number) + " reaches elements " + std::to_string(base) + " to " +
                std::to_string(base + reach) + " of a local shape " + to_string(parameter_.shape));
    }
    std::sort(steps.begin(), steps.end(),
              [](const Step& a, const Step& b) { return a.stride < b.stride; });
    std::vector<Step> merged;
    for (const Step& step : steps) {
      if (!merged.empty() && merged.back().stride * merged.back().extent == step.stride) {
        merged.back().extent *= step.extent;
      } else {
        merged.push_back(step);
      }
    }
    place(number, base, along_dimensions(base, merged));
  }

  void add_padding(std::size_t number) {
    const Box& box = parameter_.padding[number];
    if (box.rank() != parameter_.shape.size() || !Box::whole(parameter_.shape).contains(box)) {
      bad_model("padding " + to_string(box) + " of parameter '" + parameter_.name +
                "' leaves its local shape " + to_string(parameter_.shape));
    }
    if (!box.empty()) {
      Part part = single(0, parameter_.sections.size() + number);
      for (std::size_t d = 0; d < box.rank(); ++d) {
        part.along[d] = {box.lo[d], 1, box[d].size()};
      }
      keep(std::move(part));
    }
  }

  void require_exact() {
    std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) {
      return std::pair(a.flat.begin, a.origin) < std::pair(b.flat.begin, b.origin);
    });
    Index covered = 0;
    std::vector<const Part*> open;  // those that reach past the part at hand
    for (const Part& part : parts_) {
      std::erase_if(open, [&](const Part* p) { return p->flat.end <= part.flat.begin; });
      for (const Part* other : open) {
        if (meet(*other, part)) {
          bad_model(describe(part.origin) + " overlaps " + describe(other->origin) +
                    "; each element has one origin");
        }
      }
      open.push_back(&part);
      covered = checked_add(covered, part.volume());
    }
    if (covered != elements_) {
      bad_model("parameter '" + parameter_.name + "' of local shape " +
                to_string(parameter_.shape) + " has " + std::to_string(elements_ - covered) +
                " elements that nobody feeds" + hole() + "; sections and padding must cover it");
    }
  }

 private:
  std::string describe(std::size_t origin) const {
    const auto sections = parameter_.sections.size();
    if (origin < sections) {
      const Section& section = parameter_.sections[origin];
      return "section " + to_string(section.box) + " of tensor '" + section.tensor +
             "' in parameter '" + parameter_.name + "'";
    }
    return "padding " + to_string(parameter_.padding[origin - sections]) + " of parameter '" +
           parameter_.name + "'";
  }

  /// The first box that is missing, where boxes are all there is.
  std::string hole() const {
    std::vector<Box> missing{Box::whole(parameter_.shape)};
    for (const Part& part : parts_) {
      if (!part.is_box()) {
        return "";
      }
      std::vector<Box> rest;
      for (const Box& box : missing) {
        subtract(box, part.box(), rest);
      }
      missing = std::move(rest);
    }
    return missing.empty() ? "" : ", from " + to_string(missing.front()) + " on";
  }

  Part single(Index element, std::size_t origin) const {
    Part part;
    part.origin = origin;
    part.along.resize(parameter_.shape.size());
    for (std::size_t d = 0; d < part.along.size(); ++d) {
      part.along[d].first = element / strides_[d] % parameter_.shape[d];
    }
    return part;
  }

  void keep(Part part) {
    part.flat = {0, 1};
    for (std::size_t d = 0; d < part.along.size(); ++d) {
      part.flat.begin += part.along[d].first * strides_[d];
      part.flat.end += part.along[d].last() * strides_[d];
    }
    parts_.push_back(std::move(part));
  }

  /// The dimension of the parameter that neighbours at @p stride are along.
  std::size_t dimension_of(Index stride) const {
    std::size_t d = 0;
    while (parameter_.shape[d] == 1 || stride % strides_[d] != 0) {
      ++d;  // ends at the last dimension that is longer than 1: its stride is 1
    }
    return d;
  }

  /// The same with whole dimensions as steps of their own, so that few cross into the next.
  std::vector<Step> along_dimensions(Index base, const std::vector<Step>& steps) const {
    std::vector<Step> result;
    for (Step step : steps) {
      for (;;) {
        const std::size_t d = dimension_of(step.stride);
        const Index whole = parameter_.shape[d];
        const bool from_start = base / strides_[d] % whole == 0;
        if (step.stride != strides_[d] || !from_start || step.extent <= whole ||
            step.extent % whole != 0) {
          break;
        }
        result.push_back({step.stride, whole});
        step = {step.stride * whole, step.extent / whole};
      }
      result.push_back(step);
    }
    return result;
  }

  /// Puts the steps, innermost first, on dimensions of the parameter.
  void place(std::size_t origin, Index base, const std::vector<Step>& steps) {
    Part part = single(base, origin);
    for (std::size_t k = 0; k < steps.size(); ++k) {
      const auto [stride, extent] = steps[k];
      const std::size_t d = dimension_of(stride);
      const Index step = stride / strides_[d];
      Progression& along = part.along[d];
      if (along.count == 1 && step * (extent - 1) < parameter_.shape[d] - along.first) {
        along = {along.first, step, extent};
      } else if (step == 1 && k + 1 == steps.size() && along.count == 1) {
        place_run(part, d, extent);
        return;
      } else {
        auto rest = steps;
        rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(k));
        for (Index i = 0; i < extent; ++i) {
          place(origin, base + i * stride, rest);
        }
        return;
      }
    }
    keep(std::move(part));
  }

  /// A run of @p extent neighbours along dimension @p d that goes on in the dimensions before it.
  void place_run(const Part& part, std::size_t d, Index extent) {
    const Shape outer(std::span<const Index>(parameter_.shape.begin(), d + 1));
    const Strides strides = row_major(outer);
    Index first = 0;
    for (std::size_t i = 0; i <= d; ++i) {
      first += part.along[i].first * strides[i];
    }
    for (const Box& box : boxes_of_flat_range(outer, {first, first + extent})) {
      Part piece = part;
      for (std::size_t i = 0; i <= d; ++i) {
        piece.along[i] = {box.lo[i], 1, box[i].size()};
      }
      keep(std::move(piece));
    }
  }

  const WorkerParameter& parameter_;
  Strides strides_;
  Index elements_;
  std::vector<Part> parts_;
};

}  // namespace

std::string model_type_of(std::string_view config, const std::string& where) {
  boost::system::error_code failure;
  const auto parsed = boost::json::parse(config, failure);
  const auto* type =
      !failure && parsed.is_object() ? parsed.as_object().if_contains("model_type") : nullptr;
  if (type == nullptr || !type->is_string()) {
    bad_model(where + ": no JSON object with a 'model_type'; a config.json has one");
  }
  return std::string(type->as_string());
}

WorkerModels ModelFamily::workers(const Deployment& deployment, const Catalogue& checkpoint) const {
  WorkerModels models;
  for (Rank w = 0; w < deployment.workers; ++w) {
    const Rank twin = w % replica_workers(deployment);
    models.push_back(twin == w
                         ? std::make_shared<const WorkerModel>(worker(deployment, w, checkpoint))
                         : models[static_cast<std::size_t>(twin)]);
  }
  return models;
}

namespace {

using Tensors = std::unordered_map<std::string_view, const TensorInfo*>;

Tensors by_name(const Catalogue& checkpoint) {
  Tensors tensors(checkpoint.size());
  for (const TensorInfo& tensor : checkpoint) {
    tensors.emplace(tensor.name, &tensor);
  }
  return tensors;
}

using Parameters = std::unordered_map<std::string_view, const WorkerParameter*>;

void check_rewrites(const WorkerModel& model, const Parameters& parameters) {
  std::unordered_set<std::string_view> rewritten;
  for (const Rewrite& rewrite : model.rewrites) {
    for (const std::string& name : rewrite.parameters) {
      const auto found = parameters.find(name);
      if (found == parameters.end() || !found->second->same_as.empty() ||
          !found->second->kernel_form.empty()) {
        bad_model("parameter '" + name + "' cannot be " + rewrite.change +
                  ": the worker keeps none of that name in its plain form");
      }
      if (!rewritten.insert(name).second) {
        bad_model("parameter '" + name + "' is rewritten twice; one rewrite must do it all");
      }
    }
  }
}

void check_model(const WorkerModel& model, const Tensors& tensors) {
  Parameters parameters(model.parameters.size());
  for (const WorkerParameter& parameter : model.parameters) {
    if (!parameters.emplace(parameter.name, &parameter).second) {
      bad_model("parameter '" + parameter.name + "' stands twice in the worker's model");
    }
    Cover cover(parameter);
    for (std::size_t i = 0; i < parameter.sections.size(); ++i) {
      const Section& section = parameter.sections[i];
      const auto found = tensors.find(section.tensor);
      if (found == tensors.end()) {
        bad_model("parameter '" + parameter.name + "' needs tensor '" + section.tensor +
                  "', which the checkpoint lacks");
      }
      const Shape& shape = found->second->shape;
      if (section.box.rank() != shape.size() || section.strides.size() != shape.size() ||
          !Box::whole(shape).contains(section.box)) {
        bad_model("parameter '" + parameter.name + "' takes " + to_string(section.box) +
                  " of tensor '" + section.tensor + "', whose shape is " + to_string(shape));
      }
      cover.add_section(i);
    }
    for (std::size_t i = 0; i < parameter.padding.size(); ++i) {
      cover.add_padding(i);
    }
    cover.require_exact();
  }
  for (const WorkerParameter& parameter : model.parameters) {
    if (parameter.same_as.empty()) {
      continue;
    }
    const auto found = parameters.find(parameter.same_as);
    if (found == parameters.end() || !found->second->same_as.empty() ||
        found->second->shape != parameter.shape || found->second->dtype != parameter.dtype) {
      bad_model("parameter '" + parameter.name + "' must equal '" + parameter.same_as +
                "', which is no live parameter of its shape " + to_string(parameter.shape) +
                " and dtype " + std::string(to_string(parameter.dtype)));
    }
  }
  check_rewrites(model, parameters);
}

}  // namespace

void check_worker_model(const WorkerModel& model, const Catalogue& checkpoint) {
  check_model(model, by_name(checkpoint));
}

void check_worker_models(const WorkerModels& models, const Catalogue& checkpoint) {
  const Tensors tensors = by_name(checkpoint);
  std::unordered_set<const WorkerModel*> seen;
  for (const auto& model : models) {
    if (seen.insert(model.get()).second) {
      check_model(*model, tensors);
    }
  }
}

}  // namespace m2n
