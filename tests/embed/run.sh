#!/usr/bin/env bash
# SPDX-FileCopyrightText: The m2n authors
# SPDX-License-Identifier: Apache-2.0
#
# usage: run.sh MESON BUILD_FOLDER PREFIX LIBDIR PLUGIN COMPILER...
# Installs m2n into a temporary folder, and builds and runs main.cpp against nothing but that. The
# plug-in has device memory for device.cpp.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
meson=$1 build=$2 prefix=$3 libdir=$4 plugin=$5
shift 5

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$meson" install -C "$build" --no-rebuild --quiet --destdir "$scratch"

# The tree is not where it was meant to be, so pkg-config is told where it is.
tree=$scratch$prefix
export PKG_CONFIG_PATH=$tree/$libdir/pkgconfig
read -ra flags <<<"$(pkg-config --define-variable=prefix="$tree" --cflags --libs m2n)"
# That moves the prefix of what m2n requires too, so it is asked for apart.
read -ra required <<<"$(pkg-config --cflags eigen3)"
flags+=("${required[@]}")
cd "$scratch"  # so that no header of the source tree is found
for program in main device trainer worker; do
  "$@" -O1 -Wall -Wextra "$here/$program.cpp" -o "$program" "${flags[@]}" -pthread \
    "-Wl,-rpath,$tree/$libdir" &
done
wait
./main
timeout 100 ./device "$plugin"

# Two trainers and two workers, processes that know of m2n what is installed.
free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
master=$(free_port) meet=$(free_port) control=$(free_port)
children=()
for number in 0 1; do
  timeout 100 ./worker "$number" "$meet" "$control" &
  children+=($!)
  timeout 100 ./trainer "$number" "$master" "http://127.0.0.1:$control" &
  children+=($!)
done
for child in "${children[@]}"; do
  wait "$child"
done

# Every installed header finds what it includes.
(cd "$tree/include/m2n" && find . -name '*.hpp' -printf '#include "%P"\n') >headers.cpp
"$@" -fsyntax-only headers.cpp "${flags[@]}"

# The installed program finds the installed library.
LD_LIBRARY_PATH=$tree/$libdir "$tree/bin/m2n" list
