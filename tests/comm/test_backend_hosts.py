"""baguanet between hosts, in network namespaces: two ranks on each of two hosts, in torch's words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.lab import Lab

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[2]
RANKS_PER_HOST = 2

START = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("baguanet")
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
"""

EVERYTHING = """
for count in (1, 1000, 300_001):
    tensor = torch.full((count,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.eq(10).all()
    whole = torch.empty(size, count)
    dist.all_gather_into_tensor(whole, torch.full((count,), float(rank)))
    assert torch.equal(whole, torch.arange(4.0).view(4, 1).expand(4, count))
    part = torch.empty(count)
    dist.reduce_scatter_tensor(part, whole.view(-1))
    assert part.eq(4 * rank).all()
    received = torch.empty(count)
    receive = dist.irecv(received, (rank - 1) % size)
    dist.send(torch.full((count,), float(rank)), (rank + 1) % size)
    assert receive.wait() and received.eq((rank - 1) % size).all()
found = [None] * size
dist.all_gather_object(found, "x" * rank)
assert found == ["x" * peer for peer in range(size)]
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
model(torch.full((3, 50), float(rank))).sum().backward()
assert model.module.weight.grad.eq(3 * 1.5).all()
dist.destroy_process_group()
print("went well")
"""

ONE_IS_KILLED = """
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(100_000))
except dist.DistBackendError as error:
    print(error)
"""


ONE_COMPUTES_FOR_LONG = """
if rank == 3:
    sum(range(300_000_000))  # one call, which lets no other thread of Python run
dist.barrier()
dist.destroy_process_group()
print("went well")
"""

ONE_IS_STOPPED = """
import time
store = dist.distributed_c10d._get_default_store()
if rank == 3:
    store.set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
stopped = int(store.get("pid"))
try:
    while True:
        # Most of the time nobody waits for anybody.
        time.sleep(0.05)
        if rank < 2:
            dist.send(torch.ones(1), 1 - rank) if rank else dist.recv(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 3)
except dist.DistBackendError as error:
    print(error)
if rank == 2:
    os.kill(stopped, signal.SIGKILL)
"""


ONE_SENDS_MUCH = """
import time
large, small = torch.ones(8_000_000), torch.zeros(100_000)
if rank == 0:
    sending = dist.isend(large, 2, tag=1)
    time.sleep(0.3)
    dist.recv(small, 2, tag=2)
    assert small.eq(1).all() and not sending.is_completed()
    sending.wait()
if rank == 2:
    receiving = dist.irecv(large.zero_(), 0, tag=1)
    dist.send(small.fill_(1), 0, tag=2)
    receiving.wait()
    assert large.eq(1).all()
dist.destroy_process_group()
print("went well")
"""


ONE_IS_KILLED_AFTER_THE_FIRST_PART = """
from baguarun.comm.backend import backend_on_cpu
from baguarun.comm.extension import load_extension
store = dist.distributed_c10d._get_default_store()
source, into = torch.arange(1 << 23) + float(rank), torch.zeros(1 << 23)
average = load_extension().Average(backend_on_cpu(dist.group.WORLD), source, into)
average.wait(1 << 20)
assert torch.equal(into[: 1 << 20], torch.arange(1 << 20) + 1.5)
store.set(f"{rank} has it", "")
if rank == 3:
    # The rest takes seconds.
    store.wait([f"{other} has it" for other in range(3)])
    assert not average.is_done()
    os.kill(os.getpid(), signal.SIGKILL)
try:
    average.wait(1 << 23)
except dist.DistBackendError as error:
    print(error)
try:
    average.wait(1)
except dist.DistBackendError:
    print("no longer whole")
"""


def run(script: str, rate_mbit: float | None = None, **environ: str) -> list[tuple[int, str]]:
    """Exit code and output of each rank."""
    with Lab(hosts=2, rate_mbit=rate_mbit) as lab:
        world = {"MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29400", "WORLD_SIZE": "4"}
        processes = []
        for rank in range(2 * RANKS_PER_HOST):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank % RANKS_PER_HOST)}
            processes.append(
                lab.hosts[rank // RANKS_PER_HOST].popen(
                    [sys.executable, "-c", START + script],
                    env={**os.environ, **world, **place, "OMP_NUM_THREADS": "1", **environ},
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        said = [process.communicate(timeout=100)[0] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def test_collectives_messages_and_training_cross_hosts() -> None:
    for code, said in run(EVERYTHING):
        assert code == 0 and "went well" in said, said


def test_messages_come_in_while_a_large_one_goes_out() -> None:
    for code, said in run(ONE_SENDS_MUCH, rate_mbit=100):
        assert code == 0 and "went well" in said, said


def test_survivors_on_both_hosts_name_the_rank_that_was_killed() -> None:
    ended = run(ONE_IS_KILLED)
    assert [code for code, _ in ended] == [0, 0, 0, -9], ended
    for _, said in ended[:3]:
        # Torch's store has a word to say, too.
        (error,) = [line for line in said.splitlines() if line.startswith("baguanet: ")]
        assert "rank 3" in error and "imed out" not in error, said


def test_of_an_average_the_first_part_is_there_before_the_rest_fails() -> None:
    ended = run(ONE_IS_KILLED_AFTER_THE_FIRST_PART, rate_mbit=100)
    assert [code for code, _ in ended] == [0, 0, 0, -9], ended
    for _, said in ended[:3]:
        (error,) = [line for line in said.splitlines() if line.startswith("baguanet: all_reduce")]
        assert "rank 3" in error and "no longer whole" in said, said


def test_a_rank_that_computes_gives_signs_of_life_though_python_has_no_time() -> None:
    for code, said in run(ONE_COMPUTES_FOR_LONG, BAGUA_NET_BEAT_TIMEOUT_S="1"):
        assert code == 0 and "went well" in said, said


def test_a_rank_that_is_stopped_is_named_by_all_also_by_those_who_do_not_wait_for_it() -> None:
    ended = run(ONE_IS_STOPPED, BAGUA_NET_BEAT_TIMEOUT_S="2")
    assert [code for code, _ in ended] == [0, 0, 0, -9], ended
    for _, said in ended[:3]:
        (error,) = [line for line in said.splitlines() if line.startswith("baguanet: ")]
        assert "rank 3" in error and "no sign of life" in error, said
