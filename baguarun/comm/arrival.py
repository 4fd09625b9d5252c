"""Whether what an accelerator was told to wait for has come, where a World may be given up meanwhile."""

from __future__ import annotations

import torch

from baguarun.comm.extension import load_extension
from baguarun.comm.groups import read_worker_env
from baguarun.errors import CommunicationError


def require_arrived(device: torch.device) -> None:
    """After the waits for an exchange and before its results go into weights. Raises `CommunicationError`.

    On a CPU they have come. An accelerator's stream waits for them, and goes on with whatever lies there when
    the exchange is aborted: so the host waits for the stream, and asks whether that has happened. Where there
    is no agent that could give the World up, nobody waits.
    """
    if device.type == "cpu" or read_worker_env().control_fd is None:
        return
    torch.cuda.current_stream(device).synchronize()
    if (reason := load_extension().interruption()) is not None:
        raise CommunicationError(f"the World is given up: {reason}")
