// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/peers.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <type_traits>

#include "core/error.hpp"
#include "transports/nccl/process.hpp"

namespace m2n::nccl {
namespace {

/// Plain values one after the other. Both ends run the same program on the same machine type.
class Writer {
 public:
  template <class Value>
  void put(const Value& value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put(const std::string& value) {
    put(static_cast<std::uint64_t>(value.size()));
    text_ += value;
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}
  template <class Value>
  Value get() {
    Value value;
    expects(text_.size() - at_ >= sizeof value, "a complete message from a rank");
    std::memcpy(&value, text_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text() {
    const auto size = get<std::uint64_t>();
    expects(text_.size() - at_ >= size, "a complete message from a rank");
    at_ += size;
    return text_.substr(at_ - size, size);
  }

 private:
  const std::string& text_;
  std::size_t at_ = 0;
};

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

}  // namespace

std::string to_string(Path path) {
  switch (path) {
    case Path::local:
      return "local";
    case Path::peer:
      return "peer";
    case Path::ipc:
      return "ipc";
    case Path::window:
      return "window";
    case Path::wire:
      break;
  }
  return "wire";
}

PathChoice path_choice_from_string(const std::string& name) {
  if (name == "auto") {
    return PathChoice::automatic;
  }
  if (name == "window") {
    return PathChoice::window;
  }
  if (name == "ipc") {
    return PathChoice::ipc;
  }
  if (name == "wire") {
    return PathChoice::wire;
  }
  throw Error(Errc::usage,
              "transport 'nccl': path '" + name + "', expected auto, window, ipc or wire");
}

std::string Identity::encode() const {
  Writer writer;
  writer.put(host);
  writer.put(process);
  writer.put(processes);
  writer.put(bus);
  writer.put(static_cast<std::uint64_t>(reaches.size()));
  for (const std::string& other : reaches) {
    writer.put(other);
  }
  writer.put(device);
  return writer.take();
}

Identity Identity::decode(const std::string& text) {
  Reader reader(text);
  Identity identity;
  identity.host = reader.text();
  identity.process = reader.get<std::uint64_t>();
  identity.processes = reader.text();
  identity.bus = reader.text();
  identity.reaches.resize(reader.get<std::uint64_t>());
  for (std::string& other : identity.reaches) {
    other = reader.text();
  }
  identity.device = reader.get<int>();
  return identity;
}

Identity Identity::mine(int device) {
  Identity identity{
      boot_id(), static_cast<std::uint64_t>(getpid()), process_space(), bus_id(device), {}, device};
  int count = 0;
  check(cudaGetDeviceCount(&count), "count devices");
  for (int other = 0; other < count; ++other) {
    int reachable = 0;
    if (other != device) {
      check(cudaDeviceCanAccessPeer(&reachable, device, other), "ask for peer access");
    }
    if (reachable != 0) {
      identity.reaches.push_back(bus_id(other));
    }
  }
  return identity;
}

std::string Advert::encode() const {
  Writer writer;
  writer.put(static_cast<std::uint64_t>(allocations.size()));
  for (const Offer& offer : allocations) {
    writer.put(offer);
  }
  writer.put(control_offset);
  writer.put(static_cast<std::uint64_t>(places.size()));
  for (const Place& place : places) {
    writer.put(place);
  }
  writer.put(wire_peers);
  writer.put(window_bytes);
  writer.put(window_allocation);
  writer.put(settings);
  return writer.take();
}

Advert Advert::decode(const std::string& text) {
  Reader reader(text);
  Advert advert;
  advert.allocations.resize(reader.get<std::uint64_t>());
  for (Offer& offer : advert.allocations) {
    offer = reader.get<Offer>();
  }
  advert.control_offset = reader.get<std::uint64_t>();
  advert.places.resize(reader.get<std::uint64_t>());
  for (Place& place : advert.places) {
    place = reader.get<Place>();
  }
  advert.wire_peers = reader.get<std::uint64_t>();
  advert.window_bytes = reader.get<std::uint64_t>();
  advert.window_allocation = reader.get<std::int64_t>();
  advert.settings = reader.text();
  return advert;
}

Path propose_path(const Identity& from, const Identity& to, const Advert& advert, PathChoice choice,
                  bool windows) {
  if (choice == PathChoice::wire || from.host != to.host) {
    return Path::wire;
  }
  const bool same_device = from.bus == to.bus;
  const bool mappable = same_device || std::find(from.reaches.begin(), from.reaches.end(),
                                                 to.bus) != from.reaches.end();
  if (!mappable) {
    return Path::wire;
  }
  // Every place must lie in the window, or be exportable.
  const auto all_places = [&](const auto& accepts) {
    return std::all_of(advert.places.begin(), advert.places.end(), [&](const Advert::Place& p) {
      return p.allocation < 0 || accepts(p.allocation);
    });
  };
  const bool in_window = windows && all_places([&](std::int64_t allocation) {
                           return allocation == advert.window_allocation;
                         });
  if (choice == PathChoice::window && !same_device) {
    return in_window ? Path::window : Path::wire;
  }
  if (from.process == to.process) {
    return same_device ? Path::local : Path::peer;
  }
  const bool exportable = all_places([&](std::int64_t allocation) {
    return advert.allocations[static_cast<std::size_t>(allocation)].allocation.exportable;
  });
  if (exportable) {
    return same_device ? Path::local : Path::ipc;
  }
  return choice == PathChoice::automatic && in_window && !same_device ? Path::window : Path::wire;
}

std::shared_ptr<void> IpcMappings::open(const Offer& offer) {
  const std::string key(reinterpret_cast<const char*>(&offer.handle), sizeof offer.handle);
  if (auto found = open_[key].lock()) {
    return found;
  }
  void* base = nullptr;
  check(cudaIpcOpenMemHandle(&base, offer.handle, cudaIpcMemLazyEnablePeerAccess),
        "map memory of another process");
  std::shared_ptr<void> mapping(base, [](void* at) { cudaIpcCloseMemHandle(at); });
  open_[key] = mapping;
  return mapping;
}

}  // namespace m2n::nccl
