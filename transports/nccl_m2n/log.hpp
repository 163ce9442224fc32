// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Reads the debug log of NVIDIA's reshard library: the only place where it says which path it
/// took. No CUDA here.

#include <string>
#include <string_view>

namespace m2n::nccl_m2n {

/// The path that rank @p rank took by @p log: "pack-lsa-hput", "pack-kernel", "pack-split",
/// "grouped-kernel", @p requested (of "direct" and "pipe") followed by "-kernel", or several joined
/// by "+". "not logged" where it tells nothing.
std::string path_in_log(const std::string& log, int rank, std::string_view requested);

/// The lines of @p output that the library did not write.
std::string lines_of_others(const std::string& output);

}  // namespace m2n::nccl_m2n
