"""Several tensors as one, and the worker's place, by Bagua's names."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

import baguarun.torch_api as bagua
from baguarun.torch_api import env, utils
from baguarun.torch_api.communication import ArgumentError
from tests.comm.ranks import run_ranks


def test_flatten_and_unflatten_undo_each_other() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.empty(0), torch.arange(4.0)[::2]]
    flat = bagua.utils.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 2]
    for view, tensor in zip(bagua.utils.unflatten(flat, tensors), tensors, strict=True):
        assert torch.equal(view, tensor)
    with pytest.raises(ArgumentError, match=r"torch\.float32, torch\.int64; want one or more of one dtype"):
        utils.flatten([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    with pytest.raises(ArgumentError, match="none"):
        utils.flatten([])


def test_a_flattened_tensor_has_memory_of_its_own() -> None:
    tensor = torch.ones(3)
    copy = utils.get_flattened_tensor([tensor])
    assert copy is not None and copy.data_ptr() != tensor.data_ptr() and torch.equal(copy, tensor)
    assert utils.get_flattened_tensor([]) is None


def test_contiguous_tensors_are_known() -> None:
    whole = torch.zeros(10)
    assert utils.check_contiguous([whole[:3], whole[3:7], whole[7:]])
    assert not utils.check_contiguous([whole[:3], whole[4:]])
    assert utils.check_contiguous([])


def averages_by_type() -> None:
    rank = bagua.get_rank()
    tensors = [torch.full((2, 2), rank + 1.0), torch.full((3,), rank, dtype=torch.float64), torch.ones(1)]
    utils.apply_flattened_call_all(tensors, dist.all_reduce)
    assert [tensor.flatten()[0].item() for tensor in tensors] == [1.5, 0.5, 1.0]
    utils.apply_flattened_call(tensors[:1], dist.broadcast, extra_args=(1,))
    utils.apply_flattened_call([], dist.broadcast)
    assert tensors[0].tolist() == [[1.5, 1.5], [1.5, 1.5]]


def test_a_call_works_on_many_tensors_as_one() -> None:
    run_ranks(averages_by_type, 2)


def test_the_place_of_the_worker_is_read_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 1}
    monkeypatch.setenv("MASTER_ADDR", "node0")
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    found = (bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_local_size())
    assert found == (5, 8, 1, 4)
    assert (env.get_node_rank(), env.get_master_addr()) == (1, "node0")


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as mine:
        mine.bind(("", env.find_free_network_port()))
