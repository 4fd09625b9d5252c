"""Brings the ranks of a new World to where all go on from, by the parts that `positions.plan` has dealt."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.groups import read_worker_env
from baguarun.elastic.training import replicated, streaming
from baguarun.elastic.training.applied import AppliedSteps
from baguarun.elastic.training.committed import CommittedCopies
from baguarun.elastic.training.dealt import Account, carry_over, settle
from baguarun.elastic.training.default_group import device
from baguarun.elastic.training.positions import Standing, plan
from baguarun.elastic.training.random_state import begin_stream
from baguarun.elastic.training.sampler import FIRST_SAMPLES
from baguarun.elastic.training.state import State
from baguarun.elastic.training.streaming import Landing


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What a rank that may be out of step with others tells them of the World that has ended."""

    is_whole: bool
    """Whether all have left it at one commit, with the average of their weights."""
    world_size: int
    lost: int
    """Samples that were lost before, as far as this rank has counted them."""
    missed: int
    accounts: list[Account]
    """By sampler."""


class CatchingUp:
    """What one rank does with its `state`. Threads: the one that trains."""

    def __init__(self, state: State, before_step: Callable[[], None]) -> None:
        """`before_step` is called when gradients are there and an optimizer steps next."""
        self._state = state
        self._captured = state._captured
        self._models = [
            value for value in self._captured.values() if isinstance(value, DistributedDataParallel)
        ]
        self.landing = Landing()
        """Room for what the next World sends."""
        self.copies = CommittedCopies(self._captured)
        self.applied = AppliedSteps(
            [value for value in self._captured.values() if isinstance(value, torch.optim.Optimizer)],
            self._models,
            [value for value in self._captured.values() if isinstance(value, torch.amp.GradScaler)],
            before_step,
        )
        self.replicas_differ = any(model.algorithm.exchanges_weights for model in self._models)
        self._is_whole = True
        # Of the step under way, if optimizers have stepped in it: the number of its sampler, and its samples.
        self._applied_with: tuple[int, int] | None = None
        self._accounts: list[Account] = []
        self._old_world_size = 1
        # Of Worlds before this one, when a loss was settled: trained on here, and maybe not shared since.
        self._settled: list[Account] = []
        # Places of this World's data that the lost had shared: at the last exchange in which all took part.
        self._shared_to: list[tuple[int, int]] = []
        # By model: steps taken by the last commit.
        self._steps: list[int] = []
        # Those after each step since, with how many steps each model had taken; the oldest first.
        self._unshared: deque[tuple[list[int], list[tuple[int, int]]]] = deque()

    def standing(self, *, valid: bool) -> Standing:
        """Where this rank stands."""
        return Standing(
            valid=valid,
            committed=self._state._steps,
            sub_steps=self.applied.count,
            is_whole=self.applied.is_whole,
            node=read_worker_env().node_rank,
        )

    def commit(self) -> None:
        """A step ends here."""
        self._applied_with = None
        self._keep()
        if self.replicas_differ:
            counts = [model.shared_steps() for model in self._models]
            steps, shared = [taken for taken, _ in counts], [known for _, known in counts]
            if any(map(int.__lt__, steps, self._steps)):
                # The script has loaded a checkpoint: what was shared was of steps that are done again.
                self._forget_shared()
            self._steps = steps
            self._unshared.append((steps, self._places()))
            while self._unshared and all(map(int.__le__, self._unshared[0][0], shared)):
                _, self._shared_to = self._unshared.popleft()

    def _forget_shared(self) -> None:
        self._shared_to = []
        self._settled = []
        self._unshared.clear()

    def _keep(self) -> None:
        self.applied.commit()
        self.copies.commit(self._captured)

    def share_weights(self) -> None:
        """Make replicas that differ their average, at a commit that all have come to: who goes after that
        takes nothing along. Collective over the default group."""
        replicated.average(self._captured)
        # What no optimizer trains would be put back to what it was at the commit.
        self.copies.commit(self._captured)
        self._shared_to = self._places()
        self._unshared.clear()

    def _places(self) -> list[tuple[int, int]]:
        return [(sampler.epoch, sampler.cursor) for sampler in self._state._samplers]

    def end_world(self, *, is_whole: bool) -> None:
        """Training in a World is over; `is_whole`: at a commit, which all ranks have come to."""
        self._is_whole = is_whole
        if self.replicas_differ and self.applied.count > 0:
            # Its effect is in the weights, which stay.
            self._state._count_open_step()
            self._keep()
        if self.applied.count == 0:
            self._applied_with = None
        elif self._state._open is not None:
            sampler, deal, _ = self._state._open
            self._applied_with = self._state._samplers.index(sampler), deal.samples
        # Now: samplers are put to where the next World begins, and maybe more than once.
        self._accounts = self._take_accounts()
        self._old_world_size = dist.get_world_size()

    def go_on(self, standings: Sequence[Standing], generation: int) -> None:
        """Collective over the new default group."""
        self._generation = generation
        landing, self.landing = self.landing, Landing()
        part = plan(standings, replicas_differ=self.replicas_differ)[dist.get_rank()]
        if part.loads_checkpoint:
            self._begin_together(landing)
            return
        state = self._state
        received = None
        if part.receive_from is not None and not self.replicas_differ:
            # First: where it does not come, this rank stands where it stood, and may have to do the step.
            received = streaming.receive(part.receive_from, device(), landing)
        places, steps = self._places_of_step(), state._steps
        if part.rolls_back:
            self.copies.roll_back(self._captured, is_applied=part.is_applied)
            self.applied.redo(self.applied.counts)
            state._go_to(steps, places, together=False)
        weights_are_equal = True
        if self.replicas_differ:
            weights_are_equal = self._agree_out_of_step(standings)
            places, steps = state._all_places(committed=True), state._steps
        if part.send_to:
            sent = {
                "values": replicated.collect(self._captured),
                "places": places,
                "steps": steps,
                "first": state._first_world_size,
                "lost": (state._lost_samples, state._missed_samples),
                "applied": self.applied.counts,
                "algorithms": [model.common_state() for model in self._models],
            }
            streaming.send(sent, part.send_to, device())
        if part.receive_from is not None and self.replicas_differ:
            received = streaming.receive(part.receive_from, device(), landing)
        if received is not None:
            self._adopt(received, begins_anew=part.begins_anew)
            places, steps = received["places"], received["steps"]
            if part.is_applied and not part.rolls_back:
                # As on all others, what this pass leaves in the model and its algorithm does not count.
                self.copies.commit(self._captured)
                self.copies.begin_second_pass()
        newcomers = sum(not standing.valid for standing in standings)
        if newcomers and not weights_are_equal:
            survivors = len(standings) - newcomers
            replicated.average_newcomers(self._captured, newcomer=part.begins_anew, survivors=survivors)
        state._go_to(steps, places, together=False)
        samples = [place.get(FIRST_SAMPLES) for place in places]
        self._applied_with = next(((i, each) for i, each in enumerate(samples) if each is not None), None)
        self._is_whole = True
        # Where survivors keep their own weights nothing of them is shared yet, but with newcomers.
        self._shared_to = self._places() if weights_are_equal or part.begins_anew else []
        self._unshared.clear()

    def _places_of_step(self) -> list[dict[str, Any]]:
        """Where the step under way begins, and with how many samples it is applied already, if it is."""
        places = self._state._all_places(committed=True)
        if self._applied_with is not None:
            index, samples = self._applied_with
            places[index] = {**places[index], FIRST_SAMPLES: samples}
        return places

    def _adopt(self, received: dict[str, Any], *, begins_anew: bool) -> None:
        replicated.adopt(self._captured, received["values"], buffers=begins_anew)
        self._state._first_world_size = received["first"]
        self._state._lost_samples, self._state._missed_samples = received["lost"]
        if not self.replicas_differ:
            for model, common in zip(self._models, received["algorithms"], strict=True):
                model.adopt_common_state(common)
        if begins_anew:
            self._begin_stream()
        self.applied.begin()
        self.applied.redo(received["applied"])

    def _begin_together(self, landing: Landing) -> None:
        """All copies of the state are lost, or there was none yet."""
        state, world_size = self._state, dist.get_world_size()
        if state._folder is not None and state.load():
            state._first_world_size = state._first_world_size or world_size
            self.applied.begin()
            return
        if dist.get_rank() == 0:
            streaming.send(replicated.collect(self._captured), range(1, world_size), device())
        else:
            received = streaming.receive(0, device(), landing)
            replicated.adopt(self._captured, received, buffers=True)
            self._begin_stream()
        self.applied.begin()
        state._first_world_size = world_size
        state._go_to(0, [])

    def _begin_stream(self) -> None:
        begin_stream(torch.initial_seed(), self._generation, dist.get_rank())

    def _agree_out_of_step(self, standings: Sequence[Standing]) -> bool:
        """Ranks that are steps apart: all go on as the furthest counts, and deal what was not trained on.

        True: none are, and the weights of all are the average that they made at their last commit.
        """
        state = self._state
        mine = None
        if standings[dist.get_rank()].valid:
            mine = Knowledge(
                is_whole=self._is_whole,
                world_size=self._old_world_size,
                lost=state._lost_samples,
                missed=state._missed_samples,
                accounts=self._accounts,
            )
        everyone: list[Knowledge | None] = [None] * len(standings)
        dist.all_gather_object(everyone, mine)
        known = [each for each in everyone if each is not None]
        if all(each.is_whole for each in known):
            return True
        valid = [rank for rank, standing in enumerate(standings) if standing.valid]
        top = max(valid, key=lambda rank: standings[rank].committed)
        if mine is not None:
            self._follow(top, [rank for rank in valid if rank != top])
            self._settle(known)
            state._places = state._all_places()
            state._committed = [sampler.place for sampler in state._samplers]
            state._steps = standings[top].committed
            self.applied.commit()
        return False

    def _settle(self, known: Sequence[Knowledge]) -> None:
        """Deal what is lost again, and count it. May be done once more, if another one is lost before this
        World begins: then by what is settled here."""
        with_few = any(model.algorithm.exchanges_with_few() for model in self._models)
        redealt = left_behind = 0
        settled = []
        slots = zip(*(each.accounts for each in known), strict=False)
        for sampler, own, accounts in zip(self._state._samplers, self._accounts, slots, strict=False):
            settlement = settle(
                accounts,
                length=sampler.length,
                world_size=max(each.world_size for each in known),
                with_few=with_few,
            )
            sampler.go_on_from(settlement)
            settled.append(settlement.account_of(own))
            redealt += settlement.redealt
            left_behind += settlement.left_behind
        # Who has settled the loss before has counted it, and others may not have come to that.
        self._state._lost_samples = min(each.lost for each in known) + redealt + left_behind
        self._state._missed_samples = min(each.missed for each in known) + left_behind
        self._accounts = self._settled = settled
        self._old_world_size = len(known)
        self._report(redealt, left_behind)

    def _take_accounts(self) -> list[Account]:
        samplers = self._state._samplers
        shared_to = self._shared_to + [(0, 0)] * len(samplers)
        accounts = [
            sampler.account(shared_to=place, is_whole=self._is_whole)
            for sampler, place in zip(samplers, shared_to, strict=False)
        ]
        if self._is_whole or self._shared_to:
            return accounts
        carried = [carry_over(before, now) for before, now in zip(self._settled, accounts, strict=False)]
        return carried + accounts[len(carried) :]

    def _follow(self, top: int, others: Sequence[int]) -> None:
        if dist.get_rank() == top:
            streaming.send(replicated.collect_without_weights(self._captured), others, device())
        else:
            replicated.adopt_without_weights(self._captured, streaming.receive(top, device()))

    def _report(self, redealt: int, left_behind: int) -> None:
        if dist.get_rank() == 0 and redealt + left_behind > 0:
            also = f"; about {left_behind} more are of an epoch that has ended" if left_behind else ""
            print(
                f"baguarun: what came of {redealt} samples is lost with a worker that had not shared it; "
                f"they are dealt again{also}",
                file=sys.stderr,
                flush=True,
            )
