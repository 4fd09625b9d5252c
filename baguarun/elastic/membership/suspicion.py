"""What the leader makes of complaints: pure functions from who blames whom to who must go.

Two witnesses. *Probes*: an agent no longer hears a neighbour; the leader then asks the suspect itself, over
the network and through the store, and one answer on either way acquits it. *Workers*: the transport between
two nodes broke though both may be well; the first time everybody meets again, the second time one end goes,
and at once who is silent to several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from baguarun.elastic.membership.records import BrokenLink, Witness

FORGIVEN_AFTER_S = 600.0
"""A link that broke longer ago than this has earned another first time."""
HELD_OFF_S = 60.0
"""So long a node stays out that was left out because of a link that broke before."""
FIRST_HELD_OFF_S = 10.0
"""The same where its silence was enough: a worker that had only been frozen is replaced by then."""

Link: TypeAlias = tuple[str, str]
"""Node ids of both ends, sorted."""


@dataclass(frozen=True)
class Complaint:
    """One node's suspicion, as the leader read it."""

    node_id: str
    """Who complains."""
    blamed: tuple[str, ...]
    by: Witness
    reason: str
    seen_s: float
    """By the leader's clock."""
    silence: bool = False
    """A worker's: it heard nothing from whom it blames, for half of the detection time."""


@dataclass(frozen=True)
class Examination:
    """What to do about those whom probes accuse."""

    ask: frozenset[str] = frozenset()
    acquit: frozenset[str] = frozenset()
    expel: frozenset[str] = frozenset()


def examine(
    accused: Set[str], me: str, asked: Mapping[str, float], alive: Set[str], awake_s: float, confirm_s: float
) -> Examination:
    """`asked`: when each question went out, by the same clock as `awake_s`; `alive`: who has answered it.

    The clock counts only time in which this leader could have heard an answer. It acquits itself.
    """
    acquit = {node_id for node_id in accused if node_id == me or node_id in alive}
    expel = {
        node_id for node_id in accused - acquit if node_id in asked and awake_s - asked[node_id] >= confirm_s
    }
    ask = accused - acquit - expel - asked.keys()
    return Examination(frozenset(ask), frozenset(acquit), frozenset(expel))


@dataclass(frozen=True)
class Blame:
    """What a broken link, or several, mean for the next World."""

    leave_out: frozenset[str]
    broken: tuple[BrokenLink, ...]
    """What the next World's leader has to remember."""
    what: str
    """What happened, in words."""

    @property
    def reason(self) -> str:
        """For people, who goes included."""
        out = ", ".join(sorted(self.leave_out))
        return f"{self.what}; going on without {out}" if out else f"{self.what}; all nodes meet again"


def blame(
    complaints: Iterable[Complaint],
    members: Sequence[str],
    broken: Iterable[BrokenLink] = (),
    silent: Set[str] = frozenset(),
    time_s: float = 0.0,
) -> Blame:
    """Who is to be left out, if anybody. `broken`: links that broke before; `time_s`: Unix time, now.

    A link breaks for both of its ends, whoever complains first; a complaint that blames nobody is about no
    link. Where a link broke before, or one end does not answer its neighbours' probes either (`silent`), or
    is the only one whose silence several complain of, the end with more complaints against it goes; if both
    have as many the silent one, else the later one in rank order (the first has the master).
    """
    place = {node_id: index for index, node_id in enumerate(members)}
    against: Counter[str] = Counter()
    mute: Counter[str] = Counter()
    links: set[Link] = set()
    for complaint in complaints:
        for other in set(complaint.blamed) - {complaint.node_id}:
            if complaint.node_id in place and other in place:
                against[other] += 1
                mute[other] += complaint.silence
                links.add(_link(complaint.node_id, other))
    before = {_link(old.first, old.second): old for old in _unforgiven(broken, time_s)}
    again = {link for link in links if link in before or silent & set(link)}
    first = {link for link in links - again if _mute_to_several(mute) & set(link)}
    out: set[str] = set()
    # The worst first: its end may be an end of all the others, too.
    for link in sorted(again | first, key=lambda link: (-max(against[end] for end in link), link)):
        if not out & set(link):
            out.add(max(link, key=lambda end: (against[end], end in silent, place[end])))
    held_off_s = {link: FIRST_HELD_OFF_S if link in first else HELD_OFF_S for link in links}
    now = {link: BrokenLink(*link, time_s, held_off_s[link]) for link in links}
    remembered = tuple(found for _, found in sorted({**before, **now}.items()))
    return Blame(frozenset(out), remembered, _what(links))


def held_off(
    newcomers: Iterable[str], members: Iterable[str], broken: Iterable[BrokenLink], time_s: float
) -> frozenset[str]:
    """The newcomers that a member lost its connection to a short while ago: they would break it again."""
    here = set(members)
    links = [{old.first, old.second} for old in broken if time_s - old.time_s < old.held_off_s]
    return frozenset(
        node_id for node_id in newcomers if any(node_id in link and link & here - {node_id} for link in links)
    )


def _mute_to_several(complaints: Counter[str]) -> frozenset[str]:
    """The node that two others or more do not hear, unless another one is in the same case."""
    several = frozenset(node_id for node_id, count in complaints.items() if count > 1)
    return several if len(several) == 1 else frozenset()


def _link(one: str, other: str) -> Link:
    return (one, other) if one < other else (other, one)


def _unforgiven(broken: Iterable[BrokenLink], time_s: float) -> list[BrokenLink]:
    return [link for link in broken if time_s - link.time_s < FORGIVEN_AFTER_S]


def _what(links: Set[Link]) -> str:
    if not links:
        return "communication broke and nobody is to blame"
    named = ", ".join(f"{first} and {second}" for first, second in sorted(links))
    return f"the connection between {named} broke"
