// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The environment variables that the program reads; the library reads none.

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "core/layout/mesh.hpp"

namespace m2n::cli {

/// This process among those that a launcher has started together.
struct Place {
  Rank rank = 0;
  Rank size = 1;
  std::string launcher;  ///< Who said so: "torchrun", "mpirun", "srun".
};

/// RANK and WORLD_SIZE of torchrun, else OMPI_COMM_WORLD_RANK and _SIZE of mpirun, else
/// SLURM_PROCID and SLURM_NTASKS of srun; nothing when none is set.
/// @throws Error{usage} naming the variable that is no number, or whose pair is missing.
std::optional<Place> place_from_environment();

/// "MASTER_ADDR:MASTER_PORT" as torchrun sets them; nothing when they are not set.
std::optional<std::string> master_from_environment();

/// M2N_TOKEN; empty when it is not set.
std::string token_from_environment();

/// Settings that must be the same in every process of a job, those that are set.
std::map<std::string, std::string> settings_from_environment();

}  // namespace m2n::cli
