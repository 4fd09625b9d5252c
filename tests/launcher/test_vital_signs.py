"""A silent worker: frozen, stuck, or waiting for a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from baguarun.launcher.vital_signs import VitalSigns, scheduled_s


def silence(spent_s: dict[float, float | None]) -> list[float]:
    """The silences at which a worker is lost, of those that are asked for in turn; D is 2 s."""
    asked = iter(spent_s.items())
    now = next(asked)
    signs = VitalSigns(1, 2.0, lambda pid: now[1])
    lost = []
    while True:
        if signs.is_lost(now[0]):
            lost.append(now[0])
        try:
            now = next(asked)
        except StopIteration:
            return lost


def test_one_that_is_not_scheduled_is_lost_when_the_time_is_over() -> None:
    assert silence({0.2: 7.0, 1.1: 7.0, 1.9: 7.0, 2.1: 7.0}) == [2.1]


def test_one_that_waits_for_a_cpu_is_not_lost_before_it_is_silent_for_very_long() -> None:
    assert silence({1.1: 7.0, 2.1: 7.9, 3.0: 8.5, 9.9: 15.0, 10.1: 15.2}) == [10.1]


def test_an_answer_begins_a_new_count() -> None:
    assert silence({1.1: 7.0, 0.1: 7.0, 1.2: 9.0, 2.1: 9.0}) == [2.1]


def test_without_a_count_only_the_time_decides() -> None:
    assert silence({1.1: None, 1.9: None, 2.1: None}) == [2.1]


def test_a_judge_who_comes_late_looks_twice() -> None:
    assert silence({3.0: 7.0, 3.2: 7.0}) == [3.2]


def test_a_stopped_process_is_not_scheduled_and_one_that_computes_is() -> None:
    program = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            before = scheduled_s(process.pid)
            assert before is not None
            while (scheduled_s(process.pid) or 0.0) < before + 0.2:
                time.sleep(0.01)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            stopped = scheduled_s(process.pid)
            time.sleep(0.2)
            assert scheduled_s(process.pid) == stopped
        finally:
            process.kill()


def test_of_a_process_that_has_ended_nothing_is_known() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert scheduled_s(process.pid) is None
