"""How fast the state goes to a newcomer, against the wire: what a big state costs above a tiny one.

Lab hosts (network namespaces: needs root) with limited NICs. The second one joins a job that trains on the
first, whose pause counts, less a step of both.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.harness import Report, Row, finish, parser
from tests.lab import Lab
from tests.lab.elastic_worker import network
from tests.lab.host import Host
from tests.lab.job import Etcd, Job, baguarun_command
from tests.lab.steps import ELASTIC_WORKER

_BIG, _TINY = 1280, 32
"""Widths of the network."""
_CAP_S = 120.0


def state_bytes(width: int) -> int:
    """Of weights and Adam's two moments."""
    return 3 * 4 * sum(parameter.numel() for parameter in network(width).parameters())


def pause_s(lab: Lab, etcd: Etcd, folder: Path, width: int) -> float:
    """How long host 0 stands for host 1's coming, less a usual step of both."""

    def command(_host: Host) -> list[str]:
        own = [*baguarun_command(), "run", "--store", etcd.url, "--job-id", folder.name]
        own += ["--elastic", "in-place", "--detect-timeout", "1", "--nnodes", "1:2"]
        return [*own, str(ELASTIC_WORKER), "--loader-workers", "0", "--width", str(width)]

    first, second = lab.hosts[:2]
    with Job(folder, command) as job:
        job.start(first)
        job.wait_for_world(1, _CAP_S, settled=20)
        pid = job.worker(first).pid
        job.start(second)
        last = job.wait_for_world(2, _CAP_S).step
        job.steps.wait_for(lambda step: step.world_size == 2 and step.step >= last + 5, _CAP_S)
        own = [step for step in job.steps.all() if step.pid == pid and step.step > 0]
    pauses = [(two.time - one.time, one, two) for one, two in itertools.pairwise(own)]
    usual_s = median(pause for pause, one, _ in pauses if one.world_size == 2)
    (joining_s,) = (pause for pause, one, two in pauses if one.world_size < two.world_size)
    return joining_s - usual_s


def main(argv: list[str] | None = None) -> int:
    options = parser("stream", __doc__ or "")
    options.add_argument("--rates", default="1000,100", help="of the NICs, in Mbit/s")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args(argv)
    report = Report(name="stream", title="state on its way to a newcomer", quick=args.quick)
    size_bytes = state_bytes(_BIG) - state_bytes(_TINY)
    for rate_mbit in map(float, args.rates.split(",")):
        found: dict[int, list[float]] = {_BIG: [], _TINY: []}
        with tempfile.TemporaryDirectory() as directory, Lab(hosts=3, rate_mbit=rate_mbit) as lab:
            etcd = Etcd(lab.hosts[-1], Path(directory) / "etcd")
            etcd.start()
            for turn, width in itertools.product(range(1 if args.quick else args.rounds), found):
                found[width].append(pause_s(lab, etcd, Path(directory) / f"{width}-{turn}", width))
                print(f"{rate_mbit:g} Mbit/s, width {width}: {found[width][-1]:.3f} s", flush=True)
        wire_s = size_bytes * 8 / (rate_mbit * 1e6)
        took_s = median(found[_BIG]) - median(found[_TINY])
        what = f"{rate_mbit:g} Mbit/s, {size_bytes / 1e6:.0f} MB"
        report.rows += [
            Row(
                what=f"{what}: time to send, of the wire's ({wire_s:.2f} s)",
                peer="",
                ours=f"{took_s:.3f} s",
                value=took_s / wire_s,
                target=1 / 0.8,
            ),
            Row(
                what=f"{what}: pause with a tiny state",
                peer="",
                ours="",
                value=median(found[_TINY]),
                target=0.3,
                unit=" s",
            ),
        ]
        report.raw[f"{rate_mbit:g} Mbit/s"] = {str(width): each for width, each in found.items()}
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
