// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One rank of an experiment as a process: its place, where it meets the others, what it logs.

#include <cstdint>
#include <memory>
#include <string>

#include "core/cli/environment.hpp"
#include "core/cli/job.hpp"
#include "core/engine/engine_options.hpp"
#include "core/engine/oracle.hpp"
#include "core/rendezvous/listen_socket.hpp"

namespace m2n::cli {

/// "host:port", with [brackets] around an IPv6 address.
struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};
/// @throws Error{usage} naming @p what and the right form.
HostPort host_port(const std::string& what, const std::string& text);

/// Which part the process plays.
enum class Part : std::uint8_t { trainer, worker };

class RankJob {
 public:
  /// @throws Error{usage} when the place does not fit the experiment.
  RankJob(const Experiment& experiment, Part part);

  const Job& job() const noexcept { return job_; }
  const Experiment& experiment() const noexcept { return job_.experiment(); }
  Rank trainers() const noexcept { return trainers_; }
  Rank workers() const noexcept { return workers_; }
  /// Among those of its part.
  Rank number() const noexcept { return number_; }
  const std::string& token() const noexcept { return token_; }
  /// {replicas, shards} of the workers.
  std::vector<Index> mesh() const;

  EngineOptions engine_options() const;
  std::unique_ptr<WeightSource> source() const;
  std::unique_ptr<WeightSink> sink() const;

  /// Compares this worker's weights with the values of @p version.
  Comparison verify(WeightSink& sink, std::uint64_t version, const Buffers& buffers) const;

  /// The socket behind a descriptor that a launcher passed on, or one reserved on @p where.
  static ListenSocket listen(int descriptor, const HostPort& where);

 private:
  Job job_;
  Part part_;
  Rank trainers_ = 0;
  Rank workers_ = 0;
  Rank number_ = 0;
  std::string token_;
};

}  // namespace m2n::cli
