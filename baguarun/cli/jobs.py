"""`baguarun jobs`: the jobs that a store knows, running or not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from baguarun.cli.console import show
from baguarun.cli.job_line import JobLine, ago, store_options, table
from baguarun.elastic.membership.report import JobSummary, list_jobs
from baguarun.launcher.reach import ask_everywhere


def main(argv: Sequence[str]) -> int:
    """Print the list; an empty one is no error."""
    line = JobLine("jobs", "List the jobs that a store knows, running or not.", job=False)
    line.add_argument("--json", action="store_true", help="for programs; times are Unix seconds")
    words = line.parse_args(argv)
    answers = ask_everywhere(store_options(words), list_jobs, _warn)
    found = [summary for answer in answers for summary in answer]
    if words.json:
        show(json.dumps([to_json(summary) for summary in found], indent=2))
    elif found:
        now_s = time.time()
        head = ("JOB", "STATE", "NODES", "WORKERS", "WORLD", "FORMED", "COMMAND")
        show("\n".join(table([head, *(_row(summary, now_s) for summary in found)])))
    else:
        show("no jobs")
    return 0


def to_json(summary: JobSummary) -> dict[str, Any]:
    spec, world, outcome = summary.spec, summary.world, summary.outcome
    return {
        "job_id": spec.job_id,
        "state": summary.state.value,
        "command": spec.summary,
        "registered_nodes": summary.num_registered,
        "generation": world.generation if world else 0,
        "world_size": world.world_size if world else 0,
        "formed_s": world.formed_s if world else None,
        "exit_code": outcome.exit_code if outcome else None,
    }


def _warn(text: str) -> None:
    print(f"baguarun: {text}", file=sys.stderr)


def _row(summary: JobSummary, now_s: float) -> tuple[str, ...]:
    world = summary.world
    size, number, formed = "", "", ""
    if world is not None:
        size, number, formed = str(world.world_size), str(world.generation), ago(now_s, world.formed_s)
    nodes = str(summary.num_registered)
    return (summary.spec.job_id, summary.state.value, nodes, size, number, formed, summary.spec.summary)
