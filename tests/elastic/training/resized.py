"""A training script for jobs that are resized in place, with everything in it that has a state."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import baguarun
from baguarun.comm import world
from baguarun.comm.algorithms import QAdam, QAdamOptimizer
from baguarun.comm.extension import load_extension
from baguarun.comm.groups import read_worker_env
from baguarun.contract import Topic
from baguarun.elastic import Checkpoints, State
from baguarun.elastic.training import replicated, streaming, switching
from baguarun.elastic.training.catching_up import CatchingUp
from baguarun.elastic.training.checkpoints import CheckpointFolder
from baguarun.elastic.training.in_place import InPlaceRun, control_channel
from tests.elastic.training.programs import SAMPLES, make_loader, make_model

GROUP_TIMEOUT = timedelta(seconds=40)


@dataclass(frozen=True, kw_only=True)
class At:
    """What a worker does when it comes to a point of the script."""

    local_rank: int
    point: str
    """"begin" of a step, "micro" (after a micro-batch), "backward" (after it), "between" the optimizers,
    "stepped", "writes" (the first checkpoint of a World), "answers" (looks at a commit whether to leave),
    "committed"; "parts" (leaves at a commit as all do), "averaged" (their average is there, and none of it in
    the weights), "farewell" (nothing else is left to do in that World), "over" (nothing at all); "ready"
    (said so), "enters", "models" (their groups come next), "stands" (tells where it stands next); "sends"
    (the structure of a state is sent), "half" (has come), "some sent" (of the tensors after it), "some come",
    "receives" (all has); "newcomers" (are given the survivors' average next)."""
    step: int
    """Committed steps at that time."""
    started_in: int = 1
    """Dies only as a process that was started in this generation; 0 for a newcomer."""
    generation: int | None = None
    """Of the World that it is in or about to enter; None for any."""
    num_sends: int = 0
    action: str = "die"
    """"die", "die in a bucket" (after `num_sends` messages of an exchange), "die in the ring" (of a
    collective), "raise", "break" as communication does, "hold" until the agent has sent news, or "talk" to
    all after that."""


@dataclass(frozen=True, kw_only=True)
class Script:
    folder: Path
    epochs: int = 1
    happenings: Sequence[At] = ()
    algorithm: Any = None
    checkpoints: Path | None = None
    workers: int = 0
    batch_size: int = 4
    policy: str = "constant"
    detect_timeout_s: float | None = None
    width: int = 8
    """Of the network."""
    shows_weights: bool = False
    """Whether the log has them, where a World begins and at every commit."""
    overflows_in: int | None = None
    """Committed steps when the loss is infinite, on all ranks."""
    is_alone: bool = False
    """Whether each worker shares memory with no other one, as on a host of its own."""
    device: str = "cpu"
    """Where training is; "cuda": all workers share one GPU, over NCCL, which wants `is_alone`."""


class Centre(nn.Module):
    """Takes away a running mean, which a rank with a single sample can do too."""

    mean: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs - self.mean


def run_script(script: Script) -> None:
    if script.detect_timeout_s is not None:
        os.environ["BAGUARUN_DETECT_TIMEOUT_S"] = str(script.detect_timeout_s)
    env = read_worker_env()
    if script.is_alone:
        os.environ["NCCL_HOSTID"] = str(env.local_rank)
    if script.device == "cuda":
        torch.cuda.set_device(0)
    baguarun.init_process_group("nccl" if script.device == "cuda" else None, timeout=GROUP_TIMEOUT)
    # Newcomers would begin with other weights than the rest, and are given theirs.
    torch.manual_seed(env.generation)
    net = make_model(0.2, Centre, script.width).to(script.device)
    average = AveragedModel(net)
    torch.manual_seed(17 + env.local_rank)
    scaler = torch.amp.GradScaler(script.device, init_scale=2.0**10, growth_interval=3)
    body, head = make_optimizers(script.algorithm, scaler, net)
    model = baguarun.DistributedDataParallel(net, optimizers=[body, head], algorithm=script.algorithm)
    state = State(
        model=model,
        body=body,
        head=head,
        average=average,
        scaler=scaler,
        schedule=torch.optim.lr_scheduler.StepLR(body, 3, 0.5),
        epoch=0,
        loss_sum=0.0,
        checkpoints=script.checkpoints and Checkpoints(folder=script.checkpoints, every_steps=2),
    )
    # In the step, where it may be scaled; registered behind what State does before it.
    rates: list[float] = []
    body.register_step_pre_hook(lambda *_call: rates.append(body.param_groups[0]["lr"]))
    loader = make_loader(script.batch_size, script.workers, policy=script.policy)
    outside = torch.arange(4.0)
    log = Log(script.folder, env.local_rank)

    held: set[At] = set()

    def at(point: str) -> None:
        for what in script.happenings:
            here = env.local_rank, point, state.committed_steps
            if (what.local_rank, what.point, what.step) != here:
                continue
            if what.generation in (None, read_worker_env().generation):
                if what.action == "die" and env.generation == what.started_in:
                    os.kill(os.getpid(), signal.SIGKILL)
                if what.action == "die in a bucket":
                    load_extension().fail_after_sends(what.num_sends)
                if what.action == "die in the ring":
                    load_extension().fail_after_messages(what.num_sends)
                if what.action == "raise":
                    raise RuntimeError("a mistake in the script")
                if what.action == "break":
                    raise torch.distributed.DistBackendError("broken by the test")
                if what.action in ("hold", "talk") and what not in held:
                    held.add(what)
                    log.write(what="holds")
                    hold_until_news()
                    if what.action == "talk":
                        torch.distributed.barrier()

    interrupt_meeting(at)
    interrupt_streaming(at)
    # Asked at every commit, as slow steps are: a test says where its World is left.
    switching._ASK_EVERY_S = switching._ASK_RELAXED_EVERY_S = 0.0

    def weights() -> dict[str, Any]:
        return {"weights": [value.tolist() for value in net.parameters()]} if script.shows_weights else {}

    def places() -> dict[str, int | None]:
        """Where in memory tensors are: one outside of the state, one of the model, one of an optimizer."""
        weight = state.body.param_groups[0]["params"][0]
        # The first step makes it.
        moment = state.body.state[weight].get("exp_avg")
        return {
            "outside": outside.data_ptr(),
            "weight": weight.data_ptr(),
            "moment": None if moment is None else moment.data_ptr(),
        }

    @baguarun.elastic.run
    def train(state: State) -> None:
        world_size = torch.distributed.get_world_size()
        log.write(what="enters", world_size=world_size, places=places(), **weights())
        while state.epoch < script.epochs:
            for micro_batches in state.steps(loader):
                at("begin")
                state.body.zero_grad()
                state.head.zero_grad()
                given = []
                for inputs, wanted, names in micro_batches:
                    outputs = state.model(inputs.to(script.device))
                    loss = nn.functional.mse_loss(outputs, wanted.to(script.device))
                    if state.committed_steps == script.overflows_in:
                        loss = loss * float("inf")
                    scaler.scale(loss).backward()
                    given += [(state.epoch, name) for name in names.tolist()]
                    at("micro")
                log.write(what="given", step=state.committed_steps, samples=given)
                at("backward")
                scaler.step(state.body)
                log.write(what="applied", step=state.committed_steps, rate=rates[-1] if rates else None)
                at("between")
                scaler.step(state.head)
                at("stepped")
                scaler.update()
                state.average.update_parameters(net)
                state.schedule.step()
                state.loss_sum += 1.0
                state.commit()
                log.write(
                    what="committed",
                    step=state.committed_steps,
                    time=time.time(),
                    descriptors=len(os.listdir("/proc/self/fd")),
                    **weights(),
                )
                at("committed")
            state.epoch += 1

    train(state)
    log.write(what="trained", places=places())
    log.write(
        what="end",
        pid=os.getpid(),
        steps=state.committed_steps,
        lost=state.lost_samples,
        counted=state.loss_sum,
        scale=scaler.state_dict(),
        rate=state.body.param_groups[0]["lr"],
        outside=outside.tolist(),
        weights=[value.tolist() for value in net.parameters()],
        average=[value.tolist() for value in average.state_dict().values()],
        buffers=[value.tolist() for value in net.buffers()],
        random=torch.rand(2).tolist(),
    )


def hold_until_news() -> None:
    """Until the agent has said something about the World."""
    channel = control_channel(read_worker_env())
    assert channel is not None
    while channel.pending is None:
        time.sleep(0.001)


def make_optimizers(
    algorithm: Any, scaler: torch.amp.GradScaler, net: nn.Sequential
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Of the body and of the head."""
    body, head = net[:4].parameters(), net[4:].parameters()
    if isinstance(algorithm, QAdam):
        settings: dict[str, Any] = {"warmup_steps": 2, "grad_scaler": scaler}
        return QAdamOptimizer(body, lr=0.01, **settings), QAdamOptimizer(head, lr=0.02, **settings)
    # A wide head would run away.
    rate = 0.05 * 8 / net[4].in_features
    return torch.optim.Adam(body, lr=0.01), torch.optim.SGD(head, lr=rate, momentum=0.9)


def interrupt_meeting(at: Callable[[str], None]) -> None:
    """Call `at` in each phase of a World's making, and where ranks agree to leave it and do so."""

    def before(owner: Any, name: str, point: str) -> None:
        call = getattr(owner, name)

        def called(*args: Any, **settings: Any) -> Any:
            at(point)
            return call(*args, **settings)

        setattr(owner, name, called)

    tell = InPlaceRun._tell

    def told(self: InPlaceRun, topic: Topic, **body: Any) -> None:
        tell(self, topic, **body)
        if topic is Topic.READY:
            at("ready")

    InPlaceRun._tell = told
    before(world, "_join_store", "enters")
    before(baguarun.DistributedDataParallel, "enter_world", "models")
    before(InPlaceRun, "_exchange_standings", "stands")
    before(switching.SwitchBoundary, "_answer", "answers")
    before(CheckpointFolder, "_find_writers", "writes")
    before(InPlaceRun, "_part", "parts")
    before(replicated, "_set", "averaged")
    before(switching.SwitchBoundary, "farewell", "farewell")
    before(CatchingUp, "end_world", "over")
    before(replicated, "average_newcomers", "newcomers")


def interrupt_streaming(at: Callable[[str], None]) -> None:
    """Call `at` when the structure of a state is sent or has come, amid its tensors, and when all have."""
    # Many messages instead of one.
    streaming._PACK_BYTES = 64
    send, receive = streaming.send, streaming.receive
    wait, decode = streaming._wait, streaming._decode
    messages = 0
    is_receiving = False

    def sent(*args: Any) -> None:
        nonlocal messages
        messages = 0
        send(*args)

    def waited(*args: Any) -> None:
        nonlocal messages
        wait(*args)
        messages += 1
        if messages == 2:
            at("sends")
        if messages == 5:
            at("some come" if is_receiving else "some sent")

    def decoded(data: bytes) -> Any:
        nonlocal messages
        if is_receiving:
            messages = 2
            at("half")
        return decode(data)

    def received(*args: Any) -> Any:
        nonlocal is_receiving
        is_receiving = True
        value = receive(*args)
        is_receiving = False
        at("receives")
        return value

    streaming.send, streaming.receive = sent, received
    streaming._wait, streaming._decode = waited, decoded


class Log:
    """What one process did, on disk line by line: it may be killed at any time."""

    def __init__(self, folder: Path, local_rank: int) -> None:
        path = folder / f"{local_rank}-{os.getpid()}.log"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **entry: Any) -> None:
        entry["generation"] = read_worker_env().generation
        os.write(self._file, json.dumps(entry).encode() + b"\n")


@dataclass
class Story:
    """What all processes of a job did."""

    logs: dict[str, list[dict[str, Any]]]

    @classmethod
    def read(cls, folder: Path) -> Story:
        """As far as whole lines go, which a process may be writing just now."""
        logs = {path.stem: path.read_text() for path in sorted(folder.glob("*.log"))}
        lines = {name: text[: text.rfind("\n") + 1].splitlines() for name, text in logs.items()}
        return cls({name: [json.loads(line) for line in each] for name, each in lines.items()})

    def ends(self) -> list[dict[str, Any]]:
        """The last entries of those that came to the end."""
        return [log[-1] for log in self.logs.values() if log and log[-1]["what"] == "end"]

    def holding(self) -> int:
        """How many processes have come to where they hold."""
        return sum(any(entry["what"] == "holds" for entry in log) for log in self.logs.values())

    def held(self) -> int:
        """How often processes have held."""
        return sum(entry["what"] == "holds" for log in self.logs.values() for entry in log)

    def applied_samples(self) -> list[tuple[int, int]]:
        """Epoch and number of each sample, once per step that was applied with it.

        A step may have been done several times; it was applied the last time, or the first time if it had
        been applied when a worker was lost. Both deal the same samples, which is what this checks.
        """
        by_step: dict[int, dict[int, list[tuple[int, int]]]] = {}
        for log in self.logs.values():
            for entry in log:
                if entry["what"] == "given":
                    attempt = by_step.setdefault(entry["step"], {}).setdefault(entry["generation"], [])
                    attempt += [tuple(sample) for sample in entry["samples"]]
        committed = max(end["steps"] for end in self.ends())
        assert sorted(by_step) == list(range(committed))
        applied = []
        for attempts in by_step.values():
            # An attempt that was cut off is short of what some worker had not logged yet.
            whole = max(map(len, attempts.values()))
            last = sorted(attempts[max(attempts)])
            assert len(last) == whole
            applied += last
        return applied

    def trained_samples(self) -> list[tuple[int, int]]:
        """Of processes that came to the end: samples that their weights have seen, as often as they did."""
        found = []
        for log in self.logs.values():
            if log and log[-1]["what"] == "end":
                for entry, following in pairwise(log):
                    if entry["what"] == "given" and following["what"] == "applied":
                        found += [tuple(sample) for sample in entry["samples"]]
        return found

    def samples_of_the_dead(self) -> list[tuple[int, int]]:
        """All that processes were given that did not come to the end."""
        return [
            tuple(sample)
            for log in self.logs.values()
            if log and log[-1]["what"] != "end"
            for entry in log
            if entry["what"] == "given"
            for sample in entry["samples"]
        ]


def all_samples(epochs: int) -> list[tuple[int, int]]:
    return [(epoch, name) for epoch in range(epochs) for name in range(SAMPLES)]
