"""What a worker does before it is taken in: nothing of its state changes by it."""

from __future__ import annotations

import mmap
import os
import resource
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import baguarun
from baguarun.comm.algorithms import LocalSGD
from baguarun.comm.extension import load_extension
from baguarun.elastic import ElasticSampler
from baguarun.elastic.training import standby
from baguarun.elastic.training.streaming import Landing

CPU = torch.device("cpu")


def test_memory_is_given_once_and_only_for_its_own_dtype_and_shape() -> None:
    landing = Landing([torch.empty(2, 3), torch.empty(5, dtype=torch.bfloat16)])
    room = {tensor.data_ptr() for free in landing._free.values() for tensor in free}
    assert len(room) == 6
    taken = [landing.take(torch.float32, (2, 3), CPU) for _ in range(3)]
    assert len({tensor.data_ptr() for tensor in taken} & room) == 3
    for dtype, shape in ((torch.float32, (2, 3)), (torch.float64, (2, 3)), (torch.bfloat16, (5, 1))):
        found = landing.take(dtype, shape, CPU)
        assert (found.dtype, tuple(found.shape), found.device) == (dtype, shape, CPU)
        assert found.data_ptr() not in room
    assert landing.take(torch.bfloat16, (5,), torch.device("meta")).is_meta
    assert landing.take(torch.bfloat16, (5,), CPU).data_ptr() in room


def odd_model() -> nn.Sequential:
    """Weights in channels_last, one that is not a number, a frozen one, a buffer of numbers in one place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Conv2d(3, 8, 3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    model.register_buffer("same", torch.ones(1).expand(4))
    model[0].bias.requires_grad_(False)
    return model


@pytest.fixture
def world_of_one() -> Iterator[None]:
    baguarun.init_process_group()
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_preparing_leaves_every_bit_as_it_was() -> None:
    net = odd_model()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    model = baguarun.DistributedDataParallel(net, optimizers=[optimizer], algorithm=LocalSGD(local_steps=2))
    data = torch.arange(8)
    loader = DataLoader(data, batch_sampler=ElasticSampler(data, 2), num_workers=1, persistent_workers=True)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    strides = {name: tensor.stride() for name, tensor in net.state_dict().items()}
    random_state = torch.get_rng_state()
    standby.start_loaders([1, "argument", loader])
    landing = standby.own_memory({"model": model, "epoch": 3})
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
        assert tensor.stride() == strides[name]
    now = [parameter for parameter in net.parameters() if parameter.requires_grad]
    assert all(one is other and one.is_leaf for one, other in zip(now, trained, strict=True))
    # Where an algorithm that exchanges weights wants them.
    assert len({parameter.untyped_storage().data_ptr() for parameter in trained}) == 1
    room = [tuple(tensor.shape) for free in landing._free.values() for tensor in free]
    assert sorted(room) == sorted(3 * [tuple(parameter.shape) for parameter in trained])
    assert [process.is_alive() for process in loader._iterator._workers] == [True]


class Counted(Dataset[int]):
    """Whole numbers; counts how often one was asked for, in whatever process."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.asked = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return index


def test_loaders_that_are_started_ahead_load_nothing_before_the_epoch_and_all_of_it_then() -> None:
    data = Counted(12)
    loader = DataLoader(
        data, batch_sampler=ElasticSampler(data, 2), num_workers=1, persistent_workers=True, prefetch_factor=2
    )
    standby.start_loaders([loader])
    for epoch in (1, 2):
        found = sorted(number for batch in loader for number in batch.tolist())
        assert found == list(range(12))
        # Its one process takes one thing after the other: what was asked for ahead would have been loaded.
        assert int(data.asked) == 12 * epoch


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.parametrize("is_forked", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 5000])
def test_pages_that_are_owned_are_not_missed_when_they_are_written(is_forked: bool, offset: int) -> None:
    memory = mmap.mmap(-1, 8_000_000, flags=mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.int64)
    if is_forked:
        whole += 7
    mine = whole[offset:]
    child = os.fork() if is_forked else None
    if child == 0:
        signal.pause()
    try:
        before = faults()
        load_extension().own_pages(mine.data_ptr(), mine.nbytes)
        missed = faults() - before
        before = faults()
        mine += 1
        assert missed > 1000
        assert faults() - before < missed / 10
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert mine.eq(8 if is_forked else 1).all()


def test_no_memory_has_no_pages() -> None:
    load_extension().own_pages(0, 0)
