"""One tree of errors, each class named by what its catcher should do.

    BaguarunError
    ├── UsageError            show the message; only the user can mend it        (exit 2)
    │   ├── ArgumentError     an argument of a call cannot be meant; a ValueError, too
    │   └── StoreRefusedError the store answered and said no: version, login, certificate
    ├── SetupError            show the message; this machine lacks something     (exit 3)
    ├── RetryLaterError       nothing is wrong that time does not mend
    │   └── StoreLostError    the store cannot be reached at the moment
    ├── RejoinError           our place in the job is gone: register again
    ├── JobFailedError        the job is over; leave with `exit_code`
    └── CommunicationError    worker side: a collective failed; bucket, operation and peer are named

A message says where, what was found, what is wanted and what to do.
"""

from __future__ import annotations

NO_PROGRESS_EXIT_CODE = 93
"""Of a job resized in place whose workers, or the communication between them, failed again and again without
a committed step in between."""


class BaguarunError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: int = 1


class UsageError(BaguarunError):
    """The command line, the environment or the script asks for something impossible."""

    exit_code = 2


class ArgumentError(UsageError, ValueError):
    """An argument that cannot be meant; a `ValueError` too, which scripts for torch or Bagua may catch."""


class StoreRefusedError(UsageError):
    """The store is there but will not serve us: wrong version, login or certificate."""


class SetupError(BaguarunError):
    """This machine lacks a part (torch, a compiler, the extension, etcd); the message says how to get it."""

    exit_code = 3


class RetryLaterError(BaguarunError):
    """A passing fault: the same call may succeed later."""


class StoreLostError(RetryLaterError):
    """No endpoint of the store answers at the moment."""


class RejoinError(BaguarunError):
    """Our lease or our World is gone; what was ours must be registered again."""


class JobFailedError(BaguarunError):
    """The job is over and did not succeed."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CommunicationError(BaguarunError):
    """A collective failed on this worker; the message names bucket, operation and peer."""
