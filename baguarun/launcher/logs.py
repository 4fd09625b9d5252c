"""Where the workers' output goes: console with `[node:rank]` in front, per-rank files, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What the flags `--log-dir --redirects --tee --local-ranks-filter` ask for; use `from_flags`."""

    log_dir: str | None = None
    """Folder of the per-rank files, None for console only."""
    redirects: Mapping[int, int] = field(default_factory=dict)
    """Streams (1 stdout, 2 stderr, 3 both) kept off the console, by local rank; key -1 is every other rank."""
    tee: Mapping[int, int] = field(default_factory=dict)
    """Streams shown on the console all the same, by local rank; key -1 is every other rank."""
    local_ranks_filter: frozenset[int] | None = None
    """Local ranks shown on the console, None for all; files are not filtered."""
    prefix: bool = True
    """Put `[node:rank]` in front of each console line."""
    color: bool | None = None
    """Colour the prefix; None: only on a terminal."""

    @classmethod
    def from_flags(
        cls,
        *,
        log_dir: str | None = None,
        redirects: str = "0",
        tee: str = "0",
        local_ranks_filter: str = "",
        prefix: bool = True,
        color: bool | None = None,
    ) -> LogSettings:
        """Parse torchrun's spellings; raises UsageError. `-r`/`-t` without a folder use ./baguarun_logs."""
        raise NotImplementedError


class Logs:
    """All console and file output of one agent, over all generations. Threads: one of its own writes."""

    def __init__(self, settings: LogSettings, *, job_id: str, node: str) -> None:
        """Raises UsageError if the log folder cannot be written."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Print lines of the agent's own on stderr, never in the middle of a worker's line; does not block."""
        raise NotImplementedError

    async def close(self) -> None:
        """Return when everything has been written; waits as long as the console blocks."""
        raise NotImplementedError
