"""The tables that NCCL finds: symbols, layouts, versions side by side, loading and unloading."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.net import vtable
from tests.net.conftest import Plug
from tests.net.vtable import VERSIONS, Net, NetFailure, finish, join

ROOT = Path(__file__).parents[2]

SIZES = {10: 104, 11: 112, 12: 128}


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_the_library_exports_the_three_tables_and_nothing_else(library: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert sorted(line.split()[2] for line in listed.splitlines()) == [
        f"ncclNetPlugin_v{version}" for version in VERSIONS
    ]


def test_the_library_stays_loaded_and_needs_neither_torch_nor_cuda(library: Path) -> None:
    dynamic = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert "NODELETE" in dynamic
    needed = [line for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert needed
    assert not any("torch" in line or "cuda" in line for line in needed)


@pytest.mark.parametrize("version", VERSIONS)
def test_properties_have_the_size_and_the_values_that_nccl_expects(plug: Plug, version: int) -> None:
    assert ctypes.sizeof(vtable.PROPERTIES[version]) == (SIZES[version] + 7) // 8 * 8
    net = plug(version)
    assert net.name == "BaguaNet"
    assert net.devices() == 1
    properties = net.properties()
    assert properties.name == b"lo"
    assert properties.pciPath is None
    assert (properties.guid, properties.ptrSupport, properties.speed) == (0, vtable.HOST, 10000)
    assert (properties.maxRecvs, properties.netDeviceType, properties.regIsGlobal) == (1, 0, 0)
    assert (properties.ndevs, properties.devs[0]) == (1, 0)
    assert 0 < properties.maxP2pBytes <= 1 << 40
    assert 0 < properties.maxCollBytes <= 1 << 40
    if version >= 11:
        assert properties.maxMultiRequestSize == 1
    if version >= 12:
        assert (properties.railId, properties.planeId) == (-1, -1)


def test_what_later_versions_added_lies_where_nccl_looks_for_it() -> None:
    v11, v12 = vtable.PROPERTIES[11], vtable.PROPERTIES[12]
    assert (v11.maxP2pBytes.offset, v11.maxMultiRequestSize.offset) == (88, 104)
    assert (v12.maxP2pBytes.offset, v12.railId.offset) == (104, 124)


@pytest.mark.parametrize("version", VERSIONS)
def test_properties_write_no_byte_behind_their_version(plug: Plug, version: int) -> None:
    net = plug(version)
    room = (ctypes.c_uint8 * 256)(*[0xA5] * 256)
    assert net.call("getProperties", 0, room) == vtable.SUCCESS
    assert bytes(room[SIZES[version] :]) == b"\xa5" * (256 - SIZES[version])


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_host_only_plugin_lacks_is_null_or_refused(plug: Plug, version: int) -> None:
    net = plug(version)
    absent = {name for name, types in vtable.FUNCTIONS[version].items() if types is None}
    names = list(vtable.FUNCTIONS[version])
    assert {names[at - 1] for at in range(1, len(net.table)) if net.table[at] is None} == absent
    handle = ctypes.c_void_p()
    assert net.call("regMr", None, None, 1, vtable.HOST, ctypes.byref(handle)) == vtable.SUCCESS
    assert net.call("deregMr", None, handle) == vtable.SUCCESS
    assert net.call("regMr", None, None, 1, 2, ctypes.byref(handle)) == vtable.INTERNAL_ERROR
    assert net.call("iflush", None, 1, None, None, None, ctypes.byref(handle)) == vtable.INTERNAL_ERROR


@pytest.mark.parametrize("device", [-1, 1, 1000])
def test_an_unknown_device_is_refused(plug: Plug, device: int) -> None:
    with pytest.raises(NetFailure) as caught:
        plug().properties(device)
    assert caught.value.code == vtable.INVALID_USAGE


@pytest.mark.parametrize("receiving", VERSIONS)
@pytest.mark.parametrize("sending", VERSIONS)
def test_every_version_talks_to_every_other(plug: Plug, sending: int, receiving: int) -> None:
    sender, receiver = plug(sending), plug(receiving)
    send, recv = join(sender, receiver)
    data = np.random.default_rng(1).integers(0, 256, 300_000, dtype=np.uint8)
    room = np.zeros_like(data)
    assert (request := receiver.irecv(recv, room)) is not None
    assert (sent := sender.isend(send, data)) is not None
    assert finish((receiver, request), (sender, sent)) == [data.nbytes] * 2
    assert np.array_equal(room, data)
    sender.close_send(send)
    receiver.close_recv(recv)


def test_a_setting_that_means_nothing_fails_init_and_says_what_is_wanted(plug: Plug) -> None:
    with pytest.raises(
        NetFailure, match="BAGUA_NET_NSTREAMS=many: want a whole number from 1 to 64"
    ) as caught:
        plug(BAGUA_NET_NSTREAMS="many")
    assert caught.value.code == vtable.INVALID_USAGE


def test_an_interface_that_does_not_exist_fails_init_and_lists_those_that_do(plug: Plug) -> None:
    with pytest.raises(NetFailure, match=r"NCCL_SOCKET_IFNAME=nosuch .* there are: lo 127\.0\.0\.1"):
        plug(NCCL_SOCKET_IFNAME="nosuch")


def test_a_handle_of_something_else_is_refused(plug: Plug) -> None:
    with pytest.raises(NetFailure, match="not BaguaNet's"):
        plug().connect(ctypes.create_string_buffer(vtable.HANDLE_BYTES))


def test_init_says_in_nccls_log_what_is_used(plug: Plug) -> None:
    net = plug(BAGUA_NET_NSTREAMS="3", BAGUA_NET_CHUNK_BYTES="65536", BAGUA_NET_SECRET="s3cret")
    assert net.log == ["NET/BaguaNet : using lo 127.0.0.1:0, 3 streams, chunks of 65536 bytes, with a secret"]


def test_the_environment_is_read_anew_after_the_last_communicator(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("BAGUA_NET_NSTREAMS", "2")
    first = Net(library)
    monkeypatch.setenv("BAGUA_NET_NSTREAMS", "5")
    second = Net(library)
    assert "2 streams" in second.log[0], "a communicator beside another one shares its settings"
    first.finalize()
    second.finalize()
    third = Net(library)
    assert "5 streams" in third.log[0]
    third.finalize()


RELOAD = """
import _ctypes, os, sys
from pathlib import Path
from tests.net.vtable import Net, finish, join
import ctypes

def round(library):
    sender, receiver = Net(library), Net(library)
    send, recv = join(sender, receiver)
    room = ctypes.create_string_buffer(100_000)
    data = ctypes.create_string_buffer(50_000)
    requests = (receiver, receiver.irecv(recv, room)), (sender, sender.isend(send, data))
    assert finish(*requests) == [50_000, 50_000]
    sender.close_send(send); receiver.close_recv(recv)
    sender.finalize(); receiver.finalize()
    _ctypes.dlclose(sender._library._handle); _ctypes.dlclose(receiver._library._handle)

library = Path(sys.argv[1])
round(library)
before = len(os.listdir("/proc/self/fd"))
for _ in range(50):
    round(library)
assert len(os.listdir("/proc/self/fd")) == before, os.listdir("/proc/self/fd")
assert len(os.listdir("/proc/self/task")) == 1
print("fine")
"""


def test_loading_using_and_unloading_fifty_times_leaves_no_descriptor_and_no_thread(library: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, str(library)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NCCL_SOCKET_IFNAME": "lo"},
        timeout=120,
    )
    assert done.stdout == "fine\n", done.stderr


def test_finalize_ends_connections_that_were_begun_and_never_finished(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    net = Net(library)
    handle, listener = net.listen()
    assert net.connect(handle) is None
    net.close_listen(listener)
    net.finalize()
    assert open_descriptors() == before
