// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A worker's parameters, in host or device memory: live, where a round writes them, and what is
/// derived.

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/api/group.hpp"
#include "core/api/memory.hpp"
#include "core/api/sink.hpp"

namespace m2n::sinks {

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

/// Takes memory when it is first needed, so that a sink that only resolves costs none.
///
/// - Threads: one at a time; live() from any thread once a round was published.
/// - Memory: buffers keep their addresses. Where a function of the host has to see or write bytes
///   of a device, one parameter at a time is staged.
/// - Errors: Error{bad_argument, unavailable} naming the parameter.
class Store {
 public:
  /// @param shadow  A round writes beside the live parameters, and publish() copies over.
  Store(bool shadow, MemoryPlace place) : shadow_(shadow), place_(place) {}

  void keep(Kept kept);
  void rewrite(Rewrite rewrite);
  void derive(DerivedTensor tensor);
  /// Memory is to be taken for @p names in this order, and for all else after it.
  void order(const std::vector<std::string>& names);

  /// Where a round writes the parameter @p name, or nothing for one that is not kept.
  LocalBuffer target(const std::string& name);
  /// The same for a loader of @p elements more of it: kernel forms are loaded elsewhere (in host
  /// memory), and made when the last element is there, by loaded().
  LocalBuffer loading(const std::string& name);
  void loaded(const std::string& name, std::uint64_t elements);

  /// Zeroes what nobody feeds.
  void begin();
  /// Rewrites what has landed, and computes what is derived from it. @throws when a tied pair
  /// differs.
  void complete();
  /// What has landed is live from here on. @throws when a device fails; then nothing is valid.
  void publish();

  std::vector<LiveParameter> live(bool derived);

 private:
  struct Places {
    LocalBuffer live;
    LocalBuffer shadow;  ///< Only with shadow_.
  };
  struct Entry {
    Kept kept;
    Places places;
    std::vector<std::byte> loading;  ///< Only while a kernel form is loaded.
    std::uint64_t loaded_elements = 0;
  };
  struct Derived {
    DerivedTensor tensor;
    std::vector<std::size_t> inputs;
    DType dtype = DType::u8;
    std::uint64_t bytes = 0;
    Places places;
  };
  /// What one allocate() took. Live memory and shadow are laid out alike.
  struct Region {
    std::unique_ptr<Arena> live_arena;
    std::unique_ptr<Arena> shadow_arena;
    LocalBuffer live;
    LocalBuffer shadow;
  };

  const Memory& memory() const { return memory_of(place_.space); }
  void allocate();
  const LocalBuffer& written(const Places& places) const {
    return shadow_ ? places.shadow : places.live;
  }
  std::size_t number_of(const std::string& name) const;
  void zero_box(const Entry& entry, const Box& box) const;
  bool equal(const LocalBuffer& a, const LocalBuffer& b) const;
  void refresh(const Derived& derived);
  void run_rewrite(const Rewrite& rewrite);
  static void make_on_host(const LocalBuffer& target, const std::function<void(std::byte*)>& make);

  bool shadow_;
  MemoryPlace place_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> numbers_;
  std::vector<Rewrite> rewrites_;
  std::vector<Derived> derived_;
  std::vector<std::size_t> first_;
  std::vector<Region> regions_;
  std::size_t placed_ = 0;  ///< Entries that have memory.
  std::size_t placed_derived_ = 0;
  LocalBuffer zeros_;  ///< An element of zero.
};

}  // namespace m2n::sinks
