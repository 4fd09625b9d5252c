"""Reads a command line and an environment by the table of options.

A reader of our own, because the rules differ from argparse's where it matters: options end at the script
(argparse takes a `--` out of the script's arguments), every value knows where it came from (flag or
variable), and both spellings `--max-restarts` and `--max_restarts` are one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baguarun.errors import UsageError
from baguarun.launcher.options import OPTIONS, Option


@dataclass(frozen=True)
class Given:
    """A value as the user gave it, and where: `--nnodes`, `BAGUARUN_NNODES` or `PET_NNODES`."""

    text: str
    source: str

    def integer(self) -> int:
        if not is_digits(self.text.removeprefix("-")):
            raise UsageError(f"{self.source}={self.text}: want a whole number")
        return int(self.text)

    def seconds(self) -> float:
        try:
            return float(self.text)
        except ValueError:
            raise UsageError(f"{self.source}={self.text}: want a number of seconds") from None

    def choice(self, kind: type[enum.Enum]) -> enum.Enum:
        try:
            return kind(self.text)
        except ValueError:
            words = ", ".join(str(member.value) for member in kind)
            raise UsageError(f"{self.source}={self.text}: want one of {words}") from None


@dataclass(frozen=True)
class CommandLine:
    """A command line taken apart: options by name, then the script and what belongs to it."""

    given: Mapping[str, Given] = field(default_factory=dict)
    script: str | None = None
    script_args: tuple[str, ...] = ()
    help_wanted: bool = False


_BY_NAME = {name: option for option in OPTIONS for name in (option.name, option.alias) if name}
_BY_SHORT = {option.short: option for option in OPTIONS if option.short}


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Take apart what follows `baguarun run`. Options end at the first word that is none, or after `--`."""
    given: dict[str, Given] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        if word in ("-h", "--help"):
            return CommandLine(help_wanted=True)
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        option, text = _split(word)
        position += 1
        if option.is_switch:
            if text is not None:
                raise UsageError(f"{word}: want {option.flag} without a value")
            text = "1"
        elif text is None:
            following = argv[position] if position < len(argv) else None
            if following is None or _looks_like_option(following):
                raise UsageError(f"{word}: want a value after it: {option.flag} {option.metavar}")
            text = following
            position += 1
        given[option.name] = Given(text, option.flag)
    rest = tuple(argv[position:])
    return CommandLine(given, rest[0] if rest else None, rest[1:])


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Options set by variables; an empty variable counts as unset, a switch is set by 1/true/yes/on."""
    given: dict[str, Given] = {}
    for option in OPTIONS:
        for variable in option.variables:
            text = environ.get(variable, "")
            if text:
                if not option.is_switch or _truth(variable, text):
                    given[option.name] = Given(text, variable)
                break
    return given


def is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing when no known word is near."""
    from difflib import get_close_matches

    found = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _split(word: str) -> tuple[Option, str | None]:
    if word.startswith("--"):
        name, equals, text = word[2:].partition("=")
        option = _BY_NAME.get(name.replace("_", "-"))
        if option is not None:
            return option, text if equals else None
    else:
        option = _BY_SHORT.get(word[1:2])
        if option is not None and (len(word) == 2 or not option.is_switch):
            return option, word[2:].removeprefix("=") or None
    name = word.partition("=")[0]
    hint = nearest(name.replace("_", "-"), [f"--{known}" for known in _BY_NAME])
    raise UsageError(
        f"{name}: unknown flag{hint or '; baguarun run --help lists them'}\n"
        "(flags of the script itself come after its name)"
    )


def _looks_like_option(word: str) -> bool:
    name = word[2:].partition("=")[0].replace("_", "-")
    if word.startswith("--"):
        return name in _BY_NAME
    return len(word) == 2 and word[0] == "-" and word[1] in _BY_SHORT


def _truth(source: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{source}={text}: want 1 or 0")
