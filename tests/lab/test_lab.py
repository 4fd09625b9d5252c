"""The lab does what it says: rates, cuts, freezes, crashes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import Host, Lab, LabError, namespaces, sweep

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

_SINK = """
import socket, time
server = socket.create_server(("", 5000))
print("listening", flush=True)
peer, _ = server.accept()
started, count = None, 0
while data := peer.recv(1 << 18):
    # The first data fill the token bucket's burst: the clock starts after them.
    if started is None:
        started = time.monotonic()
    else:
        count += len(data)
print(count * 8 / (time.monotonic() - started) / 1e6)
"""

_SOURCE = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000))
data = bytes(1 << 16)
for _ in range(int(sys.argv[2]) >> 16):
    peer.sendall(data)
"""

_ECHO_SERVER = """
import socket
server = socket.create_server(("", 5001))
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(b"hello")
    peer.close()
"""

_ASK = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5001), timeout=float(sys.argv[2]))
sys.exit(0 if peer.recv(5) == b"hello" else 1)
"""

_DATAGRAM_SERVER = """
import socket
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("", 5003))
print("listening", flush=True)
while True:
    server.sendto(b"hello", server.recvfrom(5)[1])
"""

_ASK_BY_DATAGRAM = """
import socket, sys
client = socket.socket(type=socket.SOCK_DGRAM)
client.settimeout(float(sys.argv[2]))
client.sendto(b"?", (sys.argv[1], 5003))
sys.exit(0 if client.recv(5) == b"hello" else 1)
"""

_HOLDER = """
import socket, time
server = socket.create_server(("", 5002))
print("listening", flush=True)
peer, _ = server.accept()
peer.sendall(b"x")
time.sleep(1000)
"""

_LISTENER = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5002))
peer.recv(1)
print("connected", flush=True)
peer.settimeout(1.0)
try:
    print("closed", peer.recv(1))
except TimeoutError:
    print("silence")
"""


def _python(script: str, *argv: str) -> list[str]:
    return [sys.executable, "-c", script, *argv]


def _listen(host: Host, script: str) -> subprocess.Popen[str]:
    server = host.popen(_python(script), stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == "listening\n"
    return server


def _answers(asker: Host, server: Host, patience_s: float = 10.0, ask: str = _ASK) -> bool:
    done = asker.run(_python(ask, server.address, str(patience_s)), check=False)
    return done.returncode == 0


def _stands_still(pid: int) -> bool:
    """One that had just ended waits for its stopped parent (state Z), and one in vfork (state D) for its
    child to become another program, which that cannot do where it is stopped."""
    state = namespaces.process_state(pid)
    if state != "D":
        return state in "TZ"
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(namespaces.process_state(int(child)) == "T" for child in children)


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=3) as lab:
        yield lab


@pytest.mark.parametrize("sender, receiver", [(0, 1), (1, 0)])
def test_a_limited_nic_reaches_its_rate_and_no_more(sender: int, receiver: int) -> None:
    with Lab(hosts=2, rate_mbit=100) as lab:
        sink = _listen(lab.hosts[receiver], _SINK)
        before = lab.hosts[receiver].counters()
        lab.hosts[sender].run(_python(_SOURCE, lab.hosts[receiver].address, str(12 << 20)))
        assert sink.stdout is not None
        rate_mbit = float(sink.stdout.readline())
        assert 88 < rate_mbit < 102
        moved = lab.hosts[receiver].counters() - before
        # The payload and headers, give or take retransmissions.
        assert 12 << 20 < moved.received_bytes < (12 << 20) * 1.10


def test_a_limited_nic_carries_large_frames_whole() -> None:
    with Lab(hosts=2, rate_mbit=100) as lab:
        sink = _listen(lab.hosts[1], _SINK)
        lab.hosts[0].run(_python(_SOURCE, lab.hosts[1].address, str(4 << 20)))
        assert sink.wait(60) == 0
        shown = lab.hosts[1].run(["ip", "-j", "-s", "link", "show", "dev", lab.hosts[1].nic]).stdout
        # 4 MiB are 2900 packets, and 180 frames of 23 KiB.
        assert json.loads(shown)[0]["stats64"]["rx"]["packets"] < 600


def test_two_senders_share_one_receivers_nic() -> None:
    count = 24 << 20
    with Lab(hosts=3, rate_mbit=100) as lab:
        ports = ("6000", "6001")
        sinks = [_listen(lab.hosts[0], _SINK.replace("5000", port)) for port in ports]
        before, started = lab.hosts[0].counters(), time.monotonic()
        for sender, port in zip(lab.hosts[1:], ports, strict=True):
            sender.popen(_python(_SOURCE.replace("5000", port), lab.hosts[0].address, str(count)))
        for sink in sinks:
            sink.wait(60)
        elapsed_s = time.monotonic() - started
        received = (lab.hosts[0].counters() - before).received_bytes
        assert received > 2 * count
        assert received * 8 / 1e6 / elapsed_s < 110


@pytest.mark.parametrize("keeps_windows", [False, True])
def test_hosts_keep_the_windows_of_idle_connections_where_asked(keeps_windows: bool) -> None:
    with Lab(1, keeps_windows=keeps_windows) as lab:
        said = lab.hosts[0].run(["cat", "/proc/sys/net/ipv4/tcp_slow_start_after_idle"])
    assert said.stdout.strip() == ("0" if keeps_windows else "1")


@pytest.mark.parametrize("in_order", [False, True])
def test_packets_of_a_connection_are_received_on_one_core_where_asked(in_order: bool) -> None:
    with Lab(1, in_order=in_order) as lab:
        host = lab.hosts[0]
        for namespace, device in ((host.namespace, host.nic), (host.bridge_namespace, host.port)):
            file = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
            mask = namespaces.system("ip", "netns", "exec", namespace, "cat", file)
            bits = int(mask.replace(",", ""), 16)
            cores = {core for core in range(os.cpu_count() or 1) if bits >> core & 1}
            assert cores == (os.sched_getaffinity(0) if in_order else set())


def test_hosts_have_their_own_names_and_know_each_others(lab: Lab) -> None:
    seen = lab.hosts[1].run(["sh", "-c", "hostname; getent hosts h2"]).stdout.split()
    assert seen == ["h1", lab.hosts[2].address, "h2"]


def test_the_environment_and_the_exit_code_go_through(lab: Lab) -> None:
    done = lab.hosts[0].run(["sh", "-c", 'echo "$WORD"; exit 3'], env={"WORD": "a'; b"}, check=False)
    assert (done.returncode, done.stdout) == (3, "a'; b\n")


def test_the_pid_of_popen_is_the_commands_own(lab: Lab) -> None:
    process = lab.hosts[0].popen(["sh", "-c", "echo $$; exec sleep 60"], stdout=subprocess.PIPE)
    assert process.stdout is not None and int(process.stdout.readline()) == process.pid
    lab.hosts[0].kill(process)
    assert process.wait(10) == -signal.SIGKILL


def test_a_cut_host_is_silent_until_healed(lab: Lab) -> None:
    _listen(lab.hosts[0], _ECHO_SERVER)
    assert _answers(lab.hosts[1], lab.hosts[0])
    lab.hosts[0].cut()
    assert not _answers(lab.hosts[1], lab.hosts[0], patience_s=1.0)
    lab.hosts[0].heal()
    assert _answers(lab.hosts[1], lab.hosts[0])


def test_one_pair_can_be_cut_while_others_still_talk(lab: Lab) -> None:
    store, agent, other = lab.hosts
    _listen(store, _ECHO_SERVER)
    agent.cut_from(store)
    assert not _answers(agent, store, patience_s=1.0)
    assert _answers(other, store)
    agent.heal_to(store)
    assert _answers(agent, store)


def test_the_traffic_of_workers_or_of_the_agent_alone_can_be_cut(lab: Lab) -> None:
    server, client, _ = lab.hosts
    _listen(server, _ECHO_SERVER)
    _listen(server, _DATAGRAM_SERVER)
    client.cut_tcp_except(5001)
    assert _answers(client, server) and _answers(client, server, ask=_ASK_BY_DATAGRAM)
    client.heal()
    client.cut_tcp_except(80)
    assert not _answers(client, server, patience_s=1.0)
    assert _answers(client, server, ask=_ASK_BY_DATAGRAM)
    client.heal()
    client.cut_udp_and_tcp(5001)
    assert not _answers(client, server, patience_s=1.0)
    assert not _answers(client, server, 1.0, _ASK_BY_DATAGRAM)
    client.heal()
    client.cut_udp_and_tcp(80)
    assert _answers(client, server) and not _answers(client, server, 1.0, _ASK_BY_DATAGRAM)
    client.heal()
    assert _answers(client, server, ask=_ASK_BY_DATAGRAM)


def test_a_frozen_host_stops_with_all_its_descendants_and_goes_on_when_thawed(lab: Lab) -> None:
    script = "setsid sh -c 'while :; do echo tick; sleep 0.02; done' & wait"
    ticker = lab.hosts[0].popen(["sh", "-c", script], stdout=subprocess.PIPE)
    assert ticker.stdout is not None
    assert ticker.stdout.readline() == "tick\n"
    lab.hosts[0].freeze()
    assert lab.hosts[0].pids()
    _wait_until(lambda: all(map(_stands_still, lab.hosts[0].pids())), "all have stopped")
    lab.hosts[0].thaw()
    for _ in range(10):
        assert ticker.stdout.readline() == "tick\n"


def test_a_crash_leaves_no_process_on_the_host_and_spares_the_others(lab: Lab) -> None:
    doomed = lab.hosts[0].popen(["sh", "-c", "setsid sleep 1000 & (setsid sleep 1000 &) & sleep 1000"])
    spared = lab.hosts[1].popen(["sleep", "1000"])
    _wait_until(lambda: len(lab.hosts[0].pids()) >= 4, "the shell starts its sleepers")
    lab.hosts[0].crash()
    assert lab.hosts[0].pids() == []
    assert doomed.returncode == -signal.SIGKILL
    assert spared.poll() is None


def test_a_powered_off_host_closes_no_connection(lab: Lab) -> None:
    _listen(lab.hosts[0], _HOLDER)
    client = lab.hosts[1].popen(_python(_LISTENER, lab.hosts[0].address), stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.readline() == "connected\n"
    lab.hosts[0].power_off()
    assert client.stdout.readline() == "silence\n"


def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), Lab(hosts=2) as lab:
        sleeper = lab.hosts[0].popen(["sleep", "1000"])
        name = lab.name
        raise RuntimeError("on purpose")
    assert sleeper.returncode == -signal.SIGKILL
    assert not [left for left in namespaces.names() if left.startswith(f"{name}.")]


_OWNER = """
import time
from tests.lab import Lab
with Lab(hosts=2) as lab:
    print(lab.name, lab.hosts[0].popen(["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
"""


def _own_a_lab() -> tuple[subprocess.Popen[str], str, int]:
    # A shell has what it starts in the background ignore SIGINT, and what that starts as well.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert owner.stdout is not None
    name, pid = owner.stdout.readline().split()
    return owner, name, int(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_after_a_polite_signal(number: signal.Signals) -> None:
    owner, name, sleeper = _own_a_lab()
    owner.send_signal(number)
    assert owner.wait(30) != 0
    assert not [left for left in namespaces.names() if left.startswith(f"{name}.")]
    assert namespaces.process_state(sleeper) in "XZ"


def test_the_sweeper_removes_the_lab_of_a_killed_owner_and_no_other(lab: Lab) -> None:
    owner, name, sleeper = _own_a_lab()
    assert f"{name}.h0" in namespaces.names()
    owner.kill()
    owner.wait()
    # Other tests' labs sweep as well.
    sweep()
    assert not [left for left in namespaces.names() if left.startswith(f"{name}.")]
    assert namespaces.process_state(sleeper) in "XZ"
    assert lab.hosts[0].run(["echo", "alive"]).stdout == "alive\n"


@pytest.mark.parametrize(
    "arguments", [{"hosts": 0}, {"hosts": 2, "rate_mbit": 0}, {"hosts": 2, "delay_ms": -1}]
)
def test_impossible_labs_are_refused_by_value(arguments: dict[str, float]) -> None:
    with pytest.raises(LabError, match="want"):
        Lab(**arguments)  # type: ignore[arg-type]
