// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A store and ranks in threads, for tests.

#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/rendezvous/store_server.hpp"
#include "core/rendezvous/world_group.hpp"

namespace m2n::testing {

/// Long enough for any machine: a test that waits so long has failed.
inline Deadline long_deadline() { return deadline_in(std::chrono::seconds(120)); }

inline const char* const kToken = "the token of the tests";

inline StoreServer make_store(std::uint64_t epoch = 1) {
  return StoreServer(ListenSocket::reserve("127.0.0.1", 0), {.token = kToken, .epoch = epoch});
}

inline WorldOptions rank_of(const StoreServer& store, Rank rank, Rank size) {
  WorldOptions options;
  options.port = store.port();
  options.token = kToken;
  options.rank = rank;
  options.size = size;
  return options;
}

/// Runs @p body once a rank, each in its own thread; what each threw, "" for nothing.
inline std::vector<std::string> run_threads(Rank size, const std::function<void(Rank)>& body) {
  std::vector<std::string> thrown(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        thrown[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return thrown;
}

/// As above, for the ranks of a world at @p store.
inline std::vector<std::string> run_world(const StoreServer& store, Rank size,
                                          const std::function<void(WorldGroup&)>& body) {
  return run_threads(
      size, [&](Rank rank) { body(*join_world(rank_of(store, rank, size), long_deadline())); });
}

}  // namespace m2n::testing
