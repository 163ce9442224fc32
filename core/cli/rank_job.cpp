// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/rank_job.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>

#include "core/engine/changing.hpp"
#include "core/error.hpp"

namespace m2n::cli {
namespace {

/// How many ranks the side has, which must be those from @p first on.
Rank count_side(const std::vector<Rank>& ranks, Rank first, const char* side) {
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] != first + static_cast<Rank>(i)) {
      throw Error(Errc::usage, std::string(side) + " rank " + std::to_string(ranks[i]) +
                                   " stands where rank " +
                                   std::to_string(first + static_cast<Rank>(i)) +
                                   " must: trainers are ranks 0 to T-1 and workers those from T "
                                   "on; 'm2n run' takes any ranks");
    }
  }
  if (ranks.empty()) {
    throw Error(Errc::usage, std::string("the experiment has no ") + side + " rank");
  }
  return static_cast<Rank>(ranks.size());
}

/// One line an event on standard error, written whole.
void log_event(const Event& event, bool json) {
  const std::string line = (json ? to_json(event) : to_line(event)) + '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

HostPort host_port(const std::string& what, const std::string& text) {
  const std::size_t colon = text.rfind(':');
  HostPort out;
  if (colon != text.npos) {
    out.host = text.substr(0, colon);
    const std::string port = text.substr(colon + 1);
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), out.port);
    if (error == std::errc{} && end == port.data() + port.size() && !out.host.empty()) {
      if (out.host.size() > 2 && out.host.front() == '[' && out.host.back() == ']') {
        out.host = out.host.substr(1, out.host.size() - 2);
      }
      return out;
    }
  }
  throw Error(Errc::usage, what + " is '" + text + "'; it must be HOST:PORT");
}

RankJob::RankJob(const Experiment& experiment, Part part)
    : job_(experiment, RanksAre::processes), part_(part) {
  job_.require_memory();
  trainers_ = count_side(job_.problem().source_ranks(), 0, "trainer");
  workers_ = count_side(job_.problem().destination_ranks(), trainers_, "worker");
  const Rank expected = part == Part::trainer ? trainers_ : workers_;
  const char* const name = part == Part::trainer ? "trainer" : "worker";
  if (experiment.process.rank >= 0) {
    number_ = experiment.process.rank;
  } else if (const auto place = place_from_environment()) {
    number_ = place->rank;
    if (place->size != expected) {
      throw Error(Errc::usage, place->launcher + " started " + std::to_string(place->size) +
                                   " processes, but the experiment has " +
                                   std::to_string(expected) + " " + name + "s");
    }
  } else if (expected != 1) {
    throw Error(Errc::usage, std::string("which ") + name + " is this? Give --rank, 0 to " +
                                 std::to_string(expected - 1) +
                                 ", or start it with torchrun, mpirun or srun");
  }
  if (number_ >= expected) {
    throw Error(Errc::usage, "--rank is " + std::to_string(number_) + ", but the experiment has " +
                                 std::to_string(expected) + " " + name + "s, counted from 0");
  }
  token_ = experiment.process.token.empty() ? token_from_environment() : experiment.process.token;
}

std::vector<Index> RankJob::mesh() const {
  const Index shards = job_.models() == nullptr || experiment().tensor_parallel == 0
                           ? 0
                           : experiment().tensor_parallel;
  if (job_.models() == nullptr) {
    return {workers_, 1};
  }
  return shards == 0 ? std::vector<Index>{1, workers_}
                     : std::vector<Index>{workers_ / shards, shards};
}

EngineOptions RankJob::engine_options() const {
  const Experiment& e = experiment();
  EngineOptions options;
  options.planner = e.planner;
  options.planner_options = e.planner_options;
  options.transport = e.transport;
  options.transport_options = e.transport_options;
  options.topology = job_.topology();
  options.limits.pool_bytes = e.pool_bytes;
  options.verify = e.process.digest;
  options.environment = settings_from_environment();
  options.device = job_.device_of(part_ == Part::trainer ? number_ : trainers_ + number_);
  options.token = token_;
  options.deadline =
      std::chrono::milliseconds(static_cast<std::int64_t>(e.deadline_seconds * 1000));
  if (e.process.log != "off") {
    options.on_event = [json = e.process.log == "json"](const Event& event) {
      log_event(event, json);
    };
  }
  return options;
}

std::unique_ptr<WeightSource> RankJob::source() const {
  return job_.make_source(number_, experiment().process.change);
}

std::unique_ptr<WeightSink> RankJob::sink() const { return job_.make_sink(trainers_ + number_); }

Comparison RankJob::verify(WeightSink& sink, std::uint64_t version, const Buffers& buffers) const {
  const auto values = job_.changed_values(experiment().process.change ? version : 0);
  return verify_worker(job_, trainers_ + number_, &sink, buffers.destination, *values);
}

ListenSocket RankJob::listen(int descriptor, const HostPort& where) {
  return descriptor >= 0 ? ListenSocket::adopt(descriptor)
                         : ListenSocket::reserve(where.host, where.port);
}

}  // namespace m2n::cli
