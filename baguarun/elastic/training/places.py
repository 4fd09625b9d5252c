"""Whose a kept place in the data is, when a loader is used for the first time."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from baguarun.elastic.training.sampler import ElasticSampler


def index_of(sampler: ElasticSampler, places: Sequence[Mapping[str, Any]], claimed: Collection[int]) -> int:
    """Of the place that is the sampler's: the first unclaimed one of its name, data and settings; else a new
    one, behind all.

    Warns if it is the first of several that are not the same: loaders come in the order in which they were
    first used, unless the script has gone on to a later one. If there is none, and the next one of that order
    was kept with other settings, that is returned all the same, for `load_state_dict` to say what differs; of
    one that the script has gone past nobody can tell, and a warning is all.
    """
    free = [index for index in range(len(places)) if index not in claimed]
    fitting = [index for index in free if sampler.fits(places[index])]
    of_its_name = [index for index in fitting if sampler.name and places[index].get("name") == sampler.name]
    found = of_its_name or fitting
    if found:
        if any(_stand(places[index]) != _stand(places[found[0]]) for index in found):
            warnings.warn(
                f"State.steps: {len(found)} loaders of the same data and settings were kept, and stand in "
                "different places; this one is taken for the one that was used first. Unless they are always "
                "used in the same order, want ElasticSampler(..., name=...), another name for each",
                stacklevel=4,
            )
        return found[0]
    last = max(claimed, default=-1)
    for index in free:
        if index > last and (not sampler.name or places[index].get("name", "") in ("", sampler.name)):
            return index
    amid = [index for index in free if places[index]["cursor"] or places[index].get("left")]
    if amid and not sampler.name:
        warnings.warn(
            f"State.steps: {len(amid)} loaders that were used before stand amid an epoch, none of this data "
            "and these settings; the loader begins anew. If it is one of them, samples are repeated or lost",
            stacklevel=4,
        )
    return next(index for index in itertools.count(len(places)) if index not in claimed)


def _stand(place: Mapping[str, Any]) -> tuple[Any, ...]:
    return place["epoch"], place["cursor"], place.get("left", [])
