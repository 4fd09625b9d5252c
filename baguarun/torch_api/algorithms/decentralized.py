"""Bagua's `decentralized` module."""

from __future__ import annotations

from baguarun.comm.algorithms import Decentralized, LowPrecisionDecentralized

__all__ = ["DecentralizedAlgorithm", "LowPrecisionDecentralizedAlgorithm"]


class DecentralizedAlgorithm(Decentralized):
    """Averages weights with other ranks during backward; with `hierarchical` nodes are the peers.

    `shift_one` takes odd numbers of peers too, and there is a third mode, `exponential`.
    """

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        super().__init__(
            hierarchical=hierarchical,
            peer_selection_mode=peer_selection_mode,
            communication_interval=communication_interval,
        )


class LowPrecisionDecentralizedAlgorithm(LowPrecisionDecentralized):
    """Sends changes of the weights with 8 bits each to the two neighbours on a ring, after the step.

    With `hierarchical` nodes are the neighbours. Two of them mix by halves, not by thirds.
    """

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        super().__init__(hierarchical=hierarchical, communication_interval=communication_interval)
