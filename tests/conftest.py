"""What every test may rely on: markers mean what they say, and in CI nothing is skipped silently."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Generator

import pytest

# Read when grpc is imported. Tests of the launcher fork this process as the agent does, which has no grpc by
# then; grpc's handlers, left by tests of the store, would end such a child.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

IN_CI = os.environ.get("CI") == "true"

ALLOWED_IN_CI = ("this processor", "this kernel", "this machine has no nvcc")
"""A skip whose reason starts so (an instruction set that is not there) is fine in CI; any other one fails."""


@functools.cache
def missing_for_root() -> str:
    """What keeps this process from making network namespaces, or "" when nothing does."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        trial = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return "needs unshare (util-linux)"
    return "" if trial.returncode == 0 else f"cannot make a network namespace: {trial.stderr.strip()}"


@functools.cache
def missing_for_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in (("root", missing_for_root), ("gpu", missing_for_gpu)):
        if item.get_closest_marker(marker) is not None and (reason := missing()):
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test is a failed one: CI says that it runs everything that needs no GPU."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not reason.startswith(ALLOWED_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"skipped, which CI does not allow: {reason}"
    return report
