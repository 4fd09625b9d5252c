"""What a worker does before it is taken in: nothing of its state changes by it."""

from __future__ import annotations

import torch
from torch import nn

from baguarun.elastic.training.standby import Landing, prepare

CPU = torch.device("cpu")


def test_memory_is_given_once_and_only_for_its_own_dtype_and_shape() -> None:
    landing = Landing([torch.empty(2, 3), torch.empty(5, dtype=torch.bfloat16)])
    taken = [landing.take(torch.float32, (2, 3), CPU) for _ in range(5)]
    assert len({tensor.data_ptr() for tensor in taken}) == 5
    # What it had is written to already.
    assert sum(bool((tensor == 0).all()) for tensor in taken) >= 3
    for dtype, shape in ((torch.float64, (2, 3)), (torch.float32, (3, 2)), (torch.bfloat16, (5,))):
        found = landing.take(dtype, shape, CPU)
        assert (found.dtype, tuple(found.shape), found.device) == (dtype, shape, CPU)
    assert landing.take(torch.float32, (2, 3), torch.device("meta")).is_meta


def test_preparing_leaves_every_bit_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Conv2d(3, 8, 3))
    model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    model.register_buffer("same", torch.ones(1).expand(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    strides = {name: tensor.stride() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    prepare({"model": model, "epoch": 3}, [1, "argument"])
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
        assert tensor.stride() == strides[name]
        assert not tensor.requires_grad
