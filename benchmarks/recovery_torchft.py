"""The load of `tests/lab/elastic_worker.py` under torchft, for `benchmarks/recovery.py`.

Each process is a replica. torchft is no dependency: `pip install --target FOLDER --no-deps torchft-nightly`,
the opentelemetry packages that it asks for beside it, `python -m benchmarks.recovery --torchft FOLDER`.
There is no loader: its samples have no place to go on from, and those of a failed step are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tests.lab.elastic_worker import Blobs, network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="torchft's own default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    log = os.open(os.environ["STEP_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    model = network(args.width)
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=args.timeout_s)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=args.timeout_s),
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    data = Blobs(3200)
    batches = [
        [data[index] for index in range(at, at + args.batch_size)] for at in range(0, 320, args.batch_size)
    ]
    while True:
        batch = batches[manager.current_step() % len(batches)]
        optimizer.zero_grad()
        points = torch.stack([point for _, point, _ in batch])
        loss = cross_entropy(wrapped(points), torch.tensor([label for _, _, label in batch]))
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() == before:
            continue
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "node": os.uname().nodename,
            "rank": manager.participating_rank() or 0,
            "world_size": manager.num_participants(),
            "generation": 0,
            "restart_count": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            "step": manager.current_step(),
            "loss": loss.item(),
        }
        os.write(log, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
