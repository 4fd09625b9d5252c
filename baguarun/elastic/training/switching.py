"""Finds the commit at which all ranks of a World leave it together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from baguarun.comm.backend import NAME as BAGUANET
from baguarun.comm.backend import backend_on_cpu
from baguarun.comm.extension import load_extension
from baguarun.comm.groups import made_over

_ASK_EVERY_S = 0.2
"""Time between two questions, about: a World is left so much later."""
_MOST_COMMITS = 16
"""Between two questions, however short steps are: the next ones may be long."""
_ASK_RELAXED_EVERY_S = 0.1
"""The same where ranks are not in step, and look at an answer where they ask again."""
_RELAXED_COMMITS = (2, 8)
"""The least and the most between two questions there: nobody who is that far behind holds the others up."""


class News(NamedTuple):
    """For what a World is left; of several the largest counts."""

    generation: int
    halts: bool = False
    """No World follows for now: what is left is a checkpoint."""


class SwitchBoundary:
    """Every few commits the ranks tell each other the newest generation that any of them has heard of.

    Of two integers it is the largest that any says, on a group of its own. All see the same numbers at the
    same commit, and leave there. The last bit of the first says whether the job halts; the second number
    agrees on when to ask again.

    Ranks that are in step ask when their gradients are there, so that the question goes about while
    optimizers step, and as seldom as the shortest of their wishes allows. Where that is in every step, as
    steps are long or a change is near, they wait for the answer in the same commit; else they look at it in
    the next one, where it is there. Ranks that are not in step do not wait for each other: they look at the
    answer where they ask again, some commits later. With a change near they do as the others, so that all
    are at one place when it comes.

    Threads: the one that trains.
    """

    def __init__(
        self, generation: int, *, in_step: bool, is_change_near: Callable[[], bool] = lambda: False
    ) -> None:
        """Collective over the default group. `in_step`: all ranks wait for each other in every step.

        `is_change_near`: whether newcomers are on their way, as far as this rank knows. Ranks are asked as
        often as can be while one of them knows.
        """
        self._generation = generation
        self._in_step = self._together = in_step
        self._is_change_near = is_change_near
        self._commits = 0
        # The commits at which ranks are asked next, and at which the answer is looked at.
        self._ask_at = self._look_at = 1
        self._asked_at_s = time.monotonic()
        self.asked_at = 0
        """Number of the commit in this World at which the ranks were asked last; 0 before."""
        self._question: Any = None
        if dist.get_world_size() > 1:
            # On the CPU whatever the default group is on: no stream of an accelerator is waited for.
            assert dist.group.WORLD is not None
            group = dist.new_group(
                backend=BAGUANET,
                pg_options=made_over(dist.group.WORLD),
                use_local_synchronization=True,
                group_desc="baguarun boundary",
            )
            self._question = load_extension().Question(backend_on_cpu(group))
        self._is_asked = False

    def before_step(self, told: News) -> None:
        """An optimizer steps next. `told`: the newest that this rank has been told."""
        is_due = self._together and not self._is_asked and self._commits + 1 == self._ask_at
        if is_due and self._question is not None:
            self._start(told)

    def at_commit(self, told: News) -> News | None:
        """For what all leave at this commit, or None. `told`: as in `before_step`."""
        self._commits += 1
        if self._question is None:
            return self._if_new(told)
        newest, interval = News(self._generation), 0
        if self._commits == self._ask_at and self._together and not self._is_asked:
            self._start(told)
        if self._is_asked and self._commits == self._look_at:
            newest, interval = self._answer()
            self._together = self._in_step or interval == 1
            if self._together:
                self._ask_at = max(self.asked_at + interval, self._commits + 1)
                self._look_at = self._ask_at if interval == 1 else self._ask_at + 1
        if self._commits == self._ask_at and not self._together and self._if_new(newest) is None:
            self._start(told)
            least, most = _RELAXED_COMMITS
            self._ask_at = self._look_at = self._commits + max(least, min(interval, most))
        return self._if_new(newest)

    def at_end(self, told: News) -> News | None:
        """As `at_commit`, for ranks that have nothing left to train: waits for all of them."""
        if self._question is None:
            return self._if_new(told)
        if self._is_asked:
            told = max(told, self._answer()[0])
        self._start(told)
        newest, _ = self._answer()
        return self._if_new(newest)

    def farewell(self) -> None:
        """Return when all ranks have come to the commit where they leave: no message is under way then."""
        if self._question is not None:
            self._start(News(0))
            self._answer()

    def _if_new(self, news: News) -> News | None:
        return news if news.generation > self._generation else None

    def _start(self, told: News) -> None:
        # The largest of the negative numbers is the shortest interval.
        interval = self._wished_interval()
        self.asked_at = self._ask_at
        self._question.ask((2 * told.generation + told.halts, -interval))
        self._is_asked = True

    def _answer(self) -> tuple[News, int]:
        self._is_asked = False
        newest, interval = self._question.answer()
        return News(newest // 2, newest % 2 == 1), -interval

    def _wished_interval(self) -> int:
        """Commits to the next question: all that fit in the time between two, at the pace since the last."""
        now_s = time.monotonic()
        commits, elapsed_s = self._ask_at - self.asked_at, now_s - self._asked_at_s
        self._asked_at_s = now_s
        if self._is_change_near():
            return 1
        every_s = _ASK_EVERY_S if self._in_step else _ASK_RELAXED_EVERY_S
        least = 1 if self._in_step else _RELAXED_COMMITS[0]
        if commits <= 0:
            # Asked at this commit already.
            return least
        return max(least, min(round(every_s * commits / max(elapsed_s, 1e-9)), _MOST_COMMITS))
