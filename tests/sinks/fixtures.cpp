// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/sinks/fixtures.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "core/tensor/cast.hpp"

namespace m2n {
void add_sink_hdf5(Registries& registries);
void add_sink_inplace(Registries& registries);
void add_sink_load_weights(Registries& registries);
void add_sink_null(Registries& registries);
void add_sink_shadow(Registries& registries);
void add_model_bert(Registries& registries);
void add_model_deepseek(Registries& registries);
void add_model_gemma3(Registries& registries);
void add_model_gpt2(Registries& registries);
void add_model_gpt_oss(Registries& registries);
void add_model_llama(Registries& registries);
void add_model_mixtral(Registries& registries);
void add_model_qwen3_moe(Registries& registries);
}  // namespace m2n

namespace m2n::testing {
namespace {

/// Calls @p visit with every index of @p box.
void each_index(const Box& box, const std::function<void(const Dims&)>& visit) {
  if (box.empty()) {
    return;
  }
  Dims at = box.lo;
  for (;;) {
    visit(at);
    std::size_t d = box.rank();
    while (d > 0 && ++at[d - 1] == box.hi[d - 1]) {
      at[d - 1] = box.lo[d - 1];
      --d;
    }
    if (d == 0) {
      return;
    }
  }
}

Index flat_index(const Shape& shape, const Dims& at) {
  Index flat = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    flat = flat * shape[d] + at[d];
  }
  return flat;
}

}  // namespace

Registries house_registries() {
  Registries registries;
  add_sink_hdf5(registries);
  add_sink_inplace(registries);
  add_sink_load_weights(registries);
  add_sink_null(registries);
  add_sink_shadow(registries);
  for (const auto add :
       {add_model_bert, add_model_deepseek, add_model_gemma3, add_model_gpt2, add_model_gpt_oss,
        add_model_llama, add_model_mixtral, add_model_qwen3_moe}) {
    add(registries);
  }
  return registries;
}

const TensorInfo& Checkpoint::info(const std::string& name) const {
  for (const TensorInfo& tensor : catalogue) {
    if (tensor.name == name) {
      return tensor;
    }
  }
  throw std::logic_error("no tensor " + name);
}

Checkpoint make_checkpoint(const Catalogue& catalogue, int round) {
  Checkpoint checkpoint{catalogue, {}};
  std::uint64_t start = static_cast<std::uint64_t>(round) * 12345;
  for (const TensorInfo& tensor : catalogue) {
    const std::uint64_t item = bytes_of(tensor.dtype);
    const auto count = static_cast<std::uint64_t>(element_count(tensor.shape));
    std::vector<std::byte> bytes(count * item);
    for (std::uint64_t i = 0; i < count; ++i) {
      if (tensor.dtype == DType::f32) {  // whole numbers: finite, different, and exact in f32
        const auto value = static_cast<float>(start + i + 1);
        std::memcpy(bytes.data() + i * item, &value, item);
      } else {  // small patterns: finite in every 16-bit type
        const std::uint64_t bits = (start + i) % 0x7000 + 1;
        std::memcpy(bytes.data() + i * item, &bits, item);
      }
    }
    start += count;
    checkpoint.bytes.emplace(tensor.name, std::move(bytes));
  }
  return checkpoint;
}

std::vector<ParamSpec> specs_of(const Catalogue& catalogue) {
  std::vector<ParamSpec> specs;
  for (const TensorInfo& tensor : catalogue) {
    specs.push_back({tensor.name, tensor.dtype, tensor.shape, {}});
  }
  return specs;
}

std::shared_ptr<const Models> models_of(const ModelFamily& family, Rank workers, Index tp,
                                        const Catalogue& checkpoint) {
  auto models = std::make_shared<Models>();
  for (Rank w = 0; w < workers; ++w) {
    models->push_back(family.worker({workers, tp}, w, checkpoint));
  }
  return models;
}

std::unique_ptr<ModelFamily> make_model(const std::string& name, const Options& options) {
  return house_registries().models.create(name, {options});
}

std::shared_ptr<const WorkerModels> each_shared(const std::shared_ptr<const Models>& models) {
  auto all = std::make_shared<WorkerModels>();
  for (const WorkerModel& model : *models) {
    all->emplace_back(models, &model);
  }
  return all;
}

std::unique_ptr<WeightSink> make_sink(const std::string& name,
                                      const std::shared_ptr<const Models>& models, Rank worker,
                                      const Options& options, Rank first_worker) {
  SinkContext context;
  context.options = options;
  context.rank = first_worker + worker;
  context.first_worker = first_worker;
  context.models = each_shared(models);
  return house_registries().sinks.create(name, context);
}

std::optional<FullTensor> CheckpointStream::next() {
  if (at_ == names_.size()) {
    return {};
  }
  const TensorInfo& tensor = checkpoint_.info(names_[at_++]);
  return FullTensor{tensor.name, tensor.dtype, tensor.shape,
                    checkpoint_.bytes.at(tensor.name).data()};
}

std::vector<std::string> fallback_names(const std::vector<Resolution>& resolutions,
                                        const Catalogue& catalogue) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < resolutions.size(); ++i) {
    if (resolutions[i].mode == Mode::fallback) {
      names.push_back(catalogue[i].name);
    }
  }
  return names;
}

void write_direct(WeightSink& sink, const std::vector<Resolution>& resolutions, Rank rank,
                  const Checkpoint& checkpoint, std::size_t count) {
  const auto loans = sink.lend();
  if (loans.size() != checkpoint.catalogue.size()) {
    throw std::logic_error("one loan a parameter");
  }
  for (std::size_t i = 0; i < std::min(count, loans.size()); ++i) {
    const TensorInfo& tensor = checkpoint.catalogue[i];
    const Layout& layout = *resolutions[i].side.layout;
    if (resolutions[i].mode == Mode::fallback) {
      if (!loans[i].slots.empty()) {
        throw std::logic_error("a tensor that fell back has no slots");
      }
      continue;
    }
    const std::uint64_t from_item = bytes_of(tensor.dtype);
    const std::uint64_t to_item = bytes_of(layout.dtype());
    for (const RankPiece& held : layout.pieces_of(rank)) {
      const LocalBuffer& slot = loans[i].slots.at(held.piece.view.buffer);
      each_index(held.piece.box, [&](const Dims& at) {
        Index offset = 0;
        for (std::size_t d = 0; d < at.size(); ++d) {
          offset += (at[d] - held.piece.box.lo[d]) * held.piece.view.strides[d];
        }
        const auto byte =
            held.piece.view.offset_bytes + static_cast<std::uint64_t>(offset) * to_item;
        if (byte + to_item > slot.bytes) {
          throw std::logic_error("a view leaves its buffer");
        }
        const auto flat = static_cast<std::uint64_t>(flat_index(tensor.shape, at));
        cast_elements(tensor.dtype, checkpoint.bytes.at(tensor.name).data() + flat * from_item,
                      layout.dtype(), slot.data + byte, 1);
      });
    }
  }
}

void run_round(WeightSink& sink, const std::vector<Resolution>& resolutions, Rank rank,
               const Checkpoint& checkpoint, std::uint64_t version) {
  sink.begin(version);
  write_direct(sink, resolutions, rank, checkpoint);
  const auto names = fallback_names(resolutions, checkpoint.catalogue);
  if (!names.empty()) {
    CheckpointStream stream(checkpoint, names);
    sink.load_weights(stream);
  }
  sink.commit(version);
}

std::map<std::string, std::vector<std::byte>> live_bytes(WeightSink& sink) {
  std::map<std::string, std::vector<std::byte>> result;
  for (const LiveParameter& parameter : sink.live()) {
    result.emplace(parameter.name,
                   std::vector<std::byte>(parameter.buffer.data,
                                          parameter.buffer.data + parameter.buffer.bytes));
  }
  return result;
}

std::vector<std::string> origins(const WorkerParameter& parameter, const Catalogue& checkpoint) {
  std::vector<std::string> result(static_cast<std::size_t>(element_count(parameter.shape)));
  const auto put = [&](Index at, const std::string& origin) {
    auto& place = result.at(static_cast<std::size_t>(at));
    if (!place.empty()) {
      throw std::logic_error(parameter.name + " has two origins at " + std::to_string(at));
    }
    place = origin;
  };
  for (const Section& section : parameter.sections) {
    const auto tensor =
        std::find_if(checkpoint.begin(), checkpoint.end(),
                     [&](const TensorInfo& info) { return info.name == section.tensor; });
    if (tensor == checkpoint.end() || !Box::whole(tensor->shape).contains(section.box)) {
      throw std::logic_error("section outside its tensor");
    }
    each_index(section.box, [&](const Dims& at) {
      Index offset = section.offset;
      std::string name = section.tensor + "[";
      for (std::size_t d = 0; d < at.size(); ++d) {
        offset += (at[d] - section.box.lo[d]) * section.strides[d];
        name += (d == 0 ? "" : ",") + std::to_string(at[d]);
      }
      put(offset, name + "]");
    });
  }
  for (const Box& box : parameter.padding) {
    if (!Box::whole(parameter.shape).contains(box)) {
      throw std::logic_error("padding outside");
    }
    each_index(box, [&](const Dims& at) { put(flat_index(parameter.shape, at), "0"); });
  }
  if (std::find(result.begin(), result.end(), "") != result.end()) {
    throw std::logic_error(parameter.name + " has an element that nobody feeds");
  }
  return result;
}

const WorkerParameter& parameter_of(const WorkerModel& model, const std::string& name) {
  for (const WorkerParameter& parameter : model.parameters) {
    if (parameter.name == name) {
      return parameter;
    }
  }
  throw std::logic_error("no parameter " + name);
}

Thrown thrown_by(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return {true, error.code(), error.what()};
  }
  return {};
}

}  // namespace m2n::testing
