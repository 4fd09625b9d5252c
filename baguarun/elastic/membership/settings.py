"""Times of membership, all derived from the one that users set: `detect_timeout_s`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baguarun.errors import UsageError

MIN_DETECT_TIMEOUT_S = 2.0
"""etcd grants no lease below 2 s with its own default election timeout."""


@dataclass(frozen=True, kw_only=True)
class MembershipSettings:
    """The knobs, checked when made; everything else is a property derived from them."""

    detect_timeout_s: float = 5.0
    """Seconds after which a silent node counts as lost: lower is sooner, higher bears longer hiccups."""
    join_timeout_s: float = 600.0
    """Seconds that a job with fewer than `min_nodes` nodes waits for more before it fails."""

    def __post_init__(self) -> None:
        if not self.detect_timeout_s >= MIN_DETECT_TIMEOUT_S:
            raise UsageError(
                f"detect_timeout_s={self.detect_timeout_s:g}: want at least {MIN_DETECT_TIMEOUT_S:g} s; "
                "etcd does not grant shorter leases, use --detect-timeout 2 or more"
            )
        if not self.join_timeout_s > 0:
            raise UsageError(f"join_timeout_s={self.join_timeout_s:g}: want more than 0 s")

    @property
    def lease_ttl_s(self) -> int:
        """Lease of a node: a whole number of seconds, never longer than the detection budget."""
        return math.floor(self.detect_timeout_s)

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
        return 0.2 * self.detect_timeout_s

    @property
    def join_settle_s(self) -> float:
        """Quiet time before a running job takes newcomers in: nodes that start together come in together."""
        return 0.06 * self.detect_timeout_s

    @property
    def loss_settle_s(self) -> float:
        """Quiet time after a loss or a leave, so that several at once cost one new World."""
        return 0.01 * self.detect_timeout_s

    @property
    def reregister_s(self) -> float:
        """How long nodes that vanished in a gap or en masse get to register again."""
        return self.detect_timeout_s

    @property
    def verdict_s(self) -> float:
        """After a failure without a restart left: how long a lost member may still turn up as the cause."""
        return self.lease_ttl_s + 1.0

    @property
    def retry_s(self) -> float:
        """Pause between two attempts to reach a store that is away."""
        return 0.1 * self.detect_timeout_s
