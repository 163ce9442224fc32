// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/copy_queue.hpp"

#include <vector>

#include "core/api/memory.hpp"
#include "core/error.hpp"
#include "core/tensor/blocks.hpp"

namespace m2n {
namespace {

/// Elements that are quantised at a time where the operands lie in several memories.
constexpr Index kQuantisedAtOnce = 1 << 20;

bool lie_together(const LocalBuffer& a, const LocalBuffer& b) {
  return a.space == b.space && a.device == b.device;
}

/// A region that quantises, its operands in memories of any kind: where they do not lie together,
/// by way of the host, a part at a time.
void quantise(const StridedCopy& region, const LocalBuffer& from, const LocalBuffer& scales,
              const LocalBuffer& to) {
  if (lie_together(from, to) && lie_together(scales, to)) {
    memory_of(from).quantise(region, from, scales, to);
    return;
  }
  const std::uint64_t item = region.source_item_bytes();
  std::vector<std::byte> elements;
  std::vector<std::byte> factors;
  std::vector<std::byte> out;
  for_each_block(Box::whole(region.extents), kQuantisedAtOnce, [&](const Box& part) {
    const Shape extents = part.extents();
    const Strides compact = row_major(extents);
    const auto count = static_cast<std::size_t>(part.volume());
    const Dims origin = Dims::filled(extents.size(), 0);
    // Strides may lead back, so what is left is not less than it says.
    const auto moved = [&](LocalBuffer buffer, const Strides& strides, std::uint64_t bytes) {
      buffer.data += element_offset(origin, part.lo, strides) * static_cast<Index>(bytes);
      return buffer;
    };
    const auto room = [count](std::vector<std::byte>& bytes, std::uint64_t each) {
      bytes.resize(count * each);
      return host_buffer(bytes.data(), bytes.size());
    };
    const DType dtype = region.source_dtype;
    copy_region({extents, region.source_strides, compact, dtype, dtype},
                moved(from, region.source_strides, item), room(elements, item));
    copy_region({extents, region.scale_strides, compact, DType::f32, DType::f32},
                moved(scales, region.scale_strides, sizeof(float)), room(factors, sizeof(float)));
    const LocalBuffer quantised = room(out, 1);
    copy_region({extents, compact, compact, dtype, region.destination_dtype, compact},
                elements.data(), out.data(), false, factors.data());
    copy_region({extents, compact, region.destination_strides, region.destination_dtype,
                 region.destination_dtype},
                quantised, moved(to, region.destination_strides, 1));
  });
}

class PlainCopyQueue final : public CopyQueue {
 public:
  List add_pack(std::span<const StagedCopy> copies) override { return add(copies, true); }
  List add_unpack(std::span<const StagedCopy> copies) override { return add(copies, false); }
  List add_copies(std::span<const PlacedCopy> copies) override {
    lists_.push_back({.placed = {copies.begin(), copies.end()}});
    return lists_.size() - 1;
  }
  void compile() override {}

  Ticket run(List number, std::byte* staging) override {
    const Entries& list = lists_.at(number);
    for (const StagedCopy& entry : list.staged) {
      const LocalBuffer there =
          host_buffer(staging + entry.offset_bytes, entry.staged_bytes(list.pack));
      if (entry.copy.quantises()) {
        quantise(entry.copy, entry.at, entry.scales, there);
      } else {
        copy_region(entry.copy, list.pack ? entry.at : there, list.pack ? there : entry.at);
      }
    }
    for (const PlacedCopy& entry : list.placed) {
      if (entry.copy.quantises()) {
        quantise(entry.copy, entry.from, entry.scales, entry.to);
      } else {
        copy_region(entry.copy, entry.from, entry.to);
      }
    }
    return 0;
  }
  bool is_done(Ticket /*ticket*/) override { return true; }
  void finish() override {}

 private:
  struct Entries {
    bool pack = false;
    std::vector<StagedCopy> staged = {};
    std::vector<PlacedCopy> placed = {};
  };

  List add(std::span<const StagedCopy> copies, bool pack) {
    lists_.push_back({.pack = pack, .staged = {copies.begin(), copies.end()}});
    return lists_.size() - 1;
  }

  std::vector<Entries> lists_;
};

}  // namespace

std::uint64_t StagedCopy::staged_bytes(bool pack) const {
  return checked_mul_bytes(static_cast<std::uint64_t>(element_count(copy.extents)),
                           pack ? copy.destination_item_bytes() : copy.source_item_bytes());
}

std::unique_ptr<CopyQueue> make_plain_copy_queue() { return std::make_unique<PlainCopyQueue>(); }

}  // namespace m2n
