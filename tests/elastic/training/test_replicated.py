"""Which models can be resized in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import baguarun.torch_api  # noqa: F401  (gives modules with_bagua)
from baguarun.elastic.training import replicated
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks


def capture_a_model_of_bagua() -> None:
    model = nn.Linear(2, 2)
    replicated.require_replicas({"net": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], "gradient_allreduce")  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"^State: 'net' is data-parallel by with_bagua\(\)"):
        replicated.require_replicas({"net": model})


def test_a_model_of_with_bagua_is_refused_and_says_what_is_wanted() -> None:
    run_ranks(capture_a_model_of_bagua, 1)
