"""A worker of plain torch.distributed, the same for every launcher: one line of JSON per finished step.

A step is one all-reduce over Gloo, so a line says that the whole World took part. Lines go to `$STEP_LOG` in
one write each. `$STEP_LIMIT` ends the script after that many steps (default: it runs until it is stopped).
`$STEP_FAIL` names `rank:step:code`: that rank leaves with that exit code at that step.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

_PACE_S = 0.05


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = int(os.environ.get("STEP_LIMIT", sys.maxsize))
    fail_rank, fail_step, fail_code = map(int, os.environ.get("STEP_FAIL", "-1:0:0").split(":"))
    log = os.open(os.environ["STEP_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    dist.init_process_group("gloo")
    for step in range(limit):
        value = torch.ones(1)
        dist.all_reduce(value)
        assert int(value) == world_size
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "node": os.uname().nodename,
            "rank": rank,
            "world_size": world_size,
            "generation": int(os.environ.get("BAGUARUN_GENERATION", 0)),
            "restart_count": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "step": step,
        }
        os.write(log, json.dumps(line).encode() + b"\n")
        if (rank, step) == (fail_rank, fail_step):
            # Not sys.exit: the end of the interpreter aborts (SIGABRT) while Gloo threads run.
            os._exit(fail_code)
        time.sleep(_PACE_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
