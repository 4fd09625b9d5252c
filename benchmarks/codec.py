"""The codecs against memcpy of the same fp32 bytes, on every CPU path of this machine, on one pinned core.

Figures are fp32 bytes in or out per second over those of memcpy. Which ratio a codec can reach depends on the
machine: 64 Ki numbers lie in the second-level cache, where memcpy does nothing but move; 8 Mi lie in memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import REPOSITORY, Report, Row, finish, parser

_TARGETS = {
    ("avx512", "minmax8-encode"): 0.75,
    ("avx512", "minmax8-decode"): 1.4,
    ("avx512", "minmax8-reduce4-encode"): 0.3,
    ("avx512", "sign1-encode-residual"): 0.5,
    ("avx512", "topk-encode"): 0.35,
    ("avx2", "sign1-encode-residual"): 0.4,
    ("avx2", "topk-encode"): 0.33,
    ("avx2", "minmax8-encode"): 0.6,
    ("avx2", "minmax8-decode"): 1.4,
    ("avx2", "minmax8-reduce4-encode"): 0.28,
}
_MEMCPY = "memcpy"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One line of the compiled loop."""

    path: str
    name: str
    numel: int
    best_ns: float

    @property
    def gb_per_s(self) -> float:
        """Of fp32 numbers."""
        return 4 * self.numel / self.best_ns


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


def measure(program: Path, rounds: int) -> list[Measurement]:
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
        Measurement(path=path, name=name, numel=int(numel), best_ns=float(best_ns))
        for path, name, numel, best_ns in map(str.split, done.stdout.splitlines())
    ]


def rows(measurements: list[Measurement]) -> list[Row]:
    copies = {m.numel: m for m in measurements if m.name == _MEMCPY}
    return [
        Row(
            what=f"{m.path} {m.name}, {m.numel >> 10} Ki",
            peer=f"memcpy {copies[m.numel].gb_per_s:.1f} GB/s",
            ours=f"{m.gb_per_s:.1f} GB/s",
            value=m.gb_per_s / copies[m.numel].gb_per_s,
            target=_TARGETS.get((m.path, m.name)),
            at_least=True,
            unit="x",
        )
        for m in measurements
        if m.name != _MEMCPY
    ]


def main(argv: list[str] | None = None) -> int:
    options = parser("codec", __doc__ or "").parse_args(argv)
    report = Report(name="codec", title="codecs against memcpy, one core", quick=options.quick)
    with tempfile.TemporaryDirectory() as folder:
        measurements = measure(compile_loop(Path(folder)), rounds=3 if options.quick else 101)
    report.raw["best_ns"] = {f"{m.path} {m.name} {m.numel}": m.best_ns for m in measurements}
    report.rows.extend(rows(measurements))
    return finish(report, options)


if __name__ == "__main__":
    sys.exit(main())
