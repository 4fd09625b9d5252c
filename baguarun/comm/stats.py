"""What one rank has communicated for one model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CommunicationStats:
    """What one engine has done so far, on this rank."""

    steps: int = 0
    """Backward passes whose gradients were communicated."""
    weight_rounds: int = 0
    """Exchanges of weights started."""
    bytes_sent: int = 0
    """Bytes of gradients and weights sent."""
    buckets: int = 0
    """Buckets per step."""
    exposed_wait_s: float = 0.0
    """Seconds for which the end of backward waited for communication."""
