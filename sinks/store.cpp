// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sinks/store.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "sinks/fail.hpp"

namespace m2n::sinks {
namespace {

/// Zeroes @p box of a compact row-major tensor, one contiguous run after another.
void zero_box(const Kept& kept, std::byte* data, const Box& box) {
  if (box.empty()) {
    return;
  }
  const Strides strides = row_major(kept.shape);
  const std::uint64_t item = bytes_of(kept.dtype);
  std::size_t outer = box.rank();  // dimensions before this one are walked
  while (outer > 0 && (outer == box.rank() || box[outer].size() == kept.shape[outer])) {
    --outer;
  }
  const Index run = outer < box.rank() ? box[outer].size() * strides[outer] : 1;
  Dims at = box.lo;
  for (;;) {
    Index element = 0;
    for (std::size_t d = 0; d < box.rank(); ++d) {
      element += at[d] * strides[d];
    }
    std::memset(data + static_cast<std::uint64_t>(element) * item, 0,
                static_cast<std::uint64_t>(run) * item);
    std::size_t d = outer;
    while (d > 0 && ++at[d - 1] == box.hi[d - 1]) {
      at[d - 1] = box.lo[d - 1];
      --d;
    }
    if (d == 0) {
      return;
    }
  }
}

}  // namespace

void HostMemory::Free::operator()(void* memory) const noexcept { std::free(memory); }

HostMemory::HostMemory(std::uint64_t bytes) : bytes_(bytes) {
  constexpr std::size_t kLine = 64;
  if (bytes == 0) {
    return;
  }
  memory_.reset(std::calloc(checked_add_bytes(bytes, kLine, "buffer size"), 1));
  if (!memory_) {
    throw Error(Errc::unavailable, "no memory for a buffer of " + std::to_string(bytes) +
                                       " bytes; fewer or smaller parameters a worker would fit");
  }
  std::size_t room = bytes + kLine;
  void* at = memory_.get();
  data_ = static_cast<std::byte*>(std::align(kLine, bytes, at, room));
}

std::shared_ptr<const void> Readers::enter(const std::shared_ptr<Readers>& readers) {
  {
    const std::lock_guard lock(readers->mutex_);
    if (readers->closed_) {
      throw Error(Errc::unavailable,
                  "the weights are being exchanged; they can be served when that is over");
    }
    ++readers->inside_;
  }
  return {readers.get(), [readers](const void*) {
            const std::lock_guard lock(readers->mutex_);
            --readers->inside_;
            readers->changed_.notify_all();
          }};
}

std::size_t Readers::close(Deadline deadline) {
  std::unique_lock lock(mutex_);
  closed_ = true;
  changed_.wait_until(lock, deadline, [&] { return inside_ == 0; });
  closed_ = inside_ == 0;
  return inside_;
}

void Readers::open() {
  const std::lock_guard lock(mutex_);
  closed_ = false;
}

void Store::keep(Kept kept) {
  Entry entry;
  entry.live = HostMemory(kept.bytes);
  if (shadow_) {
    entry.shadow = HostMemory(kept.bytes);
  }
  numbers_.emplace(kept.name, entries_.size());
  entry.kept = std::move(kept);
  entries_.push_back(std::move(entry));
}

std::size_t Store::number_of(const std::string& name) const {
  const auto found = numbers_.find(name);
  if (found == numbers_.end()) {
    fail("the worker keeps no parameter '" + name + "'");
  }
  return found->second;
}

void Store::derive(DerivedTensor tensor) {
  Derived derived;
  if (tensor.inputs.empty()) {
    fail("tensor '" + tensor.name + "' is derived from nothing; name its inputs");
  }
  if (!tensor.refresh) {
    fail("tensor '" + tensor.name + "' is derived from '" + tensor.inputs.front() +
         "', and nothing says how; without a refresh it would be stale after an update");
  }
  for (const std::string& input : tensor.inputs) {
    derived.inputs.push_back(number_of(input));
    if (entries_[derived.inputs.back()].kept.to_kernel_form) {
      fail("tensor '" + tensor.name + "' cannot be derived from '" + input +
           "', which lives in a kernel's form");
    }
  }
  derived.dtype = tensor.dtype.value_or(entries_[derived.inputs.front()].kept.dtype);
  derived.bytes = checked_mul_bytes(static_cast<std::uint64_t>(element_count(tensor.shape)),
                                    bytes_of(derived.dtype));
  derived.live = HostMemory(derived.bytes);
  if (shadow_) {
    derived.shadow = HostMemory(derived.bytes);
  }
  derived.tensor = std::move(tensor);
  derived_.push_back(std::move(derived));
}

LocalBuffer Store::target(const std::string& name) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? LocalBuffer{} : written(entries_[found->second]).loan();
}

std::byte* Store::loading(const std::string& name) {
  Entry& entry = entries_[number_of(name)];
  if (!entry.kept.to_kernel_form) {
    return written(entry).data();
  }
  if (entry.loading.data() == nullptr) {
    entry.loading = HostMemory(entry.kept.bytes);
  }
  return entry.loading.data();
}

void Store::loaded(const std::string& name, std::uint64_t elements) {
  Entry& entry = entries_[number_of(name)];
  if (!entry.kept.to_kernel_form) {
    return;
  }
  entry.loaded_elements += elements;
  if (entry.loaded_elements == entry.kept.fed_elements) {
    entry.kept.to_kernel_form({entry.kept.dtype, entry.kept.shape, entry.loading.data()},
                              written(entry).data());
    entry.loading = {};
    entry.loaded_elements = 0;
  }
}

void Store::begin() {
  for (Entry& entry : entries_) {
    entry.loading = {};
    entry.loaded_elements = 0;
    std::byte* const data = written(entry).data();
    if (entry.kept.zero_all) {
      std::memset(data, 0, entry.kept.bytes);
    }
    for (const Box& box : entry.kept.padding) {
      zero_box(entry.kept, data, box);
    }
  }
}

void Store::complete() {
  for (const Entry& entry : entries_) {
    const Kept& kept = entry.kept;
    if (!kept.same_as.empty() &&
        std::memcmp(written(entry).data(), written(entries_[number_of(kept.same_as)]).data(),
                    kept.bytes) != 0) {
      fail("'" + kept.name + "' differs from '" + kept.same_as +
           "', to which the model ties it; they must be equal, or one of them left out");
    }
  }
  for (Derived& derived : derived_) {
    std::vector<ParameterView> inputs;
    for (const std::size_t input : derived.inputs) {
      const Entry& entry = entries_[input];
      inputs.push_back({entry.kept.dtype, entry.kept.shape, written(entry).data()});
    }
    derived.tensor.refresh(inputs, (shadow_ ? derived.shadow : derived.live).data());
  }
}

void Store::publish() noexcept {
  if (!shadow_) {
    return;
  }
  const auto copy = [](const HostMemory& from, const HostMemory& to, std::uint64_t bytes) {
    if (bytes > 0) {
      std::memcpy(to.data(), from.data(), bytes);
    }
  };
  for (const Entry& entry : entries_) {
    copy(entry.shadow, entry.live, entry.kept.bytes);
  }
  for (const Derived& derived : derived_) {
    copy(derived.shadow, derived.live, derived.bytes);
  }
}

std::vector<LiveParameter> Store::live(bool derived) const {
  std::vector<LiveParameter> result;
  for (const Entry& entry : entries_) {
    if (entry.kept.same_as.empty()) {
      result.push_back({entry.kept.name, entry.kept.dtype, entry.kept.shape, entry.live.loan()});
    }
  }
  for (const Derived& entry : derived_) {
    if (derived) {
      result.push_back({entry.tensor.name, entry.dtype, entry.tensor.shape, entry.live.loan()});
    }
  }
  return result;
}

}  // namespace m2n::sinks
