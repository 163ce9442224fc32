// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/deployment.hpp"

#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "core/error.hpp"

namespace m2n {
namespace {

namespace json = boost::json;

constexpr std::string_view kUpdateBy = "update_by";
constexpr std::string_view kRange = "range";

class LocalDeployment final : public ControlHandler {
 public:
  explicit LocalDeployment(std::vector<WorkerEngine*> workers) : workers_(std::move(workers)) {}

  json::object init_weight_transfer_engine(const json::object& info, Deadline) override {
    return run(ControlCall::init, info);
  }
  json::object start_weight_update(const json::object& round, Deadline) override {
    return run(ControlCall::start, round);
  }
  json::object update_weights(const json::object& update, Deadline) override {
    return run(ControlCall::update, update);
  }
  json::object finish_weight_update(const json::object& round, Deadline) override {
    return run(ControlCall::finish, round);
  }

  WeightState weight_state() override {
    const std::optional<std::uint64_t> first = workers_.front()->version();
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      if (const auto version = workers_[i]->version(); !version || version != first) {
        return {0, false,
                "worker " + std::to_string(i) + " holds " +
                    (version ? "version " + std::to_string(*version)
                             : std::string("no whole version"))};
      }
    }
    return {*first, true, {}};
  }

 private:
  json::object run(ControlCall call, const json::object& body) {
    const std::lock_guard lock(mutex_);
    const CallRequest request = read_call(call, body);
    std::vector<std::string> errors(workers_.size());
    std::vector<Errc> codes(workers_.size(), Errc::bad_argument);
    std::vector<char> invalidated(workers_.size(), 0);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          invalidated[i] = run_call(*workers_[i], request) ? 1 : 0;
        } catch (const Error& error) {
          errors[i] = error.what();
          codes[i] = error.code();
        } catch (const std::exception& error) {
          errors[i] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    const std::string text = join_errors(errors);
    if (text.empty()) {
      return call_answer(call, std::count(invalidated.begin(), invalidated.end(), 0) == 0);
    }
    if (std::any_of(errors.begin(), errors.end(),
                    [&](const std::string& error) { return error != errors.front(); })) {
      for (WorkerEngine* const worker : workers_) {
        worker->fail(text);
      }
    }
    const auto failed = std::find_if(errors.begin(), errors.end(),
                                     [](const std::string& error) { return !error.empty(); });
    throw Error(codes[static_cast<std::size_t>(failed - errors.begin())], text);
  }

  std::mutex mutex_;
  std::vector<WorkerEngine*> workers_;
};

}  // namespace

std::string_view to_string(ControlCall call) {
  switch (call) {
    case ControlCall::init:
      return "init_weight_transfer_engine";
    case ControlCall::start:
      return "start_weight_update";
    case ControlCall::update:
      return "update_weights";
    case ControlCall::finish:
      return "finish_weight_update";
  }
  return "unknown";
}

CallRequest read_call(ControlCall call, const json::object& body) {
  if (call == ControlCall::init) {
    return {call, init_request_from_json(body), {}};
  }
  return {call, {}, round_request_from_json(body, to_string(call), call == ControlCall::update)};
}

bool run_call(WorkerEngine& worker, const CallRequest& request) {
  switch (request.call) {
    case ControlCall::init:
      worker.init(request.init);
      return false;
    case ControlCall::start:
      worker.start(request.round);
      return false;
    case ControlCall::update:
      worker.update(request.round);
      return false;
    case ControlCall::finish:
      worker.finish(request.round);
      return worker.options().invalidate_caches != nullptr;
  }
  return false;
}

json::object call_answer(ControlCall call, bool invalidated) {
  switch (call) {
    case ControlCall::init:
      return {{kUpdateBy, json::array{"names", kRange}}};
    case ControlCall::finish:
      return {{"caches", invalidated ? "invalidated" : "unsupported"}};
    default:
      return {};
  }
}

bool takes_ranges(const json::object& init_answer) {
  const json::value* const ways = init_answer.if_contains(kUpdateBy);
  const json::array* const list = ways == nullptr ? nullptr : ways->if_array();
  return list != nullptr && std::any_of(list->begin(), list->end(), [](const json::value& way) {
           return way.is_string() && way.get_string() == kRange;
         });
}

std::string join_errors(const std::vector<std::string>& errors) {
  std::vector<std::string> distinct;
  for (const std::string& error : errors) {
    if (!error.empty() && std::find(distinct.begin(), distinct.end(), error) == distinct.end()) {
      distinct.push_back(error);
    }
  }
  std::string text;
  for (const std::string& error : distinct) {
    text += (text.empty() ? "" : "; ") + error;
  }
  return text;
}

std::shared_ptr<ControlHandler> make_deployment(std::vector<WorkerEngine*> workers) {
  expects(!workers.empty(), "at least one worker");
  return std::make_shared<LocalDeployment>(std::move(workers));
}

}  // namespace m2n
