# SPDX-FileCopyrightText: The m2n authors
# SPDX-License-Identifier: Apache-2.0
"""Executes notebooks from top to bottom, as a reader would; a cell that fails is an error.

    execute.py [--in-place] [--plain] [--data FOLDER] [NOTEBOOK...]

--in-place  keeps the outputs, without what differs between two runs; otherwise nothing is written
--plain     runs the cells in this process, without Jupyter: quicker, and no pictures are kept
--data      reads dumps from FOLDER instead of data/
No NOTEBOOK: all of them. Exit status 77 where the packages of requirements.txt are missing.
"""

import argparse
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent


def run_plainly(book):
    """Cells in one namespace, with display() and pictures that go nowhere."""
    import matplotlib

    matplotlib.use("Agg")
    names = {"display": lambda *_: None}
    for number, cell in enumerate(book.cells):
        if cell.cell_type == "code":
            exec(compile(cell.source, f"cell {number}", "exec"), names)
    names["plt"].close("all")


def run_in_jupyter(book):
    import nbclient

    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # when each cell ran


def expect_committed_whole(path, book):
    """What is committed was executed from top to bottom, without errors."""
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        raise SystemExit(f"{path.name} is committed without the outputs of all its cells; run execute.py --in-place")
    for cell in code:
        if any(output.output_type == "error" for output in cell.outputs):
            raise SystemExit(f"{path.name} is committed with a cell that failed; run execute.py --in-place")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("notebooks", nargs="*", type=pathlib.Path)
    options = parser.parse_args()
    try:
        import h5py, ipykernel, matplotlib, nbclient, nbformat, pandas, xxhash  # noqa: E401,F401
    except ImportError as error:
        print(f"execute.py: {error}; './dev test' and './dev notebooks' install what notebooks/requirements.txt names")
        return 77
    if options.data:
        os.environ["M2N_NOTEBOOK_DATA"] = str(options.data.resolve())
    notebooks = options.notebooks or sorted(HERE.glob("*.ipynb"))
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path.insert(0, str(HERE))
    os.chdir(HERE)
    for path in notebooks:
        began = time.monotonic()
        book = nbformat.read(path, as_version=4)
        if not options.in_place:
            expect_committed_whole(path, book)
        if options.plain:
            run_plainly(book)
        else:
            run_in_jupyter(book)
        if options.in_place:
            nbformat.write(book, path)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in book.cells)} cells in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
