"""Many rounds of faults from the command line; the exit code is 0 if all went as promised."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.harness import machine_facts
from tests.faults.plan import ONE_HOST, THREE_HOSTS
from tests.faults.report import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="half of them on one host, half on three")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=0.0, help="seconds beyond each bound to allow")
    parser.add_argument("--layout", choices=["one", "three", "both"], default="both")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    options = parser.parse_args()
    layouts = {"one": [ONE_HOST], "three": [THREE_HOSTS], "both": [ONE_HOST, THREE_HOSTS]}[options.layout]
    facts = machine_facts()
    reports = [
        run(layout, options.rounds // len(layouts), options.seed, options.patience) for layout in layouts
    ]
    found = {
        "benchmark": "faults",
        "title": "kill -9, freeze and cut-off of a random rank in a random collective",
        "seed": options.seed,
        "patience_s": options.patience,
        "machine": facts,
        "layouts": [report.to_dict() for report in reports],
    }
    text = json.dumps(found, indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
