"""Something that is about to come is waited for with more attention, but not for ever."""

from __future__ import annotations

from collections.abc import Hashable


class Expectation:
    """Holds for some time after what is expected was first seen; something else is waited for anew."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._what: Hashable | None = None
        self._since_s = 0.0

    def see(self, what: Hashable | None, now_s: float) -> bool:
        """Whether `what` is still expected to come; None: nothing is."""
        if what != self._what:
            self._what, self._since_s = what, now_s
        return what is not None and now_s - self._since_s < self._limit_s
