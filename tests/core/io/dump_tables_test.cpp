// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <boost/json.hpp>
#include <map>
#include <random>
#include <tuple>

#include "tests/core/io/dump_support.hpp"

namespace m2n {
namespace {

using namespace testing;

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(dump)

BOOST_AUTO_TEST_CASE(a_plan_has_one_row_a_region_and_traffic_adds_it_up) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  // More rows than one chunk of the widest and of the narrowest column holds.
  std::vector<Parameter> parameters;
  for (int i = 0; i < 250; ++i) {
    parameters.push_back(moved("w" + std::to_string(i), {2000}, DType::bf16, 1000, 667));
    parameters.push_back(moved("m" + std::to_string(i), {3, 4}, DType::f32, 2, 3));
  }
  const Problem problem = Problem::make(std::move(parameters));
  const Plan plan = first_holders(problem);
  {
    DumpWriter dump(file);
    dump.problem(problem);
    dump.plan(plan, problem);
    dump.commit();
  }
  const auto parameter = raw_column<std::uint32_t>(file, "/plan/parameter");
  const auto stage = raw_column<std::uint32_t>(file, "/plan/stage");
  const auto source = raw_column<std::int32_t>(file, "/plan/source");
  const auto destination = raw_column<std::int32_t>(file, "/plan/destination");
  const auto source_role = raw_column<std::uint8_t>(file, "/plan/source_role");
  const auto destination_role = raw_column<std::uint8_t>(file, "/plan/destination_role");
  const auto source_holding = raw_column<std::uint32_t>(file, "/plan/source_holding");
  const auto destination_holding = raw_column<std::uint32_t>(file, "/plan/destination_holding");
  const auto lo = raw_column<std::array<std::int64_t, 2>>(file, "/plan/lo");
  const auto hi = raw_column<std::array<std::int64_t, 2>>(file, "/plan/hi");
  const auto bytes = raw_column<std::uint64_t>(file, "/plan/bytes");
  BOOST_TEST(parameter.size() * 4 > std::size_t{1} << 20);

  std::size_t row = 0;
  std::map<std::pair<Rank, Rank>, std::pair<std::uint64_t, std::uint64_t>> traffic;
  for (std::uint32_t i = 0; i < problem.parameters().size(); ++i) {
    const Pattern& pattern = plan.patterns[plan.pattern_of[i]];
    for (const Move& move : pattern.moves) {
      BOOST_REQUIRE_LT(row, parameter.size());
      const Box& box = pattern.boxes[move.box];
      const bool flat = box.rank() == 1;
      BOOST_REQUIRE(std::tuple(parameter[row], stage[row], source[row], destination[row],
                               source_role[row], destination_role[row], source_holding[row],
                               destination_holding[row], lo[row][0], hi[row][0], lo[row][1],
                               hi[row][1], bytes[row]) ==
                    std::tuple(i, i % 2, pattern.rank_of(move.from), pattern.rank_of(move.to), 0, 1,
                               move.from, move.to, box.lo[0], box.hi[0], flat ? 0 : box.lo[1],
                               flat ? 1 : box.hi[1],
                               static_cast<std::uint64_t>(box.volume()) * (flat ? 2U : 4U)));
      auto& [pair_bytes, pair_regions] = traffic[{source[row], destination[row]}];
      pair_bytes += bytes[row];
      ++pair_regions;
      ++row;
    }
  }
  BOOST_TEST(row == parameter.size());
  BOOST_TEST(row == summarize(plan, problem).regions);

  const auto from = raw_column<std::int32_t>(file, "/traffic/source");
  const auto to = raw_column<std::int32_t>(file, "/traffic/destination");
  const auto pair_bytes = raw_column<std::uint64_t>(file, "/traffic/bytes");
  const auto pair_regions = raw_column<std::uint64_t>(file, "/traffic/regions");
  BOOST_REQUIRE_EQUAL(from.size(), traffic.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    BOOST_REQUIRE((traffic.at({from[i], to[i]}) == std::pair(pair_bytes[i], pair_regions[i])));
  }
  DumpReader(file).verify();
  BOOST_TEST(DumpReader(file).fact("plan_digest").value() == plan.digest);
  for (const char* column : {"parameter", "lo", "bytes"}) {
    const Raw raw = raw_read(file, std::string("/plan/") + column);
    std::uint64_t chunk = raw.size;
    for (const hsize_t extent : raw.chunk) {
      chunk *= extent;
    }
    BOOST_TEST((raw.layout == H5D_CHUNKED));
    BOOST_TEST(chunk <= h5::kLargestChunkBytes);
  }
}

BOOST_AUTO_TEST_CASE(parameters_and_layouts_say_what_the_problem_says) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  std::vector<Parameter> parameters = {
      moved("a", {6, 4}, DType::bf16, 2, 2), moved("b/c", {6, 4}, DType::bf16, 2, 2),
      moved("n", {10}, DType::f32, 3, 1), replicated("s", {}, DType::i64)};
  parameters[2].destination =
      side_of("n", Layout::sharded({10}, DType::bf16, Mesh({1}, 3), {Placement::replicate()}));
  parameters[2].cast = true;
  const Problem problem = Problem::make(parameters);
  {
    DumpWriter dump(file);
    dump.problem(problem);
    dump.commit();
  }
  using Strings = std::vector<std::string>;
  BOOST_TEST((raw_texts(file, "/params/name") == Strings{"a", "b/c", "n", "s"}));
  BOOST_TEST((raw_texts(file, "/params/path") == Strings{"a", "b%2Fc", "n", "s"}));
  BOOST_TEST((raw_texts(file, "/params/dtype") == Strings{"bf16", "bf16", "f32", "i64"}));
  BOOST_TEST(
      (raw_texts(file, "/params/destination_dtype") == Strings{"bf16", "bf16", "bf16", "i64"}));
  BOOST_TEST((raw_texts(file, "/params/source_buffers") ==
              Strings{R"(["a#0"])", R"(["b/c#0"])", R"(["n#0"])", R"(["s#0"])"}));
  BOOST_TEST(
      (raw_column<std::uint32_t>(file, "/params/rank") == std::vector<std::uint32_t>{2, 2, 1, 0}));
  BOOST_TEST(
      (raw_column<std::uint8_t>(file, "/params/cast") == std::vector<std::uint8_t>{0, 0, 1, 0}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/params/bytes") ==
              std::vector<std::uint64_t>{48, 48, 20, 8}));
  const auto shapes = raw_column<std::array<std::int64_t, 8>>(file, "/params/shape");
  BOOST_TEST((shapes[0] == std::array<std::int64_t, 8>{6, 4, 1, 1, 1, 1, 1, 1}));
  BOOST_TEST((shapes[3] == std::array<std::int64_t, 8>{1, 1, 1, 1, 1, 1, 1, 1}));

  const std::string json = raw_texts(file, "/layouts/json").at(0);
  const auto begin = raw_column<std::uint64_t>(file, "/layouts/begin");
  const auto end = raw_column<std::uint64_t>(file, "/layouts/end");
  const auto source = raw_column<std::uint32_t>(file, "/params/source_layout");
  const auto destination = raw_column<std::uint32_t>(file, "/params/destination_layout");
  BOOST_TEST(boost::json::parse(json).as_array().size() == begin.size());
  BOOST_TEST(begin.size() == 6U);  // a and b/c share theirs, which are other objects
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    BOOST_TEST(json.substr(begin[source[i]], end[source[i]] - begin[source[i]]) ==
               parameters[i].source.layout->canonical_json());
    BOOST_TEST(json.substr(begin[destination[i]], end[destination[i]] - begin[destination[i]]) ==
               parameters[i].destination.layout->canonical_json());
  }
  BOOST_TEST((DumpReader(file).parameters() == Strings{"a", "b/c", "n", "s"}));
}

BOOST_AUTO_TEST_CASE(rounds_keep_every_rank_and_peer) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  {
    DumpWriter dump(file);
    dump.round(0, {7, 0.25, 16, {{1, 100, 0, "memory"}, {2, 50, 5, "wire"}}});
    dump.round(1, {7, 0.5, 0, {{0, 0, 100, "memory"}}});
    dump.round(0, {8, 0.125, 16, {}});
    dump.commit();
  }
  BOOST_TEST(
      (raw_column<std::uint64_t>(file, "/rounds/version") == std::vector<std::uint64_t>{7, 7, 8}));
  BOOST_TEST(
      (raw_column<std::int32_t>(file, "/rounds/rank") == std::vector<std::int32_t>{0, 1, 0}));
  BOOST_TEST(
      (raw_column<double>(file, "/rounds/seconds") == std::vector<double>{0.25, 0.5, 0.125}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/rounds/copied_bytes") ==
              std::vector<std::uint64_t>{16, 0, 16}));
  BOOST_TEST(
      (raw_column<std::int32_t>(file, "/rounds/peers/peer") == std::vector<std::int32_t>{1, 2, 0}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/rounds/peers/sent_bytes") ==
              std::vector<std::uint64_t>{100, 50, 0}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/rounds/peers/received_bytes") ==
              std::vector<std::uint64_t>{0, 5, 100}));
  const auto path = raw_column<std::uint32_t>(file, "/rounds/peers/path");
  const auto paths = raw_texts(file, "/rounds/peers/paths");
  BOOST_TEST(paths.at(path.at(0)) == "memory");
  BOOST_TEST(paths.at(path.at(1)) == "wire");
  BOOST_TEST(paths.at(path.at(2)) == "memory");
}

BOOST_AUTO_TEST_CASE(a_timeline_keeps_every_message_and_port) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  {
    DumpWriter dump(file);
    dump.timeline({2.5,
                   {{0.0, 1.5, 0, 2, 0, 100}, {1.5, 2.5, 2, 1, 1, 50}},
                   {{"rank 0 out", 100, 1.5}, {"nic 1", 50, 0.75}, {"x", 1, 0.0}}});
    dump.commit();
  }
  BOOST_TEST((raw_column<double>(file, "/simulation/start") == std::vector<double>{0.0, 1.5}));
  BOOST_TEST((raw_column<double>(file, "/simulation/end") == std::vector<double>{1.5, 2.5}));
  BOOST_TEST(
      (raw_column<std::int32_t>(file, "/simulation/source") == std::vector<std::int32_t>{0, 2}));
  BOOST_TEST((raw_column<std::int32_t>(file, "/simulation/destination") ==
              std::vector<std::int32_t>{2, 1}));
  BOOST_TEST(
      (raw_column<std::uint32_t>(file, "/simulation/stage") == std::vector<std::uint32_t>{0, 1}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/simulation/bytes") ==
              std::vector<std::uint64_t>{100, 50}));
  BOOST_TEST((raw_texts(file, "/simulation/ports/name") ==
              std::vector<std::string>{"rank 0 out", "nic 1", "x"}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/simulation/ports/bytes") ==
              std::vector<std::uint64_t>{100, 50, 1}));
  BOOST_TEST(
      (raw_column<double>(file, "/simulation/ports/busy") == std::vector<double>{1.5, 0.75, 0.0}));
  DumpReader(file).verify();
}

BOOST_AUTO_TEST_CASE(texts_of_any_length_are_kept_whole) {  // D01, D02
  // 65,440 bytes fit into an attribute of the default format, 65,472 do not.
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  std::map<std::string, std::string> facts;
  for (const std::size_t length : {0U, 1U, 65440U, 65472U, 160000U, 3000000U}) {
    std::string text(length, 'x');
    for (std::size_t i = 0; i < length; ++i) {
      text[i] = static_cast<char>('a' + i % 23);
    }
    facts["n" + std::to_string(length)] = text;
  }
  facts["empty/key"] = "";
  facts["umlauts"] = "größe\n";
  {
    DumpWriter dump(file);
    dump.experiment(facts);
    expect_error(Errc::bad_argument, {"umlauts", "once"}, [&] {
      dump.experiment({{"umlauts", "again"}});
    });
    dump.commit();
  }
  const DumpReader dump(file);
  for (const auto& [key, text] : facts) {
    BOOST_TEST((dump.fact(key) == text), key);
  }
  BOOST_TEST(!dump.fact("missing").has_value());
  const auto all = dump.facts();
  BOOST_TEST(all.size() == facts.size() + 1);  // and hdf5_version
  BOOST_TEST(all.contains("hdf5_version"));
  dump.verify();
}

BOOST_AUTO_TEST_CASE(blocks_are_contiguous_in_order_and_below_the_limit) {
  std::mt19937_64 random(seed());
  for (int round = 0; round < 500; ++round) {
    Shape shape;
    for (std::size_t d = random() % 5; d > 0; --d) {
      shape.push_back(static_cast<Index>(random() % 7));
    }
    const std::uint64_t item = 1 + random() % 8;
    const std::uint64_t limit = 1 + random() % 200;
    const Strides strides = row_major(shape);
    Index next = 0;
    h5::for_each_block(shape, item, limit, [&](const Box& box) {
      BOOST_REQUIRE(Box::whole(shape).contains(box));
      BOOST_REQUIRE(box.volume() == 1 || static_cast<std::uint64_t>(box.volume()) * item <= limit);
      Index first = 0;
      Index last = 0;
      for (std::size_t d = 0; d < shape.size(); ++d) {
        first += box.lo[d] * strides[d];
        last += (box.hi[d] - 1) * strides[d];
      }
      BOOST_REQUIRE_EQUAL(first, next);
      next += box.volume();
      BOOST_REQUIRE_EQUAL(last + 1, next);
    });
    BOOST_REQUIRE_EQUAL(next, element_count(shape));
  }
}

BOOST_AUTO_TEST_CASE(a_description_counts_what_is_there) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Problem problem =
      Problem::make({moved("a", {6, 4}, DType::bf16, 2, 2), moved("b", {6, 4}, DType::bf16, 2, 2)});
  {
    DumpWriter dump(file);
    dump.experiment({{"config", "[run]\nseveral = lines\n"}, {"transport", "loopback"}});
    dump.problem(problem);
    dump.plan(first_holders(problem), problem);
    dump.round(0, {1, 0.25, 0, {}});
    dump.round(1, {1, 0.5, 0, {}});
    dump.round(1, {2, 0.125, 0, {}});
    for (const Parameter& parameter : problem.parameters()) {
      write_side(dump, parameter, Role::destination);
    }
    dump.stitch(Role::destination);
    dump.commit();
  }
  const auto json = boost::json::parse(describe_dump(file, true));
  BOOST_TEST(json.at("kind").as_string() == "dump");
  BOOST_TEST(json.at("schema_version").to_number<int>() == static_cast<int>(kDumpSchemaVersion));
  BOOST_TEST(json.at("parameters").to_number<int>() == 2);
  BOOST_TEST(json.at("parameter_bytes").to_number<int>() == 96);
  BOOST_TEST(json.at("plan").at("regions").to_number<int>() == 8);
  BOOST_TEST(json.at("plan").at("messages").to_number<int>() == 4);
  BOOST_TEST(json.at("plan").at("bytes").to_number<int>() == 96);
  BOOST_TEST(json.at("plan").at("max_egress_bytes").to_number<int>() == 48);
  BOOST_TEST(json.at("rounds").to_number<int>() == 2);
  BOOST_TEST(json.at("slowest_seconds").to_number<double>() == 0.5);
  BOOST_TEST(json.at("shards").as_array().size() == 2U);
  BOOST_TEST(json.at("shards").at(0).at("bytes").to_number<int>() == 48);
  BOOST_TEST(json.at("tensors").to_number<int>() == 2);
  BOOST_TEST(json.at("experiment").at("transport").as_string() == "loopback");
  const std::string table = describe_dump(file, false);
  for (const char* part : {"dump of m2n, schema 2", "transport", "loopback", "2, 96 B, 2 layouts",
                           "8 regions, 96 B between 4 pairs of ranks", "destination rank 2",
                           "2 shards, 48 B", "2, the slowest took 0.5 s", "22 B of text"}) {
    BOOST_TEST(contains(table, part), table << "\nlacks " << part);
  }
  expect_error(Errc::io, {"none"}, [&] { describe_dump(folder / "none", false); });
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
