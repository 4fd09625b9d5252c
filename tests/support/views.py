"""Short ways to write down what a leader may know."""

from __future__ import annotations

from baguarun.contract import Failure
from baguarun.elastic.membership.records import Member, NodeRecord, Past
from baguarun.elastic.membership.view import CurrentWorld, Node, Report


def a_node(
    name: str, revision: int, *, wanted: int | None = None, seen: int = 0, past: Past | None = None
) -> Node:
    record = NodeRecord(
        name=name,
        address=f"addr-{name}",
        slots=2,
        node_rank=wanted,
        digest="same",
        summary="train.py",
        token=f"t{revision}",
        registered_s=0.0,
        seen=seen,
        past=past,
    )
    return Node(name, revision, record)


def nodes_of(*nodes: Node) -> dict[str, Node]:
    return {node.node_id: node for node in sorted(nodes, key=lambda node: node.create_revision)}


def a_world(
    *members: Node,
    generation: int = 1,
    live: bool = True,
    acked: int = 0,
    checked: int | None = None,
    restart_count: int = 0,
    charged: bool = False,
    free_retries: int = 0,
) -> CurrentWorld:
    return CurrentWorld(
        generation=generation,
        token=f"w{generation}",
        members=tuple(Member(n.node_id, n.record.name, n.record.slots, n.create_revision) for n in members),
        live=live,
        acked=acked,
        checked=checked,
        restart_count=restart_count,
        charged=charged,
        free_retries=free_retries,
    )


def a_report(
    node: str,
    revision: int,
    *,
    seen_s: float = 0.0,
    signal: int | None = None,
    retry_free: bool = False,
    generation: int = 1,
) -> Report:
    failure = Failure(
        generation=generation,
        node=node,
        rank=0,
        local_rank=0,
        pid=1,
        exit_code=None if signal else 3,
        signal=signal,
        timestamp_s=0.0,
    )
    return Report(node, failure, retry_free, revision, seen_s)
