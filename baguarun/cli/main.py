"""The `baguarun` command: picks the subcommand, turns errors into one message and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from baguarun import __version__
from baguarun.cli.console import show
from baguarun.errors import BaguarunError, UsageError

COMMANDS = {
    "run": "start a training script on one node or on several",
    "jobs": "list the jobs that a store knows",
    "status": "show what a job does, on which nodes, and what has happened to it",
    "scale": "say how many nodes a running job shall have",
    "stop": "end a job on every node",
}

_HELP = """\
usage: baguarun COMMAND ...

{commands}

  baguarun COMMAND --help    the options of a command
  baguarun --version         the version"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line given (`sys.argv` by default); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except BaguarunError as error:
        print(f"baguarun: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("baguarun: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        show(_HELP.format(commands="\n".join(f"  {name:<8} {what}" for name, what in COMMANDS.items())))
        return 0 if words else UsageError.exit_code
    if words[0] == "--version":
        show(f"baguarun {__version__}")
        return 0
    if words[0] in COMMANDS:
        # Each command loads what it needs and no more.
        command: Callable[[Sequence[str]], int] = import_module(f"baguarun.cli.{words[0]}").main
        return command(words[1:])
    raise UsageError(_unknown(words))


def _refusal(words: Sequence[str]) -> str:
    """What `run` says to an option in them that it does not have; Bagua's command has no subcommands."""
    from baguarun.launcher.command_line import read_command_line
    from baguarun.launcher.options import OPTIONS

    try:
        given = read_command_line(words).given
    except UsageError:
        return ""
    return next(
        (f"{each.flag}: {each.refusal}" for each in OPTIONS if each.refusal and each.name in given), ""
    )


def _unknown(words: Sequence[str]) -> str:
    from baguarun.launcher.command_line import nearest

    first = words[0]
    if first.startswith("-") and (refusal := _refusal(words)):
        return refusal
    if first.startswith("-") or "." in first or "/" in first:
        import shlex

        return f"{first}: want a command first; to start a script: baguarun run {shlex.join(words)}"
    return f"{first}: unknown command; want {', '.join(COMMANDS)}{nearest(first, list(COMMANDS))}"
