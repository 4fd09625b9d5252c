"""`baguarun scale JOB N`: how many nodes a running job shall have from now on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from baguarun.cli.console import show
from baguarun.cli.job_line import JobLine, store_options
from baguarun.elastic.membership.control import scale_job
from baguarun.elastic.membership.report import JobReport
from baguarun.launcher.command_line import is_digits
from baguarun.launcher.reach import ask_about

_EPILOG = """\
N must lie in the range of the job's --nnodes MIN:MAX. Above N the youngest nodes stop their workers as on
SIGTERM, leave and exit with 0. Below N, nodes that stand by come in, and so does every agent that is started
later; nothing waits for them."""


def main(argv: Sequence[str]) -> int:
    """Write the wish down and return at once; the job's leader acts on it."""
    line = JobLine("scale", "Say how many nodes a running job shall have.", epilog=_EPILOG)
    line.add_argument("num_nodes", metavar="N", help="nodes from now on")
    words = line.parse_args(argv)
    if not is_digits(words.num_nodes):
        line.error(f"N={words.num_nodes}: want a number of nodes")
    wanted = int(words.num_nodes)
    scale = partial(scale_job, job_id=words.job, num_nodes=wanted)
    show(answer(ask_about(words.job, store_options(words), scale), wanted))
    return 0


def answer(before: JobReport, wanted: int) -> str:
    """What to expect of it."""
    here = before.summary.num_registered
    head = f"job {before.summary.spec.job_id}: scaled to {wanted}, nodes here {here}"
    members = before.summary.world.num_nodes if before.summary.world is not None else 0
    if members > wanted:
        return f"{head}; the youngest leave"
    if here < wanted:
        return f"{head}; it takes in more as they come"
    return head
