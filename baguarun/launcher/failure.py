"""The report that every agent prints last: what failed first in the cluster, and where to look."""

from __future__ import annotations

from baguarun.contract import Failure


def format_report(failure: Failure, job_id: str) -> str:
    """Several lines, ending in a newline: who, how, when, the traceback, where the log lies, what to do."""
    raise NotImplementedError
