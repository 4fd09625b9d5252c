"""torchrun's `--rdzv-conf`: which keys mean something here, and what."""

from __future__ import annotations

from collections.abc import Mapping

from baguarun.errors import UsageError

_NO_EFFECT = {
    "last_call_timeout": "a World forms at once at the most nodes, else shortly after the last arrival",
    "close_timeout": "nothing waits for the meeting to close",
    "heartbeat_timeout": "--detect-timeout rules",
    "read_timeout": "--detect-timeout rules",
    "use_libuv": "the agents meet in etcd",
}
_NUMBERS = ("join_timeout", "keep_alive_interval", "keep_alive_max_attempt", "timeout")
_ETCD = ("timeout", "protocol", "cert", "ssl_cert", "key", "ssl_cert_key", "cacert", "ca_cert")
_KNOWN = ("join_timeout", "keep_alive_interval", "keep_alive_max_attempt", "is_host", "store_type")
_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")


def parse_rdzv_conf(text: str, *, for_etcd: bool) -> dict[str, str]:
    """The pairs of `k=v,k=v`, every key known and every value of its kind."""
    conf: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise UsageError(f"--rdzv-conf={text}: want key=value pairs joined by commas, found {pair!r}")
        _check(key, value, for_etcd=for_etcd)
        conf[key] = value
    return conf


def join_timeout_s(conf: Mapping[str, str]) -> float | None:
    """Seconds to wait for enough nodes, if the conf says so."""
    value = conf.get("join_timeout", conf.get("timeout"))
    return None if value is None else float(value)


def detect_timeout_s(conf: Mapping[str, str]) -> float | None:
    """Seconds after which torchrun calls a silent node lost: interval times attempts (5 s and 3)."""
    if "keep_alive_interval" not in conf and "keep_alive_max_attempt" not in conf:
        return None
    return float(conf.get("keep_alive_interval", 5)) * float(conf.get("keep_alive_max_attempt", 3))


def is_host(conf: Mapping[str, str]) -> bool | None:
    """Whether this node serves the endpoint; None: find out by its addresses."""
    value = conf.get("is_host")
    return None if value is None else value.lower() in _TRUE


def etcd_url(endpoint: str, conf: Mapping[str, str]) -> str:
    """The store URL for torchrun's etcd backends: endpoint, port 2379 if it has none, TLS files."""
    from urllib.parse import quote

    hosts = ",".join(_with_port(host.strip()) for host in endpoint.split(","))
    files = {
        "cacert": conf.get("cacert", conf.get("ca_cert")),
        "cert": conf.get("cert", conf.get("ssl_cert")),
        "key": conf.get("key", conf.get("ssl_cert_key")),
    }
    query = "&".join(f"{name}={quote(path)}" for name, path in files.items() if path)
    scheme = "etcds" if conf.get("protocol") == "https" or query else "etcd"
    return f"{scheme}://{hosts}" + (f"?{query}" if query else "")


def no_effect_notices(conf: Mapping[str, str]) -> list[str]:
    """One line for each key that torchrun knows and that changes nothing here."""
    return [f"--rdzv-conf {key} has no effect: {_NO_EFFECT[key]}" for key in conf if key in _NO_EFFECT]


def _check(key: str, value: str, *, for_etcd: bool) -> None:
    known = (*_KNOWN, *_NO_EFFECT, *(_ETCD if for_etcd else ()))
    if key not in known:
        hint = "; use --node-rank" if key == "rank" else ""
        raise UsageError(f"--rdzv-conf {key}={value}: want one of {', '.join(known)}{hint}")
    if key in _NUMBERS:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf"):
            raise UsageError(f"--rdzv-conf {key}={value}: want a number above 0")
    if key == "store_type" and value != "tcp":
        raise UsageError(f"--rdzv-conf store_type={value}: want tcp; nodes meet over the network")
    if key == "protocol" and value not in ("http", "https"):
        raise UsageError(f"--rdzv-conf protocol={value}: want http or https")
    if key == "is_host" and value.lower() not in _TRUE + _FALSE:
        raise UsageError(f"--rdzv-conf is_host={value}: want true or false")


def _with_port(host: str) -> str:
    bare = host.rpartition("]")[2] if host.startswith("[") else host
    return host if ":" in bare else f"{host}:2379"
