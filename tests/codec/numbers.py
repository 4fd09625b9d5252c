"""Numbers that codecs get wrong, for the property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.codec import reference
from tests.codec.reference import DType, Floats, Numbers

SIZES = (1, 2, 7, 15, 16, 31, 33, 63, 64, 65, 100, 127, 128, 1000, 2047, 2048, 2049, 2111, 2112, 4096, 5000)
"""Tails of every kind: below, at and above the steps of each path and the block."""


def _normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n)


def _offset(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0]) * 10.0 ** rng.integers(0, 8) + rng.standard_normal(n)


def _any_scale(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n) * 10.0 ** rng.integers(-44, 37)


def _denormal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(-300, 300, n) * 2.0**-149


def _outlier(rng: np.random.Generator, n: int) -> np.ndarray:
    x = rng.standard_normal(n)
    x[rng.integers(n)] *= 1e6
    return x


def _ties(rng: np.random.Generator, n: int) -> np.ndarray:
    """On or half way between the points of a grid of step 1/8, with the extremes that give this grid."""
    x = rng.integers(-254, 255, n) / 16
    x[rng.integers(n)], x[rng.integers(n)] = -127 / 8, 127 / 8
    return x


def _constant(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.full(n, rng.choice([0.0, -0.0, 1.0, -3.7, 2.0**-149, 2.0**120]))


def _zeros_and_few(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n) * (rng.random(n) < 0.01)


def _one_sided(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice([-1, 1]) * (rng.random(n) + rng.choice([0.0, 1e-9, 1.0]))


KINDS = (
    _normal, _offset, _any_scale, _denormal, _outlier, _ties, _constant, _zeros_and_few, _one_sided,
)  # fmt: skip


@st.composite
def finite(draw: st.DrawFn) -> Floats:
    """Numbers below the overflow limit of minmax8."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, kind = draw(st.sampled_from(SIZES)), draw(st.sampled_from(KINDS))
    return kind(rng, n).astype(np.float32)


@st.composite
def of_dtype(draw: st.DrawFn, dtype: DType) -> Numbers:
    """As `finite`, narrowed to `dtype`; sometimes raw bits, NaN and Inf among them."""
    if draw(st.integers(0, 4)) > 0:
        return reference.narrow(dtype, draw(finite()))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    words = rng.integers(0, 2**32, draw(st.sampled_from(SIZES)), dtype=np.uint32)
    return words.view(np.float32) if dtype is DType.f32 else words.astype(np.uint16)
