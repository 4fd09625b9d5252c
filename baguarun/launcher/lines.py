"""Cuts a worker's output into whole, prefixed lines for a console that several workers share; pure."""

from __future__ import annotations

MAX_LINE_BYTES = 64 * 1024
"""A longer line is shown in pieces, each on a line of its own."""

PROGRESS_INTERVAL_S = 1.0
"""How often a progress bar (text redrawn with a carriage return) is shown."""

PARTIAL_LINE_S = 3.0
"""An unfinished line is shown after this time, so that the last words before a hang are seen."""


class ConsoleLines:
    """One stream's way to the console; every call returns whole lines, ready to be written.

    A progress bar is shown as a line now and then, in its latest state; the files have every byte.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._pending = b""
        self._pending_since_s = 0.0
        self._continues = False

    def feed(self, data: bytes, now_s: float) -> bytes:
        """The lines that `data` completes. `now_s` is any steady clock."""
        if not self._pending:
            self._pending_since_s = now_s
        end = data.rfind(b"\n")
        if end < 0:
            complete, self._pending = b"", self._pending + data
        else:
            complete, self._pending = self._pending + data[:end], data[end + 1 :]
            self._pending_since_s = now_s
        shown = self._whole_lines(complete) if end >= 0 else b""
        return shown + self._cut_long_line()

    def overdue(self, now_s: float) -> bytes:
        """The unfinished line, if it has waited long enough; call it when what was there has been read."""
        interval_s = PROGRESS_INTERVAL_S if b"\r" in self._pending else PARTIAL_LINE_S
        if not self._pending or now_s < self._pending_since_s + interval_s:
            return b""
        return self._show_pending()

    def finish(self) -> bytes:
        """The rest, when the stream has ended."""
        return self._show_pending() if self._pending else b""

    @property
    def waiting(self) -> bool:
        """Whether an unfinished line is held back."""
        return bool(self._pending)

    def _show_pending(self) -> bytes:
        text = _last_state(self._pending)
        self._pending = b""
        self._continues = True
        return self._prefix + text + b"\n" if text else b""

    def _whole_lines(self, block: bytes) -> bytes:
        """`block` is one or more lines without the last newline."""
        continues, self._continues = self._continues, False
        if b"\r" in block:
            block = b"\n".join(map(_last_state, block.split(b"\n")))
        if continues and (not block or block.startswith(b"\n")):
            # The line's text was shown when it was overdue; what came now is only its newline.
            if not block:
                return b""
            block = block[1:]
        return self._prefix + block.replace(b"\n", b"\n" + self._prefix) + b"\n"

    def _cut_long_line(self) -> bytes:
        if len(self._pending) <= MAX_LINE_BYTES:
            return b""
        shown = b""
        if b"\r" in self._pending:
            self._pending = _last_state(self._pending)
        while len(self._pending) > MAX_LINE_BYTES:
            cut = _character_border(self._pending, MAX_LINE_BYTES)
            shown += self._prefix + self._pending[:cut] + b"\n"
            self._pending = self._pending[cut:]
            self._continues = True
        return shown


def _last_state(line: bytes) -> bytes:
    """What a terminal shows of a line that was redrawn: the text after its last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _character_border(data: bytes, limit: int) -> int:
    """The last place at or before `limit` that does not split a UTF-8 character (any, if it is no UTF-8)."""
    for cut in range(limit, limit - 4, -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return limit
