"""Store URLs are read in full, refused with a reason, and never print a password."""

from __future__ import annotations

from pathlib import Path

import pytest

from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.errors import UsageError


@pytest.fixture
def pem(tmp_path: Path) -> str:
    path = tmp_path / "a b.pem"
    path.write_text("")
    return str(path)


def test_several_endpoints_are_kept_in_order() -> None:
    url = StoreUrl.parse("etcd://n1:1234,10.0.0.2,[fd00::3],[fd00::4]:99")
    assert url.endpoints == (
        HostPort("n1", 1234),
        HostPort("10.0.0.2", 2379),
        HostPort("fd00::3", 2379),
        HostPort("fd00::4", 99),
    )
    assert (url.tls, url.user, url.password) == (False, None, None)
    assert str(url) == "etcd://n1:1234,10.0.0.2:2379,[fd00::3]:2379,[fd00::4]:99"


def test_the_password_comes_from_the_url_or_else_from_the_caller() -> None:
    assert StoreUrl.parse("etcd://bob:p%40s%3As@h").password == "p@s:s"
    assert StoreUrl.parse("etcd://bob:mine@h", "other").password == "mine"
    assert StoreUrl.parse("etcd://bob@h", "other").password == "other"
    assert StoreUrl.parse("etcd://h", "other").password is None


def test_the_password_is_never_shown() -> None:
    url = StoreUrl.parse("etcds://bob:secret@h:1")
    assert "secret" not in repr(url) + str(url)
    assert str(url) == "etcds://bob@h:1"
    for bad in ("etcd://bob:secret@h:1/path", "http://bob:secret@h", "etcd://bob:secret@h?colour=red"):
        with pytest.raises(UsageError) as caught:
            StoreUrl.parse(bad)
        assert "secret" not in str(caught.value)


def test_etcds_or_any_certificate_means_tls(pem: str) -> None:
    assert StoreUrl.parse("etcds://h").tls
    url = StoreUrl.parse(f"etcd://h?cacert={pem.replace(' ', '%20')}&cert={pem}&key={pem}")
    assert (url.tls, url.cacert, url.cert, url.key) == (True, pem, pem, pem)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("localhost:2379", "want etcd://host:port"),
        ("http://localhost:2379", "want etcd://host:port"),
        ("etcd://", "found no host"),
        ("etcd://h,,g", "found no host"),
        ("etcd://h:port", "found 'port'"),
        ("etcd://h:70000", "found '70000'"),
        ("etcd://::1", "in brackets"),
        ("etcd://[::1", r"\[IPv6 address\]"),
        ("etcd://h/jobs", "no path"),
        ("etcd://@h", "no user"),
        ("etcd://bob@h", "found user bob without a password"),
        ("etcd://h?colour=red", "unknown option 'colour'; want cacert, cert, key"),
        ("etcds://h?cacert=", "want cacert= once and with a file name"),
        ("etcds://h?cacert=/no/such/file", "cacert=/no/such/file: want a readable file"),
        ("etcds://h?cert=/dev/null", "want cert= and key= together"),
    ],
)
def test_a_wrong_url_is_refused_with_what_is_wanted(text: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        StoreUrl.parse(text)
