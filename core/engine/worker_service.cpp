// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/worker_service.hpp"

#include <boost/json.hpp>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <optional>
#include <utility>

#include "core/error.hpp"

namespace m2n {
namespace {

namespace json = boost::json;

using phases::kDeploymentCommand;
using phases::kDeploymentResult;
constexpr std::string_view kIdle = "idle";
constexpr std::string_view kStop = "stop";
constexpr std::string_view kInvalidated = "caches invalidated";  // what a worker states

ControlCall call_from_string(std::string_view name) {
  for (const ControlCall call :
       {ControlCall::init, ControlCall::start, ControlCall::update, ControlCall::finish}) {
    if (to_string(call) == name) {
      return call;
    }
  }
  throw Error(Errc::bad_argument, "worker 0 passes on an unknown call '" + std::string(name) + "'");
}

/// Why the call failed as a whole; empty when it did not. Workers that did not all fail alike give
/// up together.
std::string settle(WorkerEngine& engine, const Verdict& verdict) {
  std::vector<std::string> errors;
  for (const Verdict::Side& side : verdict.sides) {
    if (side.statement.failed) {
      errors.push_back(side.statement.text);
    }
  }
  std::string text = join_errors(errors);
  if (!text.empty() && (verdict.sides.size() > 1 || !verdict.others.empty())) {
    engine.fail(text);
  }
  return text;
}

}  // namespace

/// Where calls of the control plane wait for worker 0.
class WorkerService::Desk final : public ControlHandler {
 public:
  /// What worker 0 tells the others, and what it is asked itself.
  struct Job {
    ControlCall call = ControlCall::init;
    json::object body;
    std::promise<json::object> done;  // with the answer
  };

  json::object init_weight_transfer_engine(const json::object& info, Deadline deadline) override {
    return post(ControlCall::init, info, deadline);
  }
  json::object start_weight_update(const json::object& round, Deadline deadline) override {
    return post(ControlCall::start, round, deadline);
  }
  json::object update_weights(const json::object& update, Deadline deadline) override {
    return post(ControlCall::update, update, deadline);
  }
  json::object finish_weight_update(const json::object& round, Deadline deadline) override {
    return post(ControlCall::finish, round, deadline);
  }
  WeightState weight_state() override {
    const std::lock_guard lock(mutex_);
    if (!closed_.empty()) {
      return {published_.value_or(0), false, closed_};
    }
    if (!published_ || engine_ == nullptr || engine_->version() != published_) {
      return {published_.value_or(0), false, "no version is whole on every worker"};
    }
    return {*published_, true, {}};
  }

  explicit Desk(WorkerEngine& engine) : engine_(&engine) {}

  /// The next call, or nothing when there was none until @p deadline or the desk has stopped.
  std::shared_ptr<Job> take(Deadline deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return stopped_ || !jobs_.empty(); });
    if (stopped_ || jobs_.empty()) {
      return nullptr;
    }
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    return job;
  }
  void stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }
  bool stopped() const {
    const std::lock_guard lock(mutex_);
    return stopped_;
  }
  void publish(std::optional<std::uint64_t> version) {
    const std::lock_guard lock(mutex_);
    published_ = version;
  }
  /// Calls that wait, and later ones, throw @p reason. The engine is not asked any more.
  void close(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (closed_.empty()) {
      closed_ = reason;
    }
    engine_ = nullptr;
    for (const auto& job : jobs_) {
      job->done.set_exception(std::make_exception_ptr(Error(Errc::peer_lost, closed_)));
    }
    jobs_.clear();
  }

 private:
  json::object post(ControlCall call, const json::object& body, Deadline deadline) {
    auto job = std::make_shared<Job>();
    job->call = call;
    job->body = body;
    std::future<json::object> done = job->done.get_future();
    {
      const std::lock_guard lock(mutex_);
      if (!closed_.empty()) {
        throw Error(Errc::unavailable, "the deployment has ended: " + closed_);
      }
      jobs_.push_back(job);
      changed_.notify_all();
    }
    if (done.wait_until(deadline) == std::future_status::timeout) {
      throw Error(Errc::timed_out, std::string(to_string(call)) +
                                       ": the deadline passed before all workers ended it");
    }
    return done.get();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopped_ = false;
  std::string closed_;
  std::optional<std::uint64_t> published_;
  WorkerEngine* engine_;
};

WorkerService::WorkerService(WorkerEngine& engine, std::unique_ptr<WorldGroup> deployment)
    : engine_(engine), group_(std::move(deployment)), desk_(std::make_shared<Desk>(engine)) {
  expects(group_ != nullptr, "a group of workers");
}

WorkerService::~WorkerService() { desk_->close("the worker has ended"); }

std::shared_ptr<ControlHandler> WorkerService::handler() const {
  return group_->rank() == 0 ? desk_ : nullptr;
}

void WorkerService::stop() {
  if (group_->rank() == 0) {
    desk_->stop();
  } else {
    abort("it was told to stop");
  }
}

void WorkerService::abort(const std::string& reason) noexcept {
  group_->abort(reason);
  desk_->stop();
}

Statement WorkerService::run_stated(ControlCall call, const json::object& body) {
  try {
    const bool invalidated = run_call(engine_, read_call(call, body));
    if (after_call_) {
      try {
        after_call_(call, body);
      } catch (const std::exception& error) {
        engine_.fail(error.what());
        throw;
      }
    }
    return Statement::value(invalidated ? std::string(kInvalidated) : "");
  } catch (const std::exception& error) {
    return Statement::failure(error.what());
  }
}

void WorkerService::run() {
  try {
    if (group_->rank() == 0) {
      lead();
    } else {
      follow();
    }
    desk_->close("the workers were told to stop");
  } catch (const std::exception& error) {
    const std::string text =
        "worker " + std::to_string(group_->rank()) + " has lost its deployment: " + error.what();
    engine_.fail(text);
    desk_->close(text);
    throw Error(Errc::peer_lost, text);
  }
}

void WorkerService::lead() {
  const EngineOptions& options = engine_.options();
  const auto say = [&](std::string_view call, const json::object& body) {
    group_->broadcast(
        kDeploymentCommand, 0,
        R"({"call":")" + std::string(call) + R"(","body":)" + json::serialize(body) + '}',
        options.deadline_of(kDeploymentCommand));
  };
  for (;;) {
    const std::shared_ptr<Desk::Job> job =
        desk_->take(deadline_in(options.deadline_span(kDeploymentCommand) / 2));
    if (const std::string failure = group_->failure(); !failure.empty()) {
      if (job) {
        job->done.set_exception(std::make_exception_ptr(Error(Errc::peer_lost, failure)));
      }
      throw Error(Errc::peer_lost, failure);
    }
    if (!job) {
      const bool stopped = desk_->stopped();
      say(stopped ? kStop : kIdle, {});
      if (stopped) {
        return;
      }
      continue;
    }
    try {
      say(to_string(job->call), job->body);
      const Statement mine = run_stated(job->call, job->body);
      const Verdict verdict =
          group_->agree(kDeploymentResult, mine, options.deadline_of(kDeploymentResult));
      const std::string error = settle(engine_, verdict);
      if (!error.empty()) {
        job->done.set_exception(std::make_exception_ptr(Error(Errc::bad_argument, error)));
        continue;
      }
      if (job->call == ControlCall::finish) {
        desk_->publish(engine_.version());
      }
      job->done.set_value(call_answer(
          job->call, verdict.unanimous() && verdict.sides.front().statement.text == kInvalidated));
    } catch (const std::exception& error) {
      job->done.set_exception(std::make_exception_ptr(Error(Errc::peer_lost, error.what())));
      throw;
    }
  }
}

void WorkerService::follow() {
  const EngineOptions& options = engine_.options();
  for (;;) {
    const std::string text = group_->broadcast(
        kDeploymentCommand, 0, {}, deadline_in(2 * options.deadline_span(kDeploymentCommand)));
    const json::value command = json::parse(text);
    const std::string_view name = command.at("call").as_string();
    if (name == kStop) {
      return;
    }
    if (name == kIdle) {
      continue;
    }
    const Statement mine = run_stated(call_from_string(name), command.at("body").as_object());
    settle(engine_, group_->agree(kDeploymentResult, mine, options.deadline_of(kDeploymentResult)));
  }
}

}  // namespace m2n
