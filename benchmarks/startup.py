"""Start to finish of a two-worker job that does nothing: `baguarun run` against `torchrun --standalone`."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.harness import Report, Row, finish, interleave, parser
from benchmarks.ratios import Summary, paired_ratio
from tests.lab.job import baguarun_command, torchrun_command

_TARGET_RATIO = 0.4
_JOB = ("--nproc-per-node", "2", "--no-python", "/bin/true")
_CAP_S = 60.0


def commands() -> dict[str, list[str]]:
    """Both command lines, as a user of this Python types them."""
    return {
        "torchrun": [*torchrun_command(), "--standalone", *_JOB],
        "baguarun": [*baguarun_command(), "run", *_JOB],
    }


def run_once(argv: list[str]) -> float:
    """Seconds from start to exit; raises when the job fails."""
    started = time.perf_counter()
    subprocess.run(argv, check=True, timeout=_CAP_S, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - started


def main(argv: list[str] | None = None) -> int:
    options = parser("startup", __doc__ or "").parse_args(argv)
    report = Report(
        name="startup", title="start to finish: --nproc-per-node 2 --no-python /bin/true", quick=options.quick
    )
    cases = {name: lambda line=line: run_once(line) for name, line in commands().items()}
    # Once unmeasured: files come into the page cache.
    interleave(cases, 1)
    seconds = interleave(cases, 2 if options.quick else 10)
    report.raw["seconds"] = seconds
    ours, theirs = Summary.of(seconds["baguarun"]), Summary.of(seconds["torchrun"])
    ratio = paired_ratio(seconds["baguarun"], seconds["torchrun"])
    report.rows.append(
        Row(
            what=f"median ratio of {ratio.pairs} pairs (95 % under {ratio.upper95:.2f})",
            peer=f"{theirs.median:.2f} s ({theirs.low:.2f}-{theirs.high:.2f})",
            ours=f"{ours.median:.2f} s ({ours.low:.2f}-{ours.high:.2f})",
            value=ratio.median,
            target=_TARGET_RATIO,
            unit="x",
        )
    )
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())
