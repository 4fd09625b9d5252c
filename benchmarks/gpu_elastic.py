"""Workers on CUDA that die, and join, while others train: what `tests/elastic/training` shows on the CPU.

    python -m benchmarks.gpu_elastic [--check] [--json FILE]

Three NCCL ranks on one GPU, which works when each has its own NCCL_HOSTID; the part of the agents, who tell
workers of Worlds, is this script's.

- One worker is killed before backward, after it, between two optimizers, and between step and commit; NCCL's
  collectives that wait for it are aborted. The survivors must end with the bits of a job that it had left
  politely at that step, having trained on every sample once.
- One worker is killed before it takes its part in the first average of weights: nothing of that average may
  get into the survivors' weights, which must be the bits of a job that averages nothing.
- One worker is killed and another one joins in its place, with algorithms of every kind.

Seconds are those between two commits of the survivors; processes that share a GPU take turns, so they say
little. Needs a GPU and the extension built with CUDA. `--device cpu` tries the script itself.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from baguarun.comm.algorithms import Algorithm, AsyncModelAverage, ByteGrad, DiLoCo, LocalSGD, QAdam
from benchmarks.gpu import NCCL_ON_ONE_GPU
from benchmarks.harness import Report, Row, finish, parser
from tests.elastic.training import fake_agent
from tests.elastic.training.jobs import leave_at, replace_the_lost, same, train
from tests.elastic.training.resized import At, Script, Story, all_samples

_WORKERS = 3
_POINTS = ("begin", "backward", "between", "stepped")
_LOST_IN = 3
_IN_STEP: tuple[Algorithm | None, ...] = (None, ByteGrad(), QAdam(bits=8))
_OUT_OF_STEP = (LocalSGD(local_steps=2), DiLoCo(local_steps=2), AsyncModelAverage())
_AVERAGED_IN = (LocalSGD(local_steps=_LOST_IN), DiLoCo(local_steps=_LOST_IN))
_PATIENCE_S = 300.0
"""For a story: CUDA and NCCL are slow to begin."""
_CORES_OF_A_STORY = 5


def longest_pause_s(story: Story) -> float:
    """The longest time between two commits of one survivor."""
    pauses = [0.0]
    for log in story.logs.values():
        times = [entry["time"] for entry in log if entry["what"] == "committed"]
        pauses += [later - earlier for earlier, later in pairwise(times)]
    return max(pauses)


def loss(device: str, folder: Path, point: str) -> Row:
    """One worker lost at `point`, against a job that it has left."""
    lost_at = At(local_rank=1, point=point, step=_LOST_IN)
    script = Script(folder=folder / point, happenings=[lost_at], device=device, is_alone=True)
    lost = train(script, _WORKERS)
    step = _LOST_IN if point == "begin" else _step_left(lost)
    left = leave_at(folder / f"{point}-left", step=step, device=device, is_alone=True)
    problems = [] if same(lost, left) else ["other weights, states or steps than after a polite leave"]
    if sorted(lost.applied_samples()) != all_samples(1):
        problems.append("samples lost or repeated")
    return _row(f"killed at '{point}'", lost, problems)


def _step_left(lost: Story) -> int:
    """Committed steps of the survivors when their first World ended: the last one, or the one under way."""
    first = [entry for log in lost.logs.values() for entry in log if entry["generation"] == 1]
    applied = max((entry["step"] for entry in first if entry["what"] == "applied"), default=-1)
    return max(applied + 1, _LOST_IN)


def broken_average(device: str, folder: Path, algorithm: LocalSGD | DiLoCo) -> Row:
    """One worker lost in the step behind whose optimizers an average follows."""
    lost = At(local_rank=1, point="backward", step=_LOST_IN - 1)
    never = dataclasses.replace(algorithm, local_steps=1000)
    broken, alone = (
        train(
            Script(
                folder=folder / f"{algorithm.name}-{each.local_steps}",
                epochs=3,
                happenings=[lost],
                algorithm=each,
                batch_size=1,
                device=device,
                is_alone=True,
                shows_weights=True,
            ),
            _WORKERS,
        )
        for each in (algorithm, never)
    )
    left, wanted = (_weights_behind(story, _LOST_IN) for story in (broken, alone))
    problems = []
    if len(wanted) != _WORKERS - 1 or wanted[0] == wanted[1]:
        problems.append("the job that averages nothing shows nothing")
    if left != wanted:
        problems.append("survivors' weights have something of an average that was given up")
    return _row(f"{algorithm.name}, killed before an average", broken, problems)


def _weights_behind(story: Story, step: int) -> list[Any]:
    """By survivor, at that commit in its first World."""
    return [
        entry["weights"]
        for _, log in sorted(story.logs.items())
        for entry in log
        if log[-1]["what"] == "end" and entry["what"] == "committed" and entry["step"] == step
    ]


def replacement(device: str, folder: Path, algorithm: Algorithm | None) -> Row:
    """One worker lost and another one come: three in the end, alike where they should be."""
    name = "gradient_allreduce" if algorithm is None else algorithm.name
    lost = At(local_rank=1, point="stepped", step=_LOST_IN)
    held = At(local_rank=0, point="begin", step=30, action="hold")
    is_relaxed = algorithm is not None and algorithm.exchanges_weights
    script = Script(
        folder=folder / name,
        epochs=3,
        happenings=[lost, held],
        algorithm=algorithm,
        batch_size=1,
        device=device,
        is_alone=True,
    )
    story = train(script, _WORKERS, replace_the_lost)
    problems = []
    if len(story.ends()) != _WORKERS or len({end["steps"] for end in story.ends()}) != 1:
        problems.append(f"{len(story.ends())} came to the end")
    if is_relaxed:
        trained = story.trained_samples()
        missing = set(all_samples(3)) - set(trained)
        if len(trained) != len(set(trained)) or not missing <= set(story.samples_of_the_dead()):
            problems.append("samples of survivors lost or repeated")
    else:
        if sorted(story.applied_samples()) != all_samples(3):
            problems.append("samples lost or repeated")
        if len({str(end["weights"]) for end in story.ends()}) != 1:
            problems.append("weights differ")
    return _row(f"{name}, killed and replaced", story, problems)


def _row(what: str, story: Story, problems: list[str]) -> Row:
    return Row(
        what=f"{what}: problems",
        peer="",
        ours="; ".join(problems) or f"survivors stood for {longest_pause_s(story):.2f} s",
        value=len(problems),
        target=0,
    )


def _prepare(device: str) -> None:
    """A process that stories run in."""
    os.environ.update(NCCL_ON_ONE_GPU)
    fake_agent.DEADLINE_S = _PATIENCE_S
    if device == "cuda":
        fake_agent.START_METHOD = "spawn"


def gpu_name() -> str:
    """Empty without a GPU. Another process asks, so that this one, which uses none, takes no memory of it."""
    program = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main(argv: list[str] | None = None) -> int:
    options = parser("gpu_elastic", __doc__ or "")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = options.parse_args(argv)
    gpu = gpu_name() if args.device == "cuda" else ""
    if args.device == "cuda" and not gpu:
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 1
    report = Report(name="gpu_elastic", title=f"losses and joins on {args.device}", quick=args.quick)
    if gpu:
        report.facts["gpu"] = gpu
    with tempfile.TemporaryDirectory() as folder:
        points = _POINTS[:1] if args.quick else _POINTS
        algorithms = (*_IN_STEP, *_OUT_OF_STEP)[: 1 if args.quick else None]
        stories = [partial(loss, args.device, Path(folder), point) for point in points]
        stories += [
            partial(broken_average, args.device, Path(folder), algorithm)
            for algorithm in _AVERAGED_IN[: 0 if args.quick else None]
        ]
        stories += [partial(replacement, args.device, Path(folder), algorithm) for algorithm in algorithms]
        at_once = max(1, (os.cpu_count() or 1) // _CORES_OF_A_STORY)
        # Processes, since children of one must not be waited for by several of its threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(at_once, context, initializer=_prepare, initargs=(args.device,)) as pool:
            report.rows += [future.result() for future in [pool.submit(story) for story in stories]]
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
