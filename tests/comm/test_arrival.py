"""Before results of an accelerator go into weights, where a World may be given up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from baguarun.comm import arrival
from baguarun.errors import CommunicationError


@pytest.mark.parametrize("reason", [None, "a worker was lost"])
@pytest.mark.parametrize("has_agent", [False, True])
def test_the_host_waits_and_asks_where_there_is_an_agent(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, has_agent: bool
) -> None:
    """The order of things only: what a stream does is a device's affair."""
    done: list[str] = []

    def ask() -> str | None:
        done.append("asked")
        return reason

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: done.append(f"waited on {device}"))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(arrival, "load_extension", lambda: SimpleNamespace(interruption=ask))
    monkeypatch.setattr(
        arrival, "read_worker_env", lambda: SimpleNamespace(control_fd=3 if has_agent else None)
    )
    arrival.require_arrived(torch.device("cpu"))
    assert done == []
    if has_agent and reason is not None:
        with pytest.raises(CommunicationError, match="the World is given up: a worker was lost"):
            arrival.require_arrived(torch.device("cuda", 1))
    else:
        arrival.require_arrived(torch.device("cuda", 1))
    assert done == (["waited on cuda:1", "asked"] if has_agent else [])
