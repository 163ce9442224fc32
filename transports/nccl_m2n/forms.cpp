// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_m2n/forms.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "core/error.hpp"
#include "transports/common/parts.hpp"

namespace m2n::nccl_m2n {
namespace {

constexpr std::size_t kMaxTensorRank = 3;

class Refusal {
 public:
  explicit Refusal(const Parameter& parameter) : parameter_(parameter) {}

  [[noreturn]] void operator()(const std::string& why, const std::string& right) const {
    throw Error(Errc::unavailable, "transport 'nccl_m2n' cannot move parameter '" +
                                       parameter_.name + "': " + why + ", expected " + right +
                                       "; transport 'nccl' moves it");
  }

 private:
  const Parameter& parameter_;
};

std::string list(const std::set<std::size_t>& numbers) {
  std::string text;
  for (const std::size_t n : numbers) {
    text += (text.empty() ? "" : " and ") + std::to_string(n);
  }
  return text;
}

/// One piece a rank, of equal size, compact, over an interval of ranks.
void require_plain_pieces(const std::string& side, const Layout& layout, const Refusal& refuse) {
  const std::vector<Rank>& ranks = layout.ranks();
  if (layout.pieces().empty()) {
    refuse("no rank of its " + side + " holds anything of it", "one piece a rank");
  }
  if (ranks.back() - ranks.front() + 1 != static_cast<Rank>(ranks.size())) {
    refuse("the ranks of its " + side + " are not contiguous (from " +
               std::to_string(ranks.front()) + " to " + std::to_string(ranks.back()) +
               " there are " + std::to_string(ranks.size()) + ")",
           "an interval of ranks");
  }
  const Shape extents = layout.pieces().front().piece.box.extents();
  for (const Rank rank : ranks) {
    const auto pieces = layout.pieces_of(rank);
    if (pieces.size() != 1) {
      refuse("rank " + std::to_string(rank) + " of its " + side + " holds " +
                 (pieces.empty() ? "nothing" : std::to_string(pieces.size()) + " pieces") +
                 " of it",
             "one piece a rank, all of one size");
    }
    const Piece& piece = pieces.front().piece;
    if (piece.box.extents() != extents) {
      refuse("its " + side + " is sharded unevenly (rank " + std::to_string(rank) +
                 " holds a part of another size than rank " + std::to_string(ranks.front()) + ")",
             "parts of one size");
    }
    if (!is_compact(piece)) {
      refuse("rank " + std::to_string(rank) + " of its " + side +
                 " holds it as a strided view of a larger or transposed buffer",
             "a compact row-major tensor a rank");
    }
  }
}

SideForm side_form(const std::string& side, const Layout& layout, const Refusal& refuse) {
  require_plain_pieces(side, layout, refuse);
  const Shape& shape = layout.shape();
  const Shape extents = layout.pieces().front().piece.box.extents();
  SideForm form;
  form.start = layout.ranks().front();
  std::set<std::size_t> sharded;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    form.local_shape.push_back(static_cast<std::size_t>(extents[d]));
    if (extents[d] != shape[d]) {
      sharded.insert(d);
    }
  }
  if (form.local_shape.empty()) {
    form.local_shape.push_back(1);
  }
  if (sharded.size() > 1) {
    refuse("its " + side + " is sharded along dimensions " + list(sharded),
           "one sharded dimension a side");
  }
  const auto count = static_cast<int>(layout.ranks().size());
  if (sharded.empty()) {
    form.replicas = count;
    form.dims = {count};
    form.placements = {kReplicate};
    return form;
  }
  const std::size_t d = *sharded.begin();
  form.shard_dim = static_cast<int>(d);
  form.shards = static_cast<int>(shape[d] / extents[d]);
  form.replicas = count / form.shards;
  std::vector<int> shard_at;  // [position of the rank]
  bool even = shape[d] % extents[d] == 0 && count % form.shards == 0;
  for (const RankPiece& piece : layout.pieces()) {
    const Index begin = piece.piece.box.lo[d];
    even = even && begin % extents[d] == 0;
    shard_at.push_back(static_cast<int>(begin / extents[d]));
  }
  if (!even) {
    refuse("its " + side + " is sharded unevenly along dimension " + std::to_string(d),
           "an extent that the shards divide");
  }
  const auto follows = [&](bool shard_axis_first) {
    for (std::size_t i = 0; i < shard_at.size(); ++i) {
      const auto position = static_cast<int>(i);
      if (shard_at[i] != (shard_axis_first ? position / form.replicas : position % form.shards)) {
        return false;
      }
    }
    return true;
  };
  const bool inner = follows(false);
  if (!inner && !follows(true)) {
    refuse("the shards of its " + side + " do not follow one another over the ranks",
           "shards in ascending order, and replicas as a second mesh axis");
  }
  form.shard_axis_first = !inner;
  if (form.replicas == 1) {
    form.dims = {form.shards};
    form.placements = {form.shard_dim};
  } else if (inner) {
    form.dims = {form.replicas, form.shards};
    form.placements = {kReplicate, form.shard_dim};
  } else {
    form.dims = {form.shards, form.replicas};
    form.placements = {form.shard_dim, kReplicate};
  }
  return form;
}

/// Elements of the sharded dimension that shards @p i and @p j have in common; of the whole tensor
/// in 1 / (shards of both) where the dimensions differ.
std::uint64_t common_bytes(const Form& form, int i, int j) {
  const SideForm& s = form.source;
  const SideForm& d = form.destination;
  std::uint64_t bytes = bytes_of(form.dtype);
  for (const std::size_t extent : form.shape) {
    bytes *= extent;
  }
  if (s.shards == 1 || d.shards == 1 || s.shard_dim != d.shard_dim) {
    return bytes / static_cast<std::uint64_t>(s.shards) / static_cast<std::uint64_t>(d.shards);
  }
  const std::size_t extent = form.shape[static_cast<std::size_t>(s.shard_dim)];
  const auto part = [&](int index, int shards) {
    const std::size_t size = extent / static_cast<std::size_t>(shards);
    return std::pair{size * static_cast<std::size_t>(index),
                     size * static_cast<std::size_t>(index + 1)};
  };
  const auto [a, b] = part(i, s.shards);
  const auto [c, e] = part(j, d.shards);
  const std::size_t lo = std::max(a, c);
  const std::size_t hi = std::min(b, e);
  return hi > lo ? bytes / extent * (hi - lo) : 0;
}

/// The source replica that serves a destination replica.
int server_of(const Form& form, int replica) {
  const int sources = form.source.replicas;
  const int targets = form.destination.replicas;
  return sources > targets ? replica : replica * sources / targets;
}

void require_caps(const Form& form, const Caps& caps, const Refusal& refuse) {
  const SideForm& s = form.source;
  const SideForm& d = form.destination;
  for (int j = 0; j < d.shards; ++j) {
    int sources = 0;
    for (int i = 0; i < s.shards; ++i) {
      sources += common_bytes(form, i, j) > 0 ? 1 : 0;
    }
    if (sources > caps.sources) {
      refuse("a destination shard of it comes from " + std::to_string(sources) + " source shards",
             "at most " + std::to_string(caps.sources));
    }
  }
  std::vector<int> served(static_cast<std::size_t>(s.replicas), 0);
  for (int q = 0; q < d.replicas; ++q) {
    ++served[static_cast<std::size_t>(server_of(form, q))];
  }
  const int most = *std::max_element(served.begin(), served.end());
  for (int i = 0; i < s.shards; ++i) {
    int targets = 0;
    for (int j = 0; j < d.shards; ++j) {
      targets += common_bytes(form, i, j) > 0 ? most : 0;
    }
    if (targets > caps.targets) {
      refuse("a source rank of it sends to " + std::to_string(targets) + " ranks",
             "at most " + std::to_string(caps.targets));
    }
  }
  for (const SideForm* side : {&s, &d}) {
    std::uint64_t bytes = bytes_of(form.dtype);
    for (const std::size_t extent : side->local_shape) {
      bytes *= extent;
    }
    if (bytes > caps.staging_bytes) {
      refuse("a rank holds " + std::to_string(bytes) +
                 " bytes of it, and the library stages whole "
                 "tensors in buffers of " +
                 std::to_string(caps.staging_bytes) + " bytes",
             "option staging=BYTES:SLOTS with as many bytes, or smaller shards");
    }
  }
}

}  // namespace

int SideForm::shard_of(Rank rank) const {
  const int position = rank - start;
  return shard_axis_first ? position / replicas : position % shards;
}

Rank SideForm::rank_of(int shard, int replica) const {
  return start + (shard_axis_first ? shard * replicas + replica : replica * shards + shard);
}

std::string Form::pattern() const {
  std::string text = std::to_string(shape.size());
  for (const SideForm* side : {&source, &destination}) {
    text += " from " + std::to_string(side->start);
    for (std::size_t i = 0; i < side->dims.size(); ++i) {
      text += " " + std::to_string(side->dims[i]) + ":" + std::to_string(side->placements[i]);
    }
  }
  return text;
}

Form Form::miniature() const {
  Form small = *this;
  small.dtype = DType::u8;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::size_t extent = d + 1 == shape.size() ? 64 : 1;
    for (const SideForm* side : {&source, &destination}) {
      if (side->shards > 1 && side->shard_dim == static_cast<int>(d)) {
        extent *= static_cast<std::size_t>(side->shards);
      }
    }
    small.shape[d] = extent;
  }
  for (SideForm* side : {&small.source, &small.destination}) {
    side->local_shape = small.shape;
    if (side->shards > 1) {
      side->local_shape[static_cast<std::size_t>(side->shard_dim)] /=
          static_cast<std::size_t>(side->shards);
    }
  }
  return small;
}

Form express(const Problem& problem, std::uint32_t parameter, const Caps& caps) {
  const Parameter& p = problem.parameters().at(parameter);
  const Refusal refuse(p);
  if (p.source_dtype() != p.destination_dtype()) {
    refuse("its source is " + std::string(to_string(p.source_dtype())) + " and its destination " +
               std::string(to_string(p.destination_dtype())),
           "one dtype on both sides, since the library does not cast");
  }
  if (p.shape.size() > kMaxTensorRank) {
    refuse("it has " + std::to_string(p.shape.size()) + " dimensions",
           "at most " + std::to_string(kMaxTensorRank));
  }
  if (element_count(p.shape) == 0) {
    refuse("it has no elements", "an extent of at least 1 in every dimension");
  }
  Form form;
  form.parameter = parameter;
  form.dtype = p.source_dtype();
  for (const Index extent : p.shape) {
    form.shape.push_back(static_cast<std::size_t>(extent));
  }
  if (form.shape.empty()) {
    form.shape.push_back(1);
  }
  form.source = side_form("source", *p.source.layout, refuse);
  form.destination = side_form("destination", *p.destination.layout, refuse);
  if (form.source.start < form.destination.start + form.destination.count() &&
      form.destination.start < form.source.start + form.source.count()) {
    refuse("rank " + std::to_string(std::max(form.source.start, form.destination.start)) +
               " is on both sides",
           "source and destination ranks without overlap");
  }
  require_caps(form, caps, refuse);
  return form;
}

LocalPlace local_place(const Problem& problem, std::uint32_t parameter, Role role, Rank rank) {
  const Parameter& p = problem.parameters().at(parameter);
  const Side& side = role == Role::source ? p.source : p.destination;
  const View& view = side.layout->pieces_of(rank).front().piece.view;
  return {problem.buffers(role).of_parameter[parameter][view.buffer], view.offset_bytes};
}

void add_traffic(const Form& form, std::map<std::pair<Rank, Rank>, std::uint64_t>& traffic) {
  for (int q = 0; q < form.destination.replicas; ++q) {
    const int server = server_of(form, q);
    for (int j = 0; j < form.destination.shards; ++j) {
      for (int i = 0; i < form.source.shards; ++i) {
        if (const std::uint64_t bytes = common_bytes(form, i, j)) {
          traffic[{form.source.rank_of(i, server), form.destination.rank_of(j, q)}] += bytes;
        }
      }
    }
  }
}

}  // namespace m2n::nccl_m2n
