"""How connections end: in order, early, by a kill, by a freeze; never in a hang, always naming the peer."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.net import vtable
from tests.net.conftest import Plug
from tests.net.peer import Peer
from tests.net.test_connect import ADDRESS_AT, endpoint
from tests.net.test_messages import noise, post
from tests.net.vtable import Net, NetFailure, Request, finish, join, until

MIB = 1 << 20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [1, 100_000, 3 * MIB])
def test_closing_right_after_the_last_send_loses_nothing(plug: Plug, size: int) -> None:
    sender, receiver = plug(), plug()
    for _ in range(5):
        send, recv = join(sender, receiver)
        data, room = noise(size, size), np.zeros(size, np.uint8)
        received = post(receiver.irecv(recv, room))
        sent = post(sender.isend(send, data))
        # The receiver is visited only as long as the sender needs it.
        size_received = None
        while sender.test(sent) is None:
            size_received = size_received or receiver.test(received)
        sender.close_send(send)
        if size_received is None:
            [size_received] = finish((receiver, received))
        assert size_received == size
        assert np.array_equal(room, data)
        receiver.close_recv(recv)


def test_a_receive_that_is_posted_after_the_end_is_an_error(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    send, recv = join(sender, receiver)
    sender.close_send(send)
    with pytest.raises(NetFailure, match=r"127\.0\.0\.1:\d+: closed the connection") as caught:
        finish((receiver, post(receiver.irecv(recv, np.zeros(10, np.uint8)))))
    assert caught.value.code == vtable.REMOTE_ERROR
    receiver.close_recv(recv)


def test_sending_to_a_receiver_that_closed_is_an_error(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    send, recv = join(sender, receiver)
    receiver.close_recv(recv)
    with pytest.raises(NetFailure, match=r"127\.0\.0\.1:\d+: ") as caught:
        for _ in range(100):
            finish((sender, post(sender.isend(send, noise(1, MIB)))))
    assert caught.value.code == vtable.REMOTE_ERROR
    sender.close_send(send)


def test_closing_with_requests_outstanding_returns_and_leaves_nothing_open(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    before = descriptors()
    for _ in range(20):
        send, recv = join(sender, receiver)
        data = noise(1, 8 * MIB)
        requests = [post(sender.isend(send, data)) for _ in range(3)]
        received = post(receiver.irecv(recv, np.zeros(8 * MIB, np.uint8)))
        sender.test(requests[0])
        receiver.test(received)
        sender.close_send(send)
        receiver.close_recv(recv)
    assert descriptors() == before


def test_an_error_stays_and_what_was_done_before_stays_good(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    send, recv = join(sender, receiver)
    data, room = noise(1, 1000), np.zeros(1000, np.uint8)
    good, hopeless = post(receiver.irecv(recv, room)), post(receiver.irecv(recv, np.zeros(10, np.uint8)))
    finish((sender, post(sender.isend(send, data))))
    sender.close_send(send)
    for _ in range(3):
        with pytest.raises(NetFailure, match="closed the connection"):
            finish((receiver, hopeless))
    assert finish((receiver, good)) == [1000]
    assert np.array_equal(room, data)
    with pytest.raises(NetFailure, match="closed the connection"):
        receiver.irecv(recv, room)
    receiver.close_recv(recv)


def exchange_until(step: Callable[[], Request | None], net: Net) -> None:
    """Keeps 4 requests in flight until an error ends it."""
    requests: list[Request] = []

    def once() -> bool:
        while len(requests) < 4:
            requests.append(post(step()))
        if net.test(requests[0]) is not None:
            requests.pop(0)
        return False

    until(once)


@pytest.mark.parametrize("size", [1, 5 * MIB])
def test_a_receiver_finds_its_killed_sender(plug: Plug, library: Path, size: int) -> None:
    net = plug()
    handle, listener = net.listen()
    with Peer(library, "connect", "send", size, handle=handle.raw) as peer:
        recv = until(lambda: net.accept(listener))
        room = np.zeros(size, np.uint8)
        finish((net, post(net.irecv(recv, room))))
        peer.process.kill()
        with pytest.raises(NetFailure, match=r"127\.0\.0\.1:\d+: ") as caught:
            exchange_until(lambda: net.irecv(recv, room), net)
    assert caught.value.code == vtable.REMOTE_ERROR
    net.close_recv(recv)
    net.close_listen(listener)


@pytest.mark.parametrize("size", [1, 5 * MIB])
def test_a_sender_finds_its_killed_receiver(plug: Plug, library: Path, size: int) -> None:
    net = plug()
    with Peer(library, "listen", "recv", size) as peer:
        handle = peer.handle()
        send = until(lambda: net.connect(handle))
        data = noise(1, size)
        finish((net, post(net.isend(send, data))))
        peer.process.kill()
        with pytest.raises(NetFailure, match=r"127\.0\.0\.1:\d+: ") as caught:
            exchange_until(lambda: net.isend(send, data), net)
    assert caught.value.code == vtable.REMOTE_ERROR
    net.close_send(send)


def test_a_frozen_receiver_is_waited_for_beyond_the_peer_timeout(plug: Plug, library: Path) -> None:
    """Its machine answers, so it is alive: how long to wait for it is not the transport's to decide."""
    net = plug(BAGUA_NET_PEER_TIMEOUT_S="1")
    with Peer(library, "listen", "recv", 40 * MIB) as peer:
        handle = peer.handle()
        send = until(lambda: net.connect(handle))
        assert peer.line() == "connected"
        peer.process.send_signal(signal.SIGSTOP)
        request = post(net.isend(send, noise(1, 40 * MIB)))
        with pytest.raises(AssertionError, match="nothing after"):
            until(lambda: net.test(request), patience_s=4)
        peer.process.send_signal(signal.SIGCONT)
        finish((net, request))
        assert peer.line() == "message"
    net.close_send(send)


@contextmanager
def forked_child() -> Iterator[None]:
    """A child that has all of our descriptors and does nothing, such as a data loader's worker."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)


def test_a_forked_child_that_lives_on_does_not_keep_the_connection_open(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    send, recv = join(sender, receiver)
    with forked_child():
        sender.close_send(send)
        with pytest.raises(NetFailure, match="closed the connection"):
            finish((receiver, post(receiver.irecv(recv, np.zeros(10, np.uint8)))))
    receiver.close_recv(recv)


def test_a_forked_child_may_clean_up_without_harm_to_its_parent(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    send, recv = join(sender, receiver)
    child = os.fork()
    if child == 0:
        sender.close_send(send)
        receiver.close_recv(recv)
        os._exit(0)
    os.waitpid(child, 0)
    data, room = noise(1, MIB), np.zeros(MIB, np.uint8)
    finish((receiver, post(receiver.irecv(recv, room))), (sender, post(sender.isend(send, data))))
    assert np.array_equal(room, data)
    sender.close_send(send)
    receiver.close_recv(recv)


def test_a_forked_child_that_lives_on_keeps_no_port_and_nobody_waiting_on_it(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    handle, listener = receiver.listen()
    before = ctypes.create_string_buffer(handle.raw, len(handle))
    for _ in range(20):
        assert sender.connect(before) is None
    with forked_child():
        receiver.close_listen(listener)
        with pytest.raises(NetFailure) as caught:
            until(lambda: sender.connect(before), patience_s=20)
        assert caught.value.code == vtable.REMOTE_ERROR
        with pytest.raises(NetFailure, match="nobody listens there"):
            until(lambda: sender.connect(handle), patience_s=20)


def test_a_stranger_is_hung_up_on_though_a_forked_child_lives_on(plug: Plug) -> None:
    net = plug()
    handle, listener = net.listen()
    with socket.create_connection(endpoint(handle)) as stranger:
        stranger.settimeout(30)
        stranger.send(b"BAG")
        assert net.accept(listener) is None
        with forked_child():
            stranger.send(b" OF NONSENSE")
            until(lambda: net.accept(listener) or select.select([stranger], [], [], 0)[0])
            assert stranger.recv(1) == b""
    net.close_listen(listener)


def test_the_accepting_side_learns_that_the_other_gave_up_though_a_forked_child_lives_on(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    net = Net(library)
    handle, listener = net.listen()
    with socket.create_server(("127.0.0.1", 0)) as server:
        struct.pack_into("!H", handle, ADDRESS_AT + 2, server.getsockname()[1])
        assert net.connect(handle) is None
        with server.accept()[0] as accepted, forked_child():
            accepted.settimeout(30)
            until(lambda: net.connect(handle) or select.select([accepted], [], [], 0)[0])
            assert accepted.recv(8) == b"BAGUANET"
            net.finalize()
            while accepted.recv(1000):
                pass
    net.close_listen(listener)


def test_the_receiver_may_close_first_and_the_sender_closes_in_order(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    before = descriptors()
    for _ in range(5):
        send, recv = join(sender, receiver)
        data, room = noise(1, 1000), np.zeros(1000, np.uint8)
        finish((receiver, post(receiver.irecv(recv, room))), (sender, post(sender.isend(send, data))))
        receiver.close_recv(recv)
        sender.close_send(send)
    assert sender.log[1:] == receiver.log[1:] == [], "nobody complains"
    assert descriptors() == before
