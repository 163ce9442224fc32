// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The rounds of a link.

#include <utility>

#include "core/engine/binding.hpp"
#include "core/engine/elapsed.hpp"
#include "core/engine/link.hpp"
#include "core/engine/link_errors.hpp"

namespace m2n {
namespace {

/// How much longer than its deadline a transport may take before it is ended.
constexpr std::chrono::milliseconds kGrace{250};

/// The verdict on totals that differ: every rank tells its digests.
constexpr std::string_view kTellAll = "?";

}  // namespace

LinkRound Link::round(std::uint64_t version, const std::function<void()>& before_writing) {
  LinkRound round;
  phase(phases::kRound, version, [&] {
    const auto start = std::chrono::steady_clock::now();
    const Statement mine = attempt([&]() -> std::string {
      if (options().on_phase) {
        options().on_phase(phases::kRound);
      }
      if (parts_.source != nullptr) {
        const std::vector<ParamLoan> loans = parts_.source->borrow(version);
        round.borrow_seconds = seconds_since(start);
        const std::vector<LocalBuffer> bound = bind_source(problem(), rank_, loans);
        for (std::size_t i = 0; i < bound.size(); ++i) {
          if (bound[i].data != buffers().source[i].data) {
            throw Error(Errc::bad_argument,
                        "buffer '" + problem().buffers(Role::source).names[i] +
                            "' has moved since init; addresses must stay from round to round");
          }
        }
      }
      return "version " + std::to_string(version) + " of plan " + plan_digest_;
    });
    require(phases::kRound,
            group_->agree(phases::kRound, mine, options().deadline_of(phases::kRound)));
    round.start_seconds = seconds_since(start);
  });
  phase(phases::kMove, version, [&] { move(version, before_writing, round); });
  if (integrity_) {
    phase(phases::kIntegrity, version, [&] { check_integrity(version, round); });
  }
  return round;
}

void Link::move(std::uint64_t version, const std::function<void()>& before_writing,
                LinkRound& round) {
  if (options().on_phase) {
    options().on_phase(phases::kMove);
  }
  if (before_writing) {
    before_writing();
  }
  if (parts_.sink != nullptr) {
    parts_.sink->begin(version);
  }
  // The transport keeps the deadline itself; the watchdog is for the one that does not, and for
  // failures that only the group knows of.
  watchdog_.guard(deadline_in(move_span_ + kGrace),
                  [this](const std::string&) { round_->abort(); });
  measurement_.clear();
  try {
    round.report =
        round_->run(version, options().deadline_span(phases::kMove),
                    integrity_ ? FullTensorVisitor([this](std::size_t index, const FullTensor&) {
                      integrity_->measure_held({&index, 1}, buffers().destination, measurement_);
                    })
                               : FullTensorVisitor());
  } catch (...) {
    watchdog_.release();
    throw;
  }
  watchdog_.release();
}

/// All that is still where it was sent from or has landed; full tensors were measured on their way.
void Link::measure_direct() {
  std::vector<std::size_t> parameters;
  for (std::size_t i = 0; i < resolutions().size(); ++i) {
    if (parts_.source != nullptr || resolutions()[i].mode == Mode::direct) {
      parameters.push_back(i);
    }
  }
  if (parts_.source != nullptr) {
    integrity_->measure_sent(parameters, buffers().source, measurement_);
  } else {
    integrity_->measure_held(parameters, buffers().destination, measurement_);
  }
}

/// @return What is wrong with the totals of all ranks, the same on each: nothing, kTellAll, or what
///         kept a rank from measuring.
std::string Link::judge_totals(const Statement& mine, Deadline deadline) {
  std::string verdict;
  if (rank_ != 0) {
    group_->send(phases::kIntegrity, 0, (mine.failed ? "-" : "+") + mine.text, deadline);
  } else {
    std::vector<std::string> by_rank{mine.text};
    verdict = mine.failed ? "rank 0: " + mine.text : "";
    for (Rank rank = 1; rank < group_->size(); ++rank) {
      const std::string other = group_->receive(phases::kIntegrity, rank, deadline);
      if (other.empty() || other.front() != '+') {
        verdict += (verdict.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " +
                   (other.empty() ? "" : other.substr(1));
      }
      by_rank.push_back(other.empty() ? "" : other.substr(1));
    }
    if (verdict.empty() && !integrity_->totals_agree(by_rank)) {
      verdict = kTellAll;
    }
  }
  return group_->broadcast("integrity verdict", 0, verdict, deadline);
}

/// @return Which digests differ, the same on every rank.
std::string Link::judge_digests(Deadline deadline) {
  constexpr std::string_view kDigests = "integrity digests";
  std::string verdict;
  if (rank_ != 0) {
    group_->send(kDigests, 0, measurement_.text(), deadline);
  } else {
    std::vector<std::string> by_rank{measurement_.text()};
    for (Rank rank = 1; rank < group_->size(); ++rank) {
      by_rank.push_back(group_->receive(kDigests, rank, deadline));
    }
    verdict = integrity_->compare(by_rank);
  }
  return group_->broadcast("integrity digests verdict", 0, verdict, deadline);
}

void Link::check_integrity(std::uint64_t version, LinkRound& round) {
  const auto start = std::chrono::steady_clock::now();
  const Deadline deadline = options().deadline_of(phases::kIntegrity);
  const Statement mine = attempt([&]() -> std::string {
    if (options().on_phase) {
      options().on_phase(phases::kIntegrity);
    }
    measure_direct();
    return integrity_->totals(measurement_);
  });
  std::string verdict = judge_totals(mine, deadline);
  if (verdict == kTellAll) {
    verdict = judge_digests(deadline);
  }
  if (!verdict.empty()) {
    throw AgreedError(Errc::bad_plan, "phase '" + std::string(phases::kIntegrity) +
                                          "' of version " + std::to_string(version) + ": " +
                                          verdict);
  }
  round.integrity_seconds = seconds_since(start);
}

}  // namespace m2n
