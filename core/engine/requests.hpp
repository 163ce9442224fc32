// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The bodies of the four control calls, as plain values and as JSON, with their validation.

#include <boost/json/object.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/sink.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

inline constexpr std::int64_t kWireSchemaVersion = 1;

/// Where the ranks of a world meet, and who takes part.
struct WorldSpec {
  std::string master_address;
  std::uint16_t master_port = 0;
  std::string unique_id_b64;         ///< Optional; 128 bytes in base64 when there is one.
  Rank rank_offset = 0;              ///< Number of trainer ranks: the first worker's rank.
  Rank world_size = 0;               ///< Trainer ranks and workers together.
  std::vector<Index> dst_mesh_dims;  ///< {replicas, shards} over the workers.
  std::optional<int> max_cta;        ///< Cap on what the transport may use of a GPU.
  std::uint64_t epoch = 0;           ///< Of the rendezvous; grows with every re-init.
  std::string world = "job";         ///< Of the store: one for each deployment that a job feeds.
};

/// Body of init_weight_transfer_engine: a world, and what will be sent.
struct InitRequest : WorldSpec {
  std::string source_digest;      ///< sha256_hex(params_to_text(params)).
  std::vector<ParamSpec> params;  ///< In the order in which they are sent.
};

/// Parameters by their numbers in the declared order.
struct ParamRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;  ///< One past the last.
};

/// What start, update and finish share. A client that does not know a field leaves it out; one that
/// states it must state the right one.
struct RoundRequest {
  std::optional<std::uint64_t> version;
  std::optional<std::uint64_t> epoch;
  std::optional<std::string> plan_digest;
  /// Of update_weights: a slice of the declared order, as names or as a range, which names the list
  /// that it counts in: InitRequest::source_digest.
  std::vector<std::string> names;
  std::optional<ParamRange> range;
  std::optional<std::string> source_digest;
};

/// @throws Error{bad_argument} naming the field that cannot form a world: the address, the port,
///         the rank counts, the destination mesh, the unique id.
void check_world(const WorldSpec& world);

/// @throws Error{bad_argument} naming the parameter that is declared twice, has a dtype of less
///         than a byte, or is laid out over a rank outside [0, @p trainers) or over none.
void check_source_params(const std::vector<ParamSpec>& params, Rank trainers);

boost::json::object to_json(const InitRequest& request);
boost::json::object to_json(const RoundRequest& request);

/// Every check above, and that the digest is that of the parameters.
/// @throws Error{bad_argument} for anything else, a key that is not known included.
InitRequest init_request_from_json(const boost::json::object& body);
/// @param call      Named in errors.
/// @param is_update  Names or a range are required; otherwise they are refused.
/// @throws Error{bad_argument} also for a draft model, which is named.
RoundRequest round_request_from_json(const boost::json::object& body, std::string_view call,
                                     bool is_update);

/// Parameters as text, one line of canonical JSON each, and back: what digests are over, and what
/// travels. Equal geometries are read once.
std::string params_to_text(const std::vector<ParamSpec>& params);
std::vector<ParamSpec> params_from_text(std::string_view text);

/// A sink's resolutions of @p params in the same form, for agreement between workers and trainers.
/// A layout that came before is told by its number, since those of many workers are long.
std::string resolutions_to_text(const std::vector<ParamSpec>& params,
                                const std::vector<Resolution>& resolutions);
/// @throws Error{bad_argument} also unless there is one resolution a parameter, in its order.
std::vector<Resolution> resolutions_from_text(std::string_view text,
                                              const std::vector<ParamSpec>& params);
/// @throws Error{bad_argument} naming the parameter whose destination lies on a rank outside
///         [first_worker, world_size), or when the counts differ.
void check_resolutions(const std::vector<ParamSpec>& params,
                       const std::vector<Resolution>& resolutions, Rank first_worker,
                       Rank world_size);

/// How the first line that differs differs: "parameter 'w' has dtype f32 instead of bf16". Empty
/// when the texts are equal. Lines are JSON objects with the key "name".
std::string first_difference(std::string_view expected, std::string_view found);

/// The bytes behind @p text. @throws Error{bad_argument} unless it is base64 of 128 bytes.
std::string decode_unique_id(std::string_view text);

}  // namespace m2n
