// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/param_lines.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <utility>

#include "core/engine/requests.hpp"
#include "core/error.hpp"
#include "core/layout/layout_json.hpp"

namespace m2n {
namespace param_lines {

namespace json = boost::json;

namespace {

/// Needs no escapes in JSON.
bool is_plain(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char letter) {
    return letter >= ' ' && letter != '"' && letter != '\\' && letter != '\x7f';
  });
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

}  // namespace

std::shared_ptr<const Layout> Layouts::get(const json::value& canonical, const std::string& where) {
  const std::int64_t* const number = canonical.if_int64();
  if (numbered_ && number != nullptr) {
    if (*number < 0 || std::cmp_greater_equal(*number, in_order_.size())) {
      throw Error(Errc::bad_argument, where + " is layout " + std::to_string(*number) + " of the " +
                                          std::to_string(in_order_.size()) +
                                          " that came before it");
    }
    return in_order_[static_cast<std::size_t>(*number)];
  }
  const std::string text = json::serialize(canonical);
  auto& layout = by_text_[text];
  if (!layout) {
    layout = std::make_shared<const Layout>(Layout::from_json(text, where));
    in_order_.push_back(layout);
  }
  return layout;
}

Side Layouts::side(const JsonReader& value, const json::value& raw, const std::string& name) {
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

void LayoutTexts::append_side(std::string& out, const Side& side, const std::string& name) {
  const auto [known, fresh] = by_layout_.try_emplace(side.layout.get());
  if (fresh) {
    std::string text = side.layout->canonical_json();
    const auto [at, first] = by_text_.emplace(text, std::to_string(by_text_.size()));
    known->second = numbered_ ? at->second : text;
    out.append("{\"layout\":").append(first ? text : known->second);
  } else {
    out.append("{\"layout\":").append(known->second);
  }
  if (side.buffers.size() != 1 || side.buffers.front() != name) {
    out += ",\"buffers\":";
    append_list(out, side.buffers, append_quoted);
  }
  out += '}';
}

void append_quoted(std::string& out, std::string_view text) {
  if (is_plain(text)) {
    out.append(1, '"').append(text).append(1, '"');
  } else {
    out += json::serialize(json::string_view(text));
  }
}

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

std::string_view take_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return line;
}

std::size_t count_lines(std::string_view text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

ParamReader::Known ParamReader::make(const JsonReader& value, const json::value& raw) {
  value.allow_keys({"name", "dtype", "shape", "source", "quantise"});
  ParamSpec param;
  param.name = value.at("name").string();
  try {
    param.dtype = dtype_from_string(value.at("dtype").string());
    param.shape = layout_json::shape(value.at("shape"));
    element_count(param.shape);
    param.side = layouts_.side(value.at("source"), raw.as_object().at("source"), param.name);
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
  return {std::move(param), !raw.at("source").as_object().contains("buffers")};
}

/// The parameter of @p line, with @p make where nothing like it was read before. Lines that do not
/// start with a plain name are not known again.
template <class Make>
ParamSpec ParamReader::get(std::string_view line, Make make) {
  constexpr std::string_view kBegin = R"({"name":")";
  const std::size_t end =
      line.starts_with(kBegin) ? line.find('"', kBegin.size()) : std::string_view::npos;
  if (end == std::string_view::npos) {
    return make().param;
  }
  const std::string_view name = line.substr(kBegin.size(), end - kBegin.size());
  if (!is_plain(name)) {
    return make().param;
  }
  const auto known = known_.find(line.substr(end));
  if (known == known_.end()) {
    return known_.emplace(line.substr(end), make()).first->second.param;
  }
  ParamSpec param = known->second.param;
  param.name = name;
  if (known->second.own_buffer) {
    param.side.buffers = {param.name};
  }
  return param;
}

ParamSpec ParamReader::read_line(std::string_view line) {
  return get(line, [&] {
    const json::value document = parse_json(line, "parameter");
    return make(JsonReader(document, "parameter"), document);
  });
}

ParamSpec ParamReader::read(const json::value& value, const std::string& path) {
  return get(json::serialize(value), [&] { return make(JsonReader(value, path), value); });
}

}  // namespace param_lines

std::string params_to_text(const std::vector<ParamSpec>& params) {
  param_lines::LayoutTexts layouts;
  std::string text;
  for (const ParamSpec& param : params) {
    param_lines::append_param(text, param, layouts);
    text += '\n';
  }
  return text;
}

std::vector<ParamSpec> params_from_text(std::string_view text) {
  param_lines::ParamReader reader;
  std::vector<ParamSpec> params;
  params.reserve(param_lines::count_lines(text));
  while (!text.empty()) {
    params.push_back(reader.read_line(param_lines::take_line(text)));
  }
  return params;
}

}  // namespace m2n
