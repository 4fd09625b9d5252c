"""Whether a job that was hit has lost or repeated anything, by the lines that its workers wrote."""

from __future__ import annotations

from collections.abc import Sequence

from tests.lab.steps import Step

RELAXED = ("async_model_average", "diloco")
"""Algorithms whose ranks may lose what they had not shared, which is dealt again and counted."""


def accounts(steps: Sequence[Step], algorithm: str, samples: int) -> list[str]:
    """What is wrong with steps and with the `samples` of each epoch."""
    done = [step for step in steps if step.step > 0]
    problems = [] if algorithm in RELAXED else _wrong_steps(done)
    may_lack = _unwritten(done)
    lost = missed = 0
    if algorithm in RELAXED:
        lost = max((step.lost_samples for step in done), default=0)
        missed = max((step.missed_samples for step in done), default=0)
    twice = lacking = 0
    epochs = sorted({step.epoch for step in done})
    for epoch in epochs:
        # A step that is done again, as only the dead had applied it, has the same samples once more.
        seen = {(step.step, number) for step in done if step.epoch == epoch for number in step.samples}
        different = {number for _, number in seen}
        twice += len(seen) - len(different)
        # The last one is under way.
        lacking += samples - len(different) if epoch != epochs[-1] else 0
    if twice > lost - missed:
        problems.append(f"{twice} samples came twice, {lost - missed} were reported as lost and dealt again")
    if lacking > missed + may_lack:
        problems.append(f"{lacking} samples are missing, of which {missed + may_lack} may be")
    return problems


def _wrong_steps(done: Sequence[Step]) -> list[str]:
    """Of ranks that step together: each step is there, in one epoch."""
    problems = []
    epochs: dict[int, set[int]] = {}
    for step in done:
        epochs.setdefault(step.step, set()).add(step.epoch)
    missing = sorted(set(range(1, max(epochs, default=0) + 1)) - set(epochs))
    if missing:
        problems.append(f"steps {missing} are missing")
    twice = {number: sorted(found) for number, found in epochs.items() if len(found) > 1}
    if twice:
        problems.append(f"steps were done in two epochs: {twice}")
    return problems


def _unwritten(done: Sequence[Step]) -> int:
    """Samples of which there may be no line: who is killed between its commit and its line writes none."""
    newest = max((step.generation for step in done), default=0)
    last = {step.pid: step for step in done}
    return sum(len(step.samples) for step in last.values() if step.generation < newest)
