// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Schedules of broadcasts: see schedule.hpp.

#include <algorithm>
#include <set>

#include "core/error.hpp"
#include "transports/common/parts.hpp"
#include "transports/nccl_reference/schedule.hpp"

namespace m2n::nccl_reference {
namespace {

/// True when the box, row-major, is one run of the tensor, row-major.
bool is_run(const Shape& shape, const Box& box) {
  bool partial = false;  // a dimension outside has more than one index
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (partial && box[d].size() != shape[d]) {
      return false;
    }
    partial = partial || box[d].size() > 1;
  }
  return true;
}

class Broadcasts {
 public:
  Broadcasts(const Program& program, std::uint64_t pack_bytes)
      : problem_(*program.problem), me_(program.rank), pack_bytes_(pack_bytes) {
    root_ = problem_.source_ranks().front();
    std::set<Rank> members(problem_.destination_ranks().begin(),
                           problem_.destination_ranks().end());
    receives_ = members.contains(me_);
    members.insert(root_);
    out_.root = root_;
    out_.members.assign(members.begin(), members.end());
  }

  Schedule make(const std::vector<std::uint32_t>& parameters) && {
    for (const std::uint32_t parameter : parameters) {
      const Parameter& p = problem_.parameters()[parameter];
      if (p.source_dtype() != p.destination_dtype()) {
        throw Error(Errc::unavailable,
                    "transport 'nccl_reference' does not cast, and parameter '" + p.name +
                        "' goes from " + std::string(to_string(p.source_dtype())) + " to " +
                        std::string(to_string(p.destination_dtype())) +
                        ", expected one dtype on both sides; transport 'nccl' casts");
      }
      const std::uint64_t bytes = p.bytes();
      if (bytes == 0) {
        continue;
      }
      if (used_ > 0 && used_ + bytes > pack_bytes_) {
        close();
      }
      add(parameter, p);
    }
    close();
    return std::move(out_);
  }

 private:
  Place place(Role role, std::uint32_t parameter, const View& view) const {
    return {role == Role::source ? Area::source : Area::destination,
            problem_.buffers(role).of_parameter[parameter][view.buffer], view.offset_bytes};
  }

  /// Pieces that together hold what the sources hold, the root's first.
  std::vector<const RankPiece*> chosen_pieces(const Layout& layout) const {
    std::vector<const RankPiece*> all;
    for (const RankPiece& piece : layout.pieces()) {
      all.push_back(&piece);
    }
    std::stable_partition(all.begin(), all.end(),
                          [&](const RankPiece* piece) { return piece->rank == root_; });
    std::vector<const RankPiece*> chosen;
    for (const RankPiece* piece : all) {
      const bool known = std::any_of(chosen.begin(), chosen.end(), [&](const RankPiece* other) {
        return other->piece.box.contains(piece->piece.box);
      });
      if (!known) {
        chosen.push_back(piece);
      }
    }
    return chosen;
  }

  /// The elements of a box of the tensor that lies whole at @p whole: where, and its strides.
  static Place within(const Place& whole, const Parameter& p, const Box& box) {
    Index first = 0;
    const Strides strides = row_major(p.shape);
    for (std::size_t d = 0; d < p.shape.size(); ++d) {
      first += box.lo[d] * strides[d];
    }
    Place at = whole;
    at.offset_bytes += static_cast<std::uint64_t>(first) * bytes_of(p.source_dtype());
    return at;
  }

  void add(std::uint32_t parameter, const Parameter& p) {
    const std::uint64_t item = bytes_of(p.source_dtype());
    const Strides strides = row_major(p.shape);
    const auto chosen = chosen_pieces(*p.source.layout);
    const auto own = p.destination.layout->pieces_of(me_);
    Place whole{Area::full, 0, used_};
    if (pack_bytes_ == 0 && me_ == root_ && chosen.size() == 1 && chosen[0]->rank == root_ &&
        chosen[0]->piece.box == Box::whole(p.shape) && is_compact(chosen[0]->piece)) {
      whole = place(Role::source, parameter, chosen[0]->piece.view);
    } else if (pack_bytes_ == 0 && me_ != root_ && own.size() == 1 &&
               own[0].piece.box == Box::whole(p.shape) && is_compact(own[0].piece)) {
      whole = place(Role::destination, parameter, own[0].piece.view);
    }
    for (const RankPiece* piece : chosen) {
      gather(parameter, p, *piece, whole);
    }
    if (receives_) {
      for (const RankPiece& piece : own) {
        const Place to = place(Role::destination, parameter, piece.piece.view);
        const Place from = within(whole, p, piece.piece.box);
        if (!(from == to)) {
          step_.unpack.push_back(
              {simplify({piece.piece.box.extents(), strides, piece.piece.view.strides,
                         p.source_dtype(), p.source_dtype()}),
               from, to});
        }
        if (me_ == root_) {
          out_.copied_bytes += static_cast<std::uint64_t>(piece.piece.box.volume()) * item;
        }
      }
    }
    if (whole.area != Area::full) {
      step_.whole = whole;
    }
    used_ += aligned(p.bytes());
    if (pack_bytes_ == 0) {
      payload_ = p.bytes();
      close();
    }
  }

  /// One piece on its way to the root.
  void gather(std::uint32_t parameter, const Parameter& p, const RankPiece& piece,
              const Place& whole) {
    const Shape extents = piece.piece.box.extents();
    const Strides strides = row_major(p.shape);
    const DType dtype = p.source_dtype();
    const std::uint64_t bytes =
        static_cast<std::uint64_t>(piece.piece.box.volume()) * bytes_of(dtype);
    const Place from = place(Role::source, parameter, piece.piece.view);
    if (piece.rank == root_) {
      if (me_ == root_ && whole.area == Area::full) {
        step_.pack.push_back({simplify({extents, piece.piece.view.strides, strides, dtype, dtype}),
                              from, within(whole, p, piece.piece.box)});
      }
      return;
    }
    if (me_ == piece.rank) {
      Place at = from;
      if (!is_compact(piece.piece)) {
        at = {Area::outgoing, 0, outgoing_};
        outgoing_ += aligned(bytes);
        step_.pack.push_back(
            {simplify({extents, piece.piece.view.strides, row_major(extents), dtype, dtype}), from,
             at});
      }
      step_.sends.push_back({root_, at, bytes});
      out_.traffic[{me_, root_}] += bytes;
    } else if (me_ == root_) {
      Place at = within(whole, p, piece.piece.box);
      if (!is_run(p.shape, piece.piece.box)) {
        const Place to = at;
        at = {Area::incoming, 0, incoming_};
        incoming_ += aligned(bytes);
        step_.gather.push_back(
            {simplify({extents, row_major(extents), strides, dtype, dtype}), at, to});
      }
      step_.receives.push_back({piece.rank, at, bytes});
      out_.traffic[{piece.rank, root_}] += bytes;
    }
  }

  /// Ends a step.
  void close() {
    if (used_ == 0) {
      return;
    }
    const std::uint64_t bytes = payload_ > 0 ? payload_ : used_;
    const bool member = std::binary_search(out_.members.begin(), out_.members.end(), me_);
    if (member && out_.members.size() > 1) {
      step_.broadcast_bytes = bytes;
      for (const Rank worker : out_.members) {
        if (worker != root_ && (me_ == root_ || me_ == worker)) {
          out_.traffic[{root_, worker}] += bytes;
        }
      }
    }
    if (member && step_.whole.area == Area::full) {
      out_.full_bytes = std::max(out_.full_bytes, used_);
    }
    out_.outgoing_bytes = std::max(out_.outgoing_bytes, outgoing_);
    out_.incoming_bytes = std::max(out_.incoming_bytes, incoming_);
    if (!step_.empty()) {
      out_.steps.push_back(std::move(step_));
    }
    step_ = Step{};
    step_.whole = {Area::full, 0, 0};
    used_ = payload_ = outgoing_ = incoming_ = 0;
  }

  const Problem& problem_;
  Rank me_;
  std::uint64_t pack_bytes_;
  Rank root_ = 0;
  bool receives_ = false;
  Schedule out_;
  Step step_ = [] {
    Step step;
    step.whole = {Area::full, 0, 0};
    return step;
  }();
  std::uint64_t used_ = 0;     ///< Of the pack, with gaps.
  std::uint64_t payload_ = 0;  ///< Of one tensor that goes alone.
  std::uint64_t outgoing_ = 0;
  std::uint64_t incoming_ = 0;
};

}  // namespace

Schedule by_broadcast(const Program& program, std::uint64_t pack_bytes) {
  if (program.problem == nullptr) {
    throw Error(Errc::bad_argument,
                "transport 'nccl_reference' needs the layouts of what it broadcasts, and this "
                "program has no problem; expected one of make_program()");
  }
  return Broadcasts(program, pack_bytes).make(program.parameters);
}

}  // namespace m2n::nccl_reference
