// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/links.hpp"

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "transports/nccl/greet.hpp"

namespace m2n::nccl {
namespace {

/// "+" and what @p make returns, or "-" and what it throws.
template <class Make>
std::string attempt(const Make& make) {
  try {
    return "+" + make();
  } catch (const std::exception& error) {
    return std::string("-") + error.what();
  }
}

/// Every rank's text; throws the first error of any rank, the same one everywhere.
std::vector<std::string> agree(Group& group, const char* phase, const std::string& mine,
                               Deadline deadline) {
  std::vector<std::string> all = group.all_gather(phase, mine, deadline);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank][0] != '+') {
      throw TransportError(Errc::bad_argument,
                           "rank " + std::to_string(rank) + ": " +
                               (all[rank].empty() ? "no answer" : all[rank].substr(1)));
    }
    all[rank].erase(0, 1);
  }
  return all;
}

/// What the Advert of a rank is made from.
class Advertiser {
 public:
  Advertiser(const Program& program, const SessionMemory& memory)
      : program_(program), memory_(memory) {}

  Advert make(const NcclOptions& options) {
    const auto control = reinterpret_cast<std::uint64_t>(memory_.control().data());
    advert_.control_offset = offer(control, "the control block").offset;
    advert_.places.resize(memory_.place_count());
    std::set<Rank> senders;
    std::set<Rank> receivers;
    for (const Region& region : program_.receives) {
      senders.insert(region.from.rank);
      Advert::Place& place = advert_.places[memory_.place_index(region.to)];
      if (place.allocation < 0) {
        place = offer(memory_.base(region.to), "a buffer of rank " + std::to_string(program_.rank));
      }
    }
    for (const Region& region : program_.sends) {
      receivers.insert(region.to.rank);
    }
    advert_.wire_peers = senders.size() + receivers.size();
    advert_.settings = options.shared() + " plan=" + program_.plan_digest;
    choose_window();
    return std::move(advert_);
  }

  /// Where the allocation begins that becomes a window; 0: none.
  std::uint64_t window_base() const { return window_base_; }

 private:
  Advert::Place offer(std::uint64_t at, const std::string& what) {
    const Allocation allocation = allocation_of(reinterpret_cast<const void*>(at), what);
    const auto [found, fresh] =
        known_.emplace(allocation.base, static_cast<std::int64_t>(advert_.allocations.size()));
    if (fresh) {
      Offer made{allocation, {}};
      if (allocation.exportable &&
          cudaIpcGetMemHandle(&made.handle, reinterpret_cast<void*>(allocation.base)) !=
              cudaSuccess) {
        cudaGetLastError();
        made.allocation.exportable = false;
      }
      advert_.allocations.push_back(made);
    }
    return {found->second, at - allocation.base};
  }

  /// The one allocation that this rank can register: what it receives into, or else one that it
  /// sends from, when there is exactly one and it came from ncclMemAlloc.
  void choose_window() {
    if (!windows_exist()) {
      return;
    }
    std::set<std::int64_t> targets;
    for (const Advert::Place& place : advert_.places) {
      if (place.allocation >= 0) {
        targets.insert(place.allocation);
      }
    }
    if (targets.size() == 1) {
      const Allocation& a =
          advert_.allocations[static_cast<std::size_t>(*targets.begin())].allocation;
      if (!a.exportable) {
        window_base_ = a.base;
        advert_.window_bytes = a.bytes;
        advert_.window_allocation = *targets.begin();
      }
    } else if (targets.empty() && !program_.sends.empty()) {
      const Allocation a =
          allocation_of(reinterpret_cast<const void*>(memory_.address(program_.sends.front().from)),
                        "a source buffer");
      if (!a.exportable) {
        window_base_ = a.base;
        advert_.window_bytes = a.bytes;
      }
    }
  }

  const Program& program_;
  const SessionMemory& memory_;
  Advert advert_;
  std::map<std::uint64_t, std::int64_t> known_;
  std::uint64_t window_base_ = 0;
};

/// The steps of link_ranks().
class Linker {
 public:
  Linker(Connection& connection, const Program& program, Deadline deadline)
      : connection_(connection),
        program_(program),
        deadline_(deadline),
        rank_(static_cast<std::size_t>(program.rank)) {}

  Links run(const std::function<const SessionMemory&()>& place) {
    advertise(place);
    propose_paths();
    const bool windows = agree_on_library_use();
    if (windows) {
      links_.window =
          std::make_unique<Window>(*connection_.comm, reinterpret_cast<void*>(window_base_),
                                   adverts_[rank_].window_bytes, deadline_);
    }
    agree_on_failures(map_peers());
    links_.uses_wire = links_.uses(Path::wire);
    if (links_.uses_wire) {
      connect_wire();
    }
    if (connection_.options.graph == GraphChoice::on && links_.uses_wire) {
      throw TransportError(Errc::bad_argument,
                           "nccl: graph=on, but rank " + std::to_string(rank_) +
                               " has peers that it cannot map, expected mapped peers only");
    }
    return std::move(links_);
  }

 private:
  Group& group() const { return *connection_.group; }

  void advertise(const std::function<const SessionMemory&()>& place) {
    const std::string mine = attempt([&] {
      Advertiser advertiser(program_, place());
      Advert advert = advertiser.make(connection_.options);
      window_base_ = advertiser.window_base();
      return advert.encode();
    });
    for (const std::string& text : agree(group(), "nccl memory", mine, deadline_)) {
      adverts_.push_back(Advert::decode(text));
    }
  }

  void propose_paths() {
    const NcclOptions& options = connection_.options;
    std::uint64_t wire_peers = 1;
    bool windows = windows_exist() && options.path != PathChoice::ipc;
    for (std::size_t rank = 0; rank < adverts_.size(); ++rank) {
      const Advert& advert = adverts_[rank];
      if (advert.settings != adverts_[0].settings) {
        throw TransportError(Errc::bad_argument, "nccl: rank " + std::to_string(rank) +
                                                     " runs with " + advert.settings +
                                                     ", expected " + adverts_[0].settings +
                                                     " as on rank 0");
      }
      wire_peers = std::max(wire_peers, advert.wire_peers);
      windows = windows && advert.window_bytes > 0 &&
                (window_sizes_may_differ() || advert.window_bytes == adverts_[0].window_bytes);
    }
    links_.limits = {chunk_bytes_for(options.staging_bytes, wire_peers), options.direct_bytes,
                     options.step_bytes};
    const auto& ranks = connection_.ranks;
    links_.alone_on_device =
        std::count_if(ranks.begin(), ranks.end(), [&](const Identity& other) {
          return other.host == ranks[rank_].host && other.bus == ranks[rank_].bus;
        }) == 1;
    for (const Region& region : program_.sends) {
      const auto to = static_cast<std::size_t>(region.to.rank);
      links_.to.try_emplace(
          to, propose_path(ranks[rank_], ranks[to], adverts_[to], options.path, windows));
    }
    for (const Region& region : program_.receives) {
      const auto from = static_cast<std::size_t>(region.from.rank);
      links_.from.try_emplace(
          from, propose_path(ranks[from], ranks[rank_], adverts_[rank_], options.path, windows));
    }
  }

  /// Makes the communicator when some rank needs it. True when some pair has a window.
  bool agree_on_library_use() {
    bool window = false;
    bool wire = false;
    const std::string mine = attempt([&] {
      return std::string(links_.uses(Path::window) ? "w" : "-") +
             (links_.uses(Path::wire) ? "w" : "-");
    });
    for (const std::string& text : agree(group(), "nccl paths", mine, deadline_)) {
      window = window || text[0] == 'w';
      wire = wire || text[1] == 'w';
    }
    if (window || wire) {
      connect_communicator();
    }
    return window;
  }

  void connect_communicator() {
    if (!connection_.comm) {
      connection_.comm =
          std::make_unique<Communicator>(group(), connection_.options.max_cta, deadline_);
    }
  }

  bool in_this_process(std::size_t other) const {
    const auto& ranks = connection_.ranks;
    return ranks[other].host == ranks[rank_].host && ranks[other].process == ranks[rank_].process;
  }

  /// Where this process sees an allocation of @p other.
  std::uint64_t base_of(std::size_t other, std::int64_t allocation) {
    const Offer& offer = adverts_[other].allocations[static_cast<std::size_t>(allocation)];
    if (in_this_process(other)) {
      if (auto memory = find_shared_memory(offer.allocation.base)) {
        links_.kept.push_back(std::move(memory));
      }
      return offer.allocation.base;
    }
    auto mapping = connection_.mappings.open(offer);
    const auto base = reinterpret_cast<std::uint64_t>(mapping.get());
    links_.kept.push_back(std::move(mapping));
    return base;
  }

  void map_places(std::size_t other, Path path) {
    std::map<std::int64_t, std::uint64_t> bases;
    std::vector<std::uint64_t>& places = links_.places_of[other];
    for (const Advert::Place& place : adverts_[other].places) {
      if (place.allocation < 0) {
        places.push_back(0);
        continue;
      }
      const auto [found, fresh] = bases.emplace(place.allocation, 0);
      if (fresh) {
        found->second = path == Path::window ? links_.window->base_of(static_cast<Rank>(other))
                                             : base_of(other, place.allocation);
        if (found->second == 0) {
          throw TransportError(Errc::unavailable, "nccl: no window of the peer");
        }
      }
      places.push_back(found->second + place.offset);
    }
  }

  /// Maps what the paths promise. Pairs of ranks that cannot be mapped after all, as text.
  std::string map_peers() {
    std::string failures;
    std::set<std::size_t> peers;
    for (const auto* paths : {&links_.to, &links_.from}) {
      for (const auto& [other, path] : *paths) {
        if (path != Path::wire) {
          peers.insert(other);
        }
      }
    }
    for (const std::size_t other : peers) {
      try {
        links_.control_of[other] = base_of(other, 0) + adverts_[other].control_offset;
        const auto to = links_.to.find(other);
        if (to != links_.to.end() && to->second != Path::wire) {
          map_places(other, to->second);
        }
      } catch (const TransportError&) {
        failures += std::to_string(rank_) + " " + std::to_string(other) + " ";
      }
    }
    return failures;
  }

  /// A pair that cannot be mapped goes by wire, on both sides.
  void agree_on_failures(const std::string& mine) {
    bool wire = false;
    for (const std::string& text : agree(group(), "nccl mappings", "+" + mine, deadline_)) {
      std::istringstream in(text);
      std::size_t a = 0;
      std::size_t b = 0;
      while (in >> a >> b) {
        wire = true;
        if (a == rank_ || b == rank_) {
          go_by_wire(a == rank_ ? b : a);
        }
      }
    }
    if (wire) {
      connect_communicator();
    }
  }

  /// So that no round waits for a connection.
  void connect_wire() {
    std::set<Rank> peers;
    for (const auto* paths : {&links_.to, &links_.from}) {
      for (const auto& [peer, path] : *paths) {
        if (path == Path::wire) {
          peers.insert(static_cast<Rank>(peer));
        }
      }
    }
    greet(*connection_.comm, {peers.begin(), peers.end()}, deadline_);
  }

  void go_by_wire(std::size_t other) {
    for (auto* paths : {&links_.to, &links_.from}) {
      if (const auto found = paths->find(other); found != paths->end()) {
        found->second = Path::wire;
      }
    }
    links_.control_of.erase(other);
  }

  Connection& connection_;
  const Program& program_;
  Deadline deadline_;
  std::size_t rank_;
  std::vector<Advert> adverts_;
  std::uint64_t window_base_ = 0;
  Links links_;
};

}  // namespace

bool Links::uses(Path path) const {
  const auto is = [&](const auto& pair) { return pair.second == path; };
  return std::any_of(to.begin(), to.end(), is) || std::any_of(from.begin(), from.end(), is);
}

std::uint64_t Links::address(const Endpoint& end) const {
  const std::vector<std::uint64_t>& places = places_of.at(static_cast<std::size_t>(end.rank));
  const std::size_t index = end.role == Role::scratch ? places.size() - 1 : end.buffer;
  expects(places.at(index) != 0, "a buffer at the destination for every region");
  return places[index] + end.offset_bytes;
}

Links link_ranks(Connection& connection, const Program& program,
                 const std::function<const SessionMemory&()>& place, Deadline deadline) {
  return Linker(connection, program, deadline).run(place);
}

}  // namespace m2n::nccl
