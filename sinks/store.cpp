// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sinks/store.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "core/tensor/blocks.hpp"
#include "sinks/fail.hpp"

namespace m2n::sinks {
namespace {

/// Room for one element of any type.
constexpr std::uint64_t kZeroBytes = 16;

/// Bytes of an arena that a buffer of @p bytes takes.
std::uint64_t room_for(std::uint64_t bytes, MemorySpace space) {
  const std::uint64_t align = weight_alignment(space);
  return checked_mul_bytes(bytes / align + (bytes % align == 0 ? 0 : 1), align, "buffer size");
}

}  // namespace

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
  numbers_.emplace(kept.name, entries_.size());
  entries_.push_back({std::move(kept), {}, {}, 0});
}

void Store::order(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (const auto found = numbers_.find(name); found != numbers_.end()) {
      first_.push_back(found->second);
    }
  }
}

/// Takes memory for all that has none, all live memory from one arena and all shadows from another.
void Store::allocate() {
  if (placed_ == entries_.size() && placed_derived_ == derived_.size()) {
    return;
  }
  std::vector<std::pair<Places*, std::uint64_t>> taken;
  std::vector<bool> seen(entries_.size(), false);
  const auto take = [&](std::size_t i) {
    if (i >= placed_ && !seen[i]) {
      seen[i] = true;
      taken.emplace_back(&entries_[i].places, entries_[i].kept.bytes);
    }
  };
  for (const std::size_t i : first_) {
    take(i);
  }
  for (std::size_t i = placed_; i < entries_.size(); ++i) {
    take(i);
  }
  for (std::size_t i = placed_derived_; i < derived_.size(); ++i) {
    taken.emplace_back(&derived_[i].places, derived_[i].bytes);
  }
  std::uint64_t bytes = room_for(kZeroBytes, place_.space);
  for (const auto& entry : taken) {
    bytes = checked_add_bytes(bytes, room_for(entry.second, place_.space), "buffer size");
  }
  const std::uint64_t align = weight_alignment(place_.space);
  Region region;
  const auto fill = [&](Arena& arena, LocalBuffer Places::*member) {
    const LocalBuffer whole = arena.take(bytes, align);
    std::uint64_t used = 0;
    for (const auto& [places, size] : taken) {
      places->*member = {whole.data + used, size, whole.space, whole.device};
      used += room_for(size, place_.space);
    }
    zeros_ = {whole.data + used, kZeroBytes, whole.space, whole.device};
    return whole;
  };
  try {
    region.live_arena = memory().reserve(bytes, place_.device);
    if (shadow_) {
      region.shadow_arena = memory().reserve(bytes, place_.device);
    }
  } catch (const Error& error) {
    throw Error(error.code(), "no memory for the " + std::to_string(bytes) +
                                  " bytes of a worker's weights" +
                                  (shadow_ ? ", twice for a shadow" : "") + ": " + error.what() +
                                  "; fewer or smaller parameters a worker would fit");
  }
  region.live = fill(*region.live_arena, &Places::live);
  if (shadow_) {
    region.shadow = fill(*region.shadow_arena, &Places::shadow);
  }
  regions_.push_back(std::move(region));
  placed_ = entries_.size();
  placed_derived_ = derived_.size();
}

std::size_t Store::number_of(const std::string& name) const {
  const auto found = numbers_.find(name);
  if (found == numbers_.end()) {
    fail("the worker keeps no parameter '" + name + "'");
  }
  return found->second;
}

void Store::rewrite(Rewrite rewrite) { rewrites_.push_back(std::move(rewrite)); }

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
  derived.tensor = std::move(tensor);
  derived_.push_back(std::move(derived));
}

LocalBuffer Store::target(const std::string& name) {
  allocate();
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? LocalBuffer{} : written(entries_[found->second].places);
}

LocalBuffer Store::loading(const std::string& name) {
  allocate();
  Entry& entry = entries_[number_of(name)];
  if (!entry.kept.to_kernel_form) {
    return written(entry.places);
  }
  entry.loading.resize(entry.kept.bytes);
  return host_buffer(entry.loading.data(), entry.loading.size());
}

void Store::loaded(const std::string& name, std::uint64_t elements) {
  Entry& entry = entries_[number_of(name)];
  if (!entry.kept.to_kernel_form) {
    return;
  }
  entry.loaded_elements += elements;
  if (entry.loaded_elements == entry.kept.fed_elements) {
    const ParameterView view{entry.kept.dtype, entry.kept.shape, entry.loading.data()};
    make_on_host(written(entry.places),
                 [&](std::byte* live) { entry.kept.to_kernel_form(view, live); });
    entry.loading = {};
    entry.loaded_elements = 0;
  }
}

/// Lets a function of the host write all of @p target.
void Store::make_on_host(const LocalBuffer& target, const std::function<void(std::byte*)>& make) {
  if (target.space == MemorySpace::host) {
    make(target.data);
    return;
  }
  std::vector<std::byte> staged(target.bytes);
  make(staged.data());
  memory_of(target).write(target, staged);
}

/// By a copy of one zero element to every place: no neighbour is touched.
void Store::zero_box(const Entry& entry, const Box& box) const {
  const Kept& kept = entry.kept;
  if (box.empty()) {
    return;
  }
  const Strides strides = row_major(kept.shape);
  const Index first = element_offset(Dims::filled(box.rank(), 0), box.lo, strides);
  copy_region({box.extents(), Dims::filled(box.rank(), 0), strides, kept.dtype, kept.dtype}, zeros_,
              written(entry.places).from(static_cast<std::uint64_t>(first) * bytes_of(kept.dtype)));
}

void Store::begin() {
  allocate();
  for (Entry& entry : entries_) {
    entry.loading = {};
    entry.loaded_elements = 0;
    if (entry.kept.zero_all) {
      memory().zero(written(entry.places));
    }
    for (const Box& box : entry.kept.padding) {
      zero_box(entry, box);
    }
  }
}

bool Store::equal(const LocalBuffer& a, const LocalBuffer& b) const {
  if (a.space == MemorySpace::host) {
    return a.bytes == 0 || std::memcmp(a.data, b.data, a.bytes) == 0;
  }
  const Shape shape{static_cast<Index>(a.bytes)};
  const auto digest_of = [&](const LocalBuffer& buffer) {
    return DigestOf{{shape, Box::whole(shape), DType::u8, buffer, {1}}, DType::u8};
  };
  const auto sums = memory().digests(std::vector{digest_of(a), digest_of(b)});
  return sums[0] == sums[1];
}

void Store::complete() {
  for (const Entry& entry : entries_) {
    const Kept& kept = entry.kept;
    if (!kept.same_as.empty() &&
        !equal(written(entry.places), written(entries_[number_of(kept.same_as)].places))) {
      fail("'" + kept.name + "' differs from '" + kept.same_as +
           "', to which the model ties it; they must be equal, or one of them left out");
    }
  }
  for (const Rewrite& rewrite : rewrites_) {
    run_rewrite(rewrite);
  }
  for (Derived& derived : derived_) {
    refresh(derived);
  }
}

/// What lies elsewhere is changed in a copy on the host.
void Store::run_rewrite(const Rewrite& rewrite) {
  std::vector<WritableView> views;
  std::vector<std::pair<LocalBuffer, std::vector<std::byte>>> staged;
  staged.reserve(rewrite.parameters.size());
  for (const std::string& name : rewrite.parameters) {
    const Entry& entry = entries_[number_of(name)];
    const LocalBuffer& buffer = written(entry.places);
    std::byte* data = buffer.data;
    if (buffer.space != MemorySpace::host) {
      std::vector<std::byte>& copy =
          staged.emplace_back(buffer, std::vector<std::byte>(buffer.bytes)).second;
      memory().read(buffer, copy);
      data = copy.data();
    }
    views.push_back({entry.kept.dtype, entry.kept.shape, data});
  }
  rewrite.apply(views);
  for (const auto& [buffer, copy] : staged) {
    memory().write(buffer, copy);
  }
}

void Store::refresh(const Derived& derived) {
  std::vector<ParameterView> inputs;
  std::vector<std::vector<std::byte>> staged;
  staged.reserve(derived.inputs.size());
  for (const std::size_t input : derived.inputs) {
    const Entry& entry = entries_[input];
    const LocalBuffer& buffer = written(entry.places);
    const std::byte* data = buffer.data;
    if (buffer.space != MemorySpace::host) {
      memory().read(buffer, staged.emplace_back(buffer.bytes));
      data = staged.back().data();
    }
    inputs.push_back({entry.kept.dtype, entry.kept.shape, data});
  }
  make_on_host(written(derived.places),
               [&](std::byte* out) { derived.tensor.refresh(inputs, out); });
}

void Store::publish() {
  for (const Region& region : regions_) {
    if (shadow_) {
      const auto bytes = static_cast<Index>(region.live.bytes);
      copy_region({{bytes}, {1}, {1}, DType::u8, DType::u8}, region.shadow, region.live);
    }
  }
}

std::vector<LiveParameter> Store::live(bool derived) {
  allocate();
  std::vector<LiveParameter> result;
  for (const Entry& entry : entries_) {
    if (entry.kept.same_as.empty()) {
      result.push_back({entry.kept.name, entry.kept.dtype, entry.kept.shape, entry.places.live});
    }
  }
  for (const Derived& entry : derived_) {
    if (derived) {
      result.push_back({entry.tensor.name, entry.dtype, entry.tensor.shape, entry.places.live});
    }
  }
  return result;
}

}  // namespace m2n::sinks
