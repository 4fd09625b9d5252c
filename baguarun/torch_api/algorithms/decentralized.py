"""Bagua's `decentralized` module."""

from __future__ import annotations

from baguarun.comm.algorithms import Decentralized

__all__ = ["DecentralizedAlgorithm"]


def DecentralizedAlgorithm(
    hierarchical: bool | None = None,
    peer_selection_mode: str = "all",
    communication_interval: int = 1,
) -> Decentralized:
    """Averages weights with other ranks during backward.

    Bagua's default is `hierarchical=True`; here it is None, an exchange among all ranks for the time being.
    Asking for True on several nodes with several workers each is refused at construction until it is there.
    `shift_one` takes odd numbers of ranks too, and there is a third mode, `exponential`.
    """
    return Decentralized(
        hierarchical=hierarchical,
        peer_selection_mode=peer_selection_mode,
        communication_interval=communication_interval,
    )
