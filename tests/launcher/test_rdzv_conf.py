from __future__ import annotations

import pytest

from baguarun.errors import UsageError
from baguarun.launcher.rdzv_conf import detect_timeout_s, etcd_url, is_host, join_timeout_s, parse_rdzv_conf


def test_pairs_may_have_spaces_and_an_empty_conf_says_nothing() -> None:
    assert parse_rdzv_conf(" join_timeout = 5 , is_host=true,", for_etcd=False) == {
        "join_timeout": "5",
        "is_host": "true",
    }
    assert parse_rdzv_conf("", for_etcd=False) == {}


def test_silence_is_as_long_as_torchruns_interval_times_attempts() -> None:
    assert detect_timeout_s({}) is None
    assert detect_timeout_s({"keep_alive_interval": "2"}) == 6.0
    assert detect_timeout_s({"keep_alive_max_attempt": "2"}) == 10.0
    assert detect_timeout_s({"keep_alive_interval": "1", "keep_alive_max_attempt": "4"}) == 4.0


def test_timeout_is_etcds_name_for_the_join_timeout() -> None:
    assert join_timeout_s(parse_rdzv_conf("timeout=9", for_etcd=True)) == 9.0
    with pytest.raises(UsageError, match="--rdzv-conf timeout=9: want one of"):
        parse_rdzv_conf("timeout=9", for_etcd=False)


def test_the_host_may_be_named_or_left_open() -> None:
    assert [is_host(conf) for conf in ({}, {"is_host": "True"}, {"is_host": "no"})] == [None, True, False]
    with pytest.raises(UsageError, match="is_host=perhaps: want true or false"):
        parse_rdzv_conf("is_host=perhaps", for_etcd=False)


@pytest.mark.parametrize(
    ("endpoint", "conf", "url"),
    [
        ("e", {}, "etcd://e:2379"),
        ("e:1, f", {}, "etcd://e:1,f:2379"),
        ("[fd00::1]", {}, "etcd://[fd00::1]:2379"),
        ("[fd00::1]:5", {"protocol": "http"}, "etcd://[fd00::1]:5"),
        ("e", {"protocol": "https"}, "etcds://e:2379"),
        (
            "e",
            {"ssl_cert": "/a b.pem", "ssl_cert_key": "/k&?.pem", "ca_cert": "/ca.pem"},
            "etcds://e:2379?cacert=/ca.pem&cert=/a%20b.pem&key=/k%26%3F.pem",
        ),
        ("e", {"cert": "/c", "key": "/k", "cacert": "/ca"}, "etcds://e:2379?cacert=/ca&cert=/c&key=/k"),
    ],
)
def test_torchruns_etcd_settings_become_one_url(endpoint: str, conf: dict[str, str], url: str) -> None:
    assert etcd_url(endpoint, conf) == url
