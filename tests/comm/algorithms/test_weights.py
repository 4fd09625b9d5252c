from __future__ import annotations

import pytest
import torch
from torch import nn

from baguarun.comm.weights import FlatWeights
from baguarun.errors import UsageError


def test_flat_weights_keep_values_strides_and_ties() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)).to(memory_format=torch.channels_last)
    net[1].weight = net[0].weight
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    strides = net[0].weight.stride()
    flat = FlatWeights(list(net.named_parameters()))
    assert net[1].weight is net[0].weight
    assert net[0].weight.stride() == strides
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name])
    (buffer,) = flat.buffers
    buffer.add_(1)
    assert torch.equal(net[0].weight, before["0.weight"] + 1)


def test_parameters_that_share_memory_as_two_objects_are_refused() -> None:
    first = nn.Parameter(torch.zeros(10))
    second = nn.Parameter(first.detach()[5:])
    with pytest.raises(UsageError, match="'a' and 'b' share memory"):
        FlatWeights([("a", first), ("b", second)])
    with pytest.raises(UsageError, match="'c' has strides"):
        FlatWeights([("c", nn.Parameter(torch.zeros(10)[::2]))])
