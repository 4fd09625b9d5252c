"""Whatever nodes do, in any order, the decisions carried out on a model of the store keep these promises."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baguarun.contract import Failure
from baguarun.elastic.membership.actions import (
    Action,
    Check,
    Dismiss,
    Finish,
    GoLive,
    Publish,
    Reset,
    Tell,
    Wait,
)
from baguarun.elastic.membership.decide import decide
from baguarun.elastic.membership.job import JobSpec
from baguarun.elastic.membership.keys import JobKeys
from baguarun.elastic.membership.ledger import Ledger
from baguarun.elastic.membership.records import (
    FailureReport,
    Member,
    NodeRecord,
    Past,
    WorldRecord,
    desired_to_json,
    generation_to_json,
)
from baguarun.elastic.membership.settings import MembershipSettings
from baguarun.elastic.membership.store import Change, Entry, Event, Snapshot

SETTINGS = MembershipSettings(detect_timeout_s=5.0, join_timeout_s=100.0)
KEYS = JobKeys("j")
IDS = [f"n{i}" for i in range(6)]


class Model:
    """A leader's ledger, the nodes behind it, and an executor of decisions that checks each of them."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.now_s = 0.0
        self.revision = 1
        self.ledger = Ledger(KEYS, spec, Snapshot((), 1), self.now_s)
        self.here: dict[str, int] = {}
        self.acked: set[str] = set()
        self.order: list[str] = []
        self.generation = 0
        self.restarts = 0
        self.outcome: Finish | None = None
        self.places = spec.max_nodes
        self.going: set[str] = set()
        """Asked to leave, and still here."""

    # -- what nodes do

    def tell(self, key: str, value: bytes, change: Change = Change.PUT, created: int | None = None) -> None:
        entry = Entry(key, value, created or self.revision, self.revision)
        self.ledger.apply(Event(change, entry), self.now_s)

    def join(self, node_id: str, past: Past | None = None) -> None:
        if node_id in self.here:
            return
        self.revision += 1
        self.here[node_id] = self.revision
        record = NodeRecord(
            name=node_id,
            address="a",
            slots=1,
            node_rank=None,
            digest=self.spec.digest,
            summary="",
            token=str(self.revision),
            registered_s=0.0,
            seen=0,
            past=past,
        )
        self.tell(KEYS.nodes + node_id, record.to_json())

    def vanish(self, node_id: str, *, politely: bool) -> None:
        if node_id not in self.here:
            return
        self.revision += 1
        del self.here[node_id]
        self.acked.discard(node_id)
        self.going.discard(node_id)
        if politely:
            self.tell(KEYS.leaves + node_id, b"")
        self.tell(KEYS.nodes + node_id, b"", Change.DELETE)

    def lose_lease(self, node_id: str) -> None:
        """The lease ends, the workers go on, and the node registers again at once."""
        world = self.ledger.world
        if node_id not in self.here or world is None or node_id not in self.order:
            return
        self.vanish(node_id, politely=False)
        rank = self.order.index(node_id)
        past = Past(
            generation=world.generation,
            token=world.token,
            node_rank=rank,
            num_nodes=len(self.order),
            restart_count=world.restart_count,
            net_secret="",
        )
        self.join(node_id, past)

    def fail(self, node_id: str, signal: int | None, retry_free: bool) -> None:
        if not self.runs(node_id):
            return
        self.revision += 1
        failure = Failure(
            generation=self.generation,
            node=node_id,
            rank=0,
            local_rank=0,
            pid=1,
            exit_code=1,
            signal=signal,
            timestamp_s=0.0,
        )
        self.tell(KEYS.errors + node_id, FailureReport(failure=failure, retry_free=retry_free).to_json())

    def done(self, node_id: str) -> None:
        if self.runs(node_id):
            self.revision += 1
            self.tell(KEYS.dones + node_id, generation_to_json(self.generation))

    def scale(self, num_nodes: int) -> None:
        self.revision += 1
        self.places = num_nodes
        self.tell(KEYS.desired, desired_to_json(num_nodes))

    def obey(self) -> None:
        for node_id in sorted(self.going):
            self.vanish(node_id, politely=True)

    def runs(self, node_id: str) -> bool:
        world = self.ledger.world
        return world is not None and world.live and node_id in self.order and node_id in self.here

    def acknowledge(self, node_id: str) -> None:
        if node_id in self.here and node_id in self.order:
            self.acked.add(node_id)
        world = self.ledger.world
        if world is not None and not world.live:
            self.ledger.counted(acked=len(self.acked))
        elif world is not None and world.checked is not None:
            self.ledger.counted(checked=len(self.acked))

    # -- what the leader does

    def drive(self) -> Action:
        """Decide and execute until there is nothing to do now."""
        for _ in range(20):
            decision = decide(self.now_s, self.ledger.view(self.now_s, float("-inf")), SETTINGS)
            assert decision.reason
            if isinstance(decision.action, Wait):
                until_s = decision.action.until_s
                assert until_s is None or until_s > self.now_s, "a wait that is over"
                return decision.action
            self.execute(decision.action)
        raise AssertionError(f"it does not come to rest: {decision}")

    def execute(self, action: Action) -> None:
        self.revision += 1
        if isinstance(action, Publish):
            self.publish(action)
        elif isinstance(action, GoLive):
            assert action.generation == self.generation
            self.ledger.went_live()
        elif isinstance(action, Check):
            self.ledger.counted(checked=0)
        elif isinstance(action, Tell):
            assert action.refused == (self.spec.max_nodes == 1), "a job of one place has none to wait for"
            self.ledger.told(action.node_ids)
        elif isinstance(action, Dismiss):
            self.dismiss(action)
        elif isinstance(action, Finish):
            assert self.outcome is None, "two outcomes"
            self.outcome = action
            self.ledger.ended(self.revision)
        else:
            assert isinstance(action, Reset)
            assert self.outcome is not None
            self.ledger = Ledger(KEYS, self.spec, Snapshot((), self.revision), self.now_s)

    def dismiss(self, action: Dismiss) -> None:
        going = set(action.node_ids)
        staying = {node_id for node_id in self.order if self.stayed(node_id)} - self.going - going
        assert going and not going & self.going, "nobody is dismissed twice"
        assert going <= set(self.order) & set(self.here), "a node that is no member"
        assert len(staying) == self.places, "as many stay as are wanted"
        assert max(map(self.here.__getitem__, staying)) < min(map(self.here.__getitem__, going)), "by age"
        self.going |= going
        self.ledger.dismissed(action.node_ids)

    def publish(self, action: Publish) -> None:
        ids = [node.node_id for node in action.nodes]
        assert action.generation > self.generation, "a generation was published twice"
        assert len(ids) == len(set(ids))
        assert self.spec.min_nodes <= len(ids) <= self.places
        assert not set(ids) & self.going, "a node that is on its way out"
        assert set(ids) <= set(self.here), "a node that is gone"
        assert 0 <= action.restart_count <= self.spec.max_restarts
        assert action.restart_count <= self.restarts + 1
        survivors = [node_id for node_id in self.order if node_id in ids and self.stayed(node_id)]
        assert ids[: len(survivors)] == survivors, "survivors changed places"
        record = WorldRecord(
            generation=action.generation,
            token=f"w{action.generation}",
            num_nodes=len(ids),
            world_size=len(ids),
            master_addr="a",
            restart_count=action.restart_count,
            charged=action.charged,
            free_retries=action.free_retries,
            reason="",
            formed_s=0.0,
            net_secret="",
        )
        members = tuple(Member(n.node_id, n.node_id, 1, n.create_revision) for n in action.nodes)
        self.generation, self.order, self.restarts = action.generation, ids, action.restart_count
        self.acked = set()
        self.ledger.published(record, members)

    def stayed(self, node_id: str) -> bool:
        """Still in its place of the last World: never gone, or back without having lost its workers."""
        world = self.ledger.world
        assert world is not None
        node = self.ledger.view(self.now_s, 0.0).nodes.get(node_id)
        if node is None:
            return False
        known = {member.node_id: member.create_revision for member in world.members}
        past = node.record.past
        return known.get(node_id) == node.create_revision or (past is not None and past.token == world.token)


OPERATIONS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(IDS)),
    st.tuples(st.just("leave"), st.sampled_from(IDS)),
    st.tuples(st.just("die"), st.sampled_from(IDS)),
    st.tuples(st.just("lose_lease"), st.sampled_from(IDS)),
    st.tuples(st.just("ack"), st.sampled_from(IDS)),
    st.tuples(st.just("ack all"), st.just("")),
    st.tuples(st.just("done"), st.sampled_from(IDS)),
    st.tuples(st.just("fail"), st.sampled_from(IDS)),
    st.tuples(st.just("killed"), st.sampled_from(IDS)),
    st.tuples(st.just("port in use"), st.sampled_from(IDS)),
    st.tuples(st.just("scale"), st.sampled_from(IDS)),
    st.tuples(st.just("obey"), st.just("")),
    st.tuples(st.just("short time"), st.just("")),
    st.tuples(st.just("long time"), st.just("")),
)


def apply(model: Model, operation: str, node_id: str) -> None:
    if operation == "join":
        model.join(node_id)
    elif operation in ("leave", "die"):
        model.vanish(node_id, politely=operation == "leave")
    elif operation == "lose_lease":
        model.lose_lease(node_id)
    elif operation == "ack":
        model.acknowledge(node_id)
    elif operation == "ack all":
        for everybody in list(model.order):
            model.acknowledge(everybody)
    elif operation == "done":
        model.done(node_id)
    elif operation in ("fail", "killed", "port in use"):
        model.fail(node_id, 9 if operation == "killed" else None, operation == "port in use")
    elif operation == "scale":
        spec = model.spec
        model.scale(spec.min_nodes + IDS.index(node_id) % (spec.max_nodes - spec.min_nodes + 1))
    elif operation == "obey":
        model.obey()
    else:
        model.now_s += 0.1 if operation == "short time" else 10.0


@settings(max_examples=400, deadline=None)
@given(
    limits=st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)),
    operations=st.lists(OPERATIONS, max_size=40),
)
def test_decisions_keep_their_promises(
    limits: tuple[int, int, int], operations: list[tuple[str, str]]
) -> None:
    spec = JobSpec(
        job_id="j",
        min_nodes=limits[0],
        max_nodes=limits[0] + limits[1],
        max_restarts=limits[2],
        digest="same",
        summary="",
    )
    model = Model(spec)
    for operation, node_id in operations:
        apply(model, operation, node_id)
        model.drive()
        if model.outcome is not None:
            break
    come_to_rest(model)


def come_to_rest(model: Model) -> None:
    """With time and acknowledgements, every job runs, has ended, or waits for nodes."""
    for _ in range(8):
        model.now_s += 6.0
        model.obey()
        for node_id in list(model.order):
            model.acknowledge(node_id)
        model.drive()
    world = model.ledger.world
    waits_for_nodes = len(model.here) < model.spec.min_nodes
    runs = world is not None and world.live
    assert model.outcome is not None or runs or waits_for_nodes
