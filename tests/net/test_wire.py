"""The format on the wire, against an implementation of its own in Python; and peers that break its rules."""

from __future__ import annotations

import os
import socket
import struct

import numpy as np
import pytest

from tests.net import vtable
from tests.net.conftest import Plug
from tests.net.test_messages import post
from tests.net.vtable import NetFailure, finish, join, until
from tests.net.wire import Dialer, dialled, frame


def test_a_peer_made_by_hand_is_understood(plug: Plug) -> None:
    net = plug()
    comm, [sock] = dialled(net)
    room = np.zeros(20, np.uint8)
    received = post(net.irecv(comm, room))
    sock.sendall(frame(0, 4, 6, 10) + b"6789" + frame(0, 6, 0, 10) + b"012345")
    assert finish((net, received)) == [10]
    assert room[:10].tobytes() == b"0123456789"
    empty = post(net.irecv(comm, room))
    sock.sendall(frame(1, 0, 0, 0))
    assert finish((net, empty)) == [0]
    sock.close()
    net.close_recv(comm)


def test_chunks_of_one_message_may_come_on_all_streams_in_any_order(plug: Plug) -> None:
    net = plug()
    comm, socks = dialled(net, streams=3)
    data = os.urandom(12_000)
    room = np.zeros(len(data), np.uint8)
    received = post(net.irecv(comm, room))
    for number, sock in zip((2, 0, 1), socks, strict=True):
        sock.sendall(frame(0, 4000, 4000 * number, len(data)) + data[4000 * number : 4000 * (number + 1)])
    assert finish((net, received)) == [len(data)]
    assert room.tobytes() == data
    for sock in socks:
        sock.close()
    net.close_recv(comm)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_message_may_arrive_in_any_two_pieces(plug: Plug, cut: int) -> None:
    net = plug()
    comm, [sock] = dialled(net)
    rooms = [np.zeros(8, np.uint8) for _ in range(2)]
    requests = [post(net.irecv(comm, room)) for room in rooms]
    message = frame(0, 5, 0, 5) + b"hello" + frame(1, 8, 0, 8) + b"and more"
    sock.sendall(message[:cut])
    for _ in range(5):
        assert net.test(requests[1]) is None
    sock.sendall(message[cut:])
    assert finish((net, requests[0]), (net, requests[1])) == [5, 8]
    assert [room.tobytes() for room in rooms] == [b"hello\0\0\0", b"and more"]
    sock.close()
    net.close_recv(comm)


@pytest.mark.parametrize("piece_bytes", [1000, 5000, 40_000, 150_000])
def test_a_message_that_comes_slowly_is_done_with_its_last_byte(plug: Plug, piece_bytes: int) -> None:
    net = plug()
    comm, [sock] = dialled(net)
    data = os.urandom(350_000)
    room = np.zeros(len(data), np.uint8)
    received = post(net.irecv(comm, room))
    message = frame(0, 300_000, 0, len(data)) + data[:300_000]
    message += frame(0, 50_000, 300_000, len(data)) + data[300_000:]
    for start in range(0, len(message), piece_bytes):
        assert net.test(received) is None
        sock.sendall(message[start : start + piece_bytes])
    assert finish((net, received)) == [len(data)]
    assert room.tobytes() == data
    sock.close()
    net.close_recv(comm)


def test_a_message_whose_beginning_came_before_its_receive_is_done_with_its_last_byte(plug: Plug) -> None:
    net = plug()
    comm, [sock] = dialled(net)
    data = os.urandom(20_000)
    rooms = [np.zeros(5, np.uint8), np.zeros(len(data), np.uint8)]
    first = post(net.irecv(comm, rooms[0]))
    sock.sendall(frame(0, 5, 0, 5) + b"hello" + frame(1, len(data), 0, len(data)) + data[:3000])
    assert finish((net, first)) == [5]
    second = post(net.irecv(comm, rooms[1]))
    assert net.test(second) is None
    sock.sendall(data[3000:])
    assert finish((net, second)) == [len(data)]
    assert rooms[1].tobytes() == data
    sock.close()
    net.close_recv(comm)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (frame(0, 2**20 + 1, 0, 2**21), "means nothing"),
        (frame(0, 0, 0, 10), "means nothing"),
        (frame(0, 10, 5, 10), "means nothing"),
        (frame(0, 1, 11, 10), "means nothing"),
        (frame(0, 10, 2**64 - 5, 2**40), "means nothing"),
        (frame(0, 1, 0, 2**64 - 1), "means nothing"),
        (b"GET / HTTP/1.1\r\nHost: elsewhere\r\n\r\n", "means nothing"),
        (frame(2**32 - 1, 1, 0, 1), "which is complete or has another size"),
        (frame(0, 8, 0, 16) + bytes(8) + frame(0, 8, 8, 17), "which is complete or has another size"),
        (frame(0, 8, 0, 16) + bytes(8) + frame(0, 12, 4, 16) + bytes(12), "twice"),
    ],
)
def test_a_peer_that_breaks_the_rules_breaks_its_connection_only(
    plug: Plug, header: bytes, complaint: str
) -> None:
    net, other = plug(), plug()
    comm, [sock] = dialled(net)
    room = np.full(64, 0xA5, np.uint8)
    request = post(net.irecv(comm, room, 32))
    sock.sendall(header)
    with pytest.raises(NetFailure, match=rf"127\.0\.0\.1:\d+: .*{complaint}") as caught:
        finish((net, request))
    assert caught.value.code == vtable.REMOTE_ERROR
    assert np.all(room[32:] == 0xA5)
    send, recv = join(other, net)
    finish((net, post(net.irecv(recv, room))), (other, post(other.isend(send, room))))
    other.close_send(send)
    net.close_recv(recv)
    net.close_recv(comm)
    sock.close()


@pytest.mark.parametrize("sent", [frame(0, 8, 0, 8)[:1], frame(0, 8, 0, 8), frame(0, 8, 0, 8) + b"half"])
def test_an_end_in_the_middle_of_a_message_is_an_error(plug: Plug, sent: bytes) -> None:
    net = plug()
    comm, [sock] = dialled(net)
    request = post(net.irecv(comm, np.zeros(8, np.uint8)))
    sock.sendall(sent)
    sock.close()
    with pytest.raises(NetFailure, match="in the middle of a message"):
        finish((net, request))
    net.close_recv(comm)


def test_the_end_of_one_idle_stream_is_no_error_while_the_others_deliver(plug: Plug) -> None:
    net = plug()
    comm, socks = dialled(net, streams=2)
    socks[0].close()
    room = np.zeros(6, np.uint8)
    request = post(net.irecv(comm, room))
    for _ in range(20):
        assert net.test(request) is None
    socks[1].sendall(frame(0, 6, 0, 6) + b"enough")
    assert finish((net, request)) == [6]
    socks[1].close()
    with pytest.raises(NetFailure, match="closed the connection"):
        finish((net, post(net.irecv(comm, room))))
    net.close_recv(comm)


def test_what_waits_for_its_receive_does_not_end_with_the_sender(plug: Plug) -> None:
    net = plug()
    comm, [sock] = dialled(net)
    sock.sendall(frame(0, 5, 0, 5) + b"early" + frame(1, 3, 0, 3) + b"too")
    sock.close()
    for text in (b"early", b"too"):
        room = np.zeros(len(text), np.uint8)
        finish((net, post(net.irecv(comm, room))))
        assert room.tobytes() == text
    net.close_recv(comm)


def test_a_link_begun_by_a_peer_that_then_dies_does_not_block_the_next(plug: Plug) -> None:
    net, other = plug(), plug()
    handle, listener = net.listen()
    dead = Dialer(handle=handle, streams=4)
    sock = dead.dial(0)
    assert dead.welcome(sock, net, listener) == (4, 4096, None)
    sock.close()
    comms: list[int | None] = [None, None]

    def step() -> bool:
        comms[0] = comms[0] or other.connect(handle)
        comms[1] = comms[1] or net.accept(listener)
        return None not in comms

    until(step)
    assert comms[0] is not None
    assert comms[1] is not None
    other.close_send(comms[0])
    net.close_recv(comms[1])
    net.close_listen(listener)


def test_a_repeated_or_misplaced_hello_is_dropped(plug: Plug) -> None:
    net = plug()
    handle, listener = net.listen()
    dialer = Dialer(handle=handle, streams=2)
    first = dialer.dial(0)
    dialer.welcome(first, net, listener)
    strays = [dialer.dial(0), Dialer(handle=handle, streams=2).dial(1)]
    for stray in strays:

        def hung_up(stray=stray) -> bool:
            assert net.accept(listener) is None
            try:
                return stray.recv(1) == b""
            except BlockingIOError:
                return False

        until(hung_up)
        stray.close()
    second = dialer.dial(1)
    comm = dialer.welcome(second, net, listener)[2] or until(lambda: net.accept(listener))
    first.close()
    second.close()
    net.close_recv(comm)
    net.close_listen(listener)


def test_a_hello_that_was_overheard_is_no_use_to_anybody_else(plug: Plug) -> None:
    net = plug(BAGUA_NET_SECRET="s")
    handle, listener = net.listen()
    dialer = Dialer(handle=handle, streams=1, secret=b"s")
    member = dialer.dial(0)
    comm = dialer.welcome(member, net, listener)[2] or until(lambda: net.accept(listener))
    with dialer.dial(0) as replayed:

        def hung_up() -> bool:
            assert net.accept(listener) is None
            try:
                return replayed.recv(1) == b""
            except BlockingIOError:
                return False

        until(hung_up)
    member.close()
    net.close_recv(comm)
    net.close_listen(listener)


def test_a_dead_peer_is_found_behind_a_message_that_nobody_receives(plug: Plug) -> None:
    net = plug()
    comm, socks = dialled(net, streams=2)
    request = post(net.irecv(comm, np.zeros(8, np.uint8)))
    socks[0].sendall(frame(1, 4, 0, 4) + b"next")
    for _ in range(20):
        assert net.test(request) is None
    for sock in socks:
        sock.close()
    with pytest.raises(NetFailure, match="closed the connection"):
        finish((net, request))
    net.close_recv(comm)


def reset(sock: socket.socket) -> None:
    """Ends the connection with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_one_stream_that_is_reset_breaks_the_connection_at_once(plug: Plug, broken: int) -> None:
    net = plug()
    comm, socks = dialled(net, streams=3)
    request = post(net.irecv(comm, np.zeros(8, np.uint8)))
    assert net.test(request) is None
    reset(socks[broken])
    with pytest.raises(NetFailure, match=f"stream {broken} of 3 broke while receiving: Connection reset"):
        finish((net, request))
    for sock in socks:
        sock.close()
    net.close_recv(comm)
