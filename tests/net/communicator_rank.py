"""One rank as a program, for hosts that are network namespaces.

    python -m tests.net.communicator_rank FOLDER RANK SIZE TASK BYTES ROUNDS DEADLINE_S

Tasks: `reduce` all-reduces fp32 and prints the seconds of the best round, `rest` too, with four
seconds before and after the last one; `cycle` does so until it fails, and prints fault and message.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from tests.net.communicator_peer import Member
from tests.net.shm_peer import Failed


def main() -> None:
    folder, rank, size, task, count_bytes, rounds, deadline_s = sys.argv[1:]
    options = {"nonce": "namespaces", "deadline_s": float(deadline_s)}
    member = Member(Path(folder), int(rank), int(size), **options)  # type: ignore[arg-type]
    places = (np.arange(int(count_bytes) // 4) % 1009).astype(np.float32)
    data = np.empty_like(places)
    best = float("inf")
    print("ready", flush=True)
    try:
        for left in reversed(range(int(rounds))):
            data[:] = places + int(rank)
            member.barrier()
            begun = time.monotonic()
            member.all_reduce(data)
            best = min(best, time.monotonic() - begun)
            assert np.all(data == int(size) * places + int(size) * (int(size) - 1) / 2)
            if task == "cycle":
                time.sleep(0.05)
            if task == "rest" and left < 2:
                time.sleep(4)
    except Failed as failed:
        print(failed.fault, failed.message, flush=True)
        return
    print(best, member.library.baguaBytesSent(member.handle), flush=True)
    member.close()


main()
