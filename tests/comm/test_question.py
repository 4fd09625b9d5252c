"""What ranks ask each other beside training."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from baguarun.comm.backend import backend_on_cpu
from baguarun.comm.extension import load_extension
from tests.comm.ranks import run_ranks, run_ranks_to_the_end


def make_question() -> Any:
    return load_extension().Question(backend_on_cpu(dist.group.WORLD))


def ask_many_times() -> list[tuple[int, int]]:
    rank, question, found = dist.get_rank(), make_question(), []
    for number in range(20):
        question.ask((number * (rank == 1), -rank - 2))
        # In the order of the group's other collectives.
        work = dist.all_reduce(torch.ones(3), async_op=True)
        found.append(tuple(question.answer()))
        work.wait()
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_hear_the_largest_of_each_number(size: int) -> None:
    expected = [(number * (size > 1), -2) for number in range(20)]
    assert run_ranks(ask_many_times, size) == [expected] * size


def ask_again_without_an_answer() -> list[int]:
    question = make_question()
    question.ask((5, 5))
    question.ask((dist.get_rank(), 7))
    return list(question.answer())


def test_the_answer_is_that_of_the_last_question() -> None:
    assert run_ranks(ask_again_without_an_answer, 2) == [[1, 7]] * 2


def answer_without_a_question() -> str:
    question = make_question()
    with pytest.raises(ValueError, match="no question was asked") as found:
        question.answer()
    return str(found.value)


def test_an_answer_to_nothing_is_refused() -> None:
    run_ranks(answer_without_a_question, 1)


def ask_one_who_is_killed() -> str:
    question = make_question()
    question.ask((1, 1))
    question.answer()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match=r"baguanet: question .*in group .*: rank 1 "):
        while True:
            question.ask((1, 1))
            question.answer()
    return "told"


def test_a_lost_rank_is_an_error_that_names_it() -> None:
    outcomes = run_ranks_to_the_end(ask_one_who_is_killed, 3)
    assert [outcome.value for outcome in outcomes] == ["told", None, "told"], outcomes


def leave_a_question_behind() -> None:
    if dist.get_rank() == 0:
        make_question().ask((1, 1))
        time.sleep(0.1)


def test_who_drops_a_question_can_leave() -> None:
    run_ranks(leave_a_question_behind, 2)
