"""What is known of a worker's end: its traceback, and the report that every agent prints last."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass

from baguarun.contract import Failure

_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"
_CHAINS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_MAX_TRACEBACK_LINES = 200
_LAST_LINES = 10

_HINTS = {
    signal.SIGKILL: "The launcher did not send it: look for the out-of-memory killer in `dmesg` there.",
    signal.SIGSEGV: "A crash in native code; PYTHONFAULTHANDLER=1 shows where Python was.",
    signal.SIGBUS: "Often shared memory that ran out: look at the size of /dev/shm on that node.",
    signal.SIGABRT: "Native code gave up; its last words are above or in the log.",
    signal.SIGTERM: "Something outside this job sent it, as a scheduler does before it takes a node away.",
}


@dataclass(frozen=True)
class Cause:
    """Why a worker failed, as far as it said so."""

    message: str = ""
    """The exception's own line."""
    traceback: str = ""


def read_error_file(path: str) -> tuple[Cause, float] | None:
    """What `torch.distributed.elastic.multiprocessing.errors.record` wrote, and when (Unix time).

    None if there is no such file, or it is not what `@record` writes: then stderr has to do.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            content = json.load(file)
            written_s = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return Cause(message=message.strip()), written_s
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    callstack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    cause = Cause(message=str(message.get("message", "")).strip(), traceback=str(callstack).rstrip())
    return cause, written_s


def cause_from_output(stdout_tail: str, stderr_tail: str) -> Cause:
    """The last traceback in a worker's output, stderr first, else the last lines of its stderr."""
    for tail in (stderr_tail, stdout_tail):
        traceback = _last_traceback(tail.splitlines())
        if traceback:
            return Cause(message=_exception_line(traceback), traceback="\n".join(traceback))
    last = [line for line in stderr_tail.splitlines() if line.strip()][-_LAST_LINES:]
    return Cause(message=last[-1].strip() if last else "", traceback="\n".join(last))


def _last_traceback(lines: list[str]) -> list[str]:
    """From the first traceback of the last chain of exceptions on, torch's `[rank0]: ` taken off."""
    lines = [_RANK_PREFIX.sub("", line) for line in lines]
    starts = [
        number for number, line in enumerate(lines) if line.startswith(_FATAL) or line.strip() == _TRACEBACK
    ]
    if not starts:
        return []
    start = starts.pop()
    while starts and any(line.strip() in _CHAINS for line in lines[starts[-1] : start]):
        start = starts.pop()
    while lines and not lines[-1].strip():
        lines.pop()
    block = lines[start:]
    if len(block) > _MAX_TRACEBACK_LINES:
        half = _MAX_TRACEBACK_LINES // 2
        block = [*block[:half], f"... {len(block) - 2 * half} lines left out ...", *block[-half:]]
    return block


def _exception_line(traceback: list[str]) -> str:
    """`ValueError: …`, the first line after the frames of the last traceback."""
    if traceback[0].startswith(_FATAL):
        return traceback[0].strip()
    start = max(number for number, line in enumerate(traceback) if line.strip() == _TRACEBACK)
    return next((line for line in traceback[start + 1 :] if line and not line[0].isspace()), "").strip()


def format_report(failure: Failure, job_id: str, outcome: str = "") -> str:
    """Several lines, ending in a newline: who, how, when, the traceback, where the log lies, what to do.

    `outcome` is what the job made of it, as `after 1 of 1 restarts`.
    """
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(failure.timestamp_s))
    millis = int(failure.timestamp_s % 1 * 1000)
    failed = f"failed {outcome}" if outcome else "failed"
    lines = [f"baguarun: job {job_id} {failed}. The first failure in the cluster:", ""]
    lines.append(f"  {failure.summary()}")
    lines.append(f"  time:  {when}.{millis:03d} UTC")
    if failure.message:
        lines.append(f"  error: {failure.message.splitlines()[0]}")
    if failure.log_path:
        lines.append(f"  log:   {failure.log_path} on node {failure.node}")
    if failure.signal in _HINTS:
        lines.append(f"  hint:  {_HINTS[signal.Signals(failure.signal)]}")
    if failure.traceback.strip() not in ("", failure.message.strip()):
        lines.append("")
        lines += [f"    {line}".rstrip() for line in failure.traceback.splitlines()]
    elif failure.signal is None and not failure.message:
        lines.append("  It left no traceback and wrote nothing to stderr.")
    return "\n".join(lines) + "\n"
