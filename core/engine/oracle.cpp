// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/oracle.hpp"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "core/error.hpp"
#include "core/tensor/cast.hpp"
#include "core/tensor/copy.hpp"

namespace m2n {
namespace {

/// Elements that are compared at a time: bounds the memory of the expected values.
constexpr Index kComparedElements = 1 << 20;

std::string hex(const std::byte* bytes, std::uint64_t count) {
  static constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "0x";
  for (std::uint64_t i = count; i-- > 0;) {
    text += kDigits[std::to_integer<std::size_t>(bytes[i]) >> 4];
    text += kDigits[std::to_integer<std::size_t>(bytes[i]) & 15];
  }
  return text;
}

/// Cuts @p box into parts of at most kComparedElements elements, outer dimension first.
template <class Visit>
void for_each_block(const Box& box, std::size_t dim, Visit visit) {
  if (box.volume() <= kComparedElements || dim == box.rank()) {
    visit(box);
    return;
  }
  const Index inner = box.volume() / (box.hi[dim] - box.lo[dim]);
  const Index step = std::max<Index>(1, kComparedElements / inner);
  for (Index begin = box.lo[dim]; begin < box.hi[dim]; begin += step) {
    Box part = box;
    part.lo[dim] = begin;
    part.hi[dim] = std::min(box.hi[dim], begin + step);
    for_each_block(part, dim + 1, visit);
  }
}

std::string element_text(const Box& box, Index number) {
  Dims at = box.lo;
  for (std::size_t d = box.rank(); d-- > 0;) {
    const Index extent = box.hi[d] - box.lo[d];
    at[d] += number % extent;
    number /= extent;
  }
  return to_string(at);
}

/// Actual elements of a box, wherever they lie.
struct Placed {
  const std::byte* data;  ///< Element at box.lo.
  Strides strides;
  DType dtype;
};

class Comparer {
 public:
  Comparer(Rank rank, const TensorValues& values) : rank_(rank), values_(values) {
    for (const TensorInfo& info : values.catalogue()) {
      dtypes_.emplace(info.name, info.dtype);
    }
  }

  void compare(const std::string& tensor, const Box& box, const Placed& placed,
               const std::string& where) {
    const auto dtype = dtypes_.find(tensor);
    if (dtype == dtypes_.end()) {
      throw Error(Errc::bad_argument, "the oracle has no values for tensor '" + tensor + "'");
    }
    for_each_block(box, 0, [&](const Box& block) {
      const auto count = static_cast<std::uint64_t>(block.volume());
      source_.resize(count * bytes_of(dtype->second));
      values_.read(tensor, block, source_.data(), row_major(block.extents()));
      const std::byte* expected = source_.data();
      if (dtype->second != placed.dtype) {
        cast_.resize(count * bytes_of(placed.dtype));
        cast_elements(dtype->second, source_.data(), placed.dtype, cast_.data(), count);
        expected = cast_.data();
      }
      compare_block(tensor, box, block, placed, expected, where);
    });
  }

  void compare_zero(const Box& local_box, const Placed& placed, const std::string& where) {
    for_each_block(local_box, 0, [&](const Box& block) {
      source_.assign(static_cast<std::uint64_t>(block.volume()) * bytes_of(placed.dtype),
                     std::byte{0});
      compare_block("padding", local_box, block, placed, source_.data(), where);
    });
  }

  const Comparison& verdict() const noexcept { return verdict_; }

 private:
  void compare_block(const std::string& tensor, const Box& box, const Box& block,
                     const Placed& placed, const std::byte* expected, const std::string& where) {
    const std::uint64_t item = bytes_of(placed.dtype);
    const auto count = static_cast<std::uint64_t>(block.volume());
    Index offset = 0;
    for (std::size_t d = 0; d < box.rank(); ++d) {
      offset += (block.lo[d] - box.lo[d]) * placed.strides[d];
    }
    actual_.resize(count * item);
    copy_region(
        {block.extents(), placed.strides, row_major(block.extents()), placed.dtype, placed.dtype},
        placed.data + offset * static_cast<Index>(item), actual_.data());
    verdict_.elements += count;
    if (std::memcmp(actual_.data(), expected, count * item) == 0) {
      return;
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      if (std::memcmp(actual_.data() + i * item, expected + i * item, item) != 0) {
        if (verdict_.wrong == 0) {
          verdict_.first = "rank " + std::to_string(rank_) + ", " + where + ": element " +
                           element_text(block, static_cast<Index>(i)) + " of '" + tensor + "' is " +
                           hex(actual_.data() + i * item, item) + ", expected " +
                           hex(expected + i * item, item);
        }
        ++verdict_.wrong;
      }
    }
  }

  Rank rank_;
  const TensorValues& values_;
  std::unordered_map<std::string, DType> dtypes_;
  Comparison verdict_;
  std::vector<std::byte> source_;
  std::vector<std::byte> cast_;
  std::vector<std::byte> actual_;
};

}  // namespace

void Comparison::add(const Comparison& other) {
  elements += other.elements;
  if (wrong == 0) {
    first = other.first;
  }
  wrong += other.wrong;
}

Comparison verify_pieces(const Problem& problem, Rank rank, const std::vector<LocalBuffer>& buffers,
                         const TensorValues& values, const std::vector<Resolution>& resolutions) {
  Comparer comparer(rank, values);
  for (std::size_t i = 0; i < problem.parameters().size(); ++i) {
    if (!resolutions.empty() && resolutions[i].mode == Mode::fallback) {
      continue;
    }
    const Parameter& parameter = problem.parameters()[i];
    for (const RankPiece& entry : parameter.destination.layout->pieces_of(rank)) {
      const View& view = entry.piece.view;
      const std::uint32_t buffer = problem.buffers(Role::destination).of_parameter[i][view.buffer];
      comparer.compare(
          parameter.name, entry.piece.box,
          {buffers[buffer].data + view.offset_bytes, view.strides, parameter.destination_dtype()},
          "buffer '" + problem.buffers(Role::destination).names[buffer] + "'");
    }
  }
  return comparer.verdict();
}

Comparison verify_full(Rank rank, const FullTensor& tensor, const TensorValues& values) {
  Comparer comparer(rank, values);
  const std::string name(tensor.name);
  comparer.compare(name, Box::whole(tensor.shape),
                   {tensor.data, row_major(tensor.shape), tensor.dtype}, "full tensor");
  return comparer.verdict();
}

Comparison verify_model(const WorkerModel& model, Rank rank, const std::vector<LiveParameter>& live,
                        const TensorValues& values) {
  std::unordered_map<std::string_view, const LiveParameter*> by_name;
  for (const LiveParameter& parameter : live) {
    by_name.emplace(parameter.name, &parameter);
  }
  Comparer comparer(rank, values);
  for (const WorkerParameter& parameter : model.parameters) {
    const auto found = by_name.find(parameter.name);
    if (found == by_name.end()) {
      if (parameter.same_as.empty()) {
        throw Error(Errc::bad_argument, "rank " + std::to_string(rank) +
                                            " keeps no live parameter '" + parameter.name + "'");
      }
      continue;  // not kept: its twin is compared
    }
    const LiveParameter& kept = *found->second;
    const auto item = static_cast<Index>(bytes_of(kept.dtype));
    const std::string where = "parameter '" + parameter.name + "'";
    for (const Section& section : parameter.sections) {
      comparer.compare(section.tensor, section.box,
                       {kept.buffer.data + section.offset * item, section.strides, kept.dtype},
                       where);
    }
    const Strides strides = row_major(kept.shape);
    for (const Box& box : parameter.padding) {
      Index offset = 0;
      for (std::size_t d = 0; d < box.rank(); ++d) {
        offset += box.lo[d] * strides[d];
      }
      comparer.compare_zero(box, {kept.buffer.data + offset * item, strides, kept.dtype}, where);
    }
  }
  return comparer.verdict();
}

}  // namespace m2n
