#!/bin/sh
# SPDX-FileCopyrightText: The m2n authors
# SPDX-License-Identifier: Apache-2.0
#
# The NCCL transport on two GPUs in one go: builds, checks bytes and failures, prints the table.
# See usage(). Exit status: 0 when all checks passed, whatever the figures; 1 when one did not or
# the build failed; 2 for usage; 77 without two GPUs.
set -eu

usage() {
  cat <<'TEXT'
usage: nccl_figures.sh [--build DIR] [--no-build] [--no-checks] [--sanitize] [WORKLOAD...]

  --build DIR   the build folder (default: build-device beside the sources); made when it is missing
  --no-build    take the programs in DIR as they are; also where there is no compiler or no source
  --no-checks   only the table
  --sanitize    the checks under compute-sanitizer, too: its memcheck and synccheck
  WORKLOAD      only rows of the table whose name contains it
TEXT
}

say() { printf '== %s\n' "$*"; }
die() {
  printf 'nccl_figures.sh: %s\n' "$2" >&2
  exit "$1"
}

root=$(cd "$(dirname "$0")/../.." && pwd)
build=''
may_build=yes
checks=yes
sanitize=no
while [ $# -gt 0 ]; do
  case $1 in
    --build)
      [ $# -ge 2 ] || die 2 '--build needs a folder'
      build=$2
      shift
      ;;
    --no-build) may_build=no ;;
    --no-checks) checks=no ;;
    --sanitize) sanitize=yes ;;
    --help)
      usage
      exit 0
      ;;
    -*)
      usage >&2
      die 2 "unknown option '$1'"
      ;;
    *) break ;;
  esac
  shift
done
build=${build:-$root/build-device}

tests='test_nccl_program test_nccl_gpu test_nccl_cases_gpu test_nccl_faults_gpu'
PATH=$PATH:/usr/local/cuda/bin
if [ "$may_build" = yes ] && [ -f "$root/meson.build" ] && command -v meson >/dev/null &&
  command -v nvcc >/dev/null; then
  say "building in $build"
  if [ ! -f "$build/build.ninja" ]; then
    meson setup "$build" "$root" --buildtype=release -Dnccl=enabled -Ducx=disabled >&2 ||
      die 1 'meson setup failed'
  fi
  targets=tests/transports/nccl_bench
  for name in $tests; do
    targets="$targets tests/$name"
  done
  # shellcheck disable=SC2086 # one word a target
  ninja -C "$build" $targets >&2 || die 1 'the build failed'
fi

# Programs of a build folder, or all in one folder.
program() {
  for at in "$build/tests/$1" "$build/tests/transports/$1" "$build/$1"; do
    if [ -x "$at" ] && [ ! -d "$at" ]; then
      echo "$at"
      return
    fi
  done
  die 1 "no $1 in $build, expected a build folder or a compiler to make one"
}

if ! command -v nvidia-smi >/dev/null || [ "$(nvidia-smi -L | grep -c '^GPU')" -lt 2 ]; then
  echo 'skipped: needs two GPUs that map each other'
  exit 77
fi
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
nvidia-smi topo -p2p n 2>/dev/null || true

failed=''
# Runs a check and remembers that it failed. $1: its name, then the command.
run_check() {
  what=$1
  shift
  say "check: $what"
  status=0
  "$@" || status=$?
  [ "$status" -eq 0 ] || failed="$failed
  $what (status $status)"
}

boost='--log_level=error --report_level=short --catch_system_errors=no --color_output=no'
if [ "$checks" = yes ]; then
  for name in $tests; do
    # shellcheck disable=SC2086 # one word an option
    run_check "$name" "$(program "$name")" $boost
  done
fi
if [ "$sanitize" = yes ]; then
  sanitizer=$(command -v compute-sanitizer) ||
    die 1 'no compute-sanitizer, expected the one of the CUDA toolkit in the path'
  # Kernels, casts, digests, and rounds between two threads. A tool makes a round take seconds.
  kernels='transports/nccl_gpu/the_list*:transports/nccl_gpu/casts*:transports/nccl_gpu/values*'
  rounds='transports/nccl_cases_gpu/a_view*:transports/nccl_cases_gpu/a_wider*:transports/nccl_cases_gpu/a_replayed*'
  # NCCL provokes errors of the API and handles them, and its own kernels do not pass synccheck.
  quiet='--report-api-errors no --kernel-name-exclude kernel_substring=ncclDevKernel'
  for tool in memcheck synccheck; do
    # shellcheck disable=SC2086
    run_check "$tool of the kernels" "$sanitizer" --tool "$tool" $quiet --error-exitcode 9 \
      "$(program test_nccl_gpu)" $boost --run_test="$kernels"
    # shellcheck disable=SC2086
    run_check "$tool of rounds" "$sanitizer" --tool "$tool" $quiet --error-exitcode 9 \
      "$(program test_nccl_cases_gpu)" $boost --run_test="$rounds"
  done
fi

say 'figures, as ratios to the copy engine of the same run'
run_check 'bytes of the table' "$(program nccl_bench)" "$@"
if [ -n "$failed" ]; then
  say "FAILED:$failed"
  exit 1
fi
say 'all checks passed'
