// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/engine_job.hpp"

#include "core/engine/binding.hpp"
#include "core/engine/changing.hpp"
#include "core/engine/oracle.hpp"

namespace m2n::testing {
namespace {

/// A parameter and how both sides hold it.
struct Entry {
  const char* name;
  DType dtype;
  Shape shape;
  Placement source;
  Placement destination;
  DType destination_dtype;
};

const std::vector<Entry> kEntries = {
    {"rows to columns", DType::f32, {9, 14}, Placement::shard(0), Placement::shard(1), DType::f32},
    {"rows to all", DType::bf16, {12, 5}, Placement::shard(0), Placement::replicate(), DType::bf16},
    {"all to rows", DType::u8, {40}, Placement::replicate(), Placement::shard(0), DType::u8},
    {"cast", DType::f32, {6, 7, 2}, Placement::shard(1), Placement::shard(0), DType::bf16},
    {"scalar", DType::i64, {}, Placement::replicate(), Placement::replicate(), DType::i64},
};

}  // namespace

EngineJob::EngineJob(Rank trainers, Rank workers, MemorySpace space)
    : trainers_(trainers), workers_(workers), space_(space), registries_(builtin_registries()) {
  LayoutTable table;
  Catalogue catalogue;
  for (const Entry& entry : kEntries) {
    const auto source = table.intern(
        Layout::sharded(entry.shape, entry.dtype, Mesh({trainers}, 0), {entry.source}));
    const auto destination = table.intern(Layout::sharded(
        entry.shape, entry.destination_dtype, Mesh({workers}, trainers), {entry.destination}));
    params_.push_back({entry.name, entry.dtype, entry.shape, {source, {entry.name}}});
    resolutions_.push_back({Mode::direct,
                            {destination, {entry.name}},
                            entry.dtype != entry.destination_dtype,
                            "declared"});
    catalogue.push_back({entry.name, entry.dtype, entry.shape});
  }
  values_ = registries_.values.create("synthetic", {{}, catalogue});
}

std::unique_ptr<WeightSource> EngineJob::source(Rank trainer) const {
  return make_changing_source(
      registries_.sources.create("declared",
                                 {{}, trainer, trainers_, values_, params_, place_of(trainer)}),
      trainer);
}

std::unique_ptr<WeightSink> EngineJob::sink(Rank worker, const std::string& kind) const {
  const Options options = {{"cast", "nearest_even"}};
  return registries_.sinks.create(kind, {options, trainers_ + worker, trainers_, nullptr,
                                         resolutions_, place_of(trainers_ + worker)});
}

std::string EngineJob::check(WeightSink& sink, Rank worker, std::uint64_t version) const {
  const Rank rank = trainers_ + worker;
  const Problem problem = make_problem(params_, resolutions_);
  std::vector<LocalBuffer> buffers(problem.buffers(Role::destination).names.size());
  for (const LiveParameter& live : sink.live()) {
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      if (problem.buffers(Role::destination).names[i] == live.name) {
        buffers[i] = live.buffer;
      }
    }
  }
  const auto values = make_changed_values(*values_, version);
  const Comparison verdict = verify_pieces(problem, rank, buffers, *values);
  if (verdict.elements == 0) {
    return "nothing was compared";
  }
  return verdict.first;
}

TrainerInit EngineJob::trainer_init(Rank trainer, std::uint16_t port, std::uint64_t epoch) const {
  TrainerInit init;
  init.master_port = port;
  init.rank = trainer;
  init.trainers = trainers_;
  init.epoch = epoch;
  init.deployments.push_back({workers_, {}, nullptr});
  return init;
}

}  // namespace m2n::testing
