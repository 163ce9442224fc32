// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n diff`: where two dumps differ.

#include <algorithm>
#include <array>
#include <boost/json.hpp>
#include <cmath>
#include <iostream>
#include <set>

#include "core/cli/commands.hpp"
#include "core/cli/output.hpp"
#include "core/error.hpp"
#include "core/io/dump_diff.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

/// Differences that the table shows before it says how many more there are.
constexpr std::size_t kTableRows = 50;

std::string compared(const DumpComparison& found) {
  return std::to_string(found.facts) + " facts, " + std::to_string(found.parameters) +
         " parameters, " + std::to_string(found.regions) + " regions and " +
         std::to_string(found.elements) + " elements";
}

/// @throws Error{usage} naming the choices.
std::string section_of(const std::string& word) {
  constexpr std::array kSections = {"experiment", "parameters", "plan", "traffic", "tensors"};
  if (std::find(kSections.begin(), kSections.end(), word) == kSections.end()) {
    std::string choices;
    for (const char* section : kSections) {
      choices += (choices.empty() ? "" : ", ") + std::string(section);
    }
    throw Error(Errc::usage, "--only is '" + word + "'; the choices are " + choices);
  }
  return word;
}

void print_json(const DumpComparison& found) {
  json::array differences;
  for (const DumpDifference& one : found.differences) {
    differences.push_back(
        json::object{{"section", one.section}, {"subject", one.subject}, {"text", one.text}});
  }
  json::array tensors;
  for (const TensorDifference& one : found.tensors) {
    tensors.push_back(json::object{
        {"side", to_string(one.side)},
        {"name", one.name},
        {"elements", one.elements},
        {"wrong", one.wrong},
        {"rank", one.rank},
        {"at", json::value_from(std::vector<Index>(one.at.begin(), one.at.end()))},
        {"largest", std::isfinite(one.largest) ? json::value(one.largest) : json::value(nullptr)}});
  }
  std::cout << json::serialize(json::object{{"same", found.same()},
                                            {"facts", found.facts},
                                            {"parameters", found.parameters},
                                            {"regions", found.regions},
                                            {"elements", found.elements},
                                            {"differences", std::move(differences)},
                                            {"tensors", std::move(tensors)}})
            << '\n';
}

void print_table(const DumpComparison& found) {
  if (found.same()) {
    std::cout << "the same in " << compared(found) << '\n';
    return;
  }
  Table table({"section", "subject", "difference"}, true);
  for (std::size_t i = 0; i < std::min(kTableRows, found.differences.size()); ++i) {
    const DumpDifference& one = found.differences[i];
    table.add({one.section, one.subject, one.text});
  }
  std::cout << table.text();
  if (found.differences.size() > kTableRows) {
    std::cout << "and " << found.differences.size() - kTableRows << " more; --json has them all\n";
  }
  std::cout << '\n' << found.differences.size() << " differences in " << compared(found) << '\n';
}

}  // namespace

int diff_command(const Arguments& arguments) {
  bool as_json = false;
  std::vector<std::string> files;
  std::set<std::string> only;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    if (word == "--json") {
      as_json = true;
    } else if (word.starts_with("--only=")) {
      only.insert(section_of(word.substr(7)));
    } else if (word == "--only" && i + 1 < arguments.size()) {
      only.insert(section_of(arguments[++i]));
    } else if (word.starts_with("--")) {
      throw Error(Errc::usage, "diff has no flag " + word + "; it has --only SECTION and --json");
    } else {
      files.push_back(word);
    }
  }
  if (files.size() != 2) {
    throw Error(Errc::usage, "diff needs two dumps, and has " + std::to_string(files.size()));
  }
  DumpComparison found;
  try {
    found = compare_dumps(files[0], files[1]);
  } catch (const Error& error) {
    throw Error(Errc::usage, error.what());  // exit status 2: 1 says that they differ
  }
  if (!only.empty()) {
    std::erase_if(found.differences,
                  [&](const DumpDifference& one) { return !only.contains(one.section); });
  }
  if (as_json) {
    print_json(found);
  } else {
    print_table(found);
  }
  return found.same() ? 0 : 1;
}

}  // namespace m2n::cli
