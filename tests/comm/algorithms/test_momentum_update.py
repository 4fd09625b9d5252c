"""The optimizer's pass over momentum that has come, against torch's operations one by one."""

from __future__ import annotations

import math

import pytest
import torch

from baguarun.comm.extension import load_extension

FLOATS = (torch.float32, torch.float64, torch.bfloat16)


def as_they_are(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def off_by_four_bytes(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


def columns_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


@pytest.mark.parametrize("layout", [as_they_are, off_by_four_bytes, columns_first])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (255,), (3, 257), (130, 1025)])
def test_a_step_has_the_bits_of_copy_and_addcdiv(
    shape: tuple[int, ...], dtype: torch.dtype, layout: object
) -> None:
    assert callable(layout)
    torch.manual_seed(0)
    # Only the gradient's layout may be another than the parameter's.
    gradient = layout(torch.randn(shape).to(dtype))
    parameter, average, denominator = (torch.rand(shape).add_(0.1).to(dtype) for _ in range(3))
    wanted = parameter.clone().addcdiv_(gradient, denominator, value=-0.003)
    version = parameter._version

    assert load_extension().apply_momentum([parameter], [gradient], [average], [denominator], [-0.003])

    assert torch.equal(parameter, wanted)
    assert torch.equal(average, gradient)
    assert parameter._version > version


@pytest.mark.parametrize("layout", [as_they_are, columns_first])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1,), (63,), (3, 257), (130, 1025)])
def test_decay_is_momentum_too(shape: tuple[int, ...], dtype: torch.dtype, layout: object) -> None:
    assert callable(layout)
    torch.manual_seed(0)
    gradient = layout(torch.randn(shape).to(dtype))
    parameter, average, denominator = (torch.rand(shape).add_(0.1).to(dtype) for _ in range(3))
    momentum = gradient.clone().add_(parameter, alpha=0.25)
    wanted = parameter.clone().addcdiv_(momentum, denominator, value=-0.003)

    apply = load_extension().apply_momentum
    assert apply([parameter], [gradient], [average], [denominator], [-0.003], 0.25)

    torch.testing.assert_close(average, momentum)
    torch.testing.assert_close(parameter, wanted)


def test_several_threads_step_as_one_does() -> None:
    torch.manual_seed(0)
    gradient, parameter, average, denominator = (torch.rand(300_000).add_(0.1) for _ in range(4))
    wanted = parameter.clone().addcdiv_(gradient, denominator, value=-0.01)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        load_extension().apply_momentum([parameter], [gradient], [average], [denominator], [-0.01])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(parameter, wanted)
    assert torch.equal(average, gradient)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, 300, 99_999])
def test_a_step_with_a_number_that_is_not_finite_says_so(
    value: float, dtype: torch.dtype, place: int
) -> None:
    fine, parameter, average, denominator = (torch.ones(100_000, dtype=dtype) for _ in range(4))
    gradient = fine.clone()
    gradient[place] = value
    step = load_extension().apply_momentum
    assert not step([parameter, fine], [gradient, fine], [average, fine], [denominator, fine], [0.5, 0.5])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, 300, 99_999])
def test_one_number_that_is_not_finite_is_seen(value: float, dtype: torch.dtype, place: int) -> None:
    tensors = [torch.ones(3, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones(100_000, dtype=dtype)]
    all_finite = load_extension().all_finite
    # The largest number of all is finite.
    tensors[2][-1] = torch.finfo(dtype).max
    assert all_finite(tensors)
    tensors[2][place] = value
    assert not all_finite(tensors)


def test_nothing_is_finite() -> None:
    assert load_extension().all_finite([])
