"""The way from a command line to the store of a running job, from any machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from baguarun.elastic.membership.embedded import find_announced
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.errors import StoreLostError, UsageError
from baguarun.launcher.command_line import Given, nearest
from baguarun.launcher.rdzv_conf import etcd_url, parse_rdzv_conf
from baguarun.launcher.rendezvous import C10D_PORT, parse_endpoint
from baguarun.launcher.settings import RdzvBackend, read_store_options, want_word

if TYPE_CHECKING:
    from baguarun.elastic.membership.store import Store

T = TypeVar("T")

_OPEN_TIMEOUT_S = 10.0
"""As `baguarun run` has for an etcd that somebody runs."""
_SHOWN_JOBS = 10
_PRIVATE_TIMEOUT_S = 2.0
"""One on this machine answers at once, or has gone with its job."""


class StoreGoneError(StoreLostError):
    """A private store that was here a moment ago ended, with the job that it belonged to."""


def ask_about(job_id: str, line: Mapping[str, Given], question: Callable[[Store], Awaitable[T]]) -> T:
    """The answer to `question` from the store in which the job meets.

    `line` holds what the command line says of the store (`store`, `rdzv-endpoint`, ...); the environment
    comes second, and a job whose private etcd runs on this machine is found without either. Raises
    `UsageError` for a job that the store does not know, naming those that it knows.
    """
    want_word("JOB", job_id)
    url = named_store(*read_store_options(line), line)
    if url is not None:
        return asyncio.run(_ask(url, job_id, question))
    announced = find_announced()
    if job_id not in announced:
        raise UsageError(_not_here(job_id, list(announced)))
    try:
        return asyncio.run(_ask(announced[job_id], job_id, question, _PRIVATE_TIMEOUT_S))
    except StoreLostError as error:
        if job_id in find_announced():
            raise
        raise StoreGoneError(
            f"job {job_id!r}: its private store has gone, and so the job has ended"
        ) from error


def ask_everywhere(
    line: Mapping[str, Given], question: Callable[[Store], Awaitable[T]], say: Callable[[str], None]
) -> list[T]:
    """The answers of the store that is named, else of all private ones on this machine.

    One of those that is silent while others answer is told of with `say`, and left out.
    """
    url = named_store(*read_store_options(line), line)
    if url is not None:
        return [asyncio.run(_ask(url, None, question))]
    answers: list[T] = []
    silent: dict[str, StoreLostError] = {}
    for job_id, place in sorted(find_announced().items()):
        try:
            answers.append(asyncio.run(_ask(place, None, question, _PRIVATE_TIMEOUT_S)))
        except StoreLostError as error:
            # Else it went with its job meanwhile.
            if job_id in find_announced():
                silent[job_id] = error
    if not answers:
        for why in silent.values():
            raise why
        raise UsageError(f"found no job with a store of its own on this machine; {_WANT_STORE}")
    for job_id, why in silent.items():
        say(f"job {job_id!r}: {why}")
    return answers


def named_store(
    given: Mapping[str, Given], password: str | None, line: Mapping[str, Given]
) -> StoreUrl | None:
    """The store that options name: `given` is `line` over the environment's; None if they name none."""
    if "store" in line and "rdzv-endpoint" in line:
        raise UsageError(
            f"--store, --rdzv-endpoint={line['rdzv-endpoint'].text}: want one of them; leave out the other"
        )
    if "store" in given and "rdzv-endpoint" not in line:
        return StoreUrl.parse(given["store"].text, password=password)
    if "rdzv-endpoint" not in given:
        return None
    endpoint = given["rdzv-endpoint"]
    backend = given["rdzv-backend"].choice(RdzvBackend) if "rdzv-backend" in given else RdzvBackend.C10D
    if backend is RdzvBackend.STATIC:
        raise UsageError(f"{endpoint.source}={endpoint.text}: a static job has no store to ask")
    if backend in (RdzvBackend.ETCD, RdzvBackend.ETCD_V2):
        conf = parse_rdzv_conf(given["rdzv-conf"].text, for_etcd=True) if "rdzv-conf" in given else {}
        return StoreUrl.parse(etcd_url(endpoint.text, conf), password=password)
    host, port = parse_endpoint(endpoint.text, C10D_PORT, endpoint.source)
    return StoreUrl(endpoints=(HostPort(host, port),))


async def _ask(
    url: StoreUrl,
    job_id: str | None,
    question: Callable[[Store], Awaitable[T]],
    timeout_s: float = _OPEN_TIMEOUT_S,
) -> T:
    from baguarun.elastic.membership.etcd import EtcdStore
    from baguarun.elastic.membership.report import known_jobs

    store = await EtcdStore.open(url, timeout_s=timeout_s)
    try:
        if job_id is not None and await store.get(JobKeys(job_id).spec) is None:
            raise UsageError(_unknown(job_id, str(url), await known_jobs(store)))
        return await question(store)
    finally:
        await store.close()


_WANT_STORE = (
    "want --store URL (or BAGUARUN_STORE), or --rdzv-endpoint HOST, as the job was started with. "
    "A static job (--master-addr) has no store"
)


def _unknown(job_id: str, place: str, known: list[str]) -> str:
    return f"job {job_id!r}: {place} knows no such job{_those(job_id, known)}"


def _not_here(job_id: str, known: list[str]) -> str:
    hint = f", only others{_those(job_id, known)}" if known else ""
    return f"job {job_id!r}: found no store of it on this machine{hint}; {_WANT_STORE}"


def _those(job_id: str, known: list[str]) -> str:
    """` (it knows a, b); did you mean a?`"""
    if not known:
        return ""
    more = f" and {len(known) - _SHOWN_JOBS} more" if len(known) > _SHOWN_JOBS else ""
    return f" ({', '.join(known[-_SHOWN_JOBS:])}{more}){nearest(job_id, known)}"
