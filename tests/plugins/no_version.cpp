// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A shared library like any other: no plug-in.

extern "C" int answer() { return 42; }
