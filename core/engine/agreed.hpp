// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the ranks of a world have agreed on, and what each of them makes of it alike. Ranks that
/// are threads of one process work it out once and share it: a thousand of them would otherwise
/// plan a thousand times.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/sink.hpp"
#include "core/plan/plan.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// The trainers' parameters, as every rank reads them.
struct AgreedParams {
  std::string text;    ///< See params_to_text().
  std::string digest;  ///< SHA-256 of the text.
  std::vector<ParamSpec> params;
};

/// What a round moves, and how.
struct AgreedPlan {
  Problem problem;
  Plan plan;
};

/// Each gives the same value to every rank of this process that asks with the same key while any of
/// them holds it. Digests are taken for what they are digests of.
///
/// - Threads: any. Who asks first makes the value in its thread, the others wait for it.
/// - Errors: those of what makes the value; who waited then tries in turn, and gets its own.

/// @param text  Of params_to_text().
std::shared_ptr<const AgreedParams> agreed_params(std::string text);

/// @param digest  Of @p text, which is that of resolutions_to_text().
std::shared_ptr<const std::vector<Resolution>> agreed_resolutions(const AgreedParams& params,
                                                                  const std::string& digest,
                                                                  std::string_view text);

/// @param key   Everything that @p make depends on.
std::shared_ptr<const AgreedPlan> agreed_plan(const std::string& key,
                                              const std::function<AgreedPlan()>& make);

}  // namespace m2n
