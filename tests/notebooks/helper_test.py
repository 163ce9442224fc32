# SPDX-FileCopyrightText: The m2n authors
# SPDX-License-Identifier: Apache-2.0
"""m2n_dump.py: values of small floats by their definitions, and what it refuses. No m2n code."""

import math
import pathlib
import sys
import tempfile
import unittest

try:
    import h5py
    import numpy as np
    import pandas  # noqa: F401 - m2n_dump needs it

    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "notebooks"))
    import m2n_dump
except ImportError as error:
    print(f"helper_test.py: {error}; './dev test' installs what notebooks/requirements.txt names")
    sys.exit(77)


def by_definition(bits, exponent_bits, mantissa_bits, bias):
    """An 8-bit float without special values, worked out digit by digit."""
    sign = -1.0 if bits & 0x80 else 1.0
    exponent = (bits & 0x7F) >> mantissa_bits
    fraction = 0.0
    for digit in range(mantissa_bits):
        if bits & (1 << digit):
            fraction += 2.0 ** (digit - mantissa_bits)
    return sign * (fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))


class Numbers(unittest.TestCase):
    def test_every_e4m3_and_e5m2_is_its_definition(self):
        special = {"f8_e4m3": {0x7F, 0xFF}, "f8_e5m2": set(range(0x7C, 0x80)) | set(range(0xFC, 0x100)),
                   "f8_e4m3fnuz": {0x80}, "f8_e5m2fnuz": {0x80}}
        form = {"f8_e4m3": (4, 3, 7), "f8_e5m2": (5, 2, 15), "f8_e4m3fnuz": (4, 3, 8), "f8_e5m2fnuz": (5, 2, 16)}
        for dtype, fields in form.items():
            values = m2n_dump.as_numbers(np.arange(256, dtype=np.uint8), dtype)
            for bits in range(256):
                if bits not in special[dtype]:
                    self.assertEqual(values[bits], by_definition(bits, *fields), f"{dtype} {bits:#x}")

    def test_special_values(self):
        e4m3 = m2n_dump.as_numbers(np.array([0x38, 0x7E, 0x78, 0x7F, 0x01, 0xFF], np.uint8), "f8_e4m3")
        self.assertEqual(list(e4m3[[0, 1, 2, 4]]), [1, 448, 256, 2.0**-9])
        self.assertTrue(np.isnan(e4m3[[3, 5]]).all())
        e5m2 = m2n_dump.as_numbers(np.array([0x7B, 0x7C, 0xFC, 0x7D], np.uint8), "f8_e5m2")
        self.assertEqual(list(e5m2[:3]), [57344, math.inf, -math.inf])
        self.assertTrue(np.isnan(e5m2[3]))
        e8m0 = m2n_dump.as_numbers(np.array([0, 127, 128, 254, 255], np.uint8), "f8_e8m0")
        self.assertEqual(list(e8m0[:4]), [2.0**-127, 1, 2, 2.0**127])
        self.assertTrue(np.isnan(e8m0[4]))
        bf16 = m2n_dump.as_numbers(np.array([0x3F80, 0x4049, 0x7F80, 0x7FC0, 0x0001, 0x8000], np.uint16), "bf16")
        self.assertEqual(list(bf16[:3]), [1, 3.140625, math.inf])
        self.assertTrue(np.isnan(bf16[3]))
        self.assertEqual(bf16[4], 2.0**-133)
        self.assertEqual(math.copysign(1, bf16[5]), -1)
        self.assertEqual(list(m2n_dump.as_numbers(np.array([0, 1, 2], np.uint8), "bool")), [False, True, True])
        self.assertEqual(m2n_dump.as_numbers(np.array([7], np.int64), "i64")[0], 7)


class Files(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name) / "d.h5"

    def write(self, version=2, complete=True, form="m2n dump", parts=()):
        with h5py.File(self.path, "w") as f:
            f.attrs["format"] = form
            f.attrs["schema_version"] = version
            f["parts/file"] = np.array(parts, dtype="S32")
            if complete:
                f.attrs["complete"] = 1

    def refuse(self, words):
        with self.assertRaisesRegex(ValueError, words):
            m2n_dump.open(self.path)

    def test_what_is_no_complete_dump_is_refused(self):
        self.write(form="something")
        self.refuse("not a dump")
        self.write(version=99)
        self.refuse("schema version 99; this module reads 1 to 2")
        self.write(complete=False)
        self.refuse("never completed")
        self.write(parts=["d.r1.rank-0.h5"])
        self.refuse("needs d.r1.rank-0.h5 beside it")
        self.write(version=1)
        with m2n_dump.open(self.path) as dump:
            self.assertTrue(dump.parameters().empty)
            self.assertTrue(dump.plan().empty)
            self.assertTrue(dump.digests().empty)
            self.assertEqual(dump.tensor_names(), [])

    def test_a_damaged_dataset_is_named(self):
        self.write()
        with h5py.File(self.path, "a") as f:
            f["plan/bytes"] = np.arange(5, dtype=np.uint64)
            f["plan/bytes"].attrs["checksum"] = np.uint64(1)
        with m2n_dump.open(self.path) as dump, self.assertRaisesRegex(ValueError, "plan/bytes"):
            dump.verify()


if __name__ == "__main__":
    unittest.main()
