"""`baguarun run`: reads the command line, checks it, and hands it to the agent."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from baguarun.cli.console import show
from baguarun.errors import UsageError
from baguarun.launcher import bagua_net, timeline
from baguarun.launcher.command import check_command
from baguarun.launcher.options import GROUPS, Option, listed
from baguarun.launcher.rendezvous import Static, choose_rendezvous, no_effect_notices
from baguarun.launcher.settings import RunRequest, read_settings, with_sources

_USAGE = "usage: baguarun run [options] SCRIPT [its arguments]"
_EPILOG = """\
Every option may come from the environment: BAGUARUN_MAX_RESTARTS=3, or torchrun's PET_MAX_RESTARTS.

  baguarun run --nproc-per-node 2 train.py --lr 0.1
  baguarun run --nnodes 2:4 --store etcd://10.0.0.1:2379 --job-id demo --nproc-per-node gpu train.py"""
_HELP_COLUMN = 34


def main(argv: Sequence[str]) -> int:
    """Run a job on this node until it ends; returns the exit code. Bad input ends before anything starts."""
    request = read_settings(argv)
    if request is None:
        show(help_text())
        return 0
    for notice in check(request):
        print(f"baguarun: {notice}", file=sys.stderr)
    from baguarun.launcher.run import run_job

    return run_job(request.settings)


def check(request: RunRequest) -> list[str]:
    """Raise `UsageError` for what the settings alone do not show; returns the notices to print."""
    settings = request.settings
    try:
        rendezvous = choose_rendezvous(settings)
        check_command(settings)
        timeline.check(settings)
        net_notices = bagua_net.check(settings, without_store=isinstance(rendezvous, Static))
    except UsageError as error:
        raise UsageError(with_sources(str(error), request.given)) from error
    return [*request.notices, *no_effect_notices(settings, rendezvous, request.given), *net_notices]


def help_text() -> str:
    """What `baguarun run --help` prints."""
    lines = [_USAGE]
    for group in GROUPS:
        lines += ["", f"{group}:"]
        for option in listed(group):
            lines += _help_lines(option)
    return "\n".join([*lines, "", _EPILOG])


def _help_lines(option: Option) -> list[str]:
    names = f"  -{option.short}, {option.flag}" if option.short else f"  {option.flag}"
    head = f"{names} {option.metavar}".rstrip()
    text = f"no effect: {option.no_effect}" if option.no_effect else option.help
    if option.alias:
        text += f" [--{option.alias}]"
    if len(head) >= _HELP_COLUMN:
        return [head, " " * _HELP_COLUMN + text]
    return [head.ljust(_HELP_COLUMN) + text]
