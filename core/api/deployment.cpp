// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/deployment.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>

#include "core/api/patterns.hpp"
#include "core/error.hpp"
#include "core/io/json_reader.hpp"

namespace m2n {
namespace {

std::optional<Index> whole_number(std::string_view text) {
  Index number = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (failure != std::errc{} || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return number;
}

class Taker {
 public:
  explicit Taker(Options& options) : options_(options) {}

  std::optional<std::string> text(std::string_view key) {
    const auto found = options_.find(key);
    if (found == options_.end()) {
      return std::nullopt;
    }
    std::string value = std::move(found->second);
    options_.erase(found);
    return value;
  }

  Index number(std::string_view key, Index otherwise, Index least) {
    const auto value = text(key);
    return value ? parse(key, *value, *value, least) : otherwise;
  }

  std::vector<Index> numbers(std::string_view key) {
    std::vector<Index> all;
    if (const auto value = text(key)) {
      for (const std::string& word : split(*value, ',')) {
        all.push_back(parse(key, *value, word, 1));
      }
    }
    return all;
  }

  /// True for @p second, false for @p first, which is the default.
  bool either(std::string_view key, std::string_view first, std::string_view second) {
    const auto value = text(key);
    if (value && *value != first && *value != second) {
      refuse(key, *value, "it must be " + std::string(first) + " or " + std::string(second));
    }
    return value && *value == second;
  }

  [[noreturn]] static void refuse(std::string_view key, std::string_view value,
                                  const std::string& wanted) {
    throw Error(Errc::usage,
                "sink." + std::string(key) + " is '" + std::string(value) + "'; " + wanted);
  }

 private:
  static Index parse(std::string_view key, std::string_view value, std::string_view word,
                     Index least) {
    const auto number = whole_number(word);
    if (!number || *number < least || *number > std::numeric_limits<Rank>::max()) {
      refuse(key, value,
             "it must hold whole numbers of at least " + std::to_string(least) + " and at most " +
                 std::to_string(std::numeric_limits<Rank>::max()));
    }
    return *number;
  }

  Options& options_;
};

void read_map(const std::string& file, ExpertPlacement& placement) {
  const auto wrong = [&](const std::string& what) {
    throw Error(Errc::bad_argument, file + ": " + what +
                                        "; an expert map is {\"version\": 1, \"layers\": {\"3\": "
                                        "[0, 1, ...]}}");
  };
  boost::system::error_code failure;
  const auto parsed = boost::json::parse(read_text_file(file), failure);
  if (failure || !parsed.is_object()) {
    wrong("it holds no JSON object");
  }
  const auto* version = parsed.as_object().if_contains("version");
  const auto* layers = parsed.as_object().if_contains("layers");
  if (version == nullptr || !version->is_int64() || version->as_int64() < 1) {
    wrong("'version' is no whole number of at least 1");
  }
  if (layers == nullptr || !layers->is_object()) {
    wrong("'layers' is no object");
  }
  placement.version = static_cast<std::uint64_t>(version->as_int64());
  for (const auto& member : layers->as_object()) {
    const auto layer = whole_number(member.key());
    if (!layer || *layer < 0 || !member.value().is_array()) {
      wrong("layer '" + std::string(member.key()) + "' is no number with a list");
    }
    std::vector<Index>& slots = placement.slots[*layer];
    for (const auto& expert : member.value().as_array()) {
      if (!expert.is_int64() || expert.as_int64() < 0) {
        wrong("layer '" + std::string(member.key()) + "' lists something that is no expert");
      }
      slots.push_back(expert.as_int64());
    }
  }
}

}  // namespace

Rank replica_workers(const Deployment& d) {
  if (std::min({d.tensor_parallel, d.pipeline_parallel, d.data_parallel, d.expert_parallel}) < 1) {
    throw Error(Errc::bad_argument,
                "tensor, pipeline, data and expert parallelism must be at least 1");
  }
  const Index replica =
      checked_mul(checked_mul(d.tensor_parallel, d.pipeline_parallel, "number of workers"),
                  d.engine == Engine::vllm ? d.data_parallel : 1, "number of workers");
  if (d.workers < 1 || d.workers % replica != 0) {
    throw Error(Errc::bad_argument, std::to_string(d.workers) + " workers do not form groups of " +
                                        std::to_string(replica) +
                                        (replica == d.tensor_parallel ? "" : " pipeline and") +
                                        " tensor-parallel ones; a multiple would");
  }
  return static_cast<Rank>(replica);
}

Deployment take_deployment(Options& options, Rank workers) {
  Taker take(options);
  Deployment deployment;
  deployment.workers = workers;
  deployment.engine = take.either("engine", "vllm", "sglang") ? Engine::sglang : Engine::vllm;
  deployment.pipeline_parallel = take.number("pipeline_parallel", 1, 1);
  deployment.data_parallel = take.number("data_parallel", 1, 1);
  deployment.expert_parallel = take.number("expert_parallel", 1, 1);
  const Index others = checked_mul(deployment.pipeline_parallel,
                                   deployment.engine == Engine::vllm ? deployment.data_parallel : 1,
                                   "number of workers");
  const Index tensor = take.number("tensor_parallel", 0, 0);
  deployment.tensor_parallel = tensor == 0 ? std::max<Index>(1, workers / others) : tensor;
  deployment.stage_layers = take.numbers("pipeline_layers");
  deployment.experts.round_robin = take.either("expert_placement", "linear", "round_robin");
  deployment.experts.redundant = take.number("redundant_experts", 0, 0);
  if (const auto file = take.text("expert_map")) {
    read_map(*file, deployment.experts);
  }
  return deployment;
}

}  // namespace m2n
