// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The tensors of two dumps, element by element.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "core/error.hpp"
#include "core/io/dump_diff.hpp"
#include "core/io/dump_h5.hpp"
#include "core/tensor/cast.hpp"

namespace m2n {
namespace {

constexpr std::uint64_t kComparedBlock = std::uint64_t{16} << 20;

template <class Value>
double number(const std::byte* bits) {
  Value value;
  std::memcpy(&value, bits, sizeof value);
  return static_cast<double>(value);
}

/// The number that an element is; NaN for the types whose numbers are of no use here (fp8 scales,
/// complex numbers).
double number_of(DType dtype, const std::byte* bits) {
  switch (dtype) {
    case DType::boolean:
    case DType::u8:
      return number<std::uint8_t>(bits);
    case DType::i8:
      return number<std::int8_t>(bits);
    case DType::i16:
      return number<std::int16_t>(bits);
    case DType::u16:
      return number<std::uint16_t>(bits);
    case DType::i32:
      return number<std::int32_t>(bits);
    case DType::u32:
      return number<std::uint32_t>(bits);
    case DType::i64:
      return number<std::int64_t>(bits);
    case DType::u64:
      return number<std::uint64_t>(bits);
    case DType::f32:
      return number<float>(bits);
    case DType::f64:
      return number<double>(bits);
    default:
      break;
  }
  if (!can_cast(dtype, DType::f32)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  float value = 0;
  cast_elements(dtype, bits, DType::f32, reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

std::string hex_bits(const std::byte* bits, std::uint64_t bytes) {
  std::string out = "0x";
  for (std::uint64_t i = bytes; i-- > 0;) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    out += kDigits[std::to_integer<std::size_t>(bits[i]) >> 4];
    out += kDigits[std::to_integer<std::size_t>(bits[i]) & 15];
  }
  return out;
}

class TensorComparison {
 public:
  TensorComparison(const DumpTensors& a, const DumpTensors& b, const std::string& name)
      : a_(a), b_(b), info_(a.info(name)), item_bytes_(bytes_of(info_.dtype)) {
    found_.side = a.side();
    found_.name = name;
  }

  void run() {
    const std::vector<DumpShard>& others = b_.shards(info_.name);
    for (const DumpShard& shard : a_.shards(info_.name)) {
      // A rank that holds the same boxes in both is compared with itself, so that replicas that
      // disagree are seen; one that does not, with what the other dump has anywhere.
      const auto twin = std::find_if(others.begin(), others.end(), [&](const DumpShard& other) {
        return other.rank == shard.rank && same_boxes(shard, other);
      });
      for (std::size_t piece = 0; piece < shard.compact.pieces.size(); ++piece) {
        compare(shard, piece, twin == others.end() ? nullptr : &*twin);
      }
    }
  }

  const TensorDifference& found() const noexcept { return found_; }
  std::string text() const {
    std::ostringstream out;
    out << found_.wrong << " of " << found_.elements << " elements differ, the first at "
        << to_string(found_.at) << " of rank " << found_.rank << ": " << first_;
    if (std::isfinite(found_.largest)) {
      out << "; the largest difference is " << found_.largest;
    }
    return out.str();
  }

 private:
  static bool same_boxes(const DumpShard& a, const DumpShard& b) {
    return std::equal(a.compact.pieces.begin(), a.compact.pieces.end(), b.compact.pieces.begin(),
                      b.compact.pieces.end(),
                      [](const Piece& x, const Piece& y) { return x.box == y.box; });
  }

  void compare(const DumpShard& shard, std::size_t piece, const DumpShard* twin) {
    const Box& box = shard.compact.pieces[piece].box;
    h5::for_each_block(box.extents(), item_bytes_, kComparedBlock, [&](const Box& part) {
      Box block = part;
      for (std::size_t d = 0; d < box.rank(); ++d) {
        block.lo[d] += box.lo[d];
        block.hi[d] += box.lo[d];
      }
      const auto bytes = static_cast<std::size_t>(block.volume()) * item_bytes_;
      mine_.resize(bytes);
      other_.resize(bytes);
      const Strides strides = row_major(block.extents());
      a_.read(shard, piece, block, mine_.data(), strides);
      if (twin != nullptr) {
        b_.read(*twin, piece, block, other_.data(), strides);
      } else {
        b_.read(info_.name, block, other_.data(), strides);
      }
      found_.elements += static_cast<std::uint64_t>(block.volume());
      if (mine_ != other_) {
        count(shard.rank, block);
      }
    });
  }

  void count(Rank rank, const Box& block) {
    const std::uint64_t elements = mine_.size() / item_bytes_;
    for (std::uint64_t i = 0; i < elements; ++i) {
      const std::byte* x = mine_.data() + i * item_bytes_;
      const std::byte* y = other_.data() + i * item_bytes_;
      if (std::memcmp(x, y, item_bytes_) == 0) {
        continue;
      }
      const double difference = std::fabs(number_of(info_.dtype, x) - number_of(info_.dtype, y));
      found_.largest = std::isnan(difference) ? std::numeric_limits<double>::infinity()
                                              : std::max(found_.largest, difference);
      if (found_.wrong++ == 0) {
        found_.rank = rank;
        found_.at = block.lo;
        auto rest = static_cast<Index>(i);
        for (std::size_t d = block.rank(); d-- > 0;) {
          found_.at[d] += rest % (block.hi[d] - block.lo[d]);
          rest /= block.hi[d] - block.lo[d];
        }
        first_ = hex_bits(x, item_bytes_) + " and " + hex_bits(y, item_bytes_);
      }
    }
  }

  const DumpTensors& a_;
  const DumpTensors& b_;
  const TensorInfo& info_;
  std::uint64_t item_bytes_;
  TensorDifference found_;
  std::string first_;
  std::vector<std::byte> mine_;
  std::vector<std::byte> other_;
};

std::string description(const TensorInfo& info) {
  return std::string(to_string(info.dtype)) + " " + to_string(info.shape);
}

}  // namespace

void compare_tensors(const DumpTensors& a, const DumpTensors& b, DumpComparison& out) {
  const std::string side = std::string(to_string(a.side())) + " tensor '";
  for (const TensorInfo& info : a.catalogue()) {
    const std::string subject = side + info.name + "'";
    if (!b.contains(info.name)) {
      out.differences.push_back({"tensors", subject, "only in the first"});
      continue;
    }
    const TensorInfo& other = b.info(info.name);
    if (info.dtype != other.dtype || info.shape != other.shape) {
      out.differences.push_back(
          {"tensors", subject, description(info) + " and " + description(other)});
      continue;
    }
    TensorComparison comparison(a, b, info.name);
    comparison.run();
    out.elements += comparison.found().elements;
    if (comparison.found().wrong > 0) {
      out.differences.push_back({"tensors", subject, comparison.text()});
      out.tensors.push_back(comparison.found());
    }
  }
  for (const TensorInfo& info : b.catalogue()) {
    if (!a.contains(info.name)) {
      out.differences.push_back({"tensors", side + info.name + "'", "only in the second"});
    }
  }
}

}  // namespace m2n
