// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Sink "hdf5": live parameters as "inplace" keeps them, and after every round a dump of what came
/// to this rank of each tensor: its part where the tensor lands in place, all of it where it fell
/// back.
///
///   path=<file>   default weights.h5; rank r writes <name>.rank-r.<extension>
///   other options as of "inplace"
///
/// A dump is written aside, while the round runs, and renamed when it is committed: a reader sees
/// the last complete round. Its /experiment has the version; its shards are those of
/// /shards/destination of a whole dump.

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

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
      number_of_.emplace(params[i].name, i);
      falls_back_.push_back(resolutions[i].mode == Mode::fallback);
      parameters_.push_back({params[i].name,
                             params[i].shape,
                             params[i].side,
                             resolutions[i].side,
                             resolutions[i].cast,
                             {}});
    }
    return resolutions;
  }

  void begin(std::uint64_t version) override {
    host_->begin(version);
    version_ = version;
    writer_.reset();
    accepted_ = false;
  }

  std::vector<ParamLoan> lend() override { return host_->lend(); }

  void load_weights(TensorStream& stream) override {
    WrittenDown written(*this, stream);
    host_->load_weights(written);
  }

  /// Before the worker rewrites anything: the dump has what was sent.
  void accept(std::uint64_t version) override {
    const std::vector<ParamLoan> loans = host_->lend();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Layout& layout = *parameters_[i].destination.layout;
      if (!falls_back_[i] && !layout.pieces_of(rank_).empty()) {
        const CompactTensor tensor = gather_compact(layout, rank_, loans[i].slots);
        writer().shard(Role::destination, rank_, parameters_[i], tensor.shard, tensor.bytes.data());
      }
    }
    host_->accept(version);
    accepted_ = true;
  }

  void commit(std::uint64_t version) override {
    if (!accepted_) {
      accept(version);
    }
    host_->commit(version);
    writer().commit();
    writer_.reset();
  }

  void roll_back() noexcept override {
    writer_.reset();
    host_->roll_back();
  }
  std::optional<std::uint64_t> version() const noexcept override { return host_->version(); }
  void derive(DerivedTensor tensor) override { host_->derive(std::move(tensor)); }
  ServedWeights serve() override { return host_->serve(); }
  std::vector<LiveParameter> live() override { return host_->live(); }

 private:
  /// Full tensors, dumped on their way.
  class WrittenDown final : public TensorStream {
   public:
    WrittenDown(Hdf5Sink& sink, TensorStream& stream) : sink_(sink), stream_(stream) {}

    std::optional<FullTensor> next() override {
      std::optional<FullTensor> tensor = stream_.next();
      const auto found =
          tensor ? sink_.number_of_.find(std::string(tensor->name)) : sink_.number_of_.end();
      if (found != sink_.number_of_.end()) {  // the host sink refuses others
        const Parameter& parameter = sink_.parameters_[found->second];
        sink_.writer().shard(Role::destination, sink_.rank_, parameter,
                             parameter.destination.layout->compact(sink_.rank_), tensor->data);
      }
      return tensor;
    }

   private:
    Hdf5Sink& sink_;
    TensorStream& stream_;
  };

  DumpWriter& writer() {
    if (!writer_) {
      writer_ = std::make_unique<DumpWriter>(file_);
      writer_->experiment({{"version", std::to_string(version_)}, {"rank", std::to_string(rank_)}});
    }
    return *writer_;
  }

  Rank rank_;
  std::filesystem::path file_;
  std::unique_ptr<WeightSink> host_;
  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, std::size_t> number_of_;
  std::vector<bool> falls_back_;
  std::uint64_t version_ = 0;           ///< Of the round that runs.
  std::unique_ptr<DumpWriter> writer_;  ///< Of its dump.
  bool accepted_ = false;
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
  return std::make_unique<Hdf5Sink>(
      context, file, sinks::make_host_sink({.name = "hdf5", .may_choose_route = true}, host));
}

}  // namespace

void add_sink_hdf5(Registries& registries) {
  registries.sinks.add("hdf5", "live parameters, dumped after every round; path=FILE",
                       make_hdf5_sink);
}

}  // namespace m2n
