// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/copy.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "core/error.hpp"
#include "core/tensor/cast.hpp"
#include "core/tensor/copy_quantised.hpp"

namespace m2n {
namespace {

/// Shorter rows may hold no whole cache line to stream.
constexpr std::uint64_t kBypassRowBytes = 128;
/// Items up to this size share cache lines with their neighbours on both sides, so that the order
/// of the loops matters: these move in blocks.
constexpr std::uint64_t kSmallItemBytes = 64;
/// A block of kBlockSide x kBlockSide items stays in the second-level cache on both sides, and its
/// lines are long enough that the partial cache lines at their ends count little.
constexpr Index kBlockSide = 128;
constexpr Index kBlockItems = kBlockSide * kBlockSide;

std::uint64_t magnitude(Index stride) noexcept {
  const auto bits = static_cast<std::uint64_t>(stride);
  return stride < 0 ? 0 - bits : bits;
}

/// One loop, with its steps in bytes.
struct Loop {
  Index extent = 1;
  Index source_step = 0;
  Index destination_step = 0;
};

/// One item at a time, of a size that the compiler knows.
template <std::size_t Bytes>
struct MoveFixed {
  void operator()(const std::byte* source, std::byte* destination, const Loop& line) const {
    for (Index i = 0; i < line.extent; ++i) {
      std::memcpy(destination + i * line.destination_step, source + i * line.source_step, Bytes);
    }
  }
};

struct MoveRows {
  std::uint64_t row_bytes;

  void operator()(const std::byte* source, std::byte* destination, const Loop& line) const {
    for (Index i = 0; i < line.extent; ++i) {
      std::memcpy(destination + i * line.destination_step, source + i * line.source_step,
                  row_bytes);
    }
  }
};

#if defined(__x86_64__)
/// Rows by stores that go past the caches, while what comes a little later is on its way into the
/// second-level cache: short rows end before the hardware's own prefetch has started. The caller
/// fences.
struct StreamRows {
  std::uint64_t row_bytes;

  void operator()(const std::byte* source, std::byte* destination, const Loop& line) const {
    const Index rows_ahead = std::max<Index>(static_cast<Index>(kPrefetchBytes / row_bytes), 1);
    for (Index i = 0; i < line.extent; ++i) {
      const Index later = std::min(i + rows_ahead, line.extent - 1);
      stream(source + i * line.source_step, source + later * line.source_step,
             destination + i * line.destination_step);
    }
  }

 private:
  static constexpr std::uint64_t kLine = 64;
  static constexpr std::uint64_t kPrefetchBytes = 4096;

  /// Whole cache lines of the destination are streamed, the ends are copied.
  void stream(const std::byte* source, const std::byte* later, std::byte* destination) const {
    const std::uint64_t past = reinterpret_cast<std::uintptr_t>(destination) % kLine;
    const std::uint64_t head = std::min(row_bytes, (kLine - past) % kLine);
    const std::uint64_t in_row = row_bytes - std::min(row_bytes, kPrefetchBytes);
    std::memcpy(destination, source, head);
    std::uint64_t at = head;
    for (; at + kLine <= row_bytes; at += kLine) {
      const std::byte* ahead = at < in_row ? source + at + kPrefetchBytes : later + (at - in_row);
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
      const auto* from = reinterpret_cast<const __m128i*>(source + at);
      auto* to = reinterpret_cast<__m128i*>(destination + at);
      const __m128i a = _mm_loadu_si128(from);
      const __m128i b = _mm_loadu_si128(from + 1);
      const __m128i c = _mm_loadu_si128(from + 2);
      const __m128i d = _mm_loadu_si128(from + 3);
      _mm_stream_si128(to, a);
      _mm_stream_si128(to + 1, b);
      _mm_stream_si128(to + 2, c);
      _mm_stream_si128(to + 3, d);
    }
    std::memcpy(destination + at, source + at, row_bytes - at);
  }
};
#endif

/// Rows of @p count contiguous elements on both sides.
struct CastRows {
  DType from;
  DType to;
  std::uint64_t count;

  void operator()(const std::byte* source, std::byte* destination, const Loop& line) const {
    for (Index i = 0; i < line.extent; ++i) {
      cast_elements(from, source + i * line.source_step, to,
                    destination + i * line.destination_step, count);
    }
  }
};

/// Single elements: gathered, cast and scattered, some at a time.
template <std::size_t FromBytes, std::size_t ToBytes>
struct CastItems {
  DType from;
  DType to;

  void operator()(const std::byte* source, std::byte* destination, const Loop& line) const {
    constexpr Index kBatch = 128;
    std::array<std::byte, kBatch * FromBytes> gathered;
    std::array<std::byte, kBatch * ToBytes> cast;
    for (Index at = 0; at < line.extent; at += kBatch) {
      const Index count = std::min(kBatch, line.extent - at);
      MoveFixed<FromBytes>{}(source + at * line.source_step, gathered.data(),
                             {count, line.source_step, FromBytes});
      cast_elements(from, gathered.data(), to, cast.data(), static_cast<std::uint64_t>(count));
      MoveFixed<ToBytes>{}(cast.data(), destination + at * line.destination_step,
                           {count, ToBytes, line.destination_step});
    }
  }
};

/// All loops around an item, outermost first, and how the two innermost ones are walked.
class Nest {
 public:
  /// @param loops  Smallest destination step last.
  Nest(std::span<const Loop> loops, std::uint64_t item_bytes)
      : rank_(loops.size()), small_(item_bytes <= kSmallItemBytes) {
    std::copy(loops.begin(), loops.end(), outer_.begin());
    if (rank_ > 0) {
      inner_ = outer_[--rank_];
    }
    block_inner_ = inner_.extent;
    if (rank_ == 0) {
      return;
    }
    // The loop beside the innermost: the one that the source would want innermost.
    Loop* const end = outer_.data() + rank_;
    Loop* beside = std::min_element(outer_.data(), end, [](const Loop& a, const Loop& b) {
      return magnitude(a.source_step) < magnitude(b.source_step);
    });
    const bool opposed = small_ && magnitude(beside->source_step) < magnitude(inner_.source_step);
    if (!opposed) {
      beside = end - 1;
    }
    beside_ = *beside;
    std::copy(beside + 1, end, beside);
    --rank_;
    block_beside_ = beside_.extent;
    if (small_) {
      const Index limit =
          opposed ? kBlockItems / std::min(kBlockSide, beside_.extent) : kBlockItems;
      block_inner_ = std::min(inner_.extent, limit);
      block_beside_ = std::min(beside_.extent, kBlockItems / block_inner_);
    }
  }

  /// Calls @p move(source, destination, line) for lines that together hold every item.
  template <class Move>
  void walk(const std::byte* source, std::byte* destination, const Move& move) const {
    std::array<Index, kMaxRank> index{};
    for (;;) {
      Index source_at = 0;
      Index destination_at = 0;
      for (std::size_t d = 0; d < rank_; ++d) {
        source_at += index[d] * outer_[d].source_step;
        destination_at += index[d] * outer_[d].destination_step;
      }
      walk_blocks(source + source_at, destination + destination_at, move);
      std::size_t d = rank_;
      while (d > 0 && ++index[d - 1] == outer_[d - 1].extent) {
        index[--d] = 0;
      }
      if (d == 0) {
        return;
      }
    }
  }

 private:
  template <class Move>
  void walk_blocks(const std::byte* source, std::byte* destination, const Move& move) const {
    for (Index b = 0; b < beside_.extent; b += block_beside_) {
      Loop beside = beside_;
      beside.extent = std::min(block_beside_, beside_.extent - b);
      for (Index a = 0; a < inner_.extent; a += block_inner_) {
        Loop inner = inner_;
        inner.extent = std::min(block_inner_, inner_.extent - a);
        walk_block(source + b * beside.source_step + a * inner.source_step,
                   destination + b * beside.destination_step + a * inner.destination_step, beside,
                   inner, move);
      }
    }
  }

  /// Along the destination, unless those lines are so short that they cost more than they carry.
  template <class Move>
  void walk_block(const std::byte* source, std::byte* destination, const Loop& beside,
                  const Loop& inner, const Move& move) const {
    const bool across = small_ && inner.extent < 16 && inner.extent < beside.extent;
    const Loop& lines = across ? inner : beside;
    const Loop& line = across ? beside : inner;
    for (Index i = 0; i < lines.extent; ++i) {
      move(source + i * lines.source_step, destination + i * lines.destination_step, line);
    }
  }

  std::array<Loop, kMaxRank> outer_;
  std::size_t rank_;  ///< Of the outer loops.
  Loop beside_;
  Loop inner_;
  Index block_beside_ = 1;
  Index block_inner_ = 1;
  bool small_;
};

}  // namespace

StridedCopy simplify(const StridedCopy& region) {
  const std::size_t rank = region.extents.size();
  expects(region.source_strides.size() == rank && region.destination_strides.size() == rank,
          "a stride for each dimension of a region on both sides");
  const bool scaled = region.quantises();
  expects(region.scale_strides.size() == (scaled ? rank : 0),
          "a stride for each dimension in the scales of a region that quantises, and only there");
  StridedCopy simple;
  simple.source_dtype = region.source_dtype;
  simple.destination_dtype = region.destination_dtype;
  std::array<std::size_t, kMaxRank> order{};
  std::size_t kept = 0;
  for (std::size_t d = 0; d < rank; ++d) {
    if (region.extents[d] <= 0) {
      simple.extents = {0};
      simple.source_strides = {1};
      simple.destination_strides = {1};
      if (scaled) {
        simple.scale_strides = {0};
      }
      return simple;
    }
    if (region.extents[d] == 1) {
      continue;
    }
    std::size_t at = kept++;  // insertion sort: few, mostly in order, and no allocation
    for (; at > 0 && magnitude(region.destination_strides[order[at - 1]]) <
                         magnitude(region.destination_strides[d]);
         --at) {
      order[at] = order[at - 1];
    }
    order[at] = d;
  }
  // From the innermost outwards, so that a merge sees the final inner dimension.
  Dims extents;
  Dims sources;
  Dims destinations;
  Dims scales;
  const auto spans = [](Index outer, Index inner, Index extent) {
    Index product = 0;
    return !__builtin_mul_overflow(inner, extent, &product) && product == outer;
  };
  for (std::size_t i = kept; i-- > 0;) {
    const std::size_t d = order[i];
    const Index extent = region.extents[d];
    const Index source = region.source_strides[d];
    const Index destination = region.destination_strides[d];
    const std::size_t last = extents.size() - 1;
    if (!extents.empty() && spans(source, sources[last], extents[last]) &&
        spans(destination, destinations[last], extents[last]) &&
        (!scaled || spans(region.scale_strides[d], scales[last], extents[last]))) {
      extents[last] = checked_mul(extents[last], extent);
    } else {
      extents.push_back(extent);
      sources.push_back(source);
      destinations.push_back(destination);
      if (scaled) {
        scales.push_back(region.scale_strides[d]);
      }
    }
  }
  std::reverse(extents.begin(), extents.end());
  std::reverse(sources.begin(), sources.end());
  std::reverse(destinations.begin(), destinations.end());
  std::reverse(scales.begin(), scales.end());
  simple.extents = extents;
  simple.source_strides = sources;
  simple.destination_strides = destinations;
  simple.scale_strides = scales;
  return simple;
}

void copy_region(const StridedCopy& region, const std::byte* source, std::byte* destination,
                 bool bypass_cache, const std::byte* scales) {
  const DType from = region.source_dtype;
  const DType to = region.destination_dtype;
  if (region.quantises()) {
    const StridedCopy simple = simplify(region);
    if (simple.extents.empty() || simple.extents[0] != 0) {
      expects(scales != nullptr, "scales for a region that quantises");
      copy_quantised(simple, source, scales, destination);
    }
    return;
  }
  if (!can_cast(from, to)) {
    throw Error(Errc::bad_argument, "no cast from " + std::string(to_string(from)) + " to " +
                                        std::string(to_string(to)) +
                                        ", expected equal types or two of f16, bf16 and f32");
  }
  const StridedCopy simple = simplify(region);
  const std::uint64_t from_bytes = simple.source_item_bytes();
  const std::uint64_t to_bytes = simple.destination_item_bytes();
  std::array<Loop, kMaxRank> loops;
  std::size_t rank = simple.extents.size();
  for (std::size_t d = 0; d < rank; ++d) {
    if (simple.extents[d] == 0) {
      return;
    }
    loops[d] = {simple.extents[d],
                checked_mul(simple.source_strides[d], static_cast<Index>(from_bytes), "stride"),
                checked_mul(simple.destination_strides[d], static_cast<Index>(to_bytes), "stride")};
  }
  // Contiguous elements are one item.
  std::uint64_t count = 1;
  if (rank > 0 && simple.source_strides[rank - 1] == 1 &&
      simple.destination_strides[rank - 1] == 1) {
    count = static_cast<std::uint64_t>(loops[--rank].extent);
  }
  const std::uint64_t item_bytes = checked_mul_bytes(count, to_bytes);
  const Nest nest(std::span<const Loop>(loops).first(rank), item_bytes);
  const auto walk = [&](const auto& move) { nest.walk(source, destination, move); };
  if (from != to) {
    if (count > 1) {
      walk(CastRows{from, to, count});
    } else if (from_bytes == 4) {
      walk(CastItems<4, 2>{from, to});
    } else if (to_bytes == 4) {
      walk(CastItems<2, 4>{from, to});
    } else {
      walk(CastItems<2, 2>{from, to});
    }
    return;
  }
#if defined(__x86_64__)
  if (bypass_cache && item_bytes >= kBypassRowBytes) {
    walk(StreamRows{item_bytes});
    _mm_sfence();
    return;
  }
#else
  (void)bypass_cache;  // a hint
#endif
  switch (item_bytes) {
    case 1:
      return walk(MoveFixed<1>{});
    case 2:
      return walk(MoveFixed<2>{});
    case 4:
      return walk(MoveFixed<4>{});
    case 8:
      return walk(MoveFixed<8>{});
    case 16:
      return walk(MoveFixed<16>{});
    case 32:
      return walk(MoveFixed<32>{});
    default:
      return walk(MoveRows{item_bytes});
  }
}

}  // namespace m2n
