// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/store_session.hpp"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <utility>

#include "core/error.hpp"
#include "core/rendezvous/secrets.hpp"

namespace m2n {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using wire::Kind;

namespace {

/// How much of a frame is made room for before it has come.
constexpr std::uint64_t kPayloadStep = 256U << 10U;
/// A client with so many answers on their way is not read from until it takes some.
constexpr std::size_t kMaxAnswers = 64;

}  // namespace

StoreRoom::StoreRoom(Rank size, const StoreOptions& options)
    : seats(static_cast<std::size_t>(size)),
      world(size, options.epoch, options.max_value_bytes,
            [this](Rank rank, Kind kind, std::uint64_t request, const World::Payload& payload) {
              if (StoreSession* session = seats[static_cast<std::size_t>(rank)]) {
                session->deliver(kind, request, payload);
              }
            }) {}

StoreSession::StoreSession(tcp::socket socket, StoreState& store)
    : socket_(std::move(socket)),
      timer_(socket_.get_executor()),
      store_(store),
      stranger_(store.strangers.insert(store.strangers.end(), this)) {
  store_.sessions.insert(this);
}

void StoreSession::start() {
  const auto self = shared_from_this();
  timer_.expires_after(store_.options.handshake_time);
  timer_.async_wait([self](error_code error) {
    if (!error && self->room_ == nullptr) {
      self->close("it did not greet in time");
    }
  });
  guarded([&] {
    challenge_ = make_nonce();
    deliver(Kind::challenge, 0, std::make_shared<const std::string>(challenge_));
    read_header();
  });
}

template <class Step>
void StoreSession::guarded(Step step) {
  try {
    step();
  } catch (const std::exception& error) {
    close(std::string("it sent ") + error.what());
  }
}

void StoreSession::close(const std::string& why) {
  if (std::exchange(closed_, true)) {
    return;
  }
  const auto self = shared_from_this();
  error_code ignored;
  timer_.cancel();
  socket_.close(ignored);
  store_.sessions.erase(this);
  if (room_ == nullptr) {
    store_.strangers.erase(stranger_);
  } else {
    room_->seats[static_cast<std::size_t>(rank_)] = nullptr;
    room_->world.gone(rank_, why);
  }
  store_.changed();
}

void StoreSession::finish() {
  finishing_ = true;
  if (!closed_ && answers_.empty()) {
    error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
  }
}

void StoreSession::read_header() {
  const auto self = shared_from_this();
  asio::async_read(socket_, asio::buffer(header_bytes_),
                   [self](error_code error, std::size_t) { self->have_header(error); });
}

void StoreSession::have_header(error_code error) {
  if (error) {
    close(error == asio::error::eof ? "its process ended or hung up" : error.message());
    return;
  }
  guarded([&] {
    header_ = wire::decode(header_bytes_);
    const std::uint64_t most =
        wire::kMaxHelloBytes + (room_ == nullptr ? 0 : store_.options.max_value_bytes);
    if (header_.payload_bytes > most) {
      throw wire::Malformed("a frame of " + std::to_string(header_.payload_bytes) +
                            " bytes where " + std::to_string(most) + " are allowed");
    }
    payload_.clear();
    read_payload();
  });
}

void StoreSession::read_payload() {
  const std::uint64_t have = payload_.size();
  if (have == header_.payload_bytes) {
    have_frame();
    return;
  }
  const auto self = shared_from_this();
  payload_.resize(std::min(header_.payload_bytes, have + kPayloadStep));
  asio::async_read(socket_, asio::buffer(payload_.data() + have, payload_.size() - have),
                   [self](error_code error, std::size_t) {
                     if (error) {
                       self->close("its connection broke inside of a message");
                     } else {
                       self->guarded([&] { self->read_payload(); });
                     }
                   });
}

void StoreSession::have_frame() {
  if (room_ == nullptr) {
    greet();
  } else {
    room_->world.request(rank_, header_, payload_, std::chrono::steady_clock::now());
  }
  store_.changed();
  if (closed_) {
    return;
  }
  paused_ = answers_.size() >= kMaxAnswers;
  if (!paused_) {
    read_header();
  }
}

void StoreSession::greet() {
  if (header_.kind != Kind::hello || refused_) {
    throw wire::Malformed("no greeting");
  }
  try {
    const wire::Hello hello = wire::decode_hello(payload_, store_.options.token, challenge_);
    if (const std::optional<Refusal> refusal = admit(hello); refusal.has_value()) {
      refuse(*refusal);
    }
  } catch (const Error& error) {
    refuse(refused_join(false, error.code(), error.what()));
  }
}

std::optional<Refusal> StoreSession::admit(const wire::Hello& hello) {
  const std::uint64_t epoch = store_.options.epoch;
  if (hello.epoch != kCurrentEpoch && hello.epoch != epoch) {
    return refused_join(hello.epoch > epoch, Errc::peer_lost,
                        "epoch " + std::to_string(hello.epoch) +
                            (hello.epoch > epoch ? " has not begun" : " is over") +
                            ": the store is at epoch " + std::to_string(epoch));
  }
  if (store_.aborted.has_value()) {
    return Refusal{hello.epoch == kCurrentEpoch, Errc::peer_lost, *store_.aborted};
  }
  if (hello.size < 1 || hello.size > kMaxWorldRanks || hello.rank >= hello.size) {
    return refused_join(false, Errc::bad_argument,
                        "there is no rank " + std::to_string(hello.rank) + " of " +
                            std::to_string(hello.size) + "; a world has 1 to " +
                            std::to_string(kMaxWorldRanks) + " ranks, counted from 0");
  }
  StoreRoom& room = store_.rooms.try_emplace(hello.world, hello.size, store_.options).first->second;
  if (std::optional<Refusal> refusal = room.world.refusal(hello); refusal.has_value()) {
    return refusal;
  }
  timer_.cancel();
  store_.strangers.erase(stranger_);
  room_ = &room;
  rank_ = hello.rank;
  room.seats[static_cast<std::size_t>(rank_)] = this;
  store_.changed();  // counted before the client hears of it
  room.world.join(hello, wire::welcome_proof(store_.options.token, hello.nonce),
                  std::chrono::steady_clock::now());
  return std::nullopt;
}

void StoreSession::refuse(const Refusal& refusal) {
  refused_ = true;
  deliver(Kind::refused, 0,
          std::make_shared<const std::string>(wire::Writer()
                                                  .u8(refusal.again ? 1 : 0)
                                                  .u8(static_cast<std::uint8_t>(refusal.code))
                                                  .text(refusal.text)
                                                  .take()));
  finish();
}

void StoreSession::deliver(Kind kind, std::uint64_t request, World::Payload payload) {
  if (closed_) {
    return;
  }
  const auto header = wire::encode({payload->size(), kind, request});
  answers_.push_back({header, std::move(payload)});
  if (answers_.size() == 1) {
    write();
  }
}

void StoreSession::write() {
  const auto self = shared_from_this();
  const Answer& answer = answers_.front();
  const std::array<asio::const_buffer, 2> parts = {asio::buffer(answer.header),
                                                   asio::buffer(*answer.payload)};
  asio::async_write(socket_, parts,
                    [self](error_code error, std::size_t) { self->have_written(error); });
}

void StoreSession::have_written(error_code error) {
  if (error) {
    close("its connection broke");
    return;
  }
  answers_.pop_front();
  if (!answers_.empty()) {
    guarded([&] { write(); });
  } else if (finishing_) {
    finish();
  }
  if (paused_ && answers_.size() < kMaxAnswers) {
    paused_ = false;
    read_header();
  }
}

}  // namespace m2n
