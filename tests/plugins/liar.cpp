// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A transport that is not to be believed, around "loopback". Option mode:
///   flip      flips one bit that a worker received (default)
///   nothing   moves nothing, and says that it did
///   refuse    refuses every program
///   break     fails in a round
/// and option from=N: only from round N on (default 1).

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "core/api/plugins.hpp"

namespace {

struct Lie {
  std::string mode = "flip";
  std::uint64_t from = 1;
};

class LiarSession final : public m2n::Session {
 public:
  LiarSession(std::unique_ptr<m2n::Session> honest, Lie lie, const m2n::Program& program,
              const m2n::Buffers& buffers)
      : honest_(std::move(honest)),
        lie_(std::move(lie)),
        report_(m2n::expected_report(program, "lie")),
        buffers_(buffers) {}

  void start(std::uint64_t version, m2n::Deadline deadline) override {
    version_ = version;
    report_.version = version;
    if (lies() && lie_.mode == "break") {
      throw m2n::TransportError(m2n::Errc::peer_lost, "the liar's link broke");
    }
    if (!lies() || lie_.mode != "nothing") {
      honest_->start(version, deadline);
    }
  }

  m2n::RoundReport wait(m2n::Deadline deadline) override {
    if (lies() && lie_.mode == "nothing") {
      return report_;
    }
    const m2n::RoundReport report = honest_->wait(deadline);
    for (const m2n::LocalBuffer& buffer : buffers_.destination) {
      if (lies() && buffer.bytes > 0) {
        buffer.data[buffer.bytes / 2] ^= std::byte{1};
        break;
      }
    }
    return report;
  }

  void abort() noexcept override { honest_->abort(); }

 private:
  bool lies() const { return version_ >= lie_.from; }

  std::unique_ptr<m2n::Session> honest_;
  Lie lie_;
  m2n::RoundReport report_;
  m2n::Buffers buffers_;
  std::uint64_t version_ = 0;
};

class Liar final : public m2n::Transport {
 public:
  Liar(std::unique_ptr<m2n::Transport> honest, Lie lie)
      : honest_(std::move(honest)), lie_(std::move(lie)) {}

  std::string_view name() const noexcept override { return "liar"; }
  void connect(m2n::Group& group, m2n::Deadline deadline) override {
    honest_->connect(group, deadline);
  }
  std::unique_ptr<m2n::Session> prepare(const m2n::Program& program, const m2n::Buffers& buffers,
                                        m2n::Deadline deadline) override {
    if (lie_.mode == "refuse") {
      throw m2n::TransportError(m2n::Errc::unavailable, "the liar moves nothing today");
    }
    return std::make_unique<LiarSession>(honest_->prepare(program, buffers, deadline), lie_,
                                         program, buffers);
  }

 private:
  std::unique_ptr<m2n::Transport> honest_;
  Lie lie_;
};

}  // namespace

M2N_PLUGIN(registries) {
  registries.transports.add(
      "liar", "a transport for tests of those who check",
      [known = registries.transports](const m2n::TransportContext& context) {
        m2n::require_known_options("transport 'liar'", context.options, {"mode", "from"});
        Lie lie;
        if (const auto found = context.options.find("mode"); found != context.options.end()) {
          lie.mode = found->second;
        }
        if (const auto found = context.options.find("from"); found != context.options.end()) {
          lie.from = std::stoull(found->second);
        }
        return std::make_unique<Liar>(known.create("loopback", {}), lie);
      });
}
