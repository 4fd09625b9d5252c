"""The cost model against sums done by hand, and what the targets make of figures."""

from __future__ import annotations

import pytest

from benchmarks.algorithm_targets import Measured, judge, judge_latency
from benchmarks.cost_model import Cluster, Cost, cost_of, limit_s

FLAT = Cluster(hosts=4, ranks=4, rate_mbit=100)
PAIRED = Cluster(hosts=2, ranks=4, rate_mbit=100)
SIZE_BYTES = 8192 * 1000


@pytest.mark.parametrize(
    ("case", "cluster", "of_size"),
    [
        ("ddp", FLAT, 1.5),
        ("ddp_fp16", FLAT, 0.75),
        ("ddp", PAIRED, 1.5),
        # By rail a host is one rank.
        ("ddp@baguanet", PAIRED, 1.0),
        ("gradient_allreduce@gloo", PAIRED, 1.5),
        ("gradient_allreduce+rail@gloo", PAIRED, 1.0),
        ("bytegrad", FLAT, 1.5 * 2056 / 8192),
        ("bytegrad", PAIRED, 1.0 * 2056 / 8192),
        # Both ranks send a half to each of the two on the other host, twice.
        ("bytegrad+flat", PAIRED, 2.0 * 2056 / 8192),
        ("qadam_1bit", FLAT, 1.5 * 260 / 8192),
        ("decentralized_shift_one", FLAT, 1.0),
        ("low_precision_decentralized_4bit", FLAT, 2 * 1032 / 8192),
        ("low_precision_decentralized", PAIRED, 2056 / 8192),
    ],
)
def test_bytes_that_leave_a_host(case: str, cluster: Cluster, of_size: float) -> None:
    cost = cost_of(case, cluster, SIZE_BYTES)
    assert cost is not None
    assert cost.host_bytes == pytest.approx(of_size * SIZE_BYTES)


def test_what_exchanges_now_and_then_costs_as_often() -> None:
    local = cost_of("local_sgd", FLAT, 800, rounds_per_step=1 / 8)
    assert local == Cost(host_bytes=150, messages=0.75, is_hidden=False)
    overlapped = cost_of("diloco_overlapped", FLAT, SIZE_BYTES, rounds_per_step=0.04)
    whole = cost_of("diloco_int8", FLAT, SIZE_BYTES, rounds_per_step=0.01)
    assert overlapped is not None and whole is not None
    assert overlapped.host_bytes == pytest.approx(whole.host_bytes)
    assert cost_of("power_sgd", FLAT, 800) is None


def test_a_step_takes_as_long_as_the_slower_of_computing_and_wire() -> None:
    # One second at 100 Mbit/s, headers aside.
    cost = Cost(host_bytes=12.5e6, messages=2)
    assert 1.0 < cost.seconds(FLAT) < 1.05
    assert limit_s(cost, FLAT, 3.0) == 3.0
    waiting = Cost(host_bytes=12.5e6, messages=2, is_hidden=False)
    assert limit_s(waiting, FLAT, 3.0) == 3.0 + cost.seconds(FLAT)
    delayed = Cluster(hosts=4, ranks=4, rate_mbit=100, delay_ms=5)
    assert cost.seconds(delayed) == pytest.approx(cost.seconds(FLAT) + 2 * 0.010)
    assert cost.seconds(Cluster(hosts=4, ranks=4)) == 0.0


def measured(case: str, step_s: float, sent_bytes: float = 0.0) -> Measured:
    return Measured(case=case, step_s=step_s, ratio_to_ddp=step_s / 4.3, sent_bytes=sent_bytes)


def missed(cluster: Cluster, *contestants: Measured) -> list[str]:
    found = {each.case: each for each in (measured("ddp", 4.3, 50.7e6), measured("alone", 0.1), *contestants)}
    return [row.what for row in judge("here", cluster, 8 * 4_198_400, found, 128) if not row.reached]


def test_figures_at_the_limit_are_in_order_and_slower_ones_are_not() -> None:
    assert missed(FLAT, measured("bytegrad", 1.1, 12.7e6), measured("qadam_1bit", 0.2, 1.6e6)) == []
    slow = missed(FLAT, measured("bytegrad", 1.3, 12.7e6))
    assert any("DDP's time / ours" in what for what in slow)
    assert any("limit by the cost model" in what for what in slow)


def test_a_nic_that_moved_other_bytes_than_the_model_is_reported() -> None:
    (what,) = missed(FLAT, measured("bytegrad", 1.1, 15.0e6))
    assert "bytes off" in what


def test_a_little_slower_is_allowed_only_where_no_win_is_predicted() -> None:
    late = Measured(case="local_sgd", step_s=4.6, ratio_to_ddp=1.07, sent_bytes=6.3e6, rounds_per_step=1 / 8)
    assert any("our time / DDP's" in what for what in missed(FLAT, late))
    assert missed(FLAT, measured("decentralized", 4.6, 50.7e6)) == []
    assert any("our time / DDP's" in what for what in missed(FLAT, measured("decentralized", 6.9, 50.7e6)))


def test_the_hierarchy_must_send_less() -> None:
    rail, flat = measured("bytegrad", 0.8, 8.43e6), measured("bytegrad+flat", 1.5, 16.9e6)
    assert missed(PAIRED, rail, flat) == []
    assert any("by rail" in what for what in missed(PAIRED, measured("bytegrad", 0.8, 16.9e6), flat))


def test_latency_must_hurt_neighbours_least() -> None:
    fast = {case: measured(case, 1.0) for case in ("ddp", "decentralized_shift_one")}
    slow = {"ddp": measured("ddp", 1.5), "decentralized_shift_one": measured("decentralized_shift_one", 1.1)}
    (row,) = judge_latency(fast, slow, "there")
    assert row.reached
    (row,) = judge_latency(fast, {**slow, "ddp": measured("ddp", 1.0)}, "there")
    assert not row.reached
