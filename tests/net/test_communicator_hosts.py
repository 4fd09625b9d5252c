"""Communicators over several hosts, as network namespaces: shared wires, a cut host."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.net.communicator_peer import library_path

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[2]
LEAST_BUFFER = 192 << 10
"""Bytes, of a stream whose queue is long: kLeastBytes in backlog.cc."""


def start(lab: Lab, folder: Path, places: list[int], *task: object) -> list[subprocess.Popen[Any]]:
    """Rank i runs on host places[i]."""
    library_path()
    words = [sys.executable, "-m", "tests.net.communicator_rank", str(folder)]
    return [
        lab.hosts[host].popen(
            [*words, str(rank), str(len(places)), *map(str, task)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, host in enumerate(places)
    ]


def last_line(process: subprocess.Popen[Any]) -> str:
    output, _ = process.communicate(timeout=60)
    return str(output).strip().splitlines()[-1]


@pytest.mark.slow
def test_ranks_of_four_hosts_two_each_agree_over_a_wire(tmp_path: Path) -> None:
    with Lab(hosts=4, rate_mbit=1000) as lab:
        processes = start(lab, tmp_path, [0, 1, 2, 3, 0, 1, 2, 3], "reduce", 8_000_000, 2, 30)
        for process in processes:
            seconds, sent = last_line(process).split()
            assert float(seconds) > 0 and int(sent) > 0


@pytest.mark.slow
@pytest.mark.parametrize("rate_mbit", [None, 300])
def test_large_data_goes_right_in_parts_whose_size_follows_a_long_way(
    tmp_path: Path, rate_mbit: float | None
) -> None:
    with Lab(hosts=2, rate_mbit=rate_mbit, delay_ms=8) as lab:
        processes = start(lab, tmp_path, [0, 1, 0, 1], "reduce", 40_000_008, 8, 60)
        for process in processes:
            seconds, sent = last_line(process).split()
            assert float(seconds) > 0 and int(sent) > 8 * 20_000_000


def send_buffers(host: Host) -> list[int]:
    """Bytes of the send buffers of established connections."""
    listed = host.run(["ss", "-tinOm", "state", "established"]).stdout
    return [int(size) for size in re.findall(r"\btb(\d+)", listed)]


def test_a_stream_that_fills_the_queue_of_a_slow_wire_is_held_small(tmp_path: Path) -> None:
    with Lab(hosts=2, rate_mbit=4) as lab:
        # The wire is busy for 8 s.
        processes = start(lab, tmp_path, [0, 1], "reduce", 4_000_000, 1, 30)
        waiting_for = list(lab.hosts)
        while waiting_for:
            assert all(process.poll() is None for process in processes), waiting_for
            waiting_for = [host for host in waiting_for if LEAST_BUFFER not in send_buffers(host)]
            time.sleep(0.05)
        for process in processes:
            seconds, sent = last_line(process).split()
            assert float(seconds) > 0 and int(sent) > 0


def bytes_by_connection(host: Host, other: Host) -> list[int]:
    """Sent to `other` over each that is established."""
    listed = host.run(["ss", "-tinO", "state", "established", "dst", other.address]).stdout
    return [int(sent) for sent in re.findall(r"\bbytes_sent:(\d+)", listed)]


def bytes_to(host: Host, other: Host) -> int:
    return sum(bytes_by_connection(host, other))


@pytest.mark.parametrize(("delay_ms", "wanted"), [(None, 1), (5.0, 4)])
def test_all_streams_of_a_long_way_are_used_after_a_rest(
    tmp_path: Path, delay_ms: float | None, wanted: int
) -> None:
    with Lab(hosts=2, rate_mbit=100, delay_ms=delay_ms) as lab:
        # Before the rest it has tried all, which move no more than one, and tries none for a minute.
        processes = start(lab, tmp_path, [0, 1], "rest", 1_000_000, 30, 30)
        sent = []
        while any(process.poll() is None for process in processes):
            sent.append(bytes_by_connection(lab.hosts[0], lab.hosts[1]))
            time.sleep(0.05)
        for process in processes:
            assert float(last_line(process).split()[0]) > 0
    at_rest = [
        connections for connections, looks in groupby(sent) if len(connections) > 1 and len(list(looks)) > 5
    ]
    before, after = at_rest[-2:]
    assert sum(new - old > 20_000 for old, new in zip(before, after, strict=True)) == wanted


@pytest.mark.parametrize(("delay_ms", "directly"), [(None, False), (5.0, True)])
def test_all_reduces_go_directly_between_hosts_that_are_far_from_each_other(
    tmp_path: Path, delay_ms: float | None, directly: bool
) -> None:
    with Lab(hosts=4, delay_ms=delay_ms) as lab:
        processes = start(lab, tmp_path, [0, 1, 2, 3], "cycle", 1_000_000, 10_000, 30)
        try:
            # A round's share of one host is 1.5 MB around the ring, or 0.5 MB to each.
            while bytes_to(lab.hosts[0], lab.hosts[1]) < 20_000_000:
                assert all(process.poll() is None for process in processes)
                time.sleep(0.05)
            across = bytes_to(lab.hosts[0], lab.hosts[2])
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    assert across > 5_000_000 if directly else across < 100_000


def test_a_host_that_is_cut_off_is_a_timeout_that_names_its_rank(tmp_path: Path) -> None:
    with Lab(hosts=3) as lab:
        processes = start(lab, tmp_path, [0, 1, 2], "cycle", 1_000_000, 1000, 2)
        for process in processes:
            assert process.stdout is not None and process.stdout.readline().strip() == "ready"
        time.sleep(0.3)
        lab.hosts[2].cut()
        for process in processes[:2]:
            assert "rank 2 (10." in last_line(process)
