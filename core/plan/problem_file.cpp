// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <boost/json.hpp>
#include <fstream>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "core/error.hpp"
#include "core/io/json_reader.hpp"
#include "core/layout/layout_json.hpp"
#include "core/plan/problem.hpp"
#include "core/plan/quantise.hpp"

namespace m2n {
namespace {

namespace json = boost::json;

/// What a side's fsdp1 form needs to know of the whole file.
struct FileTensor {
  DType dtype;
  Shape shape;
};
using FileTensors = std::map<std::string, FileTensor, std::less<>>;

Layout sharded_of(const JsonReader& value, const FileTensor& tensor) {
  return Layout::sharded(tensor.shape, tensor.dtype, layout_json::mesh(value.at("mesh")),
                         layout_json::placements(value.at("placements"), tensor.shape.size()));
}

/// @return the layout, and the name of the unit's flat buffer.
std::pair<Layout, std::string> flat_of(const JsonReader& value, const std::string& name,
                                       const FileTensor& tensor, const FileTensors& tensors) {
  value.allow_keys({"unit", "ranks", "align_elements"});
  const std::vector<Rank> ranks = layout_json::ranks(value.at("ranks"));
  const auto align = value.find("align_elements");
  const Index align_elements = align ? align->integer() : 0;
  if (align_elements < 0) {
    align->fail("is negative; it must be 0 or more");
  }
  if (ranks.empty()) {
    value.fail("lists no rank; it needs at least one");
  }
  std::vector<Shape> shapes;
  std::optional<std::size_t> mine;
  const std::vector<JsonReader> unit = value.at("unit").items();
  for (const JsonReader& entry : unit) {
    const std::string member(entry.string());
    const auto found = tensors.find(member);
    if (found == tensors.end()) {
      entry.fail("names '" + member + "', which is no parameter of this file");
    }
    if (found->second.dtype != tensor.dtype) {
      entry.fail("has dtype " + std::string(to_string(found->second.dtype)) + ", but '" + name +
                 "' of the same unit has " + std::string(to_string(tensor.dtype)));
    }
    if (found->second.shape.empty()) {
      entry.fail("is a scalar, which FSDP does not shard; give it a mesh");
    }
    if (member == name) {
      if (mine) {
        entry.fail("names '" + member + "' twice");
      }
      mine = shapes.size();
    }
    shapes.push_back(found->second.shape);
  }
  if (!mine) {
    value.fail("has a unit without '" + name + "'; a parameter must be a member of its own unit");
  }
  const FlatUnit flat = flat_unit(shapes, align_elements, ranks.size());
  return {Layout::flat(tensor.shape, tensor.dtype, flat.members[*mine].begin, flat.elements, ranks),
          "flat:" + std::string(unit.front().string())};
}

Layout pieces_of(const JsonReader& value, const std::string& name, const FileTensor& tensor,
                 std::vector<std::string>& buffers) {
  std::vector<Rank> ranks;
  std::vector<RankPiece> pieces;
  for (const auto& [key, list] : value.members()) {
    const Rank rank = layout_json::rank_of_key(value, key);
    ranks.push_back(rank);
    for (const JsonReader& entry : list.items()) {
      entry.allow_keys({"box", "buffer", "offset_bytes", "strides"});
      RankPiece held{rank, {layout_json::box(entry.at("box")), {}}};
      const auto buffer = entry.find("buffer");
      const std::string buffer_name(buffer ? buffer->string() : name);
      const auto slot = std::find(buffers.begin(), buffers.end(), buffer_name);
      held.piece.view.buffer = static_cast<std::uint32_t>(slot - buffers.begin());
      if (slot == buffers.end()) {
        buffers.push_back(buffer_name);
      }
      if (const auto offset = entry.find("offset_bytes")) {
        held.piece.view.offset_bytes = offset->integer_in<std::uint64_t>();
      }
      const auto strides = entry.find("strides");
      held.piece.view.strides =
          strides ? layout_json::dims(*strides) : row_major(held.piece.box.extents());
      pieces.push_back(held);
    }
  }
  return Layout::explicit_pieces(tensor.shape, tensor.dtype, std::move(ranks), std::move(pieces));
}

Side side_of(const JsonReader& value, const std::string& name, FileTensor tensor,
             const FileTensors& tensors, LayoutTable& table) {
  if (const auto dtype = value.find("dtype")) {
    tensor.dtype = dtype_from_string(dtype->string());
  }
  const auto fsdp1 = value.find("fsdp1");
  const auto pieces = value.find("pieces");
  const auto mesh = value.find("mesh");
  if (int{fsdp1.has_value()} + int{pieces.has_value()} + int{mesh.has_value()} != 1) {
    value.fail("needs exactly one of 'mesh' (with 'placements'), 'fsdp1' and 'pieces'");
  }
  Side side;
  if (fsdp1) {
    auto [layout, buffer] = flat_of(*fsdp1, name, tensor, tensors);
    side.layout = table.intern(std::move(layout));
    side.buffers = {std::move(buffer)};
  } else if (pieces) {
    side.layout = table.intern(pieces_of(*pieces, name, tensor, side.buffers));
    if (side.buffers.empty()) {
      side.buffers = {name};
    }
  } else {
    side.layout = table.intern(sharded_of(value, tensor));
    side.buffers = {name};
  }
  return side;
}

/// The blocks of the last dimensions; those before have blocks of one element.
Dims blocks_of(const JsonReader& value, std::size_t rank) {
  const Dims given = layout_json::dims(value);
  if (given.size() > rank) {
    value.fail("has " + std::to_string(given.size()) + " extents for a tensor of " +
               std::to_string(rank) + " dimensions; give at most one a dimension");
  }
  Dims blocks = Dims::filled(rank - given.size(), 1);
  for (const Index extent : given) {
    if (extent < 1) {
      value.fail("has an extent below 1; blocks have 1 or more elements a dimension");
    }
    blocks.push_back(extent);
  }
  return blocks;
}

Quantise quantise_of(const JsonReader& value, std::size_t rank) {
  value.allow_keys({"blocks", "scales"});
  return {blocks_of(value.at("blocks"), rank), std::string(value.at("scales").string())};
}

/// Parameters that hold scales and say nothing of their source hold them as the weights lie.
void place_scales(std::vector<Parameter>& parameters, LayoutTable& table) {
  for (const Parameter& weight : parameters) {
    if (!weight.quantise || weight.quantise->blocks.size() != weight.shape.size()) {
      continue;
    }
    const auto scales = std::find_if(parameters.begin(), parameters.end(), [&](const Parameter& p) {
      return p.name == weight.quantise->scales && !p.source.layout;
    });
    if (scales != parameters.end()) {
      check_scale_shape(weight, *scales);
      scales->source = {table.intern(scales_layout(*weight.source.layout, weight.quantise->blocks)),
                        {scales->name}};
    }
  }
}

}  // namespace

Problem Problem::parse(std::string_view text, const std::string& where) {
  const json::value document = parse_json(text, where);
  const JsonReader root(document, where);
  root.allow_keys({"parameters"});
  const std::vector<JsonReader> entries = root.at("parameters").items();

  FileTensors tensors;
  std::set<std::string, std::less<>> scales;  // names of the parameters that hold them
  for (const JsonReader& entry : entries) {
    entry.allow_keys({"name", "dtype", "shape", "source", "destination"});
    const std::string name(entry.at("name").string());
    const DType dtype = entry.at("dtype").context<DType>(
        [](const JsonReader& value) { return dtype_from_string(value.string()); });
    if (const auto quantise = entry.at("destination").find("quantise")) {
      scales.emplace(quantise->at("scales").string());
    }
    if (!tensors.emplace(name, FileTensor{dtype, layout_json::shape(entry.at("shape"))}).second) {
      entry.fail("declares parameter '" + name + "' a second time; names must be unique");
    }
  }
  LayoutTable table;
  std::vector<Parameter> parameters;
  for (const JsonReader& entry : entries) {
    Parameter parameter;
    parameter.name = entry.at("name").string();
    const FileTensor& tensor = tensors.find(parameter.name)->second;
    parameter.shape = tensor.shape;
    const auto read_side = [&](const char* key, std::initializer_list<std::string_view> keys) {
      const JsonReader side = entry.at(key);
      side.allow_keys(keys);
      try {
        return side_of(side, parameter.name, tensor, tensors, table);
      } catch (const JsonError&) {
        throw;  // says where it is already
      } catch (const Error& error) {
        throw Error(error.code(),
                    where + ": " + key + " of parameter '" + parameter.name + "': " + error.what());
      }
    };
    if (!scales.contains(parameter.name) || entry.find("source")) {
      parameter.source = read_side("source", {"mesh", "placements", "fsdp1", "pieces", "dtype"});
    }
    parameter.destination = read_side(
        "destination", {"mesh", "placements", "fsdp1", "pieces", "dtype", "cast", "quantise"});
    if (const auto quantise = entry.at("destination").find("quantise")) {
      parameter.quantise = quantise_of(*quantise, parameter.shape.size());
    }
    if (const auto cast = entry.at("destination").find("cast")) {
      parameter.cast = cast->boolean();
    }
    parameters.push_back(std::move(parameter));
  }
  try {
    place_scales(parameters, table);
    return make(std::move(parameters));
  } catch (const Error& error) {
    throw Error(error.code(), where + ": " + error.what());
  }
}

Problem Problem::read(const std::filesystem::path& file) {
  return parse(read_text_file(file), file.string());
}

}  // namespace m2n
