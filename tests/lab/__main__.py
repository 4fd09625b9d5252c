"""`python -m tests.lab sweep` removes labs whose owner is dead; `list` shows all lab namespaces."""

from __future__ import annotations

import sys

from tests.lab import namespaces
from tests.lab.sweep import sweep


def main(argv: list[str]) -> int:
    if argv == ["sweep"]:
        removed = sweep()
        print("\n".join(removed) if removed else "nothing to sweep")
        return 0
    if argv == ["list"]:
        print("\n".join(name for name in namespaces.names() if name.startswith("lab-")))
        return 0
    print(f"python -m tests.lab {' '.join(argv)}: want `sweep` or `list`", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
