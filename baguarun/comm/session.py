"""One model made data-parallel: the engine and what happens around forward, for wrapper and `with_bagua`."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from baguarun.comm import timeline
from baguarun.comm.accumulation import Accumulation
from baguarun.comm.agreement import Declaration, named_forms, refusals_told, require_same
from baguarun.comm.algorithms import Algorithm
from baguarun.comm.algorithms.base import EngineMemory
from baguarun.comm.algorithms.stages import GradientStages, StagedEngine
from baguarun.comm.algorithms.stepper import StepContext, Stepper
from baguarun.comm.backend import NAME as BAGUANET
from baguarun.comm.boundary import StepBoundary
from baguarun.comm.engine_plan import EnginePlan, make_spec
from baguarun.comm.engine_state import load_engine_state, take_engine_state
from baguarun.comm.extension import load_extension
from baguarun.comm.groups import engine_group, read_worker_env, require_group
from baguarun.comm.lanes import join_lanes
from baguarun.comm.legacy import Legacy, take_over_engine
from baguarun.comm.models import find_tensors, refuse_local, trainable_parameters
from baguarun.comm.rail_groups import join_rails
from baguarun.comm.replicas import broadcast_optimizer_state, broadcast_tensors, real_view
from baguarun.comm.settings import SessionSettings
from baguarun.comm.shared_buffers import SharedBuffers
from baguarun.comm.stats import CommunicationStats
from baguarun.comm.weighting import MicroBatch, backward_of_nothing, pass_inputs, weigh_gradients
from baguarun.comm.weights import FlatWeights
from baguarun.errors import CommunicationError, UsageError


class DataParallelSession:
    """Keeps the replicas of one module together. Collective over the process group to construct.

    Raises `UsageError` for a model that cannot be served, naming the parameter, on every rank if the ranks'
    models differ.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        algorithm: Algorithm,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        process_group: dist.ProcessGroup | None = None,
        settings: SessionSettings,
        legacy: Legacy | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.settings = settings
        self._module = module
        optimizers = optimizers or algorithm.own_optimizers()
        self.optimizers = tuple(optimizers)
        self._on_default_group = process_group is None or process_group is dist.group.WORLD
        self._legacy = legacy
        self._keeps_committed = legacy is not None and legacy.keeps_committed
        self._accumulation = Accumulation()
        self._buffers: SharedBuffers | None = None
        self._engine: Any = None
        self._staged: StagedEngine | None = None
        self._stepper: Stepper | None = None
        self._memory: EngineMemory | None = None
        self._boundary: StepBoundary | None = None
        self._forward_start_ns = 0
        with refusals_told(process_group):
            refuse_local(module)
            parameters = trainable_parameters(module)
            _require_optimizers(algorithm, optimizers)
            self._stages = algorithm.make_stages(parameters, optimizers)
            algorithm.check(read_worker_env())
        parent = require_group(process_group)
        self._parameters = [parameter for _, parameter in parameters]
        self.device = parameters[0][1].device
        timeline.start_if_asked()
        self._is_alone = dist.get_world_size(parent) == 1
        if self._is_alone:
            return
        if settings.broadcast_buffers:
            self._buffers = SharedBuffers(module)
        try:
            self._join(parent, parameters, optimizers)
        except BaseException:
            # Whoever keeps the error keeps this, too: its hooks must be gone.
            self.close()
            raise

    def _join(
        self,
        parent: dist.ProcessGroup,
        parameters: Sequence[tuple[str, nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Make what only several ranks need."""
        algorithm, settings, legacy = self.algorithm, self.settings, self._legacy
        # A rank that cannot load it says so before others wait for it.
        load_extension()
        # Before the engine's group is made: ranks that differ would make different ones.
        require_same(self._declare(settings), parent)
        self._plan = EnginePlan(algorithm, parameters, self.device, settings)
        self._group = engine_group(parent, self.device, arena_bytes=self._plan.arena_bytes)
        # Averages over all ranks go by rail of themselves on baguanet: no groups for them.
        with_few = algorithm.exchanges_with_few()
        weights = algorithm.exchanges_weights and (dist.get_backend(self._group) != BAGUANET or with_few)
        self._rails = join_rails(
            algorithm.hierarchy(), self._group, self.device, collectives=weights, with_few=with_few
        )
        goes_by_rail = self._rails is not None and self._rails.lanes
        is_flat = bool(self._plan.exchanged) or (weights and not with_few and not goes_by_rail)
        self._lanes = join_lanes(self._group, self.device) if is_flat else (self._group,)
        if settings.init_sync:
            broadcast_tensors(
                [real_view(tensor.detach()) for tensor in self._module.parameters()], self._group
            )
            broadcast_tensors([real_view(buffer) for buffer in self._module.buffers()], self._group)
            broadcast_optimizer_state(optimizers, self._group)
        if algorithm.exchanges_weights:
            kept = None if legacy is None else legacy.weights
            context = StepContext(
                weights=kept or FlatWeights(parameters),
                lanes=self._lanes,
                rails=self._rails,
                takes_over=legacy is not None,
            )
            self._stepper = algorithm.make_stepper(context)
            context.weights.drop_spare()
            self._boundary = StepBoundary(self._stepper, optimizers)
        if self._plan.exchanged:
            self._engine = self._plan.make_engine(self._lanes, self._rails)
            self._memory = algorithm.make_memory(self._engine)
            if self._stages is not None:
                self._memory = self._memory or self._stages.memory()
                self._staged = self._follow_stages(self._stages)
        if legacy is not None:
            self._take_over(legacy)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise UsageError(
            "a data-parallel model cannot be copied or pickled, as others take part in what it does; want a "
            "copy of what it wraps (`model.module`), or of its state_dict()"
        )

    def close(self) -> Legacy:
        """Let go of the module, without waiting for anybody; the group has been aborted. Drops gradients."""
        legacy = self._legacy or Legacy(keeps_committed=self._keeps_committed)
        engine = None if self._engine is None else self._engine.close()
        if self._memory is not None:
            legacy = dataclasses.replace(legacy, memory=self._memory.hand_over())
        if engine is not None:
            legacy = dataclasses.replace(legacy, engine=engine)
        if self._stepper is not None:
            weights = self._stepper.context.weights
            legacy = dataclasses.replace(legacy, stepper=self._stepper.hand_over(), weights=weights)
        if self._boundary is not None:
            self._boundary.close()
        for parameter in self._parameters:
            parameter.grad = None
        self._engine = self._staged = self._memory = self._stepper = self._boundary = None
        self._legacy = legacy
        return legacy

    def require_between_steps(self) -> None:
        """Raise `UsageError` in the middle of a backward, or, with an algorithm that exchanges weights, of a
        step: others would wait in vain for this rank's part of it."""
        if torch._C._current_graph_task_id() >= 0 or (
            self._boundary is not None and self._boundary.is_in_step()
        ):
            raise UsageError(
                f"{self.algorithm.name}: the model is in the middle of a step or of a backward; want all "
                "optimizers to have stepped before it is wrapped again"
            )

    def agree_to_end(self, process_group: dist.ProcessGroup | None) -> None:
        """Between steps, before `end`: all ranks mean to, after the same step. Else all raise `UsageError`.

        Collective over `process_group`, the one of construction.
        """
        if self._is_alone:
            return
        if self._boundary is not None:
            self._boundary.end_left_out()
            self._boundary.require_ended()
        steps = str(0 if self._stepper is None else self._stepper.steps)
        settings = (("the steps that the model was wrapped again after", steps),)
        require_same(Declaration(settings=settings), require_group(process_group))

    def end(self) -> list[dist.ProcessGroup]:
        """Finish what is under way, which counts, and let go of the module; drops gradients. The last call.

        Returns groups that are to be destroyed when all ranks have come out of here.
        """
        try:
            if self._engine is not None:
                self._engine.settle()
                self._engine.require_complete(again=False)
            if self._stepper is not None:
                self._stepper.finish()
        finally:
            self.close()
            self._stages = self._legacy = None
        if self._is_alone:
            return []
        # On an accelerator the engine has no group of its own.
        of_engine = self._lanes if self.device.type == "cpu" else ()
        of_rails = () if self._rails is None else (self._rails.node, *self._rails.lanes)
        return [group for group in (*of_rails, *of_engine) if group is not None]

    def require_complete(self, *, again: bool) -> None:
        """Before an optimizer's step: all communication of the last backward has ended well on this rank.

        With `again` what was found since the last commit stands: a World that is given up between the steps
        of two optimizers is no reason to take one only.
        """
        if self._engine is not None:
            self._engine.require_complete(again=again)
        elif not again and (reason := load_extension().interruption()) is not None:
            raise CommunicationError(f"the World is given up: {reason}")

    def end_left_out_step(self) -> None:
        """At a commit, with an algorithm that exchanges weights: a scaler may have left the step out here."""
        if self._boundary is not None:
            self._boundary.end_left_out()

    def require_ended(self) -> None:
        """After an optimizer's step: raise what broke the exchange behind it, if that was held."""
        if self._boundary is not None:
            self._boundary.require_ended()

    def shared_steps(self) -> tuple[int, int]:
        """Of an algorithm that exchanges weights: steps so far, and how many of them others have, too."""
        if self._stepper is None:
            return 0, 0
        return self._stepper.steps, self._stepper.shared_steps

    def keep_committed(self, keep: bool) -> None:
        """Between steps: whether `roll_back` is to be possible."""
        self._keeps_committed = keep
        if self._boundary is not None:
            self._boundary.holds_errors = keep
        if self._engine is not None:
            self._engine.keep_committed(keep)
        elif self._legacy is not None:
            self._legacy = dataclasses.replace(self._legacy, keeps_committed=keep)

    def commit(self) -> None:
        """Between steps: `roll_back` comes back to here."""
        if self._engine is not None:
            self._engine.commit()
            if self._memory is not None:
                self._memory.commit()
        elif self._legacy is not None:
            self._legacy = self._legacy.committed()

    def roll_back(self) -> None:
        """Between steps, also in the next World: owe by error feedback what was owed at the last commit."""
        if self._engine is not None:
            self._engine.roll_back()
            if self._memory is not None:
                self._memory.roll_back()
        elif self._legacy is not None:
            self._legacy = self._legacy.rolled_back()

    def common_state(self) -> dict[str, Any]:
        """What the algorithm has alike on all ranks, for one that is sent the state. Not weights."""
        return {} if self._memory is None else self._memory.common()

    def adopt_common_state(self, state: dict[str, Any]) -> None:
        """Between steps: what `common_state` gave on another rank of this World."""
        if self._memory is not None:
            self._memory.adopt_common(state)

    def prepare(self) -> None:
        """In a World of one: put weights where an algorithm that exchanges them wants them to be, and have
        the memory that it takes."""
        legacy = self._legacy or Legacy(keeps_committed=self._keeps_committed)
        if self.algorithm.exchanges_weights and self._stepper is None and legacy.weights is None:
            weights = FlatWeights(trainable_parameters(self._module))
            self.algorithm.prepare(weights)
            self._legacy = dataclasses.replace(legacy, weights=weights)

    def succeed(self) -> DataParallelSession:
        """The session of the same model on the default group of now. Collective over it; the last call."""
        if not self._on_default_group:
            raise UsageError(
                "the model was wrapped with a process_group of its own, which the new World does not have; "
                "want process_group=None for models of jobs that are resized in place"
            )
        return DataParallelSession(
            self._module,
            algorithm=self.algorithm,
            optimizers=self.optimizers,
            settings=self._settings_of_successor(),
            legacy=self.close(),
        )

    def declare_successor(self) -> Declaration:
        """What `succeed` would find compared with the other ranks, if it were called now."""
        return self._declare(self._settings_of_successor())

    def _settings_of_successor(self) -> SessionSettings:
        return dataclasses.replace(self.settings, init_sync=False)

    def _take_over(self, legacy: Legacy) -> None:
        # First: it may say which stage the engine is in, and what is owed has a place in that one only.
        if self._memory is not None:
            self._memory.take_over(legacy.memory, self._group)
            left = legacy.memory
            if legacy.keeps_committed and left is not None and left.get("committed") is None:
                # A World of one has committed since.
                self._memory.commit()
        if self._engine is not None:
            if self._staged is not None:
                self._staged.enter()
            take_over_engine(self._engine, legacy)
        if self._stepper is not None:
            self._stepper.take_over(legacy.stepper)
        self._legacy = None

    @property
    def stepper(self) -> Stepper | None:
        """What the algorithm does around steps; None if nothing, or in a World of one."""
        return self._stepper

    def before_forward(self) -> None:
        """Raise what the last step left to raise; overwrite buffers by rank 0's."""
        if self._boundary is not None:
            self._boundary.before_forward(trains=torch.is_grad_enabled() and self._module.training)
        if torch.is_grad_enabled() and self._engine is not None:
            self._engine.settle()
        # Before the engine agrees on anything: on another rank this is done by an evaluation. Not by one that
        # comes after a backward which has not ended: what that has launched comes first on other ranks.
        if (
            self._buffers is not None
            and self._buffers.are_due
            and self._shares_buffers()
            and not (self._engine is not None and self._engine.in_round())
        ):
            self._buffers.share(self._group)
        is_alone = self.settings.evaluates_alone and not self._module.training
        if torch.is_grad_enabled() and self._engine is not None:
            begins_round = self._accumulation.begins_round()
            self._engine.before_forward(begins_round and self._sends_gradients() and not is_alone)
            if begins_round and self._staged is not None:
                self._staged.enter()
        if torch.is_grad_enabled() and self._boundary is not None:
            self._boundary.start(at_once=not is_alone)
        self._forward_start_ns = timeline.now_ns()

    def pass_inputs(self, inputs: Any) -> Any:
        """What the module is given in place of them, between `before_forward` and its forward."""
        weight = self._accumulation.weight(of_step=self._sends_gradients())
        return inputs if weight == 1 else pass_inputs(inputs, weight)

    def after_forward(self, output: Any) -> Any:
        """Tell the engine whether the backward of this forward communicates. Returns what the script gets."""
        timeline.record_since(self._forward_start_ns, "forward", "compute")
        syncing = torch.is_grad_enabled() and self._accumulation.communicates
        if syncing and self._buffers is not None:
            self._buffers.are_due = True
        if (weight := self._accumulation.weight(of_step=self._sends_gradients())) != 1:
            output = weigh_gradients(output, weight)
        if syncing and self._boundary is not None:
            self._boundary.after_forward(find_tensors(output))
        if not self._is_alone:
            self._accumulation.watch_local(find_tensors(output))
        if self._engine is None:
            return output
        if syncing and self._sends_gradients():
            self._engine.after_forward(list(find_tensors(output)) if self._engine.needs_outputs() else [])
        else:
            self._engine.after_local_forward()
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Forwards inside it accumulate gradients locally, until a backward whose forward was outside."""
        return self._accumulation.no_sync(self._seen_backwards)

    def micro_batch(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Forwards inside it are of one part of a step; only the last part's backward communicates."""
        return self._accumulation.part(micro_batch)

    def take_part(self) -> None:
        """Forward and backward of a rank that has no sample in this step: it adds zero to the gradients."""
        with self.micro_batch(MicroBatch()):
            self.before_forward()
            if self._engine is not None and self._sends_gradients():
                if self._buffers is not None:
                    self._buffers.are_due = True
                if self._boundary is not None:
                    self._boundary.note_backward()
                self._engine.take_part()
                return
            scalar = backward_of_nothing(self._parameters)
            scalar = self.after_forward(scalar)
            scalar.backward()

    def stats(self) -> CommunicationStats:
        """Counters since construction."""
        found = CommunicationStats()
        if self._engine is not None:
            counted = self._engine.stats()
            found = CommunicationStats(
                steps=counted.steps,
                bytes_sent=counted.bytes_sent,
                buckets=counted.buckets,
                exposed_wait_s=counted.exposed_wait_s,
            )
        if self._stepper is not None:
            sent = found.bytes_sent + self._stepper.bytes_sent
            found = dataclasses.replace(found, weight_rounds=self._stepper.rounds, bytes_sent=sent)
        return found

    def algorithm_state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of the algorithm; taken after optimizer.step()."""
        kept = self._stepper or self._memory
        state = {} if kept is None else kept.state_dict()
        if self._keeps_engine_state():
            state["engine"] = take_engine_state(self._engine, self._plan.exchanged, self._group)
        return state

    def load_algorithm_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, on all ranks, after the model's weights have been loaded."""
        state = dict(state)
        of_engine = state.pop("engine", None)
        kept = self._stepper or self._memory
        if self._boundary is not None:
            self._boundary.forget()
        if kept is not None and state:
            kept.load_state_dict(state)
        elif self._stepper is not None:
            self._warn_of_state("the state is empty, as in a World of one: the algorithm begins anew")
            self._stepper.begin_anew()
        elif kept is not None:
            self._warn_of_state("the state is empty, as in a World of one: nothing is loaded")
        elif state and not self._is_alone:
            raise UsageError(
                f"{self.algorithm.name} keeps no state; found {', '.join(sorted(state))}; want the state of "
                "the same algorithm"
            )
        elif state:
            self._warn_of_state(f"{', '.join(sorted(state))} of the state is given up in a World of one")
        # After what says which stage the engine is in.
        if of_engine is not None:
            self._load_engine_state(of_engine)

    def _seen_backwards(self) -> tuple[int, bool]:
        """One of them grows with a backward whose forward was outside of no_sync."""
        steps = 0 if self._engine is None else self._engine.stats().steps
        return steps, self._boundary is not None and self._boundary.has_trained()

    def _keeps_engine_state(self) -> bool:
        """Whether the result of a step depends on what the engine has seen: blocks, or what is owed."""
        return self._engine is not None and (self._stages is not None or self._plan.sends_blocks())

    def _load_engine_state(self, state: dict[str, Any]) -> None:
        if not self._keeps_engine_state():
            self._warn_of_state(
                "the residuals in the state are given up (World of one, or an algorithm without)"
            )
            return
        if self._staged is not None:
            self._staged.enter()
        load_engine_state(load_extension(), self._engine, self._plan.exchanged, self._group, state)

    def _warn_of_state(self, what: str) -> None:
        warnings.warn(f"{self.algorithm.name}: {what}", stacklevel=5)

    def _sends_gradients(self) -> bool:
        return self._stepper is None or self._stepper.sends_gradients()

    def _shares_buffers(self) -> bool:
        return self._stepper is None or self._stepper.shares_buffers()

    def _follow_stages(self, stages: GradientStages) -> StagedEngine:
        parameters = [parameter for _, parameter in self._plan.exchanged]
        return StagedEngine(self._engine, stages, parameters, functools.partial(make_spec, rails=self._rails))

    def _declare(self, settings: SessionSettings) -> Declaration:
        named = [("algorithm", repr(self.algorithm)), ("device", self.device.type)]
        named += [(name, repr(value)) for name, value in dataclasses.asdict(settings).items()]
        if self._stages is not None:
            named.append(("optimizers", self._stages.describe()))
        tensors = named_forms(self._module.named_parameters()) + named_forms(self._module.named_buffers())
        return Declaration(settings=tuple(named), tensors=tuple(tensors))


def _require_optimizers(algorithm: Algorithm, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if algorithm.exchanges_weights and not optimizers:
        raise UsageError(
            f"{algorithm.name} exchanges weights around optimizer steps; want optimizers=[...], all that "
            "step this model"
        )
