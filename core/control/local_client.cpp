// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A client of a handler in this process.

#include <mutex>
#include <utility>

#include "core/control/control.hpp"
#include "core/error.hpp"

namespace m2n {
namespace {

namespace json = boost::json;

class LocalClient final : public ControlClient {
 public:
  explicit LocalClient(std::shared_ptr<ControlHandler> handler) : handler_(std::move(handler)) {}

  json::object init_weight_transfer_engine(const json::object& info, Deadline deadline) override {
    check_cancelled();
    return handler_->init_weight_transfer_engine(info, deadline);
  }
  json::object start_weight_update(const json::object& round, Deadline deadline) override {
    check_cancelled();
    return handler_->start_weight_update(round, deadline);
  }
  json::object update_weights(const json::object& update, Deadline deadline) override {
    check_cancelled();
    return handler_->update_weights(update, deadline);
  }
  json::object finish_weight_update(const json::object& round, Deadline deadline) override {
    check_cancelled();
    return handler_->finish_weight_update(round, deadline);
  }
  WeightState weight_state(Deadline) override {
    check_cancelled();
    return handler_->weight_state();
  }

  void cancel(const std::string& reason) noexcept override {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    reason_ = reason;
  }

 private:
  void check_cancelled() {
    const std::lock_guard lock(mutex_);
    if (cancelled_) {
      throw Error(Errc::peer_lost, "the control client was cancelled: " + reason_);
    }
  }

  std::shared_ptr<ControlHandler> handler_;
  std::mutex mutex_;
  bool cancelled_ = false;
  std::string reason_;
};

}  // namespace

std::unique_ptr<ControlClient> make_local_client(std::shared_ptr<ControlHandler> handler) {
  expects(handler != nullptr, "a handler to call");
  return std::make_unique<LocalClient>(std::move(handler));
}

}  // namespace m2n
