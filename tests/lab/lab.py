"""Builds and removes the network of a lab."""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tests.lab import namespaces
from tests.lab.delay import DelayLine
from tests.lab.host import Host
from tests.lab.namespaces import LabError, inside, lab_possible, system
from tests.lab.sweep import lab_name, sweep

_serials = itertools.count()

# Queueing delay that the rate limit may add before it drops: enough for one flow to fill the link.
_QUEUE_MS = 50
# Tokens for 2 ms, so that timer ticks do not cost rate.
_BURST_S = 0.002
_MIN_BURST_BYTES = 16 * 1024
# Frames that are handed to the NIC whole and cut up behind it, as offload does it. The kernel would cut what
# is larger than the burst itself, into packets with a timer each, and take the cores from who is measured.
# The limit counts the headers of all packets, which are 5 % of a frame.
_FRAME_OF_BURST = 0.95
_MAX_FRAME_BYTES = 64 * 1024
_TCP_SETTINGS = "/proc/sys/net/ipv4"


class Lab:
    """Hosts joined by one switch, for the length of a `with` block.

    `rate_mbit` limits every NIC both ways (None: as fast as the machine goes), `delay_ms` is the one-way
    latency of every NIC. `congestion_control` is the hosts' TCP: reno by default, which shares a full link as
    cubic, the default of most clusters, does (a namespace may choose only from the machine's
    `net.ipv4.tcp_allowed_congestion_control`); bbr starves some of the flows that meet at one slow NIC.
    Hosts with `keeps_windows` leave a connection that was idle its window, as they do where
    `net.ipv4.tcp_slow_start_after_idle` is 0; others halve it for each retransmission timeout. `in_order` is
    for hosts whose processes send on several cores at once, see `_keep_order`; it takes some of the cores.
    Everything is removed at the end of the block, on exceptions, on SIGINT and on SIGTERM; what an owner
    killed by SIGKILL leaves is removed by the next lab or by `sweep()`.
    Raises LabError where a lab is not possible. Threads: one lab belongs to one thread.
    """

    def __init__(
        self,
        hosts: int,
        rate_mbit: float | None = None,
        delay_ms: float | None = None,
        congestion_control: str = "reno",
        keeps_windows: bool = False,
        in_order: bool = False,
    ) -> None:
        if not 1 <= hosts <= 250:
            raise LabError(f"hosts={hosts}: want 1 <= hosts <= 250")
        if rate_mbit is not None and rate_mbit <= 0:
            raise LabError(f"rate_mbit={rate_mbit}: want a positive rate, or None for no limit")
        if delay_ms is not None and delay_ms < 0:
            raise LabError(f"delay_ms={delay_ms}: want a delay >= 0, or None")
        self.name = lab_name(next(_serials))
        self.rate_mbit = rate_mbit
        self.congestion_control = congestion_control
        self.keeps_windows = keeps_windows
        self.in_order = in_order
        self._delay = None if delay_ms is None else DelayLine(delay_ms)
        self._bridge = f"{self.name}.b"
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._old_sigterm: Any = None
        subnet = f"10.{random.randrange(1, 255)}.{random.randrange(256)}"
        self._plan = [(f"h{i}", f"{subnet}.{i + 1}") for i in range(hosts)]
        self.hosts: list[Host] = []

    def __enter__(self) -> Lab:
        reason = lab_possible()
        if reason:
            raise LabError(reason)
        sweep()
        self._catch_sigterm()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all that runs in the lab and remove it; a second call does nothing."""
        try:
            namespaces.remove([host.namespace for host in self.hosts] + [self._bridge])
            if self._delay is not None:
                self._delay.stop()
        finally:
            for host in self.hosts:
                host.reap()
            self.hosts = []
            if self._scratch is not None:
                self._scratch.cleanup()
                self._scratch = None
            self._release_sigterm()

    def delay_within_host(self, host: Host) -> None:
        """What `host` sends to itself is late as well. Only in a lab with `delay_ms`."""
        if self._delay is None:
            raise LabError(f"{self.name} has no latency: want delay_ms")
        self._delay.hold_up(host, "lo")

    def _build(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="lab-")
        hosts_file = Path(self._scratch.name) / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._plan)]
        hosts_file.write_text("\n".join(lines) + "\n")
        namespaces.create(self._bridge)
        self._in_bridge("ip", "link", "add", "name", "br0", "type", "bridge", "forward_delay", "0")
        self._in_bridge("ip", "link", "set", "br0", "up")
        for index, (name, address) in enumerate(self._plan):
            host = Host(
                name=name,
                address=address,
                namespace=f"{self.name}.{name}",
                bridge_namespace=self._bridge,
                port=f"p{index}",
                hosts_file=hosts_file,
            )
            # Listed before it exists, so that a failure half way removes it too.
            self.hosts.append(host)
            self._add_host(host)
        if self._delay is not None:
            self._delay.start(self.hosts)

    def _add_host(self, host: Host) -> None:
        namespaces.create(host.namespace)
        enter = inside(host.namespace)
        settings = {
            "tcp_congestion_control": self.congestion_control,
            "tcp_slow_start_after_idle": "0" if self.keeps_windows else "1",
        }
        for name, value in settings.items():
            system(*enter, "sh", "-c", f'echo "$1" > {_TCP_SETTINGS}/{name}', "lab", value)
        system(
            *(*enter, "ip", "link", "add", "name", host.nic, "type", "veth"),
            *("peer", "name", host.port, "netns", str(namespaces.NAMESPACE_DIR / self._bridge)),
        )
        system(*enter, "ip", "address", "add", f"{host.address}/24", "dev", host.nic)
        system(*enter, "ip", "link", "set", host.nic, "up")
        self._in_bridge("ip", "link", "set", host.port, "master", "br0")
        self._in_bridge("ip", "link", "set", host.port, "up")
        if self.in_order:
            _keep_order(host.namespace, host.nic)
            _keep_order(self._bridge, host.port)
        if self.rate_mbit is not None:
            shape(host.namespace, host.nic, self.rate_mbit)
            shape(self._bridge, host.port, self.rate_mbit)
            frame_bytes = min(_MAX_FRAME_BYTES, int(_burst_bytes(self.rate_mbit) * _FRAME_OF_BURST))
            system(*enter, "ip", "link", "set", host.nic, "gso_max_size", str(frame_bytes))

    def _in_bridge(self, *argv: str) -> None:
        system(*inside(self._bridge), *argv)

    def _catch_sigterm(self) -> None:
        """Turn SIGTERM into SystemExit, so that `with` unwinds; an owner's own handler is left alone."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_sigterm = signal.signal(signal.SIGTERM, _leave)

    def _release_sigterm(self) -> None:
        if self._old_sigterm is not None:
            signal.signal(signal.SIGTERM, self._old_sigterm)
            self._old_sigterm = None


def shape(namespace: str, device: str, rate_mbit: float) -> None:
    """Limit what leaves `device` to `rate_mbit`."""
    system(
        *(*inside(namespace), "tc", "qdisc", "replace", "dev", device, "root", "tbf"),
        *("rate", f"{rate_mbit}mbit", "burst", f"{_burst_bytes(rate_mbit)}b", "latency", f"{_QUEUE_MS}ms"),
    )


def _keep_order(namespace: str, device: str) -> None:
    """What comes by `device` is received on a core chosen by connection, as by a NIC with several queues.

    Else it is on the core that happened to empty the sender's queue. Where that is now one core and now
    another, packets of a connection overtake each other; TCP takes them for lost and sends them again. With
    two ranks per host at 1 Gbit/s it did up to seven times in eight steps, and no queue had dropped any.
    """
    cores = sum(1 << core for core in os.sched_getaffinity(0))
    words = [f"{cores >> shift & 0xFFFFFFFF:x}" for shift in range(0, cores.bit_length(), 32)]
    mask = ",".join(reversed(words))
    # `inside` would find the machine's own devices in /sys.
    write = ("sh", "-c", 'echo "$1" > "/sys/class/net/$2/queues/rx-0/rps_cpus"', "lab", mask, device)
    system("ip", "netns", "exec", namespace, *write)


def _burst_bytes(rate_mbit: float) -> int:
    return max(_MIN_BURST_BYTES, int(rate_mbit * 1e6 / 8 * _BURST_S))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
