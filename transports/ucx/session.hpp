// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One rank's rounds over UCX.
///
/// A rank that begins a round says so to its peers; from then on they may write its memory. In each
/// stage a sender fills slots of the receiver's ring, or puts rows and sends packed chunks, and
/// tells when its puts are complete at the receiver. A rank that has done its part tells rank 0,
/// which tells all when everyone has; so every rank learns how the round ended.
///
/// Who fails, first completes the puts that it has under way, then tells its peers; who has to
/// leave its memory to itself waits, for a bounded time, until the peers that write it have told.
///
/// Memory of a device goes through the same rings and chunks, which are then staging in host
/// memory: lists of copies between the two run on the device beside everything else (device.cpp).

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/api/transport.hpp"
#include "transports/ucx/neighbor.hpp"
#include "transports/ucx/routes.hpp"
#include "transports/ucx/worker.hpp"

namespace m2n::ucx {

class UcxSession final : public Session, private Receiver {
 public:
  /// Collects and tells how a round ended.
  static constexpr Rank kRoot = 0;
  /// For the last messages of a session to leave.
  static constexpr std::chrono::milliseconds kLeaveLimit{500};

  UcxSession(std::shared_ptr<Worker> worker, std::uint32_t number, const UcxOptions& options,
             const Program& program, const Buffers& buffers, Rank size);
  ~UcxSession() override;

  /// Allocates and registers, and listens. Not collective.
  void open(const Program& program);
  /// Exchanges keys with the peers. Collective, after everyone's open().
  void connect(const Program& program, Deadline deadline);

  void start(std::uint64_t version, Deadline deadline) override;
  RoundReport wait(Deadline deadline) override;
  void abort() noexcept override;
  std::optional<std::uint64_t> extra_bytes() const override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// What a sender says of itself when the two agree on a route.
  static constexpr std::uint64_t kRoutePuts = 1;
  static constexpr std::uint64_t kRouteDevice = 2;  ///< Its memory is a device's.
  /// Its second word, where it was offered the direct way: whether it takes that.
  static constexpr std::uint64_t kRouteFinal = 4;
  static constexpr std::uint64_t kRouteDirect = 8;

  struct Failure {
    Errc code;
    std::string text;
    std::uint64_t round;  ///< A peer may already have begun one that this rank has not.
  };
  /// Packs chunks for the wire.
  struct StagingSlot {
    std::byte* data = nullptr;
    Pending pending;
    const Neighbor* packed_for = nullptr;  ///< While the device packs a chunk,
    std::size_t chunk = 0;                 ///< this one of that neighbor.
    CopyQueue::Ticket ticket = 0;
  };

  void receive(const Header& header, std::span<const std::byte> payload) override;
  void receive_chunk(Neighbor& neighbor, const Header& header, std::span<const std::byte> payload);

  Header header(Kind kind, std::uint64_t value = 0) const;
  void tell(Neighbor& neighbor, Kind kind, std::uint64_t value = 0, std::string_view text = {});
  void tell_all(Kind kind, std::uint64_t value = 0, std::string_view text = {});

  /// Calls @p step until it returns true. It adds those that it waits for to awaited_, and sets
  /// moved_ when it did something.
  void drive(Lock& lock, const std::string& phase, Deadline deadline, bool (UcxSession::*step)());
  bool all_routes_are_here();
  bool all_keys_are_here();
  bool all_answers_are_here();
  void open_stage();
  bool run_stage();
  bool receive_stage(Neighbor& neighbor);
  bool send_stage(Neighbor& neighbor);
  bool fill_slot(Neighbor& neighbor);
  bool send_chunk(Neighbor& neighbor);
  void send_slot(Neighbor& neighbor, std::size_t chunk, StagingSlot& slot);
  // Of device.cpp, for memory on a device.
  void open_device(const Program& program);
  void compile_device();
  void require_fast_lanes() const;
  bool fill_slots_by_device(Neighbor& neighbor);
  void empty_slots_by_device(Neighbor& neighbor, std::size_t end);
  bool send_chunks_by_device(Neighbor& neighbor);
  void unpack_by_device(CopyQueue::List list, std::span<const std::byte> payload);
  void copy_stage();
  bool copies_are_done();
  /// Waits for what the device has under way: nothing touches this rank's memory afterwards.
  void finish_device() noexcept;
  /// Registers the memory of regions that are put from device to device, and says whether that can
  /// be.
  bool register_device(const std::map<Rank, PairRegions>& pairs, Endpoint Region::*end,
                       Zones& zones);
  bool takes_device_puts(const Neighbor& neighbor) const;
  std::string device_path(const Neighbor& neighbor) const;
  bool put_rows(Neighbor& neighbor);
  bool end_round();
  /// Tells the rings that this rank sleeps, or no longer.
  void announce_sleep(bool sleeps);
  bool has_unsent() const;

  void look_for_lost(bool ask_the_kernel);
  void send_news();
  std::string missing() const;
  /// The first failure stays.
  void give_up(Errc code, const std::string& text);
  bool has_failed() const { return failure_ && failure_->round <= round_; }
  void check_version(const Neighbor& neighbor);
  [[noreturn]] void fail(Lock& lock, const std::string& phase);
  bool writes_here(const Neighbor& neighbor) const;
  /// Progresses until @p done, at most @p limit. For the end of things.
  template <class Done>
  void settle(std::chrono::milliseconds limit, const Done& done) {
    const Deadline end = deadline_in(limit);
    while (!done() && std::chrono::steady_clock::now() < end) {
      if (!worker_->progress()) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }
  void answer_routes(const Program& program);
  void take_keys(const Program& program);
  void take_answers(const Program& program);
  void make_rings();
  Way wire_way(std::uint64_t put_bytes) const;
  /// From which length on rows of @p regions are put, on the wire.
  std::uint64_t put_bytes_to(const Neighbor& neighbor, const PairRegions& regions,
                             Deadline deadline);
  /// ", puts from 16384 bytes", of both directions where they differ.
  static std::string host_puts(const Neighbor& neighbor);
  void describe_paths();

  std::shared_ptr<Worker> worker_;
  std::uint32_t number_;
  UcxOptions options_;
  Rank rank_;
  Rank size_;
  RankMemory memory_;
  std::optional<int> device_;                // that this rank's memory lies on
  std::vector<std::vector<Region>> copies_;  // [stage]
  std::vector<std::string> phases_;          // [stage]
  std::uint64_t ring_count_ = 0;
  RegisteredMemory rings_;
  std::uint64_t slot_bytes_ = 0;
  std::unique_ptr<RegisteredMemory> staging_memory_;
  std::vector<std::unique_ptr<StagingSlot>> staging_;
  std::shared_ptr<void> rings_pin_;
  std::shared_ptr<void> staging_pin_;
  Zones destination_zones_;
  Zones source_zones_;
  std::map<Rank, Neighbor> neighbors_;
  std::vector<Neighbor*> outs_;
  std::vector<Neighbor*> ins_;
  std::unique_ptr<CopyQueue> packer_;        // null unless memory is a device's
  std::unique_ptr<CopyQueue> unpacker_;      // which makes local copies, too
  std::vector<CopyQueue::List> copy_lists_;  // [stage]
  CopyQueue::Ticket copies_ticket_ = 0;

  std::uint64_t round_ = 0;
  std::uint64_t over_ = 0;  // the last round of which rank 0 has told the end
  bool running_ = false;
  bool waiting_ = false;     // inside wait() or connect()
  std::uint64_t ended_ = 0;  // the last round of which this rank has told its end
  std::size_t stage_ = 0;
  bool bypass_cache_ = false;
  bool moved_ = false;
  std::atomic<bool> aborted_ = false;
  std::optional<Failure> failure_;
  bool told_failure_ = false;
  std::vector<Rank> awaited_;
  std::optional<std::chrono::steady_clock::time_point> lost_since_;
  std::string news_;       // the ranks that rank 0 waits for
  std::string sent_news_;  // rank 0: the last that it told
  std::chrono::steady_clock::time_point started_;
  RoundReport report_;
};

}  // namespace m2n::ucx
