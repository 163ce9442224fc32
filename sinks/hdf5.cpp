// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Sink "hdf5": live parameters as "inplace" keeps them, and after every round a dump of what this
/// rank holds of each tensor.
///
///   path=<file>   default weights.h5; rank r writes <name>.rank-r.<extension>
///   other options as of "inplace"
///
/// A dump is written aside and renamed: a reader sees the last complete round. Its /experiment has
/// the version; its shards are those of /shards/destination of a whole dump.

#include <filesystem>
#include <utility>

#include "core/api/plugins.hpp"
#include "core/engine/compact.hpp"
#include "core/io/dump.hpp"
#include "sinks/host_sink.hpp"

namespace m2n {
namespace {

class Hdf5Sink final : public WeightSink {
 public:
  Hdf5Sink(const SinkContext& context, std::filesystem::path file, std::unique_ptr<WeightSink> host)
      : rank_(context.rank), file_(std::move(file)), host_(std::move(host)) {}

  std::string_view name() const noexcept override { return "hdf5"; }
  MemoryPlace place() const noexcept override { return host_->place(); }

  std::vector<Resolution> resolve(std::span<const ParamSpec> params) override {
    std::vector<Resolution> resolutions = host_->resolve(params);
    for (std::size_t i = 0; i < params.size(); ++i) {
      falls_back_.push_back(resolutions[i].mode == Mode::fallback);
      parameters_.push_back({params[i].name, params[i].shape, params[i].side, resolutions[i].side,
                             resolutions[i].cast});
    }
    return resolutions;
  }

  void begin(std::uint64_t version) override { host_->begin(version); }
  std::vector<ParamLoan> lend() override { return host_->lend(); }
  void load_weights(TensorStream& stream) override { host_->load_weights(stream); }

  void accept(std::uint64_t version) override { host_->accept(version); }

  void commit(std::uint64_t version) override {
    host_->commit(version);
    DumpWriter writer(file_);
    writer.experiment({{"version", std::to_string(version)}, {"rank", std::to_string(rank_)}});
    const std::vector<ParamLoan> loans = host_->lend();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Layout& layout = *parameters_[i].destination.layout;
      if (falls_back_[i] || layout.pieces_of(rank_).empty()) {  // only what lands in place
        continue;
      }
      const CompactTensor tensor = gather_compact(layout, rank_, loans[i].slots);
      writer.shard(Role::destination, rank_, parameters_[i], tensor.shard, tensor.bytes.data());
    }
    writer.commit();
  }

  void roll_back() noexcept override { host_->roll_back(); }
  std::optional<std::uint64_t> version() const noexcept override { return host_->version(); }
  void derive(DerivedTensor tensor) override { host_->derive(std::move(tensor)); }
  ServedWeights serve() override { return host_->serve(); }
  std::vector<LiveParameter> live() override { return host_->live(); }

 private:
  Rank rank_;
  std::filesystem::path file_;
  std::unique_ptr<WeightSink> host_;
  std::vector<Parameter> parameters_;
  std::vector<bool> falls_back_;
};

std::unique_ptr<WeightSink> make_hdf5_sink(const SinkContext& context) {
  SinkContext host = context;
  const auto given = host.options.find("path");
  std::filesystem::path file = "weights.h5";
  if (given != host.options.end()) {
    file = given->second;
    host.options.erase(given);
  }
  const std::string extension = file.extension().string();
  file.replace_extension(".rank-" + std::to_string(context.rank) + extension);
  return std::make_unique<Hdf5Sink>(context, file, sinks::make_host_sink({.name = "hdf5"}, host));
}

}  // namespace

void add_sink_hdf5(Registries& registries) {
  registries.sinks.add("hdf5", "live parameters, dumped after every round; path=FILE",
                       make_hdf5_sink);
}

}  // namespace m2n
