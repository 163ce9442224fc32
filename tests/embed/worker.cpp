// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// usage: worker NUMBER MEET_PORT CONTROL_PORT. One of two inference workers that hold columns of
/// one tensor in memory of their own; worker 0 answers the control plane. Ends when the trainers
/// leave.

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "core/api/builtin.hpp"
#include "core/control/http_server.hpp"
#include "core/engine/own_weights.hpp"
#include "core/engine/worker_service.hpp"
#include "core/rendezvous/store_server.hpp"

int main(int argc, char** argv) try {
  m2n::expects(argc == 4, "NUMBER MEET_PORT CONTROL_PORT");
  const int number = std::atoi(argv[1]);
  const auto port = [&](int i) { return static_cast<std::uint16_t>(std::atoi(argv[i])); };
  const m2n::Shape shape = {8, 6};

  // Columns 0 to 2 on worker 0, 3 to 5 on worker 1: ranks 2 and 3 of the world.
  const auto columns = std::make_shared<const m2n::Layout>(
      m2n::Layout::sharded(shape, m2n::DType::f32, m2n::Mesh({2}, 2), {m2n::Placement::shard(1)}));
  std::vector<float> mine(8 * 3);
  const auto sink = m2n::make_own_sink(
      {{{"w", m2n::DType::f32, shape, {columns, {"w"}}},
        {{reinterpret_cast<std::byte*>(mine.data()), mine.size() * sizeof(float)}}}});

  // The two workers meet at a store in worker 0.
  std::optional<m2n::StoreServer> store;
  if (number == 0) {
    store.emplace(m2n::ListenSocket::reserve("127.0.0.1", port(2)), m2n::StoreOptions{});
  }
  m2n::WorldOptions meet;
  meet.port = port(2);
  meet.rank = number;
  meet.size = 2;
  std::function<void()> stop;
  m2n::EngineOptions options;
  options.on_event = [&](const m2n::Event& event) {
    if (event.phase == "left" && number == 0) {
      stop();
    }
  };
  const m2n::Registries registries = m2n::builtin_registries();
  m2n::WorkerEngine engine(registries, options, *sink, number, 2);
  m2n::WorkerService service(engine,
                             m2n::join_world(meet, m2n::deadline_in(std::chrono::seconds(60))));
  stop = [&] { service.stop(); };

  int right = 0;
  service.after_call([&](m2n::ControlCall call, const boost::json::object&) {
    for (int i = 0; call == m2n::ControlCall::finish && i < 24; ++i) {
      const int step = static_cast<int>(*sink->version());
      right += mine[static_cast<std::size_t>(i)] ==
               static_cast<float>(step * 1000 + i / 3 * 6 + number * 3 + i % 3);
    }
  });
  std::optional<m2n::HttpServer> server;
  if (number == 0) {
    server.emplace(m2n::ListenSocket::reserve("127.0.0.1", port(3)), service.handler());
  }
  service.run();
  std::printf("worker %d: %d of 72 elements of 3 versions are right\n", number, right);
  return right == 72 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "worker: %s\n", error.what());
  return 1;
}
