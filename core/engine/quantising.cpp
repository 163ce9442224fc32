// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/quantising.hpp"

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/api/memory.hpp"
#include "core/error.hpp"
#include "core/plan/quantise.hpp"
#include "core/tensor/block_scales.hpp"
#include "core/tensor/blocks.hpp"
#include "core/tensor/copy_quantised.hpp"

namespace m2n {
namespace {

/// Elements that are read at a time for their scales, about.
constexpr Index kReadElements = 1 << 22;

/// The elements of the blocks of @p scales.
Box elements_of(const Box& scales, const Shape& shape, const Dims& blocks) {
  Box box;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    box.lo.push_back(scales.lo[d] * blocks[d]);
    box.hi.push_back(std::min(shape[d], scales.hi[d] * blocks[d]));
  }
  return box;
}

class QuantisingSource final : public WeightSource {
 public:
  QuantisingSource(std::unique_ptr<WeightSource> base, Rank rank, const Quantised& quantised)
      : base_(std::move(base)), rank_(rank) {
    std::set<std::string_view> offered;
    for (const ParamSpec& param : base_->params()) {
      offered.insert(param.name);
    }
    LayoutTable table;
    for (const ParamSpec& param : base_->params()) {
      params_.push_back(param);
      const auto at = quantised.find(param.name);
      if (at == quantised.end()) {
        continue;
      }
      const auto& [blocks, scales] = at->second;
      params_.back().quantise = at->second;
      if (!offered.contains(scales)) {
        params_.push_back({scales,
                           DType::f32,
                           scale_shape(param.shape, blocks),
                           {table.intern(scales_layout(*param.side.layout, blocks)), {scales}},
                           {}});
        own_.insert(params_.size() - 1);
      }
    }
    std::unordered_map<std::string_view, std::size_t> numbers;
    for (std::size_t i = 0; i < params_.size(); ++i) {
      numbers.emplace(params_[i].name, i);
    }
    for (std::size_t i = 0; i < params_.size(); ++i) {
      if (params_[i].quantise) {
        pairs_.emplace_back(i, numbers.at(params_[i].quantise->scales));
      }
    }
  }

  std::string_view name() const noexcept override { return base_->name(); }
  const std::vector<ParamSpec>& params() const override { return params_; }

  std::vector<ParamLoan> borrow(std::uint64_t version) override {
    std::vector<ParamLoan> lent = base_->borrow(version);
    if (own_loans_.empty()) {
      allocate(place_of(lent));
    }
    std::vector<ParamLoan> loans;
    loans.reserve(params_.size());
    auto next = lent.begin();
    auto next_own = own_loans_.begin();
    for (std::size_t i = 0; i < params_.size(); ++i) {
      if (own_.contains(i)) {
        loans.push_back(*next_own++);
      } else if (next != lent.end()) {
        loans.push_back(std::move(*next++));
      }
    }
    loans.insert(loans.end(), std::make_move_iterator(next), std::make_move_iterator(lent.end()));
    if (loans.size() == params_.size()) {  // otherwise whoever binds the loans says what is missing
      compute(loans);
    }
    return loans;
  }

 private:
  static MemoryPlace place_of(const std::vector<ParamLoan>& loans) {
    for (const ParamLoan& loan : loans) {
      for (const LocalBuffer& buffer : loan.slots) {
        if (buffer.data != nullptr) {
          return {buffer.space, buffer.device};
        }
      }
    }
    return {};
  }

  /// The scales of this rank.
  void allocate(const MemoryPlace& place) {
    const std::uint64_t align = weight_alignment(place.space);
    const auto bytes_of_scales = [&](std::size_t i) {
      std::uint64_t bytes = 0;
      for (const RankPiece& entry : params_[i].side.layout->pieces_of(rank_)) {
        bytes += static_cast<std::uint64_t>(entry.piece.box.volume()) * sizeof(float);
      }
      return bytes;
    };
    std::uint64_t bytes = 0;
    for (const std::size_t i : own_) {
      bytes += bytes_of_scales(i) + align - 1;
    }
    if (bytes > 0) {
      arena_ = memory_of(place.space).reserve(bytes, place.device);
    }
    for (const std::size_t i : own_) {
      const ParamSpec& param = params_[i];
      const std::uint64_t needed = bytes_of_scales(i);
      own_loans_.push_back({param.name,
                            param.dtype,
                            param.shape,
                            {needed == 0 ? LocalBuffer{} : arena_->take(needed, align)}});
    }
  }

  void compute(const std::vector<ParamLoan>& loans) const {
    std::map<MemorySpace, std::vector<ScalesOf>> by_space;
    for (const auto& [weight, holder] : pairs_) {
      const ParamSpec& param = params_[weight];
      const Dims& blocks = param.quantise->blocks;
      for (const auto& [rank, piece] : param.side.layout->pieces_of(rank_)) {
        const Box box = scale_box(piece.box, blocks);
        const Piece* const scales = scales_piece(*params_[holder].side.layout, rank, box);
        if (scales == nullptr) {
          continue;  // no plan takes this
        }
        const View to = narrow(*scales, box, sizeof(float));
        const LocalBuffer& buffer = loans[weight].slots.at(piece.view.buffer);
        by_space[buffer.space].push_back(
            {{param.shape, piece.box, param.dtype, buffer.from(piece.view.offset_bytes),
              piece.view.strides},
             {blocks, loans[holder].slots.at(to.buffer).from(to.offset_bytes), to.strides}});
      }
    }
    for (const auto& [space, boxes] : by_space) {
      memory_of(space).block_scales(boxes);
    }
  }

  std::unique_ptr<WeightSource> base_;
  Rank rank_;
  std::vector<ParamSpec> params_;
  std::set<std::size_t> own_;                               // parameters that base does not offer
  std::vector<std::pair<std::size_t, std::size_t>> pairs_;  // weight, scales
  std::unique_ptr<Arena> arena_;
  std::vector<ParamLoan> own_loans_;
};

class QuantisedValues final : public TensorValues {
 public:
  QuantisedValues(std::shared_ptr<const TensorValues> base, const Quantised& quantised)
      : base_(std::move(base)) {
    std::set<std::string_view> there;
    for (const TensorInfo& info : base_->catalogue()) {
      there.insert(info.name);
    }
    for (const TensorInfo& info : base_->catalogue()) {
      catalogue_.push_back(info);
      const auto at = quantised.find(info.name);
      if (at == quantised.end()) {
        continue;
      }
      catalogue_.back().dtype = DType::f8_e4m3;
      Weight& weight = weights_[info.name];
      weight.info = &info;
      weight.blocks = at->second.blocks;
      weight_of_.emplace(at->second.scales, &weight);
      if (!there.contains(at->second.scales)) {
        catalogue_.push_back(
            {at->second.scales, DType::f32, scale_shape(info.shape, weight.blocks)});
      }
    }
  }

  std::string_view name() const noexcept override { return base_->name(); }
  const Catalogue& catalogue() const override { return catalogue_; }

  void read(std::string_view tensor, const Box& box, std::byte* data,
            const Strides& strides) const override {
    if (const auto weight = weights_.find(tensor); weight != weights_.end()) {
      quantise(weight->second, box, data, strides);
    } else if (const auto at = weight_of_.find(tensor); at != weight_of_.end()) {
      const Shape shape = scale_shape(at->second->info->shape, at->second->blocks);
      const Strides compact = row_major(shape);
      copy_region(
          {box.extents(), compact, strides, DType::f32, DType::f32},
          scales_of(*at->second) +
              element_offset(Dims::filled(shape.size(), 0), box.lo, compact) * Index{sizeof(float)},
          data);
    } else {
      base_->read(tensor, box, data, strides);
    }
  }

  std::optional<Formula> formula(std::string_view tensor) const override {
    return weights_.contains(tensor) || weight_of_.contains(tensor) ? std::nullopt
                                                                    : base_->formula(tensor);
  }

 private:
  struct Weight {
    const TensorInfo* info = nullptr;
    Dims blocks;
    mutable std::once_flag computed;
    mutable std::vector<std::byte> scales;  ///< Row-major, of the whole tensor.
  };

  const std::byte* scales_of(const Weight& weight) const {
    std::call_once(weight.computed, [&] {
      const auto& [name, dtype, shape] = *weight.info;
      const Shape scales = scale_shape(shape, weight.blocks);
      const Strides compact = row_major(scales);
      weight.scales.resize(static_cast<std::size_t>(element_count(scales)) * sizeof(float));
      const Index blocks_at_once = std::max<Index>(1, kReadElements / element_count(weight.blocks));
      std::vector<std::byte> elements;
      for_each_block(Box::whole(scales), blocks_at_once, [&](const Box& part) {
        const Box box = elements_of(part, shape, weight.blocks);
        elements.resize(static_cast<std::size_t>(box.volume()) * bytes_of(dtype));
        base_->read(name, box, elements.data(), row_major(box.extents()));
        block_scales(box, weight.blocks, dtype, elements.data(), row_major(box.extents()),
                     weight.scales.data() +
                         element_offset(Dims::filled(scales.size(), 0), part.lo, compact) *
                             Index{sizeof(float)},
                     compact);
      });
    });
    return weight.scales.data();
  }

  void quantise(const Weight& weight, const Box& box, std::byte* data,
                const Strides& strides) const {
    const auto& [name, dtype, shape] = *weight.info;
    const std::byte* const scales = scales_of(weight);
    const Strides compact = row_major(box.extents());
    std::vector<std::byte> elements(static_cast<std::size_t>(box.volume()) * bytes_of(dtype));
    base_->read(name, box, elements.data(), compact);
    for (const QuantisedPart& part :
         quantised_parts(box, dtype, compact, strides, weight.blocks,
                         row_major(scale_shape(shape, weight.blocks)))) {
      copy_region(
          part.copy, elements.data() + part.source_offset * static_cast<Index>(bytes_of(dtype)),
          data + part.destination_offset, false, scales + part.scale_offset * Index{sizeof(float)});
    }
  }

  std::shared_ptr<const TensorValues> base_;
  Catalogue catalogue_;
  std::map<std::string, Weight, std::less<>> weights_;
  std::map<std::string, const Weight*, std::less<>> weight_of_;  // by the name of its scales
};

}  // namespace

Quantised quantised_weights(const Catalogue& catalogue, const Dims& blocks) {
  std::unordered_map<std::string_view, const TensorInfo*> by_name;
  for (const TensorInfo& info : catalogue) {
    by_name.emplace(info.name, &info);
  }
  Quantised out;
  for (const TensorInfo& info : catalogue) {
    const std::string name = info.name + "_scale_inv";
    const auto scales = by_name.find(name);
    if (info.dtype != DType::f8_e4m3 || scales == by_name.end() ||
        scales->second->dtype != DType::f32) {
      continue;
    }
    if (info.shape.size() < blocks.size()) {
      throw Error(Errc::usage, "tensor '" + info.name + "' has shape " + to_string(info.shape) +
                                   "; blocks " + to_string(blocks) + " need as many dimensions");
    }
    Dims extents = Dims::filled(info.shape.size() - blocks.size(), 1);
    for (const Index extent : blocks) {
      extents.push_back(extent);
    }
    if (scale_shape(info.shape, extents) != scales->second->shape) {
      throw Error(Errc::usage, "tensor '" + name + "' has shape " +
                                   to_string(scales->second->shape) + "; blocks " +
                                   to_string(blocks) + " of " + to_string(info.shape) + " have " +
                                   to_string(scale_shape(info.shape, extents)));
    }
    out.emplace(info.name, Quantise{extents, name});
  }
  if (out.empty()) {
    throw Error(Errc::usage,
                "no tensor of the model is f8_e4m3 with f32 scales in '<name>_scale_inv'; expected "
                "a model whose checkpoint is quantised in blocks");
  }
  return out;
}

Catalogue trained_catalogue(const Catalogue& checkpoint, const Quantised& quantised, DType dtype) {
  std::set<std::string_view> scales;
  for (const auto& [name, quantise] : quantised) {
    scales.insert(quantise.scales);
  }
  Catalogue out;
  for (const TensorInfo& info : checkpoint) {
    if (!scales.contains(info.name)) {
      out.push_back(info);
      if (quantised.contains(info.name)) {
        out.back().dtype = dtype;
      }
    }
  }
  return out;
}

std::unique_ptr<WeightSource> make_quantising_source(std::unique_ptr<WeightSource> base, Rank rank,
                                                     const Quantised& quantised) {
  return std::make_unique<QuantisingSource>(std::move(base), rank, quantised);
}

std::unique_ptr<TensorValues> make_quantised_values(std::shared_ptr<const TensorValues> base,
                                                    const Quantised& quantised) {
  return std::make_unique<QuantisedValues>(std::move(base), quantised);
}

}  // namespace m2n
