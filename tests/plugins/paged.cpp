// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Device memory, and a transport for it, on a machine without a device: `m2n run --memory device`
/// where every touch of a device's byte by the host is a crash.

#include "core/api/plugins.hpp"
#include "tests/support/paged_memory.hpp"

M2N_PLUGIN(registries) {
  m2n::provide_device_memory(m2n::testing::make_paged_memory());
  registries.transports.add(
      "paged", "host pages that stand for device memory",
      [](const m2n::TransportContext&) { return m2n::testing::make_paged_transport(); });
}
