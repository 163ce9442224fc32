// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/environment.hpp"

#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>

#include "core/error.hpp"

namespace m2n::cli {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* const value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody sets any
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

Rank number(const char* name, const std::string& text, Rank least) {
  Rank value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < least) {
    throw Error(Errc::usage, "environment variable " + std::string(name) + " is '" + text +
                                 "'; it must be a number from " + std::to_string(least));
  }
  return value;
}

struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
};

constexpr std::array kLaunchers = {
    Launcher{"torchrun", "RANK", "WORLD_SIZE"},
    Launcher{"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    Launcher{"srun", "SLURM_PROCID", "SLURM_NTASKS"},
};

/// What changes how ranks talk: one rank that differs corrupts, or waits for ever.
constexpr std::array kSettings = {
    "NCCL_ALGO",        "NCCL_CROSS_NIC",         "NCCL_CUMEM_ENABLE", "NCCL_IB_DISABLE",
    "NCCL_NET",         "NCCL_NVLS_ENABLE",       "NCCL_P2P_DISABLE",  "NCCL_P2P_LEVEL",
    "NCCL_PROTO",       "NCCL_P2P_NVL_CHUNKSIZE", "NCCL_SHM_DISABLE",  "NCCL_CHUNK_SIZE",
    "UCX_PROTO_ENABLE", "UCX_RNDV_SCHEME",        "UCX_RNDV_THRESH",   "UCX_TLS",
};

}  // namespace

std::optional<Place> place_from_environment() {
  for (const Launcher& launcher : kLaunchers) {
    const auto rank = variable(launcher.rank);
    const auto size = variable(launcher.size);
    if (!rank && !size) {
      continue;
    }
    if (!rank || !size) {
      throw Error(Errc::usage, "environment variable " +
                                   std::string(rank ? launcher.rank : launcher.size) +
                                   " is set without " + (rank ? launcher.size : launcher.rank));
    }
    Place place{number(launcher.rank, *rank, 0), number(launcher.size, *size, 1), launcher.name};
    if (place.rank >= place.size) {
      throw Error(Errc::usage, "environment variable " + std::string(launcher.rank) + " is " +
                                   *rank + "; it must be below " + launcher.size + ", which is " +
                                   *size);
    }
    return place;
  }
  return std::nullopt;
}

std::optional<std::string> master_from_environment() {
  const auto address = variable("MASTER_ADDR");
  const auto port = variable("MASTER_PORT");
  return address && port ? std::optional(*address + ":" + *port) : std::nullopt;
}

std::string token_from_environment() { return variable("M2N_TOKEN").value_or(""); }

std::map<std::string, std::string> settings_from_environment() {
  std::map<std::string, std::string> settings;
  for (const char* const name : kSettings) {
    if (const auto value = variable(name)) {
      settings[name] = *value;
    }
  }
  return settings;
}

}  // namespace m2n::cli
