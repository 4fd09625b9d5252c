"""How soon a local rank gets its next process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from baguarun.contract import ControlMessage, Topic
from baguarun.elastic.membership.records import Process
from baguarun.launcher.crew import Crew, Worker
from baguarun.launcher.hang_watch import HangSettings
from baguarun.launcher.in_place_agent import InPlaceAgent, InPlaceSettings
from baguarun.launcher.metrics import AgentStatus
from baguarun.launcher.respawns import Respawns


def test_newcomers_that_fail_one_after_the_other_are_started_after_growing_pauses() -> None:
    respawns, now_s, pauses, grown = Respawns(), 100.0, [], []
    for _ in range(8):
        grown.append(respawns.failed(1, now_s, is_newcomer=True, steps=3, trained_s=0.5))
        pauses.append(respawns.wait_s(1, now_s))
        assert respawns.wait_s(0, now_s) == 0.0, "another local rank's failures are its own"
        now_s += pauses[-1]
        assert respawns.wait_s(1, now_s) == 0.0
        now_s += 20.0
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert grown == [True] * 6 + [False] * 2, "each growth is worth telling"


def test_who_has_trained_is_replaced_at_once_and_what_failed_before_it_is_forgotten() -> None:
    respawns = Respawns()
    for now_s in (10.0, 20.0, 30.0):
        respawns.failed(0, now_s, is_newcomer=True, steps=0, trained_s=0.0)
    assert respawns.wait_s(0, 30.0) == 4.0
    assert not respawns.failed(0, 40.0, is_newcomer=True, steps=10, trained_s=5.0)
    assert respawns.wait_s(0, 40.0) == 0.0
    respawns.failed(0, 50.0, is_newcomer=True, steps=0, trained_s=0.0)
    assert respawns.wait_s(0, 50.0) == 1.0


def test_many_steps_in_a_moment_or_few_in_long_are_no_training() -> None:
    for steps, trained_s in ((1000, 0.9), (9, 600.0)):
        respawns = Respawns()
        respawns.failed(0, 0.0, is_newcomer=True, steps=steps, trained_s=trained_s)
        assert respawns.wait_s(0, 0.0) == 1.0


def test_a_process_that_was_started_for_a_world_is_replaced_at_once() -> None:
    respawns = Respawns()
    assert not respawns.failed(0, 0.0, is_newcomer=False, steps=0, trained_s=0.0)
    assert respawns.wait_s(0, 0.0) == 0.0


def test_people_read_how_often_why_and_when_it_is_tried_again() -> None:
    respawns, said = Respawns(), []
    for _ in range(6):
        respawns.failed(2, 0.0, is_newcomer=True, steps=0, trained_s=0.0)
        said.append(respawns.describe(2, "no such file"))
    trained = "failed without having trained for long (no such file)"
    assert said[0] == f"local rank 2: the newcomer has {trained}; the next is started in 1 s"
    assert said[1] == f"local rank 2: 2 newcomers in a row have {trained}; the next is started in 2 s"
    assert said[5] == f"local rank 2: 6 newcomers in a row have {trained}; one more is started every 30 s"


def test_the_steps_that_a_newcomer_is_sent_are_not_its_own() -> None:
    newcomer = Worker(
        Process(0, 0, 1),
        *cast(Any, (None,) * 4),
        generation=3,
        rank=1,
        started_s=0,
        heard_s=0,
        signs=cast(Any, None),
    )
    crew = SimpleNamespace(living={newcomer.id: newcomer})
    settings = InPlaceSettings(
        slots=1,
        spares=0,
        detect_timeout_s=5.0,
        shutdown_timeout_s=5.0,
        node="n",
        hangs=HangSettings(limit=None, removes=False),
    )
    InPlaceAgent(cast(Crew, crew), AgentStatus(job_id="j", node="n"), print, settings)

    def say(topic: Topic, **body: Any) -> int:
        crew.on_message(newcomer, ControlMessage(topic, {"generation": 3, **body}))
        return newcomer.own_steps

    assert say(Topic.PROGRESS, steps=500, begins=True) == 0
    assert say(Topic.PROGRESS, steps=501) == 1
    assert say(Topic.PONG, steps=507) == 7
    assert say(Topic.READY, steps=508, port=1) == 8
    # What it lacked of a step that others had done.
    assert say(Topic.PROGRESS, steps=509, begins=True) == 8
