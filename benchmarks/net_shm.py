"""All-reduce among the ranks of one host: shared memory and torch's Gloo, in the same processes, by turns.

Ranks are pinned, fp32 SUM, best of the rounds. Wants a quiet machine: load hits the two sides unequally.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.harness import Report, Row, finish, interleave, parser
from benchmarks.ranks import Plan, values_of_first_rank
from tests.net.shm_peer import Group, library_path

KIB = 1024
# KiB: (limit in µs, or None; least ratio to Gloo), by ranks: the tables of the issue.
_TARGETS: dict[int, dict[int, tuple[float | None, float]]] = {
    2: {4: (3, 200), 64: (15, 35), 1024: (None, 15), 16384: (None, 7), 65536: (None, 6)},
    4: {4: (15, 300), 64: (45, 100), 1024: (None, 20), 16384: (None, 5), 65536: (None, 5)},
}
_SEGMENT_KIB = 16384
_SEGMENT_RATIOS = {2: 15.0, 4: 11.0}
_WAIT_S = 0.5
_WAIT_CPU_MS = 0.5


def _timed(call: Callable[[], Any], repeats: int, group: Group, prepare: Callable[[], Any] | None) -> float:
    """Seconds per call, all ranks starting together."""
    total = 0.0
    inner = 1 if prepare else repeats
    for _ in range(repeats // inner):
        if prepare:
            prepare()
        group.call("Barrier")
        start = time.perf_counter()
        for _ in range(inner):
            call()
        total += time.perf_counter() - start
    return total / repeats


def _rank(plan: Plan, rank: int, link: Connection) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{plan.folder}/store", rank=rank, world_size=plan.size
    )
    group = Group(plan.folder, rank, plan.size, nonce="bench", timeout_s=120, arena_bytes=_SEGMENT_KIB * KIB)
    inside = group.allocate(_SEGMENT_KIB * KIB // 4)
    outcome: dict[str, list[float]] = {}
    for kib in _TARGETS[plan.size]:
        data = np.zeros(kib * KIB // 4, np.float32)
        tensor = torch.from_numpy(data)
        many = 200 if kib < 100 else 20 if kib < 2000 else 4
        few = 20 if kib < 2000 else 3
        arguments = (data.ctypes.data, data.size, 1, 0)
        call, handle = group.library.baguaShmAllReduce, group.handle

        def ours(
            call: Any = call, handle: Any = handle, arguments: Any = arguments, many: int = many
        ) -> float:
            return _timed(lambda: call(handle, *arguments), many, group, None)

        def gloo(tensor: Any = tensor, few: int = few) -> float:
            return _timed(lambda: dist.all_reduce(tensor), few, group, None)

        cases: dict[str, Callable[[], float]] = {f"shm {kib}": ours, f"gloo {kib}": gloo}
        if kib == _SEGMENT_KIB:
            at = (inside.ctypes.data, inside.size, 1, 0)

            def touch() -> None:
                inside.fill(0)

            def in_place(call: Any = call, handle: Any = handle, at: Any = at, many: int = many) -> float:
                return _timed(lambda: call(handle, *at), many, group, touch)

            cases["segment"] = in_place
        for case in cases.values():
            case()
        outcome.update(interleave(cases, plan.rounds))
    outcome["wait"] = [_cpu_of_waiting(group) for _ in range(3)]
    dist.destroy_process_group()
    group.close()
    link.send(outcome)


def _cpu_of_waiting(group: Group) -> float:
    """Seconds of CPU that rank 0's thread uses while rank 1 is late."""
    group.call("Barrier")
    if group.rank == 1:
        time.sleep(_WAIT_S)
    before = time.thread_time()
    group.call("Barrier")
    return time.thread_time() - before


def _rows(size: int, values: dict[str, list[float]]) -> list[Row]:
    rows = []
    for kib, (limit_us, ratio) in _TARGETS[size].items():
        ours, peer = min(values[f"shm {kib}"]) * 1e6, min(values[f"gloo {kib}"]) * 1e6
        texts = {"peer": f"gloo {peer:.0f} µs", "ours": f"{ours:.1f} µs"}
        what = f"{size} ranks, {kib} KiB"
        if limit_us is not None:
            rows.append(Row(what=f"{what}, time", value=ours, target=limit_us, unit=" µs", **texts))
        rows.append(
            Row(what=f"{what}, ratio", value=peer / ours, target=ratio, at_least=True, unit="×", **texts)
        )
    ours, peer = min(values["segment"]) * 1e6, min(values[f"gloo {_SEGMENT_KIB}"]) * 1e6
    rows.append(
        Row(
            what=f"{size} ranks, {_SEGMENT_KIB} KiB in the segment, ratio",
            peer=f"gloo {peer:.0f} µs",
            ours=f"{ours:.1f} µs",
            value=peer / ours,
            target=_SEGMENT_RATIOS[size],
            at_least=True,
            unit="×",
        )
    )
    wait_ms = min(values["wait"]) * 1e3
    rows.append(
        Row(
            what=f"{size} ranks, CPU of a wait of {_WAIT_S} s",
            peer="-",
            ours=f"{wait_ms:.2f} ms",
            value=wait_ms,
            target=_WAIT_CPU_MS,
            unit=" ms",
        )
    )
    return rows


def main() -> int:
    options = parser("net_shm", "shared-memory all-reduce against Gloo").parse_args()
    library_path()
    report = Report(name="net_shm", title="All-reduce on one host, fp32 SUM, best", quick=options.quick)
    for size in _TARGETS:
        values = values_of_first_rank(_rank, size, 3 if options.quick else 15)
        report.raw[f"{size} ranks, s"] = values
        report.rows += _rows(size, values)
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())
