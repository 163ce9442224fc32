// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/bench_report.hpp"

#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>
#include <utility>

#include "core/cli/dump.hpp"
#include "core/cli/output.hpp"
#include "core/io/dump.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

/// What is derived from a row.
struct Figures {
  bool timed = false;
  Spread seconds{kNone, kNone, kNone, kNone, kNone};
  double gb_per_s = kNone;
  double of_limit = kNone;
};

Figures figures_of(const BenchRow& row) {
  Figures out;
  if (row.cell.status != CellStatus::ok || row.cell.round_seconds.empty()) {
    return out;
  }
  out.timed = true;
  out.seconds = spread_of(row.cell.round_seconds);
  if (out.seconds.median > 0) {
    out.gb_per_s = static_cast<double>(row.payload_bytes) / (out.seconds.median * 1e9);
    if (row.cell.moves_bytes) {
      out.of_limit = row.limit_seconds / out.seconds.median;
    }
  }
  return out;
}

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) {
    out += (out.empty() ? "" : "+") + word;
  }
  return out;
}

std::string result_of(const BenchRow& row) {
  if (row.cell.status != CellStatus::ok) {
    return std::string(to_string(row.cell.status)) + ": " + row.cell.reason;
  }
  return row.cell.verified ? "verified" : "moves nothing";
}

json::value number(double value) { return std::isfinite(value) ? json::value(value) : nullptr; }
json::value number(const std::optional<std::uint64_t>& value) {
  return value ? json::value(*value) : nullptr;
}

json::object to_json(const BenchRow& row, const BenchOptions& options) {
  const Figures figures = figures_of(row);
  const CellReport& cell = row.cell;
  json::object out{{"schema", 1},
                   {"workload", row.workload},
                   {"scaled", row.scaled},
                   {"planner", row.planner},
                   {"transport", row.transport},
                   {"memory", options.memory == MemorySpace::device ? "device" : "host"},
                   {"trainers", row.trainers},
                   {"workers", row.workers},
                   {"status", to_string(cell.status)},
                   {"reason", cell.reason},
                   {"verified", cell.verified},
                   {"moves_bytes", cell.moves_bytes},
                   {"payload_bytes", row.payload_bytes}};
  if (row.plan) {
    out["tensors"] = row.plan->parameters;
    out["regions"] = row.plan->regions;
    out["messages"] = row.plan->messages;
    out["moved_bytes"] = row.plan->bytes;
    out["local_bytes"] = row.plan->local_bytes;
    out["plan_seconds"] = row.plan_seconds;
  }
  out["connect_seconds"] = cell.connect_seconds;
  out["prepare_seconds"] = cell.prepare_seconds;
  out["warm_ups"] = options.warm_ups;
  out["rounds"] = cell.round_seconds.size();
  out["transfer_seconds_p50"] = number(figures.seconds.median);
  out["transfer_seconds_min"] = number(figures.seconds.min);
  out["transfer_seconds_p25"] = number(figures.seconds.q1);
  out["transfer_seconds_p75"] = number(figures.seconds.q3);
  out["transfer_seconds_max"] = number(figures.seconds.max);
  out["gb_per_s"] = number(figures.gb_per_s);
  out["limit_seconds"] = row.limit_seconds;
  out["of_limit"] = number(figures.of_limit);
  out["extra_bytes"] = number(cell.extra_bytes);
  out["taken_bytes"] = number(cell.taken_bytes);
  out["paths"] = json::value_from(cell.paths);
  return out;
}

json::object limit_json(const Limit& limit) {
  return {
      {"what", limit.what}, {"bytes", limit.bytes}, {"gb_per_s", limit.bytes_per_second * 1e-9}};
}

/// Without the line that Progress leaves on a terminal.
void say(const std::string& text) {
  std::fprintf(stderr, "%s%s\n", isatty(STDERR_FILENO) != 0 ? "\r\033[K" : "", text.c_str());
}

}  // namespace

Spread spread_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double part) {
    const double place = part * static_cast<double>(seconds.size() - 1);
    const auto below = static_cast<std::size_t>(place);
    const std::size_t above = std::min(below + 1, seconds.size() - 1);
    return seconds[below] +
           (place - static_cast<double>(below)) * (seconds[above] - seconds[below]);
  };
  return {seconds.front(), at(.25), at(.5), at(.75), seconds.back()};
}

BenchReport::BenchReport(const BenchOptions& options, const Limit& limit, std::string machine)
    : options_(options), limit_(limit), machine_(std::move(machine)) {
  if (options.experiment.json) {
    json::object env;
    for (const auto& [key, value] : run_facts(options.experiment)) {
      env[key] = key == "environment" ? json::parse(value) : json::value(value);
    }
    env["machine"] = machine_;
    env["limit"] = limit_json(limit_);
    std::cout << json::serialize(json::object{{"schema", 1}, {"env", std::move(env)}}) << '\n'
              << std::flush;
  }
}

void BenchReport::add(BenchRow row) {
  const Figures figures = figures_of(row);
  if (options_.experiment.json) {
    std::cout << json::serialize(to_json(row, options_)) << '\n' << std::flush;
  }
  say("bench: " + row.workload + ", " + row.planner + ", " + row.transport + ": " +
      (figures.timed ? human_seconds(figures.seconds.median) + ", " : "") + result_of(row));
  rows_.push_back(std::move(row));
}

std::string BenchReport::table() const {
  Table out({"workload", "planner", "transport", "tensors", "payload", "plan", "connect", "prepare",
             "transfer", "from", "to", "GB/s", "of limit", "extra", "path", "result"});
  for (const BenchRow& row : rows_) {
    const Figures figures = figures_of(row);
    const auto timed = [&](const std::string& text) { return figures.timed ? text : "-"; };
    const bool planned = row.plan.has_value();
    out.add({row.workload + (row.scaled.empty() ? "" : " (" + row.scaled + ")"), row.planner,
             row.transport, planned ? std::to_string(row.plan->parameters) : "-",
             planned ? human_bytes(row.payload_bytes) : "-",
             planned ? human_seconds(row.plan_seconds) : "-",
             timed(human_seconds(row.cell.connect_seconds)),
             timed(human_seconds(row.cell.prepare_seconds)),
             timed(human_seconds(figures.seconds.median)),
             timed(human_seconds(figures.seconds.min)), timed(human_seconds(figures.seconds.max)),
             timed(fixed(figures.gb_per_s, 1)),
             std::isfinite(figures.of_limit) ? fixed(figures.of_limit, 3) : "-",
             row.cell.extra_bytes ? human_bytes(*row.cell.extra_bytes) : "-",
             row.cell.paths.empty() ? "-" : joined(row.cell.paths), result_of(row)});
  }
  return out.text();
}

void BenchReport::finish(const Limit& again) const {
  if (!options_.experiment.dump.empty()) {
    dump(again);
  }
  if (options_.experiment.json) {
    return;
  }
  std::cout << "m2n bench on " << machine_ << "\nlimit: " << limit_.what << ", "
            << human_bytes(limit_.bytes) << " at " << fixed(limit_.bytes_per_second * 1e-9, 1)
            << " GB/s, " << fixed(again.bytes_per_second * 1e-9, 1)
            << " in the end; transfer: median of " << options_.rounds << " rounds after "
            << options_.warm_ups << ", slowest rank\n\n"
            << table();
}

void BenchReport::dump(const Limit& again) const {
  DumpWriter writer(options_.experiment.dump,
                    {.deflate_level = options_.experiment.dump_deflate, .run_id = {}});
  writer.experiment(run_facts(options_.experiment));
  writer.experiment({{"kind", "bench"},
                     {"machine", machine_},
                     {"memory", options_.memory == MemorySpace::device ? "device" : "host"},
                     {"limit", json::serialize(limit_json(limit_))},
                     {"limit_again", json::serialize(limit_json(again))}});
  using Texts = std::vector<std::string>;
  using Counts = std::vector<std::uint64_t>;
  using Numbers = std::vector<double>;
  const auto texts = [&](const char* name, auto get) {
    Texts out;
    for (const BenchRow& row : rows_) {
      out.push_back(get(row));
    }
    return DumpColumn{name, std::move(out)};
  };
  const auto counts = [&](const char* name, auto get) {
    Counts out;
    for (const BenchRow& row : rows_) {
      out.push_back(static_cast<std::uint64_t>(get(row)));
    }
    return DumpColumn{name, std::move(out)};
  };
  const auto numbers = [&](const char* name, auto get) {
    Numbers out;
    for (const BenchRow& row : rows_) {
      out.push_back(get(row));
    }
    return DumpColumn{name, std::move(out)};
  };
  const auto optional = [](const std::optional<std::uint64_t>& value) {
    return value ? static_cast<double>(*value) : kNone;
  };
  using Row = const BenchRow&;
  writer.results(
      "bench",
      {texts("workload", [](Row row) { return row.workload; }),
       texts("scaled", [](Row row) { return row.scaled; }),
       texts("planner", [](Row row) { return row.planner; }),
       texts("transport", [](Row row) { return row.transport; }),
       texts("status", [](Row row) { return std::string(to_string(row.cell.status)); }),
       texts("reason", [](Row row) { return row.cell.reason; }),
       texts("path", [](Row row) { return joined(row.cell.paths); }),
       counts("verified", [](Row row) { return row.cell.verified; }),
       counts("trainers", [](Row row) { return row.trainers; }),
       counts("workers", [](Row row) { return row.workers; }),
       counts("tensors", [](Row row) { return row.plan ? row.plan->parameters : 0; }),
       counts("regions", [](Row row) { return row.plan ? row.plan->regions : 0; }),
       counts("messages", [](Row row) { return row.plan ? row.plan->messages : 0; }),
       counts("payload_bytes", [](Row row) { return row.payload_bytes; }),
       counts("moved_bytes", [](Row row) { return row.plan ? row.plan->bytes : 0; }),
       numbers("plan_seconds", [](Row row) { return row.plan_seconds; }),
       numbers("connect_seconds", [](Row row) { return row.cell.connect_seconds; }),
       numbers("prepare_seconds", [](Row row) { return row.cell.prepare_seconds; }),
       numbers("transfer_seconds_p50", [](Row row) { return figures_of(row).seconds.median; }),
       numbers("transfer_seconds_min", [](Row row) { return figures_of(row).seconds.min; }),
       numbers("transfer_seconds_p25", [](Row row) { return figures_of(row).seconds.q1; }),
       numbers("transfer_seconds_p75", [](Row row) { return figures_of(row).seconds.q3; }),
       numbers("transfer_seconds_max", [](Row row) { return figures_of(row).seconds.max; }),
       numbers("gb_per_s", [](Row row) { return figures_of(row).gb_per_s; }),
       numbers("limit_seconds", [](Row row) { return row.limit_seconds; }),
       numbers("of_limit", [](Row row) { return figures_of(row).of_limit; }),
       numbers("extra_bytes", [&](Row row) { return optional(row.cell.extra_bytes); }),
       numbers("taken_bytes", [&](Row row) { return optional(row.cell.taken_bytes); })});

  Counts cell;
  Counts rank;
  Counts round;
  Numbers seconds;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const auto& ranks = rows_[i].cell.rank_seconds;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      for (std::size_t n = 0; n < ranks[r].size(); ++n) {
        cell.push_back(i);
        rank.push_back(r);
        round.push_back(n);
        seconds.push_back(ranks[r][n]);
      }
    }
  }
  writer.results("bench_rounds",
                 {{"cell", cell}, {"rank", rank}, {"round", round}, {"seconds", seconds}});
  writer.commit();
}

}  // namespace m2n::cli
