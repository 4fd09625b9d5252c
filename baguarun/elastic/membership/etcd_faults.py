"""What a failed call to etcd means for the caller: try again, log in again, or give up."""

from __future__ import annotations

import enum

import grpc

from baguarun.errors import BaguarunError, RejoinError, StoreLostError, StoreRefusedError


class StreamEndedError(Exception):
    """A stream is gone without a gRPC error of its own, or with one that another task met."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class Fault(enum.Enum):
    """Kinds of failure, by what may be done next."""

    NOT_APPLIED = "the call surely had no effect: any call may be repeated, elsewhere"
    UNKNOWN = "the reply is lost: only calls that may run twice may be repeated"
    TOKEN = "the login has run out: log in again, then repeat"
    LEASE_GONE = "the lease has expired"
    REFUSED = "the store says no, and will go on saying so"


_NOT_APPLIED = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "etcdserver: no leader",
    "etcdserver: too many requests",
    "etcdserver: not capable",
    "name resolution",
    "dns resolution",
)

_TOKEN = ("invalid auth token", "revision of auth store is old", "auth: revision in header is old")

_PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)

_REMEDIES = (
    (
        "permission denied",
        "ask the store's owner for `etcdctl role grant-permission ROLE --prefix=true readwrite ...`",
    ),
    ("user name is empty", "the store wants a login: write etcd://USER:PASSWORD@..."),
    ("authentication failed", "check user and password in the URL (or BAGUARUN_STORE_PASSWORD)"),
    (
        "authentication is not enabled",
        "take the user out of the URL, or run `etcdctl auth enable` on the store",
    ),
    ("database space exceeded", "compact and defragment the store, then `etcdctl alarm disarm`"),
    ("request is too large", "raise etcd's --max-request-bytes"),
    ("too many operations", "raise etcd's --max-txn-ops to at least 128"),
    ("corrupt", "restore the store from a backup"),
)

_NOT_ETCD = "check host and port: they belong to a server that is not etcd v3"


def classify(code: grpc.StatusCode, details: str) -> Fault:
    """What a gRPC status from etcd (or from gRPC itself) means; see etcd's api/v3rpc/rpctypes/error.go."""
    text = details.lower()
    if any(mark in text for mark in _TOKEN):
        return Fault.TOKEN
    if "requested lease not found" in text:
        return Fault.LEASE_GONE
    if any(mark in text for mark in _NOT_APPLIED):
        return Fault.NOT_APPLIED
    if "database space exceeded" in text or "corrupt" in text or is_not_etcd(code, text):
        return Fault.REFUSED
    return Fault.UNKNOWN if code in _PASSING else Fault.REFUSED


def is_not_etcd(code: grpc.StatusCode, details: str) -> bool:
    """Whether whoever answered speaks HTTP/2 but not etcd's API."""
    return code is grpc.StatusCode.UNIMPLEMENTED or "received http2 header with status" in details.lower()


def error_for(fault: Fault, where: str, what: str, code: grpc.StatusCode, details: str) -> BaguarunError:
    """The error to raise: `where` names store and endpoint, `what` the operation and its key."""
    if fault is Fault.LEASE_GONE:
        return RejoinError(f"{where}: {what}: the lease has expired; register again")
    if fault in (Fault.NOT_APPLIED, Fault.UNKNOWN):
        return StoreLostError(
            f"{where}: {what}: no answer ({_brief(code, details)}); the call may be tried again"
        )
    return StoreRefusedError(f"{where}: {what}: found {_brief(code, details)}; {_remedy(code, details)}")


def _remedy(code: grpc.StatusCode, details: str) -> str:
    if is_not_etcd(code, details):
        return _NOT_ETCD
    text = details.lower()
    return next((remedy for mark, remedy in _REMEDIES if mark in text), "see the log of the store")


def _brief(code: grpc.StatusCode, details: str) -> str:
    text = details.removeprefix("etcdserver: ").strip() or code.name.lower().replace("_", " ")
    return text if len(text) <= 200 else text[:197] + "..."
