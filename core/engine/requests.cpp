// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/requests.hpp"

#include <openssl/evp.h>

#include <algorithm>
#include <boost/json.hpp>
#include <limits>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

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

/// Layouts by their text, so that equal ones are one object and are worked out once.
class Layouts {
 public:
  std::shared_ptr<const Layout> get(const json::value& canonical, const std::string& where) {
    const std::string text = json::serialize(canonical);
    auto& layout = by_text_[text];
    if (!layout) {
      layout = std::make_shared<const Layout>(Layout::from_json(text, where));
    }
    return layout;
  }

  Side side(const JsonReader& value, const json::value& raw, const std::string& name) {
    value.allow_keys({"layout", "buffers"});
    Side side{get(raw.as_object().at("layout"), "layout of '" + name + "'"), {}};
    if (const auto buffers = value.find("buffers")) {
      for (const JsonReader& buffer : buffers->items()) {
        side.buffers.emplace_back(buffer.string());
      }
    } else {
      side.buffers = {name};
    }
    if (side.buffers.size() < side.layout->slot_count()) {
      value.fail("names " + std::to_string(side.buffers.size()) + " buffers, but its layout uses " +
                 std::to_string(side.layout->slot_count()));
    }
    return side;
  }

 private:
  std::unordered_map<std::string, std::shared_ptr<const Layout>> by_text_;
};

/// As json::serialize() does, and faster for the names of most parameters.
void append_quoted(std::string& out, std::string_view text) {
  const bool plain = std::all_of(text.begin(), text.end(), [](char letter) {
    return letter >= ' ' && letter != '"' && letter != '\\' && letter != '\x7f';
  });
  if (plain) {
    out.append(1, '"').append(text).append(1, '"');
  } else {
    out += json::serialize(json::string_view(text));
  }
}

template <class Values, class Append>
void append_list(std::string& out, const Values& values, Append append) {
  out += '[';
  const char* separator = "";
  for (const auto& value : values) {
    out += separator;
    append(out, value);
    separator = ",";
  }
  out += ']';
}

/// Canonical layouts, each worked out once.
class LayoutTexts {
 public:
  void append_side(std::string& out, const Side& side, const std::string& name) {
    std::string& layout = by_layout_[side.layout.get()];
    if (layout.empty()) {
      layout = side.layout->canonical_json();
    }
    out.append("{\"layout\":").append(layout);
    if (side.buffers.size() != 1 || side.buffers.front() != name) {
      out += ",\"buffers\":";
      append_list(out, side.buffers, append_quoted);
    }
    out += '}';
  }

 private:
  std::unordered_map<const Layout*, std::string> by_layout_;
};

ParamSpec param_from_json(const JsonReader& value, const json::value& raw, Layouts& layouts) {
  value.allow_keys({"name", "dtype", "shape", "source", "quantise"});
  ParamSpec param;
  param.name = value.at("name").string();
  try {
    param.dtype = dtype_from_string(value.at("dtype").string());
    param.shape = layout_json::shape(value.at("shape"));
    element_count(param.shape);
    param.side = layouts.side(value.at("source"), raw.as_object().at("source"), param.name);
    if (const auto quantise = value.find("quantise")) {
      quantise->allow_keys({"blocks", "scales"});
      param.quantise = Quantise{layout_json::dims(quantise->at("blocks")),
                                std::string(quantise->at("scales").string())};
    }
  } catch (const JsonError&) {
    throw;  // says where it is already
  } catch (const Error& error) {
    throw Error(error.code(), "parameter '" + param.name + "': " + error.what());
  }
  return param;
}

/// Its line of params_to_text(), without the end.
void append_param(std::string& out, const ParamSpec& param, LayoutTexts& layouts) {
  out += "{\"name\":";
  append_quoted(out, param.name);
  out.append(",\"dtype\":\"").append(to_string(param.dtype)).append("\",\"shape\":");
  append_list(out, param.shape,
              [](std::string& list, Index extent) { list += std::to_string(extent); });
  out += ",\"source\":";
  layouts.append_side(out, param.side, param.name);
  if (param.quantise) {
    out += ",\"quantise\":{\"blocks\":";
    append_list(out, param.quantise->blocks,
                [](std::string& list, Index extent) { list += std::to_string(extent); });
    out += ",\"scales\":";
    append_quoted(out, param.quantise->scales);
    out += '}';
  }
  out += '}';
}

/// Takes the first line off @p text.
std::string_view take_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return line;
}

std::size_t count_lines(std::string_view text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

std::string text_of(const json::value* value) {
  return value == nullptr ? "none" : json::serialize(*value);
}

/// What two JSON objects of one parameter do not share.
std::string difference(std::string_view expected, std::string_view found) {
  const json::object a = json::parse(expected).as_object();
  const json::object b = json::parse(found).as_object();
  const std::string name(b.at("name").as_string());
  if (a.at("name") != b.at("name")) {
    return "parameter '" + name + "' stands where '" + std::string(a.at("name").as_string()) +
           "' does";
  }
  for (const auto* object : {&a, &b}) {
    for (const auto& entry : *object) {
      const json::value* const left = a.if_contains(entry.key());
      const json::value* const right = b.if_contains(entry.key());
      if (left == nullptr || right == nullptr || *left != *right) {
        return "parameter '" + name + "' has " + std::string(entry.key()) + " " + text_of(right) +
               " instead of " + text_of(left);
      }
    }
  }
  return "parameter '" + name + "' differs";
}

std::optional<std::uint64_t> optional_number(const JsonReader& root, std::string_view key) {
  const auto value = root.find(key);
  return value ? std::optional(value->integer_in<std::uint64_t>()) : std::nullopt;
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
  LayoutTexts layouts;
  for (const ParamSpec& param : request.params) {
    std::string text;
    append_param(text, param, layouts);
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
  const json::value document = body;
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

  Layouts layouts;
  const JsonReader list = root.at("params");
  const std::vector<JsonReader> entries = list.items();
  const json::array& raw = document.as_object().at("params").as_array();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    request.params.push_back(param_from_json(entries[i], raw[i], layouts));
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
  json::object few;  // what is read with its place; a list of names is long
  for (const auto& entry : body) {
    if (!is_update || entry.key() != "names" || !entry.value().is_array()) {
      few.insert(entry);
    }
  }
  const json::value document = std::move(few);
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

std::string params_to_text(const std::vector<ParamSpec>& params) {
  LayoutTexts layouts;
  std::string text;
  for (const ParamSpec& param : params) {
    append_param(text, param, layouts);
    text += '\n';
  }
  return text;
}

std::vector<ParamSpec> params_from_text(std::string_view text) {
  Layouts layouts;
  std::vector<ParamSpec> params;
  params.reserve(count_lines(text));
  while (!text.empty()) {
    const json::value document = parse_json(take_line(text), "parameter");
    params.push_back(param_from_json(JsonReader(document, "parameter"), document, layouts));
  }
  return params;
}

std::string resolutions_to_text(const std::vector<ParamSpec>& params,
                                const std::vector<Resolution>& resolutions) {
  LayoutTexts layouts;
  std::string text;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Resolution& resolution = resolutions[i];
    text += "{\"name\":";
    append_quoted(text, params[i].name);
    text.append(",\"mode\":\"").append(to_string(resolution.mode));
    text.append("\",\"cast\":").append(resolution.cast ? "true" : "false");
    text += ",\"together\":";
    append_quoted(text, resolution.together);
    text += ",\"destination\":";
    layouts.append_side(text, resolution.side, params[i].name);
    text += "}\n";
  }
  return text;
}

std::vector<Resolution> resolutions_from_text(std::string_view text,
                                              const std::vector<ParamSpec>& params) {
  if (count_lines(text) != params.size()) {
    refuse("the workers resolved " + std::to_string(count_lines(text)) + " parameters, but " +
           std::to_string(params.size()) + " are declared");
  }
  Layouts layouts;
  std::vector<Resolution> resolutions;
  resolutions.reserve(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    const json::value document = parse_json(take_line(text), "resolution");
    const JsonReader root(document, "resolution");
    const std::string name(root.at("name").string());
    if (name != params[i].name) {
      refuse("the workers resolved '" + name + "' where '" + params[i].name + "' is declared");
    }
    Resolution resolution;
    const std::string_view mode = root.at("mode").string();
    if (mode != to_string(Mode::direct) && mode != to_string(Mode::fallback)) {
      root.at("mode").fail("is neither direct nor fallback");
    }
    resolution.mode = mode == to_string(Mode::direct) ? Mode::direct : Mode::fallback;
    resolution.cast = root.at("cast").boolean();
    resolution.together = root.at("together").string();
    resolution.side =
        layouts.side(root.at("destination"), document.as_object().at("destination"), name);
    resolutions.push_back(std::move(resolution));
  }
  return resolutions;
}

void check_resolutions(const std::vector<ParamSpec>& params,
                       const std::vector<Resolution>& resolutions, Rank first_worker,
                       Rank world_size) {
  if (params.size() != resolutions.size()) {
    refuse("the sink resolved " + std::to_string(resolutions.size()) + " parameters, but " +
           std::to_string(params.size()) + " are declared");
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto& layout = resolutions[i].side.layout;
    if (!layout) {
      refuse("parameter '" + params[i].name + "' has no destination layout");
    }
    const std::vector<Rank>& ranks = layout->ranks();
    if (!ranks.empty() && (ranks.front() < first_worker || ranks.back() >= world_size)) {
      refuse("parameter '" + params[i].name + "' has a destination on ranks " +
             std::to_string(ranks.front()) + " to " + std::to_string(ranks.back()) +
             ", but the workers are ranks " + std::to_string(first_worker) + " to " +
             std::to_string(world_size - 1));
    }
  }
}

std::string first_difference(std::string_view expected, std::string_view found) {
  const std::size_t had = count_lines(expected);
  const std::size_t has = count_lines(found);
  while (!expected.empty() && !found.empty()) {
    const std::string_view a = take_line(expected);
    const std::string_view b = take_line(found);
    if (a != b) {
      return difference(a, b);
    }
  }
  if (expected.empty() && found.empty()) {
    return {};
  }
  const std::string_view line = take_line(has > had ? found : expected);
  return std::to_string(has) + " parameters instead of " + std::to_string(had) + ", the first " +
         (has > had ? "extra" : "missing") + " one is '" +
         std::string(json::parse(line).as_object().at("name").as_string()) + "'";
}

}  // namespace m2n
