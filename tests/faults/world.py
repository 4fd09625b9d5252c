"""The ranks' processes, and one round on them."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType

from tests.faults import rank as ranks
from tests.faults.plan import Fault, Layout, Round
from tests.faults.rank import Answer, Command, Failed, Join, Leave, Place, Resources, Run
from tests.lab import Host
from tests.lab.namespaces import NAMESPACE_DIR

ANSWER_S = 40.0
"""A rank that takes longer hangs."""


class RoundError(Exception):
    """What went otherwise than it should in a round."""


@dataclass
class Life:
    """One process, and what it held after its first and its latest group."""

    process: ForkServerProcess
    link: Connection
    first: Resources | None = None
    last: Resources | None = None
    groups: int = 0


@dataclass(frozen=True, kw_only=True)
class Played:
    """How a round went."""

    round: Round
    detected_s: dict[int, float]
    """From the fault to the error. Where a timeout tells, from the start of the call that failed if that came
    later: the root of a broadcast goes on as long as the network takes what it sends."""
    texts: dict[int, str]


@dataclass
class World:
    """All ranks of `layout`, on the lab's `hosts` or, without any, on this machine. Use it in `with`."""

    layout: Layout
    hosts: Sequence[Host]
    scratch: Path
    lives: dict[int, Life] = field(default_factory=dict)
    ended: list[Life] = field(default_factory=list)
    """Replaced ones."""
    groups: int = 0

    def __enter__(self) -> World:
        for rank in range(self.layout.size):
            self._start(rank)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for rank in list(self.lives):
            self._end(rank)

    def form(self) -> None:
        """All ranks form a new group; raises RoundError if they do not."""
        self.groups += 1
        self._tell(self.lives, Join(self.groups))
        for rank, answer in self._answers(self.lives).items():
            if isinstance(answer, Failed):
                raise RoundError(f"rank {rank} did not form group {self.groups}: {answer.text}")

    def leave(self, members: Iterable[int]) -> None:
        """`members` drop their group and say what they still hold."""
        members = list(members)
        self._tell(members, Leave())
        for rank, answer in self._answers(members).items():
            assert isinstance(answer, Resources)
            life = self.lives[rank]
            life.first = life.first or answer
            life.last = answer
            life.groups += 1

    def play(self, round_: Round) -> Played:
        """The round, in a group that has formed; afterwards nobody is in a group and all are alive."""
        survivors = [rank for rank in self.lives if rank not in round_.lost]
        self._tell(self.lives, Run(round_))
        for rank, answer in self._answers(self.lives).items():
            if isinstance(answer, Failed):
                raise RoundError(f"rank {rank} failed before the fault: {answer.text}")
        time.sleep(round_.delay_s)
        began_s = time.monotonic()
        self._strike(round_)
        failures = self._failures(survivors)
        played = Played(
            round=round_,
            detected_s={
                rank: failure.at_s - max(began_s, failure.began_s if round_.fault.is_silent else 0.0)
                for rank, failure in failures.items()
            },
            texts={rank: failure.text for rank, failure in failures.items()},
        )
        self._undo(round_)
        if round_.returns:
            # They too, whatever the reason that they see.
            self._failures(round_.lost)
        else:
            for rank in round_.lost:
                self._end(rank)
        self.leave(self.lives)
        for rank in round_.lost:
            if rank not in self.lives:
                self._start(rank)
        return played

    def reset(self) -> None:
        """New processes for all, after a round that went wrong."""
        for host in self.hosts:
            host.heal()
        for rank in range(self.layout.size):
            if rank in self.lives:
                self._end(rank)
            self._start(rank)

    def _strike(self, round_: Round) -> None:
        if round_.fault is Fault.CUT:
            self.hosts[self.layout.host_of(round_.lost[0])].cut()
            return
        number = signal.SIGKILL if round_.fault is Fault.KILL else signal.SIGSTOP
        os.kill(self._pid(round_.lost[0]), number)

    def _undo(self, round_: Round) -> None:
        if round_.fault is Fault.CUT:
            self.hosts[self.layout.host_of(round_.lost[0])].heal()
        elif round_.fault is Fault.FREEZE and round_.returns:
            os.kill(self._pid(round_.lost[0]), signal.SIGCONT)

    def _failures(self, members: Iterable[int]) -> dict[int, Failed]:
        failures = {}
        for rank, answer in self._answers(members).items():
            assert isinstance(answer, Failed)
            failures[rank] = answer
        return failures

    def _tell(self, members: Iterable[int], command: Command) -> None:
        for rank in members:
            self.lives[rank].link.send(command)

    def _answers(self, members: Iterable[int]) -> dict[int, Answer]:
        waiting = {self.lives[rank].link: rank for rank in members}
        answers: dict[int, Answer] = {}
        deadline_s = time.monotonic() + ANSWER_S
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RoundError(f"ranks {sorted(waiting.values())} gave no answer within {ANSWER_S:.0f} s")
            for link in ready:
                assert isinstance(link, Connection)
                rank = waiting.pop(link)
                try:
                    answers[rank] = link.recv()
                except EOFError:
                    raise RoundError(f"rank {rank} died, exit code {self._exit_code(rank)}") from None
        return answers

    def _pid(self, rank: int) -> int:
        pid = self.lives[rank].process.pid
        assert pid is not None
        return pid

    def _exit_code(self, rank: int) -> int | None:
        process = self.lives[rank].process
        process.join(5)
        return process.exitcode

    def _start(self, rank: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.comm.preload", "tests.faults.rank"])
        namespace = None
        if self.hosts:
            namespace = NAMESPACE_DIR / self.hosts[self.layout.host_of(rank)].namespace
        place = Place(rank=rank, size=self.layout.size, namespace=namespace, store=self.scratch / "store")
        ours, theirs = context.Pipe()
        process = context.Process(target=ranks.main, args=(theirs, place), daemon=True)
        process.start()
        theirs.close()
        self.lives[rank] = Life(process, ours)

    def _end(self, rank: int) -> None:
        life = self.lives.pop(rank)
        life.process.kill()
        life.process.join()
        life.link.close()
        self.ended.append(life)


def complaints(played: Played, patience_s: float) -> list[str]:
    """What of the round is not as promised; `patience_s` is granted to a loaded machine."""
    wanted = [f"rank {rank}" for rank in played.round.lost]
    bound_s = played.round.fault.bound_s + patience_s
    found = []
    for rank, text in played.texts.items():
        if not any(re.search(rf"\b{name}\b", text) for name in wanted):
            found.append(f"rank {rank} does not name {' or '.join(wanted)}: {text}")
        if played.detected_s[rank] > bound_s:
            found.append(f"rank {rank} took {played.detected_s[rank]:.2f} s; want at most {bound_s:.2f} s")
    return found


def leaks(lives: Iterable[Life]) -> list[str]:
    """Processes that hold more after their last group than after their first."""
    found = []
    for life in lives:
        if life.first is not None and life.first != life.last:
            found.append(f"after 1 group {life.first}, after {life.groups} {life.last}")
    return found
