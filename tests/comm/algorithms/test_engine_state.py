"""Training goes on from a checkpoint as if it had not stopped."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
    Sparse,
)
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError
from tests.comm.algorithms.simulation import (
    Net,
    backward,
    make_optimizer,
    one_step,
    run_for_tensors,
    weights_of,
    wrapped,
)
from tests.comm.models import assert_same_on_all_ranks
from tests.comm.ranks import run_ranks

STEPS = 10
ALGORITHMS: list[Algorithm] = [
    Sparse(warmup_steps=0, density=0.1),
    ByteGrad(error_feedback=True),
    QAdam(bits=1),
    QAdam(),
    Sparse(warmup_steps=6),
]


def make(algorithm: Algorithm) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    net = Net(torch.float32)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    if isinstance(algorithm, QAdam):
        optimizer = QAdamOptimizer(trained, lr=0.01, warmup_steps=4)
    model = DistributedDataParallel(
        net, optimizers=[optimizer], algorithm=algorithm, find_unused_parameters=True, bucket_cap_mb=0.0005
    )
    return model, optimizer


def steps(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        backward(model, dist.get_rank(), step, 0, torch.float32)
        optimizer.step()


def save(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, path: Path) -> None:
    torch.save([model.state_dict(), optimizer.state_dict(), model.algorithm_state_dict()], path)


def load(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, path: Path) -> None:
    put_back(model, optimizer, torch.load(path))


def checkpoint(folder: Path, cut: int) -> Path:
    return folder / f"{cut}_{dist.get_rank()}.pt"


def train_and_save(folder: Path, which: int, cuts: list[int]) -> list[float]:
    model, optimizer = make(ALGORITHMS[which])
    done = 0
    for cut in [*cuts, STEPS]:
        steps(model, optimizer, done, cut)
        save(model, optimizer, checkpoint(folder, cut))
        done = cut
    assert_same_on_all_ranks(list(model.module.parameters()))
    return weights_of(model.module).tolist()


def load_and_train(folder: Path, which: int, cuts: list[int]) -> list[list[float]]:
    ends = []
    for cut in cuts:
        model, optimizer = make(ALGORITHMS[which])
        load(model, optimizer, checkpoint(folder, cut))
        steps(model, optimizer, cut, STEPS)
        ends.append(weights_of(model.module).tolist())
    return ends


@pytest.mark.parametrize("which", range(len(ALGORITHMS)))
def test_a_resumed_run_ends_with_the_same_bits_as_one_that_went_through(which: int, tmp_path: Path) -> None:
    # After the first step the order of buckets is known but not yet taken; QAdam's warm-up ends after 4, and
    # the density falls after 2, 4 and 6.
    cuts = [1, 2, 4, 5]
    through = run_ranks(train_and_save, 3, tmp_path, which, cuts)
    for rank, ends in enumerate(run_ranks(load_and_train, 3, tmp_path, which, cuts)):
        assert all(end == through[rank] for end in ends), [end == through[rank] for end in ends]


def forget_the_residuals(folder: Path) -> bool:
    model, optimizer = make(ALGORITHMS[0])
    weights, stepped, _owed = torch.load(checkpoint(folder, 5))
    model.load_state_dict(weights)
    optimizer.load_state_dict(stepped)
    steps(model, optimizer, 5, STEPS)
    through, _, _ = torch.load(checkpoint(folder, STEPS))
    return torch.equal(model.state_dict()["module.first.weight"], through["module.first.weight"])


def test_without_the_algorithms_state_it_would_not(tmp_path: Path) -> None:
    run_ranks(train_and_save, 2, tmp_path, 0, [5])
    assert run_ranks(forget_the_residuals, 2, tmp_path) == [False, False]


def load_into_another_place(folder: Path) -> list[str]:
    model, optimizer = make(ALGORITHMS[0])
    owed = torch.load(folder / "5_1.pt")[2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_algorithm_state_dict(owed)
    steps(model, optimizer, 5, 8)
    assert_same_on_all_ranks(list(model.module.parameters()))
    return [str(each.message) for each in caught if "given up" in str(each.message)]


def test_residuals_of_another_rank_or_world_are_given_up_with_a_warning(tmp_path: Path) -> None:
    run_ranks(train_and_save, 3, tmp_path, 0, [5])
    for rank, messages in enumerate(run_ranks(load_into_another_place, 2, tmp_path)):
        assert messages == [
            f"the algorithm's state is of rank 1 of 3, this is rank {rank} of 2: what error feedback had "
            "left to send is given up"
        ]
    (alone,) = run_ranks(load_into_another_place, 1, tmp_path)
    assert alone == [
        "sparse: the residuals in the state are given up (World of one, or an algorithm without)"
    ]


WITH_STEPPERS: list[Algorithm] = [
    Decentralized(),
    Decentralized(peer_selection_mode="shift_one"),
    LocalSGD(local_steps=2),
    DiLoCo(local_steps=2, delay_steps=1),
    LowPrecisionDecentralized(),
    AsyncModelAverage(max_staleness_steps=1),
]


def one_after_the_other(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> torch.Tensor:
    for step in range(first, last):
        one_step(model, optimizer, step, 1, torch.float64)
    return weights_of(model.module)


def keep(model: Any, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), model.algorithm_state_dict()])


def put_back(model: Any, optimizer: torch.optim.Optimizer, kept: list[dict[str, Any]]) -> None:
    weights, stepped, owed = kept
    model.load_state_dict(weights)
    optimizer.load_state_dict(stepped)
    model.load_algorithm_state_dict(owed)


def go_back_in_the_middle_of_a_step(algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    model, optimizer = wrapped(algorithm)
    one_after_the_other(model, optimizer, 0, 3)
    kept = keep(model, optimizer)
    through = one_after_the_other(model, optimizer, 3, 6)
    backward(model, dist.get_rank(), 6, 0, torch.float64)
    put_back(model, optimizer, kept)
    return through, one_after_the_other(model, optimizer, 3, 6)


@pytest.mark.parametrize("algorithm", WITH_STEPPERS, ids=str)
def test_going_back_in_the_middle_of_a_step_drops_what_it_has_begun(algorithm: Algorithm) -> None:
    for through, again in run_for_tensors(go_back_in_the_middle_of_a_step, 2, algorithm):
        assert torch.equal(through, again)


def leave_the_step_out(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As GradScaler does on the rank whose gradients overflowed: the others wait in their step for it."""
    backward(model, dist.get_rank(), 5, 0, torch.float64)
    if dist.get_rank() == 0:
        optimizer.step()


def fail_before_backward(model: Any, _optimizer: torch.optim.Optimizer) -> None:
    if dist.get_rank() == 0:
        backward(model, 0, 5, 0, torch.float64)
    else:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(2, 3, dtype=torch.float64))


def load_where_ranks_are_apart(
    part: Callable[[Any, torch.optim.Optimizer], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    model, optimizer = wrapped(LocalSGD(local_steps=1))
    one_after_the_other(model, optimizer, 0, 2)
    kept = keep(model, optimizer)
    through = one_after_the_other(model, optimizer, 2, 5)
    part(model, optimizer)
    put_back(model, optimizer, kept)
    return through, one_after_the_other(model, optimizer, 2, 5)


@pytest.mark.parametrize("part", [leave_the_step_out, fail_before_backward])
def test_a_state_is_loaded_where_some_ranks_have_come_further_in_a_step_than_others(
    part: Callable[[Any, torch.optim.Optimizer], None],
) -> None:
    for through, again in run_for_tensors(load_where_ranks_are_apart, 2, part):
        assert torch.equal(through, again)


def load_what_a_world_of_one_had(algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    model, optimizer = wrapped(algorithm)
    weights = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    one_after_the_other(model, optimizer, 0, 3)
    model.load_state_dict(weights)
    optimizer.load_state_dict(make_optimizer(model.module).state_dict())
    with pytest.warns(UserWarning, match=r"the state is empty, .*: the algorithm begins anew"):
        model.load_algorithm_state_dict({})
    loaded = one_after_the_other(model, optimizer, 3, 8)
    # One that has loaded weights only, as a script does that goes on with another algorithm.
    model, optimizer = wrapped(algorithm)
    model.load_state_dict(weights)
    return loaded, one_after_the_other(model, optimizer, 3, 8)


@pytest.mark.parametrize("algorithm", WITH_STEPPERS, ids=str)
def test_the_empty_state_of_a_world_of_one_is_a_new_beginning(algorithm: Algorithm) -> None:
    for loaded, anew in run_for_tensors(load_what_a_world_of_one_had, 2, algorithm):
        assert torch.equal(loaded, anew)


def load_the_state_of_several(state: dict[str, Any]) -> list[str]:
    model, _ = wrapped(LocalSGD())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_algorithm_state_dict(state)
    return [str(each.message) for each in caught]


def test_a_world_of_one_gives_up_the_state_of_several_with_a_warning() -> None:
    assert run_ranks(load_the_state_of_several, 1, {"steps": 3}) == [
        ["local_sgd: steps of the state is given up in a World of one"]
    ]


def load_into_other_buckets() -> None:
    def wrap(bucket_cap_mb: float) -> DistributedDataParallel:
        module = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70))
        algorithm = Sparse(warmup_steps=0)
        return DistributedDataParallel(module, algorithm=algorithm, bucket_cap_mb=bucket_cap_mb)

    first, second = wrap(0.001), wrap(1)
    for model in (first, second):
        model(torch.randn(3, 70)).sum().backward()
        model(torch.randn(3, 70)).sum().backward()
    state = first.algorithm_state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_algorithm_state_dict(state)
    for name, owed in second.algorithm_state_dict()["engine"]["residuals"].items():
        assert owed.any() and torch.equal(owed, state["engine"]["residuals"][name])
    second(torch.randn(3, 70)).sum().backward()


def test_what_is_owed_stays_where_buckets_differ() -> None:
    run_ranks(load_into_other_buckets, 2)


def wrong_states() -> list[str]:
    def state_of(module: nn.Module) -> tuple[DistributedDataParallel, dict[str, Any]]:
        model = DistributedDataParallel(module, algorithm=Sparse(warmup_steps=0))
        file = io.BytesIO()
        torch.save(model.algorithm_state_dict(), file)
        file.seek(0)
        return model, torch.load(file)

    model, _ = state_of(nn.Linear(8, 8))
    messages = []
    for other in (nn.Linear(8, 8, bias=False), nn.Linear(8, 9)):
        with pytest.raises(UsageError) as caught:
            model.load_algorithm_state_dict(state_of(other)[1])
        messages.append(str(caught.value))
    return messages


def test_the_state_of_another_model_is_refused_by_name() -> None:
    for names, sizes in run_ranks(wrong_states, 2):
        assert "the algorithm's state is of another model: bias in one of them only" in names
        assert "owes 72 numbers of 'weight'; want 64" in sizes


def load_too_early() -> str:
    model, optimizer = make(QAdam(bits=1))
    steps(model, optimizer, 0, 6)
    state = model.algorithm_state_dict()
    with pytest.raises(UsageError) as caught:
        make(QAdam(bits=1))[0].load_algorithm_state_dict(state)
    return str(caught.value)


def test_residuals_of_momentum_want_the_optimizers_state_first() -> None:
    for message in run_ranks(load_too_early, 2):
        assert "want no (the same model and settings, and the optimizers' state loaded before)" in message
