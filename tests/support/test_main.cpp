// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Boost.Test's main, once for every test program.

#define BOOST_TEST_MODULE m2n
#include <boost/test/unit_test.hpp>
