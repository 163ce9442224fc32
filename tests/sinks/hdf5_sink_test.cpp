// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Sink "hdf5": dumps of what lands in place and of what falls back.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <filesystem>
#include <map>

#include "core/io/dump.hpp"
#include "tests/sinks/fixtures.hpp"
#include "tests/sinks/small_models.hpp"
#include "tests/support/temporary_folder.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::Checkpoint;
using testing::kFirstWorker;
using testing::make_checkpoint;
using testing::make_model;
using testing::make_sink;
using testing::models_of;
using testing::run_round;
using testing::small_decoder;
using testing::specs_of;
using testing::TemporaryFolder;
using testing::write_direct;

/// Every element of @p shard is the checkpoint's.
bool same_elements(const DumpReader& dump, const DumpShard& shard, const Checkpoint& checkpoint) {
  const TensorInfo& tensor = checkpoint.info(shard.name);
  const std::uint64_t item = bytes_of(tensor.dtype);
  const std::byte* const expected = checkpoint.bytes.at(shard.name).data();
  std::vector<std::byte> held(static_cast<std::size_t>(element_count(shard.compact.local_shape)) *
                              item);
  dump.read(shard, held.data());
  const Strides global = row_major(tensor.shape);
  for (const Piece& piece : shard.compact.pieces) {
    const Shape extents = piece.box.extents();
    const Strides inside = row_major(extents);
    for (Index i = 0; i < piece.box.volume(); ++i) {
      Index from = 0;
      Index to = 0;
      for (std::size_t d = 0; d < extents.size(); ++d) {
        const Index at = i / inside[d] % extents[d];
        from += at * piece.view.strides[d];
        to += (piece.box.lo[d] + at) * global[d];
      }
      if (std::memcmp(held.data() + piece.view.offset_bytes + static_cast<std::size_t>(from) * item,
                      expected + static_cast<std::size_t>(to) * item, item) != 0) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(sinks)
BOOST_AUTO_TEST_SUITE(hdf5)

BOOST_DATA_TEST_CASE(every_tensor_is_dumped_in_place_or_whole, bdata::make({"fused", "strict"}),
                     direct) {
  const TemporaryFolder folder;
  const auto model = make_model("llama", small_decoder());
  const auto models = models_of(*model, 2, 2, model->catalogue());
  const auto sink =
      make_sink("hdf5", models, 1,
                {{"direct", direct}, {"path", (folder.path() / "w.h5").string()}}, kFirstWorker);
  const auto resolutions = sink->resolve(specs_of(model->catalogue()));
  const auto file = folder.path() / "w.rank-4.h5";
  for (const int round : {1, 2}) {
    const Checkpoint checkpoint = make_checkpoint(model->catalogue(), round);
    run_round(*sink, resolutions, kFirstWorker + 1, checkpoint, static_cast<std::uint64_t>(round));
    const DumpReader dump(file);
    BOOST_TEST(dump.fact("version").value() == std::to_string(round));
    std::map<std::string, DumpShard> shards;
    for (const DumpShard& shard : dump.shards(Role::destination)) {
      BOOST_TEST(shard.rank == kFirstWorker + 1);
      shards.emplace(shard.name, shard);
    }
    BOOST_TEST_REQUIRE(shards.size() == resolutions.size());
    std::size_t whole = 0;
    for (std::size_t i = 0; i < resolutions.size(); ++i) {
      const TensorInfo& tensor = model->catalogue()[i];
      const DumpShard& shard = shards.at(tensor.name);
      BOOST_TEST(same_elements(dump, shard, checkpoint), tensor.name);
      if (resolutions[i].mode == Mode::fallback) {
        BOOST_TEST((shard.compact.local_shape == tensor.shape), tensor.name);
        ++whole;
      }
    }
    BOOST_TEST((whole > 0) == (std::string(direct) == "strict"));
  }
  // A round that fails leaves the dump of the one before, and nothing else.
  sink->begin(3);
  write_direct(*sink, resolutions, kFirstWorker + 1, make_checkpoint(model->catalogue(), 3));
  sink->roll_back();
  BOOST_TEST(DumpReader(file).fact("version").value() == "2");
  BOOST_TEST(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
