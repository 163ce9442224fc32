// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n trainer`: one trainer rank of a job.

#include <algorithm>
#include <boost/json.hpp>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/cli/commands.hpp"
#include "core/cli/output.hpp"
#include "core/cli/rank_job.hpp"
#include "core/control/http_client.hpp"
#include "core/engine/elapsed.hpp"
#include "core/engine/trainer_engine.hpp"
#include "core/error.hpp"
#include "core/io/atomic_file.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

/// Before the URL of a deployment that somebody else updates, with curl say.
constexpr std::string_view kWatch = "watch:";
constexpr std::chrono::milliseconds kWatchPause{20};

/// Stands for a control plane that somebody else drives: writes down what the workers must be told
/// first, and waits until they have each version.
class Watching final : public ControlClient {
 public:
  Watching(std::unique_ptr<ControlClient> client, std::filesystem::path init_file)
      : client_(std::move(client)), file_(std::move(init_file)) {}

  json::object init_weight_transfer_engine(const json::object& info, Deadline) override {
    if (!file_.empty()) {
      AtomicFile file(file_);
      file.write(json::serialize(info) + '\n');
      file.commit();
    }
    return {};
  }
  json::object start_weight_update(const json::object&, Deadline) override { return {}; }
  json::object update_weights(const json::object&, Deadline) override { return {}; }
  json::object finish_weight_update(const json::object& round, Deadline deadline) override {
    const auto version = static_cast<std::uint64_t>(round.at("version").as_int64());
    for (;;) {
      const WeightState state = client_->weight_state(deadline);
      if (state.serving && state.version >= version) {
        return {};
      }
      if (std::chrono::steady_clock::now() >= deadline) {
        throw Error(Errc::timed_out, "nobody finished version " + std::to_string(version) +
                                         " by the deadline: " + state.reason);
      }
      std::this_thread::sleep_for(kWatchPause);
    }
  }
  WeightState weight_state(Deadline deadline) override { return client_->weight_state(deadline); }
  void cancel(const std::string& reason) noexcept override { client_->cancel(reason); }

 private:
  std::unique_ptr<ControlClient> client_;
  std::filesystem::path file_;
};

std::shared_ptr<ControlClient> make_control(const RankJob& rank, const std::string& url) {
  HttpClientOptions options;
  options.token = rank.token();
  options.connect_time = rank.engine_options().deadline;
  if (url.rfind(kWatch, 0) == 0) {
    return std::make_shared<Watching>(make_http_client(url.substr(kWatch.size()), options),
                                      rank.experiment().process.init_file);
  }
  return make_http_client(url, options);
}

TrainerInit init_of(const RankJob& rank) {
  const ProcessFlags& process = rank.experiment().process;
  TrainerInit init;
  init.rank = rank.number();
  init.trainers = rank.trainers();
  init.epoch = process.epoch;
  init.slice = process.slice;
  if (process.max_cta > 0) {
    init.max_cta = process.max_cta;
  }
  std::string master = process.master;
  if (master.empty()) {
    master = master_from_environment().value_or("");
  }
  const HostPort where = host_port("--master", master);
  init.master_address = where.host;
  init.master_port = where.port;
  if (init.rank == 0 && process.master_fd >= 0) {
    init.listen_socket = RankJob::listen(process.master_fd, where);
  }
  if (init.rank == 0 && process.control.empty()) {
    throw Error(
        Errc::usage,
        "trainer 0 needs --control with the URL of worker 0's endpoint, or watch: and the URL "
        "where somebody else calls it");
  }
  const std::size_t deployments = std::max<std::size_t>(1, process.control.size());
  for (std::size_t i = 0; i < deployments; ++i) {
    init.deployments.push_back({rank.workers(), rank.mesh(),
                                init.rank == 0 ? make_control(rank, process.control[i]) : nullptr});
  }
  return init;
}

void print(const RankJob& rank, const TrainerEngine& engine, double init_seconds,
           const std::vector<RoundSummary>& rounds) {
  const auto median_of = [&](double RoundSummary::*member) {
    std::vector<double> values;
    for (const RoundSummary& round : rounds) {
      values.push_back(round.*member);
    }
    return median(std::move(values));
  };
  const double seconds = median_of(&RoundSummary::seconds);
  const double borrow = median_of(&RoundSummary::borrow_seconds);
  const double move = median_of(&RoundSummary::move_seconds);
  const double integrity = median_of(&RoundSummary::integrity_seconds);
  const double control = std::max(0.0, seconds - borrow - move - integrity);
  const bool verified = std::all_of(rounds.begin(), rounds.end(),
                                    [](const RoundSummary& round) { return round.verified; });
  if (rank.experiment().json) {
    std::cout << json::serialize(json::object{{"part", "trainer"},
                                              {"rank", rank.number()},
                                              {"transport", rank.experiment().transport},
                                              {"rounds", rounds.size()},
                                              {"version", rounds.back().version},
                                              {"digest_verified", verified},
                                              {"init_seconds", init_seconds},
                                              {"seconds", seconds},
                                              {"borrow_seconds", borrow},
                                              {"move_seconds", move},
                                              {"integrity_seconds", integrity},
                                              {"control_seconds", control},
                                              {"plan_digest", engine.plan_digest()}})
              << '\n';
    return;
  }
  Table table({"m2n trainer", std::to_string(rank.number())}, true);
  table.add({"init", human_seconds(init_seconds)});
  table.add({"rounds", std::to_string(rounds.size()) + ", the last is version " +
                           std::to_string(rounds.back().version)});
  table.add({"round", human_seconds(seconds) + " (median): " + human_seconds(borrow) +
                          " to borrow the weights, " + human_seconds(move) + " to move, " +
                          human_seconds(integrity) + " for digests, " + human_seconds(control) +
                          " of control"});
  table.add({"digests", verified ? "equal in every round" : "not compared"});
  std::cout << table.text();
}

}  // namespace

int trainer_command(const Arguments& arguments) {
  const RankJob rank(parse_experiment(arguments), Part::trainer);
  const auto source = rank.source();
  TrainerEngine engine(rank.job().registries(), rank.engine_options());
  TrainerInit init = init_of(rank);
  const auto start = std::chrono::steady_clock::now();
  engine.init(std::move(init), *source);
  const double init_seconds = seconds_since(start);
  std::vector<RoundSummary> rounds;
  for (std::uint64_t round = 0; round < rank.experiment().rounds; ++round) {
    rounds.push_back(engine.send_weights());
  }
  print(rank, engine, init_seconds, rounds);
  engine.shutdown();
  return 0;
}

}  // namespace m2n::cli
