"""`baguarun status JOB`: what a job does, on which nodes, and what has happened to it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from baguarun.cli.console import show
from baguarun.cli.job_line import JobLine, ago, store_options, table
from baguarun.elastic.membership.job import UNLIMITED_RESTARTS
from baguarun.elastic.membership.report import JobReport, NodeReport, read_job
from baguarun.elastic.membership.stragglers import Pace, straggling
from baguarun.errors import UsageError
from baguarun.launcher.reach import ask_about


def main(argv: Sequence[str]) -> int:
    """Print it; 0 if the job is known, whatever has become of it."""
    line = JobLine("status", "Show what a job does, on which nodes, and what has happened to it.")
    line.add_argument("--json", action="store_true", help="for programs; times are Unix seconds")
    words = line.parse_args(argv)
    report = ask_about(words.job, store_options(words), partial(read_job, job_id=words.job))
    if report is None:
        raise UsageError(f"job {words.job!r}: it was removed from the store a moment ago")
    show(json.dumps(to_json(report), indent=2) if words.json else to_text(report, time.time()))
    return 0


def to_json(report: JobReport) -> dict[str, Any]:
    """Everything but the job's secret."""
    summary, world = report.summary, report.summary.world
    spec, outcome = summary.spec, summary.outcome
    return {
        "job_id": spec.job_id,
        "state": summary.state.value,
        "command": spec.summary,
        "min_nodes": spec.min_nodes,
        "max_nodes": spec.max_nodes,
        "desired_nodes": report.desired,
        "registered_nodes": summary.num_registered,
        "restarts": world.restart_count if world else 0,
        "max_restarts": spec.max_restarts,
        "waiting": report.note or None,
        "world": {
            "generation": world.generation,
            "num_nodes": world.num_nodes,
            "world_size": world.world_size,
            "master_addr": world.master_addr,
            "formed_s": world.formed_s,
            "reason": world.reason,
        }
        if world
        else None,
        "nodes": [asdict(node) | {"state": node.state.value} for node in report.nodes],
        "workers": [asdict(pace) | {"straggles": pace in straggling(report.paces)} for pace in report.paces],
        "events": [asdict(event) for event in report.events],
        "outcome": asdict(outcome) if outcome else None,
    }


def to_text(report: JobReport, now_s: float) -> str:
    """For people; `now_s` is Unix time."""
    summary, world = report.summary, report.summary.world
    spec = summary.spec
    lines = [f"job {spec.job_id}: {summary.state.value}"]
    if world is not None:
        lines.append(
            f"  World {world.generation}: nodes {world.num_nodes}, workers {world.world_size}, formed "
            f"{ago(now_s, world.formed_s)}: {world.reason}"
        )
    scaled = "" if report.desired is None else f", scaled to {report.desired}"
    lines.append(
        f"  nodes: {summary.num_registered} here ({spec.min_nodes} to {spec.max_nodes} wanted{scaled})"
    )
    restarts = str(world.restart_count if world else 0)
    limit = ", no limit" if spec.max_restarts == UNLIMITED_RESTARTS else f" of {spec.max_restarts} used"
    lines.append(f"  restarts: {restarts}{limit}")
    if report.note:
        lines.append(f"  waiting: {report.note}")
    if summary.outcome is not None:
        lines.append(f"  outcome: {summary.outcome.reason} (exit code {summary.outcome.exit_code})")
    lines.append(f"  command: {spec.summary}")
    if report.nodes:
        head = ("  node", "rank", "state", "workers", "registered", "address", "id")
        lines += ["", *table([head, *(_row(node, now_s) for node in report.nodes)])]
        lines += ["* leads"] if any(node.leads for node in report.nodes) else []
    lines += _pace_lines(report.paces)
    if report.events:
        rows = [(f"  {ago(now_s, e.time_s)}", f"World {e.generation}", e.text) for e in report.events]
        lines += ["", "what happened:", *table(rows)]
    return "\n".join(lines)


def _pace_lines(paces: Sequence[Pace]) -> list[str]:
    slow = straggling(paces)
    rows = [("  rank", "steps", "busy per step", "")]
    for pace in paces:
        busy = "" if pace.busy_s is None else f"{pace.busy_s:.3g} s"
        rows.append((f"  {pace.rank}", str(pace.steps), busy, "straggler" if pace in slow else ""))
    return ["", *table(rows)] if paces else []


def _row(node: NodeReport, now_s: float) -> tuple[str, ...]:
    ranks = ""
    if node.first_rank is not None and node.slots:
        last = node.first_rank + node.slots - 1
        ranks = f"{node.first_rank}" if node.slots == 1 else f"{node.first_rank}-{last}"
    since = "" if node.registered_s is None else ago(now_s, node.registered_s)
    mark = "* " if node.leads else "  "
    return (mark + node.name, ranks, node.state.value, str(node.slots), since, node.address, node.node_id)
