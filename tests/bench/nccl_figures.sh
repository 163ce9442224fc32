#!/bin/sh
# SPDX-FileCopyrightText: The m2n authors
# SPDX-License-Identifier: Apache-2.0
#
# The NCCL transport on two GPUs: checks bytes, then prints the table. Builds nothing.
#
#   tests/bench/nccl_figures.sh BUILD [WORKLOAD...]
#
# BUILD is a build folder with the targets tests/test_nccl_gpu and nccl_bench.
set -eu
build=${1:?usage: nccl_figures.sh BUILD [WORKLOAD...]}
shift
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$build/tests/test_nccl_gpu" --log_level=error --report_level=short --catch_system_errors=no
exec "$build/tests/transports/nccl_bench" "$@"
