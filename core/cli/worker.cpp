// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n worker`: one worker of a deployment.

#include <pthread.h>
#include <signal.h>

#include <boost/json.hpp>
#include <chrono>
#include <iostream>
#include <optional>
#include <thread>
#include <vector>

#include "core/cli/commands.hpp"
#include "core/cli/output.hpp"
#include "core/cli/rank_job.hpp"
#include "core/control/http_server.hpp"
#include "core/engine/elapsed.hpp"
#include "core/engine/worker_service.hpp"
#include "core/error.hpp"
#include "core/rendezvous/store_server.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

/// The workers' own world: worker 0 keeps its store.
struct Deployment {
  std::unique_ptr<StoreServer> store;
  std::unique_ptr<WorldGroup> group;
};

Deployment meet(const RankJob& rank, const EngineOptions& options) {
  const ProcessFlags& process = rank.experiment().process;
  if (process.meet.empty() && rank.workers() > 1) {
    throw Error(Errc::usage, "a deployment of " + std::to_string(rank.workers()) +
                                 " workers needs --meet with the HOST:PORT where they meet");
  }
  const HostPort where =
      process.meet.empty() ? HostPort{"127.0.0.1", 0} : host_port("--meet", process.meet);
  Deployment deployment;
  WorldOptions world;
  world.address = where.host;
  world.port = where.port;
  world.token = options.token;
  world.epoch = process.epoch;
  world.world = "deployment";
  world.rank = rank.number();
  world.size = rank.workers();
  if (rank.number() == 0) {
    ListenSocket socket = RankJob::listen(process.meet_fd, where);
    world.port = socket.port();
    StoreOptions store;
    store.token = options.token;
    store.epoch = process.epoch;
    deployment.store = std::make_unique<StoreServer>(std::move(socket), store);
  }
  deployment.group = join_world(world, options.deadline_of(phases::kRendezvous));
  return deployment;
}

/// Calls @p stop when the process is asked to end, from a thread of its own. Signals are blocked in
/// every thread that starts later.
class SignalWatch {
 public:
  SignalWatch() {
    sigemptyset(&signals_);
    for (const int number : {SIGTERM, SIGINT, SIGUSR1}) {
      sigaddset(&signals_, number);
    }
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
  ~SignalWatch() {
    if (thread_.joinable()) {
      pthread_kill(thread_.native_handle(), SIGUSR1);  // ours: nobody asks for the end
      thread_.join();
    }
  }
  template <class Stop>
  void start(Stop stop) {
    thread_ = std::thread([this, stop] {
      int number = 0;
      if (sigwait(&signals_, &number) == 0 && number != SIGUSR1) {
        stop();
        sigwait(&signals_, &number);
      }
    });
  }

 private:
  sigset_t signals_{};
  std::thread thread_;
};

struct Verified {
  std::uint64_t rounds = 0;
  std::uint64_t elements = 0;
  std::vector<double> seconds;  ///< [round] what the oracle took.
};

void print(const RankJob& rank, const WorkerEngine& engine, const Verified& verified) {
  const auto version = engine.version();
  if (rank.experiment().json) {
    std::cout << json::serialize(json::object{
                     {"part", "worker"},
                     {"rank", rank.number()},
                     {"rounds", verified.rounds},
                     {"version", version ? json::value(*version) : nullptr},
                     {"verified_elements", verified.elements},
                     {"verify_seconds", verified.seconds.empty() ? 0.0 : median(verified.seconds)}})
              << '\n';
    return;
  }
  Table table({"m2n worker", std::to_string(rank.number())}, true);
  table.add({"version", version ? std::to_string(*version) : "none"});
  table.add({"verified", std::to_string(verified.elements) + " elements in " +
                             std::to_string(verified.rounds) + " rounds equal the oracle's"});
  std::cout << table.text();
}

}  // namespace

int worker_command(const Arguments& arguments) {
  SignalWatch signals;
  const RankJob rank(parse_experiment(arguments), Part::worker);
  const EngineOptions options = rank.engine_options();
  const auto sink = rank.sink();
  WorkerEngine engine(rank.job().registries(), options, *sink, rank.number(), rank.workers());
  Deployment deployment = meet(rank, options);

  WorkerService service(engine, std::move(deployment.group));
  Verified verified;
  service.after_call([&](ControlCall call, const json::object& body) {
    if (call == ControlCall::init) {
      const auto& dims = body.at("dst_mesh_dims").as_array();
      const std::vector<Index> mesh = rank.mesh();
      if (dims != json::array(mesh.begin(), mesh.end())) {
        throw Error(Errc::bad_argument, "dst_mesh_dims " + json::serialize(dims) +
                                            " differ from this deployment's " +
                                            json::serialize(json::array(mesh.begin(), mesh.end())));
      }
    } else if (call == ControlCall::finish && rank.experiment().verify) {
      const auto start = std::chrono::steady_clock::now();
      const Comparison found = rank.verify(*sink, *engine.version(), engine.link().buffers());
      verified.seconds.push_back(seconds_since(start));
      if (!found.ok()) {
        throw Error(Errc::bad_plan, "the weights that arrived are wrong: " + found.first);
      }
      ++verified.rounds;
      verified.elements += found.elements;
    }
  });
  std::optional<HttpServer> server;
  if (rank.number() == 0) {
    const ProcessFlags& process = rank.experiment().process;
    HttpServerOptions http;
    http.token = rank.token();
    server.emplace(RankJob::listen(process.listen_fd, host_port("--listen", process.listen)),
                   service.handler(), http);
    std::cerr << "m2n worker: serving http://" << server->address() << ':' << server->port()
              << '\n';
  }
  signals.start([&] { service.stop(); });
  service.run();
  server.reset();
  print(rank, engine, verified);
  engine.shutdown();
  return 0;
}

}  // namespace m2n::cli
