"""Which store a command about a running job asks."""

from __future__ import annotations

import pytest

from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.errors import UsageError
from baguarun.launcher import reach
from baguarun.launcher.command_line import Given
from baguarun.launcher.options import OPTIONS
from baguarun.launcher.reach import ask_about, ask_everywhere, named_store


def given(**values: str) -> dict[str, Given]:
    """Options as flags gave them: `rdzv_endpoint="n0"` for `--rdzv-endpoint n0`."""
    names = {name.replace("_", "-"): text for name, text in values.items()}
    return {name: Given(text, f"--{name}") for name, text in names.items()}


def by_variable(**values: str) -> dict[str, Given]:
    return {name: Given(value.text, "PET_X") for name, value in given(**values).items()}


@pytest.mark.parametrize(
    ("line", "environment", "found"),
    [
        (given(store="etcd://a:1,b"), {}, "etcd://a:1,b:2379"),
        (given(store="etcds://a"), by_variable(store="etcd://b"), "etcds://a:2379"),
        ({}, by_variable(store="etcd://b"), "etcd://b:2379"),
        (given(rdzv_endpoint="a"), {}, "etcd://a:29400"),
        (given(rdzv_endpoint="[::1]:7"), by_variable(store="etcd://b"), "etcd://[::1]:7"),
        (given(rdzv_endpoint="a", rdzv_backend="etcd"), {}, "etcd://a:2379"),
        ({}, by_variable(rdzv_endpoint="a:5", rdzv_backend="etcd-v2"), "etcd://a:5"),
        ({}, {}, None),
    ],
)
def test_the_line_comes_before_the_environment_and_both_ways_to_name_a_store_are_understood(
    line: dict[str, Given], environment: dict[str, Given], found: str | None
) -> None:
    url = named_store({**environment, **line}, None, line)
    assert (str(url) if url else None) == found


def test_a_password_from_the_environment_goes_to_the_user_of_the_url() -> None:
    line = given(store="etcd://me@a")
    assert named_store(line, "secret", line) == StoreUrl(
        endpoints=(HostPort("a", 2379),), user="me", password="secret"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (given(store="etcd://a", rdzv_endpoint="b"), "--store, --rdzv-endpoint=b: want one of them"),
        (given(rdzv_endpoint="b", rdzv_backend="static"), "--rdzv-endpoint=b: a static job has no store"),
        (given(rdzv_endpoint="b", rdzv_backend="x"), "--rdzv-backend=x: want one of c10d, etcd"),
        (given(rdzv_endpoint="b", rdzv_backend="etcd", rdzv_conf="x=1"), "--rdzv-conf x=1: want one of"),
        (given(store="a"), "store 'a': want etcd://host:port"),
    ],
)
def test_options_that_name_no_store_are_refused(line: dict[str, Given], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named_store(line, None, line)


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (variable for option in OPTIONS for variable in option.variables):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(reach, "find_announced", dict)


async def no_question(store: object) -> None:
    raise AssertionError("nothing is asked")


@pytest.mark.usefixtures("nothing_here")
def test_without_a_store_the_ways_to_name_one_are_told() -> None:
    with pytest.raises(UsageError, match="'demo': found no store of it on this machine; want --store URL"):
        ask_about("demo", {}, no_question)
    with pytest.raises(UsageError, match="found no job with a store of its own on this machine"):
        ask_everywhere({}, no_question)


@pytest.mark.usefixtures("nothing_here")
@pytest.mark.parametrize("job_id", ["", "a/b", ".jobs", "a b"])
def test_what_cannot_be_a_job_is_refused_before_anything_is_asked(job_id: str) -> None:
    with pytest.raises(UsageError, match=r"JOB=.*: want 1 to 128 letters"):
        ask_about(job_id, given(store="etcd://127.0.0.1:1"), no_question)
