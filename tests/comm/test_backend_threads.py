"""The driver behind baguanet under ThreadSanitizer: no torch, one rank, many threads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.net import native

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_threads_may_use_a_group_at_once_while_it_is_aborted_or_closed(tmp_path: Path) -> None:
    cpp = native.ROOT / "cpp_ext"
    parts = [file for file in sorted((cpp / "net").glob("*.cc")) if file.stem != "shm_capi"]
    parts += sorted((cpp / "c10d").glob("*.cc"))
    program = native.program(HERE / "driver_threads.cc", native.THREAD_SANITIZER, parts=parts)
    # The counter of exception_ptr lies in libstdc++, where the sanitizer does not see that it is atomic.
    suppressions = tmp_path / "suppressions"
    suppressions.write_text("race:std::__exception_ptr::exception_ptr::_M_release\n")
    environ = {**os.environ, "TSAN_OPTIONS": f"suppressions={suppressions}"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=150, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
