"""Where the nodes of a job meet: chosen from the settings alone, conflicts refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from baguarun.errors import UsageError
from baguarun.launcher.command_line import Given
from baguarun.launcher.rdzv_conf import etcd_url, is_host
from baguarun.launcher.settings import NO_JOB_ID, ElasticMode, RdzvBackend, RunSettings, without_password

C10D_PORT = 29400
"""torchrun's default port of `--rdzv-endpoint`."""
STATIC_PORT = 29500
"""torchrun's default of `--master-port`."""


@dataclass(frozen=True)
class Embedded:
    """One node: a private etcd on loopback."""


@dataclass(frozen=True)
class ExternalStore:
    """An etcd that somebody else runs."""

    url: str


@dataclass(frozen=True)
class EndpointStore:
    """A private etcd on the node that has this address (torchrun's c10d line)."""

    host: str
    port: int
    is_host: bool | None = None
    """What the user said about this node serving it; None: compare addresses (`is_local_host`)."""


@dataclass(frozen=True)
class Static:
    """No store: the World follows from flags."""

    master_addr: str
    master_port: int
    node_rank: int


_ETCD_BACKENDS = (RdzvBackend.ETCD, RdzvBackend.ETCD_V2)

Rendezvous: TypeAlias = Embedded | ExternalStore | EndpointStore | Static

_THREE_WAYS = """\
--nnodes={nnodes}: want to know where the nodes meet. Run the same command on every node with one of
  --store etcd://HOST:2379 --job-id NAME             an etcd that you run
  --rdzv-backend c10d --rdzv-endpoint HOST:29400     one of the nodes, as with torchrun
  --master-addr HOST --node-rank N                   a fixed number of nodes, no elasticity"""


def choose_rendezvous(settings: RunSettings) -> Rendezvous:
    """The one meeting place that the settings name; `UsageError` when they name none or two that differ."""
    place = _choose(settings)
    if isinstance(place, Static) and settings.elastic is ElasticMode.IN_PLACE:
        raise UsageError(
            f"--elastic=in-place, --master-addr={place.master_addr}: want a place where nodes can agree "
            "on who is there: --store, --rdzv-backend c10d or, for one node, --standalone"
        )
    return place


def _choose(settings: RunSettings) -> Rendezvous:
    if settings.standalone:
        return _standalone(settings)
    if settings.store is not None:
        return _own_store(settings, settings.store)
    backend, endpoint = settings.rdzv_backend, settings.rdzv_endpoint
    if backend in _ETCD_BACKENDS:
        return _torchrun_etcd(settings)
    if endpoint is not None and backend is not RdzvBackend.STATIC:
        return _at_endpoint(settings, endpoint)
    if endpoint is not None or settings.master_addr is not None or settings.master_port is not None:
        return _static(settings)
    if settings.max_nodes > 1:
        raise UsageError(_THREE_WAYS.format(nnodes=_nnodes(settings)))
    return Embedded()


def no_effect_notices(settings: RunSettings, rendezvous: Rendezvous, given: Mapping[str, Given]) -> list[str]:
    """One line for each option that was given (by name) and changes nothing at this meeting place."""
    reasons: dict[str, str] = {}
    if isinstance(rendezvous, Static):
        reasons = dict.fromkeys(("detect-timeout", "join-timeout"), "a static job has no membership to watch")
        reasons["local-addr"] = "a static job tells no other node its address"
        if settings.rdzv_endpoint is not None:
            reasons |= dict.fromkeys(("master-addr", "master-port"), "--rdzv-endpoint says where rank 0 is")
    elif settings.rdzv_endpoint is not None or settings.max_nodes == 1:
        why = "rank 0's address and port are chosen anew for each World"
        reasons = dict.fromkeys(("master-addr", "master-port"), why)
    notices = [f"{given[name].source} has no effect: {why}" for name, why in reasons.items() if name in given]
    if "is_host" in settings.rdzv_conf and not isinstance(rendezvous, EndpointStore):
        notices.append("--rdzv-conf is_host has no effect: no node's address serves this meeting place")
    return notices


def parse_endpoint(text: str, default_port: int, flag: str = "--rdzv-endpoint") -> tuple[str, int]:
    """`host`, `host:port` or `[ipv6]:port` as (host without brackets, port)."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\s:/@,\[\]]+))(?::(\d{1,5}))?", text, re.ASCII)
    if match is None or int(match[3] or 0) > 65535:
        raise UsageError(f"{flag}={text}: want HOST or HOST:PORT, an IPv6 address in brackets: [::1]:29400")
    return match[1] or match[2], int(match[3]) if match[3] else default_port


def is_loopback_name(host: str) -> bool:
    """Whether the words alone say this very machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _standalone(settings: RunSettings) -> Embedded:
    others = {
        f"--nnodes={_nnodes(settings)}": settings.max_nodes > 1,
        f"--store={_shown(settings)}": settings.store is not None,
        f"--rdzv-backend={_backend(settings)}": settings.rdzv_backend not in (None, RdzvBackend.C10D),
        f"--rdzv-endpoint={settings.rdzv_endpoint}": _is_remote(settings.rdzv_endpoint),
        f"--master-addr={settings.master_addr}": _is_remote(settings.master_addr),
    }
    named = [other for other, given in others.items() if given]
    if named:
        raise UsageError(
            f"--standalone, {', '.join(named)}: want one node and no other; leave out one of them"
        )
    return Embedded()


def _own_store(settings: RunSettings, url: str) -> ExternalStore:
    others = {
        f"--rdzv-endpoint={settings.rdzv_endpoint}": settings.rdzv_endpoint is not None,
        f"--rdzv-backend={_backend(settings)}": settings.rdzv_backend
        in (RdzvBackend.C10D, RdzvBackend.STATIC),
        f"--master-addr={settings.master_addr}": settings.master_addr is not None,
        f"--master-port={settings.master_port}": settings.master_port is not None,
    }
    named = [other for other, given in others.items() if given]
    if named:
        raise UsageError(
            f"--store={_shown(settings)}, {', '.join(named)}: want --store alone; "
            "rank 0's address and port are chosen anew for each World"
        )
    return _external(settings, url)


def _torchrun_etcd(settings: RunSettings) -> ExternalStore:
    flag = f"--rdzv-backend={_backend(settings)}"
    if settings.rdzv_endpoint is None:
        raise UsageError(f"{flag}: want --rdzv-endpoint HOST:2379 with it; or use --store etcd://HOST:2379")
    if settings.master_addr is not None or settings.master_port is not None:
        raise UsageError(f"{flag}: want no --master-addr or --master-port with it; they are for static jobs")
    for part in settings.rdzv_endpoint.split(","):
        parse_endpoint(part.strip(), 2379)
    return _external(settings, etcd_url(settings.rdzv_endpoint, settings.rdzv_conf))


def _external(settings: RunSettings, url: str) -> ExternalStore:
    if settings.job_id == NO_JOB_ID:
        raise UsageError(
            f"{without_password(url)}: want --job-id NAME with it, the same on every node; "
            "other jobs may use this store too"
        )
    return ExternalStore(url)


def _at_endpoint(settings: RunSettings, endpoint: str) -> Embedded | EndpointStore:
    host, port = parse_endpoint(endpoint, C10D_PORT)
    if settings.master_addr is not None and settings.master_addr.strip("[]") != host:
        raise UsageError(
            f"--rdzv-endpoint={endpoint}, --master-addr={settings.master_addr}: want one meeting place; "
            "leave out --master-addr"
        )
    if settings.max_nodes == 1 and is_loopback_name(host):
        return Embedded()
    if port == 0:
        raise UsageError(
            f"--rdzv-endpoint={endpoint}: want a port that the other nodes know, as {host}:{C10D_PORT}"
        )
    return EndpointStore(host, port, is_host(settings.rdzv_conf))


def _static(settings: RunSettings) -> Embedded | Static:
    if settings.rdzv_endpoint is not None:
        host, port = parse_endpoint(settings.rdzv_endpoint, STATIC_PORT)
    else:
        host = parse_endpoint(_bracketed(settings.master_addr or "127.0.0.1"), 0, "--master-addr")[0]
        port = STATIC_PORT if settings.master_port is None else settings.master_port
    if settings.rdzv_backend is RdzvBackend.C10D:
        raise UsageError(
            f"--rdzv-backend=c10d, --master-addr={host}: want --rdzv-endpoint {_bracketed(host)}:{C10D_PORT} "
            "instead of --master-addr and --master-port"
        )
    if settings.max_nodes == 1:
        return Embedded() if port == 0 else Static(host, port, 0)
    _check_static_nodes(settings, host, port)
    return Static(host, port, settings.node_rank or 0)


def _check_static_nodes(settings: RunSettings, host: str, port: int) -> None:
    if settings.is_elastic:
        raise UsageError(
            f"--nnodes={_nnodes(settings)}: want a fixed number of nodes with --master-addr; "
            "use --store or --rdzv-backend c10d for a job that grows and shrinks"
        )
    if settings.master_addr is None and settings.rdzv_endpoint is None:
        raise UsageError(f"--master-port={port}: want --master-addr HOST with it, where node rank 0 runs")
    if port == 0:
        raise UsageError(f"--master-port=0: want a port that the other nodes know, as {STATIC_PORT}")
    if settings.node_rank is None:
        raise UsageError(
            f"--master-addr={host}: want --node-rank N with it, another on each of the "
            f"{settings.max_nodes} nodes, 0 on {host}"
        )
    if settings.max_restarts > 0:
        raise UsageError(
            f"--max-restarts={settings.max_restarts}: want 0 with --master-addr on several nodes: "
            "without a store they cannot agree on a restart; use --store or --rdzv-backend c10d"
        )


def _is_remote(endpoint: str | None) -> bool:
    return endpoint is not None and not is_loopback_name(parse_endpoint(_bracketed(endpoint), 0)[0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def _shown(settings: RunSettings) -> str:
    return without_password(settings.store or "")


def _backend(settings: RunSettings) -> str:
    return settings.rdzv_backend.value if settings.rdzv_backend else ""


def _nnodes(settings: RunSettings) -> str:
    return f"{settings.min_nodes}:{settings.max_nodes}" if settings.is_elastic else str(settings.max_nodes)
