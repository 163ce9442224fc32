// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What a person reads: tables that line up, sizes with units, progress.

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace m2n::cli {

/// Text columns. The first row is the header. A column of numbers (cells that start with a digit)
/// lines up right, but for the first column, which names its row, and unless the table is a list of
/// facts.
class Table {
 public:
  explicit Table(std::vector<std::string> header, bool facts = false) : facts_(facts) {
    rows_.push_back(std::move(header));
  }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  bool facts_;
};

/// "90.9 MB" (10^6), "512 B".
std::string human_bytes(std::uint64_t bytes);
/// "1.25 ms".
std::string human_seconds(double seconds);
/// Fixed digits after the point.
std::string fixed(double value, int digits);

/// Of at least one value; the upper one of two in the middle.
double median(std::vector<double> values);

/// Says on standard error what is going on, when that is a terminal: each phase once, on one line.
/// Thread-safe.
class Progress {
 public:
  explicit Progress(bool enabled);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();
  void phase(std::string_view text);

 private:
  std::mutex mutex_;
  std::string last_;
  bool enabled_;
};

}  // namespace m2n::cli
