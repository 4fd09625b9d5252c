"""What is left to deal when ranks that are not in step lose one of them. Pure.

Places count along the epoch's order, whatever was dealt when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Spans = list[tuple[int, int]]
"""Ranges [first, end), disjoint and in order unless said otherwise."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one rank knows of one epoch's samples when its World has ended."""

    epoch: int
    own: Spans
    """Places that this rank has trained on."""
    shared: Spans
    """Places that any rank has trained on and has shared, as far as this rank knows."""
    dealt: Spans
    """Places that were dealt to any rank, in steps that this rank has done, without those that are known to
    be lost."""
    shared_to: tuple[int, int]
    """Epoch, and how many places of it in the order of dealing, up to which `shared` goes; it may be an epoch
    before this one, and `shared` is empty then."""


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What all ranks go on from."""

    epoch: int
    done: Spans
    redealt: int
    """Samples that were dealt and are dealt again: what became of them is lost with a rank."""
    left_behind: int
    """About how many samples of an epoch that others have ended nobody has trained on, or had not shared when
    it was lost; they are not dealt again."""
    shared: Spans
    """Places that are in the weights of more than those who have trained on them."""
    shared_to: tuple[int, int]
    """As in `Account`."""

    def account_of(self, mine: Account) -> Account:
        """What a rank that has settled `mine` and done nothing since tells where it settles once more."""
        return Account(
            epoch=self.epoch,
            own=mine.own if mine.epoch == self.epoch else [],
            shared=self.shared,
            dealt=self.done,
            shared_to=self.shared_to,
        )


def settle(accounts: Sequence[Account], *, length: int, world_size: int, with_few: bool) -> Settlement:
    """Put together what the survivors of a World of `world_size` know of an epoch of so many samples. The
    newest epoch of any of them is gone on with.

    `with_few`: a rank shares with some others at a time, so that only one who waited for the lost knows how
    far they had come: who claims least. Else what any of them was given in an exchange of all is not lost.
    """
    epoch = max(account.epoch for account in accounts)
    present = [account for account in accounts if account.epoch == epoch]
    knows = (min if with_few else max)(accounts, key=lambda account: account.shared_to)
    shared = knows.shared if knows.epoch == epoch else []
    done = merge(span for spans in [shared, *(account.own for account in present)] for span in spans)
    dealt = merge(span for account in present for span in account.dealt)
    ends = [size(account.dealt) for account in accounts if account.epoch < epoch]
    if knows.shared_to[0] < epoch:
        ends += [knows.shared_to[1]] * (world_size - len(accounts))
    return Settlement(
        epoch=epoch,
        done=done,
        redealt=size(dealt) - size(done),
        # A rank's part of the rest of that epoch.
        left_behind=sum((length - end) // world_size for end in ends),
        shared=shared,
        shared_to=knows.shared_to,
    )


def carry_over(before: Account, now: Account) -> Account:
    """What a rank knows when a World has ended in which all have not exchanged anything: `now` of that World
    alone, `before` of those that it has settled since they did."""
    if before.epoch < now.epoch:
        return replace(now, shared=[], shared_to=before.shared_to)
    own = merge([*before.own, *now.own])
    return replace(now, own=own, shared=before.shared, shared_to=before.shared_to)


def merge(spans: Iterable[tuple[int, int]]) -> Spans:
    """The union of `spans`, which may overlap and come in any order."""
    found: Spans = []
    for first, end in sorted(span for span in spans if span[0] < span[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found


def size(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - first for first, end in spans)


def complement(spans: Spans, length: int) -> Spans:
    """What is left of [0, length)."""
    ends = [0, *(end for _, end in spans)]
    firsts = [*(first for first, _ in spans), length]
    return [(end, first) for end, first in zip(ends, firsts, strict=True) if end < first]


def translate(span: tuple[int, int], sequence: Sequence[tuple[int, int]]) -> Spans:
    """Places [first, end) along `sequence`, spans one after the other, as spans of what it consists of."""
    found, start = [], 0
    for first, end in sequence:
        low, high = max(span[0] - start, 0), min(span[1] - start, end - first)
        if low < high:
            found.append((first + low, first + high))
        start += end - first
    return found
