"""What people ask of a running job from elsewhere: written where its leader sees it, while it runs."""

from __future__ import annotations

import asyncio
import contextlib

from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.records import Outcome, StopRequest, desired_to_json, spec_to_json
from baguarun.elastic.membership.report import JobReport, JobState, read_job
from baguarun.elastic.membership.store import Compare, Put, Store, TxnResult, WatchRange
from baguarun.elastic.membership.waiting import within
from baguarun.errors import RetryLaterError, UsageError

_PATIENCE_S = 15.0
"""An election, and a leader that is busy with another change of the World, are over by then."""
_PAUSE_S = 0.1
_LOOK_S = 0.3


async def scale_job(store: Store, job_id: str, num_nodes: int) -> JobReport:
    """Have the job run on `num_nodes` nodes from now on; returns what it was before, at once.

    Members above it leave, the youngest first; below it, nodes that come (or stand by) are taken in.
    Raises `UsageError` for a number outside the job's range and for a job that is over or not there.
    """
    keys = JobKeys(job_id)
    give_up_s = _now() + _PATIENCE_S
    while True:
        before = await _running(store, job_id)
        spec = before.summary.spec
        if not spec.min_nodes <= num_nodes <= spec.max_nodes:
            raise UsageError(_outside(spec, num_nodes))
        # The range was checked against this command: it must be the one that runs.
        same = Compare(keys.spec, value=spec_to_json(spec))
        if (await _ask(store, keys, Put(keys.desired, desired_to_json(num_nodes)), same)).succeeded:
            return before
        await _pause(give_up_s, job_id)


async def stop_job(store: Store, job_id: str, request: StopRequest) -> Outcome:
    """End the job on every node; returns its outcome, which is an earlier one if it is over already.

    Returns when every node has been told; they then end their workers. Raises `UsageError` for a job without
    nodes and `RetryLaterError` when its leader does not answer.
    """
    keys = JobKeys(job_id)
    give_up_s = _now() + _PATIENCE_S
    while True:
        entry = await store.get(keys.outcome)
        if entry is not None:
            return Outcome.from_json(entry.value)
        await _running(store, job_id)
        asked = await _ask(store, keys, Put(keys.stop, request.to_json()))
        if asked.succeeded:
            break
        await _pause(give_up_s, job_id)
    while True:
        # Watched, not polled: a private etcd goes with its job a few milliseconds later.
        with contextlib.suppress(asyncio.TimeoutError):
            return await within(_LOOK_S, _next_outcome(store, keys, asked.revision + 1))
        # A watch waits for a store that has gone; this says so.
        entry = await store.get(keys.outcome)
        if entry is not None:
            return Outcome.from_json(entry.value)
        await _pause(give_up_s, job_id)


async def _next_outcome(store: Store, keys: JobKeys, start_revision: int) -> Outcome:
    async for batch in store.watch([WatchRange(keys.outcome, deletes=False)], start_revision):
        for event in batch.events:
            return Outcome.from_json(event.entry.value)
    raise AssertionError("a watch does not end")


async def _ask(store: Store, keys: JobKeys, wish: Put, *compares: Compare) -> TxnResult:
    """Write it for the present run of the job, not for a later one under the same id."""
    alive = (Compare(keys.leader, exists=True), Compare(keys.outcome, exists=False))
    return await store.transact([*alive, *compares], [wish])


async def _running(store: Store, job_id: str) -> JobReport:
    found = await read_job(store, job_id)
    if found is None:
        raise UsageError(f"job {job_id!r}: the store knows no such job")
    summary = found.summary
    if summary.state.is_over:
        raise UsageError(f"job {job_id!r}: it has ended already ({summary.state.value})")
    if summary.state is JobState.ABANDONED:
        raise UsageError(f"job {job_id!r}: no node of it is here; want a job that runs")
    return found


async def _pause(give_up_s: float, job_id: str) -> None:
    if _now() >= give_up_s:
        raise _no_answer(job_id)
    await asyncio.sleep(_PAUSE_S)


def _no_answer(job_id: str) -> RetryLaterError:
    return RetryLaterError(
        f"job {job_id!r}: its leader has not answered for {_PATIENCE_S:g} s; try again when it has one "
        "(`baguarun status` shows it)"
    )


def _outside(spec: JobSpec, num_nodes: int) -> str:
    if spec.min_nodes == spec.max_nodes:
        return (
            f"scale {spec.job_id} {num_nodes}: want {spec.min_nodes}, the job was started with "
            f"--nnodes {spec.min_nodes}; one started with --nnodes MIN:MAX can be scaled"
        )
    return (
        f"scale {spec.job_id} {num_nodes}: want {spec.min_nodes} to {spec.max_nodes}, "
        f"the job was started with --nnodes {spec.min_nodes}:{spec.max_nodes}"
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
