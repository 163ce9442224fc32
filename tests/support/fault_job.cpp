// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_job.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

#include "core/control/http_client.hpp"
#include "core/control/http_server.hpp"
#include "core/engine/worker_service.hpp"

namespace m2n::testing {
namespace {

using std::chrono::milliseconds;

/// Of everything before the fault, and of the recovery: never reached.
constexpr milliseconds kPatient{60'000};
/// From the fault on, where somebody is stopped and only time tells.
constexpr milliseconds kShort{1500};
constexpr milliseconds kShortMeeting{4000};
constexpr milliseconds kShortCommand{3000};
/// Attempts at a new epoch: a worker may still be taking leave of its old deployment.
constexpr std::uint64_t kAttempts = 40;

constexpr std::array kPoints = {phases::kRendezvous, phases::kSource,  phases::kDestination,
                                phases::kDataPlane,  phases::kRuntime, phases::kCommunicator,
                                phases::kPlan,       phases::kRound,   phases::kMove,
                                phases::kIntegrity,  phases::kAccept,  phases::kFinish,
                                phases::kOutcome};

}  // namespace

std::string to_string(const Fault& fault) {
  const char* const kind = fault.kind == Fault::Kind::kill   ? "kill:"
                           : fault.kind == Fault::Kind::stop ? "stop:"
                                                             : "raise:";
  return fault.transport + ":" + kind + std::to_string(fault.rank) + ":" + fault.point;
}

FaultJob::FaultJob(const Fault& fault)
    : fault_(fault),
      job_(kTrainers, kWorkers),
      master_(ListenSocket::reserve("127.0.0.1", 0)),
      control_(ListenSocket::reserve("127.0.0.1", 0)),
      meet_(ListenSocket::reserve("127.0.0.1", 0)) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw std::runtime_error("pipe failed");
  }
  read_ = ends[0];
  write_ = ends[1];
  fcntl(read_, F_SETFL, O_NONBLOCK);
}

FaultJob::~FaultJob() {
  close(read_);
  close(write_);
}

void FaultJob::report(Rank rank, const std::string& text) const {
  std::string line = std::to_string(rank) + " " + text;
  std::replace(line.begin(), line.end(), '\n', ' ');
  line.resize(std::min<std::size_t>(line.size(), 4000));  // whole in the pipe
  line += '\n';
  if (write(write_, line.data(), line.size()) < 0) {
    _exit(3);
  }
}

void FaultJob::run(Rank rank, bool again) {
  try {
    alarm(140);  // whoever hangs is seen to
    if (rank < kTrainers) {
      be_trainer(rank, again);
    } else {
      be_worker(rank - kTrainers, again);
    }
    _exit(0);
  } catch (const std::exception& error) {
    report(rank, std::string("broken ") + error.what());
  }
  _exit(1);
}

/// @param faulty  This process is the one that fails, if its rank is.
EngineOptions FaultJob::options(Rank rank, bool faulty) {
  EngineOptions options;
  options.transport = fault_.transport;
  options.deadline = kPatient;
  const bool meeting = fault_.point == phases::kRendezvous;
  if (faulty && (fault_.kind == Fault::Kind::stop || meeting)) {
    const auto from = std::find(kPoints.begin(), kPoints.end(), fault_.point);
    for (auto at = from; at != kPoints.end(); ++at) {
      options.phase_deadlines[std::string(*at)] = kShort;
    }
    if (from != kPoints.begin()) {  // somebody may still wait for the end of the phase before
      options.phase_deadlines[std::string(*std::prev(from))] = kShortMeeting;
    }
    if (fault_.point == phases::kFinish) {
      // Trainers know no "accept": when rank 0 is stopped, with its store, another one may not have
      // read the verdict on the digests yet.
      options.phase_deadlines[std::string(phases::kIntegrity)] = kShortMeeting;
    }
    if (meeting) {
      options.phase_deadlines[std::string(phases::kRendezvous)] = kShortMeeting;
    }
    options.phase_deadlines[std::string(phases::kDeploymentCommand)] = kShortCommand;
    options.phase_deadlines[std::string(phases::kDeploymentResult)] = kShortCommand;
    options.phase_deadlines["init outcome"] = kShort;
  }
  if (faulty && rank == fault_.rank) {
    auto rounds = std::make_shared<int>(0);
    auto done = std::make_shared<bool>(false);
    options.on_phase = [this, rounds, done](std::string_view phase) {
      *rounds += phase == phases::kRound ? 1 : 0;
      const bool of_round = std::find(kPoints.begin(), kPoints.end(), phase) >=
                            std::find(kPoints.begin(), kPoints.end(), phases::kRound);
      if (phase != fault_.point || (of_round && *rounds < 2) || std::exchange(*done, true)) {
        return;
      }
      switch (fault_.kind) {
        case Fault::Kind::kill:
          raise(SIGKILL);
          break;
        case Fault::Kind::stop:
          raise(SIGSTOP);
          break;
        case Fault::Kind::raise:
          throw std::runtime_error("out of luck");
      }
    };
  }
  return options;
}

void FaultJob::be_trainer(Rank rank, bool again) {
  const auto source = job_.source(rank);
  std::unique_ptr<TrainerEngine> engine;
  bool failed = again;
  for (std::uint64_t epoch = again ? 2 : 1; epoch < kAttempts; ++epoch) {
    const auto begin = std::chrono::steady_clock::now();
    auto call = begin;
    try {
      if (!engine || epoch == 2) {  // the recovery is patient
        engine = std::make_unique<TrainerEngine>(job_.registries(), options(rank, !failed));
      }
      TrainerInit init =
          job_.trainer_init(rank, master_.port(), rank == 0 || epoch == 1 ? epoch : 0);
      if (rank == 0) {
        init.listen_socket = master_.share();
        init.deployments[0].control =
            make_http_client("http://127.0.0.1:" + std::to_string(control_.port()));
      }
      engine->init(std::move(init), *source);
      for (int round = 0; round < (failed ? 1 : 2); ++round) {
        call = std::chrono::steady_clock::now();
        engine->send_weights();
      }
      if (!failed) {
        throw std::logic_error("the fault was not noticed");
      }
      report(rank, "recovered " + std::to_string(engine->next_version() - 1));
      return;
    } catch (const std::runtime_error& error) {
      const auto took =
          std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - call);
      if (!std::exchange(failed, true)) {
        report(rank, "failed " + std::to_string(took.count()) + " " + error.what());
      } else {
        std::this_thread::sleep_for(milliseconds(50));
      }
    }
  }
  throw std::runtime_error("no epoch worked");
}

/// What is wrong with a worker's weights after a failure: they must be a whole version, or invalid.
std::string FaultJob::state_of(const WorkerEngine& engine, WeightSink& sink, Rank worker) const {
  const auto version = engine.version();
  return version ? job_.check(sink, worker, *version) : std::string();
}

/// @return whether the worker has recovered, and the deployment has ended well.
bool FaultJob::serve(WorkerEngine& engine, WeightSink& sink, Rank worker, std::uint64_t epoch) {
  std::unique_ptr<StoreServer> store;
  if (worker == 0) {
    StoreOptions store_options;
    store_options.epoch = epoch;
    store = std::make_unique<StoreServer>(meet_.share(), store_options);
  }
  WorldOptions world;
  world.port = meet_.port();
  world.epoch = epoch;
  world.world = "deployment";
  world.rank = worker;
  world.size = kWorkers;
  WorkerService service(engine, join_world(world, deadline_in(kPatient)));
  bool recovered = false;
  service.after_call([&](ControlCall call, const boost::json::object& body) {
    const Rank rank = kTrainers + worker;
    if (call == ControlCall::init && body.at("epoch").as_int64() > 1) {
      if (const std::string wrong = state_of(engine, sink, worker); !wrong.empty()) {
        report(rank, "mixed " + wrong);
      }
    } else if (call == ControlCall::finish && body.at("epoch").as_int64() > 1) {
      const std::uint64_t version = engine.version().value_or(0);
      if (const std::string wrong = job_.check(sink, worker, version); !wrong.empty()) {
        report(rank, "wrong " + wrong);
      }
      report(rank, "recovered " + std::to_string(version));
      recovered = true;
      recovered_ = true;
    }
  });
  const auto set_stop = [this](std::function<void()> stop) {
    const std::lock_guard lock(stopping_);
    stop_ = std::move(stop);
  };
  set_stop([&] {
    if (worker == 0) {
      service.stop();
    }
  });
  const std::shared_ptr<void> forget(nullptr, [&](void*) { set_stop({}); });
  std::optional<HttpServer> server;
  if (worker == 0) {
    server.emplace(control_.share(), service.handler());
  }
  try {
    service.run();
  } catch (const std::exception&) {
    if (const std::string wrong = state_of(engine, sink, worker); !wrong.empty()) {
      report(kTrainers + worker, "mixed " + wrong);
    }
    return recovered;
  }
  return true;
}

void FaultJob::be_worker(Rank worker, bool again) {
  const auto sink = job_.sink(worker);
  // One engine, from epoch to epoch: what it holds survives.
  EngineOptions engine_options = options(kTrainers + worker, !again);
  // The trainers leave when all is done.
  engine_options.on_event = [this](const Event& event) {
    const std::lock_guard lock(stopping_);
    if (event.phase == "left" && recovered_ && stop_) {
      stop_();
    }
  };
  WorkerEngine engine(job_.registries(), engine_options, *sink, worker, kWorkers);
  for (std::uint64_t epoch = again ? 2 : 1; epoch <= 2; ++epoch) {
    if (serve(engine, *sink, worker, epoch)) {
      return;
    }
  }
  throw std::runtime_error("the second deployment has failed, too");
}

}  // namespace m2n::testing
