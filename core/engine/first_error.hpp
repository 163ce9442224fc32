// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Of the errors of several ranks, the one that tells the cause.

#include <exception>
#include <mutex>

#include "core/error.hpp"

namespace m2n {

/// Keeps one error: a rank that merely saw another one leave comes after the rank that left.
/// Thread-safe.
class FirstError {
 public:
  void set(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    const bool consequence = is_consequence(error);
    if (!error_ || (consequence_ && !consequence)) {
      error_ = error;
      consequence_ = consequence;
    }
  }

  /// Null when there is none. After all ranks have ended.
  const std::exception_ptr& get() const noexcept { return error_; }

  void rethrow() const {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  static bool is_consequence(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& known) {
      return known.code() == Errc::peer_lost || known.code() == Errc::timed_out;
    } catch (...) {
      return false;
    }
  }

  std::mutex mutex_;
  std::exception_ptr error_;
  bool consequence_ = false;
};

}  // namespace m2n
