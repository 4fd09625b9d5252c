#!/usr/bin/env bash
# Makes the virtual environment $1 with build tools and torch in it.
#   PYTHON  interpreter (default python3)
#   TORCH   pip requirement for torch; empty: take over the torch 2.11-2.13 that PYTHON has, else install 2.13.0
set -euo pipefail

venv=$1
python=${PYTHON:-python3}
torch=${TORCH:-}

fail() {
    printf 'make setup: %s\n' "$*" >&2
    exit 3
}

command -v "$python" >/dev/null || fail "PYTHON=$python is not on PATH; want Python 3.10 or newer."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version 2>&1) is too old; want Python 3.10 or newer: make setup PYTHON=python3.12"

# Is there a torch (a CUDA build, say) that a second download should not replace?
reuse=()
if [[ -z $torch ]]; then
    if "$python" -c 'import sys, torch; v = torch.__version__.split("."); sys.exit(not (2, 11) <= (int(v[0]), int(v[1])) < (2, 14))' 2>/dev/null; then
        echo "make setup: taking over the torch that $python has"
        reuse=(--system-site-packages)
    else
        torch=torch==2.13.0
    fi
fi

if [[ ! -x $venv/bin/python ]]; then
    "$python" -m venv "${reuse[@]}" "$venv" ||
        fail "$python cannot make a virtual environment. On Debian or Ubuntu: apt-get install python3-venv"
fi
"$venv/bin/python" -m pip install --quiet 'pip>=23' 'setuptools>=77' wheel 'ninja>=1.10'
if [[ -n $torch ]]; then
    # Unquoted on purpose: TORCH may carry pip options after the requirement.
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install $torch
fi
"$venv/bin/python" -c 'import torch' || fail "torch was installed but cannot be imported (see above)"
