// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Engines whose weights live on devices: rounds of weights that change, digests, faults, and
/// buffers that the caller owns. The host touches no byte there: a touch would crash.

#include <atomic>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>

#include "core/api/memory.hpp"
#include "core/engine/changing.hpp"
#include "core/engine/digests.hpp"
#include "core/engine/oracle.hpp"
#include "core/engine/own_weights.hpp"
#include "tests/support/engine_threads.hpp"
#include "tests/support/paged_memory.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::check_no_error;
using testing::check_same_error;
using testing::Threads;

struct Paged {
  Paged() { provide_device_memory(testing::make_paged_memory()); }
};
const Paged kPaged;

void add_paged(Registries& registries) {
  registries.transports.add("paged", "between devices", [](const TransportContext&) {
    return testing::make_paged_transport();
  });
}

/// A job on devices, with a transport for them.
struct DeviceThreads : Threads {
  explicit DeviceThreads(Rank trainers, Rank workers_, const std::string& sink,
                         const std::string& transport = "paged")
      : Threads(trainers, workers_, 1, sink, MemorySpace::device) {
    add_paged(job.registries());
    for (auto* const options : {&trainer_options, &worker_options}) {
      for (EngineOptions& one : *options) {
        one.transport = transport;
      }
    }
  }
};

const std::vector<std::string> kKinds = {"inplace", "shadow", "load_weights"};

BOOST_AUTO_TEST_SUITE(device_engines)

BOOST_DATA_TEST_CASE(every_round_brings_its_version_and_its_digests_are_compared,
                     bdata::make(kKinds), kind) {
  DeviceThreads threads(3, 2, kind);
  threads.make();
  check_no_error(threads.init());
  for (std::uint64_t version = 1; version <= 4; ++version) {
    std::atomic<int> verified{0};
    check_no_error(threads.each([&](Rank trainer) {
      verified += threads.engine(trainer).send_weights().verified ? 1 : 0;
    }));
    BOOST_TEST(verified == 3);
    BOOST_TEST(threads.check(version).empty(), threads.check(version));
    BOOST_TEST(!threads.check(version + 1).empty());  // the oracle sees what does not belong
  }
}

BOOST_AUTO_TEST_CASE(a_failed_round_leaves_the_last_version_on_a_shadows_device) {
  DeviceThreads threads(2, 2, "shadow");
  threads.make();
  check_no_error(threads.init());
  check_no_error(threads.send());
  BOOST_TEST(threads.check(1).empty());
  threads.faults[2] = phases::kAccept;
  for (const std::string& error : threads.send()) {
    BOOST_TEST(!error.empty());
  }
  BOOST_TEST(threads.check(1).empty(), threads.check(1));
}

BOOST_AUTO_TEST_CASE(a_transport_of_host_memory_is_refused_on_every_rank_alike) {
  DeviceThreads threads(2, 2, "inplace", "loopback");
  threads.make();
  check_same_error(threads.init(),
                   "transport 'loopback' does not move device memory, where buffer");
}

BOOST_AUTO_TEST_CASE(the_oracle_names_the_first_wrong_element_on_a_device) {
  testing::EngineJob job(1, 1, MemorySpace::device);
  const auto source = job.source(0);
  const auto loans = source->borrow(1);
  const Problem problem = Problem::make([&] {
    std::vector<Parameter> parameters;
    for (const ParamSpec& spec : job.params()) {
      parameters.push_back({spec.name, spec.shape, spec.side, spec.side, false});
    }
    return parameters;
  }());
  std::vector<LocalBuffer> buffers;
  for (const ParamLoan& loan : loans) {
    buffers.push_back(loan.slots.front());
  }
  const auto values = make_changed_values(job.values(), 1);
  Comparison verdict = verify_pieces(problem, 0, buffers, *values);
  BOOST_TEST(verdict.ok());
  BOOST_TEST(verdict.elements == 9u * 14 + 12 * 5 + 40 + 6 * 7 * 2 + 1);
  const std::vector<HeldDigest> before = digests_of(problem, Role::source, 0, buffers);

  std::vector<std::byte> bytes(buffers[0].bytes);
  memory_of(buffers[0]).read(buffers[0], bytes);
  bytes[4 * (2 * 14 + 3)] ^= std::byte{1};
  bytes[4 * (2 * 14 + 4)] ^= std::byte{1};
  memory_of(buffers[0]).write(buffers[0], bytes);
  verdict = verify_pieces(problem, 0, buffers, *values);
  BOOST_TEST(verdict.wrong == 2u);
  BOOST_TEST(verdict.first.find("element [2, 3] of 'rows to columns' is 0x") != std::string::npos,
             verdict.first);
  const std::vector<HeldDigest> after = digests_of(problem, Role::source, 0, buffers);
  BOOST_TEST(before[0].digest != after[0].digest);
  BOOST_TEST(before[1].digest == after[1].digest);
}

/// A trainer's and a worker's own memory, one parameter of them in the other's type.
BOOST_AUTO_TEST_CASE(buffers_of_the_caller_may_lie_on_devices) {
  testing::EngineJob job(1, 1, MemorySpace::device);
  add_paged(job.registries());
  const Memory& memory = memory_of(MemorySpace::device);
  const auto trainer_arena = memory.reserve(1 << 16, 0);
  const auto worker_arena = memory.reserve(1 << 16, 1);
  std::vector<OwnParameter> sent;
  std::vector<OwnParameter> kept;
  for (std::size_t i = 0; i < job.params().size(); ++i) {
    const ParamSpec& spec = job.params()[i];
    const auto count = static_cast<std::uint64_t>(element_count(spec.shape));
    sent.push_back({spec, {trainer_arena->take(count * bytes_of(spec.dtype))}});
    const Side& side = job.resolutions()[i].side;
    const DType dtype = side.layout->dtype();
    kept.push_back(
        {{spec.name, dtype, spec.shape, side}, {worker_arena->take(count * bytes_of(dtype))}});
  }
  const auto fill = [&](std::uint64_t version) {
    const auto values = make_changed_values(job.values(), version);
    for (const OwnParameter& own : sent) {
      write_values(*values, {own.spec.name, own.spec.dtype, own.spec.shape},
                   Box::whole(own.spec.shape), own.slots[0], row_major(own.spec.shape));
    }
  };
  const auto source = make_own_source(sent);
  const auto sink = make_own_sink(kept);
  EngineOptions options;
  options.transport = "paged";
  WorkerEngine worker(job.registries(), options, *sink, 0, 1);
  TrainerEngine trainer(job.registries(), options);
  auto socket = ListenSocket::reserve("127.0.0.1", 0);
  TrainerInit init = job.trainer_init(0, socket.port(), 1);
  init.deployments.front().control = make_local_client(make_deployment({&worker}));
  init.listen_socket = socket.share();
  trainer.init(std::move(init), *source);
  for (std::uint64_t version = 1; version <= 3; ++version) {
    fill(version);
    BOOST_TEST(trainer.send_weights().verified);
    const auto values = make_changed_values(job.values(), version);
    const Comparison verdict =
        verify_pieces(worker.link().problem(), 1, worker.link().buffers().destination, *values);
    BOOST_TEST(verdict.ok(), verdict.first);
    BOOST_TEST(verdict.elements > 100u);
  }
  trainer.shutdown();
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
