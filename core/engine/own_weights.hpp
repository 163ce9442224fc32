// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A source and a sink over buffers that somebody else has: for trainers and inference engines that
/// use m2n as a library.

#include <memory>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/sink.hpp"
#include "core/api/source.hpp"

namespace m2n {

/// A parameter as the caller holds it on this rank. The layout is over all ranks of its side.
struct OwnParameter {
  ParamSpec spec;
  std::vector<LocalBuffer> slots;  ///< This rank's memory, one a slot; host or device.
};

/// Lends the caller's buffers round after round. The caller writes the weights of a round before
/// TrainerEngine::send_weights(), and leaves them alone until it returns; the addresses stay.
std::unique_ptr<WeightSource> make_own_source(std::vector<OwnParameter> parameters);

/// Receives in place. Every parameter that the trainers declare must be among @p parameters, by
/// name; a dtype that differs is cast where there is a cast. Between the start of a round and its
/// commit version() is empty: do not serve then.
/// @throws Error{bad_argument} from resolve(), naming the parameter that is missing or has another
///         shape.
std::unique_ptr<WeightSink> make_own_sink(std::vector<OwnParameter> parameters);

}  // namespace m2n
