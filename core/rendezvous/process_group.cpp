// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A WorldGroup over a connection to the store.

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "core/rendezvous/addresses.hpp"
#include "core/rendezvous/connection.hpp"
#include "core/rendezvous/identity.hpp"
#include "core/rendezvous/secrets.hpp"
#include "core/rendezvous/wire.hpp"
#include "core/rendezvous/world_group.hpp"

namespace m2n {
namespace {

using wire::Kind;
using wire::Malformed;
using wire::Reader;
using wire::Writer;

/// The store answers at the deadline, naming who is missing. Only when it is silent so much longer
/// is it taken for missing itself.
constexpr std::chrono::milliseconds kStoreGrace{2000};
/// For last words, which nobody waits for.
constexpr std::chrono::milliseconds kGoodbye{200};
constexpr std::chrono::milliseconds kFirstRetry{5};
constexpr std::chrono::milliseconds kLongestRetry{250};

Deadline now() { return std::chrono::steady_clock::now(); }

std::uint64_t wait_us(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::microseconds>(deadline - now());
  return static_cast<std::uint64_t>(std::max<std::int64_t>(left.count(), 0));
}

std::string naming_phase(std::string_view phase) { return "phase '" + std::string(phase) + "'"; }

struct Failure {
  Errc code = Errc::peer_lost;
  std::string text;
};

Failure read_failure(Reader reader) {
  Failure failure;
  failure.code = reader.code();
  failure.text = std::string(reader.text(UINT64_MAX));
  reader.end();
  return failure;
}

class ProcessGroup final : public WorldGroup {
 public:
  struct Terms {
    std::uint64_t epoch = 0;
    bool one_process = false;
    std::uint64_t max_value_bytes = 0;
  };

  ProcessGroup(Connection connection, const WorldOptions& options, Terms terms)
      : connection_(std::move(connection)),
        store_(endpoint_text(options.address, options.port)),
        rank_(options.rank),
        size_(options.size),
        terms_(terms) {}

  ~ProcessGroup() override { leave({}); }

  Rank rank() const noexcept override { return rank_; }
  Rank size() const noexcept override { return size_; }
  bool in_process() const noexcept override { return terms_.one_process; }
  std::uint64_t epoch() const noexcept override { return terms_.epoch; }

  std::vector<std::string> all_gather(std::string_view phase, std::string_view value,
                                      Deadline deadline) override {
    return collective(wire::Operation::gather, phase, 0, {false, std::string(value)}, deadline,
                      [&](std::string_view payload) {
                        Reader reader(payload);
                        std::vector<std::string> values;
                        values.reserve(static_cast<std::size_t>(size_));
                        for (Rank rank = 0; rank < size_; ++rank) {
                          values.emplace_back(reader.text(UINT64_MAX));
                        }
                        reader.end();
                        return values;
                      });
  }

  void barrier(std::string_view phase, Deadline deadline) override {
    collective(wire::Operation::barrier, phase, 0, {}, deadline,
               [](std::string_view) { return 0; });
  }

  Verdict agree(std::string_view phase, const Statement& statement, Deadline deadline) override {
    Statement said = statement;
    if (said.failed && said.text.size() > kMaxStatementBytes) {
      said.text.resize(kMaxStatementBytes - 3);
      said.text += "...";
    }
    expects(said.text.size() <= kMaxStatementBytes, "a statement of at most 4096 bytes");
    return collective(
        wire::Operation::agree, phase, 0, said, deadline,
        [&](std::string_view payload) { return wire::decode_verdict(payload, size_); });
  }

  std::string broadcast(std::string_view phase, Rank root, std::string_view value,
                        Deadline deadline) override {
    check_rank(root);
    const Statement said = Statement::value(std::string(root == rank_ ? value : ""));
    std::string sent = collective(wire::Operation::broadcast, phase, root, said, deadline,
                                  [](std::string_view payload) { return std::string(payload); });
    return root == rank_ ? std::string(value) : sent;
  }

  void send(std::string_view phase, Rank to, std::string_view value, Deadline deadline) override {
    check_rank(to);
    check_name(phase);
    check_value(value);
    call(Kind::send, naming_phase(phase), Writer().text(phase).rank(to).text(value).take(),
         deadline);
  }

  std::string receive(std::string_view phase, Rank from, Deadline deadline) override {
    check_rank(from);
    check_name(phase);
    return call(Kind::receive, naming_phase(phase),
                Writer().text(phase).rank(from).u64(wait_us(deadline)).take(), deadline);
  }

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    check_value(value);
    ask_key(Kind::set, key, Writer().text(key).text(value).take(), deadline);
  }

  std::string get(std::string_view key, Deadline deadline) override {
    std::optional<std::string> value =
        ask_key(Kind::get, key, Writer().text(key).u64(wait_us(deadline)).take(), deadline);
    if (!value.has_value()) {
      throw Error(Errc::timed_out,
                  "key '" + std::string(key) + "': the deadline passed and no rank has set it");
    }
    return *std::move(value);
  }

  std::optional<std::string> try_get(std::string_view key, Deadline deadline) override {
    return ask_key(Kind::try_get, key, Writer().text(key).take(), deadline);
  }

  void erase(std::string_view key, Deadline deadline) override {
    ask_key(Kind::erase, key, Writer().text(key).take(), deadline);
  }

  std::int64_t add(std::string_view key, std::int64_t amount, Deadline deadline) override {
    const std::string text =
        *ask_key(Kind::add, key, Writer().text(key).u64(static_cast<std::uint64_t>(amount)).take(),
                 deadline);
    std::int64_t sum = 0;
    std::from_chars(text.data(), text.data() + text.size(), sum);
    return sum;
  }

  std::vector<Peer> peers(Deadline deadline) override {
    const std::string payload = call(Kind::peers, "the list of peers", {}, deadline);
    return read([&] {
      Reader reader(payload);
      std::vector<Peer> peers(static_cast<std::size_t>(size_));
      for (Peer& peer : peers) {
        peer.host_name = reader.name();
        peer.machine = reader.name();
        peer.memory = reader.name();
        peer.process = reader.name();
        peer.pid = static_cast<std::int64_t>(reader.u64());
      }
      reader.end();
      return peers;
    });
  }

  std::string failure() override {
    // While the owner waits for an answer, it is the owner who reads of failures.
    if (const std::unique_lock reading(reading_, std::try_to_lock); reading.owns_lock()) {
      try {
        while (!left_ && !known_failure().has_value()) {
          const std::optional<Frame> frame = connection_.poll(now() + kStoreGrace);
          if (!frame.has_value()) {
            break;
          }
          note(*frame);
        }
      } catch (const Malformed& error) {
        note(Failure{Errc::peer_lost, garbled("between phases", error.what())});
      } catch (const std::runtime_error&) {
        note(Failure{Errc::peer_lost, lost_store("between phases")});
      }
    }
    const std::optional<Failure> known = known_failure();
    return known.has_value() ? known->text : "";
  }

  void abort(std::string_view reason) noexcept override { say(Kind::abort, reason); }

  void leave(std::string_view reason) noexcept override {
    if (!left_.exchange(true)) {
      say(Kind::leave, reason);
      connection_.hang_up();
    }
  }

 private:
  void check_rank(Rank rank) const { expects(rank >= 0 && rank < size_, "a rank of this group"); }

  static void check_name(std::string_view name) {
    expects(name.size() <= wire::kMaxNameBytes, "a phase or key of at most 1024 bytes");
  }

  void check_value(std::string_view value) const {
    if (value.size() > terms_.max_value_bytes) {
      throw Error(Errc::bad_argument, "a value of " + std::to_string(value.size()) +
                                          " bytes; the store takes at most " +
                                          std::to_string(terms_.max_value_bytes));
    }
  }

  /// No more words: how a connection ends differs from rank to rank.
  std::string lost_store(std::string_view what) const {
    return std::string(what) + ": ranks that have left: 0 (its store at " + store_ + " has gone)";
  }

  std::string garbled(std::string_view what, std::string_view words) const {
    return std::string(what) + ": rank 0's store at " + store_ + " sent " + std::string(words);
  }

  std::optional<Failure> known_failure() {
    const std::lock_guard lock(failing_);
    return failure_;
  }

  void note(Failure failure) {
    const std::lock_guard lock(failing_);
    if (!failure_.has_value()) {
      failure_ = std::move(failure);
    }
  }

  void note(const Frame& frame) {
    if (frame.header.kind != Kind::failure) {
      throw Malformed("an answer that nobody asked for");
    }
    note(read_failure(Reader(frame.payload)));
  }

  [[noreturn]] void raise() {
    const Failure known = *known_failure();
    throw Error(known.code, known.text);
  }

  /// One request and its answer. @param what  Starts the error when the store itself is lost.
  std::string call(Kind kind, const std::string& what, std::string_view payload,
                   Deadline deadline) {
    const std::lock_guard reading(reading_);
    if (left_) {
      throw Error(Errc::peer_lost, what + ": this rank has left the group");
    }
    if (known_failure().has_value()) {
      raise();
    }
    const Deadline patience = later(deadline, kStoreGrace);
    const std::uint64_t request = ++request_;
    try {
      try {
        connection_.send(kind, request, payload, patience);
      } catch (const ConnectionBroken&) {
        // The store may have said why before it hung up; receive() will tell.
      }
      for (;;) {
        Frame frame = connection_.receive(patience);
        if (frame.header.kind == Kind::reply && frame.header.request == request) {
          return std::move(frame.payload);
        }
        note(frame);
        raise();
      }
    } catch (const ConnectionSlow&) {
      note(Failure{Errc::timed_out, what +
                                        ": the deadline passed; ranks missing: 0 (its store at " +
                                        store_ + " does not answer)"});
    } catch (const ConnectionBroken&) {
      note(Failure{Errc::peer_lost, lost_store(what)});
    } catch (const Malformed& error) {
      note(Failure{Errc::peer_lost, garbled(what, error.what())});
    }
    raise();
  }

  /// Runs @p decode; what it finds malformed is the store's fault.
  template <class Decode>
  auto read(Decode decode) -> decltype(decode()) {
    try {
      return decode();
    } catch (const Malformed& error) {
      note(Failure{Errc::peer_lost, garbled("an answer", error.what())});
    }
    raise();
  }

  template <class Decode>
  auto collective(wire::Operation operation, std::string_view phase, Rank root,
                  const Statement& said, Deadline deadline, Decode decode)
      -> decltype(decode(std::string_view())) {
    check_name(phase);
    check_value(said.text);
    wire::Collective sent;
    sent.operation = operation;
    sent.sequence = collectives_;
    sent.phase = phase;
    sent.root = root;
    sent.wait_us = wait_us(deadline);
    sent.failed = said.failed;
    sent.value = said.text;
    const std::string payload =
        call(Kind::collective, naming_phase(phase), wire::encode_collective(sent), deadline);
    ++collectives_;
    return read([&] { return decode(payload); });
  }

  std::optional<std::string> ask_key(Kind kind, std::string_view key, std::string_view payload,
                                     Deadline deadline) {
    check_name(key);
    const std::string what = "key '" + std::string(key) + "'";
    const std::string answer = call(kind, what, payload, deadline);
    return read([&]() -> std::optional<std::string> {
      Reader reader(answer);
      const auto status = static_cast<wire::KeyStatus>(reader.u8());
      const std::string text(reader.text(UINT64_MAX));
      reader.end();
      switch (status) {
        case wire::KeyStatus::found:
          return text;
        case wire::KeyStatus::absent:
          return std::nullopt;
        case wire::KeyStatus::refused:
          break;
      }
      throw Error(Errc::bad_argument, text);
    });
  }

  void say(Kind kind, std::string_view reason) noexcept {
    try {
      const std::string_view cut = reason.substr(0, kMaxStatementBytes);
      connection_.send(kind, 0, Writer().text(cut).take(), now() + kGoodbye);
    } catch (const std::exception&) {
      // The store is gone, and with it all that would read this.
    }
  }

  Connection connection_;
  std::string store_;
  Rank rank_;
  Rank size_;
  Terms terms_;
  std::uint64_t request_ = 0;
  std::uint64_t collectives_ = 0;
  std::atomic<bool> left_ = false;
  std::mutex reading_;  ///< Held by whoever reads from the connection.
  std::mutex failing_;
  std::optional<Failure> failure_;  ///< Guarded by failing_.
};

/// Tries once. @return null, with @p why, when it may work later.
std::unique_ptr<WorldGroup> try_join(const WorldOptions& options, Deadline deadline,
                                     std::string& why) {
  Connection connection(StreamSocket::open(options.address, options.port, deadline));
  const Frame challenge = connection.receive(deadline, wire::kMaxHelloBytes);
  if (challenge.header.kind != Kind::challenge || challenge.payload.size() != kNonceBytes) {
    throw Malformed("a challenge that is none");
  }
  wire::Hello hello;
  hello.epoch = options.epoch;
  hello.world = options.world;
  hello.rank = options.rank;
  hello.size = options.size;
  hello.peer = this_peer();
  hello.wait_us = wait_us(deadline);
  hello.nonce = make_nonce();
  connection.send(Kind::hello, 0, wire::encode_hello(hello, options.token, challenge.payload),
                  deadline);
  const Frame answer = connection.receive(later(deadline, kStoreGrace), wire::kMaxAnswerBytes);
  Reader reader(answer.payload);
  switch (answer.header.kind) {
    case Kind::refused: {
      const bool again = reader.u8() != 0;
      const Failure refusal = read_failure(reader);
      if (!again) {
        throw Error(refusal.code, refusal.text);
      }
      why = refusal.text;
      return nullptr;
    }
    case Kind::failure: {
      const Failure failure = read_failure(reader);
      throw Error(failure.code, failure.text);
    }
    case Kind::welcome: {
      ProcessGroup::Terms terms;
      terms.epoch = reader.u64();
      terms.one_process = reader.u8() != 0;
      terms.max_value_bytes = reader.u64();
      const std::string_view proof = reader.text(wire::kMaxHelloBytes);
      reader.end();
      if (!equal_secrets(proof, wire::welcome_proof(options.token, hello.nonce))) {
        throw Error(Errc::bad_argument, "phase 'rendezvous': the store at " +
                                            endpoint_text(options.address, options.port) +
                                            " does not know the token of this job");
      }
      return std::make_unique<ProcessGroup>(std::move(connection), options, terms);
    }
    default:
      throw Malformed("no welcome");
  }
}

}  // namespace

std::unique_ptr<WorldGroup> join_world(const WorldOptions& options, Deadline deadline) {
  expects(options.size > 0 && options.rank >= 0 && options.rank < options.size,
          "a rank from 0 to below the world's size");
  expects(options.port != 0, "the port of the store");
  expects(options.world.size() <= wire::kMaxNameBytes, "a world's name of at most 1024 bytes");
  std::string why = "there was no time to connect";
  for (std::chrono::milliseconds pause = kFirstRetry; now() < deadline;
       pause = std::min(2 * pause, kLongestRetry)) {
    try {
      if (std::unique_ptr<WorldGroup> group = try_join(options, deadline, why)) {
        return group;
      }
    } catch (const ConnectionBroken& error) {
      why = error.what();
    } catch (const ConnectionSlow& error) {
      why = error.what();
    } catch (const Malformed& error) {
      why = std::string("something else answers there, with ") + error.what();
    }
    std::this_thread::sleep_until(std::min(deadline, now() + pause));
  }
  throw Error(Errc::timed_out,
              "phase 'rendezvous': the deadline passed; ranks missing: 0 (its "
              "store at " +
                  endpoint_text(options.address, options.port) + ": " + why + ")");
}

}  // namespace m2n
