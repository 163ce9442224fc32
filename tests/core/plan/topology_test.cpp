// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/topology.hpp"

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <ostream>

#include "core/error.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

struct BadTopology {
  const char* why;
  const char* json;
  const char* says;  ///< Part of the message.
};
std::ostream& operator<<(std::ostream& os, const BadTopology& c) { return os << c.why; }

const std::vector<BadTopology> kBadTopologies = {
    {"a rank nowhere", R"({"islands":[{"ranks":[0,2]}],"link_gb_per_s":1})", "no rank 1"},
    {"a rank in two islands",
     R"({"islands":[{"ranks":[0,1]},{"ranks":[1]}],"link_gb_per_s":1,"nics":[{"ranks":[0,1],"gb_per_s":1}]})",
     "rank 1 in island 0 and in island 1"},
    {"a rank twice in an island", R"({"islands":[{"ranks":[0,0]}],"link_gb_per_s":1})",
     "rank 0 twice"},
    {"an island of nobody", R"({"islands":[{"ranks":[0]},{"ranks":[]}],"link_gb_per_s":1})",
     "islands[1].ranks is empty"},
    {"no island", R"({"islands":[],"link_gb_per_s":1})", "islands is empty"},
    {"a link rate of zero", R"({"islands":[{"ranks":[0]}],"link_gb_per_s":0})", "link_gb_per_s"},
    {"a negative link rate", R"({"islands":[{"ranks":[0]}],"link_gb_per_s":-3})", "rate above 0"},
    {"no link rate", R"({"islands":[{"ranks":[0]}]})", "link_gb_per_s"},
    {"a NIC rate of zero",
     R"({"islands":[{"ranks":[0]}],"link_gb_per_s":1,"nics":[{"ranks":[0],"gb_per_s":0}]})",
     "nics[0].gb_per_s must be a rate above 0"},
    {"a NIC that serves nobody",
     R"({"islands":[{"ranks":[0]}],"link_gb_per_s":1,"nics":[{"ranks":[],"gb_per_s":1}]})",
     "nics[0].ranks is empty: a NIC must serve"},
    {"a NIC that serves a rank outside",
     R"({"islands":[{"ranks":[0]}],"link_gb_per_s":1,"nics":[{"ranks":[7],"gb_per_s":1}]})",
     "NIC 0 serves rank 7, which is in no island"},
    {"a rank with two NICs",
     R"({"islands":[{"ranks":[0]}],"link_gb_per_s":1,"nics":[{"ranks":[0],"gb_per_s":1},{"ranks":[0],"gb_per_s":1}]})",
     "rank 0 in NIC 0 and in NIC 1"},
    {"an island that cannot be left",
     R"({"islands":[{"ranks":[0]},{"ranks":[1]}],"link_gb_per_s":1,"nics":[{"ranks":[0],"gb_per_s":1}]})",
     "no NIC serves rank 1"},
    {"a nominal rate below the practical one",
     R"({"islands":[{"ranks":[0]}],"link_gb_per_s":2,"link_nominal_gb_per_s":1})",
     "link_nominal_gb_per_s must not be below"},
    {"a negative latency", R"({"islands":[{"ranks":[0]}],"link_gb_per_s":1,"latency_us":-1})",
     "latency_us"},
    {"an uplink of nobody",
     R"({"islands":[{"ranks":[0]}],"link_gb_per_s":1,"uplinks":[{"name":"a","ranks":[],"gb_per_s":1}]})",
     "uplinks[0].ranks is empty"},
    {"an unknown key", R"({"islands":[{"ranks":[0]}],"link_gb_per_s":1,"nic":[]})", "nic"},
    {"an unknown key of a NIC",
     R"({"islands":[{"ranks":[0]}],"link_gb_per_s":1,"nics":[{"ranks":[0],"gb_per_s":1,"gbps":1}]})",
     "gbps"},
    {"a key twice", R"({"islands":[{"ranks":[0]}],"link_gb_per_s":1,"link_gb_per_s":2})",
     "link_gb_per_s"},
    {"a rank that is not a number", R"({"islands":[{"ranks":["0"]}],"link_gb_per_s":1})",
     "islands[0].ranks[0]"},
    {"not JSON", R"({"islands")", "bad.json"},
};

BOOST_AUTO_TEST_SUITE(core_plan)
BOOST_AUTO_TEST_SUITE(topology)

BOOST_DATA_TEST_CASE(a_bad_topology_is_refused_by_name, bdata::make(kBadTopologies), c) {
  BOOST_CHECK_EXCEPTION(Topology::parse(c.json, "bad.json"), Error, [&](const Error& error) {
    BOOST_TEST_INFO(error.what());
    BOOST_TEST(std::string(error.what()).find(c.says) != std::string::npos);
    BOOST_TEST(std::string(error.what()).find("bad.json") != std::string::npos);
    return error.code() == Errc::bad_argument;
  });
}

BOOST_AUTO_TEST_CASE(canonical_text_reads_back_as_itself) {
  const Topology topology = Topology::parse(
      R"({"islands":[{"ranks":[1,0]},{"ranks":[3,2]}],"link_gb_per_s":380,"link_nominal_gb_per_s":450,
          "nics":[{"ranks":[0,1],"gb_per_s":48,"nominal_gb_per_s":50},{"ranks":[2],"gb_per_s":1.25},
                  {"ranks":[3],"gb_per_s":7}],
          "uplinks":[{"name":"rack 1","ranks":[2,3],"gb_per_s":10}],
          "latency_us":2.5,"memory_gb_per_s":4800})",
      "t.json");
  const std::string text = topology.canonical_json();
  BOOST_TEST(Topology::parse(text, "again").canonical_json() == text);
  BOOST_TEST(text.find("\"ranks\":[0,1]") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(a_world_larger_than_the_topology_names_the_first_rank_left_out) {
  const Topology topology = Topology::single_island(4);
  topology.require(4);
  BOOST_CHECK_EXCEPTION(topology.require(6), Error, [](const Error& error) {
    return std::string(error.what()).find("rank 4 is in no island") != std::string::npos;
  });
  BOOST_CHECK_THROW(Topology::single_island(0), Error);
  BOOST_CHECK_THROW(Topology::single_island(1, 0), Error);
}

BOOST_AUTO_TEST_CASE(a_path_takes_links_inside_an_island_and_nics_and_uplinks_between_islands) {
  const Topology topology = Topology::parse(
      R"({"islands":[{"ranks":[0,1]},{"ranks":[2,3]},{"ranks":[4]}],"link_gb_per_s":100,
          "nics":[{"ranks":[0,1],"gb_per_s":10},{"ranks":[2],"gb_per_s":5},{"ranks":[3],"gb_per_s":5},
                  {"ranks":[4],"gb_per_s":5}],
          "uplinks":[{"name":"rack","ranks":[0,1,2,3],"gb_per_s":8}]})",
      "t.json");
  const Ports ports(topology);
  const auto names = [&](Rank from, Rank to) {
    std::vector<std::uint32_t> path;
    ports.path(from, to, path);
    std::string text;
    for (const std::uint32_t port : path) {
      text += ports.name(port) + ";";
    }
    return text;
  };
  BOOST_TEST(names(1, 1) == "");
  BOOST_TEST(names(0, 1) == "rank 0 egress;rank 1 ingress;");
  BOOST_TEST(names(0, 2) == "NIC of ranks 0-1 egress;NIC of rank 2 ingress;");
  BOOST_TEST(names(3, 4) == "NIC of rank 3 egress;NIC of rank 4 ingress;uplink 'rack' egress;");
  BOOST_TEST(names(4, 1) == "NIC of rank 4 egress;NIC of ranks 0-1 ingress;uplink 'rack' ingress;");
}

BOOST_AUTO_TEST_CASE(every_ready_topology_reads_and_has_its_ranks) {
  const std::filesystem::path folder = M2N_TOPOLOGIES;
  const std::vector<std::pair<const char*, Rank>> ready = {{"two-gpus", 2},   {"one-node", 8},
                                                           {"16-nodes", 128}, {"64-nodes", 512},
                                                           {"nvl72", 72},     {"alpacomm", 20}};
  for (const auto& [name, ranks] : ready) {
    const Topology topology = Topology::read(folder / (std::string(name) + ".json"));
    BOOST_TEST(topology.rank_count() == ranks, name);
    topology.require(ranks);
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
