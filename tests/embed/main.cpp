// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// m2n inside another program: a source, a planner, a transport and a sink of its own, put together
/// by name, move one tensor from two trainers to two workers. Built against an installed m2n; see
/// run.sh.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/api/plugins.hpp"
#include "core/engine/local_job.hpp"
#include "core/plan/atoms.hpp"

namespace {

constexpr m2n::Rank kTrainers = 2;
constexpr m2n::Rank kWorkers = 2;
constexpr m2n::Rank kWorld = kTrainers + kWorkers;
const m2n::Shape kShape = {8, 6};

/// What element (row, column) is in round @p version.
float value(m2n::Index row, m2n::Index column, std::uint64_t version) {
  return static_cast<float>(version) * 1000.0F + static_cast<float>(row * kShape[1] + column);
}

/// A tensor cut along @p dim over @p ranks from @p start, and memory for one rank's part of it.
class Part {
 public:
  Part(int dim, m2n::Rank start, m2n::Rank ranks, m2n::Rank rank)
      : side_{std::make_shared<m2n::Layout>(m2n::Layout::sharded(kShape, m2n::DType::f32,
                                                                 m2n::Mesh({ranks}, start),
                                                                 {m2n::Placement::shard(dim)})),
              {"w"}},
        box_(side_.layout->pieces_of(rank).front().piece.box),
        data_(static_cast<std::size_t>(box_.volume())) {}

  const m2n::Side& side() const { return side_; }
  const m2n::Box& box() const { return box_; }
  float& at(m2n::Index row, m2n::Index column) {
    const m2n::Index width = box_.hi[1] - box_.lo[1];
    return data_[static_cast<std::size_t>((row - box_.lo[0]) * width + column - box_.lo[1])];
  }
  std::vector<m2n::ParamLoan> loan() {
    return {{"w",
             m2n::DType::f32,
             kShape,
             {{reinterpret_cast<std::byte*>(data_.data()), data_.size() * sizeof(float)}}}};
  }

 private:
  m2n::Side side_;
  m2n::Box box_;
  std::vector<float> data_;
};

/// A trainer: rows of a tensor that changes with every version.
class Rows final : public m2n::WeightSource {
 public:
  explicit Rows(const m2n::SourceContext& context)
      : part_(0, 0, context.ranks, context.rank),
        params_{{"w", m2n::DType::f32, kShape, part_.side()}} {}

  std::string_view name() const noexcept override { return "rows"; }
  const std::vector<m2n::ParamSpec>& params() const override { return params_; }
  std::vector<m2n::ParamLoan> borrow(std::uint64_t version) override {
    const m2n::Box& box = part_.box();
    for (m2n::Index row = box.lo[0]; row < box.hi[0]; ++row) {
      for (m2n::Index column = box.lo[1]; column < box.hi[1]; ++column) {
        part_.at(row, column) = value(row, column, version);
      }
    }
    return part_.loan();
  }

 private:
  Part part_;
  std::vector<m2n::ParamSpec> params_;
};

/// A worker: columns of the tensor.
class Columns final : public m2n::WeightSink {
 public:
  explicit Columns(const m2n::SinkContext& context)
      : part_(1, context.first_worker, kWorkers, context.rank) {}

  std::string_view name() const noexcept override { return "columns"; }
  std::vector<m2n::Resolution> resolve(std::span<const m2n::ParamSpec> params) override {
    return {params.size(), {.side = part_.side(), .reason = "columns are kept apart"}};
  }
  void begin(std::uint64_t /*version*/) override { version_.reset(); }
  std::vector<m2n::ParamLoan> lend() override { return part_.loan(); }
  void load_weights(m2n::TensorStream& /*stream*/) override {}  // everything is direct
  void commit(std::uint64_t version) override { version_ = version; }
  void roll_back() noexcept override { version_.reset(); }
  std::optional<std::uint64_t> version() const noexcept override { return version_; }
  std::vector<m2n::LiveParameter> live() override {
    return {{"w", m2n::DType::f32, part_.box().extents(), part_.loan()[0].slots[0]}};
  }

 private:
  Part part_;
  std::optional<std::uint64_t> version_;
};

/// A planner: holders of a box send it in turn.
class Turns final : public m2n::Planner {
 public:
  std::string_view name() const noexcept override { return "turns"; }

 private:
  void do_plan(const m2n::Topology& /*topology*/, m2n::PlanBuilder& builder) const override {
    for (const m2n::GeometryGroup& group : m2n::group_by_geometry(builder.problem())) {
      m2n::Pattern pattern;
      pattern.geometry = group.geometry;
      const m2n::Atoms atoms(group.geometry);
      for (std::uint32_t i = 0; i < atoms.size(); ++i) {
        const m2n::Atom atom = atoms[i];
        pattern.boxes.push_back(atom.box);
        for (const std::uint32_t receiver : atom.receivers) {
          const std::uint32_t holder = atom.holders[i % atom.holders.size()];
          pattern.moves.push_back({.box = i, .from = holder, .to = receiver});
        }
      }
      const std::uint32_t number = builder.add(std::move(pattern));
      for (const std::uint32_t parameter : group.parameters) {
        builder.assign(parameter, number);
      }
    }
  }
};

/// Where the threads of a transport wait for one another.
class Meeting {
 public:
  /// Returns once every rank has come. @throws m2n::TransportError
  void wait(const char* phase, m2n::Deadline deadline) {
    std::unique_lock lock(mutex_);
    const std::uint64_t mine = meetings_;
    if (++arrived_ == kWorld) {
      arrived_ = 0;
      ++meetings_;
      changed_.notify_all();
    }
    const bool came =
        changed_.wait_until(lock, deadline, [&] { return meetings_ != mine || broken_; });
    if (!came || broken_) {
      throw m2n::TransportError(came ? m2n::Errc::peer_lost : m2n::Errc::timed_out,
                                std::string(phase) + ": only " + std::to_string(arrived_) + " of " +
                                    std::to_string(kWorld) + " ranks came");
    }
  }
  void abort() noexcept {
    const std::scoped_lock lock(mutex_);
    broken_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  m2n::Rank arrived_ = 0;
  std::uint64_t meetings_ = 0;
  bool broken_ = false;
};

/// A transport: every rank reads what it needs from the memory of the others.
class Pull final : public m2n::Transport {
 public:
  explicit Pull(Meeting& meeting) : meeting_(meeting) {}

  std::string_view name() const noexcept override { return "pull"; }
  void connect(m2n::Group& group, m2n::Deadline /*deadline*/) override { group_ = &group; }
  std::unique_ptr<m2n::Session> prepare(const m2n::Program& program, const m2n::Buffers& buffers,
                                        m2n::Deadline deadline) override {
    m2n::expects(program.stage_count <= 1, "a plan without relays");
    return std::make_unique<Round>(*group_, meeting_, program, buffers, deadline);
  }

 private:
  class Round final : public m2n::Session {
   public:
    Round(m2n::Group& group, Meeting& meeting, m2n::Program program, m2n::Buffers buffers,
          m2n::Deadline deadline)
        : meeting_(meeting), program_(std::move(program)), buffers_(std::move(buffers)) {
      const auto address = reinterpret_cast<std::uintptr_t>(&buffers_.source);
      for (const std::string& text :
           group.all_gather("exchange addresses", std::to_string(address), deadline)) {
        sources_.push_back(
            reinterpret_cast<const std::vector<m2n::LocalBuffer>*>(std::stoull(text)));
      }
    }

    void start(std::uint64_t version, m2n::Deadline /*deadline*/) override {
      report_ = {};
      report_.version = version;
      began_ = std::chrono::steady_clock::now();
    }
    m2n::RoundReport wait(m2n::Deadline deadline) override {
      meeting_.wait("sources are ready", deadline);
      for (const m2n::Region& region : program_.copies) {
        pull(region);
        report_.copied_bytes += region.bytes;
      }
      for (const m2n::Region& region : program_.receives) {
        pull(region);
        report_.peers.push_back({region.from.rank, 0, region.bytes, "memory"});
      }
      meeting_.wait("sources are read", deadline);
      const std::chrono::duration<double> span = std::chrono::steady_clock::now() - began_;
      report_.seconds = span.count();
      return report_;
    }
    void abort() noexcept override { meeting_.abort(); }

   private:
    void pull(const m2n::Region& region) {
      const auto& source = *sources_[static_cast<std::size_t>(region.from.rank)];
      m2n::copy_region(region.copy, source[region.from.buffer].data + region.from.offset_bytes,
                       buffers_.destination[region.to.buffer].data + region.to.offset_bytes);
    }

    Meeting& meeting_;
    m2n::Program program_;
    m2n::Buffers buffers_;
    std::vector<const std::vector<m2n::LocalBuffer>*> sources_;  // by rank
    m2n::RoundReport report_;
    std::chrono::steady_clock::time_point began_;
  };

  Meeting& meeting_;
  m2n::Group* group_ = nullptr;
};

m2n::SourceContext trainer_context(m2n::Rank rank) {
  m2n::SourceContext context;
  context.rank = rank;
  context.ranks = kTrainers;
  return context;
}

m2n::SinkContext worker_context(m2n::Rank rank) {
  m2n::SinkContext context;
  context.rank = rank;
  context.first_worker = kTrainers;
  return context;
}

/// Compares what a worker keeps with what the trainers had. @return how many elements are right.
m2n::Index count_right(m2n::WeightSink& sink, m2n::Rank worker) {
  const m2n::LiveParameter live = sink.live().front();
  m2n::Index right = 0;
  for (m2n::Index i = 0; i < m2n::element_count(live.shape); ++i) {
    const m2n::Index row = i / live.shape[1];
    const m2n::Index column = worker * live.shape[1] + i % live.shape[1];
    float found = 0;
    std::memcpy(&found, live.buffer.data + static_cast<std::size_t>(i) * sizeof found,
                sizeof found);
    right += found == value(row, column, sink.version().value()) ? 1 : 0;
  }
  return right;
}

}  // namespace

int main() try {
  Meeting meeting;
  m2n::Registries registries;
  registries.sources.add("rows", "rows of one tensor", [](const m2n::SourceContext& context) {
    return std::make_unique<Rows>(context);
  });
  registries.sinks.add("columns", "columns of one tensor", [](const m2n::SinkContext& context) {
    return std::make_unique<Columns>(context);
  });
  registries.planners.add("turns", "holders send in turn",
                          [](const m2n::PlannerContext&) { return std::make_unique<Turns>(); });
  registries.transports.add("pull", "receivers read", [&meeting](const m2n::TransportContext&) {
    return std::make_unique<Pull>(meeting);
  });

  // Every rank's parts, by name.
  std::vector<m2n::LocalRank> ranks(kWorld);
  for (m2n::Rank rank = 0; rank < kWorld; ++rank) {
    m2n::LocalRank& parts = ranks[static_cast<std::size_t>(rank)];
    parts.transport = registries.transports.create("pull", {});
    if (rank < kTrainers) {
      parts.source = registries.sources.create("rows", trainer_context(rank));
    } else {
      parts.sink = registries.sinks.create("columns", worker_context(rank));
    }
  }

  // What is to be moved: each of the trainers' parameters to where the workers want it.
  const std::vector<m2n::ParamSpec>& params = ranks.front().source->params();
  std::vector<m2n::Resolution> resolutions;
  for (std::size_t worker = kTrainers; worker < kWorld; ++worker) {
    resolutions = ranks[worker].sink->resolve(params);  // the same on every worker
  }
  std::vector<m2n::Parameter> parameters;
  for (std::size_t i = 0; i < params.size(); ++i) {
    parameters.push_back({params[i].name, params[i].shape, params[i].side, resolutions[i].side});
  }
  const m2n::Problem problem = m2n::Problem::make(std::move(parameters));

  const m2n::Plan plan =
      registries.planners.create("turns", {})->plan(problem, m2n::Topology::single_island(kWorld));
  m2n::check_plan(plan, problem);

  std::atomic<m2n::Index> right = 0;
  m2n::LocalJobOptions options;
  options.rounds = 3;
  options.inspect = [&right](const m2n::RankView& view) {
    if (view.sink != nullptr && view.sink->version() == 3) {
      right += count_right(*view.sink, view.rank - kTrainers);
    }
  };
  m2n::run_local_job(problem, plan, resolutions, ranks, options);

  const m2n::Index expected = m2n::element_count(kShape);
  std::printf("%lld of %lld elements of version 3 arrived\n", static_cast<long long>(right),
              static_cast<long long>(expected));
  return right == expected ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "embed: %s\n", error.what());
  return 1;
}
