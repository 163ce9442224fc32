// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The streams of rounds. The driver shares few hardware queues among all streams of a process, and
/// a stream that waits for a peer holds up those behind it in its queue, maybe that peer's. So a
/// rank has no more streams than it has rounds under way, however many sessions it has.

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "transports/nccl/device.hpp"

namespace m2n::nccl {

/// Of one round. Those of the engines and the wire exist where they are used.
struct Streams {
  Stream main;
  std::unique_ptr<Stream> engine;
  std::unique_ptr<Stream> pack;
  std::unique_ptr<Stream> exchange;
  std::unique_ptr<Stream> unpack;

  /// Null where there is none.
  std::array<const Stream*, 5> all() const {
    return {&main, engine.get(), pack.get(), exchange.get(), unpack.get()};
  }
};

/// - Threads: any. The device of the transport must be current in take().
class StreamPool {
 public:
  std::unique_ptr<Streams> take(bool engine, bool wire);
  /// @p streams  May still run, and then what takes them next runs after that.
  void give(std::unique_ptr<Streams> streams);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Streams>> free_;
};

}  // namespace m2n::nccl
