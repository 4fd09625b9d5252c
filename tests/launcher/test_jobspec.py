from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baguarun.launcher.jobspec import job_spec
from baguarun.launcher.settings import CommandKind, RunSettings

BASE = RunSettings(script="train.py", script_args=("--lr", "0.1"), max_nodes=4, job_id="j", max_restarts=2)


def test_the_spec_carries_what_membership_needs() -> None:
    spec = job_spec(BASE)
    assert (spec.job_id, spec.min_nodes, spec.max_nodes, spec.max_restarts) == ("j", 1, 4, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"script": "other.py"},
        {"script": "./train.py"},
        {"script_args": ("--lr", "0.2")},
        {"script_args": ("--lr 0.1",)},
        {"script": "train.py --lr", "script_args": ("0.1",)},
        {"command_kind": CommandKind.PROGRAM},
        {"min_nodes": 2},
        {"max_nodes": 3},
        {"max_restarts": 3},
        {"algorithm": "bytegrad"},
        {"bagua_net": True},
        {"environ": {"BAGUA_NET_SECRET": "s"}},
    ],
    ids=str,
)
def test_another_command_or_size_is_another_job(change: dict[str, Any]) -> None:
    assert job_spec(replace(BASE, **change)).digest != job_spec(BASE).digest


@pytest.mark.parametrize(
    "change",
    [
        {"nproc_per_node": "8"},
        {"log_dir": "/elsewhere"},
        {"node_rank": 1},
        {"node_name": "n2"},
        {"local_addr": "10.0.0.2"},
        {"store": "etcd://other:2379"},
        {"python": "/opt/python"},
        {"environ": {"A": "b"}},
        {"tee": "3"},
        {"metrics_port": 9},
    ],
    ids=str,
)
def test_nodes_of_one_job_may_differ_in_what_is_their_own(change: dict[str, Any]) -> None:
    assert job_spec(replace(BASE, **change)) == job_spec(BASE)


def test_the_summary_is_one_line_that_shows_the_difference() -> None:
    assert job_spec(BASE).summary == "--nnodes 1:4 --max-restarts 2 --elastic restart train.py --lr 0.1"
    hostile = replace(
        BASE, script="my 'script'.py", script_args=("a\nb\udcff", "x" * 500), algorithm="bytegrad"
    )
    summary = job_spec(hostile).summary
    assert summary.isprintable()
    assert r"a\nb\udcff" in summary
    assert len(summary) < 300
    assert "--algorithm bytegrad" in summary


def test_a_secret_is_never_shown_and_two_of_them_are_not_compared() -> None:
    one, other = (
        job_spec(replace(BASE, bagua_net=True, environ={"BAGUA_NET_SECRET": secret}))
        for secret in ("hush", "hush-hush")
    )
    assert one == other
    assert one.summary == (
        "BAGUA_NET_SECRET=*** --nnodes 1:4 --max-restarts 2 --elastic restart --bagua-net train.py --lr 0.1"
    )


def test_module_and_program_are_told_apart_in_the_summary() -> None:
    assert " -m train.py " in job_spec(replace(BASE, command_kind=CommandKind.MODULE)).summary
    assert " --no-python train.py " in job_spec(replace(BASE, command_kind=CommandKind.PROGRAM)).summary
