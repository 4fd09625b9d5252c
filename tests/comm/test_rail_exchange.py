"""Exchange by rail among nodes that are simulated on this machine, against the exchange written out."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.algorithms import Algorithm, ByteGrad, GradientAllReduce
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.extension import load_extension
from baguarun.errors import CommunicationError
from tests.comm.models import assert_averaged, assert_same_on_all_ranks, batch, gathered_gradients, loss, mlp
from tests.comm.nodes import live_on_nodes
from tests.comm.ranks import run_ranks, run_ranks_to_the_end
from tests.comm.test_bytegrad import CHUNK_ALIGN, reference_exchange

PLACES = [(2, 2), (3, 1), (2, 1), (1, 2, 2), (3, 3)]


def reference_by_rail(flats: list[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Each shard summed up on every node in fp32, these sums exchanged in 8 bits."""
    codec = load_extension()
    num_rails, numel = min(sizes), flats[0].numel()
    share = -(-numel // num_rails)
    stride = -(-share // CHUNK_ALIGN) * CHUNK_ALIGN
    parts = []
    for start in range(0, numel, stride):
        sums, first = [], 0
        for size in sizes:
            pieces = [flat[start : start + stride].float() for flat in flats[first : first + size]]
            scale = torch.tensor(float(len(sizes))) / torch.tensor(float(sum(sizes)))
            chunks = [codec.encode(piece, codec.Wire.F32) for piece in pieces]
            sums.append(
                codec.reduce_decode(chunks, codec.Wire.F32, scale.item(), pieces[0].numel(), torch.float32)
            )
            first += size
        parts.append(reference_exchange(sums).to(flats[0].dtype))
    return torch.cat(parts)


def matches_reference_bit_for_bit(
    sizes: Sequence[int], width: int, depth: int, bucket_cap_mb: float, num_steps: int
) -> None:
    live_on_nodes(sizes)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = DistributedDataParallel(
            mlp(dtype, width, depth),
            algorithm=ByteGrad(hierarchical=True),
            bucket_cap_mb=bucket_cap_mb,
        )
        parameters = list(model.module.named_parameters())
        for _ in range(num_steps):
            x = batch(model.module)
            locals_ = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
            model.zero_grad()
            loss(model(x)).backward()
            plan = model._session._engine.plan()
            assert (len(plan) > 1) == (depth > 1)
            for bucket in plan:
                flats = [
                    torch.cat([locals_[parameters[i][0]][rank].reshape(-1) for i in bucket])
                    for rank in range(dist.get_world_size())
                ]
                found = torch.cat([parameters[i][1].grad.reshape(-1) for i in bucket])
                assert torch.equal(found, reference_by_rail(flats, sizes))
        assert_same_on_all_ranks([parameter.grad for _, parameter in parameters])


@pytest.mark.parametrize("sizes", PLACES)
def test_every_bucket_equals_the_exchange_written_out_bit_for_bit(sizes: tuple[int, ...]) -> None:
    run_ranks(matches_reference_bit_for_bit, sum(sizes), sizes, 61, 3, 0.01, 3)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)])
@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_shards_that_come_in_parts_are_summed_up_as_whole_ones_are(
    sizes: tuple[int, ...], backend: str
) -> None:
    # Shards of 3.1 and 6.3 MB in fp32 are 4 and 7 parts, the last one so short that it does not ask for room
    # as the others do. In 16 bits the leader of three has 4.
    run_ranks(matches_reference_bit_for_bit, 4, sizes, 1254, 1, 100, 2, backend=backend)


def averages(sizes: Sequence[int], algorithm: Algorithm, rtol: float) -> None:
    live_on_nodes(sizes)
    for dtype in (torch.float32, torch.float16, torch.float64):
        # One bucket is smaller than one vector: some rails own nothing of it.
        for width in (1, 130):
            model = DistributedDataParallel(
                mlp(dtype, width=width), algorithm=algorithm, bucket_cap_mb=0.05, share_memory=False
            )
            for _ in range(3):
                x = batch(model.module)
                reference = gathered_gradients(model.module, lambda local, x=x: loss(local(x)).backward())
                model.zero_grad()
                loss(model(x)).backward()
                within = max(rtol, 2e-3) if dtype is torch.float16 else rtol
                assert_averaged(model.module, reference, within, one_scale=True)
                assert_same_on_all_ranks([parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1, 2)])
@pytest.mark.parametrize(
    ("algorithm", "rtol"),
    [
        (GradientAllReduce(hierarchical=True), 1e-5),
        (GradientAllReduce(hierarchical=True, wire="bf16"), 1e-2),
        (ByteGrad(hierarchical=True), 2e-2),
    ],
    ids=["gradient_allreduce", "bf16", "bytegrad"],
)
def test_every_rank_holds_the_same_average_over_gloo(
    sizes: tuple[int, ...], algorithm: Algorithm, rtol: float
) -> None:
    run_ranks(averages, sum(sizes), sizes, algorithm, rtol, backend="gloo")


def sums() -> None:
    live_on_nodes((2, 1))
    algorithm = GradientAllReduce(hierarchical=True, average=False)
    net = torch.nn.Linear(601, 601, bias=False)
    model = DistributedDataParallel(net, algorithm=algorithm, share_memory=False)
    model(torch.full((1, 601), float(dist.get_rank()))).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((601, 601), 3.0))


def test_a_sum_is_not_scaled() -> None:
    run_ranks(sums, 3, backend="gloo")


def bytes_per_step(sizes: Sequence[int], algorithm: Algorithm) -> int:
    live_on_nodes(sizes)
    model = DistributedDataParallel(torch.nn.Linear(512, 512, bias=False), algorithm=algorithm)
    model(torch.ones(1, 512)).sum().backward()
    return model.stats().bytes_sent


def test_bytes_of_all_levels_are_counted() -> None:
    size = 512 * 512
    block_headers = size // 2048 * 8
    found = run_ranks(bytes_per_step, 4, (2, 2), ByteGrad())
    # fp32 to and from the other rank of the node, and half of the bucket in 8 bits to the other node.
    assert found == [4 * size + (size + block_headers) // 2] * 4
    # The leader of three gives the result to two; who owns nothing sends its gradients only.
    found = run_ranks(bytes_per_step, 4, (3, 1), ByteGrad(hierarchical=True))
    assert found == [8 * size + size + block_headers, 4 * size, 4 * size, size + block_headers]


def overflow_reaches_all_ranks() -> None:
    live_on_nodes((2, 1))
    net = torch.nn.Linear(100, 100, bias=False)
    model = DistributedDataParallel(net, algorithm=ByteGrad(hierarchical=True))
    for bad in (float("nan"), float("inf"), 1.0):
        model.zero_grad()
        x = torch.ones(1, 100)
        if dist.get_rank() == 1:
            x[0, 7] = bad
        model(x).sum().backward()
        assert torch.isfinite(model.module.weight.grad).all() == (bad == 1.0)


def test_nan_and_inf_of_a_rank_that_owns_nothing_are_seen_by_all() -> None:
    run_ranks(overflow_reaches_all_ranks, 3)


def train_until_a_peer_dies(sizes: Sequence[int], victim: int, width: int, algorithm: Algorithm) -> str:
    live_on_nodes(sizes)
    net = mlp(width=width)
    model = DistributedDataParallel(net, algorithm=algorithm, bucket_cap_mb=0.005, share_memory=False)
    x = torch.randn(2, width)
    for step in range(5):
        if step == 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model.zero_grad()
            loss(model(x)).backward()
        except CommunicationError as first:
            with pytest.raises(CommunicationError) as again:
                loss(model(x)).backward()
            assert str(again.value) == str(first)
            return str(first)
    raise AssertionError("the loss of a peer went unnoticed")


@pytest.mark.parametrize(
    ("sizes", "victim", "width"),
    # In the last two what a rank contributes comes in parts.
    [((2, 2), 2, 37), ((3, 1), 2, 37), ((3, 1), 3, 37), ((2, 2), 2, 1254), ((3, 1), 2, 1254)],
)
@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_survivors_of_a_killed_peer_get_an_error_that_names_it(
    sizes: tuple[int, ...], victim: int, width: int, backend: str
) -> None:
    outcomes = run_ranks_to_the_end(
        train_until_a_peer_dies,
        sum(sizes),
        sizes,
        victim,
        width,
        ByteGrad(hierarchical=True),
        timeout=timedelta(seconds=20),
        backend=backend,
    )
    assert outcomes[victim].died
    said = []
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error is None, outcome.traceback
            assert "bucket " in outcome.value, outcome.value
            said.append(outcome.value)
    # On Gloo only who waits for it knows; the others name who knew.
    assert any(f"rank {victim}" in each for each in said), said
    if backend == "baguanet":
        assert all(f"rank {victim}" in each for each in said), said


def engine_dies_in_flight() -> None:
    live_on_nodes((2, 1))
    model = DistributedDataParallel(mlp(), algorithm=ByteGrad(hierarchical=True), bucket_cap_mb=0.0001)
    x = torch.randn(2, 37)
    for _ in range(2):
        loss(model(x)).backward()
    if dist.get_rank() == 0:
        hidden = model.module[:4](x).detach()
        model._session.before_forward()
        model._session.after_forward(None)
        loss(model.module[4](hidden)).backward()
        del model
    dist.barrier()


def test_an_engine_can_be_dropped_while_it_waits_for_its_node() -> None:
    run_ranks(engine_dies_in_flight, 3)
