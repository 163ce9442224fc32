// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Resolutions as text, and how two texts differ.

#include <algorithm>
#include <boost/json.hpp>
#include <utility>

#include "core/engine/param_lines.hpp"
#include "core/engine/requests.hpp"
#include "core/error.hpp"

namespace m2n {
namespace {

namespace json = boost::json;
using param_lines::append_quoted;
using param_lines::count_lines;
using param_lines::take_line;

[[noreturn]] void refuse_resolutions(const std::string& text) {
  throw Error(Errc::bad_argument, text);
}

std::string text_of(const json::value* value) {
  return value == nullptr ? "none" : json::serialize(*value);
}

/// The layouts of destinations that @p lines spell out, by their numbers.
json::array layouts_told(std::string_view lines) {
  json::array layouts;
  while (!lines.empty()) {
    const json::value line = json::parse(take_line(lines));
    if (const json::value* const side = line.as_object().if_contains("destination");
        side != nullptr && side->at("layout").is_object()) {
      layouts.push_back(side->at("layout"));
    }
  }
  return layouts;
}

/// @p line with its layout in place of the layout's number.
json::object spelled_out(std::string_view line, const json::array& layouts) {
  json::object out = json::parse(line).as_object();
  if (json::value* const side = out.if_contains("destination")) {
    json::value& layout = side->at("layout");
    if (layout.is_int64() && std::cmp_less(layout.get_int64(), layouts.size())) {
      layout = json::value(layouts[static_cast<std::size_t>(layout.get_int64())]);
    }
  }
  return out;
}

/// What two JSON objects of one parameter do not share.
std::string difference(const json::object& a, const json::object& b) {
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

}  // namespace

std::string resolutions_to_text(const std::vector<ParamSpec>& params,
                                const std::vector<Resolution>& resolutions) {
  param_lines::LayoutTexts layouts(true);
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
    refuse_resolutions("the workers resolved " + std::to_string(count_lines(text)) +
                       " parameters, but " + std::to_string(params.size()) + " are declared");
  }
  param_lines::Layouts layouts(true);
  std::vector<Resolution> resolutions;
  resolutions.reserve(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    const json::value document = parse_json(take_line(text), "resolution");
    const JsonReader root(document, "resolution");
    const std::string name(root.at("name").string());
    if (name != params[i].name) {
      refuse_resolutions("the workers resolved '" + name + "' where '" + params[i].name +
                         "' is declared");
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
    refuse_resolutions("the sink resolved " + std::to_string(resolutions.size()) +
                       " parameters, but " + std::to_string(params.size()) + " are declared");
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto& layout = resolutions[i].side.layout;
    if (!layout) {
      refuse_resolutions("parameter '" + params[i].name + "' has no destination layout");
    }
    const std::vector<Rank>& ranks = layout->ranks();
    if (!ranks.empty() && (ranks.front() < first_worker || ranks.back() >= world_size)) {
      refuse_resolutions("parameter '" + params[i].name + "' has a destination on ranks " +
                         std::to_string(ranks.front()) + " to " + std::to_string(ranks.back()) +
                         ", but the workers are ranks " + std::to_string(first_worker) + " to " +
                         std::to_string(world_size - 1));
    }
  }
}

std::string first_difference(std::string_view expected, std::string_view found) {
  const std::size_t had = count_lines(expected);
  const std::size_t has = count_lines(found);
  const std::string_view before = expected;
  while (!expected.empty() && !found.empty()) {
    const std::string_view a = take_line(expected);
    const std::string_view b = take_line(found);
    if (a != b) {
      // What the lines before these said is the same.
      const json::array layouts =
          layouts_told(before.substr(0, static_cast<std::size_t>(a.data() - before.data())));
      return difference(spelled_out(a, layouts), spelled_out(b, layouts));
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
