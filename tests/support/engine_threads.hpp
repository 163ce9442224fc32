// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Trainers and workers of a job as threads of one process, over the store and an in-process
/// control plane.

#include <boost/json.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/engine/deployment.hpp"
#include "core/rendezvous/listen_socket.hpp"
#include "tests/support/engine_job.hpp"

namespace m2n::testing {

inline constexpr std::chrono::seconds kLong{120};

/// A client that looks at every call before it passes it on. With @p names_only it stands for a
/// deployment that takes no ranges in updates.
class Watched final : public ControlClient {
 public:
  using Look = std::function<void(ControlCall, boost::json::object&)>;
  Watched(std::shared_ptr<ControlHandler> handler, Look look, bool names_only = false)
      : client_(make_local_client(std::move(handler))),
        look_(std::move(look)),
        names_only_(names_only) {}

  boost::json::object init_weight_transfer_engine(const boost::json::object& body,
                                                  Deadline deadline) override {
    boost::json::object answer =
        client_->init_weight_transfer_engine(looked(ControlCall::init, body), deadline);
    if (names_only_) {
      answer.clear();
    }
    return answer;
  }
  boost::json::object start_weight_update(const boost::json::object& body,
                                          Deadline deadline) override {
    return client_->start_weight_update(looked(ControlCall::start, body), deadline);
  }
  boost::json::object update_weights(const boost::json::object& body, Deadline deadline) override {
    return client_->update_weights(looked(ControlCall::update, body), deadline);
  }
  boost::json::object finish_weight_update(const boost::json::object& body,
                                           Deadline deadline) override {
    return client_->finish_weight_update(looked(ControlCall::finish, body), deadline);
  }
  WeightState weight_state(Deadline deadline) override { return client_->weight_state(deadline); }
  void cancel(const std::string& reason) noexcept override { client_->cancel(reason); }

 private:
  boost::json::object looked(ControlCall call, boost::json::object body) {
    if (look_) {
      look_(call, body);
    }
    return body;
  }

  std::unique_ptr<ControlClient> client_;
  Look look_;
  bool names_only_;
};

/// All ranks of a job in this process. Deployments are alike.
class Threads {
 public:
  explicit Threads(Rank trainer_count = 2, Rank worker_count = 2, std::size_t deployments = 1,
                   const std::string& sink = "inplace", MemorySpace space = MemorySpace::host)
      : job(trainer_count, worker_count, space),
        sink_kinds(deployments * static_cast<std::size_t>(worker_count), sink),
        socket_(ListenSocket::reserve("127.0.0.1", 0)) {
    for (Rank trainer = 0; trainer < trainer_count; ++trainer) {
      sources.push_back(job.source(trainer));
      trainer_options.emplace_back();
      prepare(trainer_options.back(), trainer);
    }
    for (std::size_t d = 0; d < deployments; ++d) {
      for (Rank worker = 0; worker < worker_count; ++worker) {
        worker_options.emplace_back();
        prepare(worker_options.back(), trainer_count + worker);
      }
    }
  }

  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() {
    each([&](Rank trainer) { engine(trainer).shutdown(); });
  }

  /// Makes engines and sinks from the options as they are now.
  void make() {
    each([&](Rank trainer) { engine(trainer).shutdown(); });
    engines.clear();
    handlers.clear();
    workers.clear();
    sinks.clear();
    for (std::size_t i = 0; i < worker_options.size(); ++i) {
      sinks.push_back(job.sink(static_cast<Rank>(i) % job.workers(), sink_kinds[i]));
    }
    for (std::size_t i = 0; i < sources.size(); ++i) {
      engines.push_back(std::make_unique<TrainerEngine>(job.registries(), trainer_options[i]));
    }
    const auto count = static_cast<std::size_t>(job.workers());
    std::vector<WorkerEngine*> deployment;
    for (std::size_t i = 0; i < sinks.size(); ++i) {
      workers.push_back(std::make_unique<WorkerEngine>(job.registries(), worker_options[i],
                                                       *sinks[i], static_cast<Rank>(i % count),
                                                       job.workers()));
      deployment.push_back(workers.back().get());
      if (deployment.size() == count) {
        handlers.push_back(make_deployment(std::move(deployment)));
        deployment.clear();
      }
    }
  }

  /// Runs @p body for every trainer. @return what each threw, by rank; empty for nothing.
  std::vector<std::string> each(const std::function<void(Rank)>& body) {
    std::vector<std::string> errors(engines.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < engines.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          body(static_cast<Rank>(i));
        } catch (const std::exception& error) {
          errors[i] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return errors;
  }

  std::vector<std::string> init(std::uint64_t epoch = 1, const Watched::Look& look = {},
                                const std::function<void(TrainerInit&)>& alter = {}) {
    return each([&](Rank trainer) {
      TrainerInit init = job.trainer_init(trainer, socket_.port(), epoch);
      init.deployments.clear();
      for (const auto& handler : handlers) {
        init.deployments.push_back(
            {job.workers(),
             {},
             trainer == 0 ? std::make_shared<Watched>(handler, look, names_only) : nullptr});
      }
      if (trainer == 0) {
        init.listen_socket = socket_.share();
      }
      if (alter) {
        alter(init);
      }
      engine(trainer).init(std::move(init), *sources[static_cast<std::size_t>(trainer)]);
    });
  }

  std::vector<std::string> send() {
    return each([&](Rank trainer) { engine(trainer).send_weights(); });
  }

  TrainerEngine& engine(Rank trainer) { return *engines[static_cast<std::size_t>(trainer)]; }

  /// What is wrong with the workers as version @p version, with an oracle; empty when nothing is.
  std::string check(std::uint64_t version) {
    for (std::size_t i = 0; i < sinks.size(); ++i) {
      if (workers[i]->version() != version) {
        return "worker " + std::to_string(i) + " is not at version " + std::to_string(version);
      }
      const Rank worker = static_cast<Rank>(i) % job.workers();
      if (const std::string wrong = job.check(*sinks[i], worker, version); !wrong.empty()) {
        return wrong;
      }
    }
    return {};
  }

  EngineJob job;
  std::vector<std::string> sink_kinds;
  bool names_only = false;                  ///< Updates bring names, and not ranges.
  std::map<Rank, std::string_view> faults;  ///< Ranks that throw, and in which phase.
  std::vector<EngineOptions> trainer_options;
  std::vector<EngineOptions> worker_options;
  std::vector<std::unique_ptr<WeightSource>> sources;
  std::vector<std::unique_ptr<WeightSink>> sinks;
  std::vector<std::unique_ptr<TrainerEngine>> engines;
  std::vector<std::unique_ptr<WorkerEngine>> workers;
  std::vector<std::shared_ptr<ControlHandler>> handlers;

 private:
  void prepare(EngineOptions& options, Rank rank) {
    options.transport = "loopback";
    options.deadline = kLong;
    options.on_phase = [this, rank](std::string_view phase) {
      if (const auto fault = faults.find(rank); fault != faults.end() && fault->second == phase) {
        throw std::runtime_error("out of luck");
      }
    };
  }

  ListenSocket socket_;
};

/// All ranks threw one text, which holds @p part.
inline void check_same_error(const std::vector<std::string>& errors, const std::string& part) {
  for (const std::string& error : errors) {
    BOOST_TEST(error == errors.front());
    BOOST_TEST(error.find(part) != std::string::npos, "'" << error << "' lacks '" << part << "'");
  }
}

inline void check_no_error(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) {
    BOOST_TEST(error.empty(), error);
  }
}

}  // namespace m2n::testing
