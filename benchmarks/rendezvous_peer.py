"""One process full of torchrun rendezvous handlers: c10d backend, a thread and a store client each."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

_CAP_S = 240.0


@dataclass(frozen=True)
class PeerCrowd:
    """The handlers of one process."""

    port: int
    job_id: str
    num_agents: int
    """Of the whole job."""
    numbers: range
    """Of those, the ones in this process; number 0 hosts the TCPStore, as torchrun's first agent does."""


@dataclass(frozen=True)
class PeerPhase:
    """When the last handler of this process had its rank, or why one has none."""

    last_start: float
    error: str = ""


def live(pipe: Connection, crowd: PeerCrowd) -> None:
    """Target of the process: says `ready`, waits for `go`, forms, ends."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    errors: list[str] = []
    # Kept to the end: number 0's is the server of all.
    stores: list[TCPStore] = []
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"127.0.0.1:{crowd.port}",
        run_id=crowd.job_id,
        min_nodes=crowd.num_agents,
        max_nodes=crowd.num_agents,
        join_timeout=_CAP_S,
    )

    def join(number: int) -> None:
        try:
            store = TCPStore(
                "127.0.0.1", crowd.port, is_master=number == 0, timeout=timedelta(seconds=_CAP_S)
            )
            stores.append(store)
            backend = C10dRendezvousBackend(store, crowd.job_id)
            handler = create_handler(store, backend, parameters)
            handler.next_rendezvous()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    pipe.send("ready")
    pipe.recv()
    threads = [threading.Thread(target=join, args=(number,), daemon=True) for number in crowd.numbers]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + _CAP_S
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        errors.append(f"not formed within {_CAP_S:g} s")
    pipe.send(PeerPhase(time.monotonic(), errors[0] if errors else ""))
    # The store's host must outlive the others.
    pipe.recv()
    os._exit(0)
