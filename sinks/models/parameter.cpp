// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sinks/models/parameter.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.hpp"
#include "sinks/fail.hpp"

namespace m2n::models {
namespace {

/// What the worker takes along the dimension that is cut, and its room for it there. Runs follow
/// one another; there are several only where an element is repeated.
struct Taken {
  std::vector<Interval> runs;
  Index room = 0;

  Index filled() const {
    return std::accumulate(runs.begin(), runs.end(), Index{0},
                           [](Index sum, const Interval& run) { return sum + run.size(); });
  }
};

class Maker {
 public:
  explicit Maker(const Making& making)
      : making_(making), row_(making.row), dim_(row_.cut == Cut::row ? 1 : 0) {}

  Made make() {
    result_.name = making_.name;
    result_.keep_dtype = row_.keep_dtype;
    result_.plain = row_.plain && row_.parts.size() == 1 && row_.experts == Experts::none &&
                    (row_.cut == Cut::whole || row_.cut == Cut::column || row_.cut == Cut::row);
    std::vector<Taken> taken;
    std::vector<Index> rooms;
    Index total = 0;
    for (const Part& part : row_.parts) {
      block_ = part.block;
      taken.push_back(take(part));
      rooms.push_back(taken.back().room);
      total = checked_add(total, taken.back().room);
    }
    shape_ = local_matrix(row_.parts.front());
    if (!shape_.empty()) {
      shape_[dim_] = total;
    }
    strides_ = row_major(shape_);
    slot_elements_ = element_count(shape_);
    Index at = 0;
    for (std::size_t i = 0; i < row_.parts.size(); ++i) {
      place(row_.parts[i], taken[i], at);
      at += taken[i].room;
    }
    finish();
    return {std::move(result_), std::move(rooms), block_};
  }

 private:
  /// Extents of the part's matrix, in elements of the matrix that a block scales.
  Shape matrix(const Part& part) const {
    Shape shape = part.shape;
    if (row_.experts == Experts::stacked) {
      shape = Shape(std::span<const Index>(shape.begin() + 1, shape.size() - 1));
    }
    if (part.transposed && shape.size() == 2) {
      std::swap(shape[0], shape[1]);
    }
    return shape;
  }

  /// The same in elements of the tensor. Scalars that share a parameter are a list.
  Shape local_matrix(const Part& part) const {
    Shape shape = matrix(part);
    for (Index& extent : shape) {
      extent = ceil_div(extent, part.block);
    }
    const bool list = row_.parts.size() > 1 || row_.experts != Experts::none;
    return shape.empty() && list ? Shape{1} : shape;
  }

  const std::string& name_of(const Part& part) const {
    return making_.tensor(part, making_.slots.empty() ? 0 : making_.slots.front()).name;
  }

  std::string workers_text() const {
    return std::to_string(making_.share.workers) + " tensor-parallel workers do not divide";
  }

  /// The worker's units, in matrix elements, and the most that any worker has.
  std::pair<Interval, Index> units_of(const Part& part, Index extent) {
    const auto [workers, worker] = making_.share;
    const Units& units = part.units;
    if (units.count < 1 || extent % units.count != 0) {
      fail("dimension of " + std::to_string(extent) + " of tensor '" + name_of(part) +
           "' is not made of " + std::to_string(units.count) + " " + units.name);
    }
    const Index length = extent / units.count;
    if (units.count % workers == 0) {
      const Index mine = units.count / workers * length;
      return {{worker * mine, (worker + 1) * mine}, mine};
    }
    result_.plain = false;
    if (units.repeat && workers % units.count == 0) {
      const Index unit = worker / (workers / units.count);
      return {{unit * length, (unit + 1) * length}, length};
    }
    if (units.uneven) {
      const Interval mine = chunk(units.count, workers, worker);
      return {{mine.begin * length, mine.end * length}, ceil_div(units.count, workers) * length};
    }
    fail(units.name + " is " + std::to_string(units.count) + " in this " + making_.model +
         " model, which " + workers_text() + (units.repeat ? " or are a multiple of" : "") +
         " (tensor '" + name_of(part) + "')");
  }

  Taken take(const Part& part) {
    const Shape whole = matrix(part);
    if (whole.empty()) {
      return {{{0, 1}}, 1};
    }
    const Index extent = part.rows ? part.rows->size() : whole[dim_];
    const Index first = part.rows ? part.rows->begin : 0;
    Interval mine{0, extent};
    Index room = extent;
    switch (row_.cut) {
      case Cut::whole:
        break;
      case Cut::first:
        mine.end = making_.share.worker == 0 ? extent : 0;
        break;
      case Cut::vocab: {
        const Index padded = checked_mul(ceil_div(extent, making_.vocab_padding),
                                         making_.vocab_padding, "padded vocabulary");
        room = padded / making_.share.workers;
        if (room * making_.share.workers != padded) {
          fail(part.units.name + " is " + std::to_string(extent) + ", padded to " +
               std::to_string(padded) + " rows, which " + workers_text());
        }
        mine = {std::min(making_.share.worker * room, extent),
                std::min((making_.share.worker + 1) * room, extent)};
        break;
      }
      case Cut::column:
      case Cut::row:
        std::tie(mine, room) = units_of(part, extent);
        room = checked_mul(ceil_div(room, row_.align), row_.align, "padded share of a tensor");
        break;
    }
    return blocks({first + mine.begin, first + mine.end}, room, part);
  }

  /// The same, counted in the blocks of a tensor of scales.
  Taken blocks(const Interval& mine, Index room, const Part& part) {
    const Index block = part.block;
    if (block == 1 || mine.empty()) {
      return {{mine}, ceil_div(room, block)};
    }
    const Interval touched{mine.begin / block, ceil_div(mine.end, block)};
    // The worker's own blocks count from its first row or column. Experts of all workers have
    // blocks of one size, whichever worker's share begins with one.
    constexpr Index kFinest = 32;
    const bool of_experts = row_.experts != Experts::none && making_.share.workers > 1;
    const Index finer = std::gcd(mine.size(), block);
    const bool inside = of_experts ? block % mine.size() == 0 : touched.size() == 1;
    const bool whole =
        mine.begin % block == 0 && (!of_experts || finer == block || finer < kFinest);
    if (whole || inside) {
      require_whole_blocks(part, room);
      return {{touched}, ceil_div(room, block)};
    }
    if (finer < kFinest || !of_experts) {
      fail("the share [" + std::to_string(mine.begin) + ", " + std::to_string(mine.end) +
           ") of tensor '" + name_of(part) + "' cuts through blocks of " + std::to_string(block) +
           ", so its scales do not fit what a worker keeps; it would have to be quantised anew, or "
           "cut at multiples of " +
           std::to_string(block));
    }
    return finer_blocks(mine, room, block, finer);
  }

  /// What follows in the same parameter must begin with a block of its own.
  void require_whole_blocks(const Part& part, Index room) const {
    if (row_.experts == Experts::none && &part != &row_.parts.back() && room % part.block != 0) {
      fail("a worker keeps " + std::to_string(room) + " rows of what tensor '" + name_of(part) +
           "' scales, no multiple of its blocks of " + std::to_string(part.block) +
           ", so that the next part of '" + result_.name +
           "' would begin inside a block; it would have to be quantised anew, or cut less");
    }
  }

  /// Experts have a way out: smaller blocks, each with the scale of the block that it is part of.
  Taken finer_blocks(const Interval& mine, Index room, Index block, Index finer) {
    result_.loader_only = "its cut falls inside blocks of " + std::to_string(block) +
                          ", so scales are repeated for blocks of " + std::to_string(finer);
    block_ = finer;
    Taken taken;
    taken.room = ceil_div(room, finer);
    for (Index at = mine.begin; at < mine.end; at += finer) {
      taken.runs.push_back({at / block, at / block + 1});
    }
    return taken;
  }

  void place(const Part& part, const Taken& taken, Index at) {
    if (making_.slots.empty()) {
      require_dtype(making_.tensor(part, 0));
    }
    for (std::size_t slot = 0; slot < making_.slots.size();) {
      // Neighbouring experts of a stacked tensor are one section.
      std::size_t next = slot + 1;
      while (row_.experts == Experts::stacked && next < making_.slots.size() &&
             making_.slots[next] == making_.slots[next - 1] + 1) {
        ++next;
      }
      const TensorInfo& tensor = making_.tensor(part, making_.slots[slot]);
      require_dtype(tensor);
      Index begin = at;
      for (const Interval& run : taken.runs) {
        if (!run.empty()) {
          add_section(part, tensor, {making_.slots[slot], static_cast<Index>(next - slot)}, run,
                      static_cast<Index>(slot), begin);
        }
        begin += run.size();
      }
      slot = next;
    }
    const Index filled = taken.filled();
    if (filled < taken.room) {
      Box pad = Box::whole(shape_);
      pad.lo[dim_] = at + filled;
      pad.hi[dim_] = at + taken.room;
      result_.padding.push_back(pad);
      result_.plain = false;
    }
  }

  void require_dtype(const TensorInfo& tensor) {
    if (!result_.sections.empty() && tensor.dtype != result_.dtype) {
      fail("parameter '" + result_.name + "' is made of tensors of one dtype, but '" + tensor.name +
           "' is " + std::string(to_string(tensor.dtype)) + " and '" +
           result_.sections.front().tensor + "' is " + std::string(to_string(result_.dtype)));
    }
    result_.dtype = tensor.dtype;
  }

  struct ExpertRun {
    Index first = 0;
    Index count = 1;
  };

  void add_section(const Part& part, const TensorInfo& tensor, const ExpertRun& experts,
                   const Interval& run, Index slot, Index at) {
    Section section;
    section.tensor = tensor.name;
    section.offset = slot * slot_elements_;
    Dims lo, hi;
    Strides strides;
    if (row_.experts == Experts::stacked) {
      lo.push_back(experts.first);
      hi.push_back(experts.first + experts.count);
      strides.push_back(slot_elements_);
    }
    if (!matrix(part).empty()) {
      const std::size_t begin = lo.size();
      const Shape whole = local_matrix(part);
      for (std::size_t d = 0; d < whole.size(); ++d) {
        lo.push_back(d == dim_ ? run.begin : 0);
        hi.push_back(d == dim_ ? run.end : whole[d]);
        strides.push_back(strides_[d]);
      }
      if (part.transposed && whole.size() == 2) {
        std::swap(lo[begin], lo[begin + 1]);
        std::swap(hi[begin], hi[begin + 1]);
        std::swap(strides[begin], strides[begin + 1]);
      }
    }
    if (!shape_.empty()) {
      section.offset += at * strides_[dim_];
    }
    section.box = {lo, hi};
    section.strides = strides;
    result_.sections.push_back(std::move(section));
  }

  /// The slots' dimension, and the last two dimensions as one.
  void finish() {
    Shape shape;
    if (row_.experts != Experts::none) {
      shape.push_back(static_cast<Index>(making_.slots.size()));
      for (Box& pad : result_.padding) {
        pad = prefixed(pad, shape[0]);
      }
    }
    for (const Index extent : shape_) {
      shape.push_back(extent);
    }
    if (row_.fold) {
      const Index inner = shape[shape.size() - 1];
      shape = folded(shape, inner);
      for (Box& pad : result_.padding) {
        pad = {folded(pad.lo, inner), folded(pad.hi, inner)};
      }
    }
    result_.shape = shape;
  }

  /// Without the last dimension, whose @p inner elements each one before it now counts.
  static Dims folded(const Dims& dims, Index inner) {
    Dims result(std::span<const Index>(dims.begin(), dims.size() - 1));
    result[result.size() - 1] *= inner;
    return result;
  }

  static Box prefixed(const Box& box, Index extent) {
    Box result;
    result.lo.push_back(0);
    result.hi.push_back(extent);
    for (std::size_t d = 0; d < box.rank(); ++d) {
      result.lo.push_back(box.lo[d]);
      result.hi.push_back(box.hi[d]);
    }
    return result;
  }

  const Making& making_;
  const Row& row_;
  std::size_t dim_;
  Shape shape_;  ///< Of one slot.
  Strides strides_;
  Index slot_elements_ = 0;
  Index block_ = 1;  ///< See Made.
  WorkerParameter result_;
};

}  // namespace

Made make_parameter(const Making& making) { return Maker(making).make(); }

Shape tensor_shape(const Part& part) {
  Shape shape = part.shape;
  for (Index& extent : shape) {
    extent = ceil_div(extent, part.block);
  }
  return shape;
}

}  // namespace m2n::models
