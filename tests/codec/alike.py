"""Whether two results of the codecs are the same."""

from __future__ import annotations

import numpy as np

from tests.codec import reference
from tests.codec.reference import Bytes, DType, Format, Numbers, Wire, format_of


def assert_same_numbers(wire: Wire | DType, got: Numbers, want: Numbers, where: str = "") -> None:
    """Bit for bit, but a NaN may be any NaN: the header leaves open which one a sum makes."""
    dtype = DType[wire.name]
    wide_got, wide_want = reference.widen(dtype, got), reference.widen(dtype, want)
    nan = np.isnan(wide_want)
    np.testing.assert_array_equal(np.isnan(wide_got), nan, where)
    np.testing.assert_array_equal(wide_got[~nan].view(np.uint32), wide_want[~nan].view(np.uint32), where)


def assert_same_chunk(wire: Wire | Format, got: Bytes, want: Bytes, where: str = "") -> None:
    plain = format_of(wire).wire
    if plain not in reference.PLAIN:
        np.testing.assert_array_equal(got, want, where)
    else:
        word = reference.word_type(DType[plain.name])
        assert_same_numbers(plain, got.view(word), want.view(word), where)
