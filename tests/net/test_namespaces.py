"""Two hosts, as network namespaces: cut links, link-local addresses, several interfaces, skewed flows."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import net_tcp
from tests.net.peer import Peer

pytestmark = pytest.mark.root

LEFT, RIGHT = f"n1-{os.getpid()}-left", f"n1-{os.getpid()}-right"
MIB = 1 << 20


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def cable(number: int) -> None:
    """NIC n1-nic<number> on both hosts, with an IPv4 and a link-local IPv6 address."""
    nic = f"n1-nic{number}"
    ip("link", "add", nic, "netns", LEFT, "type", "veth", "peer", "name", nic, "netns", RIGHT)
    for side, host in enumerate((LEFT, RIGHT), start=1):
        ip("-n", host, "addr", "add", f"10.78.{number}.{side}/24", "dev", nic)
        # The kernel's own comes when it comes.
        ip("-n", host, "link", "set", nic, "addrgenmode", "none")
        ip("-n", host, "link", "set", nic, "up")
        ip("-n", host, "addr", "add", f"fe80::{side}/64", "dev", nic, "nodad")


@pytest.fixture
def hosts() -> Iterator[None]:
    try:
        for host in (LEFT, RIGHT):
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        cable(0)
        yield
    finally:
        for host in (LEFT, RIGHT):
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def cut() -> None:
    """Packets vanish without a word, in both directions: neither host hears that the other has given up."""
    for host in (LEFT, RIGHT):
        for program in ("iptables", "ip6tables"):
            subprocess.run([*on(host), program, "-A", "INPUT", "-i", "n1-nic0", "-j", "DROP"], check=True)


def on(host: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", host)


QUICK = {"NCCL_SOCKET_IFNAME": "n1-nic", "BAGUA_NET_PEER_TIMEOUT_S": "2"}


@pytest.mark.usefixtures("hosts")
def test_a_sender_whose_network_is_cut_gets_an_error_that_names_the_peer(library: Path) -> None:
    with Peer(library, "listen", "recv", MIB, prefix=on(RIGHT), **QUICK) as receiver:
        handle = receiver.handle().raw
        with Peer(library, "connect", "send", MIB, handle=handle, prefix=on(LEFT), **QUICK) as sender:
            assert [sender.line(), sender.line()] == ["connected", "message"]
            cut()
            error = sender.end()
    assert error.startswith("error 6 NET/BaguaNet : 10.78.0.2:")
    assert "has not answered on stream" in error


@pytest.mark.usefixtures("hosts")
def test_a_receiver_that_waits_on_a_cut_network_gets_an_error_that_names_the_peer(library: Path) -> None:
    with Peer(library, "listen", "recv", MIB, prefix=on(LEFT), **QUICK) as receiver:
        handle = receiver.handle().raw
        # Nothing is on its way in either direction: only a keepalive can notice.
        with Peer(library, "connect", "idle", MIB, handle=handle, prefix=on(RIGHT), **QUICK) as silent:
            assert [receiver.line(), silent.line()] == ["connected"] * 2
            cut()
            error = receiver.end()
    assert error.startswith("error 6 NET/BaguaNet : 10.78.0.2:")
    assert "has not answered on stream" in error


@pytest.mark.usefixtures("hosts")
def test_a_host_that_cannot_be_reached_is_an_error_when_its_time_is_over(library: Path) -> None:
    with Peer(library, "listen", "idle", 0, prefix=on(RIGHT), **QUICK) as listener:
        handle = listener.handle().raw
        cut()
        settings = {**QUICK, "BAGUA_NET_CONNECT_TIMEOUT_S": "0.5"}
        with Peer(library, "connect", "idle", 0, handle=handle, prefix=on(LEFT), **settings) as connects:
            error = connects.end()
    assert error.startswith("error 6 NET/BaguaNet : 10.78.0.2:")
    assert error.endswith("did not answer within 500 ms")


@pytest.mark.usefixtures("hosts")
def test_link_local_addresses_work_across_hosts_that_number_their_interfaces_differently(
    library: Path,
) -> None:
    ip("-n", RIGHT, "link", "add", "n1-other", "type", "veth", "peer", "name", "n1-another")
    cable(1)
    settings = {"NCCL_SOCKET_IFNAME": "=n1-nic1", "NCCL_SOCKET_FAMILY": "AF_INET6"}
    with Peer(library, "listen", "recv", MIB, prefix=on(RIGHT), **settings) as receiver:
        handle = receiver.handle().raw
        with Peer(library, "connect", "send", MIB, handle=handle, prefix=on(LEFT), **settings) as sender:
            assert [receiver.line(), receiver.line()] == ["connected", "message"]
            assert [sender.line(), sender.line()] == ["connected", "message"]


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("listening", "connecting"),
    [
        ({}, {}),
        ({"BAGUA_NET_NSTREAMS": "1"}, {"BAGUA_NET_NSTREAMS": "16"}),
        ({"BAGUA_NET_NSTREAMS": "16", "BAGUA_NET_CHUNK_BYTES": "5000"}, {"BAGUA_NET_NSTREAMS": "16"}),
        ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, {"NCCL_SOCKET_FAMILY": "AF_INET6"}),
    ],
    ids=["alike", "one-of-sixteen", "small-chunks", "ipv6"],
)
@pytest.mark.parametrize("teller", ["listen", "connect"])
def test_messages_of_every_size_arrive_whole_between_hosts(
    library: Path, listening: dict[str, str], connecting: dict[str, str], teller: str
) -> None:
    secret = {"NCCL_SOCKET_IFNAME": "n1-nic", "BAGUA_NET_SECRET": "theirs"}
    tasks = {"listen": "check", "connect": "check", teller: "tell"}
    with Peer(library, "listen", tasks["listen"], 0, prefix=on(RIGHT), **listening, **secret) as listens:
        handle, task = listens.handle().raw, tasks["connect"]
        with Peer(
            library, "connect", task, 0, handle=handle, prefix=on(LEFT), **connecting, **secret
        ) as connects:
            for peer in (listens, connects):
                assert [peer.line(), peer.line()] == ["connected", "whole"]
                assert peer.process.wait(60) == 0


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("killed", ["sender", "receiver"])
def test_who_is_killed_on_one_host_is_named_on_the_other(library: Path, killed: str) -> None:
    settings = {"NCCL_SOCKET_IFNAME": "n1-nic"}
    with Peer(library, "listen", "recv", MIB, prefix=on(RIGHT), **settings) as receiver:
        handle = receiver.handle().raw
        with Peer(library, "connect", "send", MIB, handle=handle, prefix=on(LEFT), **settings) as sender:
            assert [sender.line(), sender.line()] == ["connected", "message"]
            victim, witness, address = (
                (sender, receiver, "10.78.0.1") if killed == "sender" else (receiver, sender, "10.78.0.2")
            )
            victim.process.kill()
            error = witness.end()
    assert error.startswith(f"error 6 NET/BaguaNet : {address}:")


def devices(library: Path) -> str:
    """What the plugin on the left offers: name, guid, speed and interface of each device."""
    script = (
        "import sys; from pathlib import Path; from tests.net.vtable import Net\n"
        "net = Net(Path(sys.argv[1]))\n"
        "for device in range(net.devices()):\n"
        "    at = net.properties(device); print(at.name.decode(), at.guid, at.speed, at.devs[0])\n"
    )
    done = subprocess.run(
        [*on(LEFT), sys.executable, "-c", script, str(library)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    return done.stdout + done.stderr


@pytest.mark.usefixtures("hosts")
def test_every_interface_is_a_device_and_an_unknown_speed_is_ten_gigabit(library: Path) -> None:
    cable(1)
    ip("-n", LEFT, "link", "add", "docker0", "type", "veth", "peer", "name", "docker1")
    ip("-n", LEFT, "addr", "add", "172.17.0.1/16", "dev", "docker0")
    ip("-n", LEFT, "link", "set", "docker0", "up")
    # veth claims 10 Gbit/s.
    assert devices(library) == "n1-nic0 0 10000 0\nn1-nic1 1 10000 1\n"


@pytest.mark.usefixtures("hosts")
def test_an_interface_that_is_up_and_joined_to_nothing_is_no_device(library: Path) -> None:
    cable(1)
    # As a NIC without its cable, or the bridge of containers that have gone.
    ip("-n", RIGHT, "link", "set", "n1-nic1", "down")
    # The kernel tells it up to a second later.
    look = (*on(LEFT), "cat", "/sys/class/net/n1-nic1/operstate")
    deadline = time.monotonic() + 30
    while subprocess.run(look, check=True, capture_output=True, text=True).stdout == "up\n":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert devices(library) == "n1-nic0 0 10000 0\n"


@pytest.mark.slow
def test_flows_of_different_speed_carry_twice_what_a_static_split_does() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = net_tcp.compile_loop(Path(folder))
        with net_tcp.namespaces(lambda: net_tcp.shape_flows((500, 500, 500, 100))):
            ours = net_tcp.measure(program, "link", 4, 2.0)
            rival = net_tcp.measure(program, "static", 4, 2.0)
    assert ours.mbps >= 2 * rival.mbps
