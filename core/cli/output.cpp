// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/output.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>

namespace m2n::cli {

std::string Table::text() const {
  std::vector<std::size_t> widths;
  std::vector<bool> right;  // a column of numbers, below its header
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    right.resize(widths.size(), !facts_);
    right[0] = false;
    for (std::size_t c = 0; c < row.size(); ++c) {
      widths[c] = std::max(widths[c], row[c].size());
      if (&row != &rows_.front() && !row[c].empty() && row[c] != "-") {
        right[c] = right[c] && std::isdigit(static_cast<unsigned char>(row[c][0])) != 0;
      }
    }
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string pad(widths[c] - row[c].size(), ' ');
      line += (c == 0 ? "" : "  ") + (right[c] ? pad + row[c] : row[c] + pad);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + '\n';
  }
  return out;
}

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return {text.data(), static_cast<std::size_t>(std::clamp(size, 0, 63))};
}

std::string human_bytes(std::uint64_t bytes) {
  static constexpr std::array kUnits = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1000 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return fixed(value, unit == 0 ? 0 : value < 10 ? 2 : 1) + ' ' + kUnits[unit];
}

std::string human_seconds(double seconds) {
  if (seconds < 1e-3) {
    return fixed(seconds * 1e6, 1) + " us";
  }
  return seconds < 1 ? fixed(seconds * 1e3, 2) + " ms" : fixed(seconds, 2) + " s";
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Progress::Progress(bool enabled) : enabled_(enabled && isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (enabled_ && !last_.empty()) {
    std::fputs("\r\033[K", stderr);
  }
}

void Progress::phase(std::string_view text) {
  if (!enabled_) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (last_ != text) {
    last_ = text;
    std::fprintf(stderr, "\r\033[K%s ...", last_.c_str());
    std::fflush(stderr);
  }
}

}  // namespace m2n::cli
