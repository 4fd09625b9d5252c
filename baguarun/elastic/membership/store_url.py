"""Where the store is and how to be let in: `etcd://[user[:password]@]host:port[,host:port...][?cacert=...]`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from baguarun.errors import UsageError

DEFAULT_PORT = 2379
"""etcd's own client port, used where the URL names none."""

_SCHEMES = ("etcd", "etcds")
_FILES = ("cacert", "cert", "key")


@dataclass(frozen=True)
class HostPort:
    """One TCP address; IPv6 hosts are held without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int = DEFAULT_PORT) -> HostPort:
        """Read `host`, `host:port`, `[v6]` or `[v6]:port`; raises `UsageError` naming what is wrong."""
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket or (rest and not rest.startswith(":")):
                raise UsageError(f"address {text!r}: want [IPv6 address]:port")
            port = rest[1:]
        else:
            host, _, port = text.partition(":")
            if ":" in port:
                raise UsageError(
                    f"address {text!r}: want an IPv6 address in brackets, as in [::1]:{default_port}"
                )
        if not host:
            raise UsageError(f"address {text!r}: want host:port, found no host")
        if not port:
            return cls(host, default_port)
        if not (port.isascii() and port.isdigit() and 0 <= int(port) <= 65535):
            raise UsageError(f"address {text!r}: want a port of 0 to 65535, found {port!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class StoreUrl:
    """A store's endpoints, login and certificates; `str()` leaves the password out."""

    endpoints: tuple[HostPort, ...]
    """Members of one etcd cluster; any of them will do."""
    tls: bool = False
    """Speak TLS: scheme `etcds`, or any certificate given."""
    user: str | None = None
    """Name to log in with, or None for a store without login."""
    password: str | None = field(default=None, repr=False)
    """The user's password; never printed."""
    cacert: str | None = None
    """File with the authority that signed the server's certificate; None means the system's own roots."""
    cert: str | None = None
    """File with our client certificate (PEM)."""
    key: str | None = None
    """File with the client certificate's private key (PEM)."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise UsageError(f"store {self}: want cert= and key= together, found only one of them")
        for name in _FILES:
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise UsageError(
                    f"store {self}: {name}={path}: want a readable file; check the path and its mode"
                )
        if self.user is not None and self.password is None:
            raise UsageError(
                f"store {self}: found user {self.user} without a password; write "
                f"etcd://{self.user}:PASSWORD@... or set BAGUARUN_STORE_PASSWORD"
            )

    @classmethod
    def parse(cls, text: str, password: str | None = None) -> StoreUrl:
        """Read a URL; `password` (from the environment, say) is used where the URL names a user only.

        Raises `UsageError` with the offending part and the form that is wanted.
        """
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise UsageError(
                f"store {_redact(text)!r}: want etcd://host:port[,host:port...] or etcds://... for TLS"
            )
        authority, _, query = rest.partition("?")
        login, at, hosts = authority.rpartition("@")
        hosts = hosts.rstrip("/")
        if "/" in hosts:
            raise UsageError(
                f"store {_redact(text)!r}: want no path after the port; the job's keys are placed by us"
            )
        user, colon, secret = login.partition(":")
        if at and not user:
            raise UsageError(
                f"store {_redact(text)!r}: found no user before '@'; want user[:password]@host:port"
            )
        endpoints = tuple(HostPort.parse(host.strip()) for host in hosts.split(","))
        options = _options(text, query)
        return cls(
            endpoints=endpoints,
            tls=scheme == "etcds" or bool(options),
            user=unquote(user) if at else None,
            password=unquote(secret) if colon else (password if at else None),
            **options,
        )

    def __str__(self) -> str:
        login = f"{self.user}@" if self.user is not None else ""
        hosts = ",".join(str(endpoint) for endpoint in self.endpoints)
        return f"{'etcds' if self.tls else 'etcd'}://{login}{hosts}"


def _options(text: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _FILES:
            raise UsageError(f"store {_redact(text)!r}: unknown option {name!r}; want {', '.join(_FILES)}")
        if name in options or not value:
            raise UsageError(f"store {_redact(text)!r}: want {name}= once and with a file name")
        options[name] = value
    return options


def _redact(text: str) -> str:
    """The URL as typed, without what stands between the user's ':' and the '@'."""
    scheme, separator, rest = text.partition("://")
    login, at, tail = rest.rpartition("@")
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{tail}" if at else text
