"""Probes over UDP, on a thread of their own: the event loop's hiccups delay neither questions nor answers."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, TypeAlias

from baguarun.elastic.membership.probe import DATAGRAM_BYTES, Kind, Peer, Silences, decode, encode

Sockaddr: TypeAlias = tuple[Any, ...]

log = logging.getLogger("baguarun.membership")

_NICENESS = -10
_BURST = 64
"""So many datagrams are read before the next look at the clock."""


class UdpProber:
    """Answers whoever knows this node's key, and asks those it watches. Threads: any, and one of its own."""

    def __init__(self, address: str, interval_s: float, keep_s: float) -> None:
        """`address`: this node's, of whose family the socket is; `keep_s`: how old an answer may be.

        Raises `OSError` where there is no socket to be had.
        """
        self.key = secrets.token_hex(16)
        self._interval_s = interval_s
        self._keep_s = keep_s
        family = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0][0]
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._watched: dict[str, dict[str, Peer]] = {}
        self._targets: dict[str, tuple[Peer, Sockaddr]] = {}
        self._numbers: dict[int, Peer] = {}
        self._silences = Silences(interval_s, time.monotonic())
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="prober", daemon=True)
        self._thread.start()

    def watch(self, why: str, peers: Iterable[Peer]) -> None:
        with self._lock:
            self._watched[why] = {peer.node_id: peer for peer in peers}
            wanted = {node_id: peer for group in self._watched.values() for node_id, peer in group.items()}
            for node_id in [n for n, (peer, _) in self._targets.items() if wanted.get(n) != peer]:
                del self._targets[node_id]
                self._silences.forget(node_id)
            for node_id in wanted.keys() - self._targets.keys():
                target = self._resolve(wanted[node_id])
                if target is not None:
                    self._targets[node_id] = (wanted[node_id], target)

    def forget(self, node_id: str) -> None:
        with self._lock:
            self._silences.forget(node_id)

    def silence_s(self, node_id: str) -> float | None:
        with self._lock:
            return self._silences.silence_s(node_id)

    def awake_s(self) -> float:
        with self._lock:
            return self._silences.awake_s

    def stop(self) -> None:
        self._stopping = True
        # The datagram wakes the thread; if it gets lost, the next tick does.
        with contextlib.suppress(OSError), socket.socket(self._socket.family, socket.SOCK_DGRAM) as bell:
            bell.sendto(b"", ("localhost", self.port))
        self._thread.join()
        self._socket.close()

    def _resolve(self, peer: Peer) -> Sockaddr | None:
        try:
            found = socket.getaddrinfo(peer.address, peer.port, self._socket.family, socket.SOCK_DGRAM)
        except OSError as error:
            log.warning("node %s at %s cannot be probed: %s", peer.node_id, peer.address, error)
            return None
        return found[0][4]

    def _loop(self) -> None:
        # Of this thread alone, where that is allowed: it needs little time, but soon.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        due_s = time.monotonic()
        while not self._stopping:
            self._listen(max(due_s - time.monotonic(), 0.0))
            now_s = time.monotonic()
            if now_s >= due_s:
                with self._lock:
                    self._silences.tick(now_s)
                    self._ask()
                due_s = now_s + self._interval_s

    def _listen(self, patience_s: float) -> None:
        """Take what comes: wait for the first datagram only."""
        for _ in range(_BURST):
            # 0 would make the socket non-blocking, which says the same in another way.
            self._socket.settimeout(max(patience_s, 1e-6))
            try:
                data, sender = self._socket.recvfrom(DATAGRAM_BYTES + 1)
            except TimeoutError:
                return
            except OSError:
                # An earlier datagram found nobody at home.
                continue
            if self._stopping:
                return
            self._take(data, sender)
            patience_s = 0.0

    def _take(self, data: bytes, sender: Sockaddr) -> None:
        question = decode(data, self.key)
        if question is not None and question[0] is Kind.QUESTION:
            with contextlib.suppress(OSError):
                self._socket.sendto(encode(Kind.ANSWER, question[1], self.key), sender)
            return
        with self._lock:
            # The number tells whose answer it claims to be, the tag whether it is.
            number = int.from_bytes(data[5:13], "big")
            peer = self._numbers.get(number)
            if peer is not None and decode(data, peer.key) == (Kind.ANSWER, number):
                self._silences.answered(peer.node_id, number)

    def _ask(self) -> None:
        for peer, target in self._targets.values():
            number = secrets.randbits(64)
            self._silences.asked(peer.node_id, number, self._keep_s)
            self._numbers[number] = peer
            # A network that is away now may be back for the next one.
            with contextlib.suppress(OSError):
                self._socket.sendto(encode(Kind.QUESTION, number, peer.key), target)
        while len(self._numbers) > 64 * max(len(self._targets), 1):
            del self._numbers[next(iter(self._numbers))]
