from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baguarun.errors import SetupError, UsageError
from baguarun.launcher import bagua_net
from baguarun.launcher.bagua_net import check, worker_environ
from baguarun.launcher.settings import ElasticMode, RunSettings


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "libnccl-net-baguanet.so"
    path.touch()
    monkeypatch.setattr(bagua_net, "PLUGIN", path)
    return path


def settings(*, bagua_net: bool = True, max_nodes: int = 1, **environ: str) -> RunSettings:
    return RunSettings(script="x", bagua_net=bagua_net, max_nodes=max_nodes, environ=environ)


def test_nccl_is_told_the_plugin_s_path_and_name_and_to_keep_it(plugin: Path) -> None:
    assert worker_environ(settings(), "") == {
        "NCCL_NET_PLUGIN": str(plugin),
        "NCCL_NET": "BaguaNet",
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
    }
    assert worker_environ(settings(bagua_net=False), "") == {}


def test_the_job_s_secret_reaches_workers_with_and_without_the_plugin() -> None:
    assert worker_environ(settings(bagua_net=False), "s") == {"BAGUA_NET_SECRET": "s"}
    assert worker_environ(settings(), "s")["BAGUA_NET_SECRET"] == "s"


def test_a_secret_of_the_user_s_is_kept() -> None:
    assert worker_environ(settings(bagua_net=False, BAGUA_NET_SECRET="mine"), "s") == {}
    assert worker_environ(settings(bagua_net=False, BAGUA_NET_SECRET=""), "s") == {"BAGUA_NET_SECRET": "s"}


def test_workers_that_go_on_in_place_give_signs_of_life_often_enough_for_the_detection_time() -> None:
    def beats(**environ: str) -> str | None:
        in_place = RunSettings(
            script="x", elastic=ElasticMode.IN_PLACE, detect_timeout_s=0.5, environ=environ
        )
        return worker_environ(in_place, "").get("BAGUA_NET_BEAT_TIMEOUT_S")

    assert beats() == "0.25"
    assert beats(BAGUA_NET_BEAT_TIMEOUT_S="7") is None, "the user's is inherited"


def test_the_user_is_told_once_how_to_see_that_nccl_uses_it(plugin: Path) -> None:
    [notice] = check(settings(), without_store=False)
    assert str(plugin) in notice
    assert 'run with NCCL_DEBUG=INFO and look for a line with "NET/BaguaNet : using"' in notice
    assert check(settings(bagua_net=False), without_store=True) == []


def test_without_a_store_several_nodes_are_told_that_they_have_no_secret() -> None:
    assert len(check(settings(max_nodes=2), without_store=False)) == 1
    assert len(check(settings(max_nodes=1), without_store=True)) == 1
    notices = check(settings(max_nodes=2), without_store=True)
    assert "set the same BAGUA_NET_SECRET on all of them" in notices[1]
    assert len(check(settings(max_nodes=2, BAGUA_NET_SECRET="s"), without_store=True)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_NET_PLUGIN", "ofi"), ("NCCL_NET", "Socket"), ("NCCL_NET_PLUGIN_REF_COUNT", "0")],
)
def test_another_plugin_of_the_user_s_is_a_conflict_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"--bagua-net, {name}={value}: want one of them; unset {name}"):
        check(settings(**{name: value}), without_store=False)
    check(settings(bagua_net=False, **{name: value}), without_store=False)


def test_the_same_plugin_set_by_the_user_is_no_conflict(plugin: Path) -> None:
    same: dict[str, Any] = {"NCCL_NET_PLUGIN": str(plugin), "NCCL_NET": "baguanet"}
    assert check(settings(NCCL_NET_PLUGIN_REF_COUNT="1", **same), without_store=False)


def test_a_missing_plugin_is_an_error_with_the_remedy(plugin: Path) -> None:
    plugin.unlink()
    with pytest.raises(SetupError, match=r"libnccl-net-baguanet.so is missing: run make setup, or pip"):
        check(settings(), without_store=False)


def test_a_path_that_nccl_would_cut_is_an_error(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = plugin.parent / ("d" * 120) / ("e" * 120) / plugin.name
    deep.parent.mkdir(parents=True)
    deep.touch()
    monkeypatch.setattr(bagua_net, "PLUGIN", deep)
    with pytest.raises(SetupError, match="install baguarun in a folder with a shorter name"):
        check(settings(), without_store=False)
