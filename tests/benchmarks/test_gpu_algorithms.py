"""What an algorithm did on CUDA is compared with the CPU; who refuses has not done it."""

from __future__ import annotations

import torch

from benchmarks.gpu_algorithms import _step_row


def test_an_algorithm_that_refuses_the_device_is_missed() -> None:
    weights = [torch.ones(2)]
    row = _step_row("power_sgd", "cuda", [weights, weights], ["the model is on cuda", weights])
    assert not row.reached
    assert "the model is on cuda" in row.ours


def test_a_weight_that_is_no_number_on_one_device_is_missed() -> None:
    here, there = [torch.ones(2), torch.ones(2)], [torch.tensor([1.0, torch.nan]), torch.ones(2)]
    assert not _step_row("bytegrad", "cuda", [here, here], [here, there]).reached


def test_weights_must_be_the_cpus_unless_they_depend_on_when_messages_come() -> None:
    here, there = [torch.ones(2)], [torch.tensor([1.0, 1.5])]
    row = _step_row("bytegrad", "cuda", [here, here], [here, there])
    assert (row.value, row.reached) == (0.5, False)
    assert _step_row("bytegrad", "cuda", [here], [here]).reached
    assert _step_row("async", "cuda", [here], [there]).reached
