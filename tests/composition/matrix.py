"""The matrix: rows, features, what is refused and what to know, and how a cell is checked."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from baguarun.errors import UsageError
from tests.comm.nodes import live_on_nodes
from tests.comm.ranks import run_ranks_to_the_end
from tests.composition import model_features, training_features
from tests.composition.rows import ROWS, Row
from tests.composition.sides import Side, Trainer, gathered

WORLD_SIZE = 3


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that a training program does, and the same training without it."""

    title: str
    program: Callable[[Side], None]
    against: str
    """What the training is compared with."""
    tolerance: float = 0.0
    """The least tolerance, whatever the row's is."""
    compares_buffers: bool = False


FEATURES = (
    Feature(
        title="accumulation",
        program=training_features.accumulates,
        against="one backward of the same three micro-batches, of which two are under `no_sync()` here",
    ),
    Feature(
        title="GradScaler",
        program=training_features.scales_losses,
        against="the same under bf16 autocast without a scaler; one rank overflows once, and exactly those "
        "ranks leave the step out whose gradients show it",
    ),
    Feature(
        title="bf16 model",
        program=training_features.trains_in_bf16,
        against="the same model in float32",
        tolerance=0.1,
    ),
    Feature(
        title="parameter groups",
        program=training_features.has_parameter_groups,
        against="an optimizer per group",
    ),
    Feature(
        title="frozen, unused",
        program=model_features.leaves_parameters_out,
        against="a model in which unused layers are used with factor zero and frozen ones are constants",
    ),
    Feature(
        title="clipping",
        program=training_features.clips_gradients,
        against="gradients scaled by hand",
    ),
    Feature(
        title="LR schedule",
        program=training_features.follows_a_schedule,
        against="rates set by hand",
    ),
    Feature(
        title="two models",
        program=training_features.trains_two_models,
        against="one model trained after the other",
    ),
    Feature(
        title="tied weights",
        program=model_features.ties_weights,
        against="one matrix used twice",
    ),
    Feature(
        title="torch.compile",
        program=model_features.is_compiled,
        against="the same without; `aot_eager`, inside of the wrapper and around it",
    ),
    Feature(
        title="checkpointing",
        program=model_features.recomputes,
        against="the same without; re-entrant, a layer in two checkpoints, `static_graph=True`",
    ),
    Feature(
        title="channels_last",
        program=model_features.is_channels_last,
        against="contiguous tensors",
    ),
    Feature(
        title="SyncBatchNorm",
        program=model_features.normalises_over_ranks,
        against="BatchNorm over the gathered batch",
    ),
    Feature(
        title="buffers",
        program=model_features.broadcasts_buffers,
        against="rank 0's running statistics sent by hand before each forward that sends them",
        compares_buffers=True,
    ),
    Feature(
        title="foreach",
        program=training_features.takes_foreach_optimizers,
        against="the optimizer's loop over parameters",
    ),
    Feature(
        title="fused",
        program=training_features.takes_fused_optimizers,
        against="the optimizer's loop over parameters",
    ),
    Feature(
        title="resume",
        program=training_features.resumes,
        against="training without a break; each rank from its own checkpoint",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A cell that is refused when the model is wrapped, or by the optimizer's constructor."""

    message: str
    """Part of the error's text."""
    reason: str
    """Why it cannot be, in terms of the algorithm."""


NOT_FUSED = Refusal(
    message="fused=True",
    reason="the step takes momentum that is averaged already; torch's kernel would mix it in again",
)

REFUSED: dict[tuple[str, str], Refusal] = {
    (row.title, "fused"): NOT_FUSED for row in ROWS if row.algorithm.name == "qadam"
}
"""By titles of row and feature."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a user of a feature should know."""

    feature: str
    text: str
    concerns: Callable[[Row], bool] = lambda _row: True


def sends_gradients(row: Row) -> bool:
    return not row.algorithm.exchanges_weights


def sends_weights(row: Row) -> bool:
    return row.algorithm.exchanges_weights


def is_a(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.algorithm.name in names


NOTES = (
    Note(
        feature="accumulation",
        concerns=sends_weights,
        text="A backward whose forward was outside of `no_sync()` counts as a step; accumulate inside of it.",
    ),
    Note(
        feature="GradScaler",
        concerns=sends_gradients,
        text="An overflow on one rank reaches all, also through codecs, and all leave the step out.",
    ),
    Note(
        feature="GradScaler",
        concerns=sends_weights,
        text="Only the rank that overflowed leaves its step out and halves its scale; it takes part in the "
        "exchange of weights at its next forward, for which others may wait.",
    ),
    Note(
        feature="GradScaler",
        concerns=is_a("qadam"),
        text="Write `QAdamOptimizer(..., grad_scaler=scaler)`: momentum is mixed before the scaler sees it. "
        "Without it the first scaled step is refused.",
    ),
    Note(
        feature="clipping",
        concerns=sends_gradients,
        text="The norm is that of the combined gradient, the same on all ranks.",
    ),
    Note(
        feature="clipping",
        concerns=is_a("qadam"),
        text="After the warm-up it is momentum that is clipped.",
    ),
    Note(
        feature="clipping",
        concerns=sends_weights,
        text="The norm is that of each rank's own gradient.",
    ),
    Note(
        feature="LR schedule",
        concerns=is_a("diloco"),
        text="The schedule moves the rate of the local steps; `outer_lr` stays.",
    ),
    Note(
        feature="torch.compile",
        text="Tested with `aot_eager`, which has all of `torch.compile` but the code generator.",
    ),
    Note(
        feature="checkpointing",
        text="A layer in several re-entrant checkpoints needs `static_graph=True`, as with torch's DDP.",
    ),
    Note(
        feature="channels_last",
        concerns=is_a("bytegrad"),
        text="Blocks of the codec follow the order in memory, so the last bits are not those of a contiguous "
        "model.",
    ),
    Note(
        feature="SyncBatchNorm",
        text="torch's own takes no CPU tensors. Tested is a module that does the same with collectives of "
        "the program's own, in forward and in backward.",
    ),
    Note(
        feature="SyncBatchNorm",
        concerns=sends_weights,
        text="The statistics mix outputs of replicas that differ, and ranks wait for each other in each "
        "forward.",
    ),
    Note(
        feature="buffers",
        concerns=is_a("local_sgd", "diloco"),
        text="Sent only before a step in which all begin with the same weights.",
    ),
    Note(
        feature="buffers",
        concerns=is_a("async_model_average"),
        text="Sent during the warm-up only; afterwards they are each rank's own.",
    ),
    Note(
        feature="resume",
        concerns=sends_weights,
        text="Replicas, optimizer state and `algorithm_state_dict()` are each rank's own: save them on each "
        "and wrap with `init_sync=False`.",
    ),
)


def run_row(row: Row, features: Sequence[Feature]) -> dict[str, str]:
    """What is wrong with each cell of a row, by the feature's title; "" if it is as the matrix says.

    One World runs all cells until one fails, and a new one goes on after it: a rank that has failed may have
    left the others in the middle of a collective.
    """
    found: dict[str, str] = {}
    titles = [feature.title for feature in features]
    while left := [title for title in titles if title not in found]:
        outcomes = run_ranks_to_the_end(_check_on_rank, WORLD_SIZE, row.title, left)
        found.update(judge(left, [None if outcome.died else outcome.value for outcome in outcomes]))
    return found


def judge(titles: Sequence[str], ends: Sequence[tuple[int, str] | None]) -> dict[str, str]:
    """The cells that one World has settled, of those that it was to run.

    `ends` has of each rank how many cells it found right and what was wrong with the next; None: it died.
    """
    # A rank that failed leaves the others in the same cell, or at the latest in the next one.
    first = min(end[0] for end in ends if end is not None) if any(ends) else 0
    found = dict.fromkeys(titles[:first], "")
    wrong = ["died" if end is None else end[1] for end in ends]
    if first < len(titles) or None in ends:
        title = titles[min(first, len(titles) - 1)]
        found[title] = "\n".join(f"rank {rank}: {text or 'right'}" for rank, text in enumerate(wrong))
    return found


def _check_on_rank(row_title: str, feature_titles: Sequence[str]) -> tuple[int, str]:
    """How many cells are right before the first that is not, and what is wrong with that one."""
    row = next(row for row in ROWS if row.title == row_title)
    if row.nodes:
        live_on_nodes(row.nodes)
    for index, title in enumerate(feature_titles):
        feature = next(feature for feature in FEATURES if feature.title == title)
        refusal = REFUSED.get((row_title, title))
        try:
            if refusal is not None:
                check_refusal(row, feature, refusal)
            else:
                check_training(row, feature)
        except Exception:
            return index, traceback.format_exc()
    return len(feature_titles), ""


def check_refusal(row: Row, feature: Feature, refusal: Refusal) -> None:
    side = Side(row, has_feature=True)
    try:
        feature.program(side)
    except UsageError as error:
        assert not side.trainers, "refused only after the model had been wrapped"
        assert refusal.message in str(error), f"refused with other words: {error}"
        return
    raise AssertionError("works, although the matrix says that it is refused")


def check_training(row: Row, feature: Feature) -> None:
    """The feature under our wrapper trains as the row's reference says."""
    for found, expected in train_both(row, row, feature):
        assert_same_training(row, feature, found, expected)
        if row.replicas_meet_every is not None:
            assert_replicas_meet(found, row.replicas_meet_every)
    dist.barrier()


def train_both(row: Row, like: Row, feature: Feature) -> list[tuple[Trainer, Trainer]]:
    """Models trained with the feature by `row`'s algorithm, each with the one of `like`'s reference."""
    ours, reference = Side(row, has_feature=True), Side(like, has_feature=False)
    for side in (ours, reference):
        feature.program(side)
    assert len(ours.trainers) == len(reference.trainers) > 0
    return list(zip(ours.trainers, reference.trainers, strict=True))


def assert_same_training(row: Row, feature: Feature, found: Trainer, expected: Trainer) -> None:
    """After every step; differences count as a share of how far weights, or buffers, have come in all."""
    assert list(found.history) == list(expected.history) != []
    tolerance = max(row.tolerance, feature.tolerance, row.tolerances.get(feature.title, 0))
    kinds = [[name for name, _ in expected.net.named_parameters()]]
    if feature.compares_buffers:
        # Counts would hide all else, for they come far.
        named = expected.net.named_buffers()
        kinds.append([name for name, buffer in named if buffer.is_floating_point()])
    last = expected.history[max(expected.history)]
    for names in kinds:
        moved = max((last[name] - expected.start[name]).abs().max().item() for name in names)
        assert moved > 0.02, "the reference did not train"
        for step, weights in expected.history.items():
            for name in names:
                share = (found.history[step][name] - weights[name]).abs().max().item() / moved
                assert share <= tolerance, f"{name} is off by {share:.2g} of the way after step {step}"


def assert_replicas_meet(trainer: Trainer, every: int) -> None:
    names = [name for name, parameter in trainer.net.named_parameters() if parameter.requires_grad]
    for step, weights in trainer.history.items():
        if (step + 1) % every == 0:
            rows = gathered(torch.cat([weights[name].reshape(-1) for name in names]))
            assert torch.equal(rows, rows[:1].expand_as(rows)), f"replicas differ after step {step}"
