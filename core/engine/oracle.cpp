// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/oracle.hpp"

#include <array>
#include <cstring>
#include <unordered_map>

#include "core/api/memory.hpp"
#include "core/error.hpp"
#include "core/tensor/blocks.hpp"
#include "core/tensor/cast.hpp"

namespace m2n {
namespace {

/// Elements that are compared at a time: bounds the memory of the expected values.
constexpr Index kComparedElements = 1 << 20;
constexpr std::size_t kLargestItem = 16;
/// Boxes that a device compares at a time.
constexpr std::size_t kComparedAtOnce = 8192;

std::string hex(const std::byte* bytes, std::uint64_t count) {
  static constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "0x";
  for (std::uint64_t i = count; i-- > 0;) {
    text += kDigits[std::to_integer<std::size_t>(bytes[i]) >> 4];
    text += kDigits[std::to_integer<std::size_t>(bytes[i]) & 15];
  }
  return text;
}

/// Element @p number of @p box in row-major order.
Dims at_number(const Box& box, Index number) {
  Dims at = box.lo;
  for (std::size_t d = box.rank(); d-- > 0;) {
    const Index extent = box.hi[d] - box.lo[d];
    at[d] += number % extent;
    number /= extent;
  }
  return at;
}

Box box_at(const Dims& at) {
  Box box{at, at};
  for (Index& end : box.hi) {
    ++end;
  }
  return box;
}

/// Actual elements of a box, wherever they lie.
struct Placed {
  LocalBuffer at;  ///< Starts with the element at box.lo.
  Strides strides;
  DType dtype;
};

/// The elements from @p at on, of those of @p box.
LocalBuffer part_of(const Placed& placed, const Box& box, const Dims& at) {
  LocalBuffer part = placed.at;
  part.data +=
      element_offset(box.lo, at, placed.strides) * static_cast<Index>(bytes_of(placed.dtype));
  return part;
}

class Comparer {
 public:
  Comparer(Rank rank, const TensorValues& values) : rank_(rank), values_(values) {
    for (const TensorInfo& info : values.catalogue()) {
      infos_.emplace(info.name, &info);
    }
  }

  void compare(const std::string& tensor, const Box& box, const Placed& placed,
               const std::string& where) {
    const auto info = infos_.find(tensor);
    if (info == infos_.end()) {
      throw Error(Errc::bad_argument, "the oracle has no values for tensor '" + tensor + "'");
    }
    const DType dtype = info->second->dtype;
    const auto formula = values_.formula(tensor);
    if (formula && placed.at.space != MemorySpace::host) {
      pending_.push_back(
          {{{info->second->shape, box, placed.dtype, placed.at, placed.strides}, *formula},
           info->second,
           where});
      if (pending_.size() == kComparedAtOnce) {
        compare_pending();
      }
      return;
    }
    for_each_block(box, kComparedElements, [&](const Box& block) {
      const auto count = static_cast<std::uint64_t>(block.volume());
      source_.resize(count * bytes_of(dtype));
      values_.read(tensor, block, source_.data(), row_major(block.extents()));
      const std::byte* expected = source_.data();
      if (dtype != placed.dtype) {
        cast_.resize(count * bytes_of(placed.dtype));
        cast_elements(dtype, source_.data(), placed.dtype, cast_.data(), count);
        expected = cast_.data();
      }
      compare_block(tensor, box, block, placed, expected, where);
    });
  }

  void compare_zero(const Box& local_box, const Placed& placed, const std::string& where) {
    for_each_block(local_box, kComparedElements, [&](const Box& block) {
      source_.assign(static_cast<std::uint64_t>(block.volume()) * bytes_of(placed.dtype),
                     std::byte{0});
      compare_block("padding", local_box, block, placed, source_.data(), where);
    });
  }

  /// What belongs into @p kept before the worker rewrites it.
  std::vector<std::byte> landed(const WorkerParameter& parameter, const LiveParameter& kept) {
    const std::uint64_t item = bytes_of(kept.dtype);
    std::vector<std::byte> bytes(static_cast<std::uint64_t>(element_count(kept.shape)) * item);
    for (const Section& section : parameter.sections) {
      const Shape extents = section.box.extents();
      const DType dtype = infos_.at(section.tensor)->dtype;
      source_.resize(static_cast<std::uint64_t>(section.box.volume()) * bytes_of(dtype));
      values_.read(section.tensor, section.box, source_.data(), row_major(extents));
      copy_region({extents, row_major(extents), section.strides, dtype, kept.dtype}, source_.data(),
                  bytes.data() + static_cast<std::uint64_t>(section.offset) * item);
    }
    return bytes;
  }

  void compare_whole(const LiveParameter& kept, const std::byte* expected,
                     const std::string& where) {
    const Box whole = Box::whole(kept.shape);
    const Placed placed{kept.buffer, row_major(kept.shape), kept.dtype};
    compare_block(kept.name, whole, whole, placed, expected, where);
  }

  const Comparison& verdict() {
    compare_pending();
    return verdict_;
  }

 private:
  void compare_block(const std::string& tensor, const Box& box, const Box& block,
                     const Placed& placed, const std::byte* expected, const std::string& where) {
    const std::uint64_t item = bytes_of(placed.dtype);
    const auto count = static_cast<std::uint64_t>(block.volume());
    actual_.resize(count * item);
    copy_region(
        {block.extents(), placed.strides, row_major(block.extents()), placed.dtype, placed.dtype},
        part_of(placed, box, block.lo), host_buffer(actual_.data(), actual_.size()));
    verdict_.elements += count;
    if (std::memcmp(actual_.data(), expected, count * item) == 0) {
      return;
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      if (std::memcmp(actual_.data() + i * item, expected + i * item, item) != 0) {
        if (verdict_.wrong == 0) {
          verdict_.first =
              text_of(tensor, at_number(block, static_cast<Index>(i)),
                      hex(actual_.data() + i * item, item), hex(expected + i * item, item), where);
        }
        ++verdict_.wrong;
      }
    }
  }

  /// A box that its memory compares by itself.
  struct Pending {
    FormulaBox box;
    const TensorInfo* info = nullptr;
    std::string where;
  };

  /// Has memories compare what is pending, and fetches the first wrong element.
  void compare_pending() {
    std::vector<FormulaBox> boxes;
    boxes.reserve(pending_.size());
    for (const Pending& entry : pending_) {
      boxes.push_back(entry.box);
    }
    if (!boxes.empty()) {
      const std::vector<Wrong> found = memory_of(MemorySpace::device).compare(boxes);
      for (std::size_t i = 0; i < found.size(); ++i) {
        judge(pending_[i], found[i]);
      }
    }
    pending_.clear();
  }

  void judge(const Pending& entry, const Wrong& wrong) {
    const PlacedBox& box = entry.box.placed;
    verdict_.elements += static_cast<std::uint64_t>(box.box.volume());
    if (wrong.count > 0 && verdict_.wrong == 0) {
      const Box one = box_at(at_number(box.box, static_cast<Index>(wrong.first)));
      const Strides strides = row_major(one.extents());
      std::array<std::byte, kLargestItem> actual{};
      std::array<std::byte, kLargestItem> expected{};
      std::array<std::byte, kLargestItem> source{};
      copy_region({one.extents(), strides, strides, box.dtype, box.dtype},
                  part_of({box.at, box.strides, box.dtype}, box.box, one.lo),
                  host_buffer(actual.data(), actual.size()));
      values_.read(entry.info->name, one, source.data(), strides);
      cast_elements(entry.info->dtype, source.data(), box.dtype, expected.data(), 1);
      const std::uint64_t item = bytes_of(box.dtype);
      verdict_.first = text_of(entry.info->name, one.lo, hex(actual.data(), item),
                               hex(expected.data(), item), entry.where);
    }
    verdict_.wrong += wrong.count;
  }

  std::string text_of(const std::string& tensor, const Dims& at, const std::string& actual,
                      const std::string& expected, const std::string& where) const {
    return "rank " + std::to_string(rank_) + ", " + where + ": element " + to_string(at) + " of '" +
           tensor + "' is " + actual + ", expected " + expected;
  }

  Rank rank_;
  const TensorValues& values_;
  std::unordered_map<std::string_view, const TensorInfo*> infos_;
  Comparison verdict_;
  std::vector<Pending> pending_;
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
          {buffers[buffer].from(view.offset_bytes), view.strides, parameter.destination_dtype()},
          "buffer '" + problem.buffers(Role::destination).names[buffer] + "'");
    }
  }
  return comparer.verdict();
}

Comparison verify_full(Rank rank, const FullTensor& tensor, const TensorValues& values) {
  Comparer comparer(rank, values);
  const std::string name(tensor.name);
  comparer.compare(name, Box::whole(tensor.shape),
                   {tensor.buffer(), row_major(tensor.shape), tensor.dtype}, "full tensor");
  return comparer.verdict();
}

Comparison verify_model(const WorkerModel& model, Rank rank, const std::vector<LiveParameter>& live,
                        const TensorValues& values) {
  std::unordered_map<std::string_view, const LiveParameter*> by_name;
  for (const LiveParameter& parameter : live) {
    by_name.emplace(parameter.name, &parameter);
  }
  Comparer comparer(rank, values);
  std::unordered_map<std::string_view, const WorkerParameter*> rewritten;
  for (const Rewrite& rewrite : model.rewrites) {
    for (const std::string& name : rewrite.parameters) {
      rewritten.emplace(name, nullptr);
    }
  }
  for (const WorkerParameter& parameter : model.parameters) {
    if (const auto other = rewritten.find(parameter.name); other != rewritten.end()) {
      other->second = &parameter;
      continue;
    }
    const auto found = by_name.find(parameter.name);
    if (found == by_name.end()) {
      if (parameter.same_as.empty()) {
        throw Error(Errc::bad_argument, "rank " + std::to_string(rank) +
                                            " keeps no live parameter '" + parameter.name + "'");
      }
      continue;  // not kept: its twin is compared
    }
    const LiveParameter& kept = *found->second;
    const auto part = [&](Index element) {
      return kept.buffer.from(static_cast<std::uint64_t>(element) * bytes_of(kept.dtype));
    };
    const std::string where = "parameter '" + parameter.name + "'";
    for (const Section& section : parameter.sections) {
      comparer.compare(section.tensor, section.box,
                       {part(section.offset), section.strides, kept.dtype}, where);
    }
    const Strides strides = row_major(kept.shape);
    for (const Box& box : parameter.padding) {
      Index offset = 0;
      for (std::size_t d = 0; d < box.rank(); ++d) {
        offset += box.lo[d] * strides[d];
      }
      comparer.compare_zero(box, {part(offset), strides, kept.dtype}, where);
    }
  }
  for (const Rewrite& rewrite : model.rewrites) {
    std::vector<std::vector<std::byte>> expected;
    std::vector<WritableView> views;
    std::vector<const LiveParameter*> kept;
    for (const std::string& name : rewrite.parameters) {
      kept.push_back(by_name.at(name));
      const LiveParameter& live_parameter = *kept.back();
      expected.push_back(comparer.landed(*rewritten.at(name), live_parameter));
      views.push_back({live_parameter.dtype, live_parameter.shape, expected.back().data()});
    }
    rewrite.apply(views);
    for (std::size_t i = 0; i < views.size(); ++i) {
      comparer.compare_whole(*kept[i], expected[i].data(),
                             "parameter '" + kept[i]->name + "', " + rewrite.change);
    }
  }
  return comparer.verdict();
}

}  // namespace m2n
