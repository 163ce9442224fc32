// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "sinks/models/sizes.hpp"

#include <algorithm>
#include <array>
#include <boost/json.hpp>
#include <charconv>
#include <utility>

#include "core/error.hpp"
#include "sinks/fail.hpp"

namespace m2n::models {
namespace {

constexpr std::array kCommonKeys = {"model_type",      "dtype",         "torch_dtype",
                                    "checkpoint_root", "worker_root",   "names",
                                    "vocab_padding",   "head_separate", "intermediate_align"};

/// Numbers, switches and words, those of inner objects with a dotted name. Lists are not sizes.
void flatten(const boost::json::object& object, const std::string& prefix, Options& values) {
  for (const auto& member : object) {
    const std::string key = prefix + std::string(member.key());
    const auto& value = member.value();
    if (value.is_object()) {
      values[key] = "{}";
      flatten(value.as_object(), key + ".", values);
    } else if (!value.is_null()) {
      values[key] = value.is_string() ? std::string(value.as_string()) : serialize(value);
    }
  }
}

}  // namespace

Sizes::Sizes(std::string family, const Options& options, std::vector<std::string> keys)
    : family_(std::move(family)) {
  keys.insert(keys.end(), kCommonKeys.begin(), kCommonKeys.end());
  for (const auto& [key, value] : options) {
    if (key != "config" && std::find(keys.begin(), keys.end(), key) == keys.end()) {
      std::string text =
          "model '" + family_ + "' has no option '" + key + "'; the choices are config";
      for (const std::string& known : keys) {
        text += ", " + known;
      }
      throw Error(Errc::usage, text);
    }
  }
  if (const auto config = options.find("config"); config != options.end()) {
    boost::system::error_code failure;
    const auto parsed = boost::json::parse(config->second, failure);
    if (failure || !parsed.is_object()) {
      fail("the config of model '" + family_ + "' is not a JSON object" +
           (failure ? ": " + failure.message() : ""));
    }
    flatten(parsed.as_object(), "", values_);
  }
  for (const auto& [key, value] : options) {
    if (key != "config") {
      values_[key] = value;
    }
  }
}

Sizes Sizes::inner(const std::string& prefix) const {
  Sizes result = *this;
  result.prefix_ = prefix + ".";
  return result;
}

void Sizes::otherwise(const std::string& key, const std::string& value) {
  if (!has(key)) {
    values_[prefix_ + key] = value;
  }
}

const std::string* Sizes::find(std::string_view key) const {
  auto found = values_.find(prefix_ + std::string(key));
  if (found == values_.end()) {
    found = values_.find(key);
  }
  return found == values_.end() ? nullptr : &found->second;
}

Index Sizes::number(std::string_view key, Index least) const {
  const std::string* value = find(key);
  if (value == nullptr) {
    fail("model '" + family_ + "' needs the size '" + std::string(key) +
         "'; give it as an option, or a config that has it");
  }
  Index number = 0;
  const auto [end, failure] = std::from_chars(value->data(), value->data() + value->size(), number);
  if (failure != std::errc{} || end != value->data() + value->size() || number < least) {
    fail("size '" + std::string(key) + "' of model '" + family_ + "' is '" + *value +
         "'; it must be a whole number of at least " + std::to_string(least));
  }
  return number;
}

Index Sizes::size(std::string_view key) const { return number(key, 1); }

Index Sizes::size_or(std::string_view key, Index otherwise) const {
  return has(key) ? number(key, 1) : otherwise;
}

Index Sizes::count_or(std::string_view key, Index otherwise) const {
  return has(key) ? number(key, 0) : otherwise;
}

bool Sizes::flag(std::string_view key, bool otherwise) const {
  const std::string* value = find(key);
  if (value == nullptr) {
    return otherwise;
  }
  if (*value != "true" && *value != "false") {
    fail("'" + std::string(key) + "' of model '" + family_ + "' is '" + *value +
         "'; it must be true or false");
  }
  return *value == "true";
}

std::string Sizes::text(std::string_view key, std::string_view otherwise) const {
  const std::string* value = find(key);
  return value == nullptr ? std::string(otherwise) : *value;
}

std::string Sizes::choice(std::string_view key, const std::vector<std::string>& choices) const {
  std::string value = text(key, choices.front());
  if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
    std::string all;
    for (const std::string& one : choices) {
      all += (all.empty() ? "" : ", ") + one;
    }
    throw Error(Errc::bad_argument, std::string(key) + " '" + value + "' is not of the " + family_ +
                                        " family; the choices are " + all);
  }
  return value;
}

DType Sizes::dtype(DType otherwise) const {
  const std::string name = text("dtype", text("torch_dtype", to_string(otherwise)));
  if (name == "bfloat16") {
    return DType::bf16;
  }
  if (name == "float16") {
    return DType::f16;
  }
  return name == "float32" ? DType::f32 : dtype_from_string(name);
}

Index Sizes::quotient(std::string_view whole, std::string_view parts) const {
  const Index a = size(whole);
  const Index b = size(parts);
  if (a % b != 0) {
    fail(std::string(whole) + " " + std::to_string(a) + " of model '" + family_ +
         "' is not a multiple of " + std::string(parts) + " " + std::to_string(b));
  }
  return a / b;
}

Table Sizes::table(DType otherwise, const std::string& root) const {
  Table table;
  table.family = family_;
  table.dtype = dtype(otherwise);
  table.checkpoint_root = text("checkpoint_root", root);
  table.worker_root = text("worker_root", root);
  table.names = text("names", "");
  table.vocab_padding = size_or("vocab_padding", 64);
  return table;
}

}  // namespace m2n::models
