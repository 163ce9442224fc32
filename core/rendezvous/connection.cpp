// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/connection.hpp"

#include <algorithm>
#include <array>

namespace m2n {
namespace {

/// How much of a frame is made room for before it has come.
constexpr std::uint64_t kReadStep = std::uint64_t{1} << 20U;

}  // namespace

void Connection::send(wire::Kind kind, std::uint64_t request, std::string_view payload,
                      Deadline deadline) {
  const auto header = wire::encode({payload.size(), kind, request});
  std::string bytes(header.data(), header.size());
  const std::lock_guard lock(*sending_);
  socket_.write(bytes.append(payload), deadline);
}

Frame Connection::receive(Deadline deadline, std::uint64_t max_bytes) {
  std::array<char, wire::kHeaderBytes> bytes{};
  socket_.read(bytes.data(), bytes.size(), deadline);
  Frame frame{wire::decode(bytes), {}};
  if (frame.header.payload_bytes > max_bytes) {
    throw wire::Malformed("a frame of " + std::to_string(frame.header.payload_bytes) + " bytes");
  }
  while (frame.payload.size() < frame.header.payload_bytes) {
    const std::uint64_t have = frame.payload.size();
    frame.payload.resize(std::min(frame.header.payload_bytes, have + kReadStep));
    socket_.read(frame.payload.data() + have, frame.payload.size() - have, deadline);
  }
  return frame;
}

std::optional<Frame> Connection::poll(Deadline deadline) {
  if (!socket_.readable()) {
    return std::nullopt;
  }
  return receive(deadline);
}

}  // namespace m2n
