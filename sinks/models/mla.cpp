// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sinks/models/mla.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/tensor/cast.hpp"
#include "core/tensor/requantise.hpp"

namespace m2n::models {
namespace {

/// kv_b_proj of a worker, element by element at the derived tensor's dtype.
class Matrix {
 public:
  Matrix(std::span<const ParameterView> inputs, Index block)
      : weight_(inputs[0]), block_(block), columns_(inputs[0].shape[1]) {
    if (inputs.size() > 1) {
      scales_ = inputs[1].data;
      scale_columns_ = inputs[1].shape[1];
    }
  }

  std::size_t item() const { return scales_ == nullptr ? bytes_of(weight_.dtype) : 2; }

  void copy(Index row, Index column, std::byte* out) const {
    const auto element = static_cast<std::size_t>(row * columns_ + column);
    if (scales_ == nullptr) {
      std::memcpy(out, weight_.data + element * item(), item());
      return;
    }
    float scale = 0;
    const Index at = row / block_ * scale_columns_ + column / block_;
    std::memcpy(&scale, scales_ + static_cast<std::size_t>(at) * sizeof scale, sizeof scale);
    const auto bits = std::to_integer<std::uint8_t>(weight_.data[element]);
    const std::uint16_t value = bf16_from_f32(f32_from_f8_e4m3(bits) * scale);
    std::memcpy(out, &value, sizeof value);
  }

 private:
  ParameterView weight_;
  const std::byte* scales_ = nullptr;
  Index scale_columns_ = 0;
  Index block_;
  Index columns_;
};

void absorb(const Matrix& matrix, const MlaSizes& s, bool keys, std::byte* out) {
  for (Index head = 0; head < s.heads; ++head) {
    const Index first = head * (s.nope + s.value) + (keys ? 0 : s.nope);
    for (Index i = 0; i < (keys ? s.nope : s.rank); ++i) {
      for (Index j = 0; j < (keys ? s.rank : s.value); ++j, out += matrix.item()) {
        matrix.copy(first + (keys ? i : j), keys ? j : i, out);
      }
    }
  }
}

}  // namespace

void derive_absorbed(WorkerModel& model, const std::string& attention, const MlaSizes& sizes,
                     Engine engine) {
  const auto find = [&](const std::string& name) {
    return std::find_if(model.parameters.begin(), model.parameters.end(),
                        [&](const WorkerParameter& p) { return p.name == name; });
  };
  const std::string weight = attention + "kv_b_proj.weight";
  if (find(weight) == model.parameters.end()) {
    return;  // another stage's
  }
  std::vector<std::string> inputs = {weight};
  std::optional<DType> dtype;
  if (find(weight + "_scale_inv") != model.parameters.end()) {
    inputs.push_back(weight + "_scale_inv");
    dtype = DType::bf16;
  }
  const auto add = [&](const char* name, const Shape& shape, bool keys) {
    model.derived.push_back({attention + name, dtype, shape, inputs,
                             [sizes, keys](std::span<const ParameterView> in, std::byte* out) {
                               absorb(Matrix(in, sizes.block), sizes, keys, out);
                             }});
  };
  const bool vllm = engine == Engine::vllm;
  add(vllm ? "W_UK_T" : "w_kc", {sizes.heads, sizes.nope, sizes.rank}, true);
  add(vllm ? "W_UV" : "w_vc", {sizes.heads, sizes.rank, sizes.value}, false);
}

}  // namespace m2n::models
