// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A worker's parameters in host memory: live, where a round writes them, and what is derived.

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/api/group.hpp"
#include "core/api/sink.hpp"

namespace m2n::sinks {

/// Zeroed memory that starts on a cache line. Pages that nobody touches cost nothing.
class HostMemory {
 public:
  HostMemory() = default;
  explicit HostMemory(std::uint64_t bytes);

  std::byte* data() const noexcept { return data_; }
  LocalBuffer loan() const { return {data_, bytes_, MemorySpace::host, 0}; }

 private:
  struct Free {
    void operator()(void* memory) const noexcept;
  };

  std::unique_ptr<void, Free> memory_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// Readers of the live parameters. Counted, so that a writer can wait for the last to leave.
class Readers {
 public:
  /// A reader, until the last copy of the pointer is gone.
  static std::shared_ptr<const void> enter(const std::shared_ptr<Readers>& readers);
  /// Holds off new readers and waits for those inside. @return how many are still there.
  std::size_t close(Deadline deadline);
  void open();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t inside_ = 0;
  bool closed_ = false;
};

/// A parameter of this worker, or a buffer of a problem file.
struct Kept {
  std::string name;
  DType dtype = DType::u8;
  Shape shape;
  std::uint64_t bytes = 0;
  std::vector<Box> padding = {};
  bool zero_all = false;  ///< Some bytes are nobody's: all are zeroed before a round.
  std::string same_as = {};
  std::function<void(const ParameterView& loaded, std::byte* live)> to_kernel_form = {};
  std::uint64_t fed_elements = 0;  ///< With to_kernel_form: complete after so many.
};

/// - Threads: one at a time.
/// - Errors: Error{bad_argument, unavailable} naming the parameter.
class Store {
 public:
  /// @param shadow  A round writes beside the live parameters, and publish() copies over.
  explicit Store(bool shadow) : shadow_(shadow) {}

  void keep(Kept kept);
  void derive(DerivedTensor tensor);

  /// Where a round writes the parameter @p name, or nothing for one that is not kept.
  LocalBuffer target(const std::string& name) const;
  /// The same for a loader of @p elements more of it: kernel forms are loaded elsewhere, and made
  /// when the last element is there, by loaded().
  std::byte* loading(const std::string& name);
  void loaded(const std::string& name, std::uint64_t elements);

  /// Zeroes what nobody feeds.
  void begin();
  /// Computes what is derived from what has landed. @throws when a tied pair differs.
  void complete();
  /// What has landed is live from here on.
  void publish() noexcept;

  std::vector<LiveParameter> live(bool derived) const;

 private:
  struct Entry {
    Kept kept;
    HostMemory live;
    HostMemory shadow;   ///< Only with shadow_.
    HostMemory loading;  ///< Only while a kernel form is loaded.
    std::uint64_t loaded_elements = 0;
  };
  struct Derived {
    DerivedTensor tensor;
    std::vector<std::size_t> inputs;
    DType dtype = DType::u8;
    std::uint64_t bytes = 0;
    HostMemory live;
    HostMemory shadow;
  };

  const HostMemory& written(const Entry& entry) const {
    return shadow_ ? entry.shadow : entry.live;
  }
  std::size_t number_of(const std::string& name) const;

  bool shadow_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> numbers_;
  std::vector<Derived> derived_;
};

}  // namespace m2n::sinks
