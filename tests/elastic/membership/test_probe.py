"""Probes: what datagrams are believed, who watches whom, whose silence counts, who may replace a leader."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from baguarun.elastic.membership.probe import (
    DATAGRAM_BYTES,
    Kind,
    Peer,
    Silences,
    decode,
    encode,
    may_take_over,
    neighbours,
)
from baguarun.elastic.membership.prober import UdpProber

KEY, OTHER_KEY = "00" * 16, "ff" * 16


def test_a_datagram_says_what_was_put_in_to_those_with_the_key_only() -> None:
    data = encode(Kind.ANSWER, 2**64 - 1, KEY)
    assert len(data) == DATAGRAM_BYTES
    assert decode(data, KEY) == (Kind.ANSWER, 2**64 - 1)
    assert decode(data, OTHER_KEY) is None


@pytest.mark.parametrize("at", range(DATAGRAM_BYTES))
def test_a_datagram_with_a_changed_byte_says_nothing(at: int) -> None:
    data = bytearray(encode(Kind.QUESTION, 7, KEY))
    data[at] ^= 1
    assert decode(bytes(data), KEY) is None
    assert decode(bytes(data[:at]), KEY) is None


@pytest.mark.parametrize("size", range(1, 9))
def test_watching_is_mutual_and_nobody_is_watched_by_more_than_four(size: int) -> None:
    ring = [f"n{i}" for i in range(size)]
    watched = {node: set(neighbours(ring, node)) for node in ring}
    for node in ring:
        assert len(watched[node]) == min(4, size - 1)
        assert all(node in watched[other] for other in watched[node])


def test_time_in_which_nothing_could_be_heard_is_no_silence() -> None:
    silences = Silences(interval_s=0.1, now_s=0.0)
    silences.asked("a", 1, keep_s=1.0)
    silences.answered("a", 1)
    silences.tick(0.1)
    silences.tick(100.0)  # stopped, or starved
    assert silences.silence_s("a") == pytest.approx(0.3)


def test_an_answer_counts_once_and_not_for_ever() -> None:
    silences = Silences(interval_s=0.1, now_s=0.0)
    silences.asked("a", 1, keep_s=0.25)
    silences.answered("a", 1)
    for tick in range(1, 5):
        silences.tick(0.1 * tick)
        silences.asked("a", 1 + tick, keep_s=0.25)
    silences.answered("a", 1)
    silences.answered("a", 99)
    assert silences.silence_s("a") == pytest.approx(0.4)
    silences.answered("a", 2)
    assert silences.silence_s("a") == pytest.approx(0.4), "the question was too old"
    silences.answered("a", 4)
    assert silences.silence_s("a") == 0.0


def test_who_never_answered_is_not_silent() -> None:
    silences = Silences(interval_s=0.1, now_s=0.0)
    silences.asked("a", 1, keep_s=1.0)
    silences.tick(10.0)
    assert silences.silence_s("a") is None


@pytest.mark.parametrize(
    ("watchers", "complainers", "silent", "expected"),
    [
        ("m", "m", "", "m"),  # two nodes
        ("ma", "m", "", ""),  # the other one hears the leader
        ("ma", "ma", "", "ma"),
        ("ma", "m", "a", "m"),  # lost together with the leader
        ("mabc", "ma", "", ""),  # half is not more than half
        ("mabc", "mab", "", "mab"),
        ("mabc", "abc", "", ""),  # not for others
        ("abcd", "abcd", "", ""),  # not a neighbour of the leader
    ],
)
def test_a_leader_is_replaced_by_more_than_half_of_those_who_watch_it(
    watchers: str, complainers: str, silent: str, expected: str
) -> None:
    silence = {node: node in silent for node in watchers}
    assert "".join(may_take_over("m", watchers, complainers, silence)) == expected


# -- over UDP


@pytest.fixture
def probers() -> Iterator[tuple[UdpProber, UdpProber]]:
    pair = UdpProber("127.0.0.1", 0.02, 0.5), UdpProber("127.0.0.1", 0.02, 0.5)
    yield pair
    for prober in pair:
        prober.stop()


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < give_up, "it never came about"
        time.sleep(0.005)


def test_a_prober_hears_who_answers_and_no_longer_who_has_stopped(
    probers: tuple[UdpProber, UdpProber],
) -> None:
    asking, asked = probers
    asking.watch("test", [Peer("b", "127.0.0.1", asked.port, asked.key)])
    _until(lambda: asking.silence_s("b") is not None)
    asked.stop()
    _until(lambda: (asking.silence_s("b") or 0.0) > 0.3)


def test_nobody_answers_or_is_believed_under_a_wrong_key(probers: tuple[UdpProber, UdpProber]) -> None:
    asking, asked = probers
    asking.watch("test", [Peer("b", "127.0.0.1", asked.port, OTHER_KEY)])
    _until(lambda: asking.awake_s() > 0.3)
    assert asking.silence_s("b") is None


def test_noise_does_not_end_a_prober(probers: tuple[UdpProber, UdpProber]) -> None:
    asking, asked = probers
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for noise in (b"", b"x", b"y" * DATAGRAM_BYTES, b"z" * 1000, encode(Kind.ANSWER, 1, asked.key)):
            stranger.sendto(noise, ("127.0.0.1", asked.port))
    asking.watch("test", [Peer("b", "127.0.0.1", asked.port, asked.key)])
    _until(lambda: asking.silence_s("b") is not None)
