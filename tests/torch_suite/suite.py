"""Many small behaviours in one World: processes are made once per backend, a group once per behaviour."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm.ranks import Outcome, leave_together, run_ranks

BACKENDS = ["gloo", "baguanet"]
TIMEOUT = timedelta(seconds=15)

Behaviour = Callable[[], None]


@dataclass
class Suite:
    """Behaviours for `world_size` ranks. Each is a module-level function that fails by an exception."""

    world_size: int
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    _outcomes: dict[str, dict[str, list[Outcome]]] = field(default_factory=dict)

    def behaviour(self, check: Behaviour) -> Behaviour:
        """Decorator."""
        self.behaviours[check.__name__] = check
        return check

    def each(self) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorator of the one test that runs `check`."""
        names = pytest.mark.parametrize("name", list(self.behaviours))
        backends = pytest.mark.parametrize("backend", BACKENDS)
        return lambda test: backends(names(test))

    def check(self, backend: str, name: str) -> None:
        """Fails if the behaviour failed on any rank; the first question about a backend runs all of them."""
        if backend not in self._outcomes:
            # Set first: what hangs once is not tried again for every behaviour.
            self._outcomes[backend] = {}
            self._outcomes[backend] = self._run(backend)
        if name not in self._outcomes[backend]:
            pytest.fail(f"the World on {backend} did not end: see the first test of it", pytrace=False)
        # Of all that failed: the others' time ran out because one was gone.
        failures = [
            f"rank {rank} on {backend}: {outcome.traceback}"
            for rank, outcome in enumerate(self._outcomes[backend][name])
            if outcome.error is not None
        ]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)

    def _run(self, backend: str) -> dict[str, list[Outcome]]:
        with tempfile.TemporaryDirectory() as folder:
            checks = list(self.behaviours.values())
            by_rank = run_ranks(_play, self.world_size, backend, folder, checks, backend=backend)
        return {name: [of[number] for of in by_rank] for number, name in enumerate(self.behaviours)}


def _play(backend: str, folder: str, checks: Sequence[Behaviour]) -> list[Outcome]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    outcomes = []
    for number, check in enumerate(checks):
        torch.manual_seed(99)
        store = dist.FileStore(str(Path(folder) / str(number)), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        try:
            check()
            outcomes.append(Outcome())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            outcomes.append(Outcome(error=AssertionError(said), traceback=traceback.format_exc()))
        if backend == "gloo":
            leave_together(store, rank, size)
        if dist.is_initialized():
            dist.destroy_process_group()
    return outcomes


def place() -> tuple[int, int]:
    """This process's rank and the size of the World."""
    return dist.get_rank(), dist.get_world_size()


def sum_of_ranks() -> int:
    return sum(range(dist.get_world_size()))


def ended(work: dist.Work | None) -> None:
    """Waits for an operation that was started."""
    assert work is not None
    work.wait()
