"""One node's membership in a job."""

from __future__ import annotations

from collections.abc import AsyncIterator

from baguarun.contract import Failure
from baguarun.elastic.membership.events import MembershipEvent
from baguarun.elastic.membership.job import JobSpec, NodeOffer
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.store import Store


class Session:
    """One node's membership. Threads: one asyncio loop, the store's."""

    def __init__(self, store: Store, spec: JobSpec, offer: NodeOffer, settings: MembershipSettings) -> None:
        raise NotImplementedError

    async def run(self) -> None:
        """Join, keep the lease, lead when it is our turn; returns after the outcome or `leave`.

        Raises `UsageError` (another job runs under this id, node id taken) and `StoreRefusedError`.
        """
        raise NotImplementedError

    @property
    def events(self) -> AsyncIterator[MembershipEvent]:
        """What to do next, in order; ends when `run` returns or raises. For one reader."""
        raise NotImplementedError

    async def acknowledge(self, generation: int, master_port: int | None) -> None:
        """Workers of older generations are gone; `master_port` is a free port here, used if we are node 0."""
        raise NotImplementedError

    async def report_failure(self, failure: Failure, *, retry_free: bool = False) -> None:
        """A worker failed. `retry_free`: nobody's fault ("address in use"), try again without a charge."""
        raise NotImplementedError

    async def report_done(self, generation: int) -> None:
        """All local workers of that generation exited 0."""
        raise NotImplementedError

    async def leave(self, reason: str) -> None:
        """Go politely: the others re-form at once; `run` returns."""
        raise NotImplementedError

    async def stop_job(self, reason: str, exit_code: int) -> None:
        """End the job on every node; `Finished` follows."""
        raise NotImplementedError

    async def wait_until_alone(self, timeout_s: float) -> bool:
        """Wait, after `run` has returned, until no other node is registered; False if some still are."""
        raise NotImplementedError
