// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/dump.hpp"

#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <ctime>
#include <iomanip>
#include <random>
#include <sstream>

#include "core/api/memory.hpp"
#include "core/engine/compact.hpp"
#include "core/io/json_reader.hpp"
#include "core/plan/traffic.hpp"

namespace m2n::cli {

namespace {

/// Variables by which libraries below decide how bytes move.
std::string environment_json() {
  boost::json::object out;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    for (const std::string_view prefix : {"NCCL_", "UCX_", "CUDA_", "M2N_", "HDF5_", "OMP_"}) {
      if (equals != text.npos && text.starts_with(prefix)) {
        out[text.substr(0, equals)] = text.substr(equals + 1);
      }
    }
  }
  return boost::json::serialize(out);
}

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::ostringstream text;
  text << std::put_time(&parts, "%Y-%m-%dT%H:%M:%SZ");
  return text.str();
}

std::string random_id() {
  std::random_device device;
  std::ostringstream text;
  text << std::hex << std::setfill('0') << std::setw(8) << device() << std::setw(8) << device();
  return text.str();
}

std::string options_text(const Options& options) {
  std::string text;
  for (const auto& [key, value] : options) {
    text += (text.empty() ? "" : " ") + key + "=" + value;
  }
  return text;
}

DumpOptions options_of(const Experiment& experiment) {
  return {.deflate_level = experiment.dump_deflate,
          .run_id = experiment.dump_per_rank ? random_id() : std::string()};
}

}  // namespace

std::map<std::string, std::string> run_facts(const Experiment& experiment) {
  return {{"m2n_version", M2N_VERSION},
          {"created_utc", now_utc()},
          {"environment", environment_json()},
          {"config", experiment.file.empty() ? std::string() : read_text_file(experiment.file)},
          {"command_line", experiment.command_line}};
}

Dump::Dump(const Job& job, const Plan& plan)
    : job_(job), options_(options_of(job.experiment())), writer_(job.experiment().dump, options_) {
  const Experiment& experiment = job.experiment();
  writer_.experiment(run_facts(experiment));
  writer_.experiment({{"planner", plan.planner},
                      {"planner_options", options_text(experiment.planner_options)},
                      {"transport", experiment.transport},
                      {"transport_options", options_text(experiment.transport_options)},
                      {"memory", std::string(to_string(experiment.memory))},
                      {"topology", job.topology().canonical_json()},
                      {"source", experiment.source_kind},
                      {"sink", experiment.sink_kind},
                      {"values", std::string(job.values().name())}});
  writer_.problem(job.problem());
  writer_.plan(plan, job.problem());
}

Dump::~Dump() {
  if (committed_) {
    return;
  }
  const std::filesystem::path& file = job_.experiment().dump;
  for (auto& [rank, part] : parts_) {
    if (part == nullptr) {  // complete already
      std::error_code ignored;
      std::filesystem::remove(file.parent_path() / dump_part_name(file, options_.run_id, rank),
                              ignored);
    }
  }
}

void Dump::write_shard(Role role, Rank rank, const Parameter& parameter, const CompactShard& shard,
                       const std::byte* bytes) {
  const std::filesystem::path& file = job_.experiment().dump;
  DumpWriter* part = nullptr;
  {
    const std::lock_guard lock(mutex_);
    shards_ = true;
    if (job_.experiment().dump_per_rank) {
      std::unique_ptr<DumpWriter>& own = parts_[rank];
      if (own == nullptr) {
        own = std::make_unique<DumpWriter>(
            file.parent_path() / dump_part_name(file, options_.run_id, rank), options_);
      }
      part = own.get();
    }
  }
  if (part == nullptr) {
    writer_.shard(role, rank, parameter, shard, bytes);
    return;
  }
  part->shard(role, rank, parameter, shard, bytes);
  writer_.shard_in_part(dump_part_name(file, options_.run_id, rank), role, rank, parameter, shard);
}

void Dump::add_shards(const RankView& view) {
  const Problem& problem = job_.problem();
  for (const Role role : {Role::source, Role::destination}) {
    const BufferTable& table = problem.buffers(role);
    const auto& buffers = role == Role::source ? view.buffers->source : view.buffers->destination;
    for (std::size_t i = 0; i < problem.parameters().size(); ++i) {
      const Resolution& resolution = job_.resolutions()[i];
      if (role == Role::destination &&
          (resolution.mode == Mode::fallback || resolution.rewritten)) {
        continue;  // see add_full_tensor(); or the worker has changed what came
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
      write_shard(role, view.rank, parameter, tensor.shard, tensor.bytes.data());
    }
  }
}

void Dump::add_full_tensor(Rank rank, std::size_t index, const FullTensor& tensor) {
  const Parameter& parameter = job_.problem().parameters()[index];
  const LocalBuffer buffer = tensor.buffer();
  std::vector<std::byte> staged;
  if (buffer.space != MemorySpace::host) {
    staged.resize(buffer.bytes);
    memory_of(buffer).read(buffer, staged);
  }
  write_shard(Role::destination, rank, parameter, parameter.destination.layout->compact(rank),
              staged.empty() ? tensor.data : staged.data());
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

void Dump::add_measurements(const LocalJobReport& report, const std::vector<DumpDigest>& digests) {
  for (const auto& round : report.rounds) {
    for (std::size_t rank = 0; rank < round.size(); ++rank) {
      writer_.round(static_cast<Rank>(rank), round[rank]);
    }
  }
  for (std::size_t rank = 0; rank < report.phases.size(); ++rank) {
    for (const PhaseTime& phase : report.phases[rank]) {
      writer_.phase({phase.phase, static_cast<Rank>(rank), phase.version, phase.start_seconds,
                     phase.end_seconds});
    }
  }
  for (const DumpDigest& digest : digests) {
    writer_.digest(digest);
  }
}

void Dump::commit() {
  if (shards_) {
    writer_.stitch(Role::source);
    writer_.stitch(Role::destination);
  }
  for (auto& entry : parts_) {
    entry.second->commit();
    entry.second.reset();
  }
  writer_.commit();
  committed_ = true;
}

}  // namespace m2n::cli
