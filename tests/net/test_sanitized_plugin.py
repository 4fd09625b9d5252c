"""The plugin's tests again, with a plugin under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.net import native

FILES = ("test_abi", "test_connect", "test_messages", "test_ends", "test_wire", "test_namespaces")


def file_of(name: str) -> str:
    """Where the compiler has one of its run-time libraries."""
    command = [*native.compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_plugin_s_tests_pass_under_sanitizers() -> None:
    plugin = native.plugin(native.ADDRESS_SANITIZER)
    # The sanitizer looks for the C++ library's functions when it starts, before Python has loaded it.
    runtimes = [file_of(name) for name in ("libasan.so", "libstdc++.so")]
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(str(folder / f"{name}.py") for name in FILES)]
        # The size, the needs and the speed of what is shipped are another plugin's.
        + ["-k", "not exports and not neither_torch and not different_speed"],
        capture_output=True,
        text=True,
        cwd=native.ROOT,
        env={
            **os.environ,
            "BAGUA_TEST_PLUGIN": str(plugin),
            "LD_PRELOAD": " ".join(runtimes),
            # Python itself does not free all that it has.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        },
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
