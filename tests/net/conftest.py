from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.net import native
from tests.net.vtable import Net

Plug = Callable[..., Net]

# What this process was started with must not decide what the tests see.
_OURS = ("BAGUA_NET_", "NCCL_", "GLOO_")


@pytest.fixture(scope="session")
def library() -> Path:
    """The plugin; `BAGUA_TEST_PLUGIN` names one that was built otherwise, with sanitizers for instance."""
    given = os.environ.get("BAGUA_TEST_PLUGIN")
    return Path(given) if given else native.plugin()


@pytest.fixture
def plug(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plug]:
    """Makes users of the plugin on loopback, each with settings and global state of its own.

    `plug(12, BAGUA_NET_NSTREAMS="8")`: another file is another library to the loader, as in another process.
    """
    for name in list(os.environ):
        if name.startswith(_OURS):
            monkeypatch.delenv(name)
    nets: list[Net] = []
    numbers = itertools.count()

    def make(version: int = 11, **settings: str) -> Net:
        copy = tmp_path / f"plugin-{next(numbers)}.so"
        shutil.copy(library, copy)
        with monkeypatch.context() as patch:
            for name, value in {"NCCL_SOCKET_IFNAME": "lo", **settings}.items():
                patch.setenv(name, value)
            net = Net(copy, version)
        nets.append(net)
        return net

    yield make
    for net in nets:
        net.finalize()
