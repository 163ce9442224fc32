// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One rank's UCX worker: its endpoints, its small messages, and sleeping until something happens.

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/group.hpp"
#include "transports/common/segment.hpp"
#include "transports/ucx/context.hpp"
#include "transports/ucx/crossover.hpp"

namespace m2n::ucx {

enum class Kind : std::uint32_t {
  route,     ///< The sender has regions for the receiver; `value` is 1 when it can put them.
  keys,      ///< How the sender of this message is reached, in answer.
  ready,     ///< The sender has begun round `round`; its memory may be written.
  open,      ///< The sender has come to stage `value`, whose memory may be written.
  wake,      ///< A ring between the two has changed.
  data,      ///< Chunk `value` of packed regions.
  put_done,  ///< All puts of stage `value` are complete.
  finished,  ///< To rank 0: the sender has done its part of the round.
  over,      ///< From rank 0: everyone has.
  waiting,   ///< From rank 0: the payload lists the ranks that it waits for.
  failed,    ///< The round has failed, as the payload says. No put of the sender is under way.
  left,      ///< The sender's session is gone.
};

struct Header {
  std::uint64_t world = 0;  ///< Drawn anew by each world: addresses are used again.
  std::uint32_t session = 0;
  Kind kind = Kind::ready;
  Rank from = 0;
  std::uint32_t unused = 0;
  std::uint64_t round = 0;
  std::uint64_t value = 0;  ///< Version, chunk or stage, by kind.
};

/// Takes the messages of one session. Called while somebody progresses, under the worker's lock.
class Receiver {
 public:
  virtual ~Receiver() = default;
  virtual void receive(const Header& header, std::span<const std::byte> payload) = 0;
};

/// Operations that UCX has not completed. Must outlive them.
struct Pending {
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;
  ucs_status_t status = UCS_OK;  ///< Of the first that failed.
};

/// A peer, as this rank reaches it.
struct Peer {
  Rank rank = 0;
  ucp_ep_h endpoint = nullptr;
  bool shares_memory = false;     ///< Both map the same memory.
  bool kernel_tells = false;      ///< UCX does not tell when it is lost, see ErrorChoice.
  Descriptor presence;            ///< A byte of it is held while the peer lives; of one machine.
  ucs_status_t failure = UCS_OK;  ///< Told by UCX.

  bool is_gone() const noexcept;
  /// Lanes as UCX chose them: "sysv am am_bw#0, cma rma_bw#0".
  std::string lanes() const;
  /// True when a lane writes remote memory by itself. Otherwise UCX emulates puts by messages; up
  /// to 1.13 at least, that ends the process when the peer is lost.
  bool has_put_lane() const { return lanes().find(" rma") != std::string::npos; }
  /// True when a lane is as fast as what device memory is for: InfiniBand, RoCE, NVLink.
  bool has_fast_lane() const;
  /// True when a lane goes from device to device (CUDA IPC).
  bool has_device_lane() const;
};

/// How a rank is reached, for the others.
struct Contact {
  std::string machine;
  std::int64_t process = 0;
  int presence = -1;
  std::uint64_t world = 0;  ///< That of rank 0 is everyone's.
  std::uint64_t probe_address = 0;
  std::string probe_key;  ///< Of its PutProbe; empty: it has none.
  std::string address;

  std::string text() const;
  static Contact parse(const std::string& text);
};

/// - Threads: every call under mutex(), except signal() and sleep().
class Worker {
 public:
  /// @param device  That the rank's memory lies on, as far as is known: UCX looks for the current
  /// one when it is made, progresses, and ends.
  Worker(const UcxOptions& options, Rank rank, std::optional<int> device);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  /// Never waits for peers. Operations that a dead peer holds up are given up, with their memory.
  ~Worker();

  std::mutex& mutex() noexcept { return mutex_; }
  const std::shared_ptr<Context>& context() const noexcept { return context_; }
  Contact contact() const;
  void set_contacts(std::vector<Contact> contacts) { contacts_ = std::move(contacts); }
  /// True when this rank and @p rank reach each other through shared memory; the same on both.
  bool shares_memory_with(Rank rank) const;
  Peer& peer(Rank rank);

  void add(std::uint32_t session, Receiver* receiver) { receivers_[session] = receiver; }
  void remove(std::uint32_t session) { receivers_.erase(session); }

  /// Sends a small message, of this world; @p payload is copied.
  void send(Peer& peer, const Header& header, std::string_view payload = {});
  /// Sends @p payload, which stays in place until @p pending is done with it.
  void send_data(Peer& peer, const Header& header, std::span<const std::byte> payload,
                 const RegisteredMemory& memory, Pending& pending);
  /// Writes @p bytes, of @p memory, at @p address of the peer. Complete there after a flush().
  void put(Peer& peer, std::span<const std::byte> bytes, const RegisteredMemory& memory,
           std::uint64_t address, const RemoteKey& key, Pending& pending);
  void flush(Peer& peer, Pending& pending);
  /// The length from which on rows to @p peer are put, measured once for all peers that are reached
  /// over the same lanes; see PutProbe::measure().
  std::uint64_t measured_put_bytes(Peer& peer, std::uint64_t chunk_bytes,
                                   const std::function<bool()>& stop);

  /// @return whether anything happened.
  bool progress();
  /// Small messages that have not left yet.
  std::uint64_t unsent() const noexcept { return unsent_.operations; }
  /// Prepares for sleep(). @return false when there is something to progress.
  bool arm();
  /// After arm(), without the lock: until something happens, signal() is called, or @p limit.
  /// @return false when the time was over.
  bool sleep(std::chrono::nanoseconds limit) const;
  void signal() const noexcept;

  /// Keeps @p resource as long as operations may use it.
  void keep(std::shared_ptr<void> resource);

 private:
  struct Operation;
  struct Estate;  ///< What operations use.

  template <class Call>
  void post(Operation& operation, Pending& pending, std::uint64_t bytes, const Call& call);
  Operation& take_operation(const Header& header = {});
  void finish(Operation& operation, ucs_status_t status);
  static void complete(void* request, ucs_status_t status, void* user_data);
  static ucs_status_t on_message(void* arg, const void* header, std::size_t header_bytes,
                                 void* data, std::size_t bytes, const ucp_am_recv_param_t* param);
  static void on_error(void* arg, ucp_ep_h endpoint, ucs_status_t status);
  void close_endpoints() noexcept;

  std::optional<int> device_;
  std::unique_ptr<Estate> estate_;
  std::shared_ptr<Context> context_;
  ErrorChoice errors_;
  Rank rank_;
  ucp_worker_h raw_ = nullptr;
  int event_fd_ = -1;
  Descriptor presence_;
  Descriptor presence_hold_;
  std::mutex mutex_;
  std::vector<Contact> contacts_;
  std::map<Rank, std::unique_ptr<Peer>> peers_;
  std::map<std::uint32_t, Receiver*> receivers_;
  Pending unsent_;
  std::uint64_t under_way_ = 0;  // operations of any kind
  std::vector<Operation*> free_operations_;
  std::shared_ptr<PutProbe> probe_;                   // null where nothing is to be measured
  std::map<std::string, std::uint64_t> put_lengths_;  // by lanes
};

}  // namespace m2n::ucx
