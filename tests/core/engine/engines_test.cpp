// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Trainers and workers as threads, over the store and an in-process control plane: rounds, what is
/// refused, and errors that are the same on every rank.

#include <boost/json.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <ostream>

#include "core/engine/deployment.hpp"
#include "core/error.hpp"
#include "tests/support/engine_threads.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace json = boost::json;
using testing::check_no_error;
using testing::check_same_error;
using testing::kLong;
using testing::Threads;

/// A source that declares something else than the others.
class OtherSource final : public WeightSource {
 public:
  OtherSource(std::unique_ptr<WeightSource> source,
              const std::function<void(std::vector<ParamSpec>&)>& alter)
      : source_(std::move(source)), params_(source_->params()) {
    alter(params_);
  }
  std::string_view name() const noexcept override { return "other"; }
  const std::vector<ParamSpec>& params() const override { return params_; }
  std::vector<ParamLoan> borrow(std::uint64_t version) override { return source_->borrow(version); }

 private:
  std::unique_ptr<WeightSource> source_;
  std::vector<ParamSpec> params_;
};

/// A transport that never moves anything and knows no deadline: only abort() ends a wait.
class StuckTransport final : public Transport {
 public:
  std::string_view name() const noexcept override { return "stuck"; }
  void connect(Group& /*group*/, Deadline /*deadline*/) override {}
  std::unique_ptr<Session> prepare(const Program& /*program*/, const Buffers& /*buffers*/,
                                   Deadline /*deadline*/) override {
    return std::make_unique<StuckSession>();
  }

 private:
  class StuckSession final : public Session {
   public:
    void start(std::uint64_t /*version*/, Deadline /*deadline*/) override {}
    RoundReport wait(Deadline /*deadline*/) override {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return aborted_; });
      throw TransportError(Errc::peer_lost, "stuck: aborted");
    }
    void abort() noexcept override {
      const std::lock_guard lock(mutex_);
      aborted_ = true;
      changed_.notify_all();
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool aborted_ = false;
  };
};

BOOST_AUTO_TEST_SUITE(engine)
BOOST_AUTO_TEST_SUITE(engines)

BOOST_AUTO_TEST_CASE(without_a_transport_engines_take_that_of_processes) {
  Registries registries;
  const auto transport = [&](const EngineOptions& options) {
    return TrainerEngine(registries, options).options().transport;
  };
  EngineOptions on_device;
  on_device.device = 0;
  BOOST_TEST(transport({}) == "loopback");
  registries.transports.add("ucx", "", {});
  BOOST_TEST(transport({}) == "ucx");
  BOOST_TEST(transport(on_device) == "loopback");
  EngineOptions named;
  named.transport = "nccl";
  BOOST_TEST(transport(named) == "nccl");
  BOOST_TEST(default_transport(registries, RanksAre::threads, MemorySpace::host) == "loopback");
}

BOOST_AUTO_TEST_CASE(weights_that_change_arrive_in_every_round) {
  Threads threads(3, 2);
  threads.make();
  check_no_error(threads.init());
  BOOST_TEST(!threads.handlers[0]->weight_state().serving);  // not before it has weights
  for (std::uint64_t version = 1; version <= 4; ++version) {
    check_no_error(threads.send());
    BOOST_TEST(threads.check(version) == "");
    BOOST_TEST(threads.handlers[0]->weight_state().version == version);
    BOOST_TEST(threads.handlers[0]->weight_state().serving);
  }
}

BOOST_AUTO_TEST_CASE(full_tensors_are_measured_and_loaded_like_direct_ones) {
  Threads threads(2, 3, 1, "load_weights");
  threads.make();
  check_no_error(threads.init());
  check_no_error(threads.send());
  check_no_error(threads.send());
  BOOST_TEST(threads.check(2) == "");
}

BOOST_AUTO_TEST_CASE(one_job_feeds_several_deployments) {
  Threads threads(2, 2, 3);
  threads.make();
  check_no_error(threads.init());
  check_no_error(threads.send());
  check_no_error(threads.send());
  BOOST_TEST(threads.check(2) == "");
}

BOOST_DATA_TEST_CASE(a_round_may_come_in_slices_of_the_declared_order, bdata::make({false, true}),
                     names_only) {
  Threads threads;
  threads.names_only = names_only;
  threads.make();
  std::vector<std::size_t> slices;
  check_no_error(threads.init(
      1,
      [&](ControlCall call, json::object& body) {
        if (call == ControlCall::update) {
          slices.push_back(body.contains("names")
                               ? body.at("names").as_array().size()
                               : body.at("range").at(1).to_number<std::size_t>() -
                                     body.at("range").at(0).to_number<std::size_t>());
          BOOST_TEST(body.contains("names") == names_only);
        }
      },
      [](TrainerInit& init) { init.slice = 2; }));
  check_no_error(threads.send());
  BOOST_TEST(threads.check(1) == "");
  BOOST_TEST(slices == (std::vector<std::size_t>{2, 2, 1}), boost::test_tools::per_element());
}

/// The names of all slices are known before the first byte moves: until then the weights are the
/// old ones, and a wrong name in the last slice changes nothing.
BOOST_AUTO_TEST_CASE(slices_move_together_once_every_name_is_right) {
  Threads threads;
  threads.names_only = true;
  threads.make();
  int calls = 0;
  std::string refusal;
  std::string before;
  check_no_error(threads.init(
      1,
      [&](ControlCall call, json::object& body) {
        if (call != ControlCall::update || ++calls != 6) {  // the last of three in the second round
          return;
        }
        before = threads.check(1);
        json::object wrong = body;
        wrong["names"] = json::array{"pigeon"};
        try {
          make_local_client(threads.handlers[0])->update_weights(wrong, deadline_in(kLong));
        } catch (const Error& error) {
          refusal = error.what();
        }
        before += threads.check(1);
      },
      [](TrainerInit& init) { init.slice = 2; }));
  check_no_error(threads.send());
  check_no_error(threads.send());
  BOOST_TEST(calls == 6);
  BOOST_TEST(before == "");
  BOOST_TEST(refusal.find("'pigeon' stands where 'scalar' was declared") != std::string::npos,
             refusal);
  BOOST_TEST(threads.check(2) == "");
}

/// One rank does something that the agreement must name, on every rank.
struct Fault {
  std::string why;
  std::function<void(Threads&)> alter;
  std::string part;
};
std::ostream& operator<<(std::ostream& os, const Fault& c) { return os << c.why; }

const std::vector<Fault> kInitFaults = {
    {"a trainer throws in the first phase", [](Threads& t) { t.faults[1] = phases::kRendezvous; },
     "phase 'rendezvous': rank 1: out of luck"},
    {"two ranks throw, and both are named",
     [](Threads& t) {
       t.faults[0] = phases::kSource;
       t.faults[3] = phases::kSource;
     },
     "phase 'source agreement': ranks 0, 3: out of luck"},
    {"a worker throws while it resolves", [](Threads& t) { t.faults[3] = phases::kDestination; },
     "phase 'destination agreement': rank 3: out of luck"},
    {"a trainer that declares another dtype",
     [](Threads& t) {
       t.sources[1] = std::make_unique<OtherSource>(std::move(t.sources[1]), [](auto& params) {
         params[2].dtype = DType::i8;
         params[2].side.layout = std::make_shared<const Layout>(
             Layout::sharded(params[2].shape, DType::i8, Mesh({2}, 0), {Placement::replicate()}));
       });
     },
     "phase 'source agreement': rank 1: parameter 'all to rows' has dtype \"i8\" instead of "
     "\"u8\" on rank 0"},
    {"a trainer with another order",
     [](Threads& t) {
       t.sources[1] = std::make_unique<OtherSource>(
           std::move(t.sources[1]), [](auto& params) { std::swap(params[0], params[1]); });
     },
     "rank 1: parameter 'rows to all' stands where 'rows to columns' does on rank 0"},
    {"a trainer that lacks a parameter",
     [](Threads& t) {
       t.sources[1] = std::make_unique<OtherSource>(std::move(t.sources[1]),
                                                    [](auto& params) { params.pop_back(); });
     },
     "rank 1: 4 parameters instead of 5, the first missing one is 'scalar' on rank 0"},
    {"a trainer that declares a name twice",
     [](Threads& t) {
       t.sources[1] = std::make_unique<OtherSource>(
           std::move(t.sources[1]), [](auto& params) { params[1].name = params[0].name; });
     },
     "rank 1: parameter 'rows to columns' is declared twice; names must be unique"},
    {"workers that resolve differently", [](Threads& t) { t.sink_kinds[1] = "load_weights"; },
     "phase 'destination agreement': rank 3: parameter 'rows to columns' has mode \"fallback\" "
     "instead of \"direct\" on rank 2"},
    {"another transport", [](Threads& t) { t.worker_options[0].transport = "simulated"; },
     "transport is \"simulated\" instead of \"loopback\" on rank 0"},
    {"another planner", [](Threads& t) { t.trainer_options[1].planner = "striped"; },
     "planner is \"striped\" instead of \"direct\""},
    {"another environment",
     [](Threads& t) {
       for (auto* options : {&t.trainer_options, &t.worker_options}) {
         for (EngineOptions& each : *options) {
           each.environment["NCCL_CUMEM_ENABLE"] = "1";
         }
       }
       t.worker_options[1].environment["NCCL_CUMEM_ENABLE"] = "0";
     },
     "environment NCCL_CUMEM_ENABLE is \"0\" instead of \"1\""},
    {"an unknown transport everywhere",
     [](Threads& t) {
       for (auto* options : {&t.trainer_options, &t.worker_options}) {
         for (EngineOptions& each : *options) {
           each.transport = "pigeon";
         }
       }
     },
     "phase 'runtime ready': ranks 0-3: no transport 'pigeon'"},
    {"a rank that cannot connect", [](Threads& t) { t.faults[1] = phases::kCommunicator; },
     "phase 'communicator': rank 1: out of luck"},
    {"a rank that cannot plan", [](Threads& t) { t.faults[2] = phases::kPlan; },
     "phase 'complete plan': rank 2: out of luck"},
};

BOOST_DATA_TEST_CASE(an_error_in_init_is_the_same_on_every_rank, bdata::make(kInitFaults), c) {
  Threads threads;
  const auto trainer_options = threads.trainer_options;
  const auto worker_options = threads.worker_options;
  c.alter(threads);
  threads.make();
  check_same_error(threads.init(), c.part);
  BOOST_TEST(!threads.handlers[0]->weight_state().serving);

  // The same process, the same address, a new epoch.
  threads.faults.clear();
  for (Rank trainer = 0; trainer < 2; ++trainer) {
    threads.sources[static_cast<std::size_t>(trainer)] = threads.job.source(trainer);
  }
  threads.sink_kinds = {"inplace", "inplace"};
  threads.trainer_options = trainer_options;
  threads.worker_options = worker_options;
  threads.make();
  check_no_error(threads.init(2));
  check_no_error(threads.send());
  BOOST_TEST(threads.check(1) == "");
}

const std::vector<Fault> kRoundFaults = {
    {"a trainer throws before a byte moves", [](Threads& t) { t.faults[1] = phases::kRound; },
     "phase 'round start': rank 1: out of luck"},
    {"a worker throws before a byte moves", [](Threads& t) { t.faults[2] = phases::kRound; },
     "phase 'round start': rank 2: out of luck"},
    {"a trainer throws while bytes move", [](Threads& t) { t.faults[0] = phases::kMove; },
     "rank 0 gave up: phase 'move': out of luck"},
    {"a worker throws while bytes move", [](Threads& t) { t.faults[3] = phases::kMove; },
     "rank 3 gave up: phase 'move': out of luck"},
    {"a rank cannot take its digests", [](Threads& t) { t.faults[3] = phases::kIntegrity; },
     "phase 'integrity'"},
    {"a worker does not accept what came", [](Threads& t) { t.faults[2] = phases::kAccept; },
     "rank 2 gave up: phase 'accept': out of luck"},
    {"a worker cannot commit", [](Threads& t) { t.faults[3] = phases::kFinish; },
     "phase 'finish': rank 3: out of luck"},
};

// C06, C10
BOOST_DATA_TEST_CASE(an_error_in_a_round_is_the_same_on_every_rank, bdata::make(kRoundFaults), c) {
  Threads threads;
  threads.make();
  check_no_error(threads.init());
  check_no_error(threads.send());

  c.alter(threads);
  check_same_error(threads.send(), c.part);
  // Nothing is served that is not whole: the old version, or none.
  const WeightState state = threads.handlers[0]->weight_state();
  BOOST_TEST((!state.serving || threads.check(1).empty()));

  // The same engines and weights, a new epoch.
  threads.faults.clear();
  check_no_error(threads.init(2));
  if (state.serving) {
    BOOST_TEST(threads.check(1) == "");
  }
  check_no_error(threads.send());
  BOOST_TEST(threads.check(threads.engine(0).next_version() - 1) == "");
}

/// A request that a client must not make, between start and update.
struct Refusal {
  std::string why;
  ControlCall call;
  std::function<json::object(const json::object& update)> make;  ///< From the right update.
  std::string part;
  bool ranges = false;  ///< The right update has a range rather than names.
};
std::ostream& operator<<(std::ostream& os, const Refusal& c) { return os << c.why; }

json::object with(json::object object, const char* key, json::value value) {
  object[key] = std::move(value);
  return object;
}

const std::vector<Refusal> kRefusals = {
    {"an older epoch", ControlCall::update,
     [](const json::object& o) { return with(o, "epoch", 7); }, "it belongs to epoch 7"},
    {"another plan", ControlCall::update,
     [](const json::object& o) { return with(o, "plan_digest", "beef"); },
     "it belongs to plan beef"},
    {"another version", ControlCall::update,
     [](const json::object& o) { return with(o, "version", 9); },
     "it belongs to version 9, and this round is version 2"},
    {"an unknown name", ControlCall::update,
     [](const json::object& o) { return with(o, "names", json::array{"pigeon"}); },
     "parameter 'pigeon' stands where 'rows to columns' was declared"},
    {"names out of order", ControlCall::update,
     [](const json::object& o) {
       json::array names = o.at("names").as_array();
       std::swap(names[0], names[1]);
       return with(o, "names", names);
     },
     "'rows to all' stands where 'rows to columns'"},
    {"a name too many", ControlCall::update,
     [](const json::object& o) {
       json::array names = o.at("names").as_array();
       names.push_back("scalar");
       return with(o, "names", names);
     },
     "'scalar' comes after the last of 5 declared parameters"},
    {"no names", ControlCall::update,
     [](const json::object&) {
       return json::object{{"version", 2}};
     },
     "names"},
    {"a range of another list", ControlCall::update,
     [](const json::object& o) { return with(o, "source_digest", "beef"); },
     "its range counts in the parameters of source_digest beef", true},
    {"a range that leaves the first out", ControlCall::update,
     [](const json::object& o) {
       return with(o, "range", {1, 5});
     },
     "range 1 to 5 stands where parameter 0, 'rows to columns', is next", true},
    {"a range that is too long", ControlCall::update,
     [](const json::object& o) {
       return with(o, "range", {0, 6});
     },
     "range 0 to 6 goes past the last of 5 declared parameters", true},
    {"a range that runs back", ControlCall::update,
     [](const json::object& o) {
       return with(o, "range", {3, 0});
     },
     "range begins after its end", true},
    {"a range of three numbers", ControlCall::update,
     [](const json::object& o) {
       return with(o, "range", {0, 3, 5});
     },
     "range must be [begin, end]", true},
    {"a range that does not say of which list", ControlCall::update,
     [](json::object o) {
       o.erase("source_digest");
       return o;
     },
     "lacks 'source_digest'", true},
    {"names and a range", ControlCall::update,
     [](const json::object& o) { return with(o, "names", json::array{"rows to columns"}); },
     "has 'names' and 'range'; give one of them", true},
    {"a name that is a number", ControlCall::update,
     [](const json::object& o) {
       return with(o, "names", {"rows to columns", 7});
     },
     "has a name that is no text, at place 1"},
    {"names that are no list", ControlCall::update,
     [](const json::object& o) { return with(o, "names", "rows to columns"); },
     "names must be a list"},
    {"a draft model", ControlCall::update,
     [](const json::object& o) { return with(o, "draft_model", "small-eagle"); },
     "the draft model 'small-eagle', which cannot be updated"},
    {"an unknown key", ControlCall::update,
     [](const json::object& o) { return with(o, "color", "red"); }, "unknown key 'color'"},
    {"a finish before the update", ControlCall::finish,
     [](const json::object&) { return json::object{}; }, "no round has been received"},
    {"a start that goes back", ControlCall::start,
     [](const json::object&) {
       return json::object{{"version", 1}};
     },
     "version 1 comes after version 1; versions only grow"},
    {"an init of an epoch that is over", ControlCall::init,
     [](const json::object& o) { return with(o, "epoch", 1); }, "it belongs to epoch 1"},
};

/// In the middle of a round, from somebody else: the round goes on as if nothing had come.
BOOST_DATA_TEST_CASE(a_request_that_is_refused_changes_nothing, bdata::make(kRefusals), c) {
  Threads threads;
  threads.names_only = !c.ranges;
  threads.make();
  json::object first_init;
  std::string refusal = "nothing was refused";
  bool second = false;
  check_no_error(threads.init(1, [&](ControlCall call, json::object& body) {
    if (call == ControlCall::init) {
      first_init = body;
    } else if (call == ControlCall::update && second) {
      const auto intruder = make_local_client(threads.handlers[0]);
      const json::object bad = c.make(c.call == ControlCall::init ? first_init : body);
      const Deadline deadline = deadline_in(kLong);
      try {
        switch (c.call) {
          case ControlCall::init:
            intruder->init_weight_transfer_engine(bad, deadline);
            break;
          case ControlCall::start:
            intruder->start_weight_update(bad, deadline);
            break;
          case ControlCall::update:
            intruder->update_weights(bad, deadline);
            break;
          case ControlCall::finish:
            intruder->finish_weight_update(bad, deadline);
            break;
        }
      } catch (const Error& error) {
        refusal = error.what();
      }
    }
  }));
  check_no_error(threads.send());
  second = true;
  check_no_error(threads.send());
  BOOST_TEST(refusal.find(c.part) != std::string::npos, refusal);
  BOOST_TEST(threads.check(2) == "");
}

BOOST_AUTO_TEST_CASE(one_wrong_byte_ends_the_round_and_names_the_rank) {
  Threads threads(2, 2);
  threads.worker_options[1].on_phase = [&](std::string_view phase) {
    if (phase == phases::kIntegrity) {
      for (const LiveParameter& live : threads.sinks[1]->live()) {
        if (live.name == "rows to columns") {
          live.buffer.data[live.buffer.bytes - 1] ^= std::byte{1};
        }
      }
    }
  };
  threads.make();
  check_no_error(threads.init());
  check_same_error(threads.send(),
                   "rank 3 holds other values than the trainers in box [0:9, 7:14] of parameter "
                   "'rows to columns'");
  BOOST_TEST(!threads.handlers[0]->weight_state().serving);
}

BOOST_AUTO_TEST_CASE(a_deployment_that_cannot_finish_is_named_with_those_that_have) {  // C08
  Threads threads(2, 1, 2);
  threads.make();
  check_no_error(threads.init());
  threads.worker_options[1].on_phase = nullptr;
  bool armed = true;
  threads.worker_options[1].on_phase = [&](std::string_view phase) {
    if (phase == phases::kFinish && armed) {
      throw std::runtime_error("out of luck");
    }
  };
  threads.make();
  check_no_error(threads.init(2));
  check_same_error(threads.send(), "deployments that have it: 0");
  BOOST_TEST(threads.handlers[0]->weight_state().serving);
  BOOST_TEST(!threads.handlers[1]->weight_state().serving);
  armed = false;
  check_no_error(threads.init(3));
  check_no_error(threads.send());
  BOOST_TEST(threads.check(2) == "");
}

BOOST_AUTO_TEST_CASE(a_peer_that_never_comes_is_named_at_the_deadline) {
  Threads threads(2, 2);
  for (auto* options : {&threads.trainer_options, &threads.worker_options}) {
    for (EngineOptions& each : *options) {
      each.phase_deadlines[std::string(phases::kRendezvous)] = std::chrono::milliseconds(300);
    }
  }
  threads.make();
  // Trainer 1 does not call init.
  TrainerInit init = threads.job.trainer_init(0, 0, 1);
  init.listen_socket = ListenSocket::reserve("127.0.0.1", 0);
  init.deployments[0].control = make_local_client(threads.handlers[0]);
  BOOST_CHECK_EXCEPTION(threads.engine(0).init(std::move(init), *threads.sources[0]), Error,
                        [](const Error& error) {
                          BOOST_TEST_MESSAGE(error.what());
                          const std::string text = error.what();
                          return text.find("phase 'rendezvous'") != text.npos &&
                                 text.find("ranks missing: 1") != text.npos;
                        });
}

/// The watchdog ends what knows no deadline: by the deadline, or because another rank has failed.
/// C13
BOOST_DATA_TEST_CASE(a_transport_that_is_stuck_is_aborted, bdata::make({true, false}),
                     another_fails) {
  Threads threads(2, 2);
  threads.job.registries().transports.add("stuck", "never ends", [](const TransportContext&) {
    return std::make_unique<StuckTransport>();
  });
  for (auto* options : {&threads.trainer_options, &threads.worker_options}) {
    for (EngineOptions& each : *options) {
      each.transport = "stuck";
      if (!another_fails) {
        each.phase_deadlines[std::string(phases::kMove)] = std::chrono::milliseconds(200);
      }
    }
  }
  if (another_fails) {
    threads.faults[3] = phases::kMove;
  }
  threads.make();
  check_no_error(threads.init());
  check_same_error(threads.send(), another_fails ? "rank 3 gave up: phase 'move': out of luck"
                                                 : "phase 'move': stuck");
  BOOST_TEST(!threads.handlers[0]->weight_state().serving);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
