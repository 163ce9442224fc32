// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/changing.hpp"

#include <cstring>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/error.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

/// Bits of an element that may flip.
std::uint64_t mask_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::boolean:
    case DType::f4:
    case DType::f6_e2m3:
    case DType::f6_e3m2:
    case DType::f8_e8m0:
      return 1;
    case DType::f8_e5m2:
    case DType::f8_e5m2fnuz:
      return 0x3;
    case DType::f8_e4m3:
    case DType::f8_e4m3fnuz:
      return 0x7;
    case DType::f16:
      return 0x3ff;
    case DType::bf16:
      return 0x7f;
    case DType::f32:
      return 0x7fffff;
    case DType::c64:
      return 0x007fffff007fffff;
    case DType::f64:
      return 0xfffffffffffff;
    case DType::u8:
    case DType::i8:
    case DType::i16:
    case DType::u16:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64:
      return ~std::uint64_t{0};
  }
  return 0;
}

/// Flips what turns version @p from into version @p to, element by element.
void flip(const Shape& shape, const Box& box, DType dtype, std::uint64_t from, std::uint64_t to,
          std::byte* data, const Strides& strides) {
  if (box.empty()) {
    return;
  }
  const auto item = static_cast<std::size_t>(bytes_of(dtype));
  const Strides global = row_major(shape);
  Dims at = box.lo;
  for (;;) {
    Index index = 0;
    Index offset = 0;
    for (std::size_t d = 0; d < box.rank(); ++d) {
      index += at[d] * global[d];
      offset += (at[d] - box.lo[d]) * strides[d];
    }
    const auto row = box.rank() == 0 ? Index{1} : box[box.rank() - 1].size();
    const Index step = box.rank() == 0 ? 1 : strides[box.rank() - 1];
    for (Index i = 0; i < row; ++i) {
      std::byte* const element = data + (offset + i * step) * static_cast<Index>(item);
      const auto number = static_cast<std::uint64_t>(index + i);
      std::uint64_t bits = 0;
      std::memcpy(&bits, element, item);
      bits ^= changed_bits(dtype, from, number) ^ changed_bits(dtype, to, number);
      std::memcpy(element, &bits, item);
    }
    std::size_t d = box.rank() == 0 ? 0 : box.rank() - 1;
    while (d > 0 && ++at[d - 1] == box.hi[d - 1]) {
      --d;
      at[d] = box.lo[d];
    }
    if (d == 0) {
      return;
    }
  }
}

class ChangedValues final : public TensorValues {
 public:
  ChangedValues(const TensorValues& base, std::uint64_t version) : base_(base), version_(version) {
    for (const TensorInfo& info : base.catalogue()) {
      by_name_.emplace(info.name, &info);
    }
  }

  std::string_view name() const noexcept override { return base_.name(); }
  const Catalogue& catalogue() const override { return base_.catalogue(); }
  void read(std::string_view tensor, const Box& box, std::byte* data,
            const Strides& strides) const override {
    base_.read(tensor, box, data, strides);
    const TensorInfo& info = *by_name_.at(tensor);
    flip(info.shape, box, info.dtype, 0, version_, data, strides);
  }

 private:
  const TensorValues& base_;
  std::uint64_t version_;
  std::unordered_map<std::string_view, const TensorInfo*> by_name_;
};

class ChangingSource final : public WeightSource {
 public:
  ChangingSource(std::unique_ptr<WeightSource> base, Rank rank)
      : base_(std::move(base)), rank_(rank) {}

  std::string_view name() const noexcept override { return base_->name(); }
  const std::vector<ParamSpec>& params() const override { return base_->params(); }

  std::vector<ParamLoan> borrow(std::uint64_t version) override {
    std::vector<ParamLoan> loans = base_->borrow(version);
    std::set<std::tuple<std::byte*, Strides, Box>> done;  // parameters that share their bytes
    for (std::size_t i = 0; i < loans.size(); ++i) {
      const ParamSpec& param = base_->params()[i];
      for (const RankPiece& entry : param.side.layout->pieces_of(rank_)) {
        const LocalBuffer& buffer = loans[i].slots[entry.piece.view.buffer];
        if (buffer.space != MemorySpace::host) {
          throw Error(Errc::unavailable, "parameter '" + param.name +
                                             "' lies in device memory, and only weights in host "
                                             "memory can be changed from round to round");
        }
        std::byte* const data = buffer.data + entry.piece.view.offset_bytes;
        if (done.emplace(data, entry.piece.view.strides, entry.piece.box).second) {
          flip(param.shape, entry.piece.box, param.dtype, version_, version, data,
               entry.piece.view.strides);
        }
      }
    }
    version_ = version;
    return loans;
  }

 private:
  std::unique_ptr<WeightSource> base_;
  Rank rank_;
  std::uint64_t version_ = 0;
};

}  // namespace

std::uint64_t changed_bits(DType dtype, std::uint64_t version, std::uint64_t index) noexcept {
  if (version == 0) {
    return 0;
  }
  const std::uint64_t bits = mix64(version * 0x9e3779b97f4a7c15ULL + index) + version;
  return bits & mask_of(dtype);
}

std::unique_ptr<TensorValues> make_changed_values(const TensorValues& base, std::uint64_t version) {
  return std::make_unique<ChangedValues>(base, version);
}

std::unique_ptr<WeightSource> make_changing_source(std::unique_ptr<WeightSource> base, Rank rank) {
  return std::make_unique<ChangingSource>(std::move(base), rank);
}

}  // namespace m2n
