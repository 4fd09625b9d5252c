"""Rounds of faults on a group of baguanet: a rank is killed, frozen or cut off in the middle of a collective.

    python -m tests.faults --rounds 200 --json faults.json

In every round all others must get an error that names who was lost, in time, and then all form a new group:
the others in the same process with a fresh store prefix, a lost rank too if it came back, else a new process.

`plan.py` draws the rounds, `rank.py` is a rank, `world.py` holds the ranks and plays a round on them,
`report.py` counts.
"""

from __future__ import annotations
