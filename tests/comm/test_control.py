"""The worker's end of the control channel."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.control import ControlChannel
from baguarun.contract import ControlDecoder, ControlMessage, Topic
from baguarun.errors import CommunicationError
from tests.comm.ranks import run_ranks


class Agent:
    """The other end."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(30)
        self._decoder = ControlDecoder()
        self.channel = ControlChannel(theirs.detach())

    def send(self, topic: Topic, **body: object) -> None:
        self.socket.sendall(ControlMessage(topic, body).encode())

    def receive(self) -> ControlMessage:
        while True:
            data = self.socket.recv(1)
            assert data
            for message in self._decoder.feed(data):
                return message


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.channel.close()
    made.socket.close()


def test_messages_come_out_in_order_whole_or_in_pieces(agent: Agent) -> None:
    framed = b"".join(
        ControlMessage(topic, {"generation": 2, "text": "x" * 5000}).encode()
        for topic in (Topic.WORLD, Topic.SWITCH)
    )
    agent.socket.sendall(framed[:3])
    assert agent.channel.next(0) is None
    agent.socket.sendall(framed[3:])
    found = [agent.channel.next(30), agent.channel.next(30)]
    assert [message.topic for message in found if message] == [Topic.WORLD, Topic.SWITCH]
    assert found[0] is not None and len(found[0].body["text"]) == 5000


def test_a_ping_is_answered_while_python_does_nothing_and_is_not_handed_out(agent: Agent) -> None:
    agent.send(Topic.PING, number=7)
    assert agent.receive() == ControlMessage(Topic.PONG, {"number": 7, "waits": False})
    agent.channel.send(ControlMessage(Topic.PROGRESS, {"generation": 1, "steps": 3}))
    assert agent.receive() == ControlMessage(Topic.PROGRESS, {"generation": 1, "steps": 3})
    assert agent.channel.next(0) is None


def test_answers_tell_of_the_steps_noted_last_and_how_long_they_kept_the_worker_busy(agent: Agent) -> None:
    def told() -> ControlMessage:
        agent.send(Topic.PING)
        return agent.receive()

    assert told().body == {"waits": False}
    began_s = time.monotonic()
    agent.channel.note(4, 10)
    assert told().body == {"waits": False, "generation": 4, "steps": 10, "busy_s": None}
    # In which it waits, for news.
    assert agent.channel.next(0.3) is None
    agent.channel.note(4, 11)
    agent.channel.note(4, 12)
    body = told().body
    assert (body["generation"], body["steps"]) == (4, 12)
    assert 0 <= body["busy_s"] <= time.monotonic() - began_s - 0.29
    assert told().body["busy_s"] == 0
    agent.channel.note(5, 12)
    assert told().body == {"waits": False, "generation": 5, "steps": 12, "busy_s": None}


def test_a_lease_runs_for_as_long_as_the_newest_ping_says(agent: Agent) -> None:
    def leased_after(**body: int) -> bool:
        agent.send(Topic.PING, **body)
        agent.receive()
        return agent.channel.is_leased

    assert agent.channel.is_leased
    assert leased_after()
    assert not leased_after(lease_ms=0)
    assert leased_after(lease_ms=3_600_000)
    assert not leased_after(lease_ms=0)


def test_newcomers_are_expected_as_the_newest_ping_says(agent: Agent) -> None:
    def expected_after(**body: object) -> bool:
        agent.send(Topic.PING, **body)
        agent.receive()
        return agent.channel.expects_newcomers

    assert not agent.channel.expects_newcomers
    assert not expected_after(lease_ms=5)
    assert expected_after(lease_ms=5, newcomers=True)
    assert not expected_after(newcomers=False)
    assert expected_after(newcomers=True)
    assert not expected_after()


def test_pending_is_the_newest_order_until_it_is_handed_out(agent: Agent) -> None:
    assert agent.channel.pending is None
    agent.send(Topic.SWITCH, generation=2, reason="a node joins")
    agent.send(Topic.LEAVE, generation=3, reason="scale down")
    agent.send(Topic.WORLD, generation=3)
    agent.send(Topic.PING)
    agent.receive()
    assert agent.channel.pending == ControlMessage(Topic.LEAVE, {"generation": 3, "reason": "scale down"})
    assert agent.channel.next(0) is not None and agent.channel.pending is not None
    assert agent.channel.next(0) is not None and agent.channel.pending is None
    assert agent.channel.next(0) is not None


def test_a_child_made_by_fork_has_no_channel(agent: Agent) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            agent.channel.send(ControlMessage(Topic.PROGRESS, {}))
            os._exit(1)
        except CommunicationError:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    agent.send(Topic.PING)
    assert agent.receive().topic is Topic.PONG


def test_a_worker_ends_when_its_agent_is_gone() -> None:
    ours, theirs = socket.socketpair()
    script = (
        "import sys; from baguarun.comm.control import ControlChannel\n"
        "channel = ControlChannel(int(sys.argv[1])); print('there', flush=True)\n"
        "while True: pass"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    assert worker.stdout is not None and worker.stdout.readline() == "there\n"
    ours.close()
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 1 and "agent of this worker" in said
    assert worker.returncode != -signal.SIGKILL


def abort_in_a_collective() -> str:
    agent = Agent()
    if dist.get_rank() == 0:
        agent.send(Topic.ABORT, generation=2, reason="node b is lost")
    try:
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            dist.recv(torch.zeros(1), 0)
    except dist.DistBackendError as error:
        return str(error)
    finally:
        agent.channel.close()
    return "it ended well"


def test_an_abort_ends_collectives_that_wait_for_others() -> None:
    assert all("node b is lost" in said for said in run_ranks(abort_in_a_collective, 2))


def ask_while_waiting() -> list[bool]:
    """Before a wait for the other rank, and until one that never ends without it has begun."""
    agent = Agent()
    told: list[bool] = []

    def ask() -> None:
        while not told or not told[-1]:
            agent.send(Topic.PING)
            told.append(agent.receive().body["waits"])

    agent.send(Topic.PING)
    before = agent.receive().body["waits"]
    asking = threading.Thread(target=ask)
    asking.start()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1)
    else:
        # Who waits for its agent waits, too.
        while asking.is_alive():
            agent.channel.next(0.05)
        dist.send(torch.zeros(1), 0)
    asking.join()
    agent.channel.close()
    return [before, told[-1]]


def test_an_answer_says_whether_the_process_waits_for_others() -> None:
    assert run_ranks(ask_while_waiting, 2) == [[False, True], [False, True]]


def groups_around_an_abort() -> list[str]:
    agent = Agent()
    said = []
    agent.channel.arm(5)
    for generation in (5, 6):
        agent.send(Topic.ABORT, generation=generation, reason=f"before {generation}")
        assert agent.channel.next(30) is not None
        said.append(str(agent.channel.interruption))
    agent.channel.arm(6)
    said.append(str(agent.channel.interruption))
    agent.channel.close()
    return said


def test_an_abort_for_a_generation_that_has_been_entered_is_past() -> None:
    assert run_ranks(groups_around_an_abort, 1) == [["None", "before 6", "None"]]
