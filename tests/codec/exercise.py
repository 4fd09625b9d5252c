"""Calls every function with every wire, dtype, path and kind of tail.

`python -m tests.codec.exercise LIBRARY` is what runs under the sanitizers. Memory comes from malloc, without
guards, in exactly the size promised.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from tests.codec.native import CPU, pointer, shim_format
from tests.codec.numbers import SIZES
from tests.codec.reference import DType, Wire, payload_bytes, word_type


def run(lib: ctypes.CDLL, numel: int) -> None:
    rng = np.random.default_rng(numel)
    size = ctypes.c_size_t(numel)
    for wire in Wire:
        chunks = []
        format = shim_format(wire)
        for dtype in DType:
            bits = rng.integers(0, 256, numel * np.dtype(word_type(dtype)).itemsize, dtype=np.uint8)
            chunk = np.zeros(payload_bytes(wire, numel), np.uint8)
            numbers = np.zeros_like(bits)
            assert lib.shim_encode(CPU, format, int(dtype), pointer(bits), size, pointer(chunk)) == 0
            assert lib.shim_decode(CPU, format, int(dtype), pointer(chunk), size, pointer(numbers)) == 0
            finite = ctypes.c_int()
            assert lib.shim_headers_are_finite(format, size, pointer(chunk), ctypes.byref(finite)) == 0
            chunks.append(chunk)
            carried = np.zeros(numel, np.float32)
            args = (format, int(dtype), pointer(bits), pointer(carried), size, pointer(chunk))
            assert lib.shim_encode_with_residual(CPU, *args) == 0
        for count in (1, 2, 3):
            table = (ctypes.c_void_p * count)(*[chunk.ctypes.data for chunk in chunks[:count]])
            args = (table, ctypes.c_size_t(count), ctypes.c_float(0.5), size)
            out = np.zeros(payload_bytes(wire, numel), np.uint8)
            assert lib.shim_reduce_encode(CPU, format, *args, pointer(out)) == 0
            for dtype in DType:
                numbers = np.zeros(numel, word_type(dtype))
                carried = np.zeros(numel, np.float32)
                terms = (int(dtype), pointer(numbers), table, ctypes.c_size_t(count), pointer(carried), size)
                assert lib.shim_encode_sum_with_residual(CPU, format, *terms, pointer(out)) == 0
                assert lib.shim_reduce_decode(CPU, format, int(dtype), *args, pointer(numbers)) == 0


def main() -> None:
    lib = ctypes.CDLL(sys.argv[1])
    for path in ("avx512", "avx2", "portable"):
        if lib.shim_use_path(path.encode()):
            for numel in (0, *SIZES):
                run(lib, numel)
    print("done")


if __name__ == "__main__":
    main()
