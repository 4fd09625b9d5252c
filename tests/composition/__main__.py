"""Run all cells of the matrix; with --write, write docs/composition.md if they are as it will say.

python -m tests.composition [--write]
"""

from __future__ import annotations

import argparse
import sys

from tests.composition import page
from tests.composition.matrix import FEATURES, run_row
from tests.composition.rows import ROWS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/composition.md")
    write = parser.parse_args().write
    failures = 0
    for row in ROWS:
        for feature, wrong in run_row(row, FEATURES).items():
            print(f"{row.title}: {feature}: {wrong or 'right'}", flush=True)
            failures += bool(wrong)
    if failures:
        print(f"{failures} cells are not what the matrix says; nothing was written", file=sys.stderr)
        return 1
    if write:
        page.PATH.write_text(page.render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
