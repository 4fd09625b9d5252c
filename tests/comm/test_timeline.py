"""What a recording shows of the engine's work, and what torch.profiler sees of it."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from baguarun.comm import timeline
from baguarun.comm.algorithms import Algorithm, PowerSGD
from baguarun.comm.ddp import DistributedDataParallel
from baguarun.comm.joined_trace import join
from baguarun.errors import UsageError
from tests.comm.models import batch, mlp
from tests.comm.ranks import run_ranks, run_ranks_to_the_end

STEPS = 3

Event = dict[str, Any]


def train(algorithm: str | Algorithm, steps: int = STEPS) -> DistributedDataParallel:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = DistributedDataParallel(module, optimizers=[optimizer], algorithm=algorithm, bucket_cap_mb=0.005)
    for _ in range(steps):
        step(model, optimizer)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(batch(model.module)).square().sum().backward()  # type: ignore[arg-type, operator]
    optimizer.step()


def read(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def record(path: Path, algorithm: str | Algorithm) -> list[Event]:
    timeline.start(path)
    train(algorithm)
    timeline.stop()
    return read(path)


def row_names(events: list[Event]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def spans(events: list[Event], row: str, name: str = "") -> list[Event]:
    """Of rows whose name begins so, in the order of their starts."""
    rows = row_names(events)
    found = [event for event in events if event["ph"] == "X" and rows[event["tid"]].startswith(row)]
    return sorted((event for event in found if event["name"].startswith(name)), key=lambda event: event["ts"])


def assert_nested(events: list[Event]) -> None:
    """On each row a span lies inside of another or beside it."""
    for tid in {event["tid"] for event in events if event["ph"] == "X"}:
        open_until: list[float] = []
        mine = [event for event in events if event["ph"] == "X" and event["tid"] == tid]
        for event in sorted(mine, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.01, event
            open_until.append(event["ts"] + event["dur"])


def inside(inner: Event, outer: Event) -> bool:
    return bool(
        outer["ts"] - 0.01 <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01
        and inner["args"].get("of") == outer["args"].get("of")
    )


def shows_every_bucket(folder: Path) -> None:
    rank = dist.get_rank()
    path = folder / f"out.{rank}"
    timeline.start(path)
    model = train("bytegrad")
    timeline.stop()
    events = read(path)
    assert_nested(events)
    assert {event["pid"] for event in events} == {rank}
    buckets = model.stats().buckets
    assert buckets > 2
    for name in ("bucket", "filling", "on the wire"):
        assert len(spans(events, "bucket", name)) == buckets * STEPS, name
    sent = sum(event["args"]["bytes"] for event in spans(events, "bucket", "on the wire"))
    assert sent == model.stats().bytes_sent
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(event["args"]["bytes"] for event in spans(events, "bucket", "bucket")) == parameters * STEPS
    assert len([event for event in events if event["name"] == "full"]) == buckets * STEPS


def test_each_bucket_shows_when_it_filled_and_when_it_was_on_the_wire(tmp_path: Path) -> None:
    run_ranks(shows_every_bucket, 2, tmp_path)


def shows_codecs_and_waits(folder: Path) -> None:
    events = record(folder / f"out.{dist.get_rank()}", "bytegrad")
    peer = 1 - dist.get_rank()
    for thread, stage, inner in (
        ("bagua-begin", "begin", ["encode", "encode"]),
        ("bagua-reduce", "reduce", [f"receiving the contribution of rank {peer}", "reduce and encode"]),
        ("bagua-complete", "complete", ["decode", f"receiving the result of rank {peer}", "decode"]),
    ):
        stages = [event for event in spans(events, thread, stage) if event["cat"] == "stage"]
        assert stages
        for outer in stages:
            # "receiving ..." of a bucket and "begin" of another may share a start, not a label.
            found = [event for event in spans(events, thread) if event is not outer and inside(event, outer)]
            assert [event["name"] for event in found][: len(inner)] == inner, stage
            coded = sum(event["args"]["bytes"] for event in found if event["cat"] == "codec")
            # A rank encodes and decodes the whole bucket, and reduces its own chunk of it.
            if stage == "reduce":
                assert 0 < coded < outer["args"]["bytes"]
            else:
                assert coded == outer["args"]["bytes"], stage


def test_codecs_and_waits_lie_in_the_stage_of_their_bucket_in_order(tmp_path: Path) -> None:
    run_ranks(shows_codecs_and_waits, 2, tmp_path)


def shows_a_thread_per_wait(folder: Path, rank: int) -> None:
    path, peer = folder / f"out.{dist.get_rank()}", 1 - dist.get_rank()
    module = nn.Linear(2100, 2100)
    model = DistributedDataParallel(module, algorithm=PowerSGD(rank=rank, start_step=2))
    timeline.start(path)
    for _ in range(STEPS):
        module.zero_grad()
        model(torch.randn(1, 2100)).square().sum().backward()
    timeline.stop()
    waits = spans(read(path), "bagua-between", "receiving")
    waited_for = {(event["tid"], event["name"]) for event in waits}
    names = [f"receiving the contribution of rank {peer}"]
    if rank > 1:
        # More than goes to everybody at once: each of the two waits for one kind of answer only.
        names.append(f"receiving the result of rank {peer}")
    assert sorted(name for _, name in waited_for) == names, waited_for
    assert len({tid for tid, _ in waited_for}) == len(names)


@pytest.mark.parametrize("rank", [1, 8])
def test_each_wait_of_power_sgd_has_a_thread_of_its_own(tmp_path: Path, rank: int) -> None:
    run_ranks(shows_a_thread_per_wait, 2, tmp_path, rank)


def shows_differences(folder: Path) -> None:
    events = record(folder / f"out.{dist.get_rank()}", "low_precision_decentralized")
    peer = 1 - dist.get_rank()
    # An exchange is decoded when the next one begins, and after the last one none does.
    coded = [event["name"] for event in spans(events, "main") if event["cat"] == "codec"]
    assert coded == ["encode", *["decode and encode"] * (STEPS - 1)]
    assert spans(events, "main", f"receiving from rank {peer}")
    assert_nested(events)


def test_differences_are_decoded_and_encoded_in_the_step_of_the_optimizer(tmp_path: Path) -> None:
    run_ranks(shows_differences, 2, tmp_path)


def shows_the_step(folder: Path) -> None:
    events = record(folder / f"out.{dist.get_rank()}", "gradient_allreduce")
    forwards = spans(events, "main", "forward")
    backwards = spans(events, "main", "backward")
    waits = spans(events, "main", "wait for communication")
    optimizer_steps = spans(events, "main", "SGD step")
    assert [len(found) for found in (forwards, backwards, waits, optimizer_steps)] == [STEPS] * 4
    for forward, backward, wait, update in zip(forwards, backwards, waits, optimizer_steps, strict=True):
        assert forward["ts"] + forward["dur"] <= backward["ts"]
        assert backward["ts"] <= wait["ts"]
        assert wait["ts"] + wait["dur"] <= backward["ts"] + backward["dur"] <= update["ts"]
    assert spans(events, "bagua-reduce", "all-reduce")
    assert_nested(events)


def test_forward_backward_wait_and_optimizer_follow_each_other(tmp_path: Path) -> None:
    run_ranks(shows_the_step, 2, tmp_path)


def shows_weights(folder: Path, algorithm: str, name: str) -> None:
    path = folder / f"{algorithm}.{dist.get_rank()}"
    timeline.start(path)
    model = train(algorithm, steps=16)
    timeline.stop()
    events = read(path)
    flights = spans(events, "in flight", name)
    assert len(flights) == model.stats().weight_rounds > 0
    assert all(event["args"]["bytes"] > 0 for event in flights)
    assert spans(events, "main", "wait for weights")
    assert_nested(events)


def shows_both_kinds(folder: Path) -> None:
    shows_weights(folder, "local_sgd", "average of weights")
    shows_weights(folder, "decentralized", "average of weights")


def test_exchanges_of_weights_show_how_long_they_were_in_flight(tmp_path: Path) -> None:
    run_ranks(shows_both_kinds, 2, tmp_path)


def records_only_between_start_and_stop(folder: Path) -> None:
    path = folder / f"out.{dist.get_rank()}"
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = DistributedDataParallel(module, algorithm="bytegrad")
    step(model, optimizer)
    timeline.start(path)
    assert timeline.is_recording()
    step(model, optimizer)
    timeline.stop()
    assert not timeline.is_recording()
    size = path.stat().st_size
    step(model, optimizer)
    assert path.stat().st_size == size
    assert len(spans(read(path), "main", "backward")) == 1
    timeline.start(path)
    timeline.stop()
    assert [event for event in read(path) if event["ph"] != "M"] == []


def test_nothing_is_recorded_before_start_and_after_stop(tmp_path: Path) -> None:
    run_ranks(records_only_between_start_and_stop, 2, tmp_path)


def dies_while_it_records(folder: Path) -> None:
    path = folder / f"out.{dist.get_rank()}"
    timeline.start(path)
    train("bytegrad")
    deadline = time.monotonic() + 60
    while '"backward"' not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_a_valid_file_with_what_it_did(tmp_path: Path) -> None:
    assert all(outcome.died for outcome in run_ranks_to_the_end(dies_while_it_records, 2, tmp_path))
    for rank in range(2):
        assert len(spans(read(tmp_path / f"out.{rank}"), "main", "backward")) == STEPS


def fills_the_disk(folder: Path) -> None:
    path = folder / f"out.{dist.get_rank()}"
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = DistributedDataParallel(module, algorithm="bytegrad", bucket_cap_mb=0.005)
    timeline.start(path)
    # The limit counts for memory that ranks share, too, which they have by now.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    for _ in range(50):
        step(model, optimizer)
    with pytest.raises(UsageError, match="timeline is not complete: File too large"):
        timeline.stop()
    read(path)


def test_a_disk_that_fills_up_ends_the_recording_and_not_the_training(tmp_path: Path) -> None:
    run_ranks(fills_the_disk, 2, tmp_path)


def test_beyond_the_limit_events_are_counted_and_the_first_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    timeline.start(path, max_events=5)
    for _ in range(8):
        with timeline.span("work", "test"):
            pass
    with pytest.warns(UserWarning, match="3 events at the end were left out"):
        timeline.stop()
    events = read(path)
    assert len([event for event in events if event["name"] == "work"]) == 5
    assert events[-1]["args"] == {"events": 3}


@pytest.mark.parametrize(
    ("path", "why"), [("/no/such/folder/out", "No such file"), ("/dev/full", "No space left"), ("/", "Is a")]
)
def test_a_file_that_cannot_be_written_is_refused_at_the_start(path: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"timeline {path}: {why}.*want a file that can be written"):
        timeline.start(path)
    assert not timeline.is_recording()


def test_a_second_recording_at_the_same_time_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    timeline.start(tmp_path / "one")
    with pytest.raises(UsageError, match="two: a timeline is being recorded already"):
        timeline.start(tmp_path / "two")
    with timeline.span("work", "test"):
        pass
    timeline.stop()
    assert "work" in {event["name"] for event in read(tmp_path / "one")}


def test_names_with_quotes_and_control_characters_are_kept(tmp_path: Path) -> None:
    timeline.start(tmp_path / "out")
    with timeline.span('a "b" \\ \n ü', "test"):
        pass
    timeline.stop()
    assert 'a "b" \\ \n ü' in {event["name"] for event in read(tmp_path / "out")}


def records_what_the_environment_asks_for(folder: Path) -> None:
    os.environ["BAGUARUN_TIMELINE"] = str(folder / "out.json")
    train("gradient_allreduce")
    train("gradient_allreduce")
    timeline.stop()
    events = read(folder / f"out.json.rank{dist.get_rank()}")
    assert len(spans(events, "main", "backward")) == 2 * STEPS


def test_the_environment_starts_one_recording_with_the_first_model(tmp_path: Path) -> None:
    run_ranks(records_what_the_environment_asks_for, 2, tmp_path)


def is_seen_by_the_profiler(algorithm: str, expected: list[str]) -> None:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = DistributedDataParallel(module, algorithm=algorithm, bucket_cap_mb=0.005)
    for _ in range(2):
        step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(STEPS):
                step(model, optimizer)
    step(model, optimizer)
    counts = {event.key: event.count for event in profiler.key_averages()}
    buckets = model.stats().buckets
    for stage in ("begin", "reduce", "complete"):
        assert counts[f"baguarun::{stage}"] == buckets * STEPS, counts
    assert counts["baguarun::wait for communication"] == STEPS
    for name in expected:
        assert counts[f"baguarun::{name}"] >= buckets * STEPS, name
    threads = {event.thread for event in profiler.events() if event.name.startswith("baguarun::")}
    assert len(threads) > 2


def test_torch_profiler_sees_the_spans_of_the_communication_threads() -> None:
    codec = ["encode", "reduce and encode", "decode"]
    run_ranks(is_seen_by_the_profiler, 2, "bytegrad", codec)
    run_ranks(is_seen_by_the_profiler, 2, "gradient_allreduce", ["all-reduce"])


def joins_a_profile(folder: Path) -> None:
    path = folder / f"{dist.get_rank()}.json"
    traces = str(folder / f"profile.{dist.get_rank()}.{{step}}.json.gz")
    timeline.start(path)
    model = train("bytegrad")
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.01)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=2),
        on_trace_ready=timeline.trace_handler(traces),
    ) as profiler:
        for _ in range(2 * (1 + STEPS)):
            step(model, optimizer)
            profiler.step()
    timeline.stop()
    for round_ in (1, 2):
        trace = Path(traces.replace("{step}", str(round_ * (1 + STEPS))))
        events: list[Event] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        ours = {pid for pid, name in names.items() if name.startswith(f"baguarun rank {dist.get_rank()} ")}
        assert len(ours) == 1, names
        rows = [event for event in events if event["pid"] in ours]
        buckets = model.stats().buckets
        assert len(spans(rows, "bucket", "on the wire")) == buckets * STEPS
        assert len(spans(rows, "bucket", "filling")) == buckets * STEPS
        assert len(spans(rows, "main thread", "backward")) == STEPS
        theirs = [event for event in events if event["pid"] == os.getpid()]
        assert any(event["name"].startswith("aten::") for event in theirs)
        encoded = sorted(event["ts"] for event in theirs if event["name"] == "baguarun::encode")
        starts = sorted(event["ts"] for event in rows if event["name"] == "encode")
        assert len(encoded) == len(starts) >= buckets * STEPS
        # The same moments, but for what a thread may stand between its looks at two clocks.
        apart_us = sorted(abs(one - other) for one, other in zip(encoded, starts, strict=True))
        assert apart_us[len(apart_us) // 2] < 1000, apart_us


def test_a_profile_has_the_rows_of_the_recording_at_the_times_of_its_own(tmp_path: Path) -> None:
    run_ranks(joins_a_profile, 2, tmp_path)


def test_a_profile_without_a_recording_is_torch_s_alone_and_says_so(tmp_path: Path) -> None:
    handler = timeline.trace_handler(tmp_path / "profile.json")
    with (
        pytest.warns(UserWarning, match=r"nothing is being recorded; want timeline.start\(\), or --timeline"),
        profile(activities=[ProfilerActivity.CPU], on_trace_ready=handler),
    ):
        torch.ones(2).sum()
    events = read(tmp_path / "profile.json")
    assert any(event["name"].startswith("aten::") for event in events)
    assert not [event for event in events if isinstance(event["pid"], int) and event["pid"] >= 1 << 30]


def test_a_profile_reads_no_more_of_a_recording_than_is_written_for_good(tmp_path: Path) -> None:
    trace, recording = tmp_path / "trace.json", tmp_path / "recording.json"
    trace.write_text(
        json.dumps(
            {
                "baseTimeNanoseconds": 1_767_225_600_000_000_000,
                "traceEvents": [{"ph": "X", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 100, "dur": 20}],
            }
        )
    )
    head = '{"displayTimeUnit":"ms","traceEvents":[\n'
    lines = [
        {"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "rank 3 (host)"}},
        {"ph": "X", "name": "before", "pid": 3, "tid": 1, "ts": 50.0, "dur": 49.0},
        {"ph": "X", "name": "begins before", "pid": 3, "tid": 1, "ts": 50.0, "dur": 51.0},
        {"ph": "i", "name": "meanwhile", "pid": 3, "tid": 1, "ts": 110.0},
        {"ph": "X", "name": "behind", "pid": 3, "tid": 1, "ts": 121.0, "dur": 1.0},
    ]
    written = head + ",\n".join(json.dumps(line) for line in lines)
    # A write is going on behind what the writer has said to be there.
    recording.write_text(written + ',\n{"ph":"X","na')
    join(trace, recording, len(written))
    events: list[Event] = json.loads(trace.read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["aten::mm", "process_name", "begins before", "meanwhile"]
    assert events[1]["args"] == {"name": "baguarun rank 3 (host)"}
    assert events[2]["ts"] == 50.0
    assert len({event["pid"] for event in events[1:]}) == 1
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def cannot_write_a_profile(folder: Path) -> None:
    timeline.start(folder / "out.json")
    with (
        pytest.warns(UserWarning, match="without the timeline's rows"),
        profile(
            activities=[ProfilerActivity.CPU],
            on_trace_ready=timeline.trace_handler("/no/such/folder/out.json"),
        ),
    ):
        torch.ones(2).sum()
    timeline.stop()


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    run_ranks(cannot_write_a_profile, 1, tmp_path)


def test_a_profile_of_a_recording_that_has_ended_says_so(tmp_path: Path) -> None:
    timeline.start(tmp_path / "out.json", max_events=1)
    handler = timeline.trace_handler(tmp_path / "profile.json")
    with (
        pytest.warns(UserWarning, match="the recording ended before"),
        profile(activities=[ProfilerActivity.CPU], on_trace_ready=handler),
    ):
        for _ in range(3):
            with timeline.span("work", "test"):
                torch.ones(2).sum()
    with pytest.warns(UserWarning, match="2 events at the end were left out"):
        timeline.stop()
    events = read(tmp_path / "profile.json")
    assert len([event for event in events if event["name"] == "work"]) == 1
    assert len([event for event in events if event["name"] == "baguarun::work"]) == 3
