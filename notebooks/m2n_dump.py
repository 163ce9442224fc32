# SPDX-FileCopyrightText: The m2n authors
# SPDX-License-Identifier: Apache-2.0
"""Dumps of m2n as pandas frames and NumPy arrays.

Needs h5py, NumPy and pandas, and nothing of m2n: everything here follows core/io/README.md.

    dump = m2n_dump.open("run.h5")
    dump.parameters()          # one row a parameter
    dump.plan()                # one row a region that moves
    dump.tensor("layers.0.w")  # a stitched global tensor, as floats
"""

import json
import pathlib
import urllib.parse

import h5py
import numpy as np
import pandas as pd

NEWEST_SCHEMA = 2
SIDES = ("source", "destination")

# Okabe and Ito's colours, which the colour-blind can tell apart, and the line and hatch styles that
# go with them in print. Maps of numbers use "cividis".
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442"]
HATCHES = ["", "//", "..", "xx", "\\\\", "oo", "++", "**"]


def style(pyplot):
    """Settings of all pictures here: print sizes, quiet axes, and the colours above."""
    pyplot.rcParams.update({
        "axes.prop_cycle": pyplot.cycler(color=COLOURS),
        "axes.spines.top": False, "axes.spines.right": False, "image.cmap": "cividis",
        "figure.dpi": 110, "figure.constrained_layout.use": True, "font.size": 10,
        "svg.hashsalt": "m2n",
    })


def _small_float(exponent_bits, mantissa_bits, bias, nan, infinity=None, signed=True):
    """The values of all 256 bit patterns of an 8-bit float, by its definition."""
    bits = np.arange(256)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    if signed:
        value = np.where(bits & 0x80, -value, value)
    if infinity is not None:
        value[infinity] = np.inf
        value[infinity | 0x80] = -np.inf
    value[nan] = np.nan
    return value.astype(np.float32)


_FLOAT8 = {
    "f8_e5m2": _small_float(5, 2, 15, [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], infinity=0x7C),
    "f8_e4m3": _small_float(4, 3, 7, [0x7F, 0xFF]),
    "f8_e5m2fnuz": _small_float(5, 2, 16, [0x80]),
    "f8_e4m3fnuz": _small_float(4, 3, 8, [0x80]),
    # Powers of two: no sign, no fraction, no zero.
    "f8_e8m0": np.concatenate([np.ldexp(1.0, np.arange(255) - 127), [np.nan]]).astype(np.float32),
}


def as_numbers(stored, dtype):
    """What the elements of a dataset mean: HDF5 has no bf16 and no fp8, so a dump has their bits."""
    stored = np.asarray(stored)
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype in _FLOAT8:
        return _FLOAT8[dtype][stored]
    if dtype == "bool":
        return stored != 0
    return stored


def open(path):  # noqa: A001 - reads as m2n_dump.open(...)
    return Dump(path)


class Dump:
    """One dump. Raises ValueError, with the reason, for what is no complete dump."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.file = h5py.File(self.path, "r")
        attributes = self.file.attrs
        form = attributes.get("format", b"")
        if (form.decode() if isinstance(form, bytes) else form) != "m2n dump":
            raise ValueError(f"{path} is an HDF5 file, but not a dump of m2n")
        if not 1 <= attributes["schema_version"] <= NEWEST_SCHEMA:
            raise ValueError(f"{path} has schema version {attributes['schema_version']}; "
                             f"this module reads 1 to {NEWEST_SCHEMA}")
        if attributes.get("complete") != 1:
            raise ValueError(f"{path} was never completed: its writer stopped before the end")
        # HDF5 reads zeros, silently, where a part is missing.
        for part in self._texts("parts/file"):
            if not (self.path.parent / part).exists():
                raise ValueError(f"{path} needs {part} beside it, and there is no such file")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __repr__(self):
        return f"<dump {self.path.name}: {self.fact('planner')} over {self.fact('transport')}>"

    # The experiment

    def facts(self):
        """Everything below /experiment, as text by key."""
        return {urllib.parse.unquote(key): self._text(node) for key, node in self.file["experiment"].items()}

    def fact(self, key, otherwise=""):
        node = self.file.get(f"experiment/{key}")
        return otherwise if node is None else self._text(node)

    def topology(self):
        return json.loads(self.fact("topology", "{}"))

    def certificate(self):
        """The planner's figures and the bounds beside them; {} where the dump has none."""
        return json.loads(self.fact("certificate", "{}"))

    # Tables

    def parameters(self):
        frame = self._frame("params", skip=("shape",))
        if not frame.empty:
            shape = self.file["params/shape"][:]
            frame["shape"] = [tuple(row[:rank]) for row, rank in zip(shape.tolist(), frame["rank"])]
        return frame

    def layouts(self):
        """The distinct layouts, as the dicts of their canonical JSON; numbered as in parameters()."""
        return json.loads(self._texts("layouts/json")[0]) if "layouts/json" in self.file else []

    def plan(self):
        """One row a region, with its parameter's name and its box as a tuple of (begin, end)."""
        frame = self._frame("plan", skip=("lo", "hi"))
        if not frame.empty:
            parameters = self.parameters()
            frame.insert(0, "name", parameters["name"].to_numpy()[frame["parameter"]])
            rank = parameters["rank"].to_numpy()[frame["parameter"]]
            lo, hi = self.file["plan/lo"][:], self.file["plan/hi"][:]
            frame["box"] = [tuple(zip(a[:r], b[:r])) for a, b, r in zip(lo.tolist(), hi.tolist(), rank)]
        return frame

    def world_size(self):
        return int(self.file["traffic"].attrs["world_size"])

    def traffic(self):
        """Bytes from rank (row) to rank (column); the diagonal is local copies."""
        matrix = np.zeros((self.world_size(),) * 2, dtype=np.int64)
        pairs = self._frame("traffic")
        matrix[pairs["source"], pairs["destination"]] = pairs["bytes"]
        return matrix

    def rounds(self):
        """One row a round and rank."""
        return self._frame("rounds")

    def peers(self):
        """One row a round, rank and peer, with how the bytes travelled."""
        frame = self._frame("rounds/peers", skip=("paths",))
        if not frame.empty:
            frame["path"] = np.array(self._texts("rounds/peers/paths"))[frame["path"]]
        return frame

    def phases(self):
        return self._frame("phases")

    def digests(self):
        frame = self._frame("digests")
        if not frame.empty:
            frame["side"] = np.array(SIDES)[frame["side"]]
        return frame

    def simulation(self):
        """One row a simulated message, in seconds from the start of the round."""
        return self._frame("simulation")

    def simulated_seconds(self):
        return float(self.file["simulation"].attrs["seconds"])

    def ports(self):
        return self._frame("simulation/ports")

    def results(self, table):
        return self._frame(f"results/{table}")

    # Tensors

    def tensor_names(self, side="destination"):
        group = self.file.get(self._tensors(side), {})
        return [urllib.parse.unquote(key) for key in group]

    def bits(self, name, side="destination"):
        """A stitched global tensor as it is stored."""
        return self._dataset(name, side)[()]

    def tensor(self, name, side="destination"):
        """A stitched global tensor as numbers."""
        node = self._dataset(name, side)
        return as_numbers(node[()], node.attrs["dtype"])

    def shards(self, side="destination"):
        """One row a shard that the dump holds."""
        rows = []
        for rank, group in self.file.get(f"shards/{side}", {}).items():
            for key, node in group.items():
                rows.append({"rank": int(rank), "name": urllib.parse.unquote(key),
                             "dtype": node.attrs["dtype"], "shape": node.shape,
                             "bytes": node.size * node.dtype.itemsize})
        return pd.DataFrame(rows).sort_values(["rank", "name"], ignore_index=True) if rows else pd.DataFrame()

    def shard(self, rank, name, side="destination"):
        """A rank's compact local tensor as numbers."""
        node = self.file[f"shards/{side}/{rank}/{self._escaped(name)}"]
        return as_numbers(node[()], node.attrs["dtype"])

    def verify(self):
        """Compares every checksum (needs the package xxhash). @return datasets compared."""
        import xxhash

        compared, damaged = 0, []

        def visit(path, node):
            nonlocal compared
            if isinstance(node, h5py.Dataset) and "checksum" in node.attrs:
                found = xxhash.xxh3_64_intdigest(np.ascontiguousarray(node[()]).tobytes())
                compared += 1
                if found != int(node.attrs["checksum"]):
                    damaged.append(path)

        self.file.visititems(visit)
        for part in self._texts("parts/file"):
            with Dump(self.path.parent / part) as other:
                compared += other.verify()
        if damaged:
            raise ValueError(f"{self.path} is damaged in {', '.join(damaged)}")
        return compared

    # How a dump spells things

    @staticmethod
    def _text(node):
        return node[()].decode()

    def _texts(self, path):
        node = self.file.get(path)
        if node is None:
            return []
        return [node[()].decode()] if node.shape == () else list(node.asstr()[:])

    def _frame(self, path, skip=()):
        group = self.file.get(path)
        if group is None:
            return pd.DataFrame()
        columns = {}
        for key, node in group.items():
            if key in skip or not isinstance(node, h5py.Dataset) or node.ndim != 1:
                continue
            columns[key] = node.asstr()[:] if h5py.check_string_dtype(node.dtype) else node[:]
        return pd.DataFrame(columns)

    @staticmethod
    def _escaped(name):
        if not name:
            return "%"
        return "".join(
            f"%{ord(c):02X}" if c in "/%\x7f" or ord(c) < 32 or (c == "." and i == 0) else c
            for i, c in enumerate(name))

    @staticmethod
    def _tensors(side):
        return "tensors" if side == "destination" else "source_tensors"

    def _dataset(self, name, side):
        return self.file[f"{self._tensors(side)}/{self._escaped(name)}"]
