// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/sources/harness.hpp"

#include <algorithm>
#include <cstring>
#include <iostream>
#include <map>
#include <set>
#include <stdexcept>

#include "core/api/builtin.hpp"

namespace m2n::testing {

namespace {

std::size_t number_of(const Catalogue& catalogue, std::string_view name) {
  for (std::size_t i = 0; i < catalogue.size(); ++i) {
    if (catalogue[i].name == name) {
      return i;
    }
  }
  throw std::logic_error("no tensor " + std::string(name));
}

/// Elements of a box with their place in the tensor.
void for_each_in(const Shape& shape, const Box& box,
                 const std::function<void(const Dims&, Index)>& body) {
  for_each_index(box.extents(), [&](const Dims& at, Index) {
    Index flat = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      flat = flat * shape[d] + box.lo[d] + at[d];
    }
    body(at, flat);
  });
}

Index offset_of(const Dims& at, const Strides& strides) {
  Index offset = 0;
  for (std::size_t d = 0; d < at.size(); ++d) {
    offset += at[d] * strides[d];
  }
  return offset;
}

std::uint64_t load(const std::byte* data, std::uint64_t item) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, data, item);  // little-endian
  return bits;
}

}  // namespace

std::uint64_t TellingValues::bits(std::uint64_t number, Index index, std::uint64_t item_bytes) {
  const std::uint64_t half = item_bytes * 4;
  if (number + 1 >= std::uint64_t{1} << half ||
      static_cast<std::uint64_t>(index) >= std::uint64_t{1} << half) {
    throw std::logic_error("too many elements for telling values");
  }
  return (number + 1) << half | static_cast<std::uint64_t>(index);
}

void TellingValues::read(std::string_view tensor, const Box& box, std::byte* data,
                         const Strides& strides) const {
  const std::size_t number = number_of(catalogue_, tensor);
  const std::uint64_t item = bytes_of(catalogue_[number].dtype);
  for_each_in(catalogue_[number].shape, box, [&](const Dims& at, Index flat) {
    const std::uint64_t value = bits(number, flat, item);
    std::memcpy(data + offset_of(at, strides) * static_cast<Index>(item), &value, item);
  });
}

Trainers::Trainers(const std::string& kind, const Options& options, Rank count,
                   const Catalogue& tensors)
    : catalogue(tensors) {
  const auto values = std::make_shared<TellingValues>(tensors);
  const Registries registries = builtin_registries();
  for (Rank rank = 0; rank < count; ++rank) {
    ranks.push_back(registries.sources.create(
        kind,
        {.options = options, .rank = rank, .ranks = count, .values = values, .declared = {}}));
  }
}

const ParamSpec& Trainers::param(const std::string& name) const {
  for (const auto& spec : ranks.front()->params()) {
    if (spec.name == name) {
      return spec;
    }
  }
  throw std::logic_error("no parameter " + name);
}

Picture Trainers::picture(Rank rank, const std::string& name) {
  const auto loans = ranks[static_cast<std::size_t>(rank)]->borrow(1);
  for (const auto& loan : loans) {
    if (loan.name != name) {
      continue;
    }
    const LocalBuffer& buffer = loan.slots.at(0);
    const std::uint64_t item = bytes_of(loan.dtype);
    const std::uint64_t half = item * 4;
    std::uint64_t pad = 0;
    std::memset(&pad, 0x2a, item);
    Picture picture;
    for (std::uint64_t at = 0; at + item <= buffer.bytes; at += item) {
      const std::uint64_t bits = load(buffer.data + at, item);
      picture.push_back(bits == pad ? "-"
                                    : catalogue.at((bits >> half) - 1).name +
                                          std::to_string(bits & ((std::uint64_t{1} << half) - 1)));
    }
    return picture;
  }
  throw std::logic_error("no loan " + name);
}

std::vector<Index> Trainers::held(Rank rank, const std::string& name) const {
  const ParamSpec& spec = param(name);
  std::vector<Index> indices;
  for (const auto& entry : spec.side.layout->pieces_of(rank)) {
    for_each_in(spec.shape, entry.piece.box,
                [&](const Dims&, Index flat) { indices.push_back(flat); });
  }
  std::sort(indices.begin(), indices.end());
  return indices;
}

std::vector<Index> Trainers::rows(Rank rank, const std::string& name, std::size_t d) const {
  std::set<Index> found;
  for (const auto& entry : param(name).side.layout->pieces_of(rank)) {
    for (Index i = entry.piece.box.lo[d]; i < entry.piece.box.hi[d]; ++i) {
      found.insert(i);
    }
  }
  return {found.begin(), found.end()};
}

Picture elements(const std::string& name, const std::vector<Index>& indices) {
  Picture picture;
  for (const Index index : indices) {
    picture.push_back(name + std::to_string(index));
  }
  return picture;
}

Picture operator+(Picture a, const Picture& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Picture padding(std::size_t count) { return Picture(count, "-"); }

std::vector<Index> range(Index begin, Index end) {
  std::vector<Index> list;
  for (Index i = begin; i < end; ++i) {
    list.push_back(i);
  }
  return list;
}

std::vector<Index> chunk_list(const std::vector<Index>& list, Index parts, Index i) {
  const std::size_t count = static_cast<std::size_t>(parts);
  const std::size_t size = (list.size() + count - 1) / count;
  std::vector<Index> rest = list;
  for (Index part = 0;; ++part) {
    const std::size_t take = std::min(size, rest.size());
    if (part == i) {
      rest.resize(take);
      return rest;
    }
    rest.erase(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(take));
  }
}

void for_each_index(const Shape& shape, const std::function<void(const Dims&, Index)>& body) {
  const Index count = element_count(shape);
  Dims at = Dims::filled(shape.size(), 0);
  for (Index flat = 0; flat < count; ++flat) {
    body(at, flat);
    for (std::size_t d = shape.size(); d-- > 0;) {
      if (++at[d] < shape[d]) {
        break;
      }
      at[d] = 0;
    }
  }
}

std::string breach(Trainers& trainers) {
  const auto& specs = trainers.ranks.front()->params();
  std::map<std::string, const Layout*> by_text;
  for (const auto& spec : specs) {
    const auto [at, added] =
        by_text.emplace(spec.side.layout->canonical_json(), spec.side.layout.get());
    if (!added && at->second != spec.side.layout.get()) {
      return spec.name + " has a layout of its own that equals another's";
    }
    std::vector<bool> covered(static_cast<std::size_t>(element_count(spec.shape)), false);
    for (const auto& entry : spec.side.layout->pieces()) {
      if (entry.rank < 0 || static_cast<std::size_t>(entry.rank) >= trainers.ranks.size()) {
        return spec.name + " has a piece on rank " + std::to_string(entry.rank);
      }
      for_each_in(spec.shape, entry.piece.box,
                  [&](const Dims&, Index flat) { covered[static_cast<std::size_t>(flat)] = true; });
    }
    if (std::find(covered.begin(), covered.end(), false) != covered.end()) {
      return spec.name + " has an element that nobody holds";
    }
  }
  for (std::size_t rank = 0; rank < trainers.ranks.size(); ++rank) {
    WeightSource& source = *trainers.ranks[rank];
    if (source.params().size() != specs.size()) {
      return "rank " + std::to_string(rank) + " offers another number of parameters";
    }
    const auto loans = source.borrow(1);
    std::map<const std::byte*, std::vector<bool>> used;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const ParamSpec& spec = source.params()[i];
      const std::string where = spec.name + " on rank " + std::to_string(rank);
      if (spec.name != specs[i].name || spec.dtype != specs[i].dtype ||
          spec.shape != specs[i].shape || !(*spec.side.layout == *specs[i].side.layout) ||
          spec.side.buffers != specs[i].side.buffers) {
        return where + " differs from rank 0";
      }
      if (loans[i].name != spec.name || loans[i].dtype != spec.dtype ||
          loans[i].shape != spec.shape || loans[i].slots.size() != spec.side.buffers.size()) {
        return where + " is lent as something else";
      }
      const std::uint64_t item = bytes_of(spec.dtype);
      const std::size_t number = number_of(trainers.catalogue, spec.name);
      std::string wrong;
      for (const auto& [owner, piece] : spec.side.layout->pieces_of(static_cast<Rank>(rank))) {
        const LocalBuffer& buffer = loans[i].slots[piece.view.buffer];
        auto& bytes = used[buffer.data];
        bytes.resize(buffer.bytes, false);
        for_each_in(spec.shape, piece.box, [&](const Dims& at, Index flat) {
          const Index address = static_cast<Index>(piece.view.offset_bytes) +
                                offset_of(at, piece.view.strides) * static_cast<Index>(item);
          if (address < 0 || static_cast<std::uint64_t>(address) + item > buffer.bytes) {
            wrong = where + " reaches outside its buffer";
            return;
          }
          if (bytes[static_cast<std::size_t>(address)]) {
            wrong = where + " shares an address";
          }
          for (std::uint64_t b = 0; b < item; ++b) {
            bytes[static_cast<std::size_t>(address) + b] = true;
          }
          if (load(buffer.data + address, item) != TellingValues::bits(number, flat, item)) {
            wrong = where + " has another value at element " + std::to_string(flat);
          }
        });
        if (!wrong.empty()) {
          return wrong;
        }
      }
    }
  }
  return {};
}

bool refuses(const std::string& kind, const Options& options, Rank ranks,
             const Catalogue& catalogue, Errc code, const std::string& part) {
  try {
    const Trainers trainers(kind, options, ranks, catalogue);
    std::cerr << "nothing was refused where '" << part << "' was expected\n";
  } catch (const Error& error) {
    if (error.code() == code && std::string(error.what()).find(part) != std::string::npos) {
      return true;
    }
    std::cerr << to_string(error.code()) << ": " << error.what() << "\n  instead of '" << part
              << "'\n";
  }
  return false;
}

}  // namespace m2n::testing
