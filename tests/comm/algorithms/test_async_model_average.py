from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import AsyncModelAverage, resolve
from baguarun.comm.algorithms.async_model_average import AsyncStepper, choose_period
from baguarun.comm.algorithms.pending import PendingReduction
from baguarun.comm.algorithms.stepper import StepContext
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.weights import FlatWeights
from baguarun.errors import UsageError
from tests.comm.algorithms.simulation import (
    Net,
    assert_same_training,
    make_optimizer,
    run_for_tensors,
    simulate,
    train_each,
    train_through,
)
from tests.comm.ranks import run_ranks

STEPS = 8


def plain_rounds(warmup_steps: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """With a staleness of one step: what was averaged after step t is applied after step t + 1."""
    snapshots: list[torch.Tensor] = []

    def mix(step: int, weights: torch.Tensor) -> torch.Tensor:
        if step < warmup_steps:
            return weights
        if snapshots:
            snapshot = snapshots.pop()
            weights = weights + snapshot.mean(0, keepdim=True) - snapshot
        snapshots.append(weights)
        return weights

    return mix


@pytest.mark.parametrize(
    ("world_size", "backend", "micro_batches"), [(2, "gloo", 1), (3, "baguanet", 2), (4, "baguanet", 1)]
)
def test_with_a_staleness_of_one_every_step_is_that_of_the_written_out_rounds(
    world_size: int, backend: str, micro_batches: int
) -> None:
    algorithms = [
        AsyncModelAverage(max_staleness_steps=1),
        AsyncModelAverage(max_staleness_steps=1, warmup_steps=3, sync_interval_ms=0),
    ]
    found = run_for_tensors(train_each, world_size, algorithms, STEPS, micro_batches, backend=backend)
    for index, algorithm in enumerate(algorithms):
        warmup = algorithm.warmup_steps
        expected = simulate(
            world_size,
            STEPS,
            after_step=plain_rounds(warmup),
            warmup_steps=warmup,
            micro_batches=micro_batches,
        )
        assert_same_training([each[index] for each in found], expected)


def rounds_with_a_slow_rank() -> dict[str, Any]:
    """Steppers driven by hand; weights of rank r grow by 1 + r per step, by a clock of the test's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    now = 0.0
    stepper = AsyncStepper(
        StepContext(weights=FlatWeights([("weight", parameter)]), lanes=(dist.new_group(),)),
        AsyncModelAverage(sync_interval_ms=4000, max_staleness_steps=5),
        clock=lambda: now,
    )
    grown, started = 0.0, []
    for step in range(20):
        now += 1.0 + rank
        with torch.no_grad():
            parameter.add_(1.0 + rank)
        grown += 1.0 + rank
        rounds = stepper.rounds
        stepper.after_step()
        if stepper.rounds > rounds:
            started.append(step)
    stepper.pause()
    # Each applied average moves what this rank has by (average - own): the sum over ranks stays.
    total = torch.tensor([parameter[0].item(), grown], dtype=torch.float64)
    dist.all_reduce(total)
    spread = [torch.zeros(1, dtype=torch.float64) for _ in range(world_size)]
    dist.all_gather(spread, parameter.detach()[:1])
    return {"started": started, "total": total, "spread": torch.cat(spread)}


def test_all_ranks_start_rounds_after_the_same_steps_and_lose_no_progress() -> None:
    found = run_for_tensors(rounds_with_a_slow_rank, 3)
    for each in found:
        started = each["started"]
        assert started == found[0]["started"]
        assert started[0] == 0
        # The slowest rank takes 3 s per step, so 4 s are at least two of its steps, from the first round on.
        gaps = [later - earlier for earlier, later in pairwise(started)]
        assert all(2 <= gap <= 5 for gap in gaps), started
        assert each["total"][0] == pytest.approx(each["total"][1])
        # Five steps at 1 and at 3 per step after the last snapshot; alone, ranks would be 20, 40 and 60.
        assert each["spread"].max() - each["spread"].min() <= 10 + 1e-9


class SlowAverage:
    """There after a while; who waits for it before makes the test fail."""

    def __init__(self, tensors: Sequence[torch.Tensor], is_done: Callable[[], bool]) -> None:
        self._tensors, self.is_done = list(tensors), is_done

    def wait(self) -> list[torch.Tensor]:
        assert self.is_done(), "a step was held up"
        return self._tensors


def starts_while_an_average_takes_three_steps(
    steps: int = 20,
    stands_still_before: Sequence[int] = (),
    pauses_before: int | None = None,
    longer_beside: float = 0.0,
) -> list[int]:
    """Steps take a second, and `longer_beside` more while an average is under way; votes take none. Before
    some steps nobody trains for long, as in an evaluation."""
    parameter = nn.Parameter(torch.zeros(3))
    now = 0.0
    stepper = AsyncStepper(
        StepContext(weights=FlatWeights([("weight", parameter)]), lanes=(dist.new_group(),)),
        AsyncModelAverage(sync_interval_ms=1000),
        clock=lambda: now,
    )
    started: list[int] = []

    def average(tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlowAverage:
        torch._foreach_copy_(list(tensors), list(sources))
        started.append(stepper.steps)
        return SlowAverage(tensors, lambda: stepper.steps >= started[-1] + 3 or stepper._paused)

    def vote(period: int) -> PendingReduction:
        asked = ask(period)
        while not asked.is_done():
            time.sleep(0.001)
        return asked

    ask = stepper._vote
    stepper._vote = vote  # type: ignore[method-assign]
    stepper.average = average  # type: ignore[method-assign]
    for step in range(steps):
        now += 1000.0 if step in stands_still_before else 1.0
        now += longer_beside if stepper._round is not None else 0.0
        if step == pauses_before:
            stepper.pause()
            stepper.resume()
        stepper.after_step()
    return started


def test_no_step_waits_for_a_round_that_is_longer_than_the_interval_not_even_for_the_first() -> None:
    # Asked 1, 2 and 4 steps after the first start, answered after 8, which holds for the second one, too.
    assert run_ranks(starts_while_an_average_takes_three_steps, 2) == [[1, 9, 17]] * 2


@pytest.mark.parametrize("before", [12, 13, 14, 18])
def test_what_happens_between_two_steps_changes_nothing(before: int) -> None:
    # While a round is under way, and while none is.
    calm = run_ranks(starts_while_an_average_takes_three_steps, 2, 60)
    assert run_ranks(starts_while_an_average_takes_three_steps, 2, 60, [before]) == calm


def test_rounds_go_on_as_before_after_a_pause_right_behind_a_start() -> None:
    steps = 60
    calm, paused = (
        run_ranks(starts_while_an_average_takes_three_steps, 2, steps, [17], pauses_before)[0]
        for pauses_before in (None, 17)
    )
    # One more round, with the first step after the pause, and all others as far apart as they were.
    assert 17 in calm and paused[:4] == [*calm[:3], 18]
    gaps = [later - earlier for earlier, later in pairwise(paused[3:])]
    assert gaps == [later - earlier for earlier, later in pairwise(calm[2:])][: len(gaps)]


def test_the_period_covers_the_interval_and_the_round_and_stays_below_the_bound() -> None:
    assert choose_period(interval_steps=5.0, round_steps=0.0, cost_beside=0.0, max_steps=100) == 5
    assert choose_period(interval_steps=5.0, round_steps=20.0, cost_beside=0.0, max_steps=100) == 40
    assert choose_period(interval_steps=5.0, round_steps=20.0, cost_beside=0.0, max_steps=20) == 20
    assert choose_period(interval_steps=4.1, round_steps=2.3, cost_beside=0.0, max_steps=20) == 5
    assert choose_period(interval_steps=0.0, round_steps=0.0, cost_beside=0.0, max_steps=20) == 1
    assert choose_period(interval_steps=inf, round_steps=inf, cost_beside=0.0, max_steps=20) == 20


def test_rounds_that_cost_training_much_are_up_to_four_times_their_length_apart() -> None:
    # What they may cost is 2 %, which 4 % of steps beside one are where every second step is.
    periods = [choose_period(5.0, 20.0, cost, max_steps=100) for cost in (0.03, 0.06, 0.08, 1.0)]
    assert periods == [40, 60, 80, 80]


@pytest.mark.parametrize(("longer_beside", "gap"), [(0.0, 6), (0.03, 7), (0.06, 10), (0.5, 18)])
def test_starts_move_apart_as_far_as_steps_are_longer_beside_a_round(longer_beside: float, gap: int) -> None:
    # A round takes three steps, each of 1 s and what it is longer; so gaps are of 2, 2, 3 and 4 times that.
    for started in run_ranks(starts_while_an_average_takes_three_steps, 2, 320, (), None, longer_beside):
        assert started[:3] == [1, 9, 17]
        assert started[-1] - started[-2] == gap, started


def starts_where_a_round_costs_rank_one_only() -> list[int]:
    return starts_while_an_average_takes_three_steps(320, longer_beside=0.055 * dist.get_rank())


def test_what_counts_is_the_rank_that_loses_most() -> None:
    # 2.75 times three steps, which a round is to the other one.
    for started in run_ranks(starts_where_a_round_costs_rank_one_only, 2):
        assert started[-1] - started[-2] == 9, started


def steps_noted_after_slow_ones() -> list[float]:
    """Steps of 100 s in the warm-up, then of 1 s; a pause and a checkpoint that both wait for a round."""
    now = 0.0
    stepper = AsyncStepper(
        StepContext(
            weights=FlatWeights([("weight", nn.Parameter(torch.zeros(3)))]), lanes=(dist.new_group(),)
        ),
        AsyncModelAverage(sync_interval_ms=10**6, warmup_steps=20),
        clock=lambda: now,
    )

    class Waits(SlowAverage):
        def wait(self) -> list[torch.Tensor]:
            nonlocal now
            now += 1.5
            return self._tensors

    stepper.average = lambda _, sources: Waits(sources, lambda: False)  # type: ignore[method-assign, assignment]
    noted: list[float] = []
    note = stepper._step_times.note

    def note_here_too(seconds: float, *, is_beside: bool) -> None:
        noted.append(seconds)
        note(seconds, is_beside=is_beside)

    stepper._step_times.note = note_here_too  # type: ignore[method-assign]
    for step in range(30):
        now += 100.0 if step < 20 else 1.0
        stepper.after_step()
        if step == 24:
            stepper.state_dict()
        if step == 27:
            stepper.pause()
            stepper.resume()
    return noted


def test_neither_warm_up_steps_nor_waits_between_two_steps_count() -> None:
    assert run_ranks(steps_noted_after_slow_ones, 1) == [[1.0] * 10]


PROGRAM = """
import sys, time, torch, torch.distributed as dist
import baguarun.comm.backend
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.algorithms import AsyncModelAverage

rank, store, backend, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
net = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
algorithm = AsyncModelAverage(sync_interval_ms=60_000, max_staleness_steps=4)
model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
for step in range(14):
    # Rounds start after steps 1, 5, 9 and 13.
    time.sleep(0.05 * rank)
    optimizer.zero_grad()
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
assert model.stats().weight_rounds == 4, model.stats()
if ending == "destroys":
    dist.destroy_process_group()
print("trained")
"""


@pytest.mark.parametrize("ending", ["destroys", "just ends"])
@pytest.mark.parametrize("backend", ["gloo", "baguanet"])
def test_a_fast_rank_may_end_while_a_slow_one_still_trains(tmp_path: Path, backend: str, ending: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), backend, ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0, output
            assert "trained" in output
            assert "Error" not in output, output
    finally:
        for process in processes:
            process.kill()


STARVED = """
import atexit, os, sys, torch, torch.distributed as dist
from types import SimpleNamespace
from baguarun.comm.algorithms import stepper
from baguarun.comm.algorithms.stepper import finish_at_exit

# Where others want that core, threads that get what they leave may wait for long.
stepper._IDLE_WAIT_S = 30

class Exchange:
    def __init__(self):
        self.context = SimpleNamespace(group=dist.group.WORLD)
        self.sent = torch.ones(90_000)
        self.work = dist.all_reduce(self.sent, async_op=True)

    def finish(self):
        self.work.wait()
        self.work = None

os.sched_setaffinity(0, {int(sys.argv[3])})
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
dist.all_reduce(torch.ones(1))
names = {int(id): open(f"/proc/self/task/{id}/comm").read().strip() for id in os.listdir("/proc/self/task")}
starved = [id for id, name in names.items() if name == "pt_gloo_runloop"]
assert starved, names
for id in starved:
    os.sched_setscheduler(id, os.SCHED_IDLE, os.sched_param(0))
exchange = Exchange()
# The last one registered is the first one called.
atexit.register(lambda: print("held by", exchange.sent._use_count()))
finish_at_exit(exchange, Exchange.finish)
if sys.argv[4] == "destroys":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("ending", ["destroys", "just ends"])
def test_gloos_threads_have_let_go_of_tensors_when_the_interpreter_ends(tmp_path: Path, ending: str) -> None:
    cpu = str(min(os.sched_getaffinity(0)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", STARVED, str(rank), str(tmp_path / "store"), cpu, ending],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        # Without care four hold them, and if that is the last thing to happen the process aborts.
        assert [process.communicate(timeout=60)[0] for process in processes] == ["held by 1\n"] * 2
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


def train_with_and_without_a_cut() -> list[torch.Tensor]:
    settings = AsyncModelAverage(max_staleness_steps=1)
    return [train_through(settings, STEPS), train_through(settings, STEPS, cut=5)]


def test_a_checkpoint_keeps_the_average_that_is_under_way() -> None:
    for through, resumed in run_for_tensors(train_with_and_without_a_cut, 3):
        assert torch.equal(through, resumed)


def load_a_state_of_another_size() -> str:
    net = Net()
    model = DistributedDataParallel(
        net, optimizers=[make_optimizer(net)], algorithm=AsyncModelAverage(), find_unused_parameters=True
    )
    with pytest.raises(UsageError) as caught:
        model.load_algorithm_state_dict({"steps": 1, "change": [torch.zeros(3)]})
    return str(caught.value)


def test_a_state_of_another_model_is_refused() -> None:
    for message in run_ranks(load_a_state_of_another_size, 2):
        assert "the state is of a model with [3] weights, this one has" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_interval_ms": -1}, "want 0 <= sync_interval_ms"),
        ({"warmup_steps": -1}, "want 0 <= warmup_steps"),
        ({"max_staleness_steps": 0}, "want 1 <= max_staleness_steps"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AsyncModelAverage(**settings)


def test_it_is_known_by_two_names() -> None:
    assert resolve("async") == resolve("async_model_average") == AsyncModelAverage()
