"""Temporary folders that are removed in the end, by the next process if their owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from baguarun.errors import SetupError

_LOCK = "owner.lock"


class ScratchFolder:
    """A temporary folder, this process's as long as it lives. Threads: any."""

    def __init__(self, prefix: str) -> None:
        """Make one, and remove those of `prefix` whose owners were killed. Raises `SetupError`."""
        try:
            _sweep(prefix)
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock_fd = _own(self.path)
        except OSError as error:
            raise SetupError(
                f"cannot make a temporary folder: {error.strerror or error}; make room, or set TMPDIR to a "
                "folder that can be written"
            ) from error

    def remove(self) -> None:
        """Remove it with all that is in it; calling again does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def living_folders(prefix: str) -> list[Path]:
    """This user's folders of `prefix` whose owners live, in no order."""
    return [
        folder
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*")
        if _is_mine(folder) and _is_owned(folder)
    ]


def _is_mine(folder: Path) -> bool:
    """Anybody may make a folder of that name in a temporary folder that all share."""
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _is_owned(folder: Path) -> bool:
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared: two processes that look at once do not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _own(folder: Path) -> int:
    """Mark the folder as in use; the kernel takes the mark away when the process ends."""
    fd = os.open(folder / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
    return fd


def _sweep(prefix: str) -> None:
    """Remove this user's folders whose locks are free; one that has no lock yet is being made."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
