from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from baguarun.comm.extension import load_extension
from baguarun.elastic.training.group_settings import GroupSettings, changed


def make_optimizer(**settings: Any) -> torch.optim.Optimizer:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = [{"params": one.parameters()}, {"params": other.parameters(), "lr": 0.5}]
    return torch.optim.Adam(groups, lr=1e-3, **settings)


def test_what_has_not_changed_is_not_read_again() -> None:
    settings = GroupSettings(make_optimizer())
    assert settings.read() is settings.read()


CHANGES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "value": lambda groups: groups[1].update(lr=0.25),
    "equal value": lambda groups: groups[1].update(lr=float("0.5")),
    "new name": lambda groups: groups[0].update(counter=1),
    "name gone": lambda groups: groups[0].pop("weight_decay"),
    "two values swapped": lambda groups: groups[0].update(
        maximize=groups[0]["foreach"], foreach=groups[0]["maximize"]
    ),
    "another dict": lambda groups: groups.__setitem__(0, dict(groups[0])),
    "one more group": lambda groups: groups.append({"params": [], "lr": 2.0}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_is_seen(change: Callable[[list[dict[str, Any]]], object]) -> None:
    optimizer = make_optimizer()
    settings = GroupSettings(optimizer)
    before = settings.read()
    kept = [dict(each) for each in before]
    change(optimizer.param_groups)
    now = settings.read()
    assert now is not before and before == kept
    expected = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert now == expected


def test_a_tensor_that_changes_in_its_place_is_seen_and_put_back_there() -> None:
    optimizer = make_optimizer(capturable=False)
    rate = torch.tensor(1.0)
    optimizer.param_groups[0].update(lr=rate, estimate=rate)
    settings = GroupSettings(optimizer)
    before = settings.read()
    rate.fill_(3.0)
    now = settings.read()
    assert changed(before[0], now[0]) == {"estimate": 3.0}
    assert changed(before[1], now[1]) == {}
    settings.put_back(before)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 1.0


def test_an_object_at_the_place_of_one_that_is_gone_is_another_one() -> None:
    known = load_extension().KnownValues()
    held = {"key": [1]}
    assert not known.are([held])
    for number in range(100):
        # The list before this one would be free, and this one at its address, if nobody held it.
        held["key"] = [number]
        assert not known.are([held])
    assert known.are([held])
    known.forget()
    assert not known.are([held])


def test_nothing_is_never_known() -> None:
    known = load_extension().KnownValues()
    assert not known.are([]) and not known.are([])
