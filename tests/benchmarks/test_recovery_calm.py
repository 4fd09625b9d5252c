"""What the cost of in-place training is added up from."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from baguarun.comm import timeline
from benchmarks.recovery_calm import _launching, _spans, _threads_s


def test_spans_are_those_of_in_place_training_between_two_moments(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline.start(path)
    try:
        with timeline.span("commit", "elastic"):
            pass
        began_s = time.time()
        for name, category in [("commit", "elastic"), ("around", "elastic"), ("forward", "compute")] * 2:
            with timeline.span(name, category):
                time.sleep(0.01)
        ended_s = time.time()
        with timeline.span("commit", "elastic"):
            pass
    finally:
        timeline.stop()
    found = _spans(path, began_s, ended_s)
    assert {name: len(durations) for name, durations in found.items()} == {"commit": 2, "around": 2}
    spans = [span for each in found.values() for span in each]
    # They slept.
    assert all(span.wall_s >= 0.01 and 0 < span.cpu_s < span.wall_s for span in spans)


def test_what_launches_is_all_below_the_agents_but_the_workers() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE) as below:
        try:
            deadline_s = time.monotonic() + 60
            while len(_launching([below.pid], ())) < 2:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            own, child = _launching([below.pid], ())
            assert own == below.pid
            assert _launching([below.pid], {child}) == [below.pid]
            assert {below.pid, child} <= set(_launching([os.getpid()], ()))
        finally:
            assert below.stdin is not None
            below.stdin.close()


def test_threads_are_told_apart_by_name() -> None:
    seconds = []

    def compute() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("computing")
        while time.thread_time() < 0.05:
            pass
        seconds.append(_threads_s(os.getpid())["computing"])

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    # The kernel counts a thread's time now and then.
    assert seconds[0] >= 0.04
