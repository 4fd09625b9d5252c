"""Bagua's registry of algorithms and its wrapper with torch's names."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import baguarun.torch_api as bagua
from baguarun.comm.algorithms import ByteGrad, GradientAllReduce
from baguarun.errors import UsageError
from baguarun.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry
from baguarun.torch_api.data_parallel import DistributedDataParallel
from tests.comm.models import assert_averaged, assert_same_on_all_ranks, batch, gathered_gradients, loss, mlp
from tests.comm.ranks import run_ranks


def test_an_algorithm_is_made_from_its_name_and_bagua_s_arguments() -> None:
    found = Algorithm.init("bytegrad", average=False)
    assert found == bagua.algorithms.bytegrad.ByteGradAlgorithm(average=False)
    assert found != bagua.algorithms.bytegrad.ByteGradAlgorithm()
    assert isinstance(found, ByteGrad) and found.hierarchical is True and not found.average
    assert isinstance(bagua.algorithms.bytegrad.ByteGradAlgorithm(), Algorithm)
    assert not isinstance("bytegrad", Algorithm)
    assert str(GlobalAlgorithmRegistry).startswith("Registered Algorithms: gradient_allreduce, bytegrad")
    for name in GlobalAlgorithmRegistry.available_algorithms():
        assert GlobalAlgorithmRegistry[name]["description"]


@pytest.mark.parametrize(
    ("module", "kind", "arguments"),
    [
        ("gradient_allreduce", "GradientAllReduceAlgorithm", {"hierarchical": False, "average": True}),
        ("bytegrad", "ByteGradAlgorithm", {"hierarchical": True, "average": True}),
        (
            "decentralized",
            "DecentralizedAlgorithm",
            {"hierarchical": True, "peer_selection_mode": "all", "communication_interval": 1},
        ),
        (
            "decentralized",
            "LowPrecisionDecentralizedAlgorithm",
            {"hierarchical": True, "communication_interval": 1},
        ),
        (
            "async_model_average",
            "AsyncModelAverageAlgorithm",
            {"peer_selection_mode": "all", "sync_interval_ms": 500, "warmup_steps": 0},
        ),
    ],
)
def test_algorithms_are_classes_with_baguas_arguments_and_defaults(
    module: str, kind: str, arguments: dict[str, object]
) -> None:
    """Scripts ask for `type(algorithm) in [...]`, and tell two of them apart by identity or not at all."""
    found = getattr(getattr(bagua.algorithms, module), kind)
    signature = inspect.signature(found).parameters
    assert {name: parameter.default for name, parameter in signature.items()} == arguments
    algorithm = found(*arguments.values())
    assert type(algorithm) in [found] and algorithm == found(**arguments) == found()
    assert hash(algorithm) == hash(found()) and repr(algorithm).startswith(f"{kind}(")
    assert copy.deepcopy(algorithm) == algorithm
    for name, value in arguments.items():
        if hasattr(algorithm, name):
            assert getattr(algorithm, name) == value


@pytest.mark.parametrize("error", [KeyError, UsageError])
def test_an_unknown_name_lists_the_known_ones_and_the_nearest(error: type[Exception]) -> None:
    with pytest.raises(
        error, match=r"^algorithm 'bytegrat' is unknown; want one of .*; did you mean 'bytegrad'"
    ):
        Algorithm.init("bytegrat")


@pytest.fixture
def registered() -> Iterator[str]:
    GlobalAlgorithmRegistry.register("of the test", lambda: GradientAllReduce(wire="bf16"))
    yield "of the test"
    del GlobalAlgorithmRegistry["of the test"]


def test_a_script_registers_algorithms_of_its_own(registered: str) -> None:
    assert Algorithm.init(registered) == GradientAllReduce(wire="bf16")
    assert registered in GlobalAlgorithmRegistry.available_algorithms()
    with pytest.raises(ValueError, match="the name is taken"):
        GlobalAlgorithmRegistry.register(registered, GradientAllReduce)
    with pytest.raises(TypeError, match="want a string"):
        GlobalAlgorithmRegistry.register(7, GradientAllReduce)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["Algorithm", "AlgorithmImpl"])
def test_bagua_s_base_classes_say_where_to_go(base: str) -> None:
    with pytest.raises(
        UsageError, match=r"^Mine: .*; want a subclass of baguarun\.comm\.algorithms\.Algorithm .docs/writing"
    ):
        type("Mine", (getattr(bagua.algorithms, base),), {})


def wraps_two_models() -> None:
    """As Bagua's own test of two models does, on the CPU."""
    algorithm = bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()
    plain = [mlp(), mlp(width=20)]
    models, optimizers = [], []
    for each in (mlp(), mlp(width=20)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
        models.append(DistributedDataParallel(each, optimizers=[optimizer], algorithm=algorithm))
        optimizers.append(optimizer)
    for model, reference_model, optimizer in zip(models, plain, optimizers, strict=True):
        assert model.bagua_optimizers == [optimizer] and model.bagua_algorithm is algorithm
        first, second = batch(reference_model), batch(reference_model)

        def both(local: nn.Module, first: torch.Tensor = first, second: torch.Tensor = second) -> None:
            loss(local(first)).backward()
            loss(local(second)).backward()

        reference = gathered_gradients(reference_model, both)
        with model.no_sync():
            loss(model(first)).backward()
        loss(model(second)).backward()
        assert_averaged(model.module, reference)
        optimizer.step()
        assert_same_on_all_ranks(list(model.parameters()))
        assert bagua.utils.flatten([p.data for p in model.parameters()]).norm() > 0


def takes_groups_and_buffers() -> None:
    group = bagua.new_group()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    wrapped = DistributedDataParallel(model, None, None, 0, False, group, 10, True)
    wrapped(torch.randn(4, 3)).sum().backward()
    assert_same_on_all_ranks([parameter.grad for parameter in model.parameters()])
    with pytest.warns(UserWarning, match="check_reduction"):
        DistributedDataParallel(mlp(), check_reduction=True)
    for kind in (UsageError, ValueError):
        with pytest.raises(kind, match=r"device_ids=\[0, 1\]: one process serves one device"):
            DistributedDataParallel(mlp(), device_ids=[0, 1])
        with pytest.raises(kind, match=r"names cuda:0 but the module is on cpu"):
            DistributedDataParallel(mlp(), device_ids=[0])
    model = mlp()
    model._bagua_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"_bagua_params_and_buffers_to_ignore is \['0\.weight'\]"):
        DistributedDataParallel(model)
    expert = mlp()
    next(expert.parameters()).expert = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"'0\.weight' is marked as an expert's"):
        expert.with_bagua([], "bytegrad")  # type: ignore[operator]


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_the_wrapper_trains_and_takes_bagua_s_arguments(backend: str) -> None:
    run_ranks(trains, 2, backend=backend)


def trains() -> None:
    wraps_two_models()
    takes_groups_and_buffers()
