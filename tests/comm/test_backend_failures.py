"""What goes wrong in a baguanet group is an error on every rank that names the operation and who is to blame.

The timeout of these groups is a minute: an error that is not one of time came long before.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from baguarun.elastic.training.in_place import blamed
from tests.comm.ranks import Outcome, run_ranks, run_ranks_to_the_end


def reform(folder: str, name: str, timeout: timedelta = timedelta(seconds=30)) -> None:
    """A new default group of the same ranks, with a store file of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / name), size)
    dist.init_process_group("baguanet", store=store, rank=rank, world_size=size, timeout=timeout)


def text_of(call: Callable[[], object]) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value)


def await_the_others(what: str) -> None:
    """A barrier that the group knows nothing of."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{what} {dist.get_rank()}", "")
    store.wait([f"{what} {peer}" for peer in range(dist.get_world_size())])


def one_is_killed(operation: str) -> str:
    rank = dist.get_rank()
    tensor, whole = torch.ones(50_000), torch.ones(150_000)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, tensor),
        "broadcast": lambda: dist.broadcast(tensor, src=2),
        "barrier": dist.barrier,
        "receive": lambda: dist.recv(tensor, 2),
        "async": lambda: dist.all_reduce(tensor, async_op=True).wait(),  # type: ignore[union-attr]
    }
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return text_of(calls[operation])


@pytest.mark.parametrize(
    "operation", ["all_reduce", "all_gather", "broadcast", "barrier", "receive", "async"]
)
def test_survivors_of_a_killed_rank_get_an_error_that_names_it(operation: str) -> None:
    outcomes = run_ranks_to_the_end(one_is_killed, 3, operation)
    assert outcomes[2].died
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.traceback
        assert "rank 2" in outcome.value and "imed out" not in outcome.value, outcome.value
        assert ("all_reduce" if operation == "async" else operation) in outcome.value


def one_of_a_smaller_group_is_killed() -> str:
    group, rank = dist.new_group([1, 3]), dist.get_rank()
    if rank in (0, 2):
        return ""
    dist.barrier(group=group)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return text_of(lambda: dist.all_reduce(torch.ones(50_000), group=group))


def test_an_error_in_a_group_of_some_ranks_says_which_ranks_of_the_world_these_are() -> None:
    outcomes = run_ranks_to_the_end(one_of_a_smaller_group_is_killed, 4)
    said = outcomes[1].value
    assert outcomes[3].died and outcomes[1].error is None, outcomes[1].traceback
    assert "(its ranks are the World's 1, 3): rank 1 (" in said, said
    assert blamed(said) == 3


def survivors_go_on(folder: str) -> float:
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    text_of(dist.barrier)
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / "second"), 2)
    dist.init_process_group("baguanet", store=store, rank=rank // 2, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_survivors_form_a_new_group_in_the_same_processes(tmp_path: Path) -> None:
    outcomes = run_ranks_to_the_end(survivors_go_on, 3, str(tmp_path))
    assert [outcomes[0].value, outcomes[2].value] == [2.0, 2.0], outcomes


def one_stays_away(folder: str) -> list[str]:
    rank = dist.get_rank()
    said = []
    reform(folder, "group", timeout=timedelta(seconds=1))
    if rank != 1:
        said.append(text_of(lambda: dist.all_reduce(torch.ones(3))))
        # And for good.
        said.append(text_of(dist.barrier))
    await_the_others("end")
    return said


def test_a_rank_that_stays_away_is_named_with_the_operation_after_the_timeout(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(one_stays_away, 3, str(tmp_path))):
        for text, operation in zip(said, ["all_reduce", "barrier"], strict=rank != 1):
            assert operation in text and "rank 1" in text, text


def timeouts_of_an_operation() -> list[str]:
    """A timeout of the call's own, one set for the group later, and one of the wait."""
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    if dist.get_rank() == 1:
        await_the_others("end")
        return []
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    said = [text_of(lambda: work.wait(timedelta(milliseconds=50)))]
    assert not work.is_completed()
    assert backend.options._timeout == timedelta(seconds=60)
    backend._set_default_timeout(timedelta(milliseconds=200))
    assert backend.options._timeout == timedelta(milliseconds=200)
    receive = dist.irecv(torch.ones(3), 1)
    assert receive is not None
    said.append(text_of(receive.wait))
    # That one broke the group.
    said.append(text_of(work.wait))
    await_the_others("end")
    return said


def test_a_wait_has_a_timeout_of_its_own_and_the_groups_can_be_changed() -> None:
    outcomes = run_ranks_to_the_end(timeouts_of_an_operation, 2)
    assert outcomes[0].error is None, outcomes[0].traceback
    not_yet, receive, collective = outcomes[0].value
    assert "all_reduce" in not_yet and "50 ms" in not_yet
    assert "receive from rank 1" in receive and "timed out after 200 ms" in receive
    assert "all_reduce" in collective and "receive from rank 1" in collective


def a_callback_waits_for_a_message() -> list[float]:
    if dist.get_rank() == 1:
        await_the_others("begin")
        dist.send(torch.ones(3), 0)
        # The message is through while rank 0 is in the collective, so both end together there.
        time.sleep(0.3)
        dist.all_reduce(torch.ones(1))
        return []
    found = torch.zeros(3)
    receive = dist.irecv(found, 1)
    reduced = dist.all_reduce(torch.ones(1), async_op=True)
    assert receive is not None and reduced is not None
    seen = reduced.get_future().then(lambda _: receive.wait(timedelta(seconds=10)) and found.tolist())
    await_the_others("begin")
    return list(seen.wait())


def test_a_callback_may_wait_for_a_message_that_ended_with_its_collective() -> None:
    assert run_ranks(a_callback_waits_for_a_message, 2)[0] == [1.0] * 3


def a_callback_waits_for_what_is_queued() -> list[float]:
    if dist.get_rank() == 1:
        await_the_others("begin")
    one, two = torch.ones(1), torch.ones(1)
    first, second = (dist.all_reduce(tensor, async_op=True) for tensor in (one, two))
    assert first is not None and second is not None
    awaited = second.get_future()
    seen = first.get_future().then(lambda _: awaited.wait() and [one.item(), two.item()])
    if dist.get_rank() == 0:
        # Nobody but the callback's thread has anything to do with the group.
        await_the_others("begin")
    return list(seen.wait())


def test_a_callback_may_wait_for_a_collective_that_comes_after_its_own() -> None:
    assert run_ranks(a_callback_waits_for_what_is_queued, 2) == [[2.0, 2.0]] * 2


def a_callback_waits_for_what_another_thread_starts() -> float:
    one, two = torch.ones(1), torch.ones(1)
    if dist.get_rank() == 1:
        await_the_others("begin")
        dist.all_reduce(one)
        dist.all_reduce(two)
        return two.item()
    calls = threading.Event()
    later: list[torch.futures.Future[list[torch.Tensor]]] = []
    first = dist.all_reduce(one, async_op=True)
    assert first is not None

    def await_it(_done: object) -> float:
        calls.set()
        while not later:
            time.sleep(0.01)
        later[0].wait()
        return two.item()

    seen = first.get_future().then(await_it)
    await_the_others("begin")
    assert calls.wait(30)
    second = dist.all_reduce(two, async_op=True)
    assert second is not None
    later.append(second.get_future())
    return float(seen.wait())


def test_a_callback_may_wait_for_what_another_thread_starts_meanwhile() -> None:
    assert run_ranks(a_callback_waits_for_what_another_thread_starts, 2) == [2.0, 2.0]


def an_option_of_the_call() -> str:
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 1:
        await_the_others("end")
        return ""
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=100)
    said = text_of(lambda: group.allreduce([torch.ones(3)], options).wait())
    await_the_others("end")
    return said


def test_a_collective_may_have_a_timeout_of_its_own() -> None:
    outcomes = run_ranks_to_the_end(an_option_of_the_call, 2)
    assert outcomes[0].error is None, outcomes[0].traceback
    assert "all_reduce" in outcomes[0].value and "rank 1" in outcomes[0].value


def aborted_by_a_thread() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    if dist.get_rank() == 1:
        # Waits for rank 0's message, and hears of the abort.
        return [text_of(lambda: dist.recv(torch.ones(3), 0))]
    receive = dist.irecv(torch.ones(3), 1)
    queued = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    timer = threading.Timer(0.2, backend.abort)
    timer.start()
    assert receive is not None
    return [text_of(work.wait) for work in [*queued, receive] if work is not None]


def test_abort_from_another_thread_ends_everything_on_every_rank() -> None:
    for rank, said in enumerate(run_ranks(aborted_by_a_thread, 2)):
        assert len(said) == (4, 1)[rank]
        for text in said:
            assert "abort() was called on rank 0" in text, text


def aborted_while_nobody_calls(folder: str) -> str:
    os.environ["NCCL_HOSTID"] = str(dist.get_rank())
    reform(folder, "over sockets")
    dist.barrier()
    # An abort ends what others have not got to the end of yet, be it this barrier.
    await_the_others("met")
    if dist.get_rank() == 1:
        # Its timeout would come in half a minute, with another error.
        said = text_of(lambda: dist.recv(torch.ones(3), 0))
        await_the_others("told")
        return said
    group = dist.group.WORLD
    assert group is not None
    group._get_backend(torch.device("cpu")).abort()
    await_the_others("told")
    return ""


def test_an_abort_reaches_other_hosts_though_this_rank_calls_nothing_any_more(tmp_path: Path) -> None:
    outcomes = run_ranks_to_the_end(aborted_while_nobody_calls, 2, str(tmp_path))
    assert outcomes[1].error is None, outcomes[1].traceback
    assert "abort() was called on rank 0" in outcomes[1].value


def receives_from_any_of_those_who_have_left(folder: str, is_apart: bool) -> str:
    if is_apart:
        os.environ["NCCL_HOSTID"] = str(dist.get_rank())
        reform(folder, "over sockets")
    if dist.get_rank() != 0:
        dist.send(torch.ones(3), 0)
        dist.destroy_process_group()
        return ""
    found = torch.zeros(3)
    for _ in range(2):
        dist.recv(found)
    return text_of(lambda: dist.recv(found))


@pytest.mark.parametrize("is_apart", [False, True])
def test_who_receives_from_any_rank_is_told_when_all_others_have_left(tmp_path: Path, is_apart: bool) -> None:
    (said, *_) = run_ranks(receives_from_any_of_those_who_have_left, 3, str(tmp_path), is_apart)
    assert "every other rank: has left with messages outstanding" in said


def calls_that_differ(which: str) -> None:
    rank = dist.get_rank()
    calls: dict[str, Callable[[], object]] = {
        "size": lambda: dist.all_reduce(torch.ones(5 + rank)),
        "type": lambda: dist.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[rank])),
        "operation": lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(1)),
        "root": lambda: dist.broadcast(torch.ones(3), src=rank),
        "reduction": lambda: dist.all_reduce(torch.ones(3), op=(dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]),
    }
    calls[which]()


@pytest.mark.parametrize("which", ["size", "type", "operation", "root", "reduction"])
def test_calls_that_differ_are_an_error_on_every_rank(which: str) -> None:
    for outcome in run_ranks_to_the_end(calls_that_differ, 2, which):
        assert isinstance(outcome.error, dist.DistBackendError), outcome
        assert "imed out" not in str(outcome.error)


def failures_in_futures() -> list[str]:
    rank = dist.get_rank()
    if rank == 1:
        dist.barrier()
        return []
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    future = work.get_future()
    seen: list[str] = []
    told = threading.Event()

    def look(done: torch.futures.Future[object]) -> None:
        try:
            done.value()
        except RuntimeError as error:
            seen.append(str(error))
        told.set()

    future.add_done_callback(look)
    with pytest.raises(RuntimeError, match="all_reduce"):
        future.wait()
    assert told.wait(30)
    assert not work.is_success()
    # Python has no type for what torch 2.11 would return.
    if torch.__version__ >= (2, 12):  # type: ignore[operator]
        assert "all_reduce" in str(work.exception())
    return seen


def test_a_future_fails_with_the_same_error_and_tells_its_callbacks() -> None:
    outcomes = run_ranks_to_the_end(failures_in_futures, 2)
    assert outcomes[0].error is None, outcomes[0].traceback
    assert len(outcomes[0].value) == 1 and "all_reduce" in outcomes[0].value[0]


def callbacks_that_communicate() -> float:
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None

    def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        (summed,) = done.value()
        dist.all_reduce(summed)
        return summed

    return work.get_future().then(again).wait()[0].item()  # type: ignore[no-any-return]


def test_a_callback_of_a_future_may_run_collectives_itself() -> None:
    assert run_ranks(callbacks_that_communicate, 3) == [9.0] * 3


def join(folder: str, rank: int, size: int) -> str:
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / "group"), size)
    timeout = timedelta(seconds=6)
    return text_of(
        lambda: dist.init_process_group("baguanet", store=store, rank=rank, world_size=size, timeout=timeout)
    )


def wrong_sizes(folder: str) -> str:
    rank = dist.get_rank()
    return join(folder, rank, 2 + rank)


def equal_ranks(folder: str) -> str:
    return join(folder, 0, 2)


def one_too_many(folder: str) -> str:
    return join(folder, dist.get_rank(), 3)


def test_ranks_that_disagree_about_the_size_of_the_group_are_told(tmp_path: Path) -> None:
    for said in run_ranks(wrong_sizes, 2, str(tmp_path)):
        assert "joining in group" in said and "2" in said and "3" in said, said
        assert "did not come" not in said


def test_two_processes_with_one_rank_are_told(tmp_path: Path) -> None:
    for said in run_ranks(equal_ranks, 2, str(tmp_path)):
        assert "rank 0 of 2 is taken" in said, said


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    for said in run_ranks(one_too_many, 2, str(tmp_path)):
        assert "of 3 ranks, these did not come within 6000 ms: 2" in said, said


def leaves_early() -> Outcome | str:
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        return ""
    return text_of(dist.barrier)


def test_a_rank_that_leaves_is_named_by_those_who_wait_for_it() -> None:
    assert "rank 0" in run_ranks(leaves_early, 2)[1]
