// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/link.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "core/engine/binding.hpp"
#include "core/engine/elapsed.hpp"
#include "core/engine/link_errors.hpp"
#include "core/error.hpp"

namespace m2n {
namespace {

namespace json = boost::json;

/// For the store's word on a failure.
constexpr std::chrono::milliseconds kSettle{1000};

bool any_failed(const Verdict& verdict) {
  return std::any_of(verdict.sides.begin(), verdict.sides.end(),
                     [](const Verdict::Side& side) { return side.statement.failed; });
}

json::object object_of(const std::map<std::string, std::string, std::less<>>& values) {
  json::object out;
  for (const auto& [key, value] : values) {
    out[key] = value;
  }
  return out;
}

/// The keys whose values differ between what two ranks said, with both.
std::string differing_keys(const std::string& expected, const std::string& found) {
  const json::object a = json::parse(expected).as_object();
  const json::object b = json::parse(found).as_object();
  std::string text;
  for (const auto& entry : a) {
    const json::value* const other = b.if_contains(entry.key());
    if (other == nullptr || *other != entry.value()) {
      text += (text.empty() ? "" : ", ") + std::string(entry.key()) + " is " +
              (other == nullptr ? "missing" : json::serialize(*other)) + " instead of " +
              json::serialize(entry.value());
    }
  }
  return text;
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception that is none of C++'s";
  }
}

Errc code_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.code();
  } catch (...) {
    return Errc::bad_argument;
  }
}

bool is_agreed(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const AgreedError&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// What a plan depends on besides parameters and resolutions.
std::string plan_key(const Registries& registries, const EngineOptions& options,
                     const WorldSpec& world) {
  return json::serialize(json::object{{"registries", reinterpret_cast<std::uintptr_t>(&registries)},
                                      {"planner", options.planner},
                                      {"planner_options", object_of(options.planner_options)},
                                      {"topology", options.topology.canonical_json()},
                                      {"world_size", world.world_size}});
}

/// "phase 'move': " before @p text, unless it names a phase already: what comes from the store is
/// the same on every rank, and must stay so.
std::string with_phase(std::string_view phase, const std::string& text) {
  return text.find("phase '") == std::string::npos ? "phase '" + std::string(phase) + "': " + text
                                                   : text;
}

}  // namespace

Deadline EngineOptions::init_deadline() const {
  std::chrono::milliseconds sum{0};
  for (const std::string_view phase :
       {phases::kRendezvous, phases::kSource, phases::kDestination, phases::kDataPlane,
        phases::kRuntime, phases::kCommunicator, phases::kPlan}) {
    sum += 2 * deadline_span(phase);
  }
  return deadline_in(sum);
}

std::string default_transport(const Registries& registries, RanksAre ranks, MemorySpace memory) {
  const bool ucx = ranks == RanksAre::processes && memory == MemorySpace::host &&
                   registries.transports.contains("ucx");
  return ucx ? "ucx" : "loopback";
}

EngineOptions with_transport(const Registries& registries, EngineOptions options) {
  if (options.transport.empty()) {
    options.transport = default_transport(registries, RanksAre::processes,
                                          options.device ? MemorySpace::device : MemorySpace::host);
  }
  return options;
}

Link::Link(LinkParts parts, WorldSpec world, Rank rank)
    : parts_(std::move(parts)),
      world_(std::move(world)),
      rank_(rank),
      part_(parts_.source != nullptr ? "trainer" : "worker"),
      watchdog_([this] { return failure(); }) {
  expects((parts_.source != nullptr) != (parts_.sink != nullptr), "a source or a sink");
}

Link::~Link() {
  watchdog_.release();
  round_.reset();
  transport_.reset();
  group_.reset();
}

Statement Link::attempt(const std::function<std::string()>& body) {
  try {
    return Statement::value(body());
  } catch (...) {
    return Statement::failure(text_of(std::current_exception()));
  }
}

void Link::tell(Event::Level level, std::string_view phase, std::optional<std::uint64_t> version,
                double seconds, std::string detail) const {
  if (options().on_event) {
    options().on_event(
        {level, rank_, part_, std::string(phase), version, seconds, std::move(detail)});
  }
}

/// The store decides which of several failures is the world's, and tells everybody.
std::string Link::settled_failure() const {
  const Deadline deadline = deadline_in(kSettle);
  std::string text = failure();
  while (text.empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    text = failure();
  }
  return text;
}

std::string Link::failure() const {
  const std::lock_guard lock(hanging_up_);
  return group_ ? group_->failure() : std::string();
}

void Link::hang_up() noexcept {
  const std::lock_guard lock(hanging_up_);
  group_.reset();
}

void Link::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(hanging_up_);
  if (group_ && ended_.empty()) {
    group_->abort(reason);
  }
  if (round_) {
    round_->abort();
  }
}

void Link::phase(std::string_view name, std::optional<std::uint64_t> version,
                 const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  try {
    body();
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    std::string text = with_phase(name, text_of(error));
    if (group_ && !is_agreed(error)) {
      if (failure().empty()) {
        group_->abort(text);
      }
      if (const std::string agreed = settled_failure(); !agreed.empty()) {
        text = with_phase(name, agreed);
      }
    }
    if (round_) {
      round_->abort();
    }
    {
      const std::lock_guard lock(hanging_up_);
      ended_ = text;
    }
    tell(Event::Level::error, name, version, seconds_since(start), text);
    throw Error(code_of(error), text);
  }
  tell(Event::Level::info, name, version, seconds_since(start));
}

void Link::init(const std::string& early) {
  phase(phases::kRendezvous, {}, [&] { meet(); });
  phase(phases::kSource, {}, [&] { agree_on_source(early); });
  phase(phases::kDestination, {}, [&] { agree_on_destination(); });
  phase(phases::kDataPlane, {}, [&] { agree_on_data_plane(); });
  phase(phases::kRuntime, {}, [&] { prepare_runtime(); });
  phase(phases::kCommunicator, {}, [&] { connect(); });
  phase(phases::kPlan, {}, [&] { complete_plan(); });
}

void Link::meet() {
  const Deadline deadline = options().deadline_of(phases::kRendezvous);
  const Statement mine = attempt([&]() -> std::string {
    if (options().on_phase) {
      options().on_phase(phases::kRendezvous);
    }
    check_world(world_);
    return "T=" + std::to_string(world_.rank_offset);
  });
  WorldOptions where;
  where.address = world_.master_address;
  where.port = world_.master_port;
  where.token = options().token;
  where.epoch = world_.epoch;
  where.world = world_.world;
  where.rank = rank_;
  where.size = world_.world_size;
  auto group = join_world(where, deadline);
  {
    const std::lock_guard lock(hanging_up_);
    group_ = std::move(group);
  }
  require(phases::kRendezvous, group_->agree(phases::kRendezvous, mine, deadline));
}

/// Names the first difference from the root's text, when not all ranks have the same.
/// @param mine  Whether this rank has a text of its own.
void Link::compare_bodies(std::string_view phase, Rank root, const std::string& text, bool mine) {
  const std::string expected =
      group_->broadcast(std::string(phase) + " bodies", root, text, options().deadline_of(phase));
  const std::string difference = mine ? first_difference(expected, text) : std::string();
  const Statement statement =
      difference.empty() ? Statement::value("")
                         : Statement::failure(difference + " on rank " + std::to_string(root));
  require(phase, group_->agree(phase, statement, options().deadline_of(phase)));
  throw AgreedError(Errc::bad_argument,
                    "phase '" + std::string(phase) + "': digests differ, but bodies do not");
}

void Link::agree_on_source(const std::string& early) {
  const Statement mine = attempt([&]() -> std::string {
    if (options().on_phase) {
      options().on_phase(phases::kSource);
    }
    if (!early.empty()) {
      throw Error(Errc::bad_argument, early);
    }
    const std::vector<ParamSpec>& params =
        parts_.source != nullptr ? parts_.source->params() : *parts_.told;
    check_source_params(params, world_.rank_offset);
    // Every rank goes on with what travels, so that layouts mean the same everywhere.
    declared_ = agreed_params(params_to_text(params));
    return declared_->digest;
  });
  const Verdict verdict =
      group_->agree(phases::kSource, mine, options().deadline_of(phases::kSource));
  if (any_failed(verdict)) {
    require(phases::kSource, verdict);
  }
  if (!verdict.unanimous()) {
    compare_bodies(phases::kSource, 0, declared_->text, true);
  }
}

void Link::agree_on_destination() {
  std::string text;
  const Rank first_worker = world_.rank_offset;
  const Statement mine = attempt([&]() -> std::string {
    if (options().on_phase) {
      options().on_phase(phases::kDestination);
    }
    if (parts_.sink == nullptr) {
      return {};
    }
    const std::vector<Resolution> resolutions = parts_.resolve(declared_);
    check_resolutions(declared_->params, resolutions, first_worker, world_.world_size);
    text = resolutions_to_text(declared_->params, resolutions);
    return sha256_hex(text);
  });
  const Verdict verdict =
      group_->agree(phases::kDestination, mine, options().deadline_of(phases::kDestination));
  if (any_failed(verdict)) {
    require(phases::kDestination, verdict);
  }
  for (const Verdict::Side& side : verdict.sides) {
    if (side.statement.text.empty()) {
      continue;  // the trainers
    }
    if (!resolved_digest_.empty() || !verdict.others.empty()) {
      compare_bodies(phases::kDestination, first_worker, text, parts_.sink != nullptr);
    }
    resolved_digest_ = side.statement.text;
  }
  // Trainers cannot know the destination: the first worker's description is everybody's.
  const std::string published = group_->broadcast("destination publication", first_worker, text,
                                                  options().deadline_of(phases::kDestination));
  resolutions_ = agreed_resolutions(*declared_, resolved_digest_, published);
}

void Link::agree_on_data_plane() {
  const Statement mine = attempt([&]() -> std::string {
    if (options().on_phase) {
      options().on_phase(phases::kDataPlane);
    }
    json::object said{{"schema_version", kWireSchemaVersion},
                      {"interface_version", kInterfaceVersion},
                      {"epoch", group_->epoch()},
                      {"transport", options().transport},
                      {"transport_options", object_of(options().transport_options)},
                      {"planner", options().planner},
                      {"planner_options", object_of(options().planner_options)},
                      {"topology", sha256_hex(options().topology.canonical_json())},
                      {"verify", options().verify},
                      {"pool_bytes", options().limits.pool_bytes},
                      {"max_cta", world_.max_cta ? json::value(*world_.max_cta) : nullptr},
                      {"unique_id", world_.unique_id_b64.empty()
                                        ? std::string()
                                        : sha256_hex(decode_unique_id(world_.unique_id_b64))}};
    for (const auto& [key, value] : options().environment) {
      said["environment " + key] = value;
    }
    return json::serialize(said);
  });
  const Deadline deadline = options().deadline_of(phases::kDataPlane);
  const Verdict verdict = group_->agree(phases::kDataPlane, mine, deadline);
  if (verdict.unanimous() || any_failed(verdict)) {
    require(phases::kDataPlane, verdict);
    agree_on_version(deadline);
    return;
  }
  const std::string expected = group_->broadcast("data-plane settings", 0, mine.text, deadline);
  const std::string difference = differing_keys(expected, mine.text);
  const Statement statement =
      difference.empty() ? Statement::value("") : Statement::failure(difference + " on rank 0");
  require(phases::kDataPlane, group_->agree(phases::kDataPlane, statement, deadline));
}

/// No rank goes back: the first version is the largest that any rank could be next.
void Link::agree_on_version(Deadline deadline) {
  const Verdict verdict = group_->agree(
      "first version", Statement::value(std::to_string(parts_.first_version)), deadline);
  for (const Verdict::Side& side : verdict.sides) {
    parts_.first_version =
        std::max<std::uint64_t>(parts_.first_version, std::stoull(side.statement.text));
  }
  if (!verdict.others.empty()) {
    throw AgreedError(Errc::bad_argument,
                      "phase '" + std::string(phases::kDataPlane) +
                          "': the ranks hold too many different versions; start the workers anew");
  }
}

void Link::prepare_runtime() {
  const Statement mine = attempt([&]() -> std::string {
    if (options().on_phase) {
      options().on_phase(phases::kRuntime);
    }
    transport_ = parts_.registries->transports.create(
        options().transport, {options().transport_options, world_.max_cta, options().device});
    if (parts_.source != nullptr) {
      parts_.source->borrow(parts_.first_version);  // where a source takes its memory
    } else {
      parts_.sink->lend();
    }
    return {};
  });
  require(phases::kRuntime,
          group_->agree(phases::kRuntime, mine, options().deadline_of(phases::kRuntime)));
}

void Link::connect() {
  const Deadline deadline = options().deadline_of(phases::kCommunicator);
  const Statement mine = attempt([&]() -> std::string {
    if (options().on_phase) {
      options().on_phase(phases::kCommunicator);
    }
    return {};
  });
  // Said apart, so that nobody enters a library's own rendezvous in vain.
  require(phases::kCommunicator, group_->agree(phases::kCommunicator, mine, deadline));
  transport_->connect(*group_, deadline);
  require(phases::kCommunicator,
          group_->agree("communicator built", Statement::value(""), deadline));
}

AgreedPlan Link::make_plan() const {
  AgreedPlan made{make_problem(declared_->params, *resolutions_), {}};
  Topology topology = options().topology;
  if (topology.islands.empty()) {
    topology = Topology::single_island(world_.world_size);
  }
  topology.require(world_.world_size);
  made.plan = parts_.registries->planners.create(options().planner, {options().planner_options})
                  ->plan(made.problem, topology);
  return made;
}

void Link::complete_plan() {
  const Deadline deadline = options().deadline_of(phases::kPlan);
  const Statement mine = attempt([&]() -> std::string {
    if (options().on_phase) {
      options().on_phase(phases::kPlan);
    }
    agreed_ = agreed_plan(
        plan_key(*parts_.registries, options(), world_) + declared_->digest + resolved_digest_,
        [this] { return make_plan(); });
    if (rank_ == 0) {
      // One proof is enough: the digests say that all are the same.
      check_plan(agreed_->plan, agreed_->problem);
    }
    plan_digest_ = agreed_->plan.digest;
    auto round = std::make_unique<PreparedRound>(agreed_->problem, agreed_->plan, *resolutions_,
                                                 rank_, RoundParts{parts_.source, parts_.sink},
                                                 options().limits, parts_.first_version);
    round->require_memory(*transport_);
    {
      const std::lock_guard lock(hanging_up_);
      round_ = std::move(round);
    }
    move_span_ = options().deadline_span(phases::kMove) *
                 round_groups(agreed_->problem, *resolutions_, options().limits.pool_bytes).count();
    return plan_digest_;
  });
  require(phases::kPlan, group_->agree(phases::kPlan, mine, deadline));
  round_->prepare(*transport_, deadline);
  if (options().verify) {
    integrity_ = std::make_unique<Integrity>(agreed_->problem, rank_);
  }
}

}  // namespace m2n
