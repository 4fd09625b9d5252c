"""Collectives among ranks of one host and of several, against numpy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.net.communicator_peer import Member, members
from tests.net.shm_peer import DTYPES, OPS, pointer
from tests.net.test_shm import FLOATS, all_to_all, bytes_from_to, folded, move_everything, moved, values

# Who is on whose host: all on one, each alone, rails (also mixed up), uneven, and one that stands alone.
LAYOUTS = ("a", "ab", "abc", "aabb", "abab", "aab", "abcde", "abbabc", "aaabbb")
layouts = pytest.mark.parametrize("hosts", LAYOUTS)
# Nothing, one, an odd few, around what goes at once (64 KiB of fp32), blocks and segments of a ring.
SIZES = (0, 1, 7, 1023, 16384, 16385, 65_536 * 3, 65_536 * 3 + 1, 1_000_003)
# Between two results of a row of roundings.
TOLERANCE = {"float64": 1e-12, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


def reduce_all(member: Member, cases: list[tuple[str, str, int]]) -> list[np.ndarray]:
    outcomes = []
    for op, dtype, count in cases:
        data = values(member.rank, count, dtype)
        member.all_reduce(data, op)
        outcomes.append(data)
    return outcomes


def check_reduced(got: np.ndarray, op: str, arrays: Sequence[np.ndarray]) -> None:
    dtype = arrays[0].dtype.name
    if dtype.startswith("float"):
        wide = np.float64 if dtype == "float64" else np.float32
        want = folded(op, [array.astype(wide) for array in arrays])
        np.testing.assert_allclose(
            got.astype(wide), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * len(arrays)
        )
    else:
        assert np.array_equal(got, folded(op, list(arrays)))


@layouts
def test_all_reduce_gives_every_rank_the_same_bits(tmp_path: Path, hosts: str) -> None:
    cases = [("sum", dtype, 1023) for dtype in DTYPES if dtype != "bfloat16"]
    cases += [("sum", "float32", count) for count in SIZES] + [("avg", "float16", 70_001)]
    cases += [(op, "float32", 70_001) for op in FLOATS] + [(op, "int32", 70_001) for op in OPS if op != "avg"]
    with members(tmp_path, len(hosts), list(hosts)) as group:
        outcomes = group.run(reduce_all, cases)
    for number, (op, dtype, count) in enumerate(cases):
        bits = {outcome[number].tobytes() for outcome in outcomes}
        assert len(bits) == 1, (op, dtype, count)
        check_reduced(outcomes[0][number], op, [values(rank, count, dtype) for rank in range(len(hosts))])


@pytest.mark.parametrize("hosts", ["abc", "aabb", "aab"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_small_16_bit_floats_are_rounded_once(tmp_path: Path, hosts: str, op: str) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        outcomes = group.run(reduce_all, [(op, "float16", 5000)])
    # In fp32 the sum of so few 16-bit numbers hardly depends on the order.
    want = folded(op, [values(rank, 5000, "float16") for rank in range(len(hosts))])
    wrong = np.count_nonzero(outcomes[0][0] != want)
    assert wrong <= 5, wrong


def reduce_bfloat16(member: Member, count: int) -> np.ndarray:
    wide = values(member.rank, count, "float32")
    data = (wide.view(np.uint32) >> 16).astype(np.uint16)
    member.all_reduce(data, "sum", "bfloat16")
    return data


@pytest.mark.parametrize("count", [1000, 100_000])
def test_bfloat16_is_reduced_too(tmp_path: Path, count: int) -> None:
    with members(tmp_path, 3, list("aab")) as group:
        outcomes = group.run(reduce_bfloat16, count)
    wide = [values(rank, count, "float32").view(np.uint32) & 0xFFFF0000 for rank in range(3)]
    want = sum(array.view(np.float32) for array in wide)
    assert all(np.array_equal(outcome, outcomes[0]) for outcome in outcomes)
    got = (outcomes[0].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.05)


@layouts
def test_every_operation_moves_what_it_says(tmp_path: Path, hosts: str) -> None:
    size = len(hosts)
    with members(tmp_path, size, list(hosts)) as group:
        for count in (0, 1, 33, 16384, 140_001):
            outcomes = group.run(move_everything, count)
            for rank in range(size):
                want = moved(size, rank, count)
                assert [name for name in want if outcomes[rank][name] != want[name]] == [], count


@layouts
def test_all_to_all_exchanges_blocks_of_uneven_sizes(tmp_path: Path, hosts: str) -> None:
    size = len(hosts)
    with members(tmp_path, size, list(hosts)) as group:
        outcomes = group.run(all_to_all)
    for receiver in range(size):
        want = [bytes([16 * sender + receiver]) * bytes_from_to(sender, receiver) for sender in range(size)]
        assert outcomes[receiver] == want


@pytest.mark.parametrize("hosts", ["abcdefghi", "aabbccdde"])
def test_nine_ranks_on_many_hosts_do_all_that_fewer_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    # Each pair of the first layout has a link of its own, in use by the all-to-all.
    monkeypatch.setenv("BAGUA_NET_NSTREAMS", "4")
    size = len(hosts)
    with members(tmp_path, size, list(hosts)) as group:
        for count in (1, 33, 16385):
            outcomes = group.run(move_everything, count)
            for rank in range(size):
                want = moved(size, rank, count)
                assert [name for name in want if outcomes[rank][name] != want[name]] == [], count
        reduced = group.run(reduce_all, [("sum", "float32", 1023), ("max", "int32", 7)])
        blocks = group.run(all_to_all)
        group.run(mixed, 5, 10)
    for number, (op, dtype, count) in enumerate([("sum", "float32", 1023), ("max", "int32", 7)]):
        assert len({outcome[number].tobytes() for outcome in reduced}) == 1
        check_reduced(reduced[0][number], op, [values(rank, count, dtype) for rank in range(size)])
    for receiver, received in enumerate(blocks):
        sent = [bytes([16 * sender + receiver]) * bytes_from_to(sender, receiver) for sender in range(size)]
        assert received == sent


def reduce_scatter(member: Member, count: int, dtype: str, op: str) -> np.ndarray:
    out = np.zeros(count, dtype)
    blocks = values(member.rank, count * member.size, dtype)
    kept = blocks.copy()
    code = DTYPES.index(dtype)
    member.call("ReduceScatter", pointer(blocks), pointer(out), count, code, OPS.index(op))
    assert np.array_equal(blocks, kept), "the input has changed"
    return out


@pytest.mark.parametrize("hosts", ["abcd", "abab", "aab"])
@pytest.mark.parametrize(("count", "dtype"), [(100, "float16"), (50_000, "float16"), (50_000, "float32")])
def test_reduce_scatter_averages_and_leaves_its_input_alone(
    tmp_path: Path, hosts: str, count: int, dtype: str
) -> None:
    size = len(hosts)
    with members(tmp_path, size, list(hosts)) as group:
        outcomes = group.run(reduce_scatter, count, dtype, "avg")
    for rank, outcome in enumerate(outcomes):
        mine = slice(rank * count, (rank + 1) * count)
        check_reduced(outcome, "avg", [values(peer, count * size, dtype)[mine] for peer in range(size)])


def mixed(member: Member, seed: int, rounds: int) -> None:
    """A random row of operations, the same on all ranks, with messages among them."""
    random = np.random.default_rng(seed)
    size = member.size
    for number in range(rounds):
        count = int(random.choice([1, 100, 20_000, 150_000]))
        kind, root = random.integers(5), int(random.integers(size))
        data = values(member.rank, count, "int32")
        want = folded("sum", [values(rank, count, "int32") for rank in range(size)])
        after, before = (member.rank + 1) % size, (member.rank - 1) % size
        messages = []
        if random.integers(2):
            messages.append(member.recv(np.zeros(count, np.int32), before, number))
            messages.append(member.send(values(member.rank, count, "int32"), after, number))
        if kind == 0:
            member.all_reduce(data)
            assert np.array_equal(data, want)
        elif kind == 1:
            member.call("Broadcast", pointer(data), data.nbytes, root)
            assert np.array_equal(data, values(root, count, "int32"))
        elif kind == 2:
            member.call("Reduce", pointer(data), count, DTYPES.index("int32"), OPS.index("sum"), root)
            assert member.rank != root or np.array_equal(data, want)
        elif kind == 3:
            out = np.zeros(count * size, np.int32)
            member.call("AllGather", pointer(data), pointer(out), data.nbytes)
            assert np.array_equal(out, np.concatenate([values(rank, count, "int32") for rank in range(size)]))
        else:
            member.barrier()
        member.wait(*messages)
        if messages:
            assert np.array_equal(messages[0].data, values(before, count, "int32"))


@pytest.mark.parametrize("hosts", ["aa", "abc", "abab", "aab"])
def test_a_random_row_of_operations_and_messages_stays_right(tmp_path: Path, hosts: str) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        assert group.run(mixed, 5, 60) == [None] * len(hosts)


NOTHING = np.zeros(0, np.float32)
Case = tuple[str, str, int]


def reduce_in_a_row(
    member: Member, cases: list[Case], ahead: bool, with_messages: bool = True
) -> tuple[list[np.ndarray], list[int]]:
    """The results, and what was sent until each was there. `ahead`: the next call is mostly known before.
    Messages beside every third call; how many packets one takes depends on who is there first."""
    random = np.random.default_rng(member.rank)
    row = [values(member.rank, count, dtype) for _, dtype, count in cases]
    sent = []
    for number, (op, _, count) in enumerate(cases):
        is_known = ahead and number + 1 < len(cases) and random.integers(4) > 0
        member.look_ahead(
            row[number + 1] if is_known else NOTHING, cases[number + 1][0] if is_known else "sum"
        )
        messages = []
        if with_messages and number % 3 == 0:
            after, before = (member.rank + 1) % member.size, (member.rank - 1) % member.size
            messages.append(member.recv(np.zeros(count, np.int32), before, number))
            messages.append(member.send(values(member.rank, count, "int32"), after, number))
        member.all_reduce(row[number], op)
        member.wait(*messages)
        if messages:
            assert np.array_equal(messages[0].data, values(before, count, "int32"))
        sent.append(member.bytes_sent())
    return row, sent


@pytest.mark.parametrize("hosts", ["ab", "abc", "aab", "abcde", "abab", "aabbcc", "aaabbb"])
def test_calls_that_are_known_before_they_come_give_the_same(tmp_path: Path, hosts: str) -> None:
    random = np.random.default_rng(3)
    cases = [
        (str(random.choice(["sum", "max"])), str(random.choice(["float32", "int32", "float64"])), int(count))
        for count in random.choice(SIZES, 25)
    ]
    # Over rails in several parts, with elements left over and without.
    cases += [("sum", "float32", 5_000_004), ("max", "float32", 4_500_003), ("sum", "int32", 3_500_004)]
    with members(tmp_path, len(hosts), list(hosts)) as group:
        known, unknown = group.run(reduce_in_a_row, cases, True), group.run(reduce_in_a_row, cases, False)
    for (got, _), (want, _) in zip(known, unknown, strict=True):
        for one, other in zip(got, want, strict=True):
            assert one.tobytes() == other.tobytes()


def reduce_into(
    member: Member, cases: list[Case], in_place: bool = False
) -> list[tuple[np.ndarray, list[int]]]:
    """Results of all-reduces, and what was said of each on the way. What has come, and its source, are the
    caller's by then, who overwrites both."""
    found = []
    for op, dtype, count in cases:
        source = values(member.rank, count, dtype)
        out = source if in_place else np.full_like(source, 77)
        result = np.full_like(source, 78)
        told = [0]

        def take(upto: int, source: Any = source, out: Any = out, result: Any = result) -> None:
            result[told[-1] : upto] = out[told[-1] : upto]
            out[:upto] = source[:upto] = 79
            told.append(upto)

        member.all_reduce_into(source, out, op, take)
        if not in_place:
            assert np.array_equal(source[told[-1] :], values(member.rank, count, dtype)[told[-1] :])
        result[told[-1] :] = out[told[-1] :]
        found.append((result, told[1:]))
    return found


@layouts
def test_what_is_reduced_into_another_place_can_be_used_as_it_comes(tmp_path: Path, hosts: str) -> None:
    cases = [("avg", "float32", count) for count in (*SIZES, 9_000_005)]
    cases += [("sum", "float64", 3_000_001), ("avg", "float16", 1000), ("max", "int32", 70_001)]
    with members(tmp_path, len(hosts), list(hosts)) as group:
        usual, outcomes = group.run(reduce_all, cases), group.run(reduce_into, cases)
        in_place = group.run(reduce_into, cases, True)
    for outcome, same in zip(outcomes, in_place, strict=True):
        for (result, told), (result_there, told_there) in zip(outcome, same, strict=True):
            assert result.tobytes() == result_there.tobytes() and told == told_there
    for wanted, found in zip(usual, outcomes, strict=True):
        for want, (result, told) in zip(wanted, found, strict=True):
            assert result.tobytes() == want.tobytes()
            assert told == sorted(set(told)) and max(told, default=0) <= result.size
    counts = [hosts.count(host) for host in set(hosts)]
    over_rails = len(counts) > 1 and set(counts) == {counts[0]} != {1}
    said = [len(told) for _, told in outcomes[0]]
    # 36 MB are several parts.
    assert said[len(SIZES)] > 2 if over_rails else not any(said)


def sent_in_each(outcomes: list[tuple[list[np.ndarray], list[int]]]) -> np.ndarray:
    """Bytes of all ranks, by call."""
    return np.diff(np.array([sent for _, sent in outcomes]).sum(0), prepend=0)


HEADER_BYTES = 64
"""Of a call, to each rank that is sent something."""
DIRECTLY = "abc", "abcd", "abcde", "abcdefgh", "aabbcc"
"""Three hosts and more; five do not send to all at once."""


@pytest.mark.parametrize("hosts", DIRECTLY)
def test_what_goes_directly_is_the_bits_of_a_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    random = np.random.default_rng(4)
    cases = [
        (str(random.choice(["sum", "avg", "max"])), str(random.choice(["float32", "float64"])), int(count))
        for count in random.choice(SIZES, 12)
    ]
    cases += [("sum", "float16", 70_001), ("sum", "int32", 70_001), ("max", "float32", 70_001)]
    # Blocks of more segments than there is room for.
    cases += [("sum", "float32", 5_000_003), ("avg", "float32", 5_000_003)]
    results, sent_bytes = [], []
    ways = (("ring", False, False), ("direct", False, False), ("direct", True, False), ("direct", True, True))
    for number, (way, ahead, with_messages) in enumerate(ways):
        monkeypatch.setenv("BAGUA_NET_ALL_REDUCE", way)
        folder = tmp_path / str(number)
        folder.mkdir()
        with members(folder, len(hosts), list(hosts)) as group:
            outcomes = group.run(reduce_in_a_row, cases, ahead, with_messages)
        results.append([[array.tobytes() for array in row] for row, _ in outcomes])
        sent_bytes.append(sent_in_each(outcomes))
    assert all(result == results[0] for result in results)
    # As many, and headers to all, not to the next one only. Now and then a rank that waits says so, too.
    is_large = [count * np.dtype(dtype).itemsize > 64 << 10 for _, dtype, count in cases]
    more = int(np.median((sent_bytes[1] - sent_bytes[0])[is_large]))
    if len(set(hosts)) == len(hosts):
        assert more == len(hosts) * (len(hosts) - 2) * HEADER_BYTES
    assert 0 < more < 10_000
    assert sent_bytes[2].sum() == pytest.approx(sent_bytes[1].sum(), rel=1e-4)


@pytest.mark.parametrize("hosts", [*DIRECTLY, "abbabc"])
def test_so_is_what_goes_directly_into_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    monkeypatch.setenv("BAGUA_NET_ALL_REDUCE", "direct")
    cases = [("avg", "float32", 1_000_003), ("sum", "float64", 300_001), ("max", "int32", 70_001)]
    cases.append(("avg", "float16", 70_001))
    with members(tmp_path, len(hosts), list(hosts)) as group:
        usual, outcomes = group.run(reduce_all, cases), group.run(reduce_into, cases)
    for wanted, found in zip(usual, outcomes, strict=True):
        assert [result.tobytes() for result, _ in found] == [want.tobytes() for want in wanted]


def reduce_two(member: Member, is_known: bool) -> list[int]:
    """What this rank has sent after each of two all-reduces."""
    first, second = (np.ones(1 << 20, np.float32) for _ in range(2))
    before = member.bytes_sent()
    sent = []
    for data, following in ((first, second), (second, NOTHING)):
        member.look_ahead(following if is_known else NOTHING)
        member.all_reduce(data)
        sent.append(member.bytes_sent() - before)
    return sent


@pytest.mark.parametrize("way", ["ring", "direct"])
@pytest.mark.parametrize("hosts", ["abc", "aabbcc"])
def test_what_nobody_else_is_needed_for_sets_out_before_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, hosts: str
) -> None:
    monkeypatch.setenv("BAGUA_NET_ALL_REDUCE", way)
    with members(tmp_path, len(hosts), list(hosts)) as group:
        group.run(reduce_two, False)
        usual, ahead = group.run(reduce_two, False), group.run(reduce_two, True)
    block_bytes = 4 * (1 << 20) // len(hosts)
    # Not by whoever finds that all has come when it has sent its last.
    assert max(known[0] - unknown[0] for known, unknown in zip(ahead, usual, strict=True)) > 0.9 * block_bytes
    assert [sent for _, sent in ahead] == [sent for _, sent in usual]


def test_without_shared_memory_ranks_of_one_host_use_links(tmp_path: Path) -> None:
    with members(tmp_path, 3, share=False) as group:
        assert group.run(mixed, 7, 20) == [None] * 3
        assert all(sent > 100_000 for sent in group.run(Member.bytes_sent))


def recreate(member: Member, folder: str, hosts: str, times: int) -> tuple[int, ...]:
    def facts() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:baguarun")
        return len(os.listdir("/proc/self/fd")), maps, len(os.listdir("/proc/self/task"))

    before = facts()
    for number in range(times):
        options: dict[str, Any] = {"nonce": f"again-{hosts}-{number}", "host": hosts[member.rank]}
        again = Member(Path(folder), member.rank, member.size, **options)
        again.all_reduce(np.ones(100, np.float32))
        message = again.recv(np.zeros(10, np.uint8), (member.rank - 1) % member.size)
        again.wait(message, again.send(np.ones(10, np.uint8), (member.rank + 1) % member.size))
        again.close()
    return tuple(late - early for late, early in zip(facts(), before, strict=True))


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_two_hundred_communicators_leave_nothing_behind(tmp_path: Path, hosts: str) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        assert group.run(recreate, str(tmp_path), hosts, 200) == [(0, 0, 0)] * len(hosts)


def fork_and_go_on(member: Member) -> None:
    child = os.fork()
    if child == 0:
        member.close()
        os._exit(0)
    os.waitpid(child, 0)
    data = np.ones(100_000, np.float32)
    member.all_reduce(data)
    assert np.all(data == member.size)


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_a_forked_child_that_destroys_its_copy_disturbs_nobody(tmp_path: Path, hosts: str) -> None:
    with members(tmp_path, len(hosts), list(hosts)) as group:
        group.run(reduce_all, [("sum", "float32", 10)])
        assert group.run(fork_and_go_on) == [None] * len(hosts)
