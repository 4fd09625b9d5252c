from __future__ import annotations

from pathlib import Path

import pytest

from tests.codec import native
from tests.codec.every_path import EveryPath


@pytest.fixture(scope="session")
def library() -> Path:
    return native.build(native.FAST)


@pytest.fixture(scope="session")
def codec(library: Path) -> EveryPath:
    """The codecs on all CPU paths."""
    return EveryPath(library)
