// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What a device's memory does, against what the host does with the same bytes: on a GPU where
/// there is one, and otherwise on pages that crash whoever touches them.

#include "core/api/memory.hpp"

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <random>

#include "core/api/builtin.hpp"
#include "core/engine/changing.hpp"
#include "core/tensor/changes.hpp"
#include "tests/support/paged_memory.hpp"
#include "tests/support/random_cases.hpp"
#include "tests/transports/nccl_random_copy.hpp"

namespace m2n {
namespace {

using testing::Bytes;

/// A GPU's memory is there first; the pages step in where it has no device.
struct Device {
  Device() {
    (void)builtin_registries();
    provide_device_memory(testing::make_paged_memory());
  }
};
const Device kDevice;

const Memory& there() { return memory_of(MemorySpace::device); }

/// Bytes on the device.
class Held {
 public:
  explicit Held(const Bytes& bytes)
      : arena_(there().reserve(bytes.size() + 16, 0)), buffer_(arena_->take(bytes.size())) {
    there().write(buffer_, bytes);
  }
  LocalBuffer buffer(std::uint64_t offset = 0) const { return buffer_.from(offset); }
  Bytes bytes() const {
    Bytes out(buffer_.bytes);
    there().read(buffer_, out);
    return out;
  }

 private:
  std::unique_ptr<Arena> arena_;
  LocalBuffer buffer_;
};

const std::vector<DType> kTypes = {DType::u8,   DType::boolean, DType::f8_e4m3, DType::f16,
                                   DType::bf16, DType::f32,     DType::i64,     DType::c64};

/// A random box of a random shape, and where it lies.
struct RandomBox {
  PlacedBox placed;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  PlacedBox at(const LocalBuffer& buffer) const {
    PlacedBox out = placed;
    out.at = buffer.from(offset);
    return out;
  }
  PlacedBox in(Bytes& host) const { return at(host_buffer(host.data(), host.size())); }
};

RandomBox random_box(std::mt19937_64& random, DType dtype) {
  RandomBox out;
  out.placed.dtype = dtype;
  const std::size_t rank = random() % 5;
  for (std::size_t d = 0; d < rank; ++d) {
    const auto extent = static_cast<Index>(random() % 12 + 1);
    const auto lo = static_cast<Index>(random() % static_cast<std::uint64_t>(extent));
    out.placed.shape.push_back(extent + static_cast<Index>(random() % 3));
    out.placed.box.lo.push_back(lo);
    out.placed.box.hi.push_back(extent);
  }
  Index elements = 0;
  out.placed.strides = testing::random_strides(out.placed.box.extents(), random, elements);
  if (random() % 2 == 0) {
    out.placed.strides = row_major(out.placed.box.extents());
    elements = out.placed.box.volume();
  }
  out.offset = random() % 40;
  out.bytes = out.offset + static_cast<std::uint64_t>(elements + 1) * bytes_of(dtype);
  return out;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(memories)

BOOST_AUTO_TEST_CASE(a_region_is_copied_between_any_memories_and_nothing_beside_it) {
  std::mt19937_64 random(testing::test_seed());
  const std::vector<std::pair<DType, DType>> casts = {
      {DType::f32, DType::bf16}, {DType::bf16, DType::f32}, {DType::f16, DType::bf16},
      {DType::f32, DType::f16},  {DType::f16, DType::f32},  {DType::bf16, DType::f16}};
  for (std::uint64_t i = 0; i < 400; ++i) {
    const bool cast = i % 3 == 0;
    const DType same = kTypes[i % kTypes.size()];
    const auto [from, to] = cast ? casts[i / 3 % casts.size()] : std::pair(same, same);
    const auto c = testing::random_copy(random, from, to, 9);
    Bytes source = testing::random_bytes(c.source_bytes, random);
    const Bytes before = testing::random_bytes(c.destination_bytes, random);
    Bytes expected = before;
    copy_region(c.copy, source.data() + c.source_offset, expected.data() + c.destination_offset);
    const Held device_source(source);
    const LocalBuffer host_source = host_buffer(source.data(), source.size()).from(c.source_offset);

    const Held across(before);
    copy_region(c.copy, device_source.buffer(c.source_offset), across.buffer(c.destination_offset));
    BOOST_TEST_REQUIRE((across.bytes() == expected), "device to device, case " << i);
    const Held up(before);
    copy_region(c.copy, host_source, up.buffer(c.destination_offset));
    BOOST_TEST_REQUIRE((up.bytes() == expected), "host to device, case " << i);
    Bytes down = before;
    copy_region(c.copy, device_source.buffer(c.source_offset),
                host_buffer(down.data(), down.size()).from(c.destination_offset));
    BOOST_TEST_REQUIRE((down == expected), "device to host, case " << i);
  }
}

/// More than is staged at a time: transposed, cast, and as it is.
BOOST_AUTO_TEST_CASE(large_regions_are_staged_in_parts) {
  std::mt19937_64 random(testing::test_seed());
  const Shape shape = {2500, 4000};
  const auto count = static_cast<std::uint64_t>(element_count(shape));
  const Strides turned = {1, 2500};
  for (const auto& [from, to, strides] :
       {std::tuple(DType::f32, DType::f32, turned), std::tuple(DType::f32, DType::bf16, turned),
        std::tuple(DType::f32, DType::f32, row_major(shape))}) {
    Bytes source = testing::random_bytes(count * bytes_of(from), random);
    Bytes expected(count * bytes_of(to));
    const StridedCopy copy{shape, row_major(shape), strides, from, to};
    copy_region(copy, source.data(), expected.data());
    const Held up(Bytes(expected.size()));
    copy_region(copy, host_buffer(source.data(), source.size()), up.buffer());
    BOOST_TEST((up.bytes() == expected));
    Bytes down(expected.size());
    copy_region(copy, Held(source).buffer(), host_buffer(down.data(), down.size()));
    BOOST_TEST((down == expected));
  }
}

BOOST_AUTO_TEST_CASE(one_element_repeated_zeroes_a_box) {
  const Bytes before(64, std::byte{7});
  const Held held(before);
  const Held zero(Bytes(8));
  copy_region({{3, 2}, {0, 0}, {4, 1}, DType::f32, DType::f32}, zero.buffer(), held.buffer(4));
  Bytes expected = before;
  for (const int row : {4, 20, 36}) {
    std::memset(expected.data() + row, 0, 8);
  }
  BOOST_TEST((held.bytes() == expected));
}

BOOST_AUTO_TEST_CASE(values_changes_comparisons_and_digests_are_those_of_the_host) {
  std::mt19937_64 random(testing::test_seed());
  std::vector<Held> kept;
  std::vector<Bytes> hosts;
  std::vector<DigestOf> here_boxes;
  std::vector<DigestOf> there_boxes;
  kept.reserve(200);
  hosts.reserve(200);
  for (std::size_t i = 0; i < 200; ++i) {
    const DType dtype = kTypes[i % kTypes.size()];
    const RandomBox box = random_box(random, dtype);
    const Bytes before = testing::random_bytes(box.bytes, random);
    Bytes& host = hosts.emplace_back(before);
    const Held& held = kept.emplace_back(before);
    const PlacedBox here = box.in(host);
    const PlacedBox away = box.at(held.buffer());
    const Formula formula{dtype, random(), random() % 2 * random()};
    fill_synthetic(here.shape, here.box, dtype, formula.seed, here.at.data, here.strides);
    change_values(here.shape, here.box, dtype, 0, formula.version, here.at.data, here.strides);
    there().fill_synthetic(away.shape, away.box, dtype, formula.seed, away.at, away.strides);
    there().change(away, 0, 5);
    there().change(away, 5, formula.version);
    BOOST_TEST_REQUIRE((held.bytes() == host), to_string(dtype) << ", case " << i);
    BOOST_TEST(there().compare(away, formula).count == 0u);
    const auto volume = static_cast<std::uint64_t>(away.box.volume());
    const Wrong other = there().compare(away, {dtype, formula.seed + 1, formula.version});
    const Wrong expected =
        memory_of(MemorySpace::host).compare(here, {dtype, formula.seed + 1, formula.version});
    BOOST_TEST(other.count == expected.count);
    BOOST_TEST((other.count == 0 || other.first == expected.first));
    BOOST_TEST((volume < 20 || other.count > 0));
    const DType as = dtype == DType::f32 ? DType::bf16 : dtype == DType::f16 ? DType::f32 : dtype;
    here_boxes.push_back({here, as});
    there_boxes.push_back({away, as});
  }
  BOOST_TEST(digests(there_boxes) == digests(here_boxes), boost::test_tools::per_element());
  std::swap(there_boxes[3], here_boxes[3]);  // of both memories in one list
  BOOST_TEST(digests(there_boxes) == digests(here_boxes), boost::test_tools::per_element());
}

/// Longer than a chunk of a digest, and than a block of a comparison.
BOOST_AUTO_TEST_CASE(long_tensors_are_compared_and_digested_whole) {
  const Shape shape = {300'001};
  const Box whole = Box::whole(shape);
  const Held held(Bytes(2 * 300'001));
  there().fill_synthetic(shape, whole, DType::bf16, 11, held.buffer(), {1});
  Bytes host(2 * 300'001);
  fill_synthetic(shape, whole, DType::bf16, 11, host.data(), {1});
  const auto digest = digest_of_box(shape, whole, DType::bf16, host.data(), {1});
  BOOST_TEST(there().digest_of_box(shape, whole, DType::bf16, held.buffer(), {1}) == digest);
  const PlacedBox placed{shape, whole, DType::bf16, held.buffer(), {1}};
  BOOST_TEST(there().compare(placed, {DType::bf16, 11, 0}).count == 0u);
  for (const std::uint64_t element : {299'999ULL, 70'000ULL}) {
    Bytes two(2);
    there().read(held.buffer(2 * element), two);
    two[0] ^= std::byte{1};
    there().write(held.buffer(2 * element), two);
  }
  const Wrong wrong = there().compare(placed, {DType::bf16, 11, 0});
  BOOST_TEST(wrong.count == 2u);
  BOOST_TEST(wrong.first == 70'000u);
}

BOOST_AUTO_TEST_CASE(a_formula_is_compared_after_its_cast) {
  const Shape shape = {40, 50};
  Bytes wide(4 * 2000);
  fill_synthetic(shape, Box::whole(shape), DType::f32, 3, wide.data(), row_major(shape));
  const Held held(Bytes(2 * 2000));
  copy_region({shape, row_major(shape), {1, 40}, DType::f32, DType::bf16},
              host_buffer(wide.data(), wide.size()), held.buffer());
  const PlacedBox placed{shape, Box::whole(shape), DType::bf16, held.buffer(), {1, 40}};
  BOOST_TEST(there().compare(placed, {DType::f32, 3, 0}).count == 0u);
}

/// Values that only their reader knows go over in parts.
BOOST_AUTO_TEST_CASE(values_are_written_by_formula_or_by_reading) {
  const TensorInfo info{"w", DType::f32, {3000, 4000}};  // 48 MB
  const auto synthetic = builtin_registries().values.create("synthetic", {{}, {info}});
  struct Unknown final : TensorValues {
    explicit Unknown(const TensorValues& values) : base(values) {}
    std::string_view name() const noexcept override { return "unknown"; }
    const Catalogue& catalogue() const override { return base.catalogue(); }
    void read(std::string_view tensor, const Box& box, std::byte* data,
              const Strides& strides) const override {
      base.read(tensor, box, data, strides);
    }
    const TensorValues& base;
  };
  const Unknown unknown(*synthetic);
  const auto changed = make_changed_values(*synthetic, 9);
  const Box box{{1, 2}, {2999, 3990}};
  const Strides strides = {1, 2998};
  const std::vector<const TensorValues*> all = {synthetic.get(), &unknown, changed.get()};
  for (const TensorValues* const values : all) {
    Bytes host(4 * static_cast<std::uint64_t>(box.volume()));
    values->read("w", box, host.data(), strides);
    const Held held(Bytes(host.size()));
    write_values(*values, info, box, held.buffer(), strides);
    BOOST_TEST((held.bytes() == host));
  }
}

BOOST_AUTO_TEST_CASE(arenas_hand_out_zeroed_neighbours_until_they_are_full) {
  const auto arena = there().reserve(4096, 0);
  const LocalBuffer a = arena->take(100);
  const LocalBuffer b = arena->take(32);
  BOOST_TEST((a.space == MemorySpace::device));
  BOOST_TEST((b.data == a.data + 112));
  Bytes bytes(100, std::byte{1});
  there().read(a, bytes);
  BOOST_TEST((bytes == Bytes(100)));
  BOOST_CHECK_THROW(arena->take(1 << 20), Error);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
