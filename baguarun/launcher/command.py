"""The words that start one worker, and whether they can start at all."""

from __future__ import annotations

import os

from baguarun.errors import UsageError
from baguarun.launcher.settings import CommandKind, RunSettings


def worker_argv(settings: RunSettings) -> list[str]:
    """What to execute, word by word: no shell takes part, so nothing needs quoting."""
    if settings.command_kind is CommandKind.PROGRAM:
        return [settings.script, *settings.script_args]
    flag = ["-m"] if settings.command_kind is CommandKind.MODULE else []
    # Unbuffered, so that a line is seen when it is printed and none is lost when a worker is killed.
    return [settings.python, "-u", *flag, settings.script, *settings.script_args]


def check_command(settings: RunSettings) -> None:
    """Raise `UsageError` when the script, module or program is not there or cannot be read or executed."""
    if settings.command_kind is CommandKind.PROGRAM:
        _check_program(settings)
    elif settings.command_kind is CommandKind.MODULE:
        _check_module(settings)
    else:
        _check_script(settings.script)


def _check_script(script: str) -> None:
    if not os.path.exists(script):
        raise UsageError(f"{script}: no such script in {os.getcwd()}; want the path of a Python file")
    if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
        raise UsageError(f"{script}: found a directory without __main__.py; want the path of a Python file")
    if not os.access(script, os.R_OK):
        raise UsageError(f"{script}: not readable by this user; want a script that it may read (chmod +r)")


def _check_module(settings: RunSettings) -> None:
    """Look for the outermost package only: what is inside it cannot be known without running it."""
    import importlib.machinery
    import importlib.util
    import sys

    name = settings.script
    if not all(part.isidentifier() for part in name.split(".")):
        hint = "; leave out -m to run a file" if name.endswith(".py") or "/" in name else ""
        raise UsageError(f"-m {name}: want a module name, as package.train{hint}")
    if settings.python != sys.executable:
        # Another interpreter has other modules; it will say itself what it misses.
        return
    top = name.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top):
        return
    raise UsageError(f"-m {name}: no module named {top} in {os.getcwd()} or installed for {settings.python}")


def _check_program(settings: RunSettings) -> None:
    program = settings.script
    if os.sep in program:
        candidates = [program]
    else:
        folders = settings.environ.get("PATH", os.defpath).split(os.pathsep)
        candidates = [os.path.join(folder or ".", program) for folder in folders]
    files = [path for path in candidates if os.path.isfile(path)]
    if any(os.access(path, os.X_OK) for path in files):
        return
    if files:
        raise UsageError(f"--no-python {files[0]}: not executable; want chmod +x, or leave out --no-python")
    if os.path.isdir(program):
        raise UsageError(f"--no-python {program}: found a directory; want a program")
    if os.sep in program:
        raise UsageError(f"--no-python {program}: no such program; want its path")
    hint = f"./{program}, the file here" if os.path.isfile(program) else "its path"
    raise UsageError(f"--no-python {program}: no such program on PATH; want {hint}")
