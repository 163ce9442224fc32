// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/changing.hpp"

#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/api/memory.hpp"

namespace m2n {
namespace {

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
    change_values(info.shape, box, info.dtype, 0, version_, data, strides);
  }
  std::optional<Formula> formula(std::string_view tensor) const override {
    std::optional<Formula> formula = base_.formula(tensor);
    if (formula && formula->version != 0) {
      return {};  // changed twice
    }
    if (formula) {
      formula->version = version_;
    }
    return formula;
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
    boxes_.clear();
    std::set<std::tuple<std::byte*, Strides, Box>> done;  // parameters that share their bytes
    for (std::size_t i = 0; i < loans.size(); ++i) {
      const ParamSpec& param = base_->params()[i];
      for (const RankPiece& entry : param.side.layout->pieces_of(rank_)) {
        const LocalBuffer& buffer = loans[i].slots[entry.piece.view.buffer];
        const LocalBuffer first = buffer.from(entry.piece.view.offset_bytes);
        if (done.emplace(first.data, entry.piece.view.strides, entry.piece.box).second) {
          boxes_.push_back(
              {param.shape, entry.piece.box, param.dtype, first, entry.piece.view.strides});
        }
      }
    }
    change(boxes_, version_, version);
    version_ = version;
    return loans;
  }

 private:
  std::unique_ptr<WeightSource> base_;
  Rank rank_;
  std::uint64_t version_ = 0;
  std::vector<PlacedBox> boxes_;  // of one borrow()
};

}  // namespace

std::unique_ptr<TensorValues> make_changed_values(const TensorValues& base, std::uint64_t version) {
  return std::make_unique<ChangedValues>(base, version);
}

std::unique_ptr<WeightSource> make_changing_source(std::unique_ptr<WeightSource> base, Rank rank) {
  return std::make_unique<ChangingSource>(std::move(base), rank);
}

}  // namespace m2n
