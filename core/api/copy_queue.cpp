// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/copy_queue.hpp"

#include <vector>

#include "core/api/memory.hpp"
#include "core/error.hpp"

namespace m2n {
namespace {

class PlainCopyQueue final : public CopyQueue {
 public:
  List add_pack(std::span<const StagedCopy> copies) override { return add(copies, true); }
  List add_unpack(std::span<const StagedCopy> copies) override { return add(copies, false); }
  List add_copies(std::span<const PlacedCopy> copies) override {
    lists_.push_back({.placed = {copies.begin(), copies.end()}});
    return lists_.size() - 1;
  }
  void compile() override {
    for (const Entries& list : lists_) {
      for (const StagedCopy& entry : list.staged) {
        if (is_quantised_elsewhere(entry) && entry.staged_bytes(true) > room_.bytes) {
          room_ = {nullptr, entry.staged_bytes(true), entry.at.space, entry.at.device};
        }
      }
    }
    if (room_.bytes > 0) {
      arena_ = memory_of(room_).reserve(room_.bytes, room_.device);
      room_ = arena_->take(room_.bytes);
    }
  }

  Ticket run(List number, std::byte* staging) override {
    const Entries& list = lists_.at(number);
    for (const StagedCopy& entry : list.staged) {
      const LocalBuffer there =
          host_buffer(staging + entry.offset_bytes, entry.staged_bytes(list.pack));
      if (is_quantised_elsewhere(entry)) {
        memory_of(entry.at).quantise(entry.copy, entry.at, entry.scales, room_);
        memory_of(room_).read(room_, {there.data, static_cast<std::size_t>(there.bytes)});
      } else if (entry.copy.quantises()) {
        copy_region(entry.copy, entry.at.data, there.data, false, entry.scales.data);
      } else {
        copy_region(entry.copy, list.pack ? entry.at : there, list.pack ? there : entry.at);
      }
    }
    for (const PlacedCopy& entry : list.placed) {
      if (entry.copy.quantises()) {
        expects(entry.from.space == entry.to.space, "both ends of what quantises in one memory");
        memory_of(entry.from).quantise(entry.copy, entry.from, entry.scales, entry.to);
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

  /// Memory quantises inside of itself alone.
  static bool is_quantised_elsewhere(const StagedCopy& entry) {
    return entry.copy.quantises() && entry.at.space != MemorySpace::host;
  }

  std::vector<Entries> lists_;
  std::unique_ptr<Arena> arena_;
  LocalBuffer room_ = {};  // for what is quantised before it is staged
};

}  // namespace

std::uint64_t StagedCopy::staged_bytes(bool pack) const {
  return checked_mul_bytes(static_cast<std::uint64_t>(element_count(copy.extents)),
                           pack ? copy.destination_item_bytes() : copy.source_item_bytes());
}

std::unique_ptr<CopyQueue> make_plain_copy_queue() { return std::make_unique<PlainCopyQueue>(); }

}  // namespace m2n
