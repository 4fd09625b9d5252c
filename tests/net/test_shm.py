"""Collectives among processes of one host, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.net.shm_peer import DTYPES, OPS, Failed, Group, pointer, ranks

# Nothing, one, an odd few, around what goes in one step (64 KiB), around a chunk (512 KiB), several chunks.
SIZES = (0, 1, 7, 1023, 16384, 16385, 131072, 131073, 400_001)
FLOATS = ("sum", "avg", "min", "max", "product")


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    random = np.random.default_rng(1000 * rank + count)
    if dtype == "bool":
        return random.integers(0, 2, count).astype(bool)
    if dtype.startswith("float"):
        return random.standard_normal(count).astype(dtype)
    return random.integers(-100 if dtype != "uint8" else 0, 100, count).astype(dtype)


def folded(op: str, arrays: list[np.ndarray]) -> np.ndarray:
    """In rank order, 16-bit floats in fp32: what the transport promises, to the bit."""
    functions: dict[str, Callable[..., np.ndarray]] = {
        "sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }  # fmt: skip
    dtype = arrays[0].dtype
    wide = [array.astype(np.float32) if dtype == np.float16 else array for array in arrays]
    total = wide[0]
    with np.errstate(over="ignore"):
        for array in wide[1:]:
            total = functions[op](total, array)
        if op == "avg":
            total = total / total.dtype.type(len(arrays))
        return total.astype(dtype)


def reduce_all(group: Group, cases: list[tuple[str, str, int]]) -> list[bytes]:
    outcomes = []
    for op, dtype, count in cases:
        data = values(group.rank, count, dtype)
        group.all_reduce(data, op)
        outcomes.append(data.tobytes())
    return outcomes


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_reduce_gives_every_rank_the_bits_of_a_reduction_in_rank_order(tmp_path: Path, size: int) -> None:
    cases = [("sum", dtype, 1023) for dtype in DTYPES if dtype != "bfloat16"]
    cases += [("sum", "float32", count) for count in SIZES] + [("sum", "float16", count) for count in SIZES]
    cases += [(op, "float32", 131073) for op in FLOATS] + [(op, "int32", 131073) for op in OPS if op != "avg"]
    with ranks(tmp_path, size) as group:
        outcomes = group.run(reduce_all, cases)
    for number, (op, dtype, count) in enumerate(cases):
        want = folded(op, [values(rank, count, dtype) for rank in range(size)]).tobytes()
        assert all(outcome[number] == want for outcome in outcomes), (op, dtype, count)


def reduce_in_segment(group: Group, count: int, dtype: str) -> list[bytes]:
    outcomes = []
    data = group.allocate(count, dtype)
    for _ in range(3):
        data[:] = values(group.rank, count, dtype)
        group.all_reduce(data)
        outcomes.append(data.tobytes())
    return outcomes


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_data_that_lives_in_the_segment_is_reduced_in_place(tmp_path: Path, size: int, dtype: str) -> None:
    count = 300_007
    with ranks(tmp_path, size, arena_bytes=2 << 20) as group:
        outcomes = group.run(reduce_in_segment, count, dtype)
    want = folded("sum", [values(rank, count, dtype) for rank in range(size)]).tobytes()
    assert outcomes == [[want] * 3] * size


def move_everything(group: Group, count: int) -> dict[str, bytes]:
    """Each operation that moves data, with int32 elements; sizes are per rank."""
    size, rank, out = group.size, group.rank, {}
    block, blocks = values(rank, count, "int32"), values(rank, count * size, "int32")
    all_blocks, one_block = np.zeros_like(blocks), np.zeros_like(block)
    code, add = DTYPES.index("int32"), OPS.index("sum")
    group.call("AllGather", pointer(block), pointer(all_blocks), block.nbytes)
    out["all_gather"] = all_blocks.tobytes()
    group.call("ReduceScatter", pointer(blocks), pointer(one_block), count, code, add)
    out["reduce_scatter"] = one_block.tobytes()
    for root in (0, size - 1):
        data = block.copy()
        group.call("Broadcast", pointer(data), data.nbytes, root)
        out[f"broadcast{root}"] = data.tobytes()
        data = block.copy()
        group.call("Reduce", pointer(data), count, code, add, root)
        out[f"reduce{root}"] = data.tobytes()
        target = np.zeros_like(blocks)
        group.call("Gather", pointer(block), pointer(target), block.nbytes, root)
        out[f"gather{root}"] = target.tobytes()
        group.call("Scatter", pointer(blocks), pointer(one_block), block.nbytes, root)
        out[f"scatter{root}"] = one_block.tobytes()
        group.call("Barrier")
    return out


def moved(size: int, rank: int, count: int) -> dict[str, bytes]:
    block = [values(peer, count, "int32") for peer in range(size)]
    blocks = [values(peer, count * size, "int32") for peer in range(size)]
    total = folded("sum", block).tobytes()
    mine = slice(rank * count, (rank + 1) * count)
    want = {
        "all_gather": np.concatenate(block).tobytes(),
        "reduce_scatter": folded("sum", blocks)[mine].tobytes(),
    }
    for root in (0, size - 1):
        want[f"broadcast{root}"] = block[root].tobytes()
        want[f"reduce{root}"] = total if rank == root else block[rank].tobytes()
        gathered = np.concatenate(block)
        want[f"gather{root}"] = (gathered if rank == root else np.zeros_like(gathered)).tobytes()
        want[f"scatter{root}"] = blocks[root][mine].tobytes()
    return want


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_operation_moves_what_it_says(tmp_path: Path, size: int) -> None:
    with ranks(tmp_path, size) as group:
        for count in (0, 1, 33, 16384, 140_001):
            outcomes = group.run(move_everything, count)
            for rank in range(size):
                want = moved(size, rank, count)
                assert [name for name in want if outcomes[rank][name] != want[name]] == [], count


def bytes_from_to(sender: int, receiver: int) -> int:
    return (sender * 7 + receiver * 3) % 5 * 150_001


def all_to_all(group: Group) -> list[bytes]:
    everybody = range(group.size)
    send = [bytes_from_to(group.rank, peer) for peer in everybody]
    receive = [bytes_from_to(peer, group.rank) for peer in everybody]
    blocks = [np.full(count, 16 * group.rank + peer, np.uint8) for peer, count in enumerate(send)]
    data, out = np.concatenate(blocks), np.zeros(sum(receive), np.uint8)
    sizes = [np.array(counts, np.uint64) for counts in (send, receive)]
    group.call("AllToAllV", pointer(data), pointer(sizes[0]), pointer(out), pointer(sizes[1]))
    ends = np.cumsum(receive)
    return [out[end - count : end].tobytes() for end, count in zip(ends, receive, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_to_all_exchanges_blocks_of_uneven_sizes(tmp_path: Path, size: int) -> None:
    with ranks(tmp_path, size) as group:
        outcomes = group.run(all_to_all)
    for receiver in range(size):
        want = [bytes([16 * sender + receiver]) * bytes_from_to(sender, receiver) for sender in range(size)]
        assert outcomes[receiver] == want


def mixed(group: Group, seed: int) -> bytes:
    """A random row of operations, the same on all ranks: the ring of slots at every border between two."""
    random = np.random.default_rng(seed)
    for _ in range(150):
        count = int(random.choice([1, 100, 20_000, 150_000, 300_000]))
        kind, root = random.integers(4), int(random.integers(group.size))
        data = values(group.rank, count, "int32")
        want = folded("sum", [values(rank, count, "int32") for rank in range(group.size)])
        if kind == 0:
            group.all_reduce(data)
            assert np.array_equal(data, want)
        elif kind == 1:
            group.call("Broadcast", pointer(data), data.nbytes, root)
            assert np.array_equal(data, values(root, count, "int32"))
        elif kind == 2:
            group.call("Reduce", pointer(data), count, DTYPES.index("int32"), OPS.index("sum"), root)
            assert group.rank != root or np.array_equal(data, want)
        else:
            group.call("Barrier")
    return b"done"


@pytest.mark.parametrize("size", [2, 4])
def test_a_random_row_of_operations_stays_right(tmp_path: Path, size: int) -> None:
    with ranks(tmp_path, size) as group:
        assert group.run(mixed, 5) == [b"done"] * size


def test_a_group_of_too_many_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="size=65: want 1 to 64"):
        Group(tmp_path, 0, 65, nonce="many")


def test_an_arena_that_is_used_up_says_what_is_left(tmp_path: Path) -> None:
    group = Group(tmp_path, 0, 1, nonce="arena", arena_bytes=8192)
    assert group.allocate(1024).nbytes == 4096
    with pytest.raises(Failed, match="8192 bytes wanted, 4096 of arenaBytes=8192 left"):
        group.allocate(2048)
    group.close()
