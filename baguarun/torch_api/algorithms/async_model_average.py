"""Bagua's `async_model_average` module."""

from __future__ import annotations

from torch import nn

from baguarun.comm.algorithms import AsyncModelAverage
from baguarun.comm.algorithms.async_model_average import AsyncStepper
from baguarun.comm.ddp import DistributedDataParallel as Wrapper
from baguarun.comm.session import DataParallelSession
from baguarun.errors import UsageError

__all__ = ["AsyncModelAverageAlgorithm"]


class AsyncModelAverageAlgorithm(AsyncModelAverage):
    """Averages weights in the background.

    Unlike in Bagua, `abort` and `resume` are not needed around evaluation or at the end, and a rank is never
    more than `max_staleness_steps` steps ahead of the others. Both may be called twice in a row.
    """

    def __init__(
        self, peer_selection_mode: str = "all", sync_interval_ms: int = 500, warmup_steps: int = 0
    ) -> None:
        if peer_selection_mode != "all":
            raise UsageError(
                f"AsyncModelAverageAlgorithm: peer_selection_mode={peer_selection_mode!r}; want 'all'"
            )
        super().__init__(sync_interval_ms=sync_interval_ms, warmup_steps=warmup_steps)

    def abort(self, model: nn.Module) -> None:
        """Apply the average under way and start no other until `resume`; on all ranks after the same step.

        `model` is what `with_bagua` or `DistributedDataParallel` has returned; else raises `UsageError`.
        """
        if (stepper := _stepper(model)) is not None:
            stepper.pause()

    def resume(self, model: nn.Module) -> None:
        """After `abort`: average again from the next step on; on all ranks after the same step.

        `model` as for `abort`.
        """
        if (stepper := _stepper(model)) is not None:
            stepper.resume()


def _stepper(model: nn.Module) -> AsyncStepper | None:
    """None in a World of one."""
    session = model._session if isinstance(model, Wrapper) else vars(model).get("_baguarun_session")
    if not isinstance(session, DataParallelSession) or not isinstance(session.algorithm, AsyncModelAverage):
        raise UsageError(
            f"abort and resume: found {type(model).__name__}; want what with_bagua() or "
            "DistributedDataParallel has made asynchronous"
        )
    return session.stepper if isinstance(session.stepper, AsyncStepper) else None
