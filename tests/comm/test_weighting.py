"""Parts of an uneven step count what they should, whatever forward returns."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.weighting import MicroBatch
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks

WEIGHTS = [0.5, 2.0]


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Found:
    logits: torch.Tensor
    losses: list[torch.Tensor]
    name: str = "found"


class Output(OrderedDict[str, Any]):
    """Its items are attributes as well, and are set one by one only, as transformers has them."""

    def __init__(self, **items: Any) -> None:
        super().__init__()
        for key, value in items.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def update(self, *_items: Any, **_more: Any) -> None:
        raise TypeError("an output is not updated")

    def __reduce__(self) -> Any:
        return _output, (list(self.items()),)


def _output(items: list[tuple[str, Any]]) -> Output:
    return Output(**dict(items))


class Wide(nn.Module):
    """Returns its loss in some form, beside what it has been computed from."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.inner, self.outer = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(x)
        logits = self.outer(hidden)
        loss = logits.square().mean()
        if self.form == "tensor":
            return loss
        if self.form == "mapping":
            return {"loss": loss, "logits": logits, "hidden": (hidden, x), "again": loss}
        if self.form == "output":
            return Output(loss=loss, logits=logits)
        if self.form == "named":
            return Pair(loss, logits)
        if self.form == "dataclass":
            return Found(logits, [loss])
        return lambda: loss


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Output):
        assert output["loss"] is output.loss
        return output.loss
    if isinstance(output, dict):
        assert output["again"] is output["loss"]
        return output["again"]
    if isinstance(output, Found):
        assert output.name == "found"
        return output.losses[0]
    assert isinstance(output, Pair)
    return output.loss


def gradients(form: str, changes_in_place: bool = False) -> list[list[float]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Wide(form))
    torch.manual_seed(dist.get_rank())
    with model.micro_batch(MicroBatch(weight_of_step=WEIGHTS[dist.get_rank()])):
        loss = loss_of(model(torch.randn(5, 4)))
        if changes_in_place:
            loss.unsqueeze_(0)
            loss /= 2
            loss += 1
        else:
            loss = loss / 2 + 1
        loss.backward()
    return [
        parameter.grad.flatten().tolist() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("form", ["mapping", "output", "named", "dataclass"])
def test_a_gradient_is_weighed_once_whatever_comes_with_the_loss(form: str) -> None:
    for wanted, found in zip(run_ranks(gradients, 2, "tensor"), run_ranks(gradients, 2, form), strict=True):
        assert found == wanted


def test_what_forward_has_returned_may_be_changed_in_place() -> None:
    wanted, found = run_ranks(gradients, 2, "tensor"), run_ranks(gradients, 2, "tensor", True)
    assert found == wanted


def gradients_of_a_chain(weights: list[float]) -> list[list[float]]:
    """Of an encoder, which is called twice, and a decoder, wrapped one by one."""
    torch.manual_seed(0)
    encoder = DistributedDataParallel(nn.Linear(4, 4))
    decoder = DistributedDataParallel(nn.Linear(4, 2))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(5, 4)
    micro_batch = MicroBatch(weight_of_step=weights[dist.get_rank()])
    with encoder.micro_batch(micro_batch), decoder.micro_batch(micro_batch):
        decoder(encoder(encoder(x).relu())).square().mean().backward()
    found = [*encoder.parameters(), *decoder.parameters()]
    return [parameter.grad.flatten().tolist() for parameter in found if parameter.grad is not None]


def test_wrapped_models_behind_each_other_are_weighed_once_each() -> None:
    found = run_ranks(gradients_of_a_chain, 2, WEIGHTS)[0]
    alone = [run_ranks(gradients_of_a_chain, 2, only)[0] for only in ([1.0, 0.0], [0.0, 1.0])]
    for weighed, one, other in zip(found, *alone, strict=True):
        wanted = WEIGHTS[0] * torch.tensor(one) + WEIGHTS[1] * torch.tensor(other)
        torch.testing.assert_close(torch.tensor(weighed), wanted)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.book, self.book


def weigh_a_parameter_that_is_returned() -> list[list[float]]:
    model = DistributedDataParallel(Codebook())
    found = []
    for weight in (2.0, 1.0):
        model.zero_grad()
        with model.micro_batch(MicroBatch(weight_of_step=weight)):
            output, book = model(torch.ones(3))
            (output.sum() + 10 * book.sum()).backward()
        assert model.module.book.grad is not None
        found.append(model.module.book.grad.tolist())
    return found


def test_a_parameter_that_is_returned_is_weighed_in_that_step_only() -> None:
    assert run_ranks(weigh_a_parameter_that_is_returned, 2) == [[[22.0] * 3, [11.0] * 3]] * 2


def hide_the_loss() -> str:
    model = DistributedDataParallel(Wide("hidden"))
    with model.micro_batch(MicroBatch()):
        model(torch.ones(1, 4))
    with pytest.raises(UsageError) as caught, model.micro_batch(MicroBatch(weight_of_step=0.5)):
        model(torch.ones(1, 4))
    return str(caught.value)


def test_what_cannot_be_weighed_is_refused() -> None:
    for message in run_ranks(hide_the_loss, 2):
        assert message.startswith("forward returned a function without a tensor in it")
