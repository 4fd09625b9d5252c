"""`python -m baguarun` is the `baguarun` command."""

from __future__ import annotations

import sys

from baguarun.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
