// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/paged_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/error.hpp"

namespace m2n::testing {
namespace {

constexpr int kDevices = 2;

std::atomic<std::uint64_t> held_bytes{0};
std::atomic<std::uint64_t> pinned{0};

/// Ranges that are handed out, and where they can be reached.
class Aliases {
 public:
  static Aliases& instance() {
    static Aliases aliases;
    return aliases;
  }
  void add(std::byte* base, std::uint64_t bytes, std::byte* alias) {
    const std::lock_guard lock(mutex_);
    ranges_[base] = {bytes, alias};
  }
  void remove(std::byte* base) {
    const std::lock_guard lock(mutex_);
    ranges_.erase(base);
  }
  std::byte* reach(std::byte* address) const {
    const std::lock_guard lock(mutex_);
    auto after = ranges_.upper_bound(address);
    if (after != ranges_.begin()) {
      const auto& [base, range] = *std::prev(after);
      if (address <= base + range.bytes) {
        return range.alias + (address - base);
      }
    }
    throw Error(Errc::bad_argument, "an address that is no device memory");
  }

 private:
  struct Range {
    std::uint64_t bytes = 0;
    std::byte* alias = nullptr;
  };
  mutable std::mutex mutex_;
  std::map<std::byte*, Range> ranges_;
};

LocalBuffer reachable(const LocalBuffer& buffer) {
  if (buffer.space == MemorySpace::host) {
    return buffer;
  }
  return {Aliases::instance().reach(buffer.data), buffer.bytes, MemorySpace::host, 0};
}

PlacedBox reachable(PlacedBox placed) {
  placed.at = reachable(placed.at);
  return placed;
}

class PagedArena final : public Arena {
 public:
  PagedArena(std::uint64_t bytes, int device) : device_(device) {
    const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    bytes_ = (bytes + page) / page * page;  // never none
    const int file = memfd_create("paged", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes_)) != 0) {
      throw Error(Errc::unavailable, "no pages: " + std::to_string(errno));
    }
    base_ = map(file, PROT_NONE);
    alias_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
    Aliases::instance().add(base_, bytes_, alias_);
    held_bytes += bytes_;
  }
  ~PagedArena() override {
    held_bytes -= bytes_;
    Aliases::instance().remove(base_);
    munmap(base_, bytes_);
    munmap(alias_, bytes_);
  }

  LocalBuffer take(std::uint64_t bytes, std::uint64_t align) override {
    const std::uint64_t begin = (used_ + align - 1) / align * align;
    if (begin > bytes_ || bytes > bytes_ - begin) {
      throw Error(Errc::bad_argument, "the pages are full");
    }
    used_ = begin + bytes;
    return {base_ + begin, bytes, MemorySpace::device, device_};
  }

 private:
  std::byte* map(int file, int access) const {
    void* const at = mmap(nullptr, bytes_, access, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) {
      throw Error(Errc::unavailable, "no addresses: " + std::to_string(errno));
    }
    return static_cast<std::byte*>(at);
  }

  int device_;
  std::uint64_t bytes_ = 0;
  std::uint64_t used_ = 0;
  std::byte* base_ = nullptr;
  std::byte* alias_ = nullptr;
};

/// Runs a list as late as it may: when somebody has asked for the second time, or waits.
class LateQueue final : public CopyQueue {
 public:
  List add_pack(std::span<const StagedCopy> copies) override { return plain_->add_pack(copies); }
  List add_unpack(std::span<const StagedCopy> copies) override {
    return plain_->add_unpack(copies);
  }
  List add_copies(std::span<const PlacedCopy> copies) override {
    return plain_->add_copies(copies);
  }
  void compile() override {
    plain_->compile();
    compiled_ = true;
  }
  Ticket run(List list, std::byte* staging) override {
    expects(compiled_, "compile() before run()");
    waiting_.push_back({list, staging, false});
    return done_ + waiting_.size();
  }
  bool is_done(Ticket ticket) override {
    if (ticket > done_ && !waiting_.at(ticket - done_ - 1).asked) {
      waiting_[ticket - done_ - 1].asked = true;
      return false;
    }
    run_until(ticket);
    return true;
  }
  void finish() override { run_until(done_ + waiting_.size()); }

 private:
  struct Run {
    List list;
    std::byte* staging;
    bool asked;
  };

  void run_until(Ticket ticket) {
    for (; done_ < ticket; ++done_) {
      plain_->run(waiting_.front().list, waiting_.front().staging);
      waiting_.pop_front();
    }
  }

  std::unique_ptr<CopyQueue> plain_ = make_plain_copy_queue();
  bool compiled_ = false;
  std::deque<Run> waiting_;
  Ticket done_ = 0;
};

class PagedMemory final : public Memory {
 public:
  std::string_view name() const noexcept override { return "paged"; }
  int device_count() const override { return kDevices; }
  std::string description(int /*device*/) const override { return "pages of the host"; }
  std::unique_ptr<Arena> reserve(std::uint64_t bytes, int device) const override {
    expects(device >= 0 && device < kDevices, "a device that exists");
    return std::make_unique<PagedArena>(bytes, device);
  }
  std::uint64_t free_bytes(int device) const override { return host().free_bytes(device); }
  void write(const LocalBuffer& to, std::span<const std::byte> from) const override {
    host().write(reachable(to), from);
  }
  void read(const LocalBuffer& from, std::span<std::byte> to) const override {
    host().read(reachable(from), to);
  }
  void zero(const LocalBuffer& buffer) const override { host().zero(reachable(buffer)); }
  void copy(const LocalBuffer& from, const LocalBuffer& to) const override {
    host().copy(reachable(from), reachable(to));
  }
  void copy(const StridedCopy& region, const LocalBuffer& from,
            const LocalBuffer& to) const override {
    host().copy(region, reachable(from), reachable(to));
  }
  std::unique_ptr<CopyQueue> copy_queue(int /*device*/) const override {
    return std::make_unique<LateQueue>();
  }
  std::shared_ptr<void> pin(std::span<std::byte> range) const override {
    pinned += range.size();
    return {range.data(), [bytes = range.size()](void*) { pinned -= bytes; }};
  }
  void block_scales(std::span<const ScalesOf> boxes) const override {
    std::vector<ScalesOf> here(boxes.begin(), boxes.end());
    for (ScalesOf& entry : here) {
      entry.placed = reachable(entry.placed);
      entry.scales.at = reachable(entry.scales.at);
    }
    host().block_scales(here);
  }
  void quantise(const StridedCopy& region, const LocalBuffer& from, const LocalBuffer& scales,
                const LocalBuffer& to) const override {
    host().quantise(region, reachable(from), reachable(scales), reachable(to));
  }
  void fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                      const LocalBuffer& to, const Strides& strides) const override {
    host().fill_synthetic(shape, box, dtype, seed, reachable(to), strides);
  }
  void change(std::span<const PlacedBox> boxes, std::uint64_t from,
              std::uint64_t to) const override {
    std::vector<PlacedBox> here(boxes.begin(), boxes.end());
    for (PlacedBox& placed : here) {
      placed = reachable(placed);
    }
    host().change(here, from, to);
  }
  std::vector<Wrong> compare(std::span<const FormulaBox> boxes) const override {
    std::vector<FormulaBox> here(boxes.begin(), boxes.end());
    for (FormulaBox& entry : here) {
      entry.placed = reachable(entry.placed);
    }
    return host().compare(here);
  }
  std::vector<std::uint64_t> digests(std::span<const DigestOf> boxes) const override {
    std::vector<DigestOf> here(boxes.begin(), boxes.end());
    for (DigestOf& entry : here) {
      entry.placed = reachable(entry.placed);
      if (can_quantise(entry.placed.dtype, entry.as)) {
        entry.scales.at = reachable(entry.scales.at);
      }
    }
    return host().digests(here);
  }

 private:
  static const Memory& host() { return memory_of(MemorySpace::host); }
};

class PagedSession final : public Session {
 public:
  PagedSession(Group& group, const Program& program, const Buffers& buffers, Deadline deadline)
      : group_(group), program_(program), buffers_(buffers) {
    if (program.scratch_bytes > 0) {
      scratch_arena_ = memory_of(MemorySpace::device).reserve(program.scratch_bytes, 0);
      scratch_ = scratch_arena_->take(program.scratch_bytes, 64);
    }
    const std::string mine = std::to_string(reinterpret_cast<std::uintptr_t>(this));
    for (const std::string& text : group.all_gather("paged prepare", mine, deadline)) {
      ranks_.push_back(reinterpret_cast<const PagedSession*>(std::stoull(text)));
    }
  }

  void start(std::uint64_t version, Deadline /*deadline*/) override { version_ = version; }

  RoundReport wait(Deadline deadline) override {
    const auto begin = std::chrono::steady_clock::now();
    for (std::uint32_t stage = 0; stage < program_.stage_count; ++stage) {
      group_.barrier("paged stage", deadline);
      for (const auto* regions : {&program_.receives, &program_.copies}) {
        for (const Region& region : *regions) {
          if (region.stage == stage) {
            if (region.copy.quantises()) {
              memory_of(MemorySpace::device)
                  .quantise(region.copy, place(region.from), place(region.scales),
                            place(region.to));
              continue;
            }
            copy_region(region.copy, place(region.from), place(region.to));
          }
        }
      }
    }
    group_.barrier("paged end", deadline);
    RoundReport report = expected_report(program_, "pages");
    report.version = version_;
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return report;
  }

  void abort() noexcept override {}

 private:
  LocalBuffer place(const Endpoint& end) const {
    const PagedSession& session = *ranks_[static_cast<std::size_t>(end.rank)];
    const LocalBuffer& buffer = end.role == Role::source ? session.buffers_.source.at(end.buffer)
                                : end.role == Role::destination
                                    ? session.buffers_.destination.at(end.buffer)
                                    : session.scratch_;
    return buffer.from(end.offset_bytes);
  }

  Group& group_;
  Program program_;
  Buffers buffers_;
  std::unique_ptr<Arena> scratch_arena_;
  LocalBuffer scratch_;
  std::vector<const PagedSession*> ranks_;
  std::uint64_t version_ = 0;
};

class PagedTransport final : public Transport {
 public:
  std::string_view name() const noexcept override { return "paged"; }
  bool moves(MemorySpace space) const noexcept override { return space == MemorySpace::device; }
  void connect(Group& group, Deadline /*deadline*/) override { group_ = &group; }
  std::unique_ptr<Session> prepare(const Program& program, const Buffers& buffers,
                                   Deadline deadline) override {
    expects(group_ != nullptr, "connect() before prepare()");
    return std::make_unique<PagedSession>(*group_, program, buffers, deadline);
  }

 private:
  Group* group_ = nullptr;
};

}  // namespace

std::unique_ptr<const m2n::Memory> make_paged_memory() { return std::make_unique<PagedMemory>(); }

std::uint64_t paged_bytes() { return held_bytes; }
std::uint64_t pinned_bytes() { return pinned; }

std::unique_ptr<Transport> make_paged_transport() { return std::make_unique<PagedTransport>(); }

}  // namespace m2n::testing
