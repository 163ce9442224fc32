// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "core/api/sink.hpp"

#include "core/error.hpp"

namespace m2n {

void WeightSink::derive(DerivedTensor tensor) {
  throw Error(Errc::unavailable, "sink '" + std::string(name()) + "' derives nothing, so not '" +
                                     tensor.name + "'; the choices are inplace, shadow");
}

ServedWeights WeightSink::serve() {
  throw Error(Errc::unavailable, "sink '" + std::string(name()) +
                                     "' serves no weights; the choices are inplace, shadow");
}

LocalBuffer FullTensor::buffer() const {
  const std::uint64_t bytes = static_cast<std::uint64_t>(element_count(shape)) * bytes_of(dtype);
  return {const_cast<std::byte*>(data), bytes, place.space, place.device};
}

std::string_view to_string(Mode mode) {
  switch (mode) {
    case Mode::direct:
      return "direct";
    case Mode::fallback:
      return "fallback";
  }
  return "unknown";
}

}  // namespace m2n
