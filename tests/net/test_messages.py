"""What goes in at one side comes out at the other, whatever the sizes, streams, chunks and buffers."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.net import vtable
from tests.net.conftest import Plug
from tests.net.vtable import Net, NetFailure, Request, finish, join

MAX_REQUESTS = 32
CHUNK = 65536
MIB = 1 << 20
_BORDERS = (24, 128, 4096, 8192, CHUNK, 2 * CHUNK, MIB, 3 * MIB)
EDGES = sorted({0, 1} | {border + step for border in _BORDERS for step in (-1, 0, 1)})


def noise(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def post(request: Request | None) -> Request:
    assert request is not None
    return request


@contextmanager
def joined(sender: Net, receiver: Net) -> Iterator[tuple[int, int]]:
    send, recv = join(sender, receiver)
    yield send, recv
    sender.close_send(send)
    receiver.close_recv(recv)


def transfer(sender: Net, receiver: Net, comms: tuple[int, int], sizes: list[int]) -> None:
    """Sends messages of these sizes, up to 32 in flight, into rooms of just that size, and compares."""
    data = [noise(number, size) for number, size in enumerate(sizes)]
    rooms = [np.zeros_like(message) for message in data]
    done = 0
    sends: list[Request] = []
    receives: list[Request] = []
    while done < len(sizes):
        while len(receives) < len(sizes) and len(receives) - done < MAX_REQUESTS:
            receives.append(post(receiver.irecv(comms[1], rooms[len(receives)])))
            sends.append(post(sender.isend(comms[0], data[len(sends)])))
        size, sent = finish((receiver, receives[done]), (sender, sends[done]))
        assert size == sent == sizes[done]
        done += 1
    for message, room in zip(data, rooms, strict=True):
        assert np.array_equal(message, room)


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_sizes_around_every_border_arrive_whole(plug: Plug, streams: int) -> None:
    settings = {"BAGUA_NET_NSTREAMS": str(streams), "BAGUA_NET_CHUNK_BYTES": str(CHUNK)}
    sender, receiver = plug(**settings), plug(**settings)
    with joined(sender, receiver) as comms:
        transfer(sender, receiver, comms, EDGES)


def test_hundreds_of_messages_of_one_byte_arrive_in_order(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    with joined(sender, receiver) as comms:
        transfer(sender, receiver, comms, [1] * 500)


@pytest.mark.parametrize(
    ("ours", "theirs"), [((1, 4096), (16, 1 << 20)), ((16, 131072), (3, 5000)), ((7, 9999), (7, 4096))]
)
def test_sides_that_want_different_streams_and_chunks_agree(
    plug: Plug, ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    sender, receiver = (
        plug(BAGUA_NET_NSTREAMS=str(streams), BAGUA_NET_CHUNK_BYTES=str(chunk))
        for streams, chunk in (ours, theirs)
    )
    rng = random.Random(repr((ours, theirs)))
    sizes = [
        rng.choice([rng.randrange(100), rng.randrange(20_000), rng.randrange(500_000)]) for _ in range(60)
    ]
    with joined(sender, receiver) as comms:
        transfer(sender, receiver, comms, sizes)


@pytest.mark.parametrize("streams", range(1, 17))
def test_random_sizes_arrive_whole_over_any_number_of_streams(plug: Plug, streams: int) -> None:
    settings = {"BAGUA_NET_NSTREAMS": str(streams), "BAGUA_NET_CHUNK_BYTES": str(4096 * streams)}
    sender, receiver = plug(**settings), plug(**settings)
    rng = random.Random(streams)
    with joined(sender, receiver) as comms:
        transfer(sender, receiver, comms, [int(2 ** rng.uniform(0, 20)) for _ in range(40)])


def shrink_buffers() -> None:
    """Gives every connected TCP socket of this process the smallest buffers that there are."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        except FileNotFoundError:
            continue


@pytest.mark.parametrize("streams", ["1", "5"])
def test_tiny_socket_buffers_only_make_it_slower(plug: Plug, streams: str) -> None:
    sender, receiver = plug(BAGUA_NET_NSTREAMS=streams), plug(BAGUA_NET_NSTREAMS=streams)
    with joined(sender, receiver) as comms:
        shrink_buffers()
        transfer(sender, receiver, comms, [0, 1, 10_000, 2304, 20_000, 5, 0])


def test_the_thirty_third_request_has_to_wait_for_a_test(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    with joined(sender, receiver) as (send, recv):
        data, room = noise(1, 100), np.zeros(100, np.uint8)
        sends = [post(sender.isend(send, data)) for _ in range(MAX_REQUESTS)]
        receives = [post(receiver.irecv(recv, room)) for _ in range(MAX_REQUESTS)]
        assert sender.isend(send, data) is None
        assert receiver.irecv(recv, room) is None
        finish((sender, sends[0]), (receiver, receives[0]))
        later = post(sender.isend(send, data))
        assert sender.isend(send, data) is None
        last = post(receiver.irecv(recv, room))
        finish(*((sender, request) for request in [*sends[1:], later]),
               *((receiver, request) for request in [*receives[1:], last]))  # fmt: skip


def test_requests_may_be_tested_in_any_order_and_long_after_they_are_done(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    order = list(range(MAX_REQUESTS))
    random.Random(3).shuffle(order)
    with joined(sender, receiver) as (send, recv):
        for _ in range(3):
            sizes = [1000 * number for number in range(MAX_REQUESTS)]
            data = [noise(size, size) for size in sizes]
            rooms = [np.zeros_like(message) for message in data]
            receives = [post(receiver.irecv(recv, room)) for room in rooms]
            sends = [post(sender.isend(send, message)) for message in data]
            # The last ones first: when they are done, so are all before them, long since.
            finish((sender, sends[-1]), (receiver, receives[-1]))
            for number in order:
                if number != MAX_REQUESTS - 1:
                    sizes_done = finish((receiver, receives[number]), (sender, sends[number]))
                    assert sizes_done == [sizes[number]] * 2
            assert all(np.array_equal(*pair) for pair in zip(data, rooms, strict=True))


def test_a_message_may_arrive_before_and_after_its_room_is_posted(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    with joined(sender, receiver) as (send, recv):
        early, late = noise(1, 5000), noise(2, 700_000)
        sent = post(sender.isend(send, early))
        finish((sender, sent))
        rooms = np.zeros_like(early), np.zeros_like(late)
        first, second = post(receiver.irecv(recv, rooms[0])), post(receiver.irecv(recv, rooms[1]))
        assert finish((receiver, first)) == [5000]
        assert receiver.test(second) is None
        finish((sender, post(sender.isend(send, late))), (receiver, second))
        assert np.array_equal(rooms[0], early)
        assert np.array_equal(rooms[1], late)


def test_a_larger_room_gets_the_size_that_was_sent(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    with joined(sender, receiver) as (send, recv):
        for size in (0, 1, 300_000):
            data, room = noise(size, size), np.full(size + 1000, 0xA5, np.uint8)
            received = post(receiver.irecv(recv, room))
            assert finish((sender, post(sender.isend(send, data))), (receiver, received)) == [size, size]
            assert np.array_equal(room[:size], data)
            assert np.all(room[size:] == 0xA5)


def before_guard_page(size: int) -> ctypes.Array[ctypes.c_char]:
    """Memory that ends where touching one more byte ends the process."""
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    whole = (ctypes.c_char * (pages + mmap.PAGESIZE)).from_buffer(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    guard = ctypes.c_void_p(ctypes.addressof(whole) + pages)
    assert libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    room = (ctypes.c_char * size).from_buffer(memory, pages - size)
    room.keep = (memory, whole)  # type: ignore[attr-defined]
    return room


@pytest.mark.parametrize(("sent", "room"), [(1, 0), (1001, 1000), (3_000_000, 2_999_999), (10_000_000, 10)])
def test_a_message_that_does_not_fit_is_an_error_on_both_sides_and_overruns_nothing(
    plug: Plug, sent: int, room: int
) -> None:
    sender, receiver = plug(), plug()
    with joined(sender, receiver) as (send, recv):
        received = post(receiver.irecv(recv, before_guard_page(max(room, 1)), room))
        message = noise(1, sent)
        request = post(sender.isend(send, message))
        with pytest.raises(NetFailure, match=f"message of {sent} bytes into room for {room}") as caught:
            finish((sender, request), (receiver, received))
        assert caught.value.code == vtable.INVALID_USAGE
        with pytest.raises(NetFailure, match="into room for"):
            receiver.irecv(recv, np.zeros(10, np.uint8))
        with pytest.raises(NetFailure) as at_sender:
            # What fits into the socket may be done; the connection is over all the same.
            for _ in range(100):
                finish((sender, post(sender.isend(send, noise(2, MIB)))))
        assert at_sender.value.code == vtable.REMOTE_ERROR


def test_sizes_beyond_what_nccl_can_report_are_refused(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    with joined(sender, receiver) as (send, recv):
        small = np.zeros(1, np.uint8)
        for post_one in (
            lambda: sender.isend(send, small, 1 << 31),
            lambda: receiver.irecv(recv, small, 1 << 40),
        ):
            with pytest.raises(NetFailure, match="want at most maxP2pBytes") as caught:
                post_one()
            assert caught.value.code == vtable.INVALID_USAGE


def test_grouped_receives_are_refused(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    with joined(sender, receiver) as (_, recv):
        request = ctypes.c_void_p(1)
        two = (ctypes.c_void_p * 2)()
        sizes, tags = (ctypes.c_size_t * 2)(), (ctypes.c_int * 2)()
        code = receiver.call("irecv", recv, 2, two, sizes, tags, None, None, ctypes.byref(request))
        assert code == vtable.INTERNAL_ERROR
        assert request.value is None
