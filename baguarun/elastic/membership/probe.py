"""Who asks whom for signs of life, in what words, and how long each has been silent: no sockets or clocks.

A probe is one datagram of 29 bytes and its answer another: magic, question or answer, a number that the
prober makes up, and a tag of both under the asked node's key. Whoever does not know the key (it lies in the
store, with the node's record) gets no answer and is believed none.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

EACH_SIDE = 2
"""So many neighbours on each side: two nodes that are lost together leave nobody unwatched."""

_MAGIC = b"BGP1"
_BODY = struct.Struct("!4sBQ")
_TAG_BYTES = 16
DATAGRAM_BYTES = _BODY.size + _TAG_BYTES


class Kind(enum.IntEnum):
    QUESTION = 1
    ANSWER = 2


@dataclass(frozen=True)
class Peer:
    """A node that can be asked."""

    node_id: str
    address: str
    port: int
    key: str = field(repr=False)
    """What both sides know; hexadecimal."""


class Probing(Protocol):
    """Asks a few nodes again and again, beside the event loop. Threads: any."""

    @property
    def port(self) -> int:
        """Where this node answers."""
        ...

    @property
    def key(self) -> str:
        """What those know who may ask it."""
        ...

    def watch(self, why: str, peers: Iterable[Peer]) -> None:
        """Ask these from now on, for this reason; replaces those of the same reason."""
        ...

    def forget(self, node_id: str) -> None:
        """Take it for one that has never answered."""
        ...

    def silence_s(self, node_id: str) -> float | None:
        """Seconds since its last answer in which this node was awake; None if there never was one."""
        ...

    def awake_s(self) -> float:
        """Seconds for which this node has been awake: stands still while its machine, or it, does."""
        ...

    def stop(self) -> None: ...


def encode(kind: Kind, number: int, key: str) -> bytes:
    body = _BODY.pack(_MAGIC, kind, number)
    return body + _tag(body, key)


def decode(data: bytes, key: str) -> tuple[Kind, int] | None:
    """What was said under that key; None for everything else."""
    body = data[: _BODY.size]
    if len(data) != DATAGRAM_BYTES or not hmac.compare_digest(data[_BODY.size :], _tag(body, key)):
        return None
    magic, kind, number = _BODY.unpack(body)
    return (Kind(kind), number) if magic == _MAGIC and kind in (Kind.QUESTION, Kind.ANSWER) else None


def _tag(body: bytes, key: str) -> bytes:
    return hmac.digest(bytes.fromhex(key), body, hashlib.sha256)[:_TAG_BYTES]


def neighbours(ring: Sequence[str], node_id: str, each_side: int = EACH_SIDE) -> tuple[str, ...]:
    """The next nodes on both sides of one, nearest first. Who is my neighbour has me for one, too."""
    at = ring.index(node_id)
    steps = [step for distance in range(1, each_side + 1) for step in (distance, -distance)]
    found = dict.fromkeys(ring[(at + step) % len(ring)] for step in steps)
    found.pop(node_id, None)
    return tuple(found)


class Silences:
    """How long peers have been silent, by a clock that counts only time in which we could have heard them.

    `tick` is to be called every `interval_s`, after all that has come was given to `answered`; what it comes
    late does not count. A node that was stopped or starved thus does not suspect the others when it goes on.
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        self.awake_s = 0.0
        self._longest_s = 2 * interval_s
        self._now_s = now_s
        self._asked: dict[str, dict[int, float]] = {}
        self._heard: dict[str, float] = {}

    def tick(self, now_s: float) -> None:
        self.awake_s += min(max(now_s - self._now_s, 0.0), self._longest_s)
        self._now_s = now_s

    def asked(self, node_id: str, number: int, keep_s: float) -> None:
        """A question has gone out; answers to questions older than `keep_s` are no news."""
        open_ = self._asked.setdefault(node_id, {})
        open_[number] = self.awake_s
        for old in [n for n, since_s in open_.items() if since_s < self.awake_s - keep_s]:
            del open_[old]

    def answered(self, node_id: str, number: int) -> None:
        if self._asked.get(node_id, {}).pop(number, None) is not None:
            self._heard[node_id] = self.awake_s

    def forget(self, node_id: str) -> None:
        self._asked.pop(node_id, None)
        self._heard.pop(node_id, None)

    def silence_s(self, node_id: str) -> float | None:
        heard_s = self._heard.get(node_id)
        return None if heard_s is None else self.awake_s - heard_s


def may_take_over(
    me: str, watchers: Iterable[str], complainers: Iterable[str], silent: Mapping[str, bool]
) -> tuple[str, ...]:
    """Whose complaints let this node take the leadership from a silent leader; empty if it may not.

    They are more than half of the leader's `watchers`, this one among them; those that this node itself does
    not hear do not count, for they may be lost with the leader. A leader that is alive takes such complaints
    back before anybody may act on them, and a new leader is no new World: it has to find out first.
    """
    voters = [node_id for node_id in watchers if node_id == me or not silent.get(node_id, False)]
    agreeing = tuple(node_id for node_id in voters if node_id in set(complainers))
    return agreeing if me in agreeing and 2 * len(agreeing) > len(voters) else ()
