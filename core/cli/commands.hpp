// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The commands of the program: each takes what follows its name, and gives an exit status.

#include <string>
#include <vector>

namespace m2n::cli {

using Arguments = std::vector<std::string>;

int run_command(const Arguments& arguments);
int simulate_command(const Arguments& arguments);
int bench_command(const Arguments& arguments);
int layout_command(const Arguments& arguments);
int plan_command(const Arguments& arguments);
int trainer_command(const Arguments& arguments);
int worker_command(const Arguments& arguments);
int launch_command(const Arguments& arguments);
int list_command(const Arguments& arguments);
int inspect_command(const Arguments& arguments);
int replay_command(const Arguments& arguments);
int diff_command(const Arguments& arguments);
int export_command(const Arguments& arguments);

}  // namespace m2n::cli
