"""What `step_worker.py` and `elastic_worker.py` have written: who stepped when, in which World."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

STEP_WORKER = Path(__file__).with_name("step_worker.py")
ELASTIC_WORKER = Path(__file__).with_name("elastic_worker.py")


@dataclass(frozen=True)
class Step:
    """One finished step of one worker; `time` is Unix time in seconds."""

    time: float
    pid: int
    node: str
    rank: int
    world_size: int
    generation: int
    restart_count: int
    step: int
    epoch: int = 0
    samples: Sequence[int] = ()
    """What this worker trained on in the step."""
    loss: float = 0.0
    lost_samples: int = 0
    """Of which it was reported that their effect was lost with a worker."""
    missed_samples: int = 0
    """Those of them that are not dealt again."""
    weights: int = 0
    """A digest of weights and optimizer state."""


class StepLog:
    """The step lines of one job, read while they are written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[Step]:
        """Every complete line so far, in the order written."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return [Step(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]

    def since(self, moment: float) -> list[Step]:
        return [step for step in self.all() if step.time > moment]

    def wait_for(
        self,
        wanted: Callable[[Step], bool],
        timeout_s: float,
        *,
        since: float = 0.0,
        alive: Callable[[], bool] = lambda: True,
    ) -> Step | None:
        """The first step after `since` that is `wanted`; None after `timeout_s`, or once not `alive`."""
        deadline = time.monotonic() + timeout_s
        while True:
            going = alive() and time.monotonic() < deadline
            found = next((step for step in self.since(since) if wanted(step)), None)
            if found is not None or not going:
                return found
            time.sleep(0.02)
