"""The transport's settings for workers: the plugin for NCCL (`--bagua-net`), the job's secret, signs of life.

Variables of the process are all that NCCL needs, so this works for any program that the launcher starts.
"""

from __future__ import annotations

import os
from pathlib import Path

from baguarun.errors import SetupError, UsageError
from baguarun.launcher.settings import ElasticMode, RunSettings

PLUGIN = Path(__file__).resolve().parents[1] / "lib" / "libnccl-net-baguanet.so"
"""Built with the package (scripts/nccl_plugin.py)."""
SECRET = "BAGUA_NET_SECRET"
BEAT_TIMEOUT = "BAGUA_NET_BEAT_TIMEOUT_S"
_NAME = "BaguaNet"
_BEATS_OF_DETECTION = 0.5
"""Of the detection time: a silence is found up to a quarter later, and the rest is for meeting again."""
_LONGEST_PATH = 254
"""NCCL cuts what is longer, and then looks for another file."""


def check(settings: RunSettings, *, without_store: bool) -> list[str]:
    """What to tell the user who asked for the plugin; raises when it is missing or another one is set."""
    if not settings.bagua_net:
        return []
    path = os.fspath(PLUGIN)
    if not PLUGIN.is_file():
        raise SetupError(
            f"--bagua-net: the NCCL plugin {path} is missing: run make setup, or "
            "pip install --no-build-isolation . again"
        )
    if len(path) > _LONGEST_PATH:
        raise SetupError(
            f"--bagua-net: {path}: the path has {len(path)} characters and NCCL takes {_LONGEST_PATH}; "
            "install baguarun in a folder with a shorter name"
        )
    for name, value in _plugin_environ().items():
        found = settings.environ.get(name)
        if found and found != value and not (name == "NCCL_NET" and found.lower() == value.lower()):
            raise UsageError(
                f"--bagua-net, {name}={found}: want one of them; unset {name} (--bagua-net sets it to "
                f"{value}), or leave out --bagua-net"
            )
    notices = [
        f"NCCL is to use {path}; run with NCCL_DEBUG=INFO and look for a line with "
        f'"NET/{_NAME} : using" to see that it does'
    ]
    if without_store and settings.max_nodes > 1 and not settings.environ.get(SECRET):
        notices.append(
            f"--bagua-net: nodes without a store cannot agree on a secret; set the same {SECRET} on all of "
            "them to keep others off the workers' ports"
        )
    return notices


def worker_environ(settings: RunSettings, job_secret: str) -> dict[str, str]:
    """What workers get beyond what they inherit. A secret that the user set on this node is kept."""
    environ = _plugin_environ() if settings.bagua_net else {}
    if job_secret and not settings.environ.get(SECRET):
        environ[SECRET] = job_secret
    if settings.elastic is ElasticMode.IN_PLACE and not settings.environ.get(BEAT_TIMEOUT):
        environ[BEAT_TIMEOUT] = f"{_BEATS_OF_DETECTION * settings.detect_timeout_s:g}"
    return environ


def _plugin_environ() -> dict[str, str]:
    return {
        "NCCL_NET_PLUGIN": os.fspath(PLUGIN),
        # Without a name NCCL falls back to its own sockets in silence when a plugin does not start.
        "NCCL_NET": _NAME,
        # Else NCCL 2.28 and 2.29 unload the plugin with the last communicator and cannot load it again.
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
    }
