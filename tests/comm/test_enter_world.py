"""A wrapped model goes on in another World: what stays, what is dropped, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from baguarun.comm.algorithms import Algorithm, DiLoCo, PowerSGD, QAdam, QAdamOptimizer, Sparse
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.world import enter_world
from baguarun.errors import CommunicationError
from tests.comm.ranks import run_ranks, run_ranks_to_the_end
from tests.comm.worlds import listen, num_open_files, threads, wait_for_no_more_than, world_of

ALGORITHMS = [
    "gradient_allreduce",
    "bytegrad",
    "qadam",
    "onebit",
    "sparse",
    "power_sgd",
    "decentralized",
    "low_precision_decentralized",
    "async_model_average",
    "local_sgd",
    "diloco",
]
KEEP_REPLICAS_EQUAL = {"gradient_allreduce", "bytegrad", "qadam", "onebit", "sparse", "power_sgd"}
EARLY: dict[str, Algorithm] = {
    "qadam": QAdam(bits=8),
    "onebit": QAdam(bits=1),
    "power_sgd": PowerSGD(start_step=2),
    "sparse, warming up": Sparse(warmup_steps=8),
}
"""Algorithms that begin to compress within a few steps."""


class Trainee:
    """One rank's model, with all that a step needs."""

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        width: int = 60,
        bucket_cap_mb: float = 0.01,
        **settings: Any,
    ) -> None:
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(50, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, 5))
        chosen = EARLY.get(algorithm, algorithm) if isinstance(algorithm, str) else algorithm
        if isinstance(chosen, QAdam):
            self.optimizer: torch.optim.Optimizer = QAdamOptimizer(net.parameters(), lr=1e-3, warmup_steps=2)
        else:
            self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        self.model = DistributedDataParallel(
            net,
            optimizers=[self.optimizer],
            algorithm=chosen,
            bucket_cap_mb=bucket_cap_mb,
            **settings,
        )
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 50, generator=self.data)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


class Meeting:
    """Tells ranks the port of the next World through a folder, whether or not they are in one World now."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def wait_for_all(self, generation: int, rank: int, size: int) -> None:
        """Until every rank is about to enter: who enters first ends whatever another still waits for."""
        (self._folder / f"{generation}.{rank}.here").touch()
        while not all((self._folder / f"{generation}.{other}.here").exists() for other in range(size)):
            time.sleep(0.001)

    def enter(self, generation: int, rank: int, size: int) -> None:
        listener: socket.socket | None = listen()
        assert listener is not None
        file = self._folder / str(generation)
        if rank == 0:
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(str(listener.getsockname()[1]))
            part.rename(file)
        while size > 1 and not file.exists():
            time.sleep(0.001)
        port = int(file.read_text()) if size > 1 else 0
        enter_world(world_of(generation, size, port), rank=rank, listener=listener, channel=None)

    def enter_together(self, generation: int, rank: int, size: int) -> None:
        """As a polite change does: once nobody waits for anybody in the World before."""
        self.wait_for_all(generation, rank, size)
        self.enter(generation, rank, size)


def assert_equal_on_all_ranks(weights: torch.Tensor) -> None:
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    assert all(torch.equal(weights, other) for other in everyone)


def mappings() -> int:
    return sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())


def left() -> tuple[int, int, int]:
    return len(threads()), num_open_files(), mappings()


def fifty_worlds(folder: str) -> None:
    meeting, trainee, rank = Meeting(folder), Trainee(), dist.get_rank()
    before: tuple[int, int, int] | None = None
    for generation in range(2, 52):
        trainee.step()
        trainee.backward()
        meeting.enter_together(generation, rank, 2)
        trainee.model.enter_world()
        assert all(parameter.grad is None for parameter in trainee.model.parameters())
        trainee.step()
        assert_equal_on_all_ranks(trainee.weights())
        before = before or left()
        wait_for_no_more_than(before, left)


def test_fifty_worlds_of_one_model_leave_no_thread_descriptor_or_mapping(tmp_path: Path) -> None:
    run_ranks(fifty_worlds, 2, str(tmp_path))


def die_in_backward(folder: str, victim: int, algorithm: str) -> None:
    meeting, trainee, rank = Meeting(folder), Trainee(algorithm), dist.get_rank()
    for _ in range(4):
        trainee.step()
    if rank == victim:
        first = next(trainee.model.parameters())
        first.register_hook(lambda _gradient: os.kill(os.getpid(), signal.SIGKILL))
    before = trainee.weights()
    with pytest.raises((CommunicationError, dist.DistError)):
        trainee.backward()
    place = rank - (rank > victim)
    meeting.enter(2, place, 2)
    trainee.model.enter_world()
    assert all(parameter.grad is None for parameter in trainee.model.parameters())
    assert torch.equal(trainee.weights(), before)
    for _ in range(3):
        trainee.step()
    assert_equal_on_all_ranks(trainee.weights())
    # Whoever ends first would end the others.
    dist.barrier()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "qadam", "onebit"])
def test_survivors_give_up_a_backward_and_go_on(tmp_path: Path, victim: int, algorithm: str) -> None:
    outcomes = run_ranks_to_the_end(die_in_backward, 3, str(tmp_path), victim, algorithm)
    assert [outcome.died for outcome in outcomes] == [rank == victim for rank in range(3)]
    left = [outcome for outcome in outcomes if not outcome.died]
    assert all(outcome.error is None for outcome in left), left[0].traceback


def seeded_step(trainee: Trainee, number: int, *, ends: bool = True) -> None:
    trainee.data.manual_seed(1000 * number + dist.get_rank())
    trainee.backward()
    if ends:
        trainee.optimizer.step()
        trainee.model.commit()


def change_world_after_four_steps(folder: str, algorithm: str, abandons: bool) -> NDArray[Any]:
    meeting, trainee, rank = Meeting(folder), Trainee(algorithm), dist.get_rank()
    trainee.model.keep_committed()
    for number in range(4):
        seeded_step(trainee, number)
    if abandons:
        seeded_step(trainee, 4, ends=False)
    meeting.enter_together(2, rank, 2)
    trainee.model.enter_world()
    if abandons:
        # Again: the World changes once more before the step is done again.
        meeting.enter_together(3, rank, 2)
        trainee.model.enter_world()
    trainee.model.roll_back()
    for number in range(4, 7):
        seeded_step(trainee, number)
    return trainee.weights().numpy()


@pytest.mark.parametrize("algorithm", ["onebit", "sparse", "sparse, warming up"])
def test_a_step_done_again_owes_what_it_owed_at_the_commit(tmp_path: Path, algorithm: str) -> None:
    found = []
    for abandons in (False, True):
        folder = tmp_path / str(abandons)
        folder.mkdir()
        found.append(run_ranks(change_world_after_four_steps, 2, str(folder), algorithm, abandons)[0])
    assert (found[0] == found[1]).all()


def owed(trainee: Trainee) -> dict[str, torch.Tensor]:
    """What this rank owes, by parameter."""
    residuals: dict[str, torch.Tensor] = trainee.model.algorithm_state_dict()["engine"]["residuals"]
    return residuals


def owe_in_another_world(folder: str) -> None:
    meeting, trainee, rank = Meeting(folder), Trainee(Sparse(warmup_steps=0)), dist.get_rank()
    for _ in range(4):
        trainee.step()
    before = owed(trainee)
    # More than half: in what it sums up itself, too.
    everything = torch.cat([residual.flatten() for residual in before.values()])
    assert everything.count_nonzero() > 0.6 * everything.numel()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Ranks have other chunks there.
        meeting.enter_together(2, 1 - rank, 2)
        trainee.model.enter_world()
    now = owed(trainee)
    assert all(torch.equal(residual, now[name]) for name, residual in before.items())


def test_all_that_is_owed_stays_when_the_world_changes(tmp_path: Path) -> None:
    run_ranks(owe_in_another_world, 2, str(tmp_path))


def bytes_of_a_step(trainee: Trainee) -> int:
    before = trainee.model.stats().bytes_sent
    trainee.step()
    return trainee.model.stats().bytes_sent - before


def go_on_warming_up(folder: str) -> None:
    """Three steps per density: whole, 1/16, 1/64, 1/100."""
    meeting, rank = Meeting(folder), dist.get_rank()
    trainee = Trainee(Sparse(warmup_steps=9), width=400)
    trainee.model.keep_committed()
    sent = [bytes_of_a_step(trainee) for _ in range(5)]
    trainee.model.commit()
    before = owed(trainee)
    assert any(residual.any() for residual in before.values())
    # Gone through once more, in the same World.
    trainee.backward()
    trainee.model.roll_back()
    # Cut off.
    trainee.backward()
    meeting.enter_together(2, rank, 2)
    trainee.model.enter_world()
    trainee.model.roll_back()
    now = owed(trainee)
    assert all(torch.equal(residual, now[name]) for name, residual in before.items())
    sent += [bytes_of_a_step(trainee) for _ in range(6)]
    assert_equal_on_all_ranks(trainee.weights())
    assert [len(list(same)) for _, same in groupby(sent)] == [3, 3, 3, 2]
    # Whoever ends first would end the others.
    dist.barrier()


def test_a_warm_up_of_sparse_goes_on_in_the_next_world_with_what_it_owed(tmp_path: Path) -> None:
    run_ranks(go_on_warming_up, 2, str(tmp_path))


def go_through_a_step_of_the_warm_up_once_more(folder: str) -> None:
    """Rank 0 has applied the sixth step of three per density; rank 1 was sent what came of it."""
    meeting, rank = Meeting(folder), dist.get_rank()
    trainee = Trainee(Sparse(warmup_steps=9), width=400)
    trainee.model.keep_committed()
    sent = [bytes_of_a_step(trainee) for _ in range(5)]
    trainee.model.commit()
    sent.append(bytes_of_a_step(trainee))
    meeting.enter_together(2, rank, 2)
    trainee.model.enter_world()
    trainee.model.commit()
    trainee.model.roll_back()
    trainee.backward()
    trainee.model.roll_back()
    trainee.model.commit()
    sent += [bytes_of_a_step(trainee) for _ in range(6)]
    assert [len(list(same)) for _, same in groupby(sent)] == [3, 3, 3, 3]
    dist.barrier()


def test_a_step_of_a_warm_up_that_is_gone_through_once_more_counts_once(tmp_path: Path) -> None:
    run_ranks(go_through_a_step_of_the_warm_up_once_more, 2, str(tmp_path))


def roll_back_what_a_world_of_one_has_committed(folder: str) -> None:
    meeting, rank = Meeting(folder), dist.get_rank()
    trainee = Trainee(Sparse(warmup_steps=9), width=400)
    trainee.model.keep_committed()
    for _ in range(5):
        trainee.step()
    meeting.wait_for_all(2, rank, 2)
    if rank == 0:
        meeting.enter(2, 0, 1)
        trainee.model.enter_world()
    trainee.model.commit()
    meeting.enter_together(3, rank, 2)
    trainee.model.enter_world()
    trainee.backward()
    trainee.model.roll_back()
    assert trainee.model.algorithm_state_dict()["rounds"] == 5
    dist.barrier()


def test_a_roll_back_goes_to_what_a_world_of_one_has_committed(tmp_path: Path) -> None:
    run_ranks(roll_back_what_a_world_of_one_has_committed, 2, str(tmp_path))


def keep_outer_weights(folder: str) -> None:
    meeting, trainee, rank = Meeting(folder), Trainee(DiLoCo(local_steps=2)), dist.get_rank()
    for _ in range(3):
        trainee.step()
    [before] = trainee.model._session.stepper._fragments  # type: ignore[union-attr]
    kept = [tensor.clone() for tensor in before.outer + before.momentum]
    meeting.enter_together(2, rank, 2)
    trainee.model.enter_world()
    [after] = trainee.model._session.stepper._fragments  # type: ignore[union-attr]
    for now, then, value in zip(
        after.outer + after.momentum, before.outer + before.momentum, kept, strict=True
    ):
        assert now is then and torch.equal(now, value)


def test_outer_weights_stay_where_they_are(tmp_path: Path) -> None:
    run_ranks(keep_outer_weights, 2, str(tmp_path))


def shrink_and_grow(folder: str, algorithm: str) -> None:
    meeting, rank = Meeting(folder), dist.get_rank()
    if rank == 2:
        # Comes later, as a newcomer does: in a World of its own.
        meeting.enter(0, 0, 1)
        trainee = Trainee(algorithm)
    else:
        meeting.enter(1, rank, 2)
        trainee = Trainee(algorithm)
        trainee.model.keep_committed()
        for _ in range(5):
            trainee.step()
            trainee.model.commit()
        # Who leaves first would break what the other one's last step waits for.
        meeting.wait_for_all(2, rank, 2)
        meeting.enter(2, 0, 1)
        trainee.model.enter_world()
        trainee.model.roll_back()
        trainee.step()
        trainee.model.commit()
    meeting.enter(3, rank, 3)
    trainee.model.enter_world()
    with torch.no_grad():
        for parameter in trainee.model.parameters():
            dist.broadcast(parameter, 0)
    if algorithm == "diloco":
        # Those of before the steps alone would be far from the weights of now.
        stepper: Any = trainee.model._session.stepper
        [fragment] = stepper._fragments
        assert torch.equal(torch.cat(fragment.outer), torch.cat(stepper.context.weights.buffers))
        assert not torch.cat(fragment.momentum).any()
    states: list[Any] = [trainee.optimizer.state_dict()]
    dist.broadcast_object_list(states, 0)
    trainee.optimizer.load_state_dict(states[0])
    for _ in range(6):
        trainee.step()
    if algorithm in KEEP_REPLICAS_EQUAL:
        assert_equal_on_all_ranks(trainee.weights())
    assert torch.isfinite(trainee.weights()).all()
    # As at the end of any script.
    dist.barrier()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_goes_to_a_world_of_one_and_back_to_one_of_many(
    tmp_path: Path, algorithm: str
) -> None:
    run_ranks(shrink_and_grow, 3, str(tmp_path), algorithm)
