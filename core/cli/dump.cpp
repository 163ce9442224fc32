// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/dump.hpp"

#include <algorithm>

#include "core/engine/compact.hpp"
#include "core/io/json_reader.hpp"
#include "core/plan/traffic.hpp"

namespace m2n::cli {

Dump::Dump(const Job& job, const Plan& plan) : job_(job), writer_(job.experiment().dump) {
  const Experiment& experiment = job.experiment();
  writer_.experiment(
      {{"m2n_version", M2N_VERSION},
       {"config", experiment.file.empty() ? std::string() : read_text_file(experiment.file)},
       {"command_line", experiment.command_line},
       {"planner", experiment.planner},
       {"transport", experiment.transport},
       {"topology", job.topology().canonical_json()},
       {"source", experiment.source_kind},
       {"sink", experiment.sink_kind},
       {"values", experiment.values}});
  writer_.problem(job.problem());
  writer_.plan(plan, job.problem());
}

void Dump::add_shards(const RankView& view) {
  shards_ = true;
  const Problem& problem = job_.problem();
  for (const Role role : {Role::source, Role::destination}) {
    const BufferTable& table = problem.buffers(role);
    const auto& buffers = role == Role::source ? view.buffers->source : view.buffers->destination;
    for (std::size_t i = 0; i < problem.parameters().size(); ++i) {
      if (role == Role::destination && job_.resolutions()[i].mode == Mode::fallback) {
        continue;  // see add_full_tensor()
      }
      const Parameter& parameter = problem.parameters()[i];
      const Layout& layout =
          *(role == Role::source ? parameter.source : parameter.destination).layout;
      const auto& ranks = layout.ranks();
      if (!std::binary_search(ranks.begin(), ranks.end(), view.rank)) {
        continue;
      }
      std::vector<LocalBuffer> slots;
      for (const std::uint32_t buffer : table.of_parameter[i]) {
        slots.push_back(buffers[buffer]);
      }
      const CompactTensor tensor = gather_compact(layout, view.rank, slots);
      writer_.shard(role, view.rank, parameter, tensor.shard, tensor.bytes.data());
    }
  }
}

void Dump::add_full_tensor(Rank rank, std::size_t index, const FullTensor& tensor) {
  const Parameter& parameter = job_.problem().parameters()[index];
  writer_.shard(Role::destination, rank, parameter, parameter.destination.layout->compact(rank),
                tensor.data);
}

void Dump::add_usage(const Plan& plan) {
  std::vector<std::uint64_t> rank, stage, sent, received, copied, scratch;
  for (Rank r = 0; r < job_.problem().world_size(); ++r) {
    for (const StageUsage& usage : usage_of(plan, job_.problem(), r)) {
      rank.push_back(static_cast<std::uint64_t>(r));
      stage.push_back(usage.stage);
      sent.push_back(usage.sent_bytes);
      received.push_back(usage.received_bytes);
      copied.push_back(usage.copied_bytes);
      scratch.push_back(usage.scratch_bytes);
    }
  }
  writer_.results("usage", {{"rank", rank},
                            {"stage", stage},
                            {"sent_bytes", sent},
                            {"received_bytes", received},
                            {"copied_bytes", copied},
                            {"scratch_bytes", scratch}});
}

void Dump::add_rounds(const LocalJobReport& report) {
  for (const auto& round : report.rounds) {
    for (std::size_t rank = 0; rank < round.size(); ++rank) {
      writer_.round(static_cast<Rank>(rank), round[rank]);
    }
  }
}

void Dump::commit() {
  if (shards_) {
    writer_.stitch(Role::source);
    writer_.stitch(Role::destination);
  }
  writer_.commit();
}

}  // namespace m2n::cli
