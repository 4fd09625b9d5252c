"""The cost model against sums done by hand, and what the targets make of figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.algorithm_targets import Measured, judge, judge_latency
from benchmarks.algorithms import _BY_RAIL, _OURS, _PEERS, gradients, growth, jobs, medians, networks
from benchmarks.cost_model import Alone, Behind, Cluster, Cost, Gradients, cost_of, limit_s
from benchmarks.harness import Row

FLAT = Cluster(hosts=4, ranks=4, rate_mbit=100)
PAIRED = Cluster(hosts=2, ranks=4, rate_mbit=100)
SIZE_BYTES = 8192 * 1000
GRADIENTS = Gradients(((2048, 1000),))
MLP = Gradients(((1024, 1024), (1024,)) * 8)


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
        ("sparse", FLAT, 1.5 * 120 / 8192),
        # Nodes are the peers; without rails both ranks of a host send to the other one.
        ("decentralized_shift_one", PAIRED, 1.0),
        ("decentralized_shift_one+flat", PAIRED, 2.0),
        ("decentralized_exponential", FLAT, 1.0),
        # To the next rank goes one rank's of each host, to the next but one both ranks'.
        ("decentralized_exponential+flat", PAIRED, 1.5),
        # P of 2048 numbers and Q of 1000, of 2048000.
        ("power_sgd", FLAT, 3.0 * 3048 / 2048000),
        ("power_sgd", PAIRED, 1.0 * 3048 / 2048000),
        ("power_sgd+flat", PAIRED, 4.0 * 3048 / 2048000),
        ("ddp_powersgd", PAIRED, 1.5 * 3048 / 2048000),
        ("ddp_powersgd@baguanet", PAIRED, 1.0 * 3048 / 2048000),
        # A tenth of the steps are of the warm-up.
        ("qadam_run", FLAT, 1.5 * (0.1 + 0.9 * 2056 / 8192)),
        ("qadam_1bit_run", PAIRED, 0.1 + 0.9 * 260 / 8192),
        ("power_sgd_run", FLAT, 1.5 * 0.1 + 3.0 * 0.9 * 3048 / 2048000),
        ("ddp_powersgd_run@baguanet", PAIRED, 0.1 + 0.9 * 3048 / 2048000),
        ("sparse_run", FLAT, 1.5 * (1 + 128 * 6 / 8192 + 32 * 6 / 8192 + 27 * 120 / 8192) / 30),
    ],
)
def test_bytes_that_leave_a_host(case: str, cluster: Cluster, of_size: float) -> None:
    cost = cost_of(case, cluster, GRADIENTS)
    assert cost is not None
    assert cost.host_bytes == pytest.approx(of_size * SIZE_BYTES)


def test_what_exchanges_now_and_then_costs_as_often() -> None:
    local = cost_of("local_sgd", FLAT, Gradients(((20000,),)), rounds_per_step=1 / 8)
    assert local == Cost(host_bytes=15000, messages=0.25, behind=Behind.NOTHING)
    overlapped = cost_of("diloco_overlapped", FLAT, GRADIENTS, rounds_per_step=0.04)
    whole = cost_of("diloco_int8", FLAT, GRADIENTS, rounds_per_step=0.01)
    assert overlapped is not None and whole is not None
    # Of a block of 2048 numbers: half a byte each in place of one, and the two ends of the grid.
    assert overlapped.host_bytes == pytest.approx(whole.host_bytes * (1024 + 8) / (2048 + 8))
    assert cost_of("new_one", FLAT, GRADIENTS) is None


def test_of_low_rank_is_what_gains_by_it() -> None:
    # 1024 + 1024 numbers for each matrix and 1024 for each vector.
    assert MLP.low_rank_bytes(1, 1) == (4 * 8 * 1024,) * 3
    assert Gradients(((2, 3),)).low_rank_bytes(1, 1) == (4 * 2, 4 * 3, 0)
    # Torch wants half of the size at most, and one pair of vectors more would be the matrix.
    assert Gradients(((2, 3),)).low_rank_bytes(1, 2) == (0, 0, 4 * 6)
    assert Gradients(((2, 3),)).low_rank_bytes(2, 1) == (0, 0, 4 * 6)
    assert Gradients(((8, 3, 3, 3),)).low_rank_bytes(2, 1) == (4 * 2 * 8, 4 * 2 * 27, 0)
    factors = cost_of("power_sgd", FLAT, MLP)
    assert factors is not None and factors.messages == 2


def test_an_all_reduce_takes_two_messages_in_a_row_on_our_transport_and_all_around_a_ring() -> None:
    messages = {
        case: cost.messages
        for case in ("ddp", "ddp@baguanet", "gradient_allreduce", "gradient_allreduce@gloo", "decentralized")
        if (cost := cost_of(case, FLAT, GRADIENTS)) is not None
    }
    assert messages == {
        "ddp": 6,
        "ddp@baguanet": 2,
        "gradient_allreduce": 2,
        "gradient_allreduce@gloo": 6,
        "decentralized": 2,
    }


def test_few_bytes_go_by_doubling_on_our_transport() -> None:
    # Three all-reduces of 32 KiB, two of which follow each other; by doubling each host sends all of it
    # twice.
    assert cost_of("ddp_powersgd@baguanet", FLAT, MLP) == Cost(host_bytes=2 * 98304, messages=4)
    assert cost_of("ddp_powersgd@baguanet", PAIRED, MLP) == Cost(host_bytes=98304, messages=2)
    # Around Gloo's ring half of it goes three times.
    assert cost_of("ddp_powersgd", FLAT, MLP) == Cost(host_bytes=1.5 * 98304, messages=12)


def test_a_run_takes_as_long_as_its_steps_and_not_as_their_mean() -> None:
    run, warm, compressed = (
        cost_of(case, FLAT, MLP) for case in ("power_sgd_run", "gradient_allreduce", "power_sgd")
    )
    assert run is not None and warm is not None and compressed is not None
    assert compressed.seconds(FLAT) < 0.05
    assert limit_s(run, FLAT, Alone(step_s=0.05)) == pytest.approx(0.1 * warm.seconds(FLAT) + 0.9 * 0.05)


def test_every_contestant_has_a_cost() -> None:
    for cluster in (FLAT, PAIRED):
        for case in ("ddp", *_PEERS, *_OURS, *_BY_RAIL):
            assert cost_of(case, cluster, gradients()) is not None, case


def test_a_step_takes_as_long_as_the_slower_of_computing_and_wire() -> None:
    # One second at 100 Mbit/s, headers aside.
    cost = Cost(host_bytes=12.5e6, messages=2)
    wire_s = cost.seconds(FLAT)
    assert 1.0 < wire_s < 1.05
    assert limit_s(cost, FLAT, Alone(step_s=3.0)) == 3.0
    delayed = Cluster(hosts=4, ranks=4, rate_mbit=100, delay_ms=5)
    assert cost.seconds(delayed) == pytest.approx(wire_s + 2 * 0.010)
    assert cost.seconds(Cluster(hosts=4, ranks=4)) == 0.0


def test_what_cannot_be_hidden_comes_on_top() -> None:
    alone = Alone(step_s=0.5, until_gradients_s=0.25, optimizer_s=0.125)
    costs = {behind: Cost(host_bytes=12.5e6, messages=2, behind=behind) for behind in Behind}
    wire_s = costs[Behind.STEP].seconds(FLAT)
    found = {behind: limit_s(cost, FLAT, alone) for behind, cost in costs.items()}
    assert found == {
        Behind.BACKWARD: pytest.approx(0.25 + wire_s + 0.125),
        Behind.COMPUTING: pytest.approx(wire_s + 0.125),
        Behind.STEP: wire_s,
        Behind.NOTHING: 0.5 + wire_s,
    }
    # Where computing takes longer, the wire costs nothing.
    little = Cost(host_bytes=1.25e4, messages=2)
    assert limit_s(little, FLAT, alone) == 0.5


def test_an_optimizer_that_goes_through_more_memory_takes_as_much_longer() -> None:
    alone = Alone(step_s=0.5, until_gradients_s=0.25, optimizer_s=0.125)
    sgd, qadam = (cost_of(case, FLAT, MLP) for case in ("bytegrad", "qadam"))
    assert sgd is not None and qadam is not None
    assert limit_s(qadam, FLAT, alone) - limit_s(sgd, FLAT, alone) == pytest.approx(0.125 * 2 / 3)
    # Behind no wire, too.
    here = Cluster(hosts=4, ranks=4)
    assert limit_s(qadam, here, alone) - limit_s(sgd, here, alone) == pytest.approx(0.125 * 2 / 3)


def test_who_sends_what_behind_what() -> None:
    wanted = {
        "ddp": Behind.BACKWARD,
        "bytegrad": Behind.BACKWARD,
        "power_sgd": Behind.BACKWARD,
        "decentralized": Behind.COMPUTING,
        "decentralized_shift_one": Behind.COMPUTING,
        "low_precision_decentralized": Behind.STEP,
        "async_model_average": Behind.STEP,
        "diloco_overlapped": Behind.STEP,
        "diloco": Behind.NOTHING,
    }
    costs = {case: cost_of(case, FLAT, MLP) for case in wanted}
    assert {case: cost.behind for case, cost in costs.items() if cost is not None} == wanted


def measured(case: str, step_s: float, sent_bytes: float = 0.0) -> Measured:
    return Measured(case=case, step_s=step_s, ratio_to_ddp=step_s / 4.3, sent_bytes=sent_bytes)


def judged(cluster: Cluster, *contestants: Measured) -> list[Row]:
    found = {each.case: each for each in (measured("ddp", 4.3, 50.7e6), measured("alone", 0.1), *contestants)}
    return judge("here", cluster, MLP, found, 128)


def missed(cluster: Cluster, *contestants: Measured) -> list[str]:
    return [row.what for row in judged(cluster, *contestants) if not row.reached]


def test_figures_at_the_limit_are_in_order_and_slower_ones_are_not() -> None:
    assert missed(FLAT, measured("bytegrad", 1.1, 12.7e6), measured("qadam_1bit", 0.15, 1.6e6)) == []
    slow = missed(FLAT, measured("bytegrad", 1.3, 12.7e6))
    assert any("DDP's time / ours" in what for what in slow)
    assert any("limit by the cost model" in what for what in slow)


def test_a_nic_that_moved_other_bytes_than_the_model_is_reported() -> None:
    (row,) = (row for row in judged(FLAT, measured("bytegrad", 1.1, 15.0e6)) if not row.reached)
    assert "NIC's bytes" in row.what
    assert row.required


def test_headers_are_no_bytes_of_the_model() -> None:
    frames = 400
    small = Measured(
        case="power_sgd", step_s=0.2, ratio_to_ddp=0.05, sent_bytes=294912 + 66 * frames, sent_packets=frames
    )
    assert missed(FLAT, small) == []
    (what,) = missed(FLAT, measured("power_sgd", 0.2, 294912 + 66 * frames))
    assert "NIC's bytes" in what


def test_wherever_the_wire_is_the_limit_efficiency_counts() -> None:
    # 0.13 s for the wire, 0.1 for computing.
    assert missed(FLAT, measured("qadam_1bit", 0.15, 1.6e6)) == []
    (what,) = missed(FLAT, measured("qadam_1bit", 0.17, 1.6e6))
    assert "limit by the cost model" in what
    # 12 ms for the wire.
    assert missed(FLAT, measured("power_sgd", 0.2, 294912)) == []


def test_where_the_cores_are_the_limit_it_is_theirs_that_counts() -> None:
    # The wire needs 0.13 s, the cores 0.95 * 0.17.
    busy = Measured(
        case="qadam_1bit", step_s=0.17, ratio_to_ddp=0.17 / 4.3, sent_bytes=1.6e6, sent_packets=0, busy=0.95
    )
    assert missed(FLAT, busy) == []
    (row,) = (row for row in judged(FLAT, busy) if "limit by the cores" in row.what)
    assert row.value == pytest.approx(0.95)
    # With half of the time idle they are not.
    (what,) = missed(FLAT, replace(busy, busy=0.5))
    assert "limit by the cost model" in what
    # Nobody's, where a step waits for one and then for the other.
    (what,) = missed(FLAT, replace(busy, step_s=0.4, busy=0.5))
    assert "limit by the cores (the cost model's is 134 ms)" in what


def test_where_the_cores_are_the_limit_of_some_steps_of_a_run_it_is_theirs_in_those() -> None:
    run_cost = cost_of("sparse_run", FLAT, MLP)
    assert run_cost is not None
    model_s = limit_s(run_cost, FLAT, Alone(step_s=0.1))
    sparse = replace(measured("sparse", 0.2, 0.75e6), busy=0.95)
    # In 27 of 30 steps the cores need 0.19 s, computing alone 0.1, the wire less.
    reachable_s = model_s + 0.9 * 0.09
    run = replace(measured("sparse_run", reachable_s / 0.9, run_cost.host_bytes), busy=0.5)
    rows = [row for row in judged(FLAT, sparse, run) if row.what.startswith("here: sparse_run, limit")]
    assert [row.value for row in rows] == [pytest.approx(0.9)]
    assert "in steps of sparse the cores" in rows[0].what and rows[0].reached
    # Nobody knows, where those steps were not measured by themselves.
    rows = [row for row in judged(FLAT, run) if row.what.startswith("here: sparse_run, limit")]
    assert rows[0].value == pytest.approx(0.9 * model_s / reachable_s) and "the cores" not in rows[0].what


def test_who_hides_all_communication_is_held_against_the_turn_of_training_alone_beside_it() -> None:
    beside = replace(measured("async_model_average", 0.2, 50.3e6), ratio_to_alone=1.04)
    assert missed(FLAT, beside) == []
    (what,) = missed(FLAT, replace(beside, ratio_to_alone=1.06))
    assert "the speed of training alone" in what


def test_gradient_all_reduces_are_held_to_the_time_of_ddp_on_any_way() -> None:
    for case in ("gradient_allreduce", "gradient_allreduce@gloo", "gradient_allreduce+rail@gloo"):
        rows = judged(PAIRED, measured(case, 4.4, 33.6e6))
        (target,) = [row.target for row in rows if "our time / DDP's" in row.what and case in row.what]
        assert target == 1.0


def test_who_has_no_cost_model_is_said_to_have_none() -> None:
    (row,) = judged(FLAT, measured("new_one", 0.2))
    assert "no cost model" in row.what
    assert "no win predicted" not in row.what


def test_power_sgd_is_a_predicted_win() -> None:
    assert any("our time / DDP's" in what for what in missed(FLAT, measured("power_sgd", 4.6, 294912)))
    assert any("our time / DDP's" in what for what in missed(FLAT, measured("qadam_run", 4.6, 16.4e6)))


def test_ours_is_compared_with_the_best_stock_one_on_either_transport() -> None:
    stock = [
        measured("ddp_powersgd", 0.25),
        measured("ddp_powersgd_run", 0.6),
        measured("ddp@baguanet", 4.4),
        measured("ddp_fp16@baguanet", 2.0),
    ]
    rows = judged(FLAT, *stock, measured("power_sgd", 0.2), measured("power_sgd_run", 0.5))
    by_case = {row.what.split(": ")[1].split(",")[0]: row.what for row in rows if "samples/s" in row.what}
    assert "1.25 x the best stock one on Gloo (ddp_powersgd)" in by_case["power_sgd"]
    assert "10.00 x the best stock one on baguanet (ddp_fp16)" in by_case["power_sgd"]
    # Warm-up against warm-up.
    assert "1.20 x the best stock one on Gloo (ddp_powersgd_run)" in by_case["power_sgd_run"]


def test_pairs_are_of_one_job_and_parts_of_a_step_of_jobs_with_nothing_else() -> None:
    def block(job: int, case: str, number: int, step_s: float) -> dict[str, Any]:
        sent = {"sent_bytes_per_step": 132.0, "sent_packets_per_step": 1.0, "rounds_per_step": 1.0}
        sent["busy"] = 0.5
        parts = {"until_gradients_s": step_s / 2, "optimizer_s": step_s / 4, "beside_s": 0.5}
        return {"job": job, "case": case, "round": number, "step_s": step_s, **sent, **parts}

    turns = [
        (0, "alone", 0, 0.1),
        *((1, "ddp", 0, 4.0), (1, "bytegrad", 0, 1.0), (1, "bytegrad", 1, 2.0), (1, "ddp", 1, 8.0)),
        *(
            (2, "ddp", 0, 40.0),
            (2, "sparse", 0, 4.0),
            (2, "async_model_average", 0, 0.6),
        ),
        (3, "alone", 0, 0.3),
    ]
    found = medians([block(*turn) for turn in turns])
    assert found["alone"].step_s == pytest.approx(0.2)
    assert found["alone"].alone == Alone(step_s=0.2, until_gradients_s=0.1, optimizer_s=0.05)
    assert found["bytegrad"].ratio_to_ddp == 0.25
    assert found["bytegrad"].payload_bytes == 66.0
    assert found["sparse"].ratio_to_ddp == 0.1
    assert found["async_model_average"].ratio_to_alone == pytest.approx(1.2)
    assert found["ddp"].step_s == 8.0


def test_everybody_is_in_one_job_and_yardsticks_in_all_that_need_them() -> None:
    cases = ["ddp", *_PEERS, *_OURS, *_BY_RAIL]
    found = jobs(cases, 2)
    assert all(job[0] == "ddp" and len(job) <= 16 for job in found)
    assert sorted(case for job in found for case in job[1:] if case != "alone") == sorted(cases[1:])
    for nearly_alone in ("async_model_average", "diloco_overlapped"):
        assert all("alone" in job for job in found if nearly_alone in job)
    # Twice as many share processes that are there once.
    assert 16 < max(map(len, jobs(cases))) <= 30
    assert jobs(["ddp"]) == [("ddp",)]


def test_networks_that_differ_by_latency_are_measured_together() -> None:
    places = networks([4, 2], ["100"], [0.0, 5.0])
    assert [[network.delay_ms for network in together] for together in places] == [[None, 5.0]] * 2
    assert len({network.name for together in places for network in together}) == 4


def test_growth_is_the_median_of_turns_that_are_a_pair() -> None:
    def turns(*step_s: float) -> list[dict[str, Any]]:
        return [
            {"job": 1, "case": "bytegrad", "round": number, "step_s": took_s}
            for number, took_s in enumerate(step_s)
        ]

    # The machine takes twice as long from the second pair's second turn on: by medians it would be 2.2.
    assert growth(turns(2.0, 2.0, 4.0), turns(2.2, 4.4, 4.4)) == {"bytegrad": pytest.approx(1.1)}


@pytest.mark.parametrize(
    ("worked_s", "grown"),
    # Of 0.2 s that a step takes longer all is work, half of it, none; who works less does not wait longer.
    [(0.7, 1.0), (0.6, 1.1), (0.5, 1.2), (0.3, 1.2)],
)
def test_growth_of_waiting_is_without_what_the_cores_worked_longer(worked_s: float, grown: float) -> None:
    def turn(step_s: float, worked_s: float) -> list[dict[str, Any]]:
        return [{"job": 1, "case": "sparse", "round": 0, "step_s": step_s, "busy": worked_s / step_s}]

    found = growth(turn(1.0, 0.5), turn(1.2, worked_s), with_work=False)
    assert found == {"sparse": pytest.approx(grown)}


def test_a_little_slower_is_allowed_only_where_no_win_is_predicted() -> None:
    late = Measured(case="local_sgd", step_s=4.6, ratio_to_ddp=1.07, sent_bytes=6.3e6, rounds_per_step=1 / 8)
    assert any("our time / DDP's" in what for what in missed(FLAT, late))
    assert missed(FLAT, measured("decentralized", 4.6, 50.7e6)) == []
    assert any("our time / DDP's" in what for what in missed(FLAT, measured("decentralized", 6.9, 50.7e6)))


def test_the_hierarchy_must_send_less() -> None:
    rail, flat = measured("bytegrad", 0.8, 8.43e6), measured("bytegrad+flat", 1.5, 16.9e6)
    assert missed(PAIRED, rail, flat) == []
    # Whose default is flat.
    direct, railed = measured("gradient_allreduce@gloo", 4.3, 50.4e6), "gradient_allreduce+rail@gloo"
    rows = judged(PAIRED, direct, measured(railed, 3.0, 33.6e6))
    assert any("by rail" in row.what and row.value == pytest.approx(2 / 3) for row in rows)
    assert any("by rail" in what for what in missed(PAIRED, measured("bytegrad", 0.8, 16.9e6), flat))


def test_latency_must_hurt_neighbours_least() -> None:
    grown = {"ddp": 1.5, "decentralized_shift_one": 1.1}
    (row,) = judge_latency(grown, "there")
    assert row.reached
    (row,) = judge_latency({**grown, "ddp": 1.0}, "there")
    assert not row.reached
    # Also those that average among all, and against the least of all that exchange gradients.
    grown |= {"decentralized": 1.4, "power_sgd": 1.2, "sparse_run": 1.0}
    found = {row.what.split("growth of ")[1].split(" ")[0]: row for row in judge_latency(grown, "there")}
    assert {case: row.reached for case, row in found.items()} == {
        "decentralized_shift_one": True,
        "decentralized": False,
    }
