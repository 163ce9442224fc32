// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Memory that the processes of one machine share. A segment has no name in any file system: it is
/// reached through its owner's descriptor, and is gone with the last process that maps it.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/api/group.hpp"

namespace m2n {

/// Owns a file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int raw) noexcept : raw_(raw) {}
  Descriptor(Descriptor&& other) noexcept : raw_(std::exchange(other.raw_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Descriptor();
  int get() const noexcept { return raw_; }

 private:
  int raw_ = -1;
};

/// Owns a mapping of a part of a segment.
class Mapping {
 public:
  Mapping() = default;
  /// @p offset is a multiple of the page size. @throws Error{unavailable}.
  Mapping(const Descriptor& segment, std::uint64_t offset, std::uint64_t bytes);
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();
  std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// A new segment of zeros, with its memory reserved. @throws Error{unavailable}.
Descriptor create_segment(std::uint64_t bytes);
/// Opens descriptor @p number of process @p process anew. @throws Error{unavailable}.
Descriptor open_segment(std::int64_t process, int number);
/// Rounds up to whole pages.
std::uint64_t page_aligned(std::uint64_t bytes);

/// Equal on all processes that can open each other's descriptors: same kernel, same process ids.
std::string machine_id();

/// Marks byte @p index of @p segment as held by this opener until it is closed, or its process
/// ends in whatever way. @throws Error{unavailable}.
void hold_byte(const Descriptor& segment, std::uint64_t index);
/// False when no other opener holds the byte.
bool is_byte_held(const Descriptor& segment, std::uint64_t index) noexcept;

/// Sleeps while @p word is @p expected, at most @p limit. @return false when the time was over.
bool wait_on(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
             std::chrono::nanoseconds limit) noexcept;
/// Wakes whoever sleeps on @p word, in every process.
void wake_all(const std::atomic<std::uint32_t>& word) noexcept;

}  // namespace m2n
