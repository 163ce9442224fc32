#!/usr/bin/env bash
# SPDX-FileCopyrightText: The m2n authors
# SPDX-License-Identifier: Apache-2.0
#
# run.sh WHAT [FOLDER]: runs the tests of notebooks/ with the Python of .cache/notebooks, or any other
# that has the packages. Without one each test is skipped (77), saying so.
#
#   helper   m2n_dump.py
#   jupyter  every notebook in Jupyter, over the dumps that are committed
#   fresh    every notebook, over dumps that M2N makes now in FOLDER
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
python=$root/.cache/notebooks/bin/python
[ -x "$python" ] || python=python3
export MPLBACKEND=agg PYTHONDONTWRITEBYTECODE=1

case $1 in
  helper) exec "$python" "$root/tests/notebooks/helper_test.py" ;;
  jupyter)
    unset MPLBACKEND  # the kernel draws into the notebook
    exec "$python" "$root/notebooks/execute.py"
    ;;
  fresh)
    rm -rf "$2"
    "$root/notebooks/make_data" "$2"
    exec "$python" "$root/notebooks/execute.py" --plain --data "$2"
    ;;
esac
