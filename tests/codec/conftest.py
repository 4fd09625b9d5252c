from __future__ import annotations

from pathlib import Path

import pytest

from tests.codec import native

PATHS = ("avx512", "avx2", "portable")


@pytest.fixture(scope="session")
def library() -> Path:
    return native.build(native.FAST)


@pytest.fixture(scope="session", params=[0, 4], ids=["aligned", "unaligned"])
def offset(request: pytest.FixtureRequest) -> int:
    """Distance of all data from a 64-byte boundary: 4 is all that the header promises."""
    return request.param


@pytest.fixture(scope="session", params=PATHS)
def codec(library: Path, offset: int, request: pytest.FixtureRequest) -> native.Codec:
    """The codecs on one CPU path."""
    codec = native.Codec(library, offset)
    if not codec.use_path(request.param):
        pytest.skip(f"this processor has no {request.param}")
    return codec
