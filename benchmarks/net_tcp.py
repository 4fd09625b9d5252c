"""The transport's TCP streams between two network namespaces: capped flows, limited wires, no limit.

The rival splits each message into as many equal parts as there are streams, as NCCL's own socket transport
does, over the same sockets and options. Needs root. Per-flow caps are HTB classes chosen by source port; the
range of ports is set so that every class gets the same number of streams.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import REPOSITORY, Report, Row, finish, interleave, parser
from scripts import nccl_plugin

_UNEVEN_MBIT = (500, 500, 500, 100)
_EQUAL_MBIT = (500, 500, 500, 500)
# Ethernet, IP and TCP headers with timestamps: of 1514 bytes on the wire 1448 are ours.
_PAYLOAD_SHARE = 1448 / 1514
_SENDER, _RECEIVER = f"n1-bench-{os.getpid()}-a", f"n1-bench-{os.getpid()}-b"
_NIC = "n1-veth"
_FIRST_PORT = 40000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run moved, seen by the receiving side (both ways: the slower one)."""

    mbps: float
    cores: float
    """Of the busier side."""


def _run(*words: str, **options: object) -> None:
    subprocess.run(words, check=True, capture_output=True, **options)  # type: ignore[call-overload]


def _shape_wire(mbit: int) -> None:
    for name in (_SENDER, _RECEIVER):
        limit = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
        _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", _NIC, "root", "tbf", *limit)


def shape_flows(caps_mbit: tuple[int, ...]) -> None:
    """The sender's flows by bits 1 and 2 of their source port: ports of connect() have one parity."""
    tc = ("ip", "netns", "exec", _SENDER, "tc")
    _run(*tc, "qdisc", "add", "dev", _NIC, "root", "handle", "1:", "htb", "default", "10")
    for number, mbit in enumerate(caps_mbit):
        rate = f"rate {mbit}mbit ceil {mbit}mbit burst 64kb cburst 64kb".split()
        _run(*tc, "class", "add", "dev", _NIC, "parent", "1:", "classid", f"1:1{number}", "htb", *rate)
        match = f"u32 match ip protocol 6 0xff match ip sport {2 * number} 0x0006 flowid 1:1{number}".split()
        _run(*tc, "filter", "add", "dev", _NIC, "parent", "1:", "prio", "1", "protocol", "ip", *match)


@contextmanager
def namespaces(shape: Callable[[], None] | None) -> Iterator[None]:
    """10.77.0.1 (sender) and 10.77.0.2 (receiver), joined by a veth pair."""
    try:
        for name in (_SENDER, _RECEIVER):
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            _NIC,
            "netns",
            _SENDER,
            "type",
            "veth",
            "peer",
            "name",
            _NIC,
            "netns",
            _RECEIVER,
        )
        for number, name in enumerate((_SENDER, _RECEIVER), start=1):
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", _NIC)
            _run("ip", "-n", name, "link", "set", _NIC, "up")
        if shape is not None:
            shape()
        yield
    finally:
        for name in (_SENDER, _RECEIVER):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def compile_loop(folder: Path) -> Path:
    program = folder / "net_tcp_loop"
    include = f"-I{REPOSITORY / 'cpp_ext'}"
    compiler = os.environ.get("CXX", "g++").split()
    loop = REPOSITORY / "benchmarks" / "net_tcp_loop.cpp"
    _run(*compiler, "-std=c++20", "-O3", include, str(loop), *map(str, nccl_plugin.CORE), "-o", str(program))
    return program


def measure(program: Path, mode: str, streams: int, seconds: float, ways: int = 1) -> Outcome:
    """One run in the namespaces as they are."""
    ports = f"{_FIRST_PORT} {_FIRST_PORT + 2 * streams - 1}"
    # Closed connections linger under their ports: each run takes the range anew, whatever is left in it.
    system = "echo 1 > /proc/sys/net/ipv4/tcp_tw_reuse; echo {} > /proc/sys/net/ipv4/ip_local_port_range"
    _run("ip", "netns", "exec", _SENDER, "sh", "-c", system.format(ports))
    environment = {**os.environ, "BAGUA_NET_NSTREAMS": str(streams)}
    serve = [str(program), "serve", "10.77.0.2:0", mode, str(ways), str(seconds)]
    server = subprocess.Popen(
        ["ip", "netns", "exec", _RECEIVER, *serve], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout is not None
    port, nonce = server.stdout.readline().split()
    connect = [str(program), "connect", f"10.77.0.2:{port}", nonce, str(ways), str(seconds)]
    client = subprocess.run(
        ["ip", "netns", "exec", _SENDER, *connect],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    received = [float(word) for word in server.communicate(timeout=60)[0].split()]
    sent = [float(word) for word in client.stdout.split()]
    return Outcome(
        mbps=received[0] if ways == 1 else min(received[0], sent[0]), cores=max(received[1], sent[1])
    )


def _modes(program: Path, streams: int, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Megabit/s of both modes, in turns."""
    cases = {mode: functools.partial(_mbps, program, mode, streams, seconds) for mode in ("link", "static")}
    return interleave(cases, repeats)


def _mbps(program: Path, mode: str, streams: int, seconds: float) -> float:
    return measure(program, mode, streams, seconds).mbps


def _capped(report: Report, program: Path, caps: tuple[int, ...], repeats: int, seconds: float) -> None:
    for streams in (4, 8):
        case = f"caps {'/'.join(map(str, caps))}, {streams} streams"
        with namespaces(functools.partial(shape_flows, caps)):
            values = _modes(program, streams, repeats, seconds)
        report.raw[f"{case}, Mbit/s"] = values
        ours, rival = max(values["link"]), max(values["static"])
        share = ours / (sum(caps) * _PAYLOAD_SHARE)
        peer, figure = f"static {rival:.0f} Mbit/s", f"{ours:.0f} Mbit/s"
        if caps == _EQUAL_MBIT:
            target = 0.95
        else:
            target = 0.8 if streams == 8 else None
            ratio = ours / rival
            report.rows.append(
                Row(
                    what=case, peer=peer, ours=figure, value=ratio, target=2.0, at_least=True, unit="x static"
                )
            )
        report.rows.append(
            Row(
                what=case,
                peer=peer,
                ours=figure,
                value=share,
                target=target,
                at_least=True,
                unit=" of the sum",
            )
        )


def _wires(report: Report, program: Path, repeats: int, seconds: float) -> None:
    for mbit in (100, 1000):
        case = f"{mbit} Mbit/s both ways"
        with namespaces(functools.partial(_shape_wire, mbit)):
            outcomes = [measure(program, "link", 4, seconds, ways=2) for _ in range(repeats)]
        report.raw[case] = [asdict(outcome) for outcome in outcomes]
        best = max(outcomes, key=lambda outcome: outcome.mbps)
        wire_mbps = mbit * _PAYLOAD_SHARE
        peer, ours = f"wire {wire_mbps:.1f} Mbit/s", f"{best.mbps:.1f} Mbit/s each way"
        share = best.mbps / wire_mbps
        report.rows.append(
            Row(what=case, peer=peer, ours=ours, value=share, target=0.95, at_least=True, unit=" of the wire")
        )
        report.rows.append(Row(what=case, peer=peer, ours=ours, value=best.cores, target=0.1, unit=" cores"))


def _unlimited(report: Report, program: Path, repeats: int, seconds: float) -> None:
    cases = {
        "static 4": functools.partial(_mbps, program, "static", 4, seconds),
        "link 1": functools.partial(_mbps, program, "link", 1, seconds),
        "link 4": functools.partial(_mbps, program, "link", 4, seconds),
    }
    with namespaces(None):
        values = interleave(cases, repeats)
    report.raw["unlimited, Mbit/s"] = values
    best = {name: max(figures) / 1000 for name, figures in values.items()}
    report.rows.append(
        Row(
            what="unlimited, one way, 4 streams",
            peer=f"static {best['static 4']:.1f} Gbit/s",
            ours=f"{best['link 4']:.1f} Gbit/s (1 stream {best['link 1']:.1f})",
            value=best["link 4"],
            target=20,
            at_least=True,
            unit=" Gbit/s",
        )
    )


def main(argv: list[str] | None = None) -> int:
    options = parser("net_tcp", __doc__ or "").parse_args(argv)
    report = Report(name="net_tcp", title="TCP streams between two namespaces", quick=options.quick)
    repeats, seconds = (1, 1.0) if options.quick else (3, 4.0)
    with tempfile.TemporaryDirectory() as folder:
        program = compile_loop(Path(folder))
        _capped(report, program, _UNEVEN_MBIT, repeats, seconds)
        _capped(report, program, _EQUAL_MBIT, repeats, seconds)
        _wires(report, program, repeats, 2 * seconds)
        _unlimited(report, program, repeats + 2, seconds / 2)
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())
