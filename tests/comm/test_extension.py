"""An extension that is missing, or was built for another torch, says what to run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from baguarun.comm import extension
from baguarun.errors import SetupError


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    extension.load_extension.cache_clear()
    yield
    extension.load_extension.cache_clear()


def test_another_minor_version_of_torch_is_named_with_the_remedy() -> None:
    with pytest.raises(SetupError, match=r"built for torch 2\.12, this is 2\.13: run `make setup`") as caught:
        extension.check_build("2.12.1+cpu", "2.13.0+cpu")
    assert "pip install --no-build-isolation ." in str(caught.value)


def test_a_cpu_build_is_refused_by_a_cuda_torch() -> None:
    with pytest.raises(SetupError, match=r"built for torch 2\.13\.0\+cpu, this is 2\.13\.0\+cu130"):
        extension.check_build("2.13.0+cpu", "2.13.0+cu130")


def test_a_patch_release_of_torch_needs_no_new_build() -> None:
    extension.check_build("2.13.0+cpu", "2.13.1+cpu")


def test_a_missing_extension_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "baguarun._C" else find(name, *rest)
    )
    with pytest.raises(SetupError, match=r"baguarun\._C is missing.*: run `make setup`"):
        extension.load_extension()


def test_an_extension_built_for_another_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("baguarun._build_info")
    other.TORCH_VERSION = "2.4.0+cpu"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "baguarun._build_info", other)
    monkeypatch.setattr(extension.importlib.util, "find_spec", lambda name, *rest: object())
    with pytest.raises(SetupError, match=r"built for torch 2\.4"):
        extension.load_extension()


def test_the_extension_of_this_checkout_loads() -> None:
    assert extension.load_extension().__name__ == "baguarun._C"
    assert torch.__version__ == extension._built_for()
