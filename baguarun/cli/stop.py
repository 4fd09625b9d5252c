"""`baguarun stop JOB`: end a job on every node."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from functools import partial

from baguarun.cli.console import show
from baguarun.cli.job_line import JobLine, store_options
from baguarun.elastic.membership.control import stop_job
from baguarun.elastic.membership.records import StopRequest
from baguarun.launcher.reach import StoreGoneError, ask_about

_EPILOG = """\
Workers get SIGTERM, and --shutdown-timeout seconds of `baguarun run` to save their work. Every agent then
exits with 143 (137 with --now), as after SIGTERM or SIGKILL: the job has not done what it was started for."""


def main(argv: Sequence[str]) -> int:
    """End it; returns when every node has been told. A job that has ended already is no error."""
    line = JobLine("stop", "End a job on every node.", epilog=_EPILOG)
    line.add_argument(
        "--now", action="store_true", help="kill the workers, give them no time to save their work"
    )
    words = line.parse_args(argv)
    signum = signal.SIGKILL if words.now else signal.SIGTERM
    request = StopRequest(
        reason=f"by `baguarun stop{' --now' if words.now else ''}` on {socket.gethostname()}",
        exit_code=128 + signum,
        at_once=words.now,
    )
    stop = partial(stop_job, job_id=words.job, request=request)
    try:
        outcome = ask_about(words.job, store_options(words), stop)
    except StoreGoneError:
        show(f"job {words.job}: it has ended, and its private store with it")
        return 0
    how = "stopped" if outcome.stopped else "it had succeeded" if outcome.success else "it had failed"
    show(f"job {words.job}: {how}: {outcome.reason}")
    return 0
