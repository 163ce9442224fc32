#!/bin/sh
# SPDX-FileCopyrightText: The m2n authors
# SPDX-License-Identifier: Apache-2.0
#
# ucx beside nccl between two GPUs: checks bytes, prints one table. See usage(). Exit status: 0 when
# all checks passed, whatever the figures; 1 when one did not; 2 for usage; 77 without two GPUs.
set -eu

usage() {
  cat <<'TEXT'
usage: ucx_gpu_figures.sh [--ucx LIB] [--no-checks] DIR [TRANSPORT...]

  DIR          a build folder with tests/test_ucx_gpu and tests/transports/ucx_gpu_bench, or a folder
               with these two programs and the libraries that they need
  --ucx LIB    the library folder of a UCX that knows CUDA, instead of the one that is installed. As
               unpacked from a wheel: pip download --no-deps libucx-cu13==1.22.0, unzip, libucx/lib
  --no-checks  only the table
  TRANSPORT    rows of each workload; without any: nccl, ucx by staging alone, and ucx as it chooses
TEXT
}

die() {
  printf 'ucx_gpu_figures.sh: %s\n' "$2" >&2
  exit "$1"
}

ucx=''
checks=yes
while [ $# -gt 0 ]; do
  case $1 in
    --ucx)
      [ $# -ge 2 ] || die 2 '--ucx needs a folder'
      ucx=$2
      shift
      ;;
    --no-checks) checks=no ;;
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
if [ $# -eq 0 ]; then
  usage >&2
  exit 2
fi
build=$1
shift

program() {
  for at in "$build/tests/$1" "$build/tests/transports/$1" "$build/$1"; do
    if [ -x "$at" ] && [ ! -d "$at" ]; then
      echo "$at"
      return
    fi
  done
  die 1 "no $1 in $build, expected a build folder, or one with the programs"
}

LD_LIBRARY_PATH=$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
if [ -n "$ucx" ]; then
  [ -e "$ucx/libucp.so.0" ] || die 2 "no libucp.so.0 in '$ucx', expected the library folder of a UCX"
  LD_LIBRARY_PATH=$ucx:$LD_LIBRARY_PATH
  export M2N_TEST_UCX_CUDA=1
fi
export LD_LIBRARY_PATH

status=0
if [ "$checks" = yes ]; then
  echo '== check: ucx_gpu'
  "$(program test_ucx_gpu)" --log_level=test_suite --report_level=short \
    --catch_system_errors=no --color_output=no || status=$?
  [ "$status" -ne 77 ] || exit 77
fi
echo '== figures'
"$(program ucx_gpu_bench)" "$@" || status=$?
if [ "$status" -ne 0 ] && [ "$status" -ne 77 ]; then
  echo '== FAILED'
  exit 1
fi
exit "$status"
