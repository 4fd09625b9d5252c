"""Messages between ranks: tags in any order, unexpected ones, from anybody, to oneself, among collectives.

All of it where answers come at once, and where they take so long that large messages go without asking.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.lab.lab import Lab
from tests.lab.namespaces import entered
from tests.net.communicator_peer import ANY, Member, members
from tests.net.shm_peer import Failed, pointer

# On one host, with a host each, and two and one.
LAYOUTS = [("a", "a"), ("a", "b"), ("a", "a", "b")]
layouts = pytest.mark.parametrize("hosts", LAYOUTS, ids="-".join)


@pytest.fixture(autouse=True, params=["near", pytest.param("far", marks=pytest.mark.root)])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """What ranks of different hosts are joined by."""
    if request.param == "near":
        yield request.param
        return
    with Lab(hosts=1, delay_ms=1) as lab:
        lab.delay_within_host(lab.hosts[0])
        with entered(lab.hosts[0].namespace):
            yield request.param


def letter(sender: int, tag: int, count: int) -> np.ndarray:
    return np.random.default_rng(1000 * sender + tag).integers(0, 255, count, dtype=np.uint8)


def exchange(member: Member, counts: Sequence[int]) -> None:
    """Everybody sends everybody, itself too, one message per tag; receives are posted in another order."""
    sent = [
        member.send(letter(member.rank, tag, count), peer, tag)
        for peer in range(member.size)
        for tag, count in enumerate(counts)
    ]
    received = {
        (peer, tag): member.recv(np.zeros(counts[tag], np.uint8), peer, tag)
        for tag in reversed(range(len(counts)))
        for peer in range(member.size)
    }
    member.wait(*sent, *received.values())
    for (peer, tag), message in received.items():
        assert np.array_equal(message.data, letter(peer, tag, counts[tag])), (peer, tag)
        assert message.source() == peer


@layouts
def test_messages_of_all_sizes_are_matched_by_tag_in_any_order(tmp_path: Path, hosts: Sequence[str]) -> None:
    with members(tmp_path, len(hosts), hosts) as group:
        counts = [0, 1, 65_535, 65_536, 65_537, 3_000_001, 7]
        assert group.run(exchange, counts) == [None] * len(hosts)


def send_one_tag(member: Member, counts: Sequence[int]) -> None:
    if member.rank == 0:
        member.wait(*[member.send(letter(0, tag, count), 1, 5) for tag, count in enumerate(counts)])
    elif member.rank == 1:
        received = [member.recv(np.zeros(count, np.uint8), 0, 5) for count in counts]
        member.wait(*received)
        for tag, message in enumerate(received):
            assert np.array_equal(message.data, letter(0, tag, counts[tag]))


@layouts
def test_messages_of_one_tag_keep_their_order(tmp_path: Path, hosts: Sequence[str]) -> None:
    with members(tmp_path, len(hosts), hosts) as group:
        counts = [100, 200_000, 1, 0, 70_000, 0, 65_536] * 4
        assert group.run(send_one_tag, counts) == [None] * len(hosts)


def send_to_waiting_receives(member: Member, count: int) -> None:
    """Large messages that are wanted before they are sent; the third receive is from anybody."""
    received = []
    if member.rank == 1:
        received = [member.recv(np.zeros(count, np.uint8), source, 5) for source in (0, 0, ANY, 0)]
    member.barrier()
    if member.rank == 0:
        member.wait(*[member.send(letter(0, tag, count), 1, 5) for tag in range(4)])
    member.wait(*received)
    for tag, message in enumerate(received):
        assert np.array_equal(message.data, letter(0, tag, count)), tag
        assert message.source() == 0


@layouts
@pytest.mark.parametrize("count", [1000, 500_000])
def test_receives_that_wait_get_messages_in_the_order_of_their_posting(
    tmp_path: Path, hosts: Sequence[str], count: int
) -> None:
    with members(tmp_path, len(hosts), hosts) as group:
        assert group.run(send_to_waiting_receives, count) == [None] * len(hosts)


def flood(member: Member, count: int, each: int) -> None:
    """Many unexpected messages before the one that is wanted."""
    if member.rank == 0:
        messages = [member.send(letter(0, tag, each), 1, tag) for tag in range(count)]
        messages.append(member.send(letter(0, count, each), 1, count))
        member.wait(*messages)
    elif member.rank == 1:
        for tag in reversed(range(count + 1)):
            message = member.recv(np.zeros(each, np.uint8), 0, tag)
            member.wait(message)
            assert np.array_equal(message.data, letter(0, tag, each))


@layouts
def test_more_unexpected_messages_than_are_kept_do_not_hold_up_the_wanted_one(
    tmp_path: Path, hosts: Sequence[str]
) -> None:
    with members(tmp_path, len(hosts), hosts) as group:
        assert group.run(flood, 60, 60_000) == [None] * len(hosts)


def drive(member: Member, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        member.progress()


def flush(member: Member) -> None:
    while member.library.baguaHasUnsent(member.handle):
        member.progress()


def want_late(member: Member, count: int, size: int, delays_s: Sequence[float]) -> None:
    """Half of the messages have a tag of their own, the others one for all; some sizes differ by a byte."""
    tags = [7 if number % 2 else 100 + number for number in range(count)]
    sizes = [size + number % 3 for number in range(count)]
    for delay_s in delays_s:
        if member.rank == 0:
            order = sorted(range(count), key=lambda number: number * 5 % count)
            posted = [member.send(letter(0, number, sizes[number]), 1, tags[number]) for number in order]
            member.wait(*posted)
        elif member.rank == 1:
            order = sorted(range(count), key=lambda number: number * 5 % count)
            received = []
            for number in order:
                message = member.recv(np.zeros(sizes[number], np.uint8), 0, tags[number])
                received.append((number, message))
                if delay_s and number % 4 == 0:
                    # What comes meanwhile is kept, and is wanted when a part of it has come.
                    drive(member, delay_s)
            member.wait(*[message for _, message in received])
            for number, message in received:
                assert np.array_equal(message.data, letter(0, number, sizes[number])), number
        member.barrier()


@layouts
@pytest.mark.parametrize(("count", "size"), [(24, 100_000), (12, 1_500_000), (3, 9_000_000)])
def test_large_messages_that_are_wanted_late_are_kept_or_wait(
    tmp_path: Path, hosts: Sequence[str], count: int, size: int
) -> None:
    with members(tmp_path, len(hosts), hosts) as group:
        delays_s = [0.0, 0.0003, 0.001, 0.003, 0.01]
        assert group.run(want_late, count, size, delays_s) == [None] * len(hosts)


def leave_when_sent(member: Member, count: int) -> bool:
    """Whether the send was still under way when the receiver had not asked for it."""
    if member.rank == 0:
        # How long the way is shows only once there is one.
        member.wait(member.send(letter(0, 9, 10), 1, 9))
        drive(member, 0.2)
        message = member.send(letter(0, 3, count), 1, 3)
        drive(member, 0.2)
        was_under_way = not message.is_done()
        member.wait(message)
        member.close()
        return was_under_way
    if member.rank == 1:
        member.wait(member.recv(np.zeros(10, np.uint8), 0, 9))
        drive(member, 2.0)
        message = member.recv(np.zeros(count, np.uint8), 0, 3)
        member.wait(message)
        assert np.array_equal(message.data, letter(0, 3, count))
        # The word that the message has got its room is this rank's first one to rank 0.
        flush(member)
    return True


@layouts
def test_who_leaves_after_a_large_send_is_not_missed(tmp_path: Path, hosts: Sequence[str]) -> None:
    with members(tmp_path, len(hosts), hosts) as group:
        assert all(group.run(leave_when_sent, 3_000_000))


def read_from_one_who_leaves(member: Member, are_acquainted: bool, reads_late: bool) -> None:
    """Rank 2 leaves when its messages are sent; rank 0 reads them, and goes on with rank 1."""
    count = 15
    if member.rank == 2:
        messages = [member.send(letter(2, tag, 60_000), 0, tag) for tag in range(count)]
        if are_acquainted:
            messages.append(member.recv(np.zeros(10, np.uint8), 0))
        member.wait(*messages)
        flush(member)
        # Rank 0 may want to say meanwhile that it has read them, and gets no answer.
        time.sleep(0 if reads_late else 0.5)
        member.close()
    elif member.rank == 0:
        if are_acquainted:
            member.wait(member.send(letter(0, 0, 10), 2))
        drive(member, 0.7 if reads_late else 0)
        for tag in range(count):
            message = member.recv(np.zeros(60_000, np.uint8), 2, tag)
            member.wait(message)
            assert np.array_equal(message.data, letter(2, tag, 60_000))
            drive(member, 0.02)
        drive(member, 0 if reads_late else 0.7)
    if member.rank < 2:
        exchanged = member.recv(np.zeros(10, np.uint8), 1 - member.rank)
        member.wait(member.send(letter(member.rank, 0, 10), 1 - member.rank), exchanged)
        assert not member.failure()


@pytest.mark.parametrize("reads_late", [True, False], ids=["read late", "read soon"])
@pytest.mark.parametrize("are_acquainted", [True, False], ids=["acquainted", "no link"])
def test_who_leaves_after_short_messages_needs_no_word_that_they_are_read(
    tmp_path: Path, are_acquainted: bool, reads_late: bool
) -> None:
    with members(tmp_path, 3, list("abc")) as group:
        assert group.run(read_from_one_who_leaves, are_acquainted, reads_late) == [None] * 3


def send_to_one_who_left(member: Member) -> str:
    """Rank 0 is not told that a message gets nowhere before it sends one."""
    if member.rank == 1:
        member.wait(member.send(letter(1, 0, 10), 0))
        flush(member)
        member.close()
    elif member.rank == 0:
        member.wait(member.recv(np.zeros(10, np.uint8), 1))
        drive(member, 0.3)
        try:
            member.wait(member.send(letter(0, 0, 10), 1))
        except Failed as failed:
            return failed.message
    return ""


def test_a_message_to_one_who_left_is_an_error(tmp_path: Path) -> None:
    with members(tmp_path, 2, list("ab")) as group:
        assert group.run(send_to_one_who_left)[0].startswith("rank 1 (")


def end_of_a_message_and_return_of_its_sender(member: Member, num_messages: int) -> float:
    """When rank 1, which wants them late, has the first message; when rank 0, which went away, is back."""
    messages = [letter(0, tag, 1_000_000) for tag in range(num_messages)]
    # How long the way is shows only once there is one.
    member.wait((member.recv if member.rank else member.send)(np.zeros(10, np.uint8), 1 - member.rank, 99))
    drive(member, 0.2)
    if member.rank == 0:
        sent = [member.send(data, 1, tag) for tag, data in enumerate(messages)]
        drive(member, 0.2)
        time.sleep(3.0)
        returned_at = time.monotonic()
        member.wait(*sent)
        return returned_at
    drive(member, 1.5)
    received = [member.recv(np.zeros_like(data), 0, tag) for tag, data in enumerate(messages)]
    member.wait(received[0])
    ended_at = time.monotonic()
    member.wait(*received)
    flush(member)
    for message, data in zip(received, messages, strict=True):
        assert np.array_equal(message.data, data)
    return ended_at


@pytest.mark.parametrize("num_messages", [2, 12])
def test_what_may_be_kept_sets_out_unasked_where_answers_take_long(
    tmp_path: Path, way: str, num_messages: int
) -> None:
    with members(tmp_path, 2, ["a", "b"]) as group:
        returned_at, ended_at = group.run(end_of_a_message_and_return_of_its_sender, num_messages)
    # Of twelve no more than goes by until there is an answer, by a rate that nobody has seen yet.
    assert (ended_at < returned_at) == (way == "far" and num_messages == 2)


def overtake(member: Member, count: int) -> None:
    """The second receive comes behind one from anybody, the third when rank 2 has got that."""
    if member.rank == 1:
        first = member.recv(np.zeros(count, np.uint8), ANY, 4)
        received = [member.recv(np.zeros(count, np.uint8), 0, 4)]
        member.wait(first)
        assert first.source() == 2
        received.append(member.recv(np.zeros(count, np.uint8), 0, 4))
        drive(member, 0.1)
    elif member.rank == 2:
        member.wait(member.send(letter(2, 0, count), 1, 4))
    member.barrier()
    if member.rank == 0:
        member.wait(*[member.send(letter(0, number, count), 1, 4) for number in range(2)])
    elif member.rank == 1:
        member.wait(*received)
        for number, message in enumerate(received):
            assert np.array_equal(message.data, letter(0, number, count)), number


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_receives_get_their_messages_in_order_when_one_from_anybody_was_before_them(
    tmp_path: Path, hosts: str
) -> None:
    with members(tmp_path, 3, list(hosts)) as group:
        assert group.run(overtake, 300_000) == [None] * 3


def receive_from_anybody(member: Member, count: int) -> list[int]:
    if member.rank > 0:
        member.wait(*[member.send(letter(member.rank, 3, count), 0, 3) for _ in range(2)])
        return []
    sources = []
    for _ in range(2 * (member.size - 1)):
        message = member.recv(np.zeros(count, np.uint8), ANY, 3)
        member.wait(message)
        assert np.array_equal(message.data, letter(message.source(), 3, count))
        sources.append(message.source())
    return sorted(sources)


@pytest.mark.parametrize("count", [10, 100_000])
@pytest.mark.parametrize("hosts", ["aaa", "abc", "aab"])
def test_a_receive_from_anybody_says_who_it_came_from(tmp_path: Path, hosts: str, count: int) -> None:
    with members(tmp_path, 3, list(hosts)) as group:
        assert group.run(receive_from_anybody, count)[0] == [1, 1, 2, 2]


def send_and_reduce(member: Member, count: int) -> None:
    """The send is complete only once the other side has left its collective, which needs this rank's."""
    peer = 1 - member.rank
    if member.rank > 1:
        member.all_reduce(np.ones(10, np.float32))
        return
    if member.rank == 0:
        message = member.send(letter(0, 0, count), peer)
        member.all_reduce(np.ones(10, np.float32))
        member.wait(message)
    else:
        message = member.recv(np.zeros(count, np.uint8), peer)
        time.sleep(0.2)
        member.all_reduce(np.ones(10, np.float32))
        member.wait(message)
        assert np.array_equal(message.data, letter(0, 0, count))


@layouts
@pytest.mark.parametrize("count", [10, 5_000_000])
def test_messages_move_while_a_rank_is_in_a_collective(
    tmp_path: Path, hosts: Sequence[str], count: int
) -> None:
    with members(tmp_path, len(hosts), hosts) as group:
        assert group.run(send_and_reduce, count) == [None] * len(hosts)


def collective_after_the_message(member: Member, count: int) -> None:
    """Rank 0 waits for its message before the collective that rank 1 already waits in."""
    if member.rank == 0:
        time.sleep(0.2)
        member.wait(member.send(letter(0, 0, count), 1))
    elif member.rank == 1:
        message = member.recv(np.zeros(count, np.uint8), 0)
    member.call("Barrier")
    if member.rank == 1:
        member.wait(message)
        assert np.array_equal(message.data, letter(0, 0, count))


@layouts
def test_a_collective_moves_the_messages_that_others_wait_for(tmp_path: Path, hosts: Sequence[str]) -> None:
    with members(tmp_path, len(hosts), hosts) as group:
        assert group.run(collective_after_the_message, 3_000_000) == [None] * len(hosts)


def collective_after_many_messages(member: Member, count: int) -> None:
    """Rank 0 sends each when the one before is gone; rank 1 wants them after the collective."""
    if member.rank == 0:
        for tag in range(count):
            member.wait(member.send(letter(0, tag, 100), 1, tag))
    member.barrier()
    if member.rank == 1:
        for tag in range(count):
            message = member.recv(np.zeros(100, np.uint8), 0, tag)
            member.wait(message)
            assert np.array_equal(message.data, letter(0, tag, 100))


@layouts
def test_a_collective_takes_in_messages_that_nobody_wants_yet(tmp_path: Path, hosts: Sequence[str]) -> None:
    with members(tmp_path, len(hosts), hosts, deadline_s=10) as group:
        assert group.run(collective_after_many_messages, 40) == [None] * len(hosts)


def send_two_sizes(member: Member, sent: int, wanted: int) -> str:
    try:
        if member.rank == 0:
            message = member.send(np.zeros(sent, np.uint8), 1, 9)
        else:
            message = member.recv(np.zeros(wanted, np.uint8), 0, 9)
        member.wait(message)
        member.barrier()
        return "nothing"
    except Failed as failed:
        return f"{failed.fault}: {failed.message}"


@pytest.mark.parametrize(("sent", "wanted"), [(10, 11), (100_000, 0)])
@pytest.mark.parametrize("hosts", LAYOUTS[:2], ids="-".join)
def test_a_message_of_another_size_is_an_error_on_both_sides(
    tmp_path: Path, hosts: Sequence[str], sent: int, wanted: int
) -> None:
    with members(tmp_path, 2, hosts) as group:
        for outcome in group.run(send_two_sizes, sent, wanted):
            assert outcome.startswith("usage: rank 0 ("), outcome
            assert f"sent a message of {sent} bytes with tag 9 to rank 1" in outcome
            assert f"which wants {wanted}" in outcome


def post_from_threads(member: Member, count: int) -> None:
    """Other threads post while this one drives, sleeping between."""
    messages = []
    lock = threading.Lock()

    def post(tag: int) -> None:
        time.sleep(0.01 * tag)
        peer = 1 - member.rank
        posted = [member.send(letter(member.rank, tag, count), peer, tag)]
        posted.append(member.recv(np.zeros(count, np.uint8), peer, tag))
        with lock:
            messages.extend(posted)
        member.library.baguaWake(member.handle)

    threads = [threading.Thread(target=post, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    while len(messages) < 8 or not all(message.is_done() for message in messages):
        if not member.progress():
            member.sleep(30)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("hosts", LAYOUTS[:2], ids="-".join)
def test_other_threads_may_post_and_wake_the_one_that_sleeps(tmp_path: Path, hosts: Sequence[str]) -> None:
    with members(tmp_path, 2, hosts) as group:
        assert group.run(post_from_threads, 100_000) == [None] * 2


def call_wrongly(member: Member) -> list[str]:
    outcomes = []
    for peer in (-2, 2):
        for post in (member.send, member.recv):
            try:
                post(np.zeros(1, np.uint8), peer)
            except Failed as failed:
                outcomes.append(failed.message)
    try:
        member.call("Broadcast", pointer(np.zeros(1, np.uint8)), 1, 2)
    except Failed as failed:
        outcomes.append(failed.message)
    member.barrier()
    return outcomes


def test_a_rank_that_is_none_is_refused_and_breaks_nothing(tmp_path: Path) -> None:
    with members(tmp_path, 2) as group:
        wrong = ["to=-2: want", "from=-2: want", "to=2: want", "from=2: want", "root=2: want"]
        for outcomes in group.run(call_wrongly):
            assert len(outcomes) == 5
            assert all(want in outcome for want, outcome in zip(wrong, outcomes, strict=True))
