"""What torch builds on a backend works on baguanet, and gives the bits that it gives on Gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from baguarun.comm.ddp import DistributedDataParallel as OurDistributedDataParallel
from tests.comm.models import loss, mlp
from tests.comm.ranks import run_ranks

BEFORE_IT_IS_SENT_S = 0.2
CALLBACK_S = 5


def train(wrap: Callable[[nn.Module], nn.Module], steps: int = 4) -> list[float]:
    torch.manual_seed(5)
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        value = loss(model(torch.randn(6, 37, generator=generator)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        mean = value.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        losses.append(mean.item())
    return losses


def ddp() -> list[float]:
    return train(lambda module: DistributedDataParallel(module, bucket_cap_mb=0.01))


def ddp_static() -> list[float]:
    return train(
        lambda module: DistributedDataParallel(module, static_graph=True, gradient_as_bucket_view=True)
    )


def ddp_with_a_hook() -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def wrap(module: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(module)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped

    return train(wrap)


def fsdp() -> list[float]:
    return train(lambda module: fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


def fsdp_in_bf16() -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def wrap(module: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return fully_shard(module, mesh=mesh, mp_policy=policy)

    return train(wrap)


@pytest.mark.parametrize(
    "how", [ddp, ddp_static, ddp_with_a_hook, fsdp, fsdp_in_bf16], ids=lambda h: h.__name__
)
def test_training_on_two_ranks_gives_the_losses_of_gloo_bit_for_bit(how: Callable[[], list[float]]) -> None:
    ours, gloos = run_ranks(how, 2), run_ranks(how, 2, backend="gloo")
    assert ours == gloos
    assert ours[0][-1] != ours[0][0]


@pytest.mark.parametrize("how", [ddp, fsdp], ids=lambda h: h.__name__)
def test_training_on_three_ranks_gives_the_losses_of_gloo(how: Callable[[], list[float]]) -> None:
    # Gloo adds in another order.
    torch.testing.assert_close(run_ranks(how, 3), run_ranks(how, 3, backend="gloo"))


def device_mesh() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = torch.arange(32.0).view(8, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(sharded.full_tensor(), whole)
    product = sharded @ distribute_tensor(torch.eye(4), mesh)
    assert isinstance(product, DTensor) and torch.equal(product.full_tensor(), whole)
    summed = functional.all_reduce(torch.full((3,), float(rank)), "sum", mesh["outer"].get_group())
    assert functional.wait_tensor(summed)[0].item() == {0: 2, 1: 4, 2: 2, 3: 4}[rank]
    gathered = functional.all_gather_tensor(torch.full((1,), float(rank)), 0, mesh["inner"].get_group())
    assert gathered.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    scattered = functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, mesh["inner"].get_group())
    assert scattered.tolist() == [2.0, 2.0]


def test_meshes_and_functional_collectives_work() -> None:
    run_ranks(device_mesh, 4)


def with_details(folder: str) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    timeout = timedelta(seconds=30)
    dist.init_process_group("baguanet", store=store, rank=rank, world_size=size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    assert group._get_backend(torch.device("cpu")).name() == "baguanet"
    group.monitored_barrier(timedelta(seconds=20))
    losses = train(lambda module: OurDistributedDataParallel(module))
    losses += train(lambda module: DistributedDataParallel(module))
    dist.all_to_all_single(torch.empty(size), torch.ones(size))
    # The checks around the backend find what differs before it is asked.
    with pytest.raises(RuntimeError, match="Detected mismatch between collectives"):
        dist.all_reduce(torch.ones(3 + rank))
    return losses


def test_debugging_with_details_works_and_finds_what_differs(tmp_path: Path) -> None:
    ours, theirs = run_ranks(with_details, 2, str(tmp_path))
    assert ours == theirs and len(ours) == 8


def sequence_numbers() -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    backend._set_sequence_number_for_group()
    numbers = [backend._get_sequence_number_for_group()]
    dist.barrier()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    return [*numbers, backend._get_sequence_number_for_group()]


def test_sequence_numbers_count_the_collectives() -> None:
    assert run_ranks(sequence_numbers, 2) == [[0, 3]] * 2


def profiled() -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(10))
        work = dist.all_reduce(torch.ones(10), async_op=True)
        assert work is not None and work.wait()
    return {event.name for event in profile.events() or []}


def test_the_profiler_sees_operations() -> None:
    for names in run_ranks(profiled, 2):
        assert "baguanet:all_reduce" in names


def receives_us(profile: torch.profiler.profile) -> list[float]:
    """How long each took."""
    receives = [event for event in profile.events() or [] if event.name == "baguanet:recv"]
    return [event.time_range.elapsed_us() for event in receives]


def profiled_to_the_end() -> list[float]:
    """How long each receive took, in us, where another one's callback runs for longer than the profiler."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 is in the collective"])
        for tag in range(2):
            dist.send(torch.ones(3), 0, tag=tag)
        dist.all_reduce(torch.ones(3))
        return []
    stopped = threading.Event()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        first, second = (dist.irecv(torch.empty(3), 1, tag=tag) for tag in range(2))
        assert first is not None and second is not None
        first.get_future().then(lambda _: stopped.wait(CALLBACK_S))
        # Both end with this, one after the other.
        collective = dist.all_reduce(torch.ones(3), async_op=True)
        assert collective is not None
        time.sleep(BEFORE_IT_IS_SENT_S)
        store.set("rank 0 is in the collective", "")
        for work in (collective, first, second):
            work.wait()
    stopped.set()
    return receives_us(profile)


def test_the_profiler_knows_the_end_of_what_has_been_waited_for() -> None:
    """If it learnt it later, it might be told of it where it has let go of the event: a crash."""
    took = run_ranks(profiled_to_the_end, 2)[0]
    assert len(took) == 2
    assert all(BEFORE_IT_IS_SENT_S * 1e6 <= each < CALLBACK_S * 1e6 for each in took), took


def profiled_and_given_up() -> list[float]:
    """How long each receive took, in us, of which one was given up and one dropped."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["the profiler is gone"])
        for tag in range(2):
            dist.send(torch.ones(3), 0, tag=tag)
        dist.barrier()
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        given_up, dropped = (dist.irecv(torch.empty(3), 1, tag=tag) for tag in range(2))
        assert given_up is not None
        with pytest.raises(RuntimeError, match="timed out"):
            given_up.wait(timedelta(seconds=BEFORE_IT_IS_SENT_S))
        del dropped
    store.set("the profiler is gone", "")
    given_up.wait()
    dist.barrier()
    return receives_us(profile)


def test_the_profiler_is_told_of_what_nobody_waits_for_any_more() -> None:
    took = run_ranks(profiled_and_given_up, 2)[0]
    assert len(took) == 2
    assert all(each >= BEFORE_IT_IS_SENT_S * 1e6 for each in took), took


def monitored() -> str:
    group = dist.group.WORLD
    assert group is not None
    group.monitored_barrier()
    store = dist.distributed_c10d._get_default_store()
    said = ""
    if dist.get_rank() != 1:
        with pytest.raises(RuntimeError) as caught:
            group.monitored_barrier(timedelta(milliseconds=300))
        said = str(caught.value)
    store.set(f"end {dist.get_rank()}", "")
    store.wait([f"end {peer}" for peer in range(3)])
    return said


def test_a_monitored_barrier_names_who_did_not_come() -> None:
    said = run_ranks(monitored, 3)
    for text in (said[0], said[2]):
        assert "monitored_barrier" in text and "rank 1" in text, text
