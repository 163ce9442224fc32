// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A job with its plan, proved and certified: what `plan` and `simulate` print.

#include <boost/json/object.hpp>

#include "core/cli/job.hpp"
#include "core/cli/output.hpp"
#include "core/plan/certificate.hpp"

namespace m2n::cli {

struct PlannedJob {
  /// Plans, checks and certifies. @p planned_job must outlive this.
  explicit PlannedJob(const Job& planned_job);

  boost::json::object json() const;
  Table table() const;

  const Job& job;
  Plan plan;
  double plan_seconds = 0;
  Certificate certificate;
};

}  // namespace m2n::cli
