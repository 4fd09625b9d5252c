"""A Bagua script runs when its import line changes."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.comm.models import assert_averaged, assert_same_on_all_ranks, batch, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks
from tests.support.etcd_servers import free_port


def runs_the_documented_program() -> None:
    dist.barrier()
    dist.destroy_process_group()

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["BAGUARUN_TEST_PORT"])
    import baguarun.torch_api as bagua

    assert (bagua.get_rank(), bagua.get_world_size()) == (int(os.environ["RANK"]), 2)
    bagua.init_process_group()
    from baguarun.torch_api.algorithms import gradient_allreduce

    assert (bagua.get_rank(), bagua.get_world_size()) == (dist.get_rank(), 2)
    assert (bagua.get_local_rank(), bagua.get_local_size()) == (dist.get_rank(), 2)
    model = mlp()
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
    model = model.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    assert list(model.state_dict()) == keys
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(batch(model))).backward()
        optimizer.step()
    assert_same_on_all_ranks(list(model.parameters()))
    assert model.stats().steps == 3


def runs_bytegrad_and_no_sync() -> None:
    from baguarun.torch_api.algorithms import bytegrad

    model = mlp()
    plain = mlp()
    model = model.with_bagua([], bytegrad.ByteGradAlgorithm())  # type: ignore[operator]
    first, second = batch(plain), batch(plain)

    def both(local: nn.Module) -> None:
        loss(local(first)).backward()
        loss(local(second)).backward()

    reference = gathered_gradients(plain, both)
    with model.no_sync():
        loss(model(first)).backward()
    loss(model(second)).backward()
    assert_averaged(model, reference, 0.02, one_scale=True)
    # As the wrapper's gradient_as_bucket_view=False.
    with pytest.warns(UserWarning, match="do_flatten=False: gradients are views"):
        unflat = mlp().with_bagua([], "bytegrad", do_flatten=False)  # type: ignore[operator]
    loss(unflat(batch(unflat))).backward()
    assert unflat.stats().steps == 1


def test_the_documented_program_runs() -> None:
    run_ranks(with_port, 2, free_port())


def with_port(port: int) -> None:
    os.environ["BAGUARUN_TEST_PORT"] = str(port)
    runs_the_documented_program()


def test_with_bagua_takes_bytegrad_and_accumulates() -> None:
    run_ranks(runs_bytegrad_and_no_sync, 2)
