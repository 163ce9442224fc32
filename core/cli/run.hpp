// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Runs a job in this process, verifies, dumps and reports: what `run` and `replay` share.

#include <string>

#include "core/cli/experiment.hpp"

namespace m2n::cli {

/// @param title  Heads the report: "m2n run".
/// @return the exit status. @throws Error{bad_plan} when what arrived is wrong.
int run_experiment(const Experiment& experiment, const std::string& title);

}  // namespace m2n::cli
