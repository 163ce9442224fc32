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
  void compile() override {}

  Ticket run(List number, std::byte* staging) override {
    const Entries& list = lists_.at(number);
    for (const StagedCopy& entry : list.staged) {
      const LocalBuffer there =
          host_buffer(staging + entry.offset_bytes, entry.staged_bytes(list.pack));
      copy_region(entry.copy, list.pack ? entry.at : there, list.pack ? there : entry.at);
    }
    for (const PlacedCopy& entry : list.placed) {
      copy_region(entry.copy, entry.from, entry.to);
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
