"""The core without NCCL's face, in threads, also under sanitizers: see scenarios.cpp for what is asserted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.net import native

SOURCE = Path(__file__).parent / "scenarios.cpp"
SCENARIOS = [
    *("both-ways", "many-threads", "abort-ends-a-wait", "abort-midway", "deadline-ends-a-wait"),
    *("idle-is-quiet", "clear-errors", "limits", "no-limits-on-old-kernels", "a-late-end-loses-nothing"),
]


def run(program: Path, *words: str) -> None:
    environment = {**os.environ, "NCCL_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [str(program), *words], capture_output=True, text=True, timeout=170, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scenario", [*SCENARIOS, "nothing-leaks"])
def test_the_scenario_holds(scenario: str) -> None:
    run(native.program(SOURCE), scenario)


@pytest.mark.parametrize("scenario", [*SCENARIOS, "nothing-leaks"])
def test_the_scenario_holds_under_the_address_and_undefined_behaviour_sanitizers(scenario: str) -> None:
    run(native.program(SOURCE, native.ADDRESS_SANITIZER), scenario)


# The thread sanitizer has a thread of its own, which nothing-leaks would count.
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_scenario_holds_under_the_thread_sanitizer(scenario: str) -> None:
    run(native.program(SOURCE, native.THREAD_SANITIZER), scenario)


def test_a_message_of_more_than_two_gibibytes_arrives() -> None:
    run(native.program(SOURCE), "huge")


def test_the_plugin_may_be_used_from_many_threads_at_once() -> None:
    source = SOURCE.with_name("plugin_threads.cpp")
    run(native.program(source, native.THREAD_SANITIZER, parts=(*native.CORE, *native.PLUGIN)))
