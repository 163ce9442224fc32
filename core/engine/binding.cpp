// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/binding.hpp"

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "core/tensor/block_scales.hpp"

namespace m2n {
namespace {

/// Numbers the slots of one parameter's loan, after checking it.
void bind_loan(const Problem& problem, Role role, Rank rank, std::size_t index,
               const ParamLoan& loan, const std::vector<std::uint64_t>& needed,
               std::vector<LocalBuffer>& bound) {
  const Parameter& parameter = problem.parameters()[index];
  const Side& side = role == Role::source ? parameter.source : parameter.destination;
  const auto wrong = [&](const std::string& what) {
    return Error(Errc::bad_argument, std::string(to_string(role)) + " rank " +
                                         std::to_string(rank) + " lends parameter '" + loan.name +
                                         "' " + what);
  };
  if (loan.name != parameter.name) {
    throw wrong("where '" + parameter.name + "' was declared");
  }
  if (loan.dtype != side.layout->dtype()) {
    throw wrong("with dtype " + std::string(to_string(loan.dtype)) + ", but declared " +
                std::string(to_string(side.layout->dtype())));
  }
  if (loan.shape != parameter.shape) {
    throw wrong("with shape " + to_string(loan.shape) + ", but declared " +
                to_string(parameter.shape));
  }
  const std::vector<std::uint32_t>& slots = problem.buffers(role).of_parameter[index];
  if (loan.slots.size() != slots.size()) {
    throw wrong("with " + std::to_string(loan.slots.size()) + " buffers, but declared " +
                std::to_string(slots.size()));
  }
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    const LocalBuffer& buffer = loan.slots[slot];
    const std::uint32_t number = slots[slot];
    if (needed[number] == 0) {
      continue;
    }
    if (buffer.data == nullptr || buffer.bytes < needed[number]) {
      throw wrong("with " + std::to_string(buffer.bytes) + " bytes for buffer '" +
                  problem.buffers(role).names[number] + "', which needs " +
                  std::to_string(needed[number]));
    }
    if (bound[number].data != nullptr && bound[number].data != buffer.data) {
      throw wrong("with another address for buffer '" + problem.buffers(role).names[number] +
                  "' than the parameters before it");
    }
    bound[number] = buffer;
  }
}

}  // namespace

Problem make_problem(const std::vector<ParamSpec>& params,
                     const std::vector<Resolution>& resolutions) {
  if (params.size() != resolutions.size()) {
    throw Error(Errc::bad_argument, "the source declares " + std::to_string(params.size()) +
                                        " parameters, but the sink resolved " +
                                        std::to_string(resolutions.size()));
  }
  std::vector<Parameter> parameters;
  parameters.reserve(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    Parameter& parameter = parameters.emplace_back(Parameter{params[i].name,
                                                             params[i].shape,
                                                             params[i].side,
                                                             resolutions[i].side,
                                                             resolutions[i].cast,
                                                             {}});
    // A worker may also take it as it is.
    if (params[i].quantise && can_quantise(params[i].dtype, parameter.destination_dtype())) {
      parameter.quantise = params[i].quantise;
    }
  }
  return Problem::make(std::move(parameters));
}

std::vector<LocalBuffer> bind_source(const Problem& problem, Rank rank,
                                     const std::vector<ParamLoan>& loans) {
  const std::size_t declared = problem.parameters().size();
  if (loans.size() != declared) {
    const std::string first_missing =
        loans.size() < declared
            ? "; the first missing one is '" + problem.parameters()[loans.size()].name + "'"
            : "";
    throw Error(Errc::bad_argument,
                "source rank " + std::to_string(rank) + " lends " + std::to_string(loans.size()) +
                    " parameters, but declared " + std::to_string(declared) + first_missing);
  }
  const std::vector<std::uint64_t> needed = problem.buffer_bytes(Role::source, rank);
  std::vector<LocalBuffer> bound(needed.size());
  for (std::size_t i = 0; i < declared; ++i) {
    bind_loan(problem, Role::source, rank, i, loans[i], needed, bound);
  }
  return bound;
}

std::vector<LocalBuffer> bind_destination(const Problem& problem, Rank rank,
                                          const std::vector<Resolution>& resolutions,
                                          const std::vector<ParamLoan>& loans,
                                          const std::vector<LocalBuffer>& full_tensors) {
  if (loans.size() != problem.parameters().size()) {
    throw Error(Errc::bad_argument, "destination rank " + std::to_string(rank) + " lends " +
                                        std::to_string(loans.size()) +
                                        " parameters, but resolved " +
                                        std::to_string(problem.parameters().size()));
  }
  const std::vector<std::uint64_t> needed = problem.buffer_bytes(Role::destination, rank);
  std::vector<LocalBuffer> bound(needed.size());
  for (std::size_t i = 0; i < loans.size(); ++i) {
    if (resolutions[i].mode == Mode::direct) {
      bind_loan(problem, Role::destination, rank, i, loans[i], needed, bound);
    } else if (!problem.parameters()[i].destination.layout->pieces_of(rank).empty()) {
      bound[problem.buffers(Role::destination).of_parameter[i].front()] = full_tensors.at(i);
    }
  }
  return bound;
}

}  // namespace m2n
