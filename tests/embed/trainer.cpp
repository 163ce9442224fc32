// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// usage: trainer RANK PORT URL. One of two trainers that hold rows of one tensor in memory of
/// their own, and send it three times.

#include <cstdio>
#include <cstdlib>

#include "core/api/builtin.hpp"
#include "core/control/http_client.hpp"
#include "core/engine/own_weights.hpp"
#include "core/engine/trainer_engine.hpp"

int main(int argc, char** argv) try {
  m2n::expects(argc == 4, "RANK PORT URL");
  const int rank = std::atoi(argv[1]);
  const m2n::Shape shape = {8, 6};

  // Rows 0 to 3 on rank 0, 4 to 7 on rank 1.
  const auto rows = std::make_shared<const m2n::Layout>(
      m2n::Layout::sharded(shape, m2n::DType::f32, m2n::Mesh({2}, 0), {m2n::Placement::shard(0)}));
  std::vector<float> mine(4 * 6);
  const auto source = m2n::make_own_source(
      {{{"w", m2n::DType::f32, shape, {rows, {"w"}}},
        {{reinterpret_cast<std::byte*>(mine.data()), mine.size() * sizeof(float)}}}});

  m2n::TrainerInit init;
  init.master_port = static_cast<std::uint16_t>(std::atoi(argv[2]));
  init.rank = rank;
  init.trainers = 2;
  init.deployments = {{2, {1, 2}, rank == 0 ? m2n::make_http_client(argv[3]) : nullptr}};
  const m2n::Registries registries = m2n::builtin_registries();
  m2n::TrainerEngine engine(registries, {});
  engine.init(std::move(init), *source);

  for (int step = 1; step <= 3; ++step) {  // "training"
    for (std::size_t i = 0; i < mine.size(); ++i) {
      mine[i] = static_cast<float>(step * 1000 + rank * 24 + static_cast<int>(i));
    }
    const m2n::RoundSummary round = engine.send_weights();
    std::printf("trainer %d sent version %d\n", rank, static_cast<int>(round.version));
  }
  engine.shutdown();
} catch (const std::exception& error) {
  std::fprintf(stderr, "trainer: %s\n", error.what());
  return 1;
}
