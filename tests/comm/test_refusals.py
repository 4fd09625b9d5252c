"""What cannot be served is refused by name, on every rank, and never hangs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.algorithms import ByteGrad, GradientAllReduce, resolve
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.errors import UsageError
from tests.comm.models import loss, mlp
from tests.comm.ranks import run_ranks, run_ranks_to_the_end


def refuses_models() -> None:
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    with pytest.raises(UsageError, match=r"'0\.weight' has sparse gradients"):
        DistributedDataParallel(sparse)
    with pytest.raises(UsageError, match=r"'weight' is torch.complex64"):
        DistributedDataParallel(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(UsageError, match=r"'weight' is not initialised"):
        DistributedDataParallel(nn.LazyLinear(2))
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        DistributedDataParallel(nn.ReLU())
    with pytest.raises(UsageError, match="device_ids names cuda:0 but the module is on cpu"):
        DistributedDataParallel(mlp(), device_ids=[0])
    with pytest.raises(UsageError, match="bucket_cap_mb=0"):
        DistributedDataParallel(mlp(), bucket_cap_mb=0)
    with pytest.raises(UsageError, match=r"mixed_precision=1 is not there; want torch.autocast"):
        DistributedDataParallel(mlp(), mixed_precision=1)
    with pytest.raises(TypeError, match="no argument bucket_size"):
        DistributedDataParallel(mlp(), bucket_size=1)
    local = mlp()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(local, ["0.bias"])
    with pytest.raises(UsageError, match=r"to_ignore is \['0.bias'\]; parameters that stay local"):
        DistributedDataParallel(local)
    with pytest.warns(UserWarning, match="check_reduction=True has no effect"):
        DistributedDataParallel(mlp(), check_reduction=True)
    with pytest.warns(UserWarning, match="gradient_as_bucket_view=False"):
        model = DistributedDataParallel(mlp(), gradient_as_bucket_view=False)
    with pytest.raises(UsageError, match="not there yet"):
        model.join()
    with pytest.raises(UsageError, match="algorithm="):
        model.register_comm_hook(None, print)


def refuses_changes() -> None:
    halved = DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
    halved.module.bfloat16()
    with pytest.raises(UsageError, match=r"'0\.weight' .* was Float .*; it is BFloat16 .* now"):
        loss(halved(torch.randn(2, 37, dtype=torch.bfloat16))).backward()

    reshaped = DistributedDataParallel(nn.Linear(4, 4, bias=False))
    reshaped.module.weight.data = torch.randn(4, 6)
    with pytest.raises(UsageError, match=r"'weight' .* was Float \[4, 4\] .*; it is Float \[4, 6\] .* now"):
        reshaped(torch.randn(2, 6)).sum().backward()

    sparse = nn.Linear(4, 4, bias=False)
    model = DistributedDataParallel(sparse)
    model._session.before_forward()
    model._session.after_forward(None)
    with pytest.raises(UsageError, match=r"'weight' .*sparse gradient"):
        nn.functional.embedding(torch.tensor([1, 2]), sparse.weight, sparse=True).sum().backward()


def test_models_that_cannot_be_served_are_refused_by_name() -> None:
    run_ranks(refuses_models, 2)


def test_a_parameter_that_changes_under_the_engine_is_refused_by_name() -> None:
    run_ranks(refuses_changes, 2)


def build(kind: str) -> None:
    odd = dist.get_rank() == 1
    width = 7 if odd and kind == "shape" else 6
    layers: list[nn.Module] = [nn.Linear(5, 6), nn.Linear(6, width)]
    if odd and kind == "count":
        layers.append(nn.Linear(6, 1))
    net = nn.Sequential(*layers)
    if odd and kind == "dtype":
        net[1].double()
    if odd and kind == "frozen":
        net[1].bias.requires_grad_(False)
    DistributedDataParallel(
        net,
        algorithm=ByteGrad() if odd and kind == "algorithm" else GradientAllReduce(),
        bucket_cap_mb=3 if odd and kind == "settings" else None,
        find_unused_parameters=odd and kind == "unused",
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "shape",
            r"or buffer 2 is '1.weight' \[6, 6\] float32 on rank 0 and '1.weight' \[7, 6\] .*on rank 1",
        ),
        ("count", r"parameter or buffer 4 is missing \(there are 4\) on rank 0 and '2.weight' \[1, 6\]"),
        ("dtype", r"'1.weight' \[6, 6\] float32 on rank 0 and '1.weight' \[6, 6\] float64 on rank 1"),
        ("frozen", r"'1.bias' \[6\] float32 \(no gradient\) on rank 1"),
        ("algorithm", r"ranks differ in algorithm: rank 0 has GradientAllReduce.* rank 1 has ByteGrad"),
        ("settings", r"ranks differ in bucket_cap_mb: rank 0 has None, rank 1 has 3"),
        ("unused", r"ranks differ in find_unused_parameters: rank 0 has False, rank 1 has True"),
    ],
)
def test_ranks_that_build_different_models_all_get_the_same_error(kind: str, message: str) -> None:
    outcomes = run_ranks_to_the_end(build, 3, kind)
    errors = [outcome.error for outcome in outcomes]
    assert all(isinstance(error, UsageError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(UsageError, match=message):
        raise errors[0]  # type: ignore[misc]


def build_with_a_local_fault(kind: str) -> None:
    """Rank 1 asks for what cannot be, and would know it without the others."""
    odd = dist.get_rank() == 1
    net = nn.Sequential(nn.Embedding(5, 3, sparse=odd and kind == "sparse"), nn.Linear(3, 1))
    algorithm = {"qadam": "qadam", "weights": "local_sgd"}.get(kind, "bytegrad") if odd else "bytegrad"
    optimizers = [] if kind == "weights" else [torch.optim.Adam(net.parameters())]
    if odd and kind == "unknown":
        algorithm = "byte_grad"
    DistributedDataParallel(
        net,
        [0] if odd and kind == "device" else None,
        optimizers=optimizers,
        algorithm=algorithm,
        bucket_cap_mb=0 if odd and kind == "bucket" else None,
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("qadam", r"qadam: found optimizers=\[Adam\]; want .*QAdamOptimizer"),
        ("weights", r"local_sgd exchanges weights around optimizer steps; want optimizers=\[...\]"),
        ("sparse", r"parameter '0\.weight' has sparse gradients"),
        ("unknown", r".*'byte_grad' is unknown; want one of"),
        ("device", r"device_ids names cuda:0 but the module is on cpu"),
        ("bucket", r".*bucket_cap_mb=0"),
    ],
)
def test_what_one_rank_cannot_do_is_an_error_on_all_and_names_that_rank(kind: str, message: str) -> None:
    outcomes = run_ranks_to_the_end(build_with_a_local_fault, 3, kind)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, UsageError), (rank, outcome)
        assert re.match(message if rank == 1 else f"rank 1 cannot take part: {message}", str(outcome.error))


def build_with_a_fault_on_every_rank() -> None:
    net = mlp()
    DistributedDataParallel(net, optimizers=[torch.optim.Adam(net.parameters())], algorithm="qadam")


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_no_rank_can_do_is_each_ranks_own_error(world_size: int) -> None:
    for outcome in run_ranks_to_the_end(build_with_a_fault_on_every_rank, world_size):
        assert isinstance(outcome.error, UsageError)
        assert str(outcome.error).startswith("qadam: found optimizers=[Adam]")


def test_an_unknown_algorithm_is_refused_with_all_names_and_the_nearest() -> None:
    known = r"'byte_grad' is unknown; want one of .*bytegrad, .*gradient_allreduce.*'bytegrad'"
    with pytest.raises(UsageError, match=known):
        resolve("byte_grad")
    with pytest.raises(UsageError, match="wire='int4'; want one of fp32, fp16, bf16"):
        GradientAllReduce(wire="int4")


def test_the_script_beats_the_command_line_and_the_default_is_allreduce() -> None:
    assert resolve("bytegrad", "gradient_allreduce") == ByteGrad()
    assert resolve(None, "bytegrad") == ByteGrad()
    assert resolve(None) == GradientAllReduce()


def test_a_wrapper_without_a_process_group_says_what_to_call() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        DistributedDataParallel(mlp())
