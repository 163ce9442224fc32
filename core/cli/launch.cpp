// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n launch`: all ranks of a job as processes on this machine.

#include <signal.h>

#include <algorithm>
#include <boost/json.hpp>
#include <filesystem>
#include <iostream>

#include "core/cli/children.hpp"
#include "core/cli/commands.hpp"
#include "core/cli/output.hpp"
#include "core/cli/rank_job.hpp"
#include "core/error.hpp"
#include "core/io/json_reader.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

/// How long processes may take to end when they are told to.
constexpr std::chrono::seconds kGoodbye{10};
/// How long the others may take to say what they think of a failure, before they are killed.
constexpr std::chrono::seconds kLastWords{2};

volatile sig_atomic_t asked_to_end = 0;
void note_signal(int number) { asked_to_end = number; }

std::string address_of(const ListenSocket& socket) {
  return "127.0.0.1:" + std::to_string(socket.port());
}

class Launch {
 public:
  Launch(const Arguments& arguments, const Experiment& experiment)
      : arguments_(arguments),
        experiment_(experiment),
        sample_(sampled(experiment)),
        master_(ListenSocket::reserve("127.0.0.1", 0)),
        control_(ListenSocket::reserve("127.0.0.1", 0)),
        meet_(ListenSocket::reserve("127.0.0.1", 0)),
        children_([this](std::size_t child, const std::string& line) {
          std::cerr << '[' << names_[child] << "] " + line + '\n';
        }) {}

  int run() {
    struct sigaction action {};
    action.sa_handler = note_signal;
    for (const int number : {SIGTERM, SIGINT, SIGHUP}) {
      sigaction(number, &action, nullptr);
    }
    const auto begin = std::chrono::steady_clock::now();
    start_all();
    const auto failed = [&] {
      for (std::size_t i = 0; i < children_.size(); ++i) {
        if (children_.end(i) && !children_.end(i)->ok() && !failed_) {
          failed_ = i;
        }
      }
      return failed_.has_value() || asked_to_end != 0;
    };
    children_.run([&] { return failed() || ended(0, trainers()); }, Deadline::max());
    if (!failed()) {
      // Worker 0 tells the others.
      children_.signal(trainers(), SIGTERM);
      children_.run([&] { return failed() || ended(0, children_.size()); }, deadline_in(kGoodbye));
    } else if (asked_to_end == 0) {
      children_.run([&] { return ended(0, children_.size()); }, deadline_in(kLastWords));
    }
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return conclude();
  }

 private:
  /// A rank's view of the experiment, for its checks and its numbers.
  static RankJob sampled(Experiment experiment) {
    experiment.process.rank = 0;
    return RankJob(experiment, Part::trainer);
  }

  std::size_t trainers() const { return static_cast<std::size_t>(sample_.trainers()); }

  bool ended(std::size_t first, std::size_t last) const {
    for (std::size_t i = first; i < last; ++i) {
      if (!children_.end(i)) {
        return false;
      }
    }
    return true;
  }

  void start(const char* part, Rank rank, const std::vector<std::string>& more,
             const std::vector<int>& keep) {
    std::vector<std::string> words{std::filesystem::read_symlink("/proc/self/exe").string(), part};
    for (const std::string& word : arguments_) {
      if (word != "--json") {
        words.push_back(word);
      }
    }
    words.insert(words.end(), {"--json", "--rank", std::to_string(rank)});
    words.insert(words.end(), more.begin(), more.end());
    names_.push_back(std::string(part) + " " + std::to_string(rank));
    children_.start(words, keep);
  }

  void start_all() {
    const auto number = [](const ListenSocket& socket) {
      return std::to_string(socket.descriptor());
    };
    for (Rank rank = 0; rank < sample_.trainers(); ++rank) {
      std::vector<std::string> more{"--master", address_of(master_)};
      std::vector<int> keep;
      if (rank == 0) {
        more.insert(more.end(), {"--control", "http://" + address_of(control_), "--job.master_fd",
                                 number(master_)});
        keep = {master_.descriptor()};
      }
      start("trainer", rank, more, keep);
    }
    for (Rank rank = 0; rank < sample_.workers(); ++rank) {
      std::vector<std::string> more{"--meet", address_of(meet_)};
      std::vector<int> keep;
      if (rank == 0) {
        more.insert(more.end(), {"--listen", address_of(control_), "--job.listen_fd",
                                 number(control_), "--job.meet_fd", number(meet_)});
        keep = {control_.descriptor(), meet_.descriptor()};
      }
      start("worker", rank, more, keep);
    }
  }

  /// The last line of a child's standard output, which is its summary.
  json::object summary(std::size_t child) const {
    std::string text = children_.output(child);
    while (!text.empty() && text.back() == '\n') {
      text.pop_back();
    }
    const std::size_t begin = text.rfind('\n');
    return parse_json(begin == text.npos ? text : text.substr(begin + 1), names_[child])
        .as_object();
  }

  int conclude() {
    if (asked_to_end != 0) {
      throw Error(Errc::peer_lost, "launch was ended by signal " + std::to_string(asked_to_end));
    }
    if (failed_) {
      std::string text = names_[*failed_] + " " + to_string(*children_.end(*failed_));
      if (!children_.last_line(*failed_).empty()) {
        text += ": " + children_.last_line(*failed_);
      }
      if (experiment_.json) {
        std::cout << json::serialize(json::object{{"ok", false}, {"error", text}}) << '\n';
      }
      throw Error(Errc::peer_lost, text);
    }
    if (!ended(0, children_.size())) {
      throw Error(Errc::timed_out, "workers did not end when they were told to");
    }
    print();
    return 0;
  }

  void print() const {
    const json::object trainer = summary(0);
    std::int64_t elements = 0;
    double oracle = 0;  // of the slowest worker
    for (std::size_t i = trainers(); i < children_.size(); ++i) {
      const json::object worker = summary(i);
      elements += worker.at("verified_elements").as_int64();
      oracle = std::max(oracle, worker.at("verify_seconds").to_number<double>());
    }
    const auto seconds = [&](const char* key) { return trainer.at(key).to_number<double>(); };
    // Workers ask the oracle before they answer that they have finished.
    const double control = std::max(0.0, seconds("control_seconds") - oracle);
    if (experiment_.json) {
      std::cout << json::serialize(json::object{{"ok", true},
                                                {"trainers", sample_.trainers()},
                                                {"workers", sample_.workers()},
                                                {"transport", sample_.experiment().transport},
                                                {"rounds", trainer.at("rounds")},
                                                {"version", trainer.at("version")},
                                                {"digest_verified", trainer.at("digest_verified")},
                                                {"verified_elements", elements},
                                                {"init_seconds", seconds("init_seconds")},
                                                {"round_seconds", seconds("seconds")},
                                                {"borrow_seconds", seconds("borrow_seconds")},
                                                {"move_seconds", seconds("move_seconds")},
                                                {"integrity_seconds", seconds("integrity_seconds")},
                                                {"oracle_seconds", oracle},
                                                {"control_seconds", control},
                                                {"seconds", seconds_},
                                                {"plan_digest", trainer.at("plan_digest")}})
                << '\n';
      return;
    }
    Table table({"m2n launch", experiment_.file.empty() ? experiment_.problem.string()
                                                        : experiment_.file.string()},
                true);
    table.add({"processes", std::to_string(sample_.trainers()) + " trainers, " +
                                std::to_string(sample_.workers()) + " workers, for " +
                                human_seconds(seconds_)});
    table.add({"transport", sample_.experiment().transport});
    table.add({"init", human_seconds(seconds("init_seconds"))});
    table.add({"rounds", std::to_string(trainer.at("rounds").as_int64()) +
                             (experiment_.process.change ? " of weights that change" : "")});
    table.add({"round", human_seconds(seconds("seconds")) +
                            " (median): " + human_seconds(seconds("move_seconds")) + " to move, " +
                            human_seconds(seconds("integrity_seconds")) + " for digests, " +
                            human_seconds(control) + " of control"});
    table.add({"beside it", human_seconds(seconds("borrow_seconds")) +
                                (experiment_.process.change ? " to change" : " to borrow") +
                                " the weights, " + human_seconds(oracle) + " for the oracle"});
    table.add({"digests",
               trainer.at("digest_verified").as_bool() ? "equal in every round" : "not compared"});
    table.add({"verified", experiment_.verify ? std::to_string(elements) +
                                                    " destination elements equal the oracle's"
                                              : "not asked for"});
    table.add({"plan digest", std::string(trainer.at("plan_digest").as_string())});
    std::cout << table.text();
  }

  Arguments arguments_;
  const Experiment& experiment_;
  RankJob sample_;
  ListenSocket master_;
  ListenSocket control_;
  ListenSocket meet_;
  std::vector<std::string> names_;
  Children children_;
  std::optional<std::size_t> failed_;
  double seconds_ = 0;
};

}  // namespace

int launch_command(const Arguments& arguments) {
  const Experiment experiment = parse_experiment(arguments);
  return Launch(arguments, experiment).run();
}

}  // namespace m2n::cli
