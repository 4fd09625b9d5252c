"""From registration to exit: baguanet groups leave nothing behind, whatever way they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.backend import BaguanetOptions
from baguarun.comm.groups import usable_backends
from baguarun.errors import UsageError
from tests.comm.ranks import run_ranks
from tests.support.etcd_servers import free_port

ROOT = Path(__file__).resolve().parents[2]


def open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    found = []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(folder / name))
        except FileNotFoundError:
            # The one that listed the folder.
            continue
    return sorted(found)


def threads() -> list[str]:
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


def mappings() -> int:
    return sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())


def new_group(folder: str, number: int, backend: str = "baguanet") -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / str(number)), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))


def fifty_groups(folder: str) -> None:
    before: tuple[list[str], list[str], int] | None = None
    for number in range(50):
        new_group(folder, number)
        subgroup = dist.new_group([0, 1], pg_options=BaguanetOptions(arena_bytes=2**20))
        backend = subgroup._get_backend(torch.device("cpu"))
        shared = backend.allocate_tensor(2**18, dtype=torch.float32, device=torch.device("cpu"))
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
        dist.all_reduce(torch.ones(3), group=subgroup)
        dist.all_reduce(shared.fill_(1), group=subgroup)
        peer = 1 - dist.get_rank()
        receive = dist.irecv(torch.zeros(10), peer)
        dist.send(torch.ones(10), peer)
        assert receive is not None and receive.wait()
        for work in works:
            assert work is not None and work.wait()
        if number % 2:
            # Dropped with a message under way.
            dist.irecv(torch.zeros(10), peer)
        state = (open_files(), threads(), mappings())
        before = before or state
        assert [len(part) for part in state[:2]] == [len(part) for part in before[:2]], (state, before)
        assert state[2] == before[2]


def test_fifty_groups_in_one_process_leave_no_descriptor_thread_or_mapping(tmp_path: Path) -> None:
    run_ranks(fifty_groups, 2, str(tmp_path))


def threads_of_a_group() -> None:
    for _ in range(10):
        dist.all_reduce(torch.ones(100))
    assert "baguanet" not in threads()
    work = dist.all_reduce(torch.ones(100), async_op=True)
    assert work is not None and work.wait()
    assert threads().count("baguanet") == 1
    before = time.process_time()
    time.sleep(1)
    # Nothing to do: not even a look at the clock now and then.
    assert time.process_time() - before < 0.01
    dist.destroy_process_group()
    assert "baguanet" not in threads()


def test_a_group_has_one_thread_at_most_and_that_sleeps() -> None:
    run_ranks(threads_of_a_group, 2)


def in_a_forked_child() -> tuple[str, str]:
    work = dist.all_reduce(torch.ones(100), async_op=True)
    pending = dist.irecv(torch.zeros(5), 1 - dist.get_rank(), tag=1)
    assert work is not None and pending is not None and work.wait()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        # As DataLoader's workers may: drops the group without a word.
        dist.destroy_process_group()
        del work, pending
        os._exit(7)
    os.close(writer)
    said = os.read(reader, 4096).decode()
    status = os.waitpid(child, 0)[1]
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.send(torch.ones(5), 1 - dist.get_rank(), tag=1)
    assert pending.wait()
    return said, f"{os.waitstatus_to_exitcode(status)} {total.item()}"


def test_a_forked_child_is_refused_and_can_drop_the_group_without_harm() -> None:
    for said, end in run_ranks(in_a_forked_child, 2):
        assert "a child made by fork() cannot use it" in said
        assert end == "7 2.0"


def load_with_workers() -> list[float]:
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=2)  # type: ignore[arg-type]
    sums = []
    for batch in loader:
        total = batch.float()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None and work.wait()
        sums.append(total.sum().item())
    return sums


def test_workers_of_a_data_loader_run_beside_a_group() -> None:
    # Daemons may have no children of their own.
    script = (
        "import torch.distributed as dist, baguarun.comm.backend\n"
        "from tests.comm.test_backend_life import load_with_workers\n"
        "dist.init_process_group('baguanet')\n"
        "assert load_with_workers() == [2.0, 10.0, 18.0, 26.0]\n"
    )
    assert run_scripts(script) == [(0, ""), (0, "")]


def run_scripts(script: str, world_size: int = 2) -> list[tuple[int, str]]:
    """Exit code and standard error of one process per rank that runs `script` as torchrun would."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@pytest.mark.parametrize("module", ["baguarun.comm.backend", "baguarun.comm.extension"])
def test_a_module_of_ours_may_be_what_imports_torch_first(module: str) -> None:
    script = (
        f"import sys, {module}\n"
        "assert 'torch' in sys.modules\n"
        "import torch.distributed as dist\n"
        "assert dist.is_backend_available('baguanet')\n"
    )
    assert run_scripts(script, 1) == [(0, "")]


START = """
import sys, torch, torch.distributed as dist
import baguarun.comm.backend
dist.init_process_group("baguanet")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1000))
"""

ENDINGS = {
    "nothing": "",
    "an operation that was awaited": "dist.all_reduce(torch.ones(9), async_op=True).wait()",
    "messages under way": (
        "works = [dist.irecv(torch.ones(9), 1 - rank), dist.irecv(torch.ones(9))]; dist.barrier()"
    ),
    "an exit out of a function": "work = dist.all_reduce(torch.ones(9), async_op=True); sys.exit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_interpreter_that_exits_without_a_farewell_neither_hangs_nor_crashes(ending: str) -> None:
    for code, said in run_scripts(START + ENDINGS[ending]):
        assert code == 0, said


def test_callbacks_of_python_do_not_disturb_an_exit() -> None:
    script = """
work = dist.all_reduce(torch.ones(9), async_op=True)
work.get_future().then(lambda done: done.value()[0].add_(1))
if rank == 0:
    waiting = dist.all_reduce(torch.ones(9), async_op=True)
    waiting.get_future().then(lambda done: print(done.value()))
"""
    for code, said in run_scripts(START + script):
        assert code == 0, said


def messages_outlive_their_sender(folder: str) -> list[float]:
    rank = dist.get_rank()
    new_group(folder, 0)
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.full((1000,), 5.0) if rank == 0 else torch.zeros(1000)
    if rank == 0:
        dist.send(tensor, 1)
        dist.destroy_process_group()
        store.set("gone", "")
    else:
        store.wait(["gone"])
        dist.recv(tensor, 0)
    return [tensor[0].item(), tensor[-1].item()]


def test_a_message_that_was_sent_arrives_though_its_sender_has_left(tmp_path: Path) -> None:
    assert run_ranks(messages_outlive_their_sender, 2, str(tmp_path)) == [[5.0, 5.0]] * 2


def last_collective_then_leave(folder: str) -> int:
    for number in range(60):
        new_group(folder, number)
        dist.all_reduce(torch.ones(1 + 7000 * (number % 5)))
    dist.destroy_process_group()
    return 60


def test_nobody_minds_who_leaves_right_after_the_last_collective(tmp_path: Path) -> None:
    assert run_ranks(last_collective_then_leave, 3, str(tmp_path)) == [60] * 3


def unfinished_then_destroy(folder: str) -> list[float]:
    new_group(folder, 0)
    tensors = [torch.full((10_000,), float(number)) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.destroy_process_group()
    assert all(work is not None and work.is_completed() for work in works)
    return [tensor[0].item() for tensor in tensors]


def test_destroying_a_group_finishes_what_was_started(tmp_path: Path) -> None:
    wanted = [2.0 * number for number in range(20)]
    assert run_ranks(unfinished_then_destroy, 2, str(tmp_path)) == [wanted, wanted]


def keys_left(folder: str) -> int:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / "store"), size)
    before = store.num_keys() if hasattr(store, "num_keys") else 0
    dist.init_process_group("baguanet", store=store, rank=rank, world_size=size)
    dist.barrier()
    return store.num_keys() - before


def test_nothing_is_left_in_the_store(tmp_path: Path) -> None:
    assert max(run_ranks(keys_left, 2, str(tmp_path))) <= 0


def backends_that_share() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    evens = dist.new_group(list(range(0, size, 2)))
    gloo = dist.new_group(backend="gloo")
    both = dist.new_group(backend="cpu:baguanet,cuda:gloo")
    for group, members in ((evens, (size + 1) // 2), (gloo, size), (both, size)):
        if group is evens and rank % 2:
            continue
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == members
        assert dist.get_backend(group) == {evens: "baguanet", gloo: "gloo"}.get(
            group, "cpu:baguanet,cuda:gloo"
        )


def test_groups_of_some_ranks_and_of_other_backends_live_beside_it() -> None:
    run_ranks(backends_that_share, 3)


def options_are_refused() -> None:
    with pytest.raises(UsageError, match=r"want baguarun\.comm\.backend\.BaguanetOptions"):
        dist.new_group(pg_options=object())
    with pytest.raises(UsageError, match="arena_bytes=-1: want zero or more"):
        BaguanetOptions(arena_bytes=-1)


def test_options_that_it_does_not_have_are_refused() -> None:
    run_ranks(options_are_refused, 1)


def usable(backend: str, has_cuda: bool) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return usable_backends(backend, has_cuda)


def test_the_part_for_cuda_is_left_out_with_a_warning_where_there_is_none() -> None:
    assert usable("cpu:baguanet,cuda:nccl", has_cuda=True) == "cpu:baguanet,cuda:nccl"
    with pytest.warns(UserWarning, match="no CUDA device.*cpu:baguanet is used"):
        assert usable_backends("cpu:baguanet,cuda:nccl", has_cuda=False) == "cpu:baguanet"
    # What asks for CUDA alone is torch's to refuse.
    assert usable("cuda:nccl", has_cuda=False) == "cuda:nccl"
    assert usable("gloo", has_cuda=False) == "gloo"


def test_an_installed_package_makes_it_known_to_torch_without_an_import() -> None:
    script = """
import torch.distributed as dist
dist.init_process_group("baguanet")
dist.barrier()
dist.destroy_process_group()
"""
    assert run_scripts(script, world_size=1) == [(0, "")]
