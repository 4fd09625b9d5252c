"""`run` in a job that is resized in place: trains, leaves a World that changes, enters the next one."""

from __future__ import annotations

import functools
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from baguarun.comm.agreement import Declaration, describe_difference
from baguarun.comm.control import ControlChannel
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.world import enter_world
from baguarun.contract import ControlMessage, Topic, WorkerEnv, World
from baguarun.elastic.training import comparison, replicated, standby, streaming
from baguarun.elastic.training.catching_up import CatchingUp
from baguarun.elastic.training.checkpoints import CheckpointError
from baguarun.elastic.training.default_group import device
from baguarun.elastic.training.patience import Patience
from baguarun.elastic.training.positions import Standing
from baguarun.elastic.training.state import State
from baguarun.elastic.training.switching import News, SwitchBoundary
from baguarun.errors import CommunicationError, UsageError

R = TypeVar("R")

_ABORTS = (Topic.ABORT, Topic.SWITCH, Topic.LEAVE)


class WorldEnds(Exception):
    """All ranks leave the World at this commit. Private to this package."""

    def __init__(self, news: News) -> None:
        super().__init__("all workers leave this World here")
        self.halts = news.halts


class InPlaceRun:
    """One worker's way through the Worlds of its job. Threads: the one that trains."""

    def __init__(self, state: State, channel: ControlChannel, env: WorkerEnv) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "baguarun.elastic.run: there is no process group; call baguarun.init_process_group()"
            )
        captured = state._captured
        replicated.require_replicas(captured)
        replicated.require_one_kind(captured)
        replicated.require_optimizers(captured)
        for name, value in replicated.collect(captured).items():
            streaming.require_sendable(name, value)
        if state._folder is not None:
            state._folder.may_publish = lambda: channel.is_leased
        self._state = state
        self._captured = captured
        self._channel = channel
        self._env = env
        self._models = [each for each in captured.values() if isinstance(each, DistributedDataParallel)]
        # What may break behind an optimizer's step.
        self._exchanging = [model for model in self._models if model.algorithm.exchanges_weights]
        self._catching_up = CatchingUp(state, self._before_step)
        self._patience = Patience(env.detect_timeout_s)
        self._declaration = comparison.declare(captured)
        self._generation = env.generation
        self._told = News(env.generation)
        self._is_told_to_leave = False
        self._is_in_world = False
        self._is_valid = False
        # What ends training in this World when the script is done with the step that it has committed.
        self._ending: Exception | None = None
        self._boundary: SwitchBoundary | None = None
        self._has_told_first_step = False

    @property
    def is_newcomer(self) -> bool:
        """Whether this process was started to be taken in by others."""
        return self._env.generation == 0

    def prepare(self, arguments: Iterable[object]) -> None:
        """Do what can be done before a newcomer is taken in; `arguments` are the training function's."""
        self._tell(Topic.ARRIVED)
        standby.start_loaders(arguments)
        self._catching_up.landing = standby.own_memory(self._captured)

    def train(self, train: Callable[[], R]) -> R:
        """What `train` returns, called again in each World. Raises what it raises for reasons of its own."""
        self._state._watcher = self
        try:
            while True:
                try:
                    if not self._is_in_world:
                        self._join_world()
                    result = train()
                    self._finish()
                    for model in self._models:
                        model.keep_committed(False)
                    return result
                except WorldEnds as end:
                    self._part(halts=end.halts)
                except Exception as error:
                    if not self._is_about_the_world(error):
                        raise
                    reason = _first_line(error)
                    # Frames of the training function hold its loader and its graph.
                    error.__traceback__ = None
                    if self._is_in_world:
                        self._catching_up.end_world(is_whole=False)
                    self._await_news(reason)
                self._is_in_world = False
        finally:
            self._state._watcher = None

    def _before_step(self) -> None:
        if self._is_in_world and self._boundary is not None:
            self._look_for_news()
            self._boundary.before_step(self._told)

    # What State calls.

    def before_commit(self) -> None:
        self._catching_up.applied.before_commit()
        for model in self._exchanging:
            model.end_left_out_step()

    def after_commit(self) -> None:
        self._catching_up.commit()
        self._channel.note(self._generation, self._state._steps)
        if not self._has_told_first_step:
            self._has_told_first_step = True
            self._tell_progress()

    def at_boundary(self, write_if_due: Callable[[], None], *, may_wait: bool) -> None:
        assert self._boundary is not None
        try:
            for model in self._exchanging:
                model.require_ended()
            write_if_due()
            self._look_for_news()
            newest = self._boundary.at_commit(self._told)
        except Exception as error:
            if not may_wait or not self._is_about_the_world(error):
                raise
            self._ending = error
            return
        if newest is not None:
            self._ending = WorldEnds(newest)
            if not may_wait:
                raise self._ending

    def check(self) -> None:
        if self._ending is not None:
            # What the script has done since the commit, with no step begun, is to last as well.
            self._catching_up.copies.commit(self._captured)
            raise self._ending

    # Leaving a World.

    def _finish(self) -> None:
        """Training is done here: wait for the others, and go on with them if the World changes meanwhile."""
        assert self._boundary is not None
        self.check()
        for model in self._exchanging:
            model.require_ended()
        self._look_for_news()
        newest = self._boundary.at_end(self._told)
        if newest is not None:
            raise WorldEnds(newest)
        self._tell_progress(ends=True)

    def _part(self, *, halts: bool) -> None:
        """All have come to the same commit: share what each has trained on alone, as some may go for good,
        and wait until nobody needs a message of another one any more."""
        assert self._boundary is not None
        self._ending = None
        try:
            if halts:
                self._keep()
            if self._catching_up.replicas_differ:
                self._catching_up.share_weights()
            self._boundary.farewell()
            is_whole = True
        except dist.DistError:
            # Somebody is lost just now, which the next World takes into account.
            is_whole = not self._catching_up.replicas_differ
            if self._state._folder is not None:
                # Who is lost has not written its part, and nobody is to wait for that.
                self._state._folder.leave_world()
        self._look_for_news()
        self._leave_if_told()
        self._catching_up.end_world(is_whole=is_whole)

    def _keep(self) -> None:
        """The job halts here: leave a checkpoint to go on from, each replica in it as it is."""
        try:
            told = self._state._keep()
        except CheckpointError as error:
            # All ranks are here with the same error. Going is what is asked for, with or without.
            told = f"no checkpoint of the last commit: {error}"
        if told and dist.get_rank() == 0:
            print(f"baguarun: {told}", file=sys.stderr, flush=True)

    def _leave_if_told(self) -> None:
        if self._is_told_to_leave:
            self._state.close()
            raise SystemExit(0)

    def _is_about_the_world(self, error: BaseException) -> bool:
        """Whether communication failed, or what else came of it."""
        found: BaseException | None = error
        while found is not None:
            if isinstance(found, (CommunicationError, dist.DistError, WorldEnds)):
                return True
            found = found.__cause__ or found.__context__
        return False

    def _await_news(self, reason: str) -> None:
        """Communication broke: return when the agent has said why, complaining if it does not."""
        self._ending = None
        self._look_for_news()
        # Who is silent is lost to the transport already, and what others find out the leader waits for.
        silence = is_silence(reason)
        give_up_at_s = time.monotonic() + (0.0 if silence else self._patience.news_s)
        while self._told.generation <= self._generation:
            message = self._channel.next(max(0.0, give_up_at_s - time.monotonic()))
            if message is not None:
                self._note(message)
            elif time.monotonic() >= give_up_at_s:
                blame = {"rank": blamed(reason), "silence": silence, "reason": reason}
                self._tell(Topic.SUSPECT, generation=self._generation, **blame)
                give_up_at_s = float("inf")

    def _look_for_news(self) -> None:
        pending = self._channel.pending
        if pending is not None:
            self._note(pending)

    def _note(self, message: ControlMessage) -> None:
        if message.topic in _ABORTS:
            news = News(int(message.body["generation"]), bool(message.body.get("halts")))
            self._told = max(self._told, news)
            self._is_told_to_leave |= message.topic is Topic.LEAVE

    def _tell_progress(self, **more: Any) -> None:
        self._tell(Topic.PROGRESS, generation=self._generation, steps=self._state._steps, **more)

    def _tell(self, topic: Topic, **body: Any) -> None:
        self._channel.send(ControlMessage(topic, body))

    # Entering a World.

    def _join_world(self) -> None:
        if self._env.generation > 0 and self._generation == self._env.generation and self._boundary is None:
            self._begin_first_world()
        else:
            self._enter(*self._await_world())
        for model in self._models:
            model.keep_committed()
        if not self._catching_up.copies.is_second_pass:
            self._catching_up.copies.commit(self._captured)
        self._is_in_world = True
        self._has_told_first_step = False
        # First: these are not steps of its own.
        self._tell_progress(begins=True)
        self._channel.note(self._generation, self._state._steps)

    def _begin_first_world(self) -> None:
        """The World that this process was started for."""
        self._boundary = self._make_boundary()
        self._tell(Topic.PROGRESS, generation=self._generation, steps=0)
        self._exchange_standings()
        comparison.require_equal(self._captured)
        self._state._first_world_size = dist.get_world_size()
        self._state.resume()
        self._is_valid = True

    def _await_world(self) -> tuple[World, socket.socket]:
        """Say that this worker is ready, and wait for the World to enter and the socket to host it."""
        self._leave_if_told()
        listener = _listen()
        ready = {"port": listener.getsockname()[1], "steps": self._state._steps}
        self._tell(Topic.READY, generation=self._generation, **ready)
        while True:
            message = self._channel.next(3600.0)
            if message is None:
                continue
            if message.topic is Topic.WORLD:
                world = World(**{**message.body, "local_ranks": tuple(message.body["local_ranks"])})
                if world.generation > self._generation:
                    return world, listener
                continue
            told = self._told
            self._note(message)
            self._leave_if_told()
            if self._told > told:
                self._tell(Topic.READY, generation=self._generation, **ready)

    def _enter(self, world: World, listener: socket.socket) -> None:
        self._generation = world.generation
        self._told = max(self._told, News(world.generation))
        if self._state._folder is not None:
            self._state._folder.leave_world()
        with listener, self._patience.meeting(world.generation) as bound:
            enter_world(
                world,
                rank=world.rank_of(self._env.local_rank),
                listener=listener,
                channel=self._channel,
                within=bound,
            )
            # First: who does not fit in goes alone, while models that differ end all ranks.
            standings = self._exchange_standings()
            for model in self._models:
                model.enter_world()
            self._boundary = self._make_boundary()
        self._catching_up.go_on(standings, self._generation)
        self._is_valid = True

    def _make_boundary(self) -> SwitchBoundary:
        return SwitchBoundary(
            self._generation,
            in_step=not self._catching_up.replicas_differ,
            is_change_near=lambda: self._channel.expects_newcomers,
        )

    def _exchange_standings(self) -> list[Standing]:
        """Where all ranks stand, whose states fit together. Collective over the default group."""
        mine = self._catching_up.standing(valid=self._is_valid)
        numbers = [mine.valid, mine.committed, mine.sub_steps, mine.is_whole, mine.node]
        declaration = comparison.with_models(self._declaration, self._captured)
        row = torch.tensor([*map(int, numbers), comparison.digest(declaration)], device=device())
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        with _communicating():
            dist.all_gather(rows, row)
        found = torch.stack(rows).tolist()
        standings = [
            Standing(valid=bool(valid), committed=steps, sub_steps=sub, is_whole=bool(is_whole), node=node)
            for valid, steps, sub, is_whole, node, _ in found
        ]
        if len({digest for *_, digest in found}) > 1:
            self._part_from_strangers(standings, declaration)
        return standings

    def _part_from_strangers(self, standings: list[Standing], declaration: Declaration) -> NoReturn:
        """Raise `UsageError` on ranks whose state differs from that of the first one with a state to go on
        from, or rank 0's. They go; the others go on, in another World."""
        declarations: list[Declaration | None] = [None] * len(standings)
        with _communicating():
            dist.all_gather_object(declarations, declaration)
        wanted = declarations[next((rank for rank, each in enumerate(standings) if each.valid), 0)]
        assert wanted is not None
        if declaration != wanted:
            # This rank among ranks that all fit together, so that it is named by its number.
            shown = [declaration if rank == dist.get_rank() else wanted for rank in range(len(standings))]
            raise UsageError(f"this worker does not fit in: {describe_difference(shown)}")
        raise CommunicationError("workers that do not fit in are in this World; another one follows")


@contextmanager
def _communicating() -> Iterator[None]:
    """Around collectives that may be a World's first: Gloo says that a rank is gone by any `RuntimeError`."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"ranks could not tell each other where they stand: {error}") from error


def control_channel(env: WorkerEnv) -> ControlChannel | None:
    """This process's only channel to its agent; None if the job is not resized in place."""
    return None if env.control_fd is None else _channel_on(env.control_fd)


@functools.cache
def _channel_on(descriptor: int) -> ControlChannel:
    return ControlChannel(descriptor)


def _listen() -> socket.socket:
    """A socket that listens on a free port of all of this host's addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def blamed(reason: str) -> int | None:
    """The rank of the World that the transport blames, which it names first, with its address, or as the
    first of those that did not come; None for other errors."""
    found = re.search(r"\brank (\d+) \(|\bdid not come within \d+ ms: (\d+)", reason)
    if found is None:
        return None
    rank = int(found[1] or found[2])
    # Of a group of some of the ranks, it counts within that.
    some = re.search(r"\(its ranks are the World's (\d+(?:, \d+)*)\): ", reason[: found.start()])
    return rank if some is None else int(some[1].split(", ")[rank])


def is_silence(reason: str) -> bool:
    """Whether the transport heard nothing from whom it blames, though no connection ended."""
    return "no sign of life for" in reason


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
