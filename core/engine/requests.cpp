// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/requests.hpp"

#include <openssl/evp.h>

#include <algorithm>
#include <boost/json.hpp>
#include <limits>
#include <unordered_set>
#include <utility>

#include "core/engine/param_lines.hpp"
#include "core/error.hpp"
#include "core/layout/layout_json.hpp"

namespace m2n {
namespace {

namespace json = boost::json;

constexpr std::size_t kUniqueIdBytes = 128;  // of NCCL

[[noreturn]] void refuse(const std::string& text) { throw Error(Errc::bad_argument, text); }

/// As a parser would give it back.
std::int64_t number(std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    refuse("the number " + std::to_string(value) + " is too large for a request");
  }
  return static_cast<std::int64_t>(value);
}

std::optional<std::uint64_t> optional_number(const JsonReader& root, std::string_view key) {
  const auto value = root.find(key);
  return value ? std::optional(value->integer_in<std::uint64_t>()) : std::nullopt;
}

/// @p body but for its list @p key, which is long and read by itself.
json::value without(const json::object& body, std::string_view key) {
  json::object few;
  for (const auto& entry : body) {
    if (entry.key() != key || !entry.value().is_array()) {
      few.insert(entry);
    }
  }
  return few;
}

/// The parameters that an update brings.
void read_slice(const json::object& body, const JsonReader& root, RoundRequest& request) {
  const json::value* const names = body.if_contains("names");
  const auto range = root.find("range");
  if (names != nullptr && range) {
    root.fail("has 'names' and 'range'; give one of them");
  }
  if (range) {
    const std::vector<JsonReader> ends = range->items();
    if (ends.size() != 2) {
      range->fail("must be [begin, end]");
    }
    request.range = {ends[0].integer_in<std::uint64_t>(), ends[1].integer_in<std::uint64_t>()};
    if (request.range->begin > request.range->end) {
      range->fail("begins after its end");
    }
    request.source_digest = root.at("source_digest").string();
    return;
  }
  if (names == nullptr || !names->is_array()) {
    root.at("names").items();  // says what is wrong
  }
  const json::array& list = names->get_array();
  request.names.reserve(list.size());
  for (const json::value& name : list) {
    if (const json::string* const text = name.if_string()) {
      request.names.emplace_back(text->data(), text->size());
    } else {
      root.fail("has a name that is no text, at place " + std::to_string(request.names.size()));
    }
  }
}

}  // namespace

std::string decode_unique_id(std::string_view text) {
  const auto wrong = [&](const std::string& what) {
    refuse("nccl_unique_id_b64 " + what + "; it must be base64 of " +
           std::to_string(kUniqueIdBytes) + " bytes");
  };
  if (text.empty() || text.size() % 4 != 0) {
    wrong("has " + std::to_string(text.size()) + " characters");
  }
  std::string bytes(text.size() / 4 * 3, '\0');
  const int size = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                                   reinterpret_cast<const unsigned char*>(text.data()),
                                   static_cast<int>(text.size()));
  if (size < 0) {
    wrong("is not base64");
  }
  const auto padding = static_cast<std::size_t>(std::count(text.end() - 2, text.end(), '='));
  bytes.resize(static_cast<std::size_t>(size) - padding);
  if (bytes.size() != kUniqueIdBytes) {
    wrong("holds " + std::to_string(bytes.size()) + " bytes");
  }
  return bytes;
}

void check_world(const WorldSpec& request) {
  if (request.master_address.empty()) {
    refuse("master_address is empty; it must name the host where the ranks meet");
  }
  if (request.master_port == 0) {
    refuse("master_port is 0; it must be 1 to 65535");
  }
  if (request.rank_offset < 1 || request.rank_offset >= request.world_size) {
    refuse("rank_offset " + std::to_string(request.rank_offset) +
           " must leave at least one trainer rank and one worker in world_size " +
           std::to_string(request.world_size));
  }
  const Index workers = request.world_size - request.rank_offset;
  const auto& dims = request.dst_mesh_dims;
  const bool whole = dims.size() == 2 && dims[0] >= 1 && dims[1] >= 1 && dims[0] <= workers &&
                     dims[1] <= workers && dims[0] * dims[1] == workers;
  if (!whole) {
    refuse("dst_mesh_dims " + json::serialize(json::array(dims.begin(), dims.end())) +
           " must be two dims that cover the " + std::to_string(workers) + " workers");
  }
  if (!request.unique_id_b64.empty()) {
    decode_unique_id(request.unique_id_b64);
  }
  if (request.max_cta && *request.max_cta < 1) {
    refuse("max_cta is " + std::to_string(*request.max_cta) + "; it must be 1 or more");
  }
}

void check_source_params(const std::vector<ParamSpec>& params, Rank trainers) {
  std::unordered_set<std::string_view> names;
  for (const ParamSpec& param : params) {
    const auto wrong = [&](const std::string& what) {
      refuse("parameter '" + param.name + "' " + what);
    };
    if (param.name.empty()) {
      refuse("a parameter has no name");
    }
    if (!names.insert(param.name).second) {
      wrong("is declared twice; names must be unique");
    }
    if (!is_byte_sized(param.dtype)) {
      wrong("has dtype " + std::string(to_string(param.dtype)) +
            ", whose elements are smaller than a byte; declare the packed bytes as u8");
    }
    if (!param.side.layout) {
      wrong("has no source layout");
    }
    const Layout& layout = *param.side.layout;
    if (layout.shape() != param.shape || layout.dtype() != param.dtype) {
      wrong("is declared as " + std::string(to_string(param.dtype)) + " " + to_string(param.shape) +
            ", but its source layout is of " + std::string(to_string(layout.dtype())) + " " +
            to_string(layout.shape()));
    }
    const std::vector<Rank>& ranks = layout.ranks();
    if (ranks.empty()) {
      wrong("has a source mesh of no rank");
    }
    if (ranks.front() < 0 || ranks.back() >= trainers) {
      wrong("has a source mesh that reaches rank " + std::to_string(ranks.back()) +
            ", but the trainer ranks are 0 to " + std::to_string(trainers - 1));
    }
  }
}

json::object to_json(const InitRequest& request) {
  json::object out{
      {"schema_version", kWireSchemaVersion},
      {"master_address", request.master_address},
      {"master_port", number(request.master_port)},
      {"rank_offset", request.rank_offset},
      {"world_size", request.world_size},
      {"dst_mesh_dims", json::array(request.dst_mesh_dims.begin(), request.dst_mesh_dims.end())},
      {"source_digest", request.source_digest},
      {"epoch", number(request.epoch)},
      {"world", request.world}};
  json::array params;
  param_lines::LayoutTexts layouts;
  for (const ParamSpec& param : request.params) {
    std::string text;
    param_lines::append_param(text, param, layouts);
    params.push_back(json::parse(text));
  }
  out["params"] = std::move(params);
  if (!request.unique_id_b64.empty()) {
    out["nccl_unique_id_b64"] = request.unique_id_b64;
  }
  if (request.max_cta) {
    out["max_cta"] = *request.max_cta;
  }
  return out;
}

json::object to_json(const RoundRequest& request) {
  json::object out;
  if (request.version) {
    out["version"] = number(*request.version);
  }
  if (request.epoch) {
    out["epoch"] = number(*request.epoch);
  }
  if (request.plan_digest) {
    out["plan_digest"] = *request.plan_digest;
  }
  if (!request.names.empty()) {
    out["names"] = json::array(request.names.begin(), request.names.end());
  }
  if (request.range) {
    out["range"] = json::array{number(request.range->begin), number(request.range->end)};
  }
  if (request.source_digest) {
    out["source_digest"] = *request.source_digest;
  }
  return out;
}

InitRequest init_request_from_json(const json::object& body) {
  const std::string where = "init_weight_transfer_engine";
  const json::value document = without(body, "params");
  const JsonReader root(document, where);
  root.allow_keys({"schema_version", "master_address", "master_port", "nccl_unique_id_b64",
                   "rank_offset", "world_size", "dst_mesh_dims", "source_digest", "params",
                   "max_cta", "epoch", "world"});
  if (const std::int64_t schema = root.at("schema_version").integer();
      schema != kWireSchemaVersion) {
    root.fail("has schema_version " + std::to_string(schema) + "; this build speaks " +
              std::to_string(kWireSchemaVersion));
  }
  InitRequest request;
  request.master_address = root.at("master_address").string();
  request.master_port = root.at("master_port").integer_in<std::uint16_t>();
  if (const auto id = root.find("nccl_unique_id_b64")) {
    request.unique_id_b64 = id->string();
    decode_unique_id(request.unique_id_b64);
  }
  request.rank_offset = layout_json::rank(root.at("rank_offset"));
  request.world_size = layout_json::rank(root.at("world_size"));
  for (const JsonReader& dim : root.at("dst_mesh_dims").items()) {
    request.dst_mesh_dims.push_back(dim.integer());
  }
  request.source_digest = root.at("source_digest").string();
  if (const auto cap = root.find("max_cta")) {
    request.max_cta = cap->integer_in<int>();
  }
  request.epoch = optional_number(root, "epoch").value_or(0);
  if (const auto world = root.find("world")) {
    request.world = world->string();
  }
  check_world(request);

  const json::value* const list = body.if_contains("params");
  if (list == nullptr || !list->is_array()) {
    root.at("params").items();  // says what is wrong
  }
  param_lines::ParamReader reader;
  for (const json::value& param : list->get_array()) {
    request.params.push_back(
        reader.read(param, where + ": params[" + std::to_string(request.params.size()) + "]"));
  }
  check_source_params(request.params, request.rank_offset);
  const std::string digest = sha256_hex(params_to_text(request.params));
  if (digest != request.source_digest) {
    root.fail("has source_digest " + request.source_digest + ", but its params have " + digest);
  }
  return request;
}

RoundRequest round_request_from_json(const json::object& body, std::string_view call,
                                     bool is_update) {
  const std::string where(call);
  RoundRequest request;
  const json::value document = is_update ? without(body, "names") : body;
  const JsonReader root(document, where);
  if (const auto draft = root.find("draft_model")) {
    root.fail("asks for the draft model '" + std::string(draft->string()) +
              "', which cannot be updated: destinations are those of the served model");
  }
  if (is_update) {
    root.allow_keys({"names", "range", "source_digest", "version", "epoch", "plan_digest"});
    read_slice(body, root, request);
  } else {
    root.allow_keys({"version", "epoch", "plan_digest"});
  }
  request.version = optional_number(root, "version");
  request.epoch = optional_number(root, "epoch");
  if (const auto digest = root.find("plan_digest")) {
    request.plan_digest = digest->string();
  }
  return request;
}

}  // namespace m2n
