"""Peak memory is compared with DDP's, of runs short enough and long enough."""

from __future__ import annotations

import pytest

from baguarun.comm.algorithms import DiLoCo
from benchmarks import memory
from benchmarks.cases import CASES, Case
from benchmarks.memory_worker import peak_mb, shortened


def test_memory_is_judged_by_the_median_above_ddp() -> None:
    peaks = {"ddp": [1000.0, 1010.0, 990.0], "bytegrad": [1019.0, 1500.0, 1015.0], "diloco": [1400.0] * 3}
    rows = memory.rows(peaks, model_mb=200.0)
    assert [(row.value, row.target, row.reached) for row in rows] == [
        (pytest.approx(9.5), 10.0, True),
        (pytest.approx(200.0), None, True),
    ]


def test_memory_is_measured_with_periods_so_short_that_exchanges_happen() -> None:
    assert shortened(Case(algorithm=DiLoCo(local_steps=20))).algorithm == DiLoCo(local_steps=2)
    assert shortened(CASES["bytegrad"]) == CASES["bytegrad"]
    assert shortened(CASES["ddp"]) == CASES["ddp"]


def test_the_peak_stays_when_memory_is_given_back() -> None:
    before_mb = peak_mb()
    taken = b"1" * (int(before_mb + 300) * 10**6)
    del taken
    assert peak_mb() > before_mb + 250
