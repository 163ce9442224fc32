// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/dump_columns.hpp"

#include <boost/json.hpp>

#include "core/error.hpp"

namespace m2n {

void add_checksum(const h5::Dataset& dataset, const h5::Checksum& checksum) {
  const std::uint64_t value = checksum.value();
  h5::write_attribute(h5::owner_of(dataset), "checksum", DType::u64, {}, &value);
}

void write_dtype(const h5::Owner& owner, DType dtype) {
  const auto number = static_cast<std::uint8_t>(dtype);
  h5::write_attribute(owner, "dtype", std::string(to_string(dtype)));
  h5::write_attribute(owner, "dtype_number", DType::u8, {}, &number);
}

void write_text(const h5::File& file, const std::string& path, std::string_view text) {
  static constexpr char kNul = '\0';
  const std::string_view bytes = text.empty() ? std::string_view(&kNul, 1) : text;
  const h5::Dataset dataset = h5::create_dataset(file, path, h5::text_type(bytes.size()), Shape{});
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  h5::write_box(dataset, Box{}, data);
  h5::Checksum checksum;
  checksum.add(data, bytes.size());
  add_checksum(dataset, checksum);
}

std::string json_list(const std::vector<std::string>& names) {
  boost::json::array list;
  for (const std::string& name : names) {
    list.emplace_back(name);
  }
  return boost::json::serialize(list);
}

std::string dump_path_of(std::string_view name) {
  if (name.empty()) {
    return "%";  // never the escape of anything else
  }
  std::string out;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const auto byte = static_cast<unsigned char>(name[i]);
    if (byte < 0x20 || byte == 0x7f || byte == '/' || byte == '%' || (byte == '.' && i == 0)) {
      constexpr std::string_view kDigits = "0123456789ABCDEF";
      out += '%';
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    } else {
      out += name[i];
    }
  }
  return out;
}

std::string name_of_dump_path(std::string_view path) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
  };
  if (path == "%") {
    return "";
  }
  std::string out;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (path[i] == '%' && i + 2 < path.size() && digit(path[i + 1]) >= 0 &&
        digit(path[i + 2]) >= 0) {
      out += static_cast<char>(digit(path[i + 1]) * 16 + digit(path[i + 2]));
      i += 2;
    } else {
      out += path[i];
    }
  }
  return out;
}

std::uint32_t LayoutNumbers::number_of(const Layout& layout) {
  const auto [known, is_new] = by_pointer_.try_emplace(&layout, 0);
  if (is_new) {
    const auto next = static_cast<std::uint32_t>(by_text_.size());
    const auto [entry, inserted] = by_text_.try_emplace(layout.canonical_json(), next);
    known->second = entry->second;
    if (inserted) {
      json_ += next == 0 ? "\n" : ",\n";
      ranges_.emplace_back(json_.size(), json_.size() + entry->first.size());
      json_ += entry->first;
    }
  }
  return known->second;
}

std::string problem_digest(const Problem& problem, LayoutNumbers& layouts) {
  std::string identity;
  for (const Parameter& parameter : problem.parameters()) {
    const std::uint32_t source = layouts.number_of(*parameter.source.layout);
    const std::uint32_t destination = layouts.number_of(*parameter.destination.layout);
    identity += dump_path_of(parameter.name) + " " + std::to_string(source) + " " +
                std::to_string(destination) + (parameter.cast ? " 1 " : " 0 ") +
                json_list(parameter.source.buffers) + " " +
                json_list(parameter.destination.buffers) +
                (parameter.quantise ? " " + to_string(parameter.quantise->blocks) + " " +
                                          dump_path_of(parameter.quantise->scales)
                                    : "") +
                "\n";
  }
  return sha256_hex(identity + layouts.json());
}

}  // namespace m2n
