// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/round.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/api/memory.hpp"
#include "core/engine/binding.hpp"
#include "core/error.hpp"

namespace m2n {
namespace {

/// Full tensors start on cache lines of the pool.
constexpr std::uint64_t kPoolLine = 64;
std::uint64_t room_for(const Parameter& parameter) {
  const std::uint64_t bytes = parameter.bytes();
  return checked_mul_bytes(bytes / kPoolLine + (bytes % kPoolLine == 0 ? 0 : 1), kPoolLine,
                           "pool bytes");
}

bool on_rank(const Endpoint& end, Rank rank, Role role) {
  return end.rank == rank && end.role == role;
}

/// Buffers of the parameters that @p program brings, and of the scales that it quantises them
/// under; the others are left out, so that a transport registers nothing twice.
Buffers used_buffers(const Program& program, const Buffers& all) {
  Buffers used;
  used.source.resize(all.source.size());
  used.destination.resize(all.destination.size());
  for (const std::uint32_t parameter : program.parameters) {
    const std::vector<std::vector<std::uint32_t>>& source =
        program.problem->buffers(Role::source).of_parameter;
    for (const std::uint32_t b : source[parameter]) {
      used.source[b] = all.source[b];
    }
    if (const auto scales = program.problem->scales_of(parameter)) {
      for (const std::uint32_t b : source[*scales]) {
        used.source[b] = all.source[b];
      }
    }
    for (const std::uint32_t b :
         program.problem->buffers(Role::destination).of_parameter[parameter]) {
      used.destination[b] = all.destination[b];
    }
  }
  return used;
}

/// @p part has come after @p sum.
void add_report(RoundReport& sum, const RoundReport& part) {
  const double before = sum.seconds;
  sum.version = part.version;
  sum.seconds += part.seconds;
  sum.copied_bytes += part.copied_bytes;
  for (PeerTraffic peer : part.peers) {
    peer.start_seconds += before;
    peer.end_seconds += before;
    const auto at = std::find_if(sum.peers.begin(), sum.peers.end(), [&](const PeerTraffic& known) {
      return known.peer == peer.peer && known.path == peer.path;
    });
    if (at == sum.peers.end()) {
      sum.peers.push_back(peer);
    } else {
      at->sent_bytes += peer.sent_bytes;
      at->received_bytes += peer.received_bytes;
      at->start_seconds = std::fmin(at->start_seconds, peer.start_seconds);
      at->end_seconds = std::fmax(at->end_seconds, peer.end_seconds);
    }
  }
}

}  // namespace

std::uint64_t RoundGroups::largest_bytes() const {
  return bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
}

RoundGroups round_groups(const Problem& problem, const std::vector<Resolution>& resolutions,
                         std::uint64_t pool_bytes) {
  const auto& parameters = problem.parameters();
  RoundGroups groups{std::vector<std::uint32_t>(parameters.size(), 0), {0}};
  std::unordered_map<std::string_view, std::size_t> last_of;  // together -> its last tensor
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (resolutions[i].mode == Mode::fallback && !resolutions[i].together.empty()) {
      last_of[resolutions[i].together] = i;
    }
  }
  std::vector<std::size_t> unit;  // tensors that cannot be parted
  std::uint64_t unit_bytes = 0;
  std::size_t unit_end = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (resolutions[i].mode != Mode::fallback) {
      continue;
    }
    unit.push_back(i);
    unit_bytes = checked_add_bytes(unit_bytes, room_for(parameters[i]), "pool bytes");
    const auto last = last_of.find(resolutions[i].together);
    unit_end = std::max({unit_end, i, last == last_of.end() ? i : last->second});
    if (i < unit_end) {
      continue;
    }
    if (groups.count() == 1 || groups.bytes.back() > pool_bytes ||
        unit_bytes > pool_bytes - groups.bytes.back()) {
      groups.bytes.push_back(0);
    }
    groups.bytes.back() += unit_bytes;
    for (const std::size_t member : unit) {
      groups.group_of[member] = groups.count() - 1;
    }
    unit.clear();
    unit_bytes = 0;
  }
  return groups;
}

std::vector<Program> split_program(const Program& program, const Plan& plan,
                                   const RoundGroups& groups) {
  if (groups.count() == 1) {
    return {program};
  }
  // Stages that a group needs, on any rank: numbered anew, the same everywhere.
  std::vector<std::vector<std::uint32_t>> stages_of(plan.patterns.size());
  for (std::size_t p = 0; p < plan.patterns.size(); ++p) {
    for (const Move& move : plan.patterns[p].moves) {
      if (stages_of[p].empty() || stages_of[p].back() != move.stage) {
        stages_of[p].push_back(move.stage);
      }
    }
  }
  std::vector<std::vector<std::uint32_t>> number(
      groups.count(), std::vector<std::uint32_t>(plan.stage_count, 0));  // [group][stage]
  for (std::size_t i = 0; i < plan.pattern_of.size(); ++i) {
    for (const std::uint32_t stage : stages_of[plan.pattern_of[i]]) {
      number[groups.group_of[i]][plan.first_stage[i] + stage] = 1;
    }
  }
  std::vector<Program> parts(groups.count());
  for (std::uint32_t g = 0; g < groups.count(); ++g) {
    Program& part = parts[g];
    part.rank = program.rank;
    part.world_size = program.world_size;
    part.plan_digest = sha256_hex(program.plan_digest + " group " + std::to_string(g));
    part.problem = program.problem;
    for (std::uint32_t& stage : number[g]) {
      stage = stage == 0 ? 0 : part.stage_count++;
    }
  }
  const auto deal = [&](const std::vector<Region>& regions, std::vector<Region> Program::*list) {
    for (const Region& region : regions) {
      const std::uint32_t group = groups.group_of[region.parameter];
      Program& part = parts[group];
      Region& copy = (part.*list).emplace_back(region);
      copy.stage = number[group][region.stage];
      if (on_rank(region.from, program.rank, Role::scratch) ||
          on_rank(region.to, program.rank, Role::scratch)) {
        part.scratch_bytes = program.scratch_bytes;
      }
    }
  };
  for (const std::uint32_t parameter : program.parameters) {
    parts[groups.group_of[parameter]].parameters.push_back(parameter);
  }
  deal(program.sends, &Program::sends);
  deal(program.receives, &Program::receives);
  deal(program.copies, &Program::copies);
  return parts;
}

class PreparedRound::Impl {
 public:
  Impl(const Problem& problem, const Plan& plan, const std::vector<Resolution>& resolutions,
       Rank rank, const RoundParts& parts, const RoundLimits& limits, std::uint64_t version)
      : problem_(problem),
        plan_(plan),
        rank_(rank),
        parts_(parts),
        groups_(round_groups(problem, resolutions, limits.pool_bytes)) {
    buffers_.source.resize(problem.buffers(Role::source).names.size());
    buffers_.destination.resize(problem.buffers(Role::destination).names.size());
    if (parts.source != nullptr) {
      buffers_.source = bind_source(problem, rank, parts.source->borrow(version));
    }
    if (parts.sink != nullptr) {
      place_full_tensors(limits.budget_bytes);
      buffers_.destination =
          bind_destination(problem, rank, resolutions, parts.sink->lend(), pool_places_);
    }
  }

  void prepare(Transport& transport, Deadline deadline) {
    require_memory(transport);
    const Program whole = make_program(plan_, problem_, rank_);
    for (const Program& part : split_program(whole, plan_, groups_)) {
      sessions_.push_back(part.stage_count == 0
                              ? nullptr
                              : transport.prepare(part, used_buffers(part, buffers_), deadline));
    }
  }

  RoundReport run(std::uint64_t version, std::chrono::milliseconds deadline,
                  const FullTensorVisitor& visit) {
    RoundReport report;
    report.version = version;
    run_group(0, version, deadline, report);
    std::uint32_t next = 1;
    if (!tensors_.empty()) {
      Stream stream(*this, version, deadline, visit, report, next);
      parts_.sink->load_weights(stream);
      if (const FullTensor* left = stream.left()) {
        throw Error(Errc::bad_argument, "load_weights of rank " + std::to_string(rank_) +
                                            " returned before it took tensor '" +
                                            std::string(left->name) +
                                            "'; it must take all that it is offered");
      }
    }
    while (next < groups_.count()) {
      run_group(next++, version, deadline, report);
    }
    return report;
  }

  void abort() noexcept {
    for (const auto& session : sessions_) {
      if (session) {
        session->abort();
      }
    }
  }

  const Buffers& buffers() const { return buffers_; }
  std::uint64_t pool_bytes() const { return pool_bytes_; }

  void require_memory(const Transport& transport) const {
    for (const Role role : {Role::source, Role::destination}) {
      const auto& side = role == Role::source ? buffers_.source : buffers_.destination;
      for (std::size_t i = 0; i < side.size(); ++i) {
        if (side[i].data != nullptr && !transport.moves(side[i].space)) {
          throw Error(Errc::bad_argument,
                      "transport '" + std::string(transport.name()) + "' does not move " +
                          std::string(to_string(side[i].space)) + " memory, where buffer '" +
                          problem_.buffers(role).names[i] + "' of rank " + std::to_string(rank_) +
                          " lies; take another transport, or other memory");
        }
      }
    }
  }

 private:
  /// A full tensor of this rank, in declared order.
  struct Held {
    std::size_t parameter = 0;
    FullTensor view;
  };

  /// Runs a group when its first tensor is asked for.
  class Stream final : public TensorStream {
   public:
    Stream(Impl& round, std::uint64_t version, std::chrono::milliseconds deadline,
           const FullTensorVisitor& visit, RoundReport& report, std::uint32_t& next_group)
        : round_(round),
          version_(version),
          deadline_(deadline),
          visit_(visit),
          report_(report),
          next_group_(next_group) {}

    std::optional<FullTensor> next() override {
      if (at_ == round_.tensors_.size()) {
        return std::nullopt;
      }
      const Held& held = round_.tensors_[at_];
      while (next_group_ <= round_.groups_.group_of[held.parameter]) {
        require_released(held);
        round_.run_group(next_group_++, version_, deadline_, report_);
      }
      FullTensor tensor = held.view;
      tensor.hold = round_.pool_;
      if (visit_) {
        visit_(held.parameter, tensor);
      }
      ++at_;
      return tensor;
    }

    const FullTensor* left() const {
      return at_ == round_.tensors_.size() ? nullptr : &round_.tensors_[at_].view;
    }

   private:
    /// A loader that still reads the group before would see it overwritten.
    void require_released(const Held& next) const {
      if (round_.pool_.use_count() > 1) {
        throw Error(Errc::bad_argument,
                    "load_weights of rank " + std::to_string(round_.rank_) + " asks for tensor '" +
                        std::string(next.view.name) +
                        "' and still holds one of the group before, whose memory it needs; release "
                        "or copy it first");
      }
    }

    Impl& round_;
    std::uint64_t version_;
    std::chrono::milliseconds deadline_;
    const FullTensorVisitor& visit_;
    RoundReport& report_;
    std::uint32_t& next_group_;
    std::size_t at_ = 0;
  };

  /// Offsets in the pool start over with each group.
  void place_full_tensors(std::uint64_t budget_bytes) {
    std::vector<std::uint64_t> used(groups_.count(), 0);
    std::vector<std::uint64_t> offsets;
    for (std::size_t i = 0; i < groups_.group_of.size(); ++i) {
      const Parameter& parameter = problem_.parameters()[i];
      const std::uint32_t group = groups_.group_of[i];
      if (group == 0 || parameter.destination.layout->pieces_of(rank_).empty()) {
        continue;
      }
      offsets.push_back(used[group]);
      used[group] += room_for(parameter);
      tensors_.push_back({i, {parameter.name, parameter.destination_dtype(), parameter.shape}});
    }
    const std::uint64_t largest = *std::max_element(used.begin(), used.end());
    if (budget_bytes != 0 && largest > budget_bytes) {
      throw Error(Errc::bad_argument,
                  "rank " + std::to_string(rank_) + " has room for " +
                      std::to_string(budget_bytes) +
                      " bytes of full tensors, but the plan brings " + std::to_string(largest) +
                      " at a time; give the rank more, or plan with a smaller pool");
    }
    if (tensors_.empty()) {
      return;
    }
    const MemoryPlace place = parts_.sink->place();
    pool_ = memory_of(place.space).reserve(largest, place.device);
    pool_bytes_ = largest;
    const LocalBuffer pool = pool_->take(largest, kPoolLine);
    pool_places_.resize(groups_.group_of.size());
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      Held& held = tensors_[t];
      held.view.data = pool.data + offsets[t];
      held.view.place = place;
      pool_places_[held.parameter] = held.view.buffer();
    }
  }

  void run_group(std::uint32_t group, std::uint64_t version, std::chrono::milliseconds deadline,
                 RoundReport& report) {
    if (Session* const session = sessions_[group].get()) {
      const Deadline end = deadline_in(deadline);
      session->start(version, end);
      add_report(report, session->wait(end));
    }
  }

  const Problem& problem_;
  const Plan& plan_;
  Rank rank_;
  RoundParts parts_;
  RoundGroups groups_;
  std::vector<Held> tensors_;
  std::shared_ptr<Arena> pool_;  ///< Shared with those who read it.
  std::uint64_t pool_bytes_ = 0;
  std::vector<LocalBuffer> pool_places_;  ///< [parameter] its full tensor, or nothing.
  Buffers buffers_;
  std::vector<std::unique_ptr<Session>> sessions_;  ///< [group]
};

PreparedRound::PreparedRound(const Problem& problem, const Plan& plan,
                             const std::vector<Resolution>& resolutions, Rank rank,
                             const RoundParts& parts, const RoundLimits& limits,
                             std::uint64_t version)
    : impl_(std::make_unique<Impl>(problem, plan, resolutions, rank, parts, limits, version)) {}
PreparedRound::~PreparedRound() = default;

void PreparedRound::prepare(Transport& transport, Deadline deadline) {
  impl_->prepare(transport, deadline);
}

RoundReport PreparedRound::run(std::uint64_t version, std::chrono::milliseconds deadline,
                               const FullTensorVisitor& visit) {
  return impl_->run(version, deadline, visit);
}

void PreparedRound::abort() noexcept { impl_->abort(); }
void PreparedRound::require_memory(const Transport& transport) const {
  impl_->require_memory(transport);
}
const Buffers& PreparedRound::buffers() const { return impl_->buffers(); }
std::uint64_t PreparedRound::pool_bytes() const { return impl_->pool_bytes(); }

}  // namespace m2n
