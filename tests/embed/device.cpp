// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// usage: device PLUGIN. Two trainers and two workers, threads of one process, whose weights are
/// device memory of their own; the plug-in brings that memory and a transport "paged" for it.

#include <cstdio>
#include <span>
#include <stdexcept>
#include <thread>

#include "core/api/builtin.hpp"
#include "core/api/memory.hpp"
#include "core/engine/deployment.hpp"
#include "core/engine/own_weights.hpp"
#include "core/engine/trainer_engine.hpp"

namespace {

constexpr int kRounds = 3;
constexpr m2n::Index kElements = 24;  // of a rank
const m2n::Shape kShape = {8, 6};

/// What element (row, column) is in version @p version.
float value(m2n::Index row, m2n::Index column, int version) {
  return static_cast<float>(version * 1000 + row * kShape[1] + column);
}

/// One rank's share of a tensor, behind device pointers that the host cannot follow.
class Share {
 public:
  /// @param dim  Along which the tensor is cut over two ranks from @p start.
  Share(int dim, m2n::Rank start, m2n::Rank rank)
      : layout_(std::make_shared<const m2n::Layout>(m2n::Layout::sharded(
            kShape, m2n::DType::f32, m2n::Mesh({2}, start), {m2n::Placement::shard(dim)}))),
        box_(layout_->pieces_of(rank).front().piece.box),
        memory_(m2n::memory_of(m2n::MemorySpace::device)),
        arena_(memory_.reserve(kElements * sizeof(float), 0)),
        buffer_(arena_->take(kElements * sizeof(float))) {}

  m2n::OwnParameter parameter() const {
    return {{"w", m2n::DType::f32, kShape, {layout_, {"w"}}}, {buffer_}};
  }

  void write(int version) {
    const std::vector<float> values = wanted(version);
    memory_.write(buffer_, std::as_bytes(std::span(values)));
  }
  bool holds(int version) const {
    std::vector<float> found(kElements);
    memory_.read(buffer_, std::as_writable_bytes(std::span(found)));
    return found == wanted(version);
  }

 private:
  std::vector<float> wanted(int version) const {
    std::vector<float> values;
    for (m2n::Index row = box_.lo[0]; row < box_.hi[0]; ++row) {
      for (m2n::Index column = box_.lo[1]; column < box_.hi[1]; ++column) {
        values.push_back(value(row, column, version));
      }
    }
    return values;
  }

  std::shared_ptr<const m2n::Layout> layout_;
  m2n::Box box_;
  const m2n::Memory& memory_;
  std::unique_ptr<m2n::Arena> arena_;
  m2n::LocalBuffer buffer_;
};

}  // namespace

int main(int argc, char** argv) try {
  m2n::expects(argc == 2, "PLUGIN");
  m2n::Registries first;  // before CUDA is looked for: the first device memory is the process's
  m2n::load_plugin(argv[1], first);
  m2n::Registries registries = m2n::builtin_registries();
  m2n::load_plugin(argv[1], registries);
  m2n::EngineOptions options;
  options.transport = "paged";
  options.device = 0;

  std::vector<Share> columns;  // of the workers, ranks 2 and 3
  columns.reserve(2);
  std::vector<std::unique_ptr<m2n::WeightSink>> sinks;
  std::vector<std::unique_ptr<m2n::WorkerEngine>> workers;
  for (m2n::Rank worker = 0; worker < 2; ++worker) {
    columns.emplace_back(1, 2, 2 + worker);
    sinks.push_back(m2n::make_own_sink({columns.back().parameter()}));
    workers.push_back(
        std::make_unique<m2n::WorkerEngine>(registries, options, *sinks.back(), worker, 2));
  }
  const auto deployment = m2n::make_deployment({workers[0].get(), workers[1].get()});

  m2n::ListenSocket socket = m2n::ListenSocket::reserve("127.0.0.1", 0);
  std::vector<std::string> errors(2);
  int right = 0;
  const auto train = [&](m2n::Rank rank) {
    Share rows(0, 0, rank);
    const auto source = m2n::make_own_source({rows.parameter()});
    m2n::TrainerInit init;
    init.master_port = socket.port();
    init.rank = rank;
    init.trainers = 2;
    init.deployments = {{2, {1, 2}, rank == 0 ? m2n::make_local_client(deployment) : nullptr}};
    if (rank == 0) {
      init.listen_socket = socket.share();
    }
    m2n::TrainerEngine engine(registries, options);
    engine.init(std::move(init), *source);
    for (int version = 1; version <= kRounds; ++version) {
      rows.write(version);
      engine.send_weights();
      if (rank == 0) {
        right += (columns[0].holds(version) ? 1 : 0) + (columns[1].holds(version) ? 1 : 0);
      }
    }
    engine.shutdown();
  };
  std::vector<std::thread> trainers;
  for (m2n::Rank rank = 0; rank < 2; ++rank) {
    trainers.emplace_back([&, rank] {
      try {
        train(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& trainer : trainers) {
    trainer.join();
  }
  for (const std::string& error : errors) {
    if (!error.empty()) {
      throw std::runtime_error(error);
    }
  }
  std::printf("%d of %d shares in device memory are right\n", right, 2 * kRounds);
  return right == 2 * kRounds ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "device: %s\n", error.what());
  return 1;
}
