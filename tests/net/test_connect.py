"""Listening, connecting and accepting: nothing blocks, many at once, strangers do no harm."""

from __future__ import annotations

import ctypes
import os
import socket
import struct

import pytest

from tests.net import vtable
from tests.net.conftest import Plug
from tests.net.vtable import Net, NetFailure, finish, join, until

NONCE_AT, ADDRESS_AT = 16, 32


def endpoint(handle: ctypes.Array[ctypes.c_char]) -> tuple[str, int]:
    """The IPv4 address in a handle: a sockaddr_in behind magic, ticket and nonce."""
    family, port, packed = struct.unpack_from("=H2s4s", handle.raw, ADDRESS_AT)
    assert family == socket.AF_INET
    return socket.inet_ntoa(packed), int.from_bytes(port, "big")


def exchange(sender: Net, receiver: Net, comms: tuple[int, int], size: int = 1000) -> None:
    data = ctypes.create_string_buffer(os.urandom(size), size)
    room = ctypes.create_string_buffer(size)
    assert (received := receiver.irecv(comms[1], room)) is not None
    assert (sent := sender.isend(comms[0], data)) is not None
    assert finish((receiver, received), (sender, sent)) == [size, size]
    assert room.raw == data.raw


def close(sender: Net, receiver: Net, comms: tuple[int, int]) -> None:
    sender.close_send(comms[0])
    receiver.close_recv(comms[1])


def join_on(
    sender: Net, receiver: Net, handle: ctypes.Array[ctypes.c_char], listener: int
) -> tuple[int, int]:
    comms: list[int | None] = [None, None]

    def step() -> bool:
        comms[0] = comms[0] or sender.connect(handle)
        comms[1] = comms[1] or receiver.accept(listener)
        return None not in comms

    until(step)
    assert comms[0] is not None
    assert comms[1] is not None
    return comms[0], comms[1]


def test_accept_and_connect_return_nothing_while_the_other_side_does_nothing(plug: Plug) -> None:
    net = plug()
    handle, listener = net.listen()
    assert [net.accept(listener) for _ in range(100)] == [None] * 100
    assert [net.connect(handle) for _ in range(100)] == [None] * 100
    net.close_listen(listener)


def test_many_connections_are_made_in_turns_on_many_listeners(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    listeners = [receiver.listen() for _ in range(64)]
    sends: list[int | None] = [None] * 64
    recvs: list[int | None] = [None] * 64

    def step() -> bool:
        for at, (handle, _) in enumerate(listeners):
            sends[at] = sends[at] or sender.connect(handle)
            # Accepting in the opposite order: nobody may rely on the order of connecting.
            back = len(listeners) - 1 - at
            recvs[back] = recvs[back] or receiver.accept(listeners[back][1])
        return None not in sends and None not in recvs

    until(step)
    for send, recv, (_, listener) in zip(sends, recvs, listeners, strict=True):
        assert send is not None
        assert recv is not None
        exchange(sender, receiver, (send, recv))
        close(sender, receiver, (send, recv))
        receiver.close_listen(listener)


def test_one_listener_serves_several_connections(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    handle, listener = receiver.listen()
    copies = [ctypes.create_string_buffer(handle.raw, len(handle)) for _ in range(5)]
    for copy in copies:
        comms = join_on(sender, receiver, copy, listener)
        exchange(sender, receiver, comms)
        close(sender, receiver, comms)
    receiver.close_listen(listener)


def test_connecting_to_a_listener_that_is_gone_is_an_error_that_names_it(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    handle, listener = receiver.listen()
    receiver.close_listen(listener)
    with pytest.raises(NetFailure, match=r"127\.0\.0\.1:\d+: cannot connect .*refused") as caught:
        until(lambda: sender.connect(handle))
    assert caught.value.code == vtable.REMOTE_ERROR


def test_a_listener_closed_in_the_middle_of_the_hello_is_an_error_at_the_other_side(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    handle, listener = receiver.listen()
    # The kernel of the listening side completes the connection, so the hello is on its way.
    for _ in range(50):
        assert sender.connect(handle) is None
    receiver.close_listen(listener)
    with pytest.raises(NetFailure, match="before its welcome: it has died or left") as caught:
        until(lambda: sender.connect(handle))
    assert caught.value.code == vtable.REMOTE_ERROR


def test_a_listener_that_never_accepts_ends_in_a_timeout(plug: Plug) -> None:
    sender, receiver = plug(BAGUA_NET_CONNECT_TIMEOUT_S="0.3"), plug()
    handle, listener = receiver.listen()
    with pytest.raises(NetFailure, match="connected, but said no welcome within 300 ms") as caught:
        until(lambda: sender.connect(handle))
    assert caught.value.code == vtable.REMOTE_ERROR
    receiver.close_listen(listener)


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"BAGUANE",
        b"BAGUANET" + b"\xff" * 400,
        b"BAGUANET\x01\x00" + bytes(86),
        os.urandom(100_000),
    ],
    ids=["silent", "one byte", "http", "half a magic", "another version", "no tag", "noise"],
)
def test_a_stranger_on_the_port_is_dropped_and_disturbs_nobody(plug: Plug, greeting: bytes) -> None:
    sender, receiver = plug(), plug()
    handle, listener = receiver.listen()
    with socket.create_connection(endpoint(handle)) as stranger:
        stranger.setblocking(False)
        try:
            stranger.send(greeting)
        except BlockingIOError:
            pass
        assert receiver.accept(listener) is None
        comms = join_on(sender, receiver, handle, listener)
        exchange(sender, receiver, comms)
    close(sender, receiver, comms)
    receiver.close_listen(listener)


def drain(stranger: socket.socket, net: Net, listener: int) -> bytes:
    """All that the listener answers until it hangs up."""
    stranger.setblocking(False)
    answer = b""

    def step() -> bool:
        nonlocal answer
        assert net.accept(listener) is None
        try:
            part = stranger.recv(1000)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        answer += part
        return not part

    until(step)
    return answer


def test_strangers_get_no_answer(plug: Plug) -> None:
    net = plug()
    handle, listener = net.listen()
    with socket.create_connection(endpoint(handle)) as stranger:
        stranger.send(b"GET / HTTP/1.0\r\n\r\n")
        assert drain(stranger, net, listener) == b""
    net.close_listen(listener)


def test_another_version_is_told_so(plug: Plug) -> None:
    net = plug()
    handle, listener = net.listen()
    with socket.create_connection(endpoint(handle)) as other:
        other.send(b"BAGUANET\x63\x00")
        answer = drain(other, net, listener)
    assert answer[:12] == b"BAGUANET\x01\x00\x01\x00"
    net.close_listen(listener)


def test_a_slow_hello_is_dropped_after_its_time(plug: Plug) -> None:
    net = plug(BAGUA_NET_HELLO_TIMEOUT_S="0.2")
    handle, listener = net.listen()
    with socket.create_connection(endpoint(handle)) as slow:
        slow.send(b"BAGUA")
        assert drain(slow, net, listener) == b""
    net.close_listen(listener)


def test_a_crowd_of_silent_strangers_is_bounded_and_members_still_get_in(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    handle, listener = receiver.listen()
    before = len(os.listdir("/proc/self/fd"))
    strangers = [socket.create_connection(endpoint(handle)) for _ in range(300)]
    try:
        for _ in range(20):
            receiver.accept(listener)
        held = len(os.listdir("/proc/self/fd")) - before - len(strangers)
        assert 0 < held <= 128
        comms = join_on(sender, receiver, handle, listener)
        exchange(sender, receiver, comms)
        close(sender, receiver, comms)
    finally:
        for stranger in strangers:
            stranger.close()
    receiver.close_listen(listener)


def test_a_wrong_nonce_is_turned_away(plug: Plug) -> None:
    sender, receiver = plug(), plug()
    handle, listener = receiver.listen()
    forged = ctypes.create_string_buffer(handle.raw, len(handle))
    forged[NONCE_AT] = bytes([handle.raw[NONCE_AT] ^ 1])
    with pytest.raises(NetFailure, match="turned us away") as caught:
        until(lambda: receiver.accept(listener) or sender.connect(forged))
    assert caught.value.code == vtable.REMOTE_ERROR
    comms = join_on(sender, receiver, handle, listener)
    close(sender, receiver, comms)
    receiver.close_listen(listener)


@pytest.mark.parametrize(("ours", "theirs"), [("one", "two"), ("one", ""), ("", "two")])
def test_members_with_different_secrets_do_not_meet(plug: Plug, ours: str, theirs: str) -> None:
    sender, receiver = plug(BAGUA_NET_SECRET=ours), plug(BAGUA_NET_SECRET=theirs)
    handle, listener = receiver.listen()
    with pytest.raises(NetFailure, match="BAGUA_NET_SECRET"):
        until(lambda: receiver.accept(listener) or sender.connect(handle))
    receiver.close_listen(listener)


def test_members_with_one_secret_meet(plug: Plug) -> None:
    sender, receiver = plug(BAGUA_NET_SECRET="a" * 100), plug(BAGUA_NET_SECRET="a" * 100)
    comms = join(sender, receiver)
    exchange(sender, receiver, comms)
    close(sender, receiver, comms)


def test_ipv6_is_used_where_it_is_asked_for(plug: Plug) -> None:
    sender, receiver = plug(NCCL_SOCKET_FAMILY="AF_INET6"), plug(12, NCCL_SOCKET_FAMILY="AF_INET6")
    assert "lo [::1]:0" in sender.log[0]
    comms = join(sender, receiver)
    exchange(sender, receiver, comms, 500_000)
    close(sender, receiver, comms)


def test_every_descriptor_is_closed_by_exec(plug: Plug) -> None:
    before = set(os.listdir("/proc/self/fd"))
    sender, receiver = plug(), plug()
    handle, listener = receiver.listen()
    comms = join_on(sender, receiver, handle, listener)
    ours = set(os.listdir("/proc/self/fd")) - before
    open_now = [int(fd) for fd in ours if os.path.exists(f"/proc/self/fd/{fd}")]
    assert len(open_now) >= 10
    assert not [fd for fd in open_now if os.get_inheritable(fd)]
    close(sender, receiver, comms)
    receiver.close_listen(listener)
