// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Jobs of real processes: launched together, launched by hand, and ended in the middle.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/json.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/api/builtin.hpp"
#include "core/rendezvous/listen_socket.hpp"
#include "tests/support/run_program.hpp"
#include "tests/support/temporary_folder.hpp"

namespace m2n {
namespace {

namespace json = boost::json;
using testing::Outcome;
using testing::TemporaryFolder;

const std::string kProblem = R"json({"parameters": [
  {"name": "w", "dtype": "bf16", "shape": [64, 48],
   "source": {"mesh": {"dims": [2, 2], "start": 0},
              "placements": ["StridedShard(0,2)", "Shard(0)"]},
   "destination": {"mesh": {"dims": [2], "ranks": [4, 5]}, "placements": ["Shard(1)"]}},
  {"name": "norm", "dtype": "f32", "shape": [77],
   "source": {"mesh": {"dims": [4], "start": 0}, "placements": ["Shard(0)"]},
   "destination": {"mesh": {"dims": [2], "start": 4}, "placements": ["Replicate"],
                   "dtype": "bf16", "cast": true}}]})json";

std::string program() {
  const char* const path = std::getenv("M2N_PROGRAM");  // NOLINT(concurrency-mt-unsafe)
  BOOST_TEST_REQUIRE(path != nullptr, "M2N_PROGRAM names the program under test");
  return path;
}

struct Folder {
  Folder() { std::ofstream(path / "p.json") << kProblem; }
  TemporaryFolder folder;
  std::filesystem::path path = folder.path();
};

/// A process of this test, ended with it.
class Process {
 public:
  Process(std::vector<std::string> words, const Folder& folder, const std::string& name)
      : out_(folder.path / (name + ".out")) {
    std::vector<char*> argv;
    for (std::string& word : words) {
      argv.push_back(word.data());
    }
    argv.push_back(nullptr);
    const std::string err = (folder.path / (name + ".err")).string();
    const std::string out = out_.string();
    std::fflush(nullptr);  // nothing may be written twice
    pid_ = fork();
    BOOST_TEST_REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      if (freopen(out.c_str(), "w", stdout) != nullptr &&
          freopen(err.c_str(), "w", stderr) != nullptr && chdir(folder.path.c_str()) == 0) {
        execv(argv[0], argv.data());
      }
      _exit(127);
    }
  }
  Process(Process&& other) noexcept : out_(other.out_), pid_(std::exchange(other.pid_, 0)) {}
  Process& operator=(Process&&) = delete;
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  pid_t pid() const { return pid_; }
  void signal(int number) const { kill(pid_, number); }
  int wait() {
    int status = 0;
    waitpid(std::exchange(pid_, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string output() const {
    std::ifstream file(out_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path out_;
  pid_t pid_ = 0;
};

/// The children of a process, by /proc.
std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  std::ifstream file("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) +
                     "/children");
  for (pid_t child = 0; file >> child;) {
    children.push_back(child);
  }
  return children;
}

template <class Condition>
bool comes_true(Condition condition, std::chrono::seconds limit = std::chrono::seconds(120)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

/// Gone, or a zombie that nobody has waited for.
bool has_ended(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::size_t name = text.rfind(')');
  return name == std::string::npos || text[name + 2] == 'Z';
}

BOOST_AUTO_TEST_SUITE(cli)
BOOST_AUTO_TEST_SUITE(launch)

BOOST_AUTO_TEST_CASE(ten_rounds_of_changing_weights_are_verified_in_every_process) {
  const Folder folder;
  const Outcome outcome = testing::run_program(
      {program(), "launch", "--problem", "p.json", "--rounds", "10", "--json", "--log", "json"},
      folder.path);
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::object found = json::parse(outcome.out).as_object();
  BOOST_TEST(found.at("ok").as_bool());
  BOOST_TEST(found.at("version").as_int64() == 10);
  BOOST_TEST(found.at("digest_verified").as_bool());
  BOOST_TEST(found.at("verified_elements").as_int64() == 10 * (64 * 48 + 2 * 77));
  // One event a line, as JSON behind the rank's name.
  const std::size_t begin = outcome.err.find("[worker 1] {");
  BOOST_TEST_REQUIRE(begin != std::string::npos, outcome.err);
  const std::size_t brace = outcome.err.find('{', begin);
  const json::object event =
      json::parse(outcome.err.substr(brace, outcome.err.find('\n', brace) - brace)).as_object();
  BOOST_TEST(event.at("rank").as_int64() == 5);
  BOOST_TEST(event.at("phase").as_string() == "rendezvous");
}

BOOST_AUTO_TEST_CASE(processes_take_ucx_unless_it_is_not_built_or_another_is_named) {
  const Folder folder;
  const auto transport_of = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = {program(), "launch", "--problem", "p.json",
                                      "--json",  "--log",  "off"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = testing::run_program(words, folder.path);
    BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
    return std::string(json::parse(outcome.out).at("transport").as_string());
  };
  const bool ucx = builtin_registries().transports.contains("ucx");
  BOOST_TEST(transport_of({}) == (ucx ? "ucx" : "loopback"));
  BOOST_TEST(transport_of({"--transport", "loopback"}) == "loopback");
}

BOOST_AUTO_TEST_CASE(weights_that_do_not_change_and_slices_work_too) {
  const Folder folder;
  const Outcome outcome = testing::run_program(
      {program(), "launch", "--problem", "p.json", "--rounds", "2", "--json", "--log", "off",
       "--job.change", "0", "--job.slice", "1", "--job.digest", "0"},
      folder.path);
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::object found = json::parse(outcome.out).as_object();
  BOOST_TEST(!found.at("digest_verified").as_bool());
  BOOST_TEST(found.at("verified_elements").as_int64() == 2 * (64 * 48 + 2 * 77));
}

/// Two replicas of two tensor-parallel workers are four workers, and the replicas are equal.
BOOST_AUTO_TEST_CASE(a_model_is_served_by_replicas_of_tensor_parallel_workers) {
  const Folder folder;
  const Outcome outcome = testing::run_program({program(),
                                                "launch",
                                                "--model",
                                                "llama",
                                                "--model.model_type",
                                                "qwen3",
                                                "--model.hidden_size",
                                                "64",
                                                "--model.num_hidden_layers",
                                                "2",
                                                "--model.num_attention_heads",
                                                "4",
                                                "--model.num_key_value_heads",
                                                "2",
                                                "--model.head_dim",
                                                "16",
                                                "--model.intermediate_size",
                                                "96",
                                                "--model.vocab_size",
                                                "101",
                                                "--model.tie_word_embeddings",
                                                "false",
                                                "--source.ranks",
                                                "3",
                                                "--sink.workers",
                                                "4",
                                                "--sink.tensor_parallel",
                                                "2",
                                                "--rounds",
                                                "2",
                                                "--json",
                                                "--log",
                                                "off"},
                                               folder.path);
  BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  const json::object found = json::parse(outcome.out).as_object();
  BOOST_TEST(found.at("workers").as_int64() == 4);
  BOOST_TEST(found.at("verified_elements").as_int64() > 0);
}

BOOST_AUTO_TEST_CASE(a_child_that_is_killed_ends_the_job_with_its_name) {
  const Folder folder;
  Process launch(
      {program(), "launch", "--problem", "p.json", "--rounds", "1000000", "--json", "--log", "off"},
      folder, "launch");
  BOOST_TEST_REQUIRE(comes_true([&] { return children_of(launch.pid()).size() == 6; }));
  const std::vector<pid_t> children = children_of(launch.pid());
  kill(children[5], SIGKILL);
  BOOST_TEST(launch.wait() == 1);
  BOOST_TEST(!json::parse(launch.output()).as_object().at("ok").as_bool());
  for (const pid_t child : children) {
    BOOST_TEST(comes_true([&] { return has_ended(child); }));
  }
}

BOOST_AUTO_TEST_CASE(no_child_outlives_a_launch_that_is_killed) {
  const Folder folder;
  Process launch(
      {program(), "launch", "--problem", "p.json", "--rounds", "1000000", "--log", "off"}, folder,
      "launch");
  BOOST_TEST_REQUIRE(comes_true([&] { return children_of(launch.pid()).size() == 6; }));
  const std::vector<pid_t> children = children_of(launch.pid());
  launch.signal(SIGKILL);
  launch.wait();
  for (const pid_t child : children) {
    BOOST_TEST(comes_true([&] { return has_ended(child); }));
  }
}

/// Ports that were free a moment ago, on which processes started by hand meet.
struct Ports {
  std::string master = free_port();
  std::string control = free_port();
  std::string meet = free_port();
  static std::string free_port() {
    return "127.0.0.1:" + std::to_string(ListenSocket::reserve("127.0.0.1", 0).port());
  }
};

std::vector<Process> start_workers(const Folder& folder, const Ports& ports) {
  std::vector<Process> workers;
  for (const std::string rank : {"0", "1"}) {
    workers.emplace_back(
        std::vector<std::string>{program(), "worker", "--problem", "p.json", "--rank", rank,
                                 "--meet", ports.meet, "--listen", ports.control, "--json"},
        folder, "worker" + rank);
  }
  return workers;
}

std::vector<Process> start_trainers(const Folder& folder, const Ports& ports,
                                    const std::vector<std::string>& more) {
  std::vector<Process> trainers;
  for (const std::string rank : {"3", "2", "1", "0"}) {
    std::vector<std::string> words{program(), "trainer",  "--problem", "p.json",
                                   "--rank",  rank,       "--master",  ports.master,
                                   "--json",  "--rounds", "3"};
    words.insert(words.end(), more.begin(), more.end());
    trainers.emplace_back(words, folder, "trainer" + rank);
  }
  return trainers;
}

void end_workers(std::vector<Process>& workers, std::int64_t rounds) {
  workers[0].signal(SIGTERM);
  for (Process& worker : workers) {
    BOOST_TEST(worker.wait() == 0);
    const json::object found = json::parse(worker.output()).as_object();
    BOOST_TEST(found.at("rounds").as_int64() == rounds);
  }
}

BOOST_AUTO_TEST_CASE(trainers_and_workers_started_by_hand_meet_over_http) {
  const Folder folder;
  const Ports ports;
  std::vector<Process> workers = start_workers(folder, ports);
  // A second set of trainers finds the workers where the first has left them.
  for (const std::string epoch : {"1", "2"}) {
    std::vector<Process> trainers =
        start_trainers(folder, ports, {"--control", "http://" + ports.control, "--epoch", epoch});
    for (Process& trainer : trainers) {
      BOOST_TEST(trainer.wait() == 0);
    }
    const json::object found = json::parse(trainers[3].output()).as_object();
    BOOST_TEST(found.at("version").as_int64() == (epoch == "1" ? 3 : 6));
    BOOST_TEST(found.at("digest_verified").as_bool());
  }
  end_workers(workers, 6);
}

BOOST_AUTO_TEST_CASE(the_update_may_be_driven_by_curl) {
  const Folder folder;
  const Ports ports;
  std::vector<Process> workers = start_workers(folder, ports);
  std::vector<Process> trainers = start_trainers(
      folder, ports,
      {"--control", "watch:http://" + ports.control, "--job.init_file", "init.json"});
  BOOST_TEST_REQUIRE(
      comes_true([&] { return std::filesystem::exists(folder.path / "init.json"); }));
  const auto post = [&](const std::string& call, const std::string& body) {
    const Outcome outcome =
        testing::run_program({"/usr/bin/curl", "--silent", "--show-error", "--fail-with-body",
                              "--retry", "100", "--retry-connrefused", "--retry-delay", "1",
                              "--max-time", "120", "--header", "Content-Type: application/json",
                              "--data-binary", body, "http://" + ports.control + "/" + call},
                             folder.path);
    BOOST_TEST(outcome.status == 0, call << ": " << outcome.out << outcome.err);
  };
  post("init_weight_transfer_engine", "@init.json");
  for (int round = 0; round < 3; ++round) {
    post("start_weight_update", "{}");
    post("update_weights", R"({"names": ["w"]})");
    post("update_weights", R"({"names": ["norm"]})");
    post("finish_weight_update", "{}");
  }
  for (Process& trainer : trainers) {
    BOOST_TEST(trainer.wait() == 0);
  }
  const Outcome version = testing::run_program(
      {"/usr/bin/curl", "--silent", "http://" + ports.control + "/weight_version"}, folder.path);
  BOOST_TEST(json::parse(version.out).as_object().at("weight_version").as_int64() == 3);
  end_workers(workers, 3);
}

BOOST_AUTO_TEST_CASE(a_rank_that_does_not_know_its_place_is_told_what_to_give) {
  const Folder folder;
  const Outcome nameless =
      testing::run_program({program(), "trainer", "--problem", "p.json"}, folder.path);
  BOOST_TEST(nameless.status == 2);
  BOOST_TEST(nameless.err.find("which trainer is this? Give --rank, 0 to 3") != std::string::npos,
             nameless.err);
  const Outcome torchrun = testing::run_program(
      {"/usr/bin/env", "RANK=1", "WORLD_SIZE=3", program(), "worker", "--problem", "p.json"},
      folder.path);
  BOOST_TEST(torchrun.status == 2);
  BOOST_TEST(torchrun.err.find("torchrun started 3 processes, but the experiment has 2 workers") !=
                 std::string::npos,
             torchrun.err);
  const Outcome srun = testing::run_program({"/usr/bin/env", "SLURM_PROCID=9", "SLURM_NTASKS=4",
                                             program(), "trainer", "--problem", "p.json"},
                                            folder.path);
  BOOST_TEST(srun.status == 2);
  BOOST_TEST(srun.err.find("SLURM_PROCID is 9; it must be below SLURM_NTASKS") != std::string::npos,
             srun.err);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
