"""Kernel filters that drop part of a host's traffic, both ways, at its port on the bridge.

Programs of classic BPF, since the tools at hand need no firewall for it: a frame's verdict is 0 (pass) or 2
(drop). They read Ethernet frames of IPv4 without options, which is all that a lab has besides ARP.
"""

from __future__ import annotations

from tests.lab.namespaces import inside, system

_LOAD_HALF, _LOAD_BYTE, _JUMP_IF_EQUAL, _RETURN = 40, 48, 21, 6
_PASS, _DROP = 0, 2
_ETHER_TYPE, _PROTOCOL, _SOURCE_PORT, _DESTINATION_PORT = 12, 23, 34, 36
_IPV4, _TCP, _UDP = 0x800, 6, 17

Program = list[tuple[int, int, int, int]]
"""Code, jump if true, jump if false (instructions to skip), operand."""


def tcp_except(port: int) -> Program:
    """Drops TCP unless one of its ends is `port`."""
    return [
        (_LOAD_HALF, 0, 0, _ETHER_TYPE),
        (_JUMP_IF_EQUAL, 0, 7, _IPV4),
        (_LOAD_BYTE, 0, 0, _PROTOCOL),
        (_JUMP_IF_EQUAL, 0, 5, _TCP),
        (_LOAD_HALF, 0, 0, _SOURCE_PORT),
        (_JUMP_IF_EQUAL, 3, 0, port),
        (_LOAD_HALF, 0, 0, _DESTINATION_PORT),
        (_JUMP_IF_EQUAL, 1, 0, port),
        (_RETURN, 0, 0, _DROP),
        (_RETURN, 0, 0, _PASS),
    ]


def udp_and_tcp(port: int) -> Program:
    """Drops all UDP, and TCP one of whose ends is `port`."""
    return [
        (_LOAD_HALF, 0, 0, _ETHER_TYPE),
        (_JUMP_IF_EQUAL, 0, 8, _IPV4),
        (_LOAD_BYTE, 0, 0, _PROTOCOL),
        (_JUMP_IF_EQUAL, 5, 0, _UDP),
        (_JUMP_IF_EQUAL, 0, 5, _TCP),
        (_LOAD_HALF, 0, 0, _SOURCE_PORT),
        (_JUMP_IF_EQUAL, 2, 0, port),
        (_LOAD_HALF, 0, 0, _DESTINATION_PORT),
        (_JUMP_IF_EQUAL, 0, 1, port),
        (_RETURN, 0, 0, _DROP),
        (_RETURN, 0, 0, _PASS),
    ]


def install(namespace: str, device: str, program: Program) -> None:
    """Filter all that goes through `device`, both ways."""
    words = [" ".join(map(str, instruction)) for instruction in program]
    bytecode = ",".join([str(len(words)), *words])
    enter = inside(namespace)
    system(*enter, "tc", "qdisc", "add", "dev", device, "clsact")
    for way in ("ingress", "egress"):
        where = ("dev", device, way)
        system(*enter, "tc", "filter", "add", *where, "bpf", "direct-action", "bytecode", bytecode)


def remove(namespace: str, device: str) -> None:
    """Undo `install`, if there is anything to undo."""
    enter = inside(namespace)
    if "clsact" in system(*enter, "tc", "qdisc", "show", "dev", device):
        system(*enter, "tc", "qdisc", "del", "dev", device, "clsact")
