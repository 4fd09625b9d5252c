from __future__ import annotations

import socket
from typing import Any

import pytest

from baguarun.errors import UsageError
from baguarun.launcher import addresses
from baguarun.launcher.addresses import (
    free_port,
    is_local_host,
    join_host_port,
    local_addresses,
    node_address,
    port_is_free,
    serving_address,
)
from baguarun.launcher.rendezvous import Embedded, EndpointStore, ExternalStore
from baguarun.launcher.settings import RunSettings

ALONE = RunSettings(script="x")
SEVERAL = RunSettings(script="x", max_nodes=2)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A resolver of our own: the names put in here, and addresses as they are."""
    table: dict[str, str] = {}
    real = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **options: Any) -> Any:
        if host in table:
            return real(table[host], *rest, **options)
        return real(host, *rest, **options, flags=socket.AI_NUMERICHOST)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return table


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one network, 198.51.100.7, and a default route through it."""

    def source(_family: int, far: str) -> str | OSError:
        if addresses._is_loopback(far):
            return "::1" if ":" in far else "127.0.0.1"
        return OSError(101, "Network is unreachable") if ":" in far else "198.51.100.7"

    monkeypatch.setattr(addresses, "_source_address", source)
    monkeypatch.setattr(addresses, "local_addresses", lambda: {"127.0.0.1", "::1", "198.51.100.7"})


def test_a_job_of_one_node_stays_on_loopback() -> None:
    assert node_address(ALONE, Embedded()) == "127.0.0.1"


def test_the_address_given_is_taken_as_it_is_without_brackets(names: dict[str, str]) -> None:
    names["node-7.cluster"] = "198.51.100.9"
    for given, taken in (
        ("10.1.2.3", "10.1.2.3"),
        ("[fd00::9]", "fd00::9"),
        ("node-7.cluster", "node-7.cluster"),
    ):
        settings = RunSettings(script="x", max_nodes=2, local_addr=given)
        assert node_address(settings, EndpointStore("n1", 1)) == taken


def test_a_local_address_that_is_none_is_refused(names: dict[str, str]) -> None:
    settings = RunSettings(script="x", max_nodes=2, local_addr="nobody.invalid")
    with pytest.raises(UsageError, match=r"--local-addr=nobody\.invalid: cannot resolve this name"):
        node_address(settings, EndpointStore("n1", 1))


@pytest.mark.usefixtures("interfaces")
def test_the_address_is_that_of_the_interface_which_routes_to_the_meeting_place(
    names: dict[str, str],
) -> None:
    names["e"] = "203.0.113.5"
    assert node_address(SEVERAL, ExternalStore("etcd://e:2379")) == "198.51.100.7"
    assert node_address(SEVERAL, EndpointStore("203.0.113.5", 29400)) == "198.51.100.7"


@pytest.mark.usefixtures("interfaces")
def test_a_store_on_this_very_node_does_not_make_loopback_the_address_for_others(
    names: dict[str, str],
) -> None:
    names["me"] = "127.0.1.1"
    assert node_address(SEVERAL, EndpointStore("me", 29400)) == "198.51.100.7"
    assert node_address(SEVERAL, ExternalStore("etcd://127.0.0.1:2379")) == "198.51.100.7"
    assert node_address(ALONE, ExternalStore("etcd://127.0.0.1:2379")) == "127.0.0.1"


@pytest.mark.usefixtures("interfaces")
def test_the_next_endpoint_is_tried_when_nothing_routes_to_the_first(names: dict[str, str]) -> None:
    assert node_address(SEVERAL, ExternalStore("etcd://[2001:db8::5]:1,203.0.113.5:1")) == "198.51.100.7"
    with pytest.raises(UsageError, match=r"\[2001:db8::5\]:1: Network is unreachable.*--local-addr"):
        node_address(SEVERAL, ExternalStore("etcd://[2001:db8::5]:1"))


@pytest.mark.usefixtures("interfaces")
def test_the_endpoint_is_served_where_others_can_reach_it(names: dict[str, str]) -> None:
    names.update({"me": "127.0.1.1", "me-too": "198.51.100.7", "localhost": "127.0.0.1"})
    assert serving_address("me") == "198.51.100.7"
    assert serving_address("me-too") == "198.51.100.7"
    assert serving_address("localhost") == "127.0.0.1"
    assert serving_address("127.0.0.1") == "127.0.0.1"
    assert serving_address("[::1]") == "::1"


@pytest.mark.usefixtures("interfaces")
def test_this_machine_knows_its_names_and_addresses(names: dict[str, str]) -> None:
    names.update({"me": "127.0.1.1", "me-too": "198.51.100.7", "other": "198.51.100.8"})
    for host in ("localhost", "127.0.0.1", "[::1]", "198.51.100.7", "::ffff:198.51.100.7", "me", "me-too"):
        assert is_local_host(host), host
    for host in ("198.51.100.8", "other", "2001:db8::1"):
        assert not is_local_host(host), host
    with pytest.raises(UsageError, match=r"--rdzv-endpoint=nobody\.invalid: cannot resolve this name"):
        is_local_host("nobody.invalid")


def test_the_real_interfaces_are_read_and_have_loopback() -> None:
    found = local_addresses()
    assert "127.0.0.1" in found
    assert not any("%" in address for address in found)


def test_a_port_is_free_until_somebody_listens_on_it() -> None:
    port = free_port("127.0.0.1")
    assert port_is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free("127.0.0.1", port)
        assert not port_is_free("localhost", port)
    assert port_is_free("127.0.0.1", port)


def test_ipv6_addresses_are_written_in_brackets() -> None:
    assert join_host_port("10.0.0.1", 1) == "10.0.0.1:1"
    assert join_host_port("fd00::1", 1) == "[fd00::1]:1"
