from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baguarun.comm.algorithms import ByteGrad, GradientAllReduce
from baguarun.comm.rails import Hierarchical, NodeLayout, goes_by_rail, lay_out
from baguarun.errors import UsageError

places = st.lists(st.integers(0, 5), min_size=1, max_size=24)


def of_sizes(*sizes: int) -> NodeLayout:
    return lay_out([node for node, size in enumerate(sizes) for _ in range(size)])


@given(places)
def test_every_shard_has_one_owner_on_each_node(node_of_rank: list[int]) -> None:
    layout = lay_out(node_of_rank)
    assert sorted(rank for node in layout.nodes for rank in node) == list(range(len(node_of_rank)))
    for node in layout.nodes:
        owners = [rank for rank in node if layout.rail_of(rank)]
        assert owners == list(node[: layout.num_rails])
        assert layout.num_rails >= 1


@given(places)
def test_the_ranks_of_a_rail_agree_on_it_and_are_one_per_node(node_of_rank: list[int]) -> None:
    layout = lay_out(node_of_rank)
    for rank in range(len(node_of_rank)):
        rail = layout.rail_of(rank)
        if rail:
            assert rank in rail
            assert [layout.node_index(other) for other in rail] == list(range(len(layout.nodes)))
            assert all(layout.rail_of(other) == rail for other in rail)


@given(places)
def test_every_rank_gets_every_shard_from_an_owner_of_its_node(node_of_rank: list[int]) -> None:
    layout = lay_out(node_of_rank)
    for rank in range(len(node_of_rank)):
        rails = {layout.rail_of(other) for other in layout.node_of(rank)} - {()}
        assert len(rails) == layout.num_rails


def test_ranks_of_nodes_need_not_be_neighbours() -> None:
    layout = lay_out(["a", "b", "a", "b", "b"])
    assert layout.nodes == ((0, 2), (1, 3, 4))
    assert layout.rail_of(2) == (2, 3)
    assert layout.rail_of(4) == ()


@pytest.mark.parametrize(
    ("sizes", "hierarchical", "by_rail"),
    [
        ((2, 2), True, True),
        ((2, 2), "auto", True),
        ((2, 2), False, False),
        ((3, 1), True, True),
        ((3, 1), "auto", False),
        ((2, 1, 2), "auto", True),
        ((4,), True, False),
        ((4,), "auto", False),
        ((1, 1, 1), True, False),
        ((1, 1, 1), "auto", False),
    ],
)
def test_what_goes_by_rail(sizes: tuple[int, ...], hierarchical: Hierarchical, by_rail: bool) -> None:
    assert goes_by_rail(hierarchical, of_sizes(*sizes)) is by_rail


@pytest.mark.parametrize(
    ("sizes", "hierarchical", "by_rail"),
    [
        ((4,), True, True),
        ((4,), "auto", False),
        ((4,), False, False),
        ((1,), True, False),
        ((1, 1), True, False),
        ((2, 1), True, True),
    ],
)
def test_what_goes_by_rail_where_ranks_exchange_with_few_others(
    sizes: tuple[int, ...], hierarchical: Hierarchical, by_rail: bool
) -> None:
    assert goes_by_rail(hierarchical, of_sizes(*sizes), with_few=True) is by_rail


@pytest.mark.parametrize("kind", [ByteGrad, GradientAllReduce])
@pytest.mark.parametrize("value", [None, 1, "true", "Auto"])
def test_what_is_neither_a_bool_nor_auto_is_refused_with_the_choice(kind: type, value: object) -> None:
    with pytest.raises(UsageError, match=r"hierarchical=.*; want True, False or 'auto'"):
        kind(hierarchical=value)
