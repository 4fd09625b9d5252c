"""The codecs against memcpy of the same fp32 bytes, on every CPU path of this machine, on one pinned core.

Figures are fp32 bytes in or out per second over those of memcpy: the C library's own, with the widest vectors
that it likes, whichever path is measured. The two take turns over buffers that stay where they are, and the
best turn of each counts. Which ratio a codec can reach depends on the machine: 64 Ki numbers lie in the
second-level cache, where memcpy does nothing but move. `fill` and `add-one-block` say what the same core does
with nothing to decode: a decoder writes as many numbers, an accumulating one reads and writes them.

Linear in size: the time per number over that at 64 Ki, and where memcpy slows down too, over its slowdown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import REPOSITORY, Report, Row, finish, parser

_TARGETS = {
    "minmax8-encode": {"avx512": 0.75, "avx2": 0.6},
    "minmax8-decode": {"avx512": 1.4, "avx2": 1.4},
    "minmax8-decode-accumulate": {"avx512": 1.2, "avx2": 0.95},
    "minmax8-reduce4-encode": {"avx512": 0.3, "avx2": 0.28},
    "sign1-encode-residual": {"avx512": 0.5, "avx2": 0.4},
    "sign1-decode-accumulate": {"avx512": 1.3, "avx2": 0.7},
    "topk-encode": {"avx512": 0.35, "avx2": 0.33},
}
_JUDGED_NUMEL = 64 << 10
_MOST_GROWTH = 1.25


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One line of the compiled loop."""

    path: str
    name: str
    numel: int
    best_ns: float
    memcpy_ns: float
    """In the same turns."""

    @property
    def ratio(self) -> float:
        return self.memcpy_ns / self.best_ns


def gb_per_s(numel: int, ns: float) -> str:
    """Of fp32 numbers."""
    return f"{4 * numel / ns:.1f} GB/s"


def compile_loop(folder: Path) -> Path:
    """The program that measures, built with the flags of the extension."""
    program = folder / "codec_loop"
    sources = [
        *sorted((REPOSITORY / "cpp_ext" / "codec").glob("*.cc")),
        REPOSITORY / "benchmarks/codec_loop.cpp",
    ]
    include = f"-I{REPOSITORY / 'cpp_ext' / 'codec'}"
    compiler = os.environ.get("CXX", "g++").split()
    flags = ["-std=c++20", "-O3", "-ffp-contract=off", include]
    subprocess.run([*compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    return program


def measure(program: Path, rounds: int, passes: int) -> list[Measurement]:
    """The best of each line over `passes` runs: the core may be slow for longer than a line takes."""
    runs = [measure_once(program, rounds) for _ in range(passes)]
    return [
        replace(
            lines[0],
            best_ns=min(line.best_ns for line in lines),
            memcpy_ns=min(line.memcpy_ns for line in lines),
        )
        for lines in zip(*runs, strict=True)
    ]


def measure_once(program: Path, rounds: int) -> list[Measurement]:
    """Runs the program on the last usable core alone."""
    core = max(os.sched_getaffinity(0))
    done = subprocess.run(
        [str(program), str(rounds)],
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return [
        Measurement(path=path, name=name, numel=int(numel), best_ns=float(best), memcpy_ns=float(memcpy))
        for path, name, numel, best, memcpy in map(str.split, done.stdout.splitlines())
    ]


def speed(m: Measurement) -> Row:
    judged = m.numel == _JUDGED_NUMEL
    return Row(
        what=f"{m.path} {m.name}, {m.numel >> 10} Ki",
        peer=f"memcpy {gb_per_s(m.numel, m.memcpy_ns)}",
        ours=gb_per_s(m.numel, m.best_ns),
        value=m.ratio,
        target=_TARGETS.get(m.name, {}).get(m.path) if judged else None,
        at_least=True,
        unit="x",
    )


def growth(m: Measurement, judged: Measurement) -> Row:
    """Of the time per number, beyond that of memcpy."""
    ours = m.best_ns / m.numel / (judged.best_ns / judged.numel)
    memcpy = m.memcpy_ns / m.numel / (judged.memcpy_ns / judged.numel)
    return Row(
        what=f"{m.path} {m.name}, time per number, {m.numel >> 10} Ki over {judged.numel >> 10} Ki",
        peer=f"memcpy {memcpy:.2f}",
        ours=f"{ours:.2f}",
        value=ours / max(1.0, memcpy),
        target=_MOST_GROWTH,
        unit="x",
    )


def rows(measurements: list[Measurement]) -> list[Row]:
    judged = {(m.path, m.name): m for m in measurements if m.numel == _JUDGED_NUMEL}
    return [speed(m) for m in measurements] + [
        growth(m, judged[m.path, m.name]) for m in measurements if m.numel != _JUDGED_NUMEL
    ]


def main(argv: list[str] | None = None) -> int:
    options = parser("codec", __doc__ or "").parse_args(argv)
    report = Report(name="codec", title="codecs against memcpy, one core", quick=options.quick)
    with tempfile.TemporaryDirectory() as folder:
        measurements = measure(
            compile_loop(Path(folder)), rounds=3 if options.quick else 101, passes=1 if options.quick else 3
        )
    report.raw["best_ns, memcpy_ns"] = {
        f"{m.path} {m.name} {m.numel}": (m.best_ns, m.memcpy_ns) for m in measurements
    }
    report.rows.extend(rows(measurements))
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())
