"""Exchange by rail between two hosts with two ranks each, in network namespaces: what their NICs send."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab import Lab

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[2]
RANKS_PER_HOST = 2

SCRIPT = """
import json, sys, torch, torch.distributed as dist
import baguarun
from baguarun.comm.algorithms import ByteGrad, GradientAllReduce, PowerSGD

baguarun.init_process_group(sys.argv[1])
STEPS, SIZE = 8, 1024

def sent():
    dist.barrier()
    (line,) = [line for line in open("/proc/net/dev") if "eth0:" in line]
    return int(line.split(":")[1].split()[8])

def bytes_per_step(algorithm):
    torch.manual_seed(0)
    model = baguarun.DistributedDataParallel(torch.nn.Linear(SIZE, SIZE, bias=False), algorithm=algorithm)
    x = torch.full((1, SIZE), 1.0 + dist.get_rank())
    for step in range(2 + STEPS):
        if step == 2:
            before = sent()
        model.zero_grad()
        model(x).sum().backward()
        assert torch.allclose(model.module.weight.grad, torch.full((SIZE, SIZE), 2.5), rtol=1e-2)
    return (sent() - before) / STEPS

found = {
    "bytegrad, flat": bytes_per_step(ByteGrad(hierarchical=False)),
    "bytegrad, by rail": bytes_per_step(ByteGrad(hierarchical=True)),
    "bytegrad, auto": bytes_per_step(ByteGrad()),
    "allreduce, flat": bytes_per_step(GradientAllReduce()),
    "allreduce, by rail": bytes_per_step(GradientAllReduce(hierarchical=True)),
    "power_sgd, flat": bytes_per_step(PowerSGD(rank=4, start_step=0, hierarchical=False)),
    "power_sgd, auto": bytes_per_step(PowerSGD(rank=4, start_step=0)),
}
if dist.get_rank() % 2 == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def bytes_by_host(backend: str) -> list[dict[str, float]]:
    """Bytes per step that each host's NIC sent, by algorithm."""
    processes: list[subprocess.Popen[Any]] = []
    with Lab(hosts=2) as lab:
        world = {"MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29400", "WORLD_SIZE": "4"}
        for rank in range(2 * RANKS_PER_HOST):
            # No GROUP_RANK: ranks find out by themselves who is on which host.
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank % RANKS_PER_HOST)}
            settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)}
            processes.append(
                lab.hosts[rank // RANKS_PER_HOST].popen(
                    [sys.executable, "-c", SCRIPT, backend],
                    env={**os.environ, **world, **place, **settings},
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        ended = [process.communicate(timeout=100) for process in processes]
    for process, (_, complaint) in zip(processes, ended, strict=True):
        assert process.returncode == 0, complaint
    return [json.loads(said) for said, _ in ended[::RANKS_PER_HOST]]


@pytest.mark.parametrize("backend", ["baguanet", "gloo"])
def test_by_rail_a_nic_sends_half_of_what_it_sends_when_all_exchange_with_all(backend: str) -> None:
    size = 1024 * 1024
    for found in bytes_by_host(backend):
        # Each of two ranks sends half of the bucket in each of two stages: 8 bits per number in all.
        assert found["bytegrad, by rail"] == pytest.approx(size, rel=0.05), found
        assert found["bytegrad, flat"] == pytest.approx(2 * size, rel=0.05), found
        assert found["bytegrad, auto"] == pytest.approx(found["bytegrad, by rail"], rel=0.02), found
        assert found["allreduce, by rail"] == pytest.approx(4 * size, rel=0.05), found
        # P and Q, of 4 x 1024 numbers each: two ranks send all of it to two others, or half of it to one.
        vectors = 2 * 4 * 1024 * 4
        assert found["power_sgd, flat"] == pytest.approx(4 * vectors, rel=0.05), found
        assert found["power_sgd, auto"] == pytest.approx(vectors, rel=0.1), found
        if backend == "baguanet":
            # Whose all-reduce sums up inside the host in any case.
            assert found["allreduce, flat"] == pytest.approx(4 * size, rel=0.05), found
