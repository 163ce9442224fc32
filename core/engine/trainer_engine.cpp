// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/trainer_engine.hpp"
#include "core/engine/elapsed.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <numeric>
#include <utility>

#include "core/engine/deployment.hpp"
#include "core/error.hpp"
#include "core/rendezvous/rank_list.hpp"

namespace m2n {
namespace {

namespace json = boost::json;
using Clock = std::chrono::steady_clock;

/// How long a call may still take when the collective beside it has failed: workers fail with it,
/// and answer soon.
constexpr std::chrono::milliseconds kLastAnswer{500};
constexpr std::string_view kInitOutcome = "init outcome";
constexpr std::string_view kAcknowledged = "outcome acknowledged";

/// "deployment 0 (ranks 4-5)".
std::string deployment_text(std::size_t deployment, const WorldSpec& world) {
  std::vector<Rank> ranks(static_cast<std::size_t>(world.world_size - world.rank_offset));
  std::iota(ranks.begin(), ranks.end(), world.rank_offset);
  return "deployment " + std::to_string(deployment) + " (" + name_ranks(ranks) + ")";
}

}  // namespace

TrainerEngine::TrainerEngine(const Registries& registries, EngineOptions options)
    : registries_(registries), options_(with_transport(registries, std::move(options))) {}

TrainerEngine::~TrainerEngine() { drop(); }

void TrainerEngine::drop() noexcept {
  links_.clear();
  takes_ranges_.clear();
  store_.reset();
}

void TrainerEngine::check(const TrainerInit& init) const {
  const auto wrong = [](const std::string& what) { throw Error(Errc::bad_argument, what); };
  if (init.trainers < 1 || init.rank < 0 || init.rank >= init.trainers) {
    wrong("trainer rank " + std::to_string(init.rank) + " must be 0 to " +
          std::to_string(init.trainers - 1) + ", the number of trainer ranks less one");
  }
  if (init.deployments.empty()) {
    wrong("a trainer needs at least one deployment of workers");
  }
  if (init.epoch == kCurrentEpoch && init.rank == 0) {
    wrong("the epoch of trainer rank 0 must be 1 or more");
  }
  if (init.listen_socket && init.rank != 0) {
    wrong("only trainer rank 0 may bring a reserved socket, and this is rank " +
          std::to_string(init.rank));
  }
  for (std::size_t i = 0; i < init.deployments.size(); ++i) {
    const DeploymentSpec& deployment = init.deployments[i];
    if (deployment.workers < 1) {
      wrong("deployment " + std::to_string(i) + " has " + std::to_string(deployment.workers) +
            " workers; it needs at least one");
    }
    if (init.rank == 0 && !deployment.control) {
      wrong("deployment " + std::to_string(i) +
            " has no control client, which trainer rank 0 needs");
    }
  }
}

WorldSpec TrainerEngine::world_of(std::size_t deployment) const {
  const DeploymentSpec& spec = init_.deployments.at(deployment);
  WorldSpec world;
  world.master_address = init_.master_address;
  world.master_port = init_.master_port;
  world.unique_id_b64 = init_.unique_id_b64;
  world.rank_offset = init_.trainers;
  world.world_size = init_.trainers + spec.workers;
  world.dst_mesh_dims =
      spec.dst_mesh_dims.empty() ? std::vector<Index>{spec.workers, 1} : spec.dst_mesh_dims;
  world.max_cta = init_.max_cta;
  world.epoch = init_.epoch;
  world.world = "deployment " + std::to_string(deployment);
  return world;
}

InitRequest TrainerEngine::init_request(std::size_t deployment) const {
  InitRequest request{world_of(deployment), {}, source_->params()};
  request.source_digest = sha256_hex(params_to_text(request.params));
  return request;
}

void TrainerEngine::serve() {
  if (init_.rank != 0) {
    return;
  }
  if (!init_.listen_socket) {
    init_.listen_socket = ListenSocket::reserve(init_.master_address, init_.master_port);
  }
  init_.master_port = init_.listen_socket->port();
  StoreOptions store;
  store.token = options_.token;
  store.epoch = init_.epoch;
  store_ = std::make_unique<StoreServer>(init_.listen_socket->share(), store);
}

void TrainerEngine::init(TrainerInit init, WeightSource& source) {
  drop();
  check(init);
  // A port once reserved stays ours from epoch to epoch.
  if (!init.listen_socket && init_.listen_socket && init.rank == 0 &&
      init.master_port == init_.listen_socket->port()) {
    init.listen_socket = std::move(init_.listen_socket);
  }
  init_ = std::move(init);
  source_ = &source;
  next_version_ = std::max(next_version_, init_.first_version);
  try {
    serve();
    for (std::size_t i = 0; i < init_.deployments.size(); ++i) {
      init_link(i);
      next_version_ = links_.back()->first_version();
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

/// Calls of the control plane that run beside a collective, on a thread of their own. Their failure
/// ends the collective; the collective's failure ends them.
class TrainerEngine::Beside {
 public:
  /// @param fail  Ends the collective; called in the helper thread.
  Beside(ControlClient& control, const Link& link, std::function<void()> call,
         std::function<void(const std::string&)> fail)
      : control_(control),
        done_(
            std::async(std::launch::async, [&link, call = std::move(call), fail = std::move(fail)] {
              try {
                call();
              } catch (const std::exception& error) {
                const auto* const known = dynamic_cast<const Error*>(&error);
                if (known != nullptr && known->code() == Errc::peer_lost) {
                  // Whoever answers calls has died: the store soon says which rank.
                  link.settled_failure();
                }
                fail(error.what());
                throw;
              }
            })) {}
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;
  ~Beside() {
    if (done_.valid() && done_.wait_for(kLastAnswer) == std::future_status::timeout) {
      control_.cancel("the trainer failed elsewhere");
    }
  }

  /// Waits for the calls' end, and throws their error.
  void join() { done_.get(); }

 private:
  ControlClient& control_;
  std::future<void> done_;  // its destructor waits
};

void TrainerEngine::init_link(std::size_t deployment) {
  const WorldSpec world = world_of(deployment);
  InitRequest request;  // of rank 0
  std::string early;
  try {
    if (init_.rank == 0) {
      request = init_request(deployment);
    }
    check_world(world);
    check_source_params(source_->params(), init_.trainers);
  } catch (const Error& error) {
    early = error.what();
  }
  LinkParts parts;
  parts.registries = &registries_;
  parts.options = &options_;
  parts.source = source_;
  parts.first_version = next_version_;
  links_.push_back(std::make_unique<Link>(std::move(parts), world, init_.rank));
  Link& link = *links_.back();
  if (init_.rank != 0) {
    link.init(early);
    link.phase(kInitOutcome, {}, [&] { receive_outcome(kInitOutcome, 0); });
    return;
  }
  ControlClient& control = *init_.deployments[deployment].control;
  const json::object body = to_json(request);
  bool ranges = false;
  Beside beside(
      control, link,
      [&] {
        ranges = takes_ranges(control.init_weight_transfer_engine(body, options_.init_deadline()));
      },
      [&](const std::string& why) {
        store_->abort(deployment_text(deployment, links_[deployment]->world()) + ": " + why);
      });
  link.init(early);
  link.phase(kInitOutcome, {}, [&] {
    try {
      beside.join();
    } catch (const Error& error) {
      throw Error(error.code(),
                  deployment_text(deployment, links_[deployment]->world()) + ": " + error.what());
    }
    takes_ranges_.push_back(ranges ? 1 : 0);
    publish_outcome(kInitOutcome, 0);
  });
}

/// Of a short call: the workers', and their agreement about its result, which names who is missing.
std::chrono::milliseconds TrainerEngine::call_span() const {
  return 2 * options_.deadline_span(phases::kFinish) +
         options_.deadline_span(phases::kDeploymentResult);
}

RoundRequest TrainerEngine::request_of(const Link& link, std::uint64_t version) const {
  RoundRequest request;
  request.version = version;
  request.epoch = link.epoch();
  request.plan_digest = link.plan_digest();
  return request;
}

/// The update_weights calls of a round: consecutive slices of the declared order.
void TrainerEngine::update(std::size_t deployment, std::uint64_t version) {
  const std::vector<ParamSpec>& params = source_->params();
  const std::size_t slice = init_.slice == 0 ? params.size() : init_.slice;
  std::size_t at = 0;
  do {
    RoundRequest request = request_of(*links_[deployment], version);
    const std::size_t end = at + std::min(slice, params.size() - at);
    if (takes_ranges_[deployment] != 0) {
      request.range = {at, end};
      request.source_digest = links_[deployment]->source_digest();
      at = end;
    }
    for (; at < end; ++at) {
      request.names.push_back(params[at].name);
    }
    init_.deployments[deployment].control->update_weights(
        to_json(request),
        deadline_in(options_.deadline_span(phases::kRound) + links_[deployment]->move_span() +
                    options_.deadline_span(phases::kIntegrity) +
                    options_.deadline_span(phases::kAccept) + call_span()));
  } while (at < params.size());
}

/// Rank 0: everything up to the commit in every deployment.
void TrainerEngine::drive(std::uint64_t version, RoundSummary& summary) {
  const auto call = [&](std::size_t deployment, auto method) {
    const json::object body = to_json(request_of(*links_[deployment], version));
    ControlClient& control = *init_.deployments[deployment].control;
    try {
      (control.*method)(body, deadline_in(call_span()));
    } catch (const Error& error) {
      throw Error(error.code(),
                  deployment_text(deployment, links_[deployment]->world()) + ": " + error.what());
    }
  };
  for (std::size_t i = 0; i < links_.size(); ++i) {
    call(i, &ControlClient::start_weight_update);
  }
  for (std::size_t i = 0; i < links_.size(); ++i) {
    Link& link = *links_[i];
    Beside beside(
        *init_.deployments[i].control, link, [&] { update(i, version); },
        [&](const std::string& why) {
          link.abort(deployment_text(i, links_[i]->world()) + ": " + why);
        });
    take(link.round(version), summary);
    try {
      beside.join();
    } catch (const Error& error) {
      throw Error(error.code(), deployment_text(i, links_[i]->world()) + ": " + error.what());
    }
  }
  if (options_.on_phase) {
    links_.back()->phase(phases::kFinish, version, [&] { options_.on_phase(phases::kFinish); });
  }
  // All that can fail has been done: what is left is to say so. Who fails now is named, with the
  // versions of the others.
  std::string failed;
  std::string finished;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    try {
      call(i, &ControlClient::finish_weight_update);
      finished += (finished.empty() ? "" : ", ") + std::to_string(i);
    } catch (const Error& error) {
      failed += (failed.empty() ? "" : "; ") + std::string(error.what());
    }
  }
  if (!failed.empty()) {
    throw Error(Errc::peer_lost,
                "phase '" + std::string(phases::kFinish) + "' of version " +
                    std::to_string(version) + ": " + failed +
                    (finished.empty() ? "; no deployment has it"
                                      : "; deployments that have it: " + finished));
  }
}

void TrainerEngine::take(const LinkRound& round, RoundSummary& summary) {
  summary.borrow_seconds = std::max(summary.borrow_seconds, round.borrow_seconds);
  summary.move_seconds = std::max(summary.move_seconds, round.report.seconds);
  summary.integrity_seconds = std::max(summary.integrity_seconds, round.integrity_seconds);
  summary.reports.push_back(round.report);
}

/// Tells the other trainers that rank 0 has seen the end of @p phase, and waits until all know.
void TrainerEngine::publish_outcome(std::string_view phase, std::uint64_t version) {
  WorldGroup& group = links_.back()->group();
  const Deadline deadline = options_.deadline_of(phase);
  for (Rank rank = 1; rank < init_.trainers; ++rank) {
    group.send(phase, rank, std::to_string(version), deadline);
  }
  for (Rank rank = 1; rank < init_.trainers; ++rank) {
    group.receive(kAcknowledged, rank, deadline);
  }
}

void TrainerEngine::receive_outcome(std::string_view phase, std::uint64_t version) {
  WorldGroup& group = links_.back()->group();
  // Rank 0 comes here only after the workers have finished, or do not answer.
  const Deadline deadline = deadline_in(2 * call_span() + options_.deadline_span(phase));
  const std::string told = group.receive(phase, 0, deadline);
  if (told != std::to_string(version)) {
    throw Error(Errc::peer_lost, "rank 0 ended version " + told + " where version " +
                                     std::to_string(version) + " was sent");
  }
  group.send(kAcknowledged, 0, "", deadline);
}

RoundSummary TrainerEngine::send_weights() {
  if (links_.empty()) {
    throw Error(Errc::bad_argument, "the trainer has joined no world; call init() first");
  }
  const auto start = Clock::now();
  const std::uint64_t version = next_version_;
  RoundSummary summary;
  summary.version = version;
  summary.verified =
      std::all_of(links_.begin(), links_.end(), [](const auto& link) { return link->verifies(); });
  try {
    if (init_.rank == 0) {
      drive(version, summary);
    } else {
      for (const auto& link : links_) {
        take(link->round(version), summary);
      }
    }
    links_.back()->phase(phases::kOutcome, version, [&] {
      if (init_.rank == 0) {
        publish_outcome(phases::kOutcome, version);
        return;
      }
      if (options_.on_phase) {
        options_.on_phase(phases::kOutcome);
      }
      receive_outcome(phases::kOutcome, version);
    });
  } catch (...) {
    fail(std::current_exception());
  }
  next_version_ = version + 1;
  summary.seconds = seconds_since(start);
  return summary;
}

/// Makes @p error that of every rank of every world, leaves the worlds, and throws it.
void TrainerEngine::fail(const std::exception_ptr& error) {
  Errc code = Errc::bad_argument;
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    code = known.code();
    text = known.what();
  } catch (const std::exception& other) {
    text = other.what();
  }
  // What a phase has ended with, every rank has; otherwise the store says what the failure is.
  const auto ended = std::find_if(links_.begin(), links_.end(),
                                  [](const auto& link) { return !link->ended().empty(); });
  if (ended != links_.end()) {
    text = (*ended)->ended();
  }
  for (const auto& link : links_) {
    if (link->failure().empty()) {
      link->abort(text);
    }
  }
  if (ended == links_.end() && !links_.empty()) {
    if (const std::string agreed = links_.back()->settled_failure(); !agreed.empty()) {
      text = agreed;
    }
  }
  drop();
  throw Error(code, text);
}

void TrainerEngine::shutdown() { drop(); }

}  // namespace m2n
