"""Printing what was asked for."""

from __future__ import annotations

import os
import sys


def show(text: str) -> None:
    """Print `text`; a reader that has seen enough (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
