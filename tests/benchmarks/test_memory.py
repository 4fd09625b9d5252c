"""Peak memory is compared with DDP's, of runs short enough and long enough."""

from __future__ import annotations

import pytest
import torch

from baguarun.comm.algorithms import DiLoCo, PowerSGD, QAdamOptimizer
from benchmarks import memory
from benchmarks.cases import CASES, Case
from benchmarks.memory_worker import peak_mb, require_compressed, shortened
from benchmarks.step import HOSTS


def test_memory_is_judged_by_the_median_above_ddp() -> None:
    peaks = {"ddp": [1000.0, 1010.0, 990.0], "bytegrad": [1019.0, 1500.0, 1015.0], "diloco": [1400.0] * 3}
    rows = memory.rows(HOSTS, peaks, model_mb=200.0)
    assert [(row.value, row.target, row.reached) for row in rows] == [
        (pytest.approx(9.5), 10.0, True),
        (pytest.approx(200.0), None, True),
    ]


def test_the_target_is_that_of_bytegrad_without_residuals() -> None:
    peaks = {name: [1000.0] for name in ("ddp", "bytegrad@gloo", "bytegrad_feedback", "qadam")}
    assert [row.target for row in memory.rows(HOSTS, peaks, model_mb=200.0)] == [10.0, None, None]


def test_hosts_of_several_ranks_are_for_those_that_exchange_by_rail_there() -> None:
    pairs, names = memory.NETWORKS["pairs"], ["ddp", "ddp_fp16", "gradient_allreduce", "bytegrad", "sparse"]
    assert memory.contestants(pairs, names) == ["ddp", "ddp_sgd", "bytegrad", "sparse"]
    assert memory.contestants(HOSTS, names) == ["ddp", "ddp_sgd", *names[1:]]


def test_memory_is_compared_with_a_peer_of_the_same_optimizer() -> None:
    peaks = {"ddp": [1000.0], "ddp_sgd": [600.0], "sparse": [1000.0]}
    rows = memory.rows(HOSTS, peaks, model_mb=200.0)
    assert [row.value for row in rows] == [-200.0, 200.0]


def test_memory_is_measured_with_periods_so_short_that_exchanges_happen() -> None:
    assert shortened(Case(algorithm=DiLoCo(local_steps=20))).algorithm == DiLoCo(local_steps=2)
    assert shortened(CASES["power_sgd"]).algorithm == PowerSGD(rank=16, start_step=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    assert shortened(CASES["sparse"]).algorithm.warmup_steps == 2
    for name in ("qadam", "qadam_1bit"):
        optimizer = shortened(CASES[name]).optimizer([weight], 1e-3)
        assert isinstance(optimizer, QAdamOptimizer)
        assert optimizer.warmup_steps == 2
    overlapped = DiLoCo(local_steps=40, fragments=4, delay_steps=20)
    assert shortened(Case(algorithm=overlapped)).algorithm == DiLoCo(
        local_steps=4, fragments=4, delay_steps=1
    )
    assert shortened(CASES["bytegrad"]) == CASES["bytegrad"]
    assert shortened(CASES["ddp"]) == CASES["ddp"]


@pytest.mark.parametrize("name", ["qadam", "qadam_1bit", "sparse", "power_sgd", "qadam@gloo"])
def test_a_run_that_never_leaves_its_warm_up_is_refused(name: str) -> None:
    require_compressed(name, [800, 800, 200])
    with pytest.raises(RuntimeError, match=f"{name}: step 3 sent 800 bytes"):
        require_compressed(name, [800, 800, 800])


def test_what_is_alike_in_all_steps_has_nothing_to_leave() -> None:
    for name in ("ddp", "bytegrad", "bytegrad_feedback", "local_sgd", "async_model_average"):
        require_compressed(name, [800, 800, 800])


def test_the_peak_stays_when_memory_is_given_back() -> None:
    before_mb = peak_mb()
    taken = b"1" * (int(before_mb + 300) * 10**6)
    del taken
    assert peak_mb() > before_mb + 250
