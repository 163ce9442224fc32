// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What goes wrong with UCX elsewhere (sizes, early and crossing messages, memory that comes back,
/// settings that differ), over each way that the transport has.

#include <sys/mman.h>
#include <unistd.h>

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <map>
#include <sstream>

#include "core/api/builtin.hpp"
#include "tests/support/run_program.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/transports/subjects.hpp"
#include "transports/ucx/crossover.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using std::chrono::milliseconds;
using testing::make;
using testing::none_failed;
using testing::RankEnd;
using testing::require;
using testing::Subject;
using testing::World;

constexpr milliseconds kLong{60'000};

std::vector<Subject> ucx_subjects() {
  std::vector<Subject> out;
  for (const Subject& subject : testing::subjects()) {
    if (subject.name == "ucx" && subject.world == World::processes) {
      out.push_back(subject);
    }
  }
  return out;
}
const std::vector<Subject> kSubjects = ucx_subjects();

struct Move {
  Rank from;
  Rank to;
  std::uint64_t bytes;
};

/// Tensors of bytes, each whole from one rank to another.
struct Job {
  Problem problem;
  Plan plan;

  explicit Job(const std::vector<Move>& moves) : problem(make_problem(moves)) {
    plan = builtin_registries()
               .planners.create("direct", {})
               ->plan(problem, Topology::single_island(problem.world_size()));
  }

  static Problem make_problem(const std::vector<Move>& moves) {
    std::vector<Parameter> parameters;
    for (const Move& move : moves) {
      const Shape shape{static_cast<Index>(move.bytes)};
      const auto on = [&](Rank rank) {
        return std::make_shared<const Layout>(
            Layout::sharded(shape, DType::u8, Mesh({1}, rank), {Placement::replicate()}));
      };
      const std::string name = "w" + std::to_string(parameters.size());
      parameters.push_back({name, shape, {on(move.from), {name}}, {on(move.to), {name}}, false});
    }
    return Problem::make(std::move(parameters));
  }
};

std::byte value(std::size_t tensor, std::size_t at, std::uint64_t version) {
  return static_cast<std::byte>(tensor * 31 + at * 7 + (at >> 8) * 3 + version * 101 + 1);
}

/// A rank's memory for a Job, with @p margin bytes around each destination that must stay.
class JobMemory {
 public:
  JobMemory(const Job& job, Rank rank) {
    for (const Role role : {Role::source, Role::destination}) {
      auto& side = role == Role::source ? buffers_.source : buffers_.destination;
      for (const std::uint64_t size : job.problem.buffer_bytes(role, rank)) {
        blocks_.emplace_back(size + 2 * kMargin, kUntouched);
        side.push_back(
            {size > 0 ? blocks_.back().data() + kMargin : nullptr, size, MemorySpace::host, 0});
      }
    }
  }

  const Buffers& buffers() const { return buffers_; }

  void fill(std::uint64_t version) {
    for (std::size_t i = 0; i < buffers_.source.size(); ++i) {
      for (std::size_t at = 0; at < buffers_.source[i].bytes; ++at) {
        buffers_.source[i].data[at] = value(i, at, version);
      }
    }
  }

  void check(std::uint64_t version) const {
    for (std::size_t i = 0; i < buffers_.destination.size(); ++i) {
      const LocalBuffer& buffer = buffers_.destination[i];
      for (std::size_t at = 0; at < buffer.bytes; ++at) {
        if (buffer.data[at] != value(i, at, version)) {
          require(false, "tensor " + std::to_string(i) + " differs at byte " + std::to_string(at));
        }
      }
      for (std::size_t at = 0; buffer.bytes > 0 && at < kMargin; ++at) {
        if (buffer.data[buffer.bytes + at] != kUntouched ||
            (buffer.data - kMargin)[at] != kUntouched) {
          require(false, "bytes beside tensor " + std::to_string(i) + " were written");
        }
      }
    }
  }

 private:
  static constexpr std::size_t kMargin = 64;
  static constexpr std::byte kUntouched{0xA5};

  std::vector<std::vector<std::byte>> blocks_;
  Buffers buffers_;
};

void run_rounds(Transport& transport, Group& group, const Job& job, std::uint64_t rounds) {
  JobMemory memory(job, group.rank());
  const auto session = transport.prepare(make_program(job.plan, job.problem, group.rank()),
                                         memory.buffers(), deadline_in(kLong));
  for (std::uint64_t version = 1; version <= rounds; ++version) {
    memory.fill(version);
    session->start(version, deadline_in(kLong));
    session->wait(deadline_in(kLong));
    memory.check(version);
  }
}

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(ucx)

/// Around the limits of UCX's short, buffered and rendezvous protocols, and of our own slots.
BOOST_DATA_TEST_CASE(messages_of_every_size_arrive_whole, bdata::make(kSubjects), subject) {
  std::vector<Move> moves;
  for (const std::uint64_t bytes : std::initializer_list<std::uint64_t>{
           1,     7,     92,    93,     94,     1023,   1024,   4095,    4096,    8166,   8167,
           8168,  8192,  8256,  8257,   10240,  16383,  16384,  20553,   20554,   65535,  65536,
           65537, 65600, 99999, 262143, 262144, 262145, 999999, 1 << 20, 4 << 20, 5000001}) {
    moves.push_back({0, 1, bytes});
  }
  moves.push_back({0, 1, 0});
  const Job job(moves);
  none_failed(testing::run_ranks(subject.world, 2, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    run_rounds(*transport, group, job, 3);
  }));
}

/// Each waits for the other, with more than any staging holds, right after it has connected.
BOOST_DATA_TEST_CASE(ranks_that_send_to_each_other_at_once_both_get_through, bdata::make(kSubjects),
                     subject) {
  const Job job({{0, 1, 20'000'000}, {1, 0, 20'000'001}, {2, 0, 5'000'000}, {1, 2, 3}});
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    run_rounds(*transport, group, job, 2);
  }));
}

/// The destination is freed after each update, and comes back larger, often at the same address.
BOOST_DATA_TEST_CASE(memory_that_comes_back_is_registered_anew, bdata::make(kSubjects), subject) {
  none_failed(testing::run_ranks(subject.world, 2, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    const auto resident_kib = [] {
      std::ifstream statm("/proc/self/statm");
      std::uint64_t pages = 0;
      statm >> pages >> pages;
      return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) / 1024;
    };
    std::uint64_t before = 0;
    for (std::uint64_t i = 0; i < 60; ++i) {
      run_rounds(*transport, group, Job({{0, 1, 100'000 + i % 20 * 4'096}, {0, 1, 30'000}}), 1);
      before = i == 20 ? resident_kib() : before;
    }
    const std::uint64_t now = resident_kib();
    require(testing::kSanitized || now < before + 8 * 1024,
            "grew from " + std::to_string(before) + " to " + std::to_string(now) + " KiB");
  }));
}

BOOST_DATA_TEST_CASE(the_report_names_way_and_lanes_of_each_peer, bdata::make(kSubjects), subject) {
  const Job job({{0, 1, 1'000}});
  const bool wire = subject.options.contains("tls");
  none_failed(testing::run_ranks(subject.world, 2, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    JobMemory memory(job, group.rank());
    const auto session = transport->prepare(make_program(job.plan, job.problem, group.rank()),
                                            memory.buffers(), deadline_in(kLong));
    session->start(1, deadline_in(kLong));
    const RoundReport report = session->wait(deadline_in(kLong));
    require(report.peers.size() == 1, "one peer");
    const std::string& path = report.peers[0].path;
    const bool puts = subject.options.contains("puts");
    require(path.starts_with(!wire  ? "ring ("
                             : puts ? "wire, puts from 1024 bytes (tcp"
                                    : "wire (tcp"),
            path);
    require(
        wire || path.find("sysv") != std::string::npos || path.find("posix") != std::string::npos,
        path);
  }));
}

/// How ranks 0 and 1 say, session by session, that a tensor of @p bytes went from 0 to 1.
std::vector<std::string> paths(const Options& options, std::uint64_t bytes, int sessions) {
  const Job job({{0, 1, bytes}});
  const testing::TemporaryFolder folder;
  none_failed(testing::run_ranks(World::processes, 2, [&](Group& group) {
    const auto transport = make({"ucx", World::processes, options});
    transport->connect(group, deadline_in(kLong));
    std::ofstream out(folder / std::to_string(group.rank()));
    for (int i = 0; i < sessions; ++i) {
      JobMemory memory(job, group.rank());
      const auto session = transport->prepare(make_program(job.plan, job.problem, group.rank()),
                                              memory.buffers(), deadline_in(kLong));
      memory.fill(7);
      session->start(7, deadline_in(kLong));
      out << session->wait(deadline_in(kLong)).peers.at(0).path << '\n';
      memory.check(7);
    }
  }));
  std::vector<std::string> lines;
  for (const char* const rank : {"0", "1"}) {
    std::istringstream text(testing::read_file(folder / rank));
    for (std::string line; std::getline(text, line);) {
      lines.push_back(line.substr(0, line.find(" (")));
    }
  }
  return lines;
}

BOOST_AUTO_TEST_CASE(the_length_from_which_rows_are_put_is_measured_once_and_told_to_the_peer) {
  const Options options = {{"tls", "tcp"}, {"puts", "on"}};
  const std::vector<std::string> told = paths(options, 30'000, 2);
  BOOST_TEST_REQUIRE(told.size() == 4U);
  const std::string before = "wire, puts from ";
  BOOST_TEST_REQUIRE(told[0].starts_with(before), told[0]);
  const std::uint64_t length = std::stoull(told[0].substr(before.size()));
  BOOST_TEST(length >= m2n::ucx::kLeastPut);
  BOOST_TEST(length <= 2 * m2n::ucx::kMostPut);
  BOOST_TEST((length & (length - 1)) == 0U);
  for (const std::string& path : told) {
    BOOST_TEST(path == told[0]);
  }
}

BOOST_AUTO_TEST_CASE(a_number_forces_the_length_from_which_rows_are_put) {
  for (const char* const bytes : {"29999", "30001"}) {
    for (const std::string& path :
         paths({{"tls", "tcp"}, {"puts", "on"}, {"put_bytes", bytes}}, 30'000, 1)) {
      BOOST_TEST(path == "wire, puts from " + std::string(bytes) + " bytes");
    }
  }
  for (const std::string& path : paths({{"tls", "tcp"}}, 30'000, 1)) {
    BOOST_TEST(path == "wire");  // no lane that puts
  }
}

BOOST_AUTO_TEST_CASE(rows_are_put_from_the_least_length_on_at_which_no_longer_one_loses) {
  std::vector<std::uint64_t> asked;
  const auto first = [&](const std::map<std::uint64_t, double>& put_seconds) {
    asked.clear();
    return m2n::ucx::first_length_to_put(
        [&](std::uint64_t length) -> std::optional<m2n::ucx::RowSeconds> {
          asked.push_back(length);
          const auto found = put_seconds.find(length);
          return found == put_seconds.end()
                     ? std::nullopt
                     : std::optional(m2n::ucx::RowSeconds{.put = found->second, .packed = 10});
        });
  };
  constexpr std::uint64_t kKiB = 1024;
  BOOST_TEST(first({}) == m2n::ucx::kUnmeasuredPut);
  BOOST_TEST(first({{64 * kKiB, 11}}) == 128 * kKiB);
  // A length that wins below one that loses says nothing.
  BOOST_TEST(first({{64 * kKiB, 1}, {32 * kKiB, 10}, {16 * kKiB, 11}, {8 * kKiB, 1}}) == 32 * kKiB);
  BOOST_TEST(asked.size() == 3U);
  BOOST_TEST(first({{64 * kKiB, 1}, {32 * kKiB, 2}}) == 32 * kKiB);  // out of time
  std::map<std::uint64_t, double> all;
  for (std::uint64_t length = 1; length <= 64 * kKiB; length *= 2) {
    all[length] = 1;
  }
  BOOST_TEST(first(all) == kKiB);
}

BOOST_AUTO_TEST_CASE(ranks_with_different_settings_are_refused_by_all_with_both) {
  const auto ends = testing::run_ranks(World::processes, 3, [](Group& group) {
    Subject subject{"ucx", World::processes};
    if (group.rank() == 1) {
      subject.options["put_bytes"] = "77";
    }
    make(subject)->connect(group, deadline_in(kLong));
  });
  for (const RankEnd& end : ends) {
    BOOST_TEST(end.failure.find("rank 1 has") != std::string::npos, end.failure);
    BOOST_TEST(end.failure.find("put_bytes=77") != std::string::npos, end.failure);
    BOOST_TEST(end.failure.find("put_bytes=auto") != std::string::npos, end.failure);
  }
}

BOOST_AUTO_TEST_CASE(device_memory_without_a_device_is_refused_by_all) {
  const Job job({{0, 1, 64}});
  const auto ends = testing::run_ranks(World::processes, 2, [&](Group& group) {
    const auto transport = make({"ucx", World::processes});
    transport->connect(group, deadline_in(kLong));
    const JobMemory memory(job, group.rank());
    Buffers buffers = memory.buffers();
    for (LocalBuffer& buffer : buffers.source) {
      buffer.space = MemorySpace::device;
    }
    transport->prepare(make_program(job.plan, job.problem, group.rank()), buffers,
                       deadline_in(kLong));
  });
  for (const RankEnd& end : ends) {
    BOOST_TEST(end.failure.find("rank 0: ") != std::string::npos, end.failure);
    BOOST_TEST(end.failure.find(" device") != std::string::npos, end.failure);
  }
}

BOOST_AUTO_TEST_CASE(options_out_of_range_are_refused_with_what_would_be_right) {
  const auto refused = [](const std::string& key, const std::string& text, const char* part) {
    BOOST_CHECK_EXCEPTION(make({"ucx", World::threads, {{key, text}}}), Error,
                          [&](const Error& error) {
                            return error.code() == Errc::usage &&
                                   std::string(error.what()).find(part) != std::string::npos;
                          });
  };
  refused("put_bytes", "0", "auto or a whole number from 1 to");
  refused("put_bytes", "1k", "'1k'");
  refused("errors", "ignore", "auto, peer or kernel");
  refused("puts", "maybe", "auto, on or off");
  refused("threads", "2", "serialized or multi");
  refused("rails", "65", "from 1 to 64");
  refused("keepalive_ms", "-1", "'-1'");
}

/// More than 4 GiB of address space over a little memory: every page of a mapping is the same
/// file's.
class Repeated {
 public:
  Repeated(std::uint64_t period, std::uint64_t bytes)
      : file_(::memfd_create("m2n-test", MFD_CLOEXEC)), bytes_(bytes) {
    require(file_ >= 0 && ::ftruncate(file_, static_cast<off_t>(period)) == 0, "memory of a file");
    void* const all =
        ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(all != MAP_FAILED, "address space");
    data_ = static_cast<std::byte*>(all);
    for (std::uint64_t at = 0; at < bytes; at += period) {
      require(::mmap(data_ + at, std::min(period, bytes - at), PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_FIXED, file_, 0) != MAP_FAILED,
              "a mapping");
    }
  }
  Repeated(const Repeated&) = delete;
  Repeated& operator=(const Repeated&) = delete;
  ~Repeated() {
    ::munmap(data_, bytes_);
    ::close(file_);
  }
  std::byte* data() const { return data_; }

 private:
  int file_;
  std::uint64_t bytes_;
  std::byte* data_ = nullptr;
};

BOOST_AUTO_TEST_CASE(one_tensor_of_more_than_4_gib_arrives) {
  if (testing::kSanitized) {
    return;  // minutes, and nothing new
  }
  constexpr std::uint64_t kPeriod = 12 << 20;  // no divisor of 4 GiB: a byte that wraps is seen
  constexpr std::uint64_t kBytes = (4ULL << 30) + (36 << 20);
  const Job job({{0, 1, kBytes}});
  none_failed(testing::run_ranks(World::processes, 2, [&](Group& group) {
    const Repeated memory(kPeriod, kBytes);
    Buffers buffers{{{}}, {{}}};
    auto& side = group.rank() == 0 ? buffers.source : buffers.destination;
    side[0] = {memory.data(), kBytes, MemorySpace::host, 0};
    if (group.rank() == 0) {
      for (std::uint64_t at = 0; at < kPeriod; ++at) {
        memory.data()[at] = value(0, at, at >> 16);
      }
    }
    const auto transport = make({"ucx", World::processes});
    transport->connect(group, deadline_in(kLong));
    const auto session = transport->prepare(make_program(job.plan, job.problem, group.rank()),
                                            buffers, deadline_in(kLong));
    session->start(1, deadline_in(2 * kLong));
    const RoundReport report = session->wait(deadline_in(2 * kLong));
    require(report.peers[0].sent_bytes + report.peers[0].received_bytes == kBytes, "bytes");
    for (std::uint64_t at = 0; at < kPeriod; ++at) {
      if (memory.data()[at] != value(0, at, at >> 16)) {
        require(false, "byte " + std::to_string(at));
      }
    }
  }));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
