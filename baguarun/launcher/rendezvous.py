"""Where the nodes of a job meet: chosen from the settings alone, conflicts refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from baguarun.errors import UsageError
from baguarun.launcher.rdzv_conf import etcd_url, is_host
from baguarun.launcher.settings import NO_JOB_ID, RdzvBackend, RunSettings

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


Rendezvous: TypeAlias = Embedded | ExternalStore | EndpointStore | Static

_THREE_WAYS = """\
--nnodes={nnodes}: want to know where the nodes meet. Run the same command on every node with one of
  --store etcd://HOST:2379 --job-id NAME             an etcd that you run
  --rdzv-backend c10d --rdzv-endpoint HOST:29400     one of the nodes, as with torchrun
  --master-addr HOST --node-rank N                   a fixed number of nodes, no elasticity"""


def choose_rendezvous(settings: RunSettings) -> Rendezvous:
    """The one meeting place that the settings name; `UsageError` when they name none or two that differ."""
    _refuse_conflicts(settings)
    if settings.standalone:
        return Embedded()
    if settings.store is not None:
        return _external(settings, settings.store)
    if settings.rdzv_endpoint is not None and settings.rdzv_backend is not RdzvBackend.STATIC:
        return _at_endpoint(settings, settings.rdzv_endpoint)
    if settings.rdzv_backend in (RdzvBackend.ETCD, RdzvBackend.ETCD_V2):
        raise UsageError(
            f"--rdzv-backend={settings.rdzv_backend.value}: want --rdzv-endpoint HOST:2379 with it, or --store URL"
        )
    if settings.rdzv_endpoint is not None or settings.master_addr is not None or settings.master_port:
        return _static(settings)
    if settings.max_nodes > 1:
        raise UsageError(_THREE_WAYS.format(nnodes=_nnodes(settings)))
    return Embedded()


def parse_endpoint(text: str, default_port: int, flag: str = "--rdzv-endpoint") -> tuple[str, int]:
    """`host`, `host:port` or `[ipv6]:port` as (host without brackets, port)."""
    wrong = UsageError(f"{flag}={text}: want HOST or HOST:PORT, an IPv6 address in brackets: [::1]:29400")
    host, port_text = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or rest == ":":
            raise wrong
        port_text = rest[1:]
    elif ":" in text:
        host, _, port_text = text.partition(":")
        if not port_text:
            raise wrong
    if not host or any(c in host for c in "/, @") or not (port_text.isascii() and port_text.isdigit() or not port_text):
        raise wrong
    port = int(port_text) if port_text else default_port
    if port > 65535:
        raise wrong
    return host, port


def is_loopback_name(host: str) -> bool:
    """Whether the words alone say this very machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _refuse_conflicts(settings: RunSettings) -> None:
    places = {
        f"--store={settings.store}": settings.store is not None,
        f"--rdzv-endpoint={settings.rdzv_endpoint}": settings.rdzv_endpoint is not None,
        f"--master-addr={settings.master_addr}": settings.master_addr is not None,
        f"--master-port={settings.master_port}": bool(settings.master_port),
    }
    named = [place for place, given in places.items() if given]
    if settings.standalone:
        if settings.max_nodes > 1:
            raise UsageError(f"--standalone, --nnodes={_nnodes(settings)}: want one node; leave out one of the two")
        remote = [place for place in named if not _says_this_machine(settings, place)]
        if remote:
            raise UsageError(f"--standalone, {', '.join(remote)}: want one of them; --standalone meets nobody")
        return
    if settings.store is not None and len(named) > 1:
        raise UsageError(
            f"{', '.join(named)}: want one meeting place; "
            "with a store, rank 0's address and port are chosen anew for each World"
        )
    if settings.store is not None and settings.rdzv_backend in (RdzvBackend.C10D, RdzvBackend.STATIC):
        raise UsageError(
            f"--store={settings.store}, --rdzv-backend={settings.rdzv_backend.value}: want one of them; "
            "--store is an etcd already"
        )
    if settings.rdzv_endpoint is not None and settings.master_addr is not None:
        endpoint_host = parse_endpoint(settings.rdzv_endpoint.split(",")[0], 0)[0]
        if endpoint_host != settings.master_addr.strip("[]"):
            raise UsageError(
                f"--rdzv-endpoint={settings.rdzv_endpoint}, --master-addr={settings.master_addr}: "
                "want one meeting place; leave out --master-addr"
            )


def _says_this_machine(settings: RunSettings, place: str) -> bool:
    if place.startswith("--rdzv-endpoint"):
        return is_loopback_name(parse_endpoint(settings.rdzv_endpoint or "", C10D_PORT)[0])
    if place.startswith("--master-addr"):
        return is_loopback_name((settings.master_addr or "").strip("[]"))
    return False


def _external(settings: RunSettings, url: str) -> ExternalStore:
    if settings.job_id == NO_JOB_ID:
        raise UsageError(
            f"{url}: want --job-id NAME, the same on every node: others may use this store too"
        )
    return ExternalStore(url)


def _at_endpoint(settings: RunSettings, endpoint: str) -> Rendezvous:
    if settings.rdzv_backend in (RdzvBackend.ETCD, RdzvBackend.ETCD_V2):
        for part in endpoint.split(","):
            parse_endpoint(part.strip(), 2379)
        return _external(settings, etcd_url(endpoint, settings.rdzv_conf))
    host, port = parse_endpoint(endpoint, C10D_PORT)
    if settings.max_nodes == 1 and is_loopback_name(host):
        return Embedded()
    if port == 0:
        raise UsageError(f"--rdzv-endpoint={endpoint}: want a fixed port, as {host}:{C10D_PORT}: other nodes must find it")
    return EndpointStore(host, port, is_host(settings.rdzv_conf))


def _static(settings: RunSettings) -> Rendezvous:
    if settings.is_elastic:
        raise UsageError(
            f"--nnodes={_nnodes(settings)}: want a fixed number of nodes with --master-addr; "
            "use --store or --rdzv-backend c10d for a job that grows and shrinks"
        )
    if settings.rdzv_backend is RdzvBackend.C10D:
        raise UsageError(
            f"--rdzv-backend=c10d: want --rdzv-endpoint {settings.master_addr or 'HOST'}:{C10D_PORT} "
            "instead of --master-addr and --master-port"
        )
    if settings.rdzv_endpoint is not None:
        host, port = parse_endpoint(settings.rdzv_endpoint, STATIC_PORT)
    else:
        host, port = parse_endpoint(
            _bracketed(settings.master_addr or "127.0.0.1"), settings.master_port or STATIC_PORT, "--master-addr"
        )
    if settings.max_nodes > 1 and settings.node_rank is None:
        raise UsageError(f"--master-addr={host}: want --node-rank N on each of the {settings.max_nodes} nodes, 0 on {host}")
    if settings.max_nodes > 1 and settings.max_restarts > 0:
        raise UsageError(
            f"--max-restarts={settings.max_restarts}: want 0 with --master-addr on several nodes, which have no store "
            "to agree on a restart; use --store or --rdzv-backend c10d"
        )
    return Static(host, port, settings.node_rank or 0)


def _bracketed(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def _nnodes(settings: RunSettings) -> str:
    return f"{settings.min_nodes}:{settings.max_nodes}" if settings.is_elastic else str(settings.max_nodes)
