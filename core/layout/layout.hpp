// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Layouts: which rank holds which boxes of one tensor, and where in its buffers.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/layout/mesh.hpp"
#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"
#include "core/tensor/view.hpp"

namespace m2n {

/// A piece and the rank that holds it.
struct RankPiece {
  Rank rank = 0;
  Piece piece;

  friend auto operator<=>(const RankPiece&, const RankPiece&) = default;
};

/// The local tensor of one rank without anything around it: what a dump stores.
struct CompactShard {
  Shape local_shape;          ///< The grid of the rank's boxes, or [elements] when they form none.
  std::vector<Piece> pieces;  ///< As in the layout, but each view lies in the compact tensor.
};

/// Who holds what of one tensor. Immutable, cheap to share, independent of names: a view's buffer
/// is a slot; the names of the slots stand beside the layout (Side::buffers).
///
/// Sizes: pieces() has one entry a (rank, box); empty pieces are not stored, but the ranks that
/// hold nothing are known (ranks()). Pieces are sorted by rank, and keep their order inside it.
class Layout {
 public:
  /// The mesh applied left to right (PyTorch DTensor semantics): each axis with Shard(d) replaces
  /// the rank's index list of d by its torch.chunk part; StridedShard(d, f) cuts the list into f
  /// parts and takes the rank's chunk of each; Replicate keeps it. The local tensor is compact and
  /// row-major over the index lists, in slot 0.
  /// @throws Error{bad_argument} when the placements do not match the mesh or the tensor (one a
  ///         mesh axis, dim inside the rank, split factor at least 1).
  static Layout sharded(const Shape& shape, DType dtype, const Mesh& mesh,
                        const std::vector<Placement>& placements);

  /// A slice of an FSDP1 flat parameter. The unit's flat buffer has @p flat_elements elements, cut
  /// like torch.chunk over @p ranks; this tensor is its elements [begin, begin + element count).
  /// Views lie in slot 0, the rank's part of the flat buffer. The compact shard is 1-D.
  static Layout flat(const Shape& shape, DType dtype, Index begin, Index flat_elements,
                     const std::vector<Rank>& ranks);

  /// Explicit pieces. @p ranks lists every rank of the side, also those that hold nothing.
  /// @throws Error{bad_argument} when a box leaves the shape, or a view starts before its buffer.
  static Layout explicit_pieces(const Shape& shape, DType dtype, std::vector<Rank> ranks,
                                std::vector<RankPiece> pieces);

  const Shape& shape() const noexcept { return shape_; }
  DType dtype() const noexcept { return dtype_; }
  /// Sorted, without repeats.
  const std::vector<Rank>& ranks() const noexcept { return ranks_; }
  std::span<const RankPiece> pieces() const noexcept { return pieces_; }
  std::span<const RankPiece> pieces_of(Rank rank) const;
  /// The rank of each piece, densely, for loops over many.
  const std::vector<Rank>& piece_ranks() const noexcept { return piece_ranks_; }
  /// Slots in use: one more than the largest View::buffer.
  std::uint32_t slot_count() const noexcept { return slot_count_; }

  /// True for meshes and flat buffers: the ranks together hold every element.
  bool covers_by_design() const noexcept { return flat_ || !mesh_.empty(); }
  /// True for meshes and flat buffers: no two elements of a rank share an address.
  bool compact_by_design() const noexcept { return flat_ || !mesh_.empty(); }

  /// Shape of the rank's compact local tensor, and its pieces there (see CompactShard). A rank that
  /// holds nothing of a mesh layout keeps its other extents, e.g. [0, 4].
  CompactShard compact(Rank rank) const;

  /// Canonical JSON: keys sorted, no blanks. Meshes stay meshes; anything else becomes pieces.
  std::string canonical_json() const;
  /// The layout whose canonical_json() is @p json. @param where  Names the text in errors.
  /// @throws Error{bad_argument} with the place in the text, for whatever the makers above refuse.
  static Layout from_json(std::string_view json, const std::string& where);
  /// Equal for equal layouts; for hash tables, not for security.
  std::uint64_t fingerprint() const noexcept { return fingerprint_; }

  friend bool operator==(const Layout& a, const Layout& b);

 private:
  struct MeshForm {
    Mesh mesh;
    std::vector<Placement> placements;
    friend bool operator==(const MeshForm&, const MeshForm&) = default;
  };

  Layout(const Shape& shape, DType dtype) : shape_(shape), dtype_(dtype) {}
  void finish();

  Shape shape_;
  DType dtype_;
  bool flat_ = false;
  std::vector<Rank> ranks_;
  std::vector<RankPiece> pieces_;
  std::vector<Rank> piece_ranks_;
  std::vector<MeshForm> mesh_;  // none or one
  std::uint32_t slot_count_ = 1;
  std::uint64_t fingerprint_ = 0;
};

/// One side of one parameter: its layout, and the names of the buffers behind the layout's slots.
/// A buffer is local to a rank: equal names on two ranks are two buffers.
struct Side {
  std::shared_ptr<const Layout> layout;
  std::vector<std::string> buffers;  ///< At least layout->slot_count() names.
};

/// Shares equal layouts, so that geometry can be compared by pointer. Not thread-safe.
class LayoutTable {
 public:
  std::shared_ptr<const Layout> intern(Layout layout);
  std::size_t size() const noexcept { return count_; }

 private:
  std::unordered_map<std::uint64_t, std::vector<std::shared_ptr<const Layout>>> by_fingerprint_;
  std::size_t count_ = 0;
};

/// One member of an FSDP1 unit.
struct FlatMember {
  Shape shape;
  Index begin = 0;  ///< First element in the unit's flat buffer.
};

/// Where each member of an FSDP1 unit lies. With @p align_elements > 0, padding goes before each
/// member up to a multiple of it, and at the end up to a multiple of the number of ranks; with 0
/// there is none (torch FlatParameter with use_orig_params = True or False).
struct FlatUnit {
  std::vector<FlatMember> members;
  Index elements = 0;  ///< Of the whole flat buffer, padding included.
};
FlatUnit flat_unit(const std::vector<Shape>& shapes, Index align_elements, std::size_t ranks);

/// Lower-case hexadecimal SHA-256 (FIPS 180-4) of @p text.
std::string sha256_hex(std::string_view text);

}  // namespace m2n
