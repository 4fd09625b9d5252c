"""Addresses and ports of this node. None is ever turned into a host name: clusters without DNS must work."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence

from baguarun.errors import UsageError
from baguarun.launcher.rendezvous import Embedded, EndpointStore, ExternalStore
from baguarun.launcher.settings import RunSettings

_LOOPBACK = "127.0.0.1"
_DOCUMENTATION_NETS = ("192.0.2.1", "2001:db8::1")
"""Addresses of nobody (RFC 5737, RFC 3849): routed like any far host, by the default route."""


def node_address(settings: RunSettings, rendezvous: Embedded | ExternalStore | EndpointStore) -> str:
    """The address at which the other nodes reach this one.

    `--local-addr` if given; else that of the interface which routes to the meeting place; for a job of one
    node loopback. Raises `UsageError` if nothing routes there.
    """
    if settings.local_addr is not None:
        return _checked_local_addr(settings.local_addr.strip("[]"))
    if isinstance(rendezvous, EndpointStore):
        places = [(rendezvous.host, rendezvous.port)]
    elif isinstance(rendezvous, ExternalStore):
        from baguarun.elastic.membership.store_url import StoreUrl

        url = StoreUrl.parse(rendezvous.url, password=settings.store_password)
        places = [(endpoint.host, endpoint.port) for endpoint in url.endpoints]
    else:
        return _LOOPBACK
    address = _routed_address(places)
    if settings.max_nodes > 1 and _is_loopback(address):
        # The store runs here (or its name is 127.0.1.1 in /etc/hosts): other nodes cannot use that address.
        return _outward_address() or address
    return address


def serving_address(host: str) -> str:
    """Where the node that serves the endpoint `host` listens: an address that the other nodes can reach.

    A name that is loopback in /etc/hosts alone (Debian's 127.0.1.1) becomes the outward address; `localhost`
    stays what it says.
    """
    bare = host.strip("[]")
    addresses = [address for _, address in _resolve("--rdzv-endpoint", bare)]
    mine = [address for address in addresses if address in local_addresses()]
    outward = [address for address in mine if not _is_loopback(address)]
    if outward:
        return outward[0]
    if _is_literally_loopback(bare):
        return mine[0] if mine else addresses[0]
    return _outward_address() or (mine or addresses)[0]


def is_local_host(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine; looks names up, which may take a while.

    Raises `UsageError` for a name that nothing resolves.
    """
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    addresses = {address.partition("%")[0] for _, address in _resolve("--rdzv-endpoint", bare)}
    return any(map(_is_loopback, addresses)) or not addresses.isdisjoint(local_addresses())


def local_addresses() -> set[str]:
    """All IPv4 and IPv6 addresses of this machine's interfaces, without zones."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        _plain(entry.address)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families
    }


def free_port(address: str = "") -> int:
    """A TCP port that nobody listens on at this moment, on `address` or on all interfaces."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Whether nobody on this machine listens on `port` of `host` or of its serving address at this moment."""
    addresses = {address for _, address in _resolve("--rdzv-endpoint", host.strip("[]"))}
    return not any(_is_taken(address, port) for address in {*addresses, serving_address(host)})


def join_host_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _routed_address(places: Sequence[tuple[str, int]]) -> str:
    """This machine's address on the way to the first of `places` that anything routes to."""
    reasons = []
    for host, port in places:
        for family, address in _resolve("", host):
            found = _source_address(family, address)
            if isinstance(found, str):
                return found
            reasons.append(f"{join_host_port(address, port)}: {found.strerror}")
    raise UsageError(
        f"found no interface that leads to the meeting place ({'; '.join(reasons)}); "
        "check the network, or give this node's address with --local-addr"
    )


def _outward_address() -> str | None:
    """This machine's address on its default route, else any that is not loopback, else None."""
    for far in _DOCUMENTATION_NETS:
        found = _source_address(_family(far), far)
        if isinstance(found, str) and not _is_loopback(found):
            return found
    parsed = [ipaddress.ip_address(address) for address in local_addresses()]
    usable = [address for address in parsed if not address.is_loopback and not address.is_link_local]
    return str(min(usable, key=lambda address: (address.version, int(address)))) if usable else None


def _source_address(family: int, far: str) -> str | OSError:
    # A connected UDP socket has the address of the interface that routes there; no packet is sent.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))
        except OSError as error:
            return error
        return _plain(str(probe.getsockname()[0]), keep_zone=True)


def _is_taken(address: str, port: int) -> bool:
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        # As servers do: a connection that still lingers from an earlier run is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            # Any other trouble (no such address, a privileged port) is for the server itself to report.
            return error.errno == errno.EADDRINUSE
        return False


def _resolve(flag: str, host: str) -> list[tuple[int, str]]:
    """The addresses of a name, in the resolver's order, each with its family."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError) as error:
        where = f"{flag}={host}" if flag else host
        raise UsageError(
            f"{where}: cannot resolve this name ({error}); want a name that every node knows, or an address"
        ) from error
    return [(int(family), _plain(str(target[0]), keep_zone=True)) for family, _, _, _, target in found]


def _checked_local_addr(address: str) -> str:
    """As given: a name stays a name, for the other nodes to resolve, but it must be one."""
    _resolve("--local-addr", address)
    return address


def _plain(address: str, *, keep_zone: bool = False) -> str:
    """One spelling per address, IPv4 in IPv6 unwrapped."""
    bare, percent, zone = address.partition("%")
    parsed = ipaddress.ip_address(bare)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed) + (percent + zone if keep_zone else "")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_literally_loopback(host: str) -> bool:
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
