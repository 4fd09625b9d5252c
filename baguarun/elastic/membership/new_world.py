"""What a World that is to be published looks like in the store; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baguarun.elastic.membership.actions import Publish
from baguarun.elastic.membership.records import Member, Process, Row, WorldRecord


def rows_of(action: Publish, token: str) -> dict[str, Row]:
    """Every member's row, by node id in rank order."""
    rows: dict[str, Row] = {}
    first_rank = 0
    for node_rank, node in enumerate(action.nodes):
        slots = node.record.slots
        workers: tuple[Process, ...] = ()
        if action.in_place is not None:
            workers = action.in_place.workers[node.node_id]
            slots = len(workers)
        rows[node.node_id] = Row(
            generation=action.generation,
            token=token,
            node_rank=node_rank,
            first_rank=first_rank,
            slots=slots,
            workers=workers,
            leaving=action.in_place is not None and node.node_id in action.in_place.leaving,
        )
        first_rank += slots
    return rows


def record_of(
    action: Publish, rows: Mapping[str, Row], token: str, *, reason: str, formed_s: float, net_secret: str
) -> WorldRecord:
    """What is the same for all members; node 0, which hosts the master, is the first with workers."""
    record = WorldRecord(
        generation=action.generation,
        token=token,
        num_nodes=sum(row.slots > 0 for row in rows.values()),
        world_size=sum(row.slots for row in rows.values()),
        master_addr=action.nodes[0].record.address,
        restart_count=action.restart_count,
        charged=action.charged,
        free_retries=action.free_retries,
        reason=reason,
        formed_s=formed_s,
        net_secret=net_secret,
        broken=action.broken,
    )
    if action.in_place is None:
        return record
    details = action.in_place
    places = {node.node_id: node.record.slots for node in action.nodes}
    is_short = any(not row.leaving and row.slots < places[node_id] for node_id, row in rows.items())
    return replace(
        record,
        in_place=not details.fresh,
        polite=details.polite,
        is_short=is_short,
        streak=details.streak,
    )


def members_of(action: Publish, rows: Mapping[str, Row]) -> tuple[Member, ...]:
    return tuple(
        Member(
            node.node_id,
            node.record.name,
            rows[node.node_id].slots,
            node.create_revision,
            rows[node.node_id].workers,
        )
        for node in action.nodes
    )
