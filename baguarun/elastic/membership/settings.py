"""Times of membership, all derived from the one that users set: `detect_timeout_s`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baguarun.errors import UsageError

MIN_DETECT_TIMEOUT_S = 0.5
"""Below that, a busy machine's hiccups could not be told from its death."""
MIN_LEASE_S = 2
"""etcd grants no lease below 2 s with its own default election timeout."""
PROBING_BELOW_S = 4.0
"""A lease of 2 s may take 3 s to be seen to have ended, and twice that after etcd changed its leader."""


@dataclass(frozen=True, kw_only=True)
class MembershipSettings:
    """The knobs, checked when made; everything else is a property derived from them."""

    detect_timeout_s: float = 5.0
    """Seconds after which a silent node counts as lost: lower is sooner, higher bears longer hiccups."""
    join_timeout_s: float = 600.0
    """Seconds that a job with fewer than `min_nodes` nodes waits for more before it fails; see `broken_s`."""

    def __post_init__(self) -> None:
        if not self.detect_timeout_s >= MIN_DETECT_TIMEOUT_S:
            raise UsageError(
                f"detect_timeout_s={self.detect_timeout_s:g}: want at least {MIN_DETECT_TIMEOUT_S:g} s; "
                "a busy machine may be silent for as long, use --detect-timeout 0.5 or more"
            )
        if not self.join_timeout_s > 0:
            raise UsageError(f"join_timeout_s={self.join_timeout_s:g}: want more than 0 s")

    @property
    def lease_ttl_s(self) -> int:
        """Lease of a node: whole seconds, within the detection budget where etcd grants leases that short."""
        return max(MIN_LEASE_S, math.floor(self.detect_timeout_s))

    @property
    def _by_lease_s(self) -> float:
        """The detection budget as far as leases can keep it: what waits for one to end goes by this."""
        return max(float(MIN_LEASE_S), self.detect_timeout_s)

    @property
    def keepalive_interval_s(self) -> float:
        """Two renewals may be lost before the third comes too late."""
        return self.lease_ttl_s / 3

    @property
    def gap_s(self) -> float:
        """A renewal older than this means that the store or this process was away."""
        return 2 * self.lease_ttl_s / 3

    @property
    def first_settle_s(self) -> float:
        """Quiet time without a newcomer before a first World below `max_nodes` is formed."""
        return 0.2 * self._by_lease_s

    @property
    def join_settle_s(self) -> float:
        """Quiet time before a running job takes newcomers in: nodes that start together come in together."""
        return 0.06 * self._by_lease_s

    @property
    def newcomers_settle_s(self) -> float:
        """The same in place, where others train on meanwhile, for newcomers that have arrived and are not
        ready yet: a node's workers, which start at the same time, make the others stand once."""
        return 0.35

    @property
    def newcomers_expected_s(self) -> float:
        """In place: ranks ask each other at every commit for so long, at most, for the sake of newcomers."""
        return 60.0

    @property
    def loss_settle_s(self) -> float:
        """Quiet time after a loss or a leave, so that several at once cost one new World."""
        return 0.01 * self.detect_timeout_s

    @property
    def reregister_s(self) -> float:
        """How long nodes that vanished in a gap or en masse get to register again."""
        return self._by_lease_s

    @property
    def same_id_s(self) -> float:
        """How long the node id of an earlier life may be taken: after that, its holder is alive."""
        return 3 * self._by_lease_s

    @property
    def crowded_s(self) -> float:
        """How long the one place of a job may be held by a dead node."""
        return 2 * self._by_lease_s

    @property
    def verdict_s(self) -> float:
        """After a failure without a restart left: how long a lost member may still turn up as the cause."""
        return self.lease_ttl_s + 1.0

    @property
    def broken_s(self) -> float:
        """How long workers that live, but never get through a step together, have for a network to be mended:
        as long as nodes that are missing, though no longer than a switch takes that somebody has to start."""
        return min(self.join_timeout_s, 600.0)

    @property
    def retry_s(self) -> float:
        """Pause between two attempts to reach a store that is away."""
        return 0.1 * self._by_lease_s

    # -- probing: neighbours ask each other for signs of life where leases take too long

    @property
    def probes(self) -> bool:
        """Whether agents probe each other."""
        return self.detect_timeout_s < PROBING_BELOW_S

    @property
    def probe_interval_s(self) -> float:
        """Between two probes of one neighbour: a suspicion takes several in a row without an answer."""
        return 0.1 * self.detect_timeout_s

    @property
    def suspect_s(self) -> float:
        """A neighbour that has not answered for so long is suspected."""
        return 0.6 * self.detect_timeout_s

    @property
    def confirm_s(self) -> float:
        """How long a suspect gets to show the leader, or a suspected leader the store, that it is alive."""
        return 0.2 * self.detect_timeout_s

    @property
    def complaints_settle_s(self) -> float:
        """Time after a worker's complaint in which its cause, a lost host, is found if there is one."""
        return 0.4 * self.detect_timeout_s

    @property
    def silence_settle_s(self) -> float:
        """The same where the transport heard nothing: a frozen worker's agent has killed it by then."""
        return 0.6 * self.detect_timeout_s
