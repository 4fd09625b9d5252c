"""What one session leaves to the next one of the same model, when the World has changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from baguarun.comm.extension import load_extension
from baguarun.comm.groups import device_of_group
from baguarun.comm.weights import FlatWeights
from baguarun.errors import CommunicationError

_ENGINE_FIELDS = ("order", "order_adopted", "residuals")


@dataclass(frozen=True, kw_only=True)
class Legacy:
    """Nothing of it is bound to a group. A World of one, which has no engine, hands it on as it is."""

    engine: Any = None
    """`baguarun._C.EngineState`: the order of buckets, and what this rank owes by error feedback."""
    keeps_committed: bool = False
    """Whether what was owed at the last commit is kept, for steps that are done again."""
    memory: dict[str, Any] | None = None
    """Of an algorithm that keeps something in the engine; "committed": what of it was otherwise then."""
    stepper: dict[str, Any] | None = None
    """Of an algorithm that exchanges weights; "trained_alone": a World of one has taken steps since."""
    weights: FlatWeights | None = None
    """Where the parameters live, for such an algorithm."""

    def committed(self) -> Legacy:
        """After a commit in a World of one: what is owed now is what was owed then."""
        if self.stepper is not None:
            return dataclasses.replace(self, stepper={**self.stepper, "trained_alone": True})
        if self.engine is None:
            return self
        memory = None if self.memory is None else {**self.memory, "committed": None}
        return dataclasses.replace(self, engine=_engine_state(self.engine), memory=memory)

    def rolled_back(self) -> Legacy:
        """With what was owed at the last commit in place of what is owed now."""
        if self.engine is None or not self.engine.committed:
            return self
        left = list(zip(self.engine.residuals, self.engine.committed, strict=True))
        owed = [now if then.numel() != now.numel() else then for now, then in left]
        memory = self.memory
        if memory is not None:
            # By matrix, and a parameter that is one owes nothing else.
            of_matrices = [then for now, then in left if now.numel() == 0 and then.numel() > 0]
            memory = {**memory, **(memory.get("committed") or {}), "residuals": of_matrices}
        return dataclasses.replace(self, engine=_engine_state(self.engine, residuals=owed), memory=memory)


def _engine_state(left: Any, **changed: Any) -> Any:
    """A copy of `left`, a `baguarun._C.EngineState`, but for what is `changed` and for the last commit's."""
    fields = {name: getattr(left, name) for name in _ENGINE_FIELDS}
    return load_extension().EngineState(**{**fields, **changed})


def take_over_engine(engine: Any, legacy: Legacy) -> None:
    """Let the new `engine` go on, with what this rank owes. Collective over its group: the order of buckets
    is rank 0's."""
    left = legacy.engine
    engine.keep_committed(legacy.keeps_committed)
    if left is None:
        left = load_extension().EngineState(order=[], order_adopted=False, residuals=[], committed=[])
    engine.load_state(_engine_state(left, committed=left.committed))


def source_of(steps: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """The first rank of `group` with most `steps`, and how many it has. Collective."""
    world_size = dist.get_world_size(group)
    everyone = torch.zeros(world_size, dtype=torch.int64, device=device_of_group(group))
    everyone[dist.get_rank(group)] = steps
    try:
        dist.all_reduce(everyone, group=group)
    except RuntimeError as error:
        raise CommunicationError(f"comparing the steps of the ranks failed: {error}") from error
    most = int(everyone.max().item())
    return everyone.tolist().index(most), most


def share_what_differs(
    tensors: list[torch.Tensor], source: int, group: dist.ProcessGroup, *, is_known: bool
) -> None:
    """As `share`, but to those ranks only whose `tensors` are others; `is_known`: this rank's are not just
    memory. On accelerators, to all. Collective."""
    if not tensors:
        # All weights are empty, on every rank.
        return
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    # What is not known is like no other's.
    digest = load_extension().checksum(tensors) if is_known and tensors[0].is_cpu else rank
    found = torch.zeros(world_size, 2, dtype=torch.int64, device=tensors[0].device)
    found[rank] = torch.tensor([is_known, digest])
    try:
        dist.all_reduce(found, group=group)
        rows = found.tolist()
        others = [each for each in range(world_size) if each != source and rows[each] != rows[source]]
        if len(others) == world_size - 1:
            share(tensors, source, group)
        elif rank == source:
            _exchange(
                [
                    dist.P2POp(dist.isend, each, group=group, group_peer=other)
                    for other in others
                    for each in tensors
                ]
            )
        elif rank in others:
            _exchange([dist.P2POp(dist.irecv, each, group=group, group_peer=source) for each in tensors])
    except RuntimeError as error:
        raise CommunicationError(f"sharing the algorithm's state failed: {error}") from error


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def share(tensors: list[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Overwrite `tensors` on all ranks by those of rank `source` of `group`. Collective."""
    root = dist.get_global_rank(group, source)
    try:
        for tensor in tensors:
            dist.broadcast(tensor, root, group=group)
    except RuntimeError as error:
        raise CommunicationError(f"sharing the algorithm's state failed: {error}") from error
