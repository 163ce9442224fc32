// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/worker_engine.hpp"

#include <chrono>
#include <utility>

#include "core/error.hpp"

namespace m2n {
namespace {

[[noreturn]] void refuse(std::string_view call, const std::string& what) {
  throw Error(Errc::bad_argument, std::string(call) + " is refused: " + what);
}

constexpr std::string_view kStart = "start_weight_update";
constexpr std::string_view kUpdate = "update_weights";
constexpr std::string_view kFinish = "finish_weight_update";

}  // namespace

WorkerEngine::WorkerEngine(const Registries& registries, EngineOptions options, WeightSink& sink,
                           Rank worker, Rank workers)
    : registries_(registries),
      options_(with_transport(registries, std::move(options))),
      sink_(sink),
      worker_(worker),
      workers_(workers) {
  expects(worker >= 0 && worker < workers, "a worker's number below the number of workers");
}

WorkerEngine::~WorkerEngine() { shutdown(); }

void WorkerEngine::drop_link() {
  if (link_) {
    link_->watchdog().release();
  }
  link_.reset();
}

void WorkerEngine::init(const InitRequest& request) {
  refuse_late(request);
  fail("the worker joins another world");
  drop_link();
  {
    const std::lock_guard lock(mutex_);
    state_ = State::idle;
    failure_.clear();
  }
  const Rank workers = request.world_size - request.rank_offset;
  if (workers != workers_) {
    refuse("init_weight_transfer_engine", "the world has " + std::to_string(workers) +
                                              " workers, but this deployment has " +
                                              std::to_string(workers_));
  }
  LinkParts parts;
  parts.registries = &registries_;
  parts.options = &options_;
  parts.sink = &sink_;
  parts.first_version = next_version_;
  parts.told = &request.params;
  parts.resolve = [this](const auto& params) { return resolve(params); };
  auto link = std::make_unique<Link>(std::move(parts), request, request.rank_offset + worker_);
  link->init();
  const std::lock_guard lock(mutex_);
  link_ = std::move(link);
  next_version_ = link_->first_version();
  state_ = State::ready;
  watch(Deadline::max());
}

/// A sink resolves once: in later epochs its answer must still be the right one.
std::vector<Resolution> WorkerEngine::resolve(const std::shared_ptr<const AgreedParams>& params) {
  if (!resolved_for_) {
    resolutions_ = sink_.resolve(params->params);
    resolved_for_ = params;
  }
  if (params->digest != resolved_for_->digest) {
    throw Error(Errc::bad_argument, "the worker's weights are laid out for other parameters: " +
                                        first_difference(resolved_for_->text, params->text) +
                                        "; start the worker anew for these");
  }
  return resolutions_;
}

/// Refuses a world that is older than the one that the worker is in.
void WorkerEngine::refuse_late(const InitRequest& request) const {
  const std::lock_guard lock(mutex_);
  if (state_ != State::idle && link_->failure().empty() && request.epoch != kCurrentEpoch &&
      request.epoch <= link_->epoch()) {
    refuse("init_weight_transfer_engine", "it belongs to epoch " + std::to_string(request.epoch) +
                                              ", and the worker has joined epoch " +
                                              std::to_string(link_->epoch()));
  }
}

/// Refuses what belongs to another world or round.
void WorkerEngine::check(const RoundRequest& request, std::string_view call) const {
  if (state_ == State::idle) {
    refuse(call, failure_.empty() ? "the worker has joined no world; call init first"
                                  : "the worker has left its world: " + failure_);
  }
  if (request.epoch && *request.epoch != link_->epoch()) {
    refuse(call, "it belongs to epoch " + std::to_string(*request.epoch) + ", and this is epoch " +
                     std::to_string(link_->epoch()));
  }
  if (request.plan_digest && *request.plan_digest != link_->plan_digest()) {
    refuse(call, "it belongs to plan " + *request.plan_digest + ", and this world runs plan " +
                     link_->plan_digest());
  }
}

void WorkerEngine::start(const RoundRequest& request) {
  const std::lock_guard lock(mutex_);
  check(request, kStart);
  const std::uint64_t version = request.version.value_or(next_version_);
  if (version < next_version_) {
    refuse(kStart, "version " + std::to_string(version) + " comes after version " +
                       std::to_string(next_version_ - 1) + "; versions only grow");
  }
  if (state_ == State::received) {
    give_up("a round begins while version " + std::to_string(version_) + " is not finished");
    check(request, kStart);  // which now refuses
  }
  version_ = version;
  announced_ = 0;
  state_ = State::started;
}

void WorkerEngine::update(const RoundRequest& request) {
  std::unique_lock lock(mutex_);
  check(request, kUpdate);
  if (state_ != State::started) {
    refuse(kUpdate, state_ == State::ready ? "no round has started"
                                           : "every parameter of this round has been received");
  }
  if (request.version && *request.version != version_) {
    refuse(kUpdate, "it belongs to version " + std::to_string(*request.version) +
                        ", and this round is version " + std::to_string(version_));
  }
  if (request.range) {
    check_range(request);
    announced_ = request.range->end;
  } else {
    check_names(request.names);
    announced_ += request.names.size();
  }
  if (announced_ < link_->params().size()) {
    return;
  }
  receiving_ = true;
  lock.unlock();
  receive(version_);
}

/// Refuses names that are not the next ones of the declared order.
void WorkerEngine::check_names(const std::vector<std::string>& names) const {
  const std::vector<ParamSpec>& params = link_->params();
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::size_t at = announced_ + i;
    if (at >= params.size()) {
      refuse(kUpdate, "'" + names[i] + "' comes after the last of " +
                          std::to_string(params.size()) + " declared parameters");
    }
    if (names[i] != params[at].name) {
      refuse(kUpdate, "parameter '" + names[i] + "' stands where '" + params[at].name +
                          "' was declared; names come in the declared order");
    }
  }
}

/// Refuses a range that counts in another list, or is not the next one of the declared order.
void WorkerEngine::check_range(const RoundRequest& request) const {
  if (request.source_digest != link_->source_digest()) {
    refuse(kUpdate, "its range counts in the parameters of source_digest " +
                        request.source_digest.value_or("none") + ", and this world declared " +
                        link_->source_digest());
  }
  const std::vector<ParamSpec>& params = link_->params();
  const auto [begin, end] = *request.range;
  const std::string text = "range " + std::to_string(begin) + " to " + std::to_string(end);
  if (end > params.size()) {
    refuse(kUpdate, text + " goes past the last of " + std::to_string(params.size()) +
                        " declared parameters");
  }
  if (begin != announced_) {
    refuse(kUpdate, text + " stands where parameter " + std::to_string(announced_) +
                        (announced_ < params.size() ? ", '" + params[announced_].name + "'," : "") +
                        " is next; ranges come in the declared order");
  }
}

void WorkerEngine::receive(std::uint64_t version) {
  try {
    last_round_ = link_->round(version, [this] {
      const std::lock_guard lock(mutex_);
      writing_ = true;
    });
    link_->phase(phases::kAccept, version, [&] {
      if (options_.on_phase) {
        options_.on_phase(phases::kAccept);
      }
      sink_.accept(version);
    });
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    receiving_ = false;
    give_up(error.what());
    throw;
  }
  std::unique_lock lock(mutex_);
  receiving_ = false;
  if (state_ != State::started) {  // fail() came meanwhile
    give_up(failure_);
    refuse(kUpdate, failure_);
  }
  state_ = State::received;
  watch(options_.deadline_of(phases::kFinish));
}

/// Until the next call somebody must notice when the trainers have gone, or do not finish.
void WorkerEngine::watch(Deadline deadline) {
  link_->watchdog().guard(deadline, [this](const std::string& why) { lost(why); });
}

void WorkerEngine::lost(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (receiving_ || state_ == State::idle) {
    return;
  }
  if (state_ == State::received) {
    // Rank 0 finds out who is missing when it calls, and tells everybody.
    give_up("phase '" + std::string(phases::kFinish) + "': version " + std::to_string(version_) +
                " was not finished: " + why,
            false);
  } else if (!link_->failure().empty()) {
    state_ = State::idle;
    failure_ = why;
    link_->tell(Event::Level::info, "left", {}, 0, why);
    link_->hang_up();
  }  // else the deadline of a round that has ended meanwhile
}

std::uint64_t WorkerEngine::finish(const RoundRequest& request) {
  const std::lock_guard lock(mutex_);
  check(request, kFinish);
  if (state_ != State::received) {
    refuse(kFinish, "no round has been received");
  }
  if (request.version && *request.version != version_) {
    refuse(kFinish, "it belongs to version " + std::to_string(*request.version) +
                        ", and this round is version " + std::to_string(version_));
  }
  const auto begin = std::chrono::steady_clock::now();
  try {
    if (options_.on_phase) {
      options_.on_phase(phases::kFinish);
    }
    invalidate_caches();
    sink_.commit(version_);
  } catch (const std::exception& error) {
    const std::string text = "phase '" + std::string(phases::kFinish) + "': rank " +
                             std::to_string(link_->rank()) + ": " + error.what();
    give_up(text, false);  // the trainers hear of it by the answer
    throw Error(Errc::bad_argument, text);
  }
  writing_ = false;
  state_ = State::ready;
  next_version_ = version_ + 1;
  watch(Deadline::max());
  link_->tell(Event::Level::info, phases::kFinish, version_,
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return version_;
}

void WorkerEngine::invalidate_caches() const {
  if (!options_.invalidate_caches) {
    return;
  }
  try {
    options_.invalidate_caches(version_);
  } catch (const std::exception& error) {
    throw Error(Errc::bad_argument,
                std::string("the caches could not be invalidated: ") + error.what());
  }
}

void WorkerEngine::give_up(const std::string& reason, bool tell_world) {
  if (writing_ && !receiving_) {
    sink_.roll_back();
    writing_ = false;
  }
  if (state_ != State::idle) {
    state_ = State::idle;
    failure_ = reason;
    if (tell_world && link_->failure().empty()) {
      link_->abort(reason);
    }
    link_->tell(Event::Level::error, "failed", version_, 0, reason);
  }
  if (link_ && !receiving_) {
    link_->hang_up();
  }
}

void WorkerEngine::fail(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  give_up(reason);
}

void WorkerEngine::shutdown() {
  {
    const std::lock_guard lock(mutex_);
    if (writing_) {
      give_up("the worker shuts down");
    }
    state_ = State::idle;
  }
  drop_link();
}

std::optional<std::uint64_t> WorkerEngine::version() const {
  const std::lock_guard lock(mutex_);
  return writing_ ? std::nullopt : sink_.version();
}

}  // namespace m2n
