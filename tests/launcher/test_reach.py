"""Which store a command about a running job asks."""

from __future__ import annotations

import pytest

from baguarun.elastic.membership.etcd import EtcdStore
from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.errors import StoreLostError, UsageError
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


class SomeStores:
    """Stands for etcd on this machine: which ports answer, and how long each was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
        self.ports = ports
        self.waits_s: list[float] = []
        monkeypatch.setattr(EtcdStore, "open", self.open)

    async def open(self, url: StoreUrl, *, timeout_s: float) -> SomeStores:
        self.waits_s.append(timeout_s)
        if url.endpoints[0].port not in self.ports:
            raise StoreLostError(f"store {url}: nobody answers")
        return self

    async def close(self) -> None:
        pass


def private(*ports: int) -> dict[str, StoreUrl]:
    return {f"job{port}": StoreUrl(endpoints=(HostPort("127.0.0.1", port),)) for port in ports}


async def a_question(store: object) -> str:
    return "answer"


@pytest.mark.usefixtures("nothing_here")
def test_of_several_private_stores_the_silent_ones_are_named_and_the_gone_ones_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores = SomeStores(monkeypatch, 2, 4)
    announced = iter([private(1, 2, 3, 4), *([private(2, 3, 4)] * 2)])
    monkeypatch.setattr(reach, "find_announced", lambda: next(announced))
    said: list[str] = []
    assert ask_everywhere({}, a_question, said.append) == ["answer"] * 2
    assert said == ["job 'job3': store etcd://127.0.0.1:3: nobody answers"]
    assert set(stores.waits_s) == {reach._PRIVATE_TIMEOUT_S}


@pytest.mark.usefixtures("nothing_here")
def test_if_no_private_store_answers_the_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    SomeStores(monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(reach, "find_announced", lambda: private(1))
    with pytest.raises(StoreLostError, match="nobody answers"):
        ask_everywhere({}, a_question, said.append)
    announced = iter([private(1), {}])
    monkeypatch.setattr(reach, "find_announced", lambda: next(announced))
    with pytest.raises(UsageError, match="found no job with a store of its own on this machine"):
        ask_everywhere({}, a_question, said.append)
    assert said == []


async def no_question(store: object) -> None:
    raise AssertionError("nothing is asked")


@pytest.mark.usefixtures("nothing_here")
def test_without_a_store_the_ways_to_name_one_are_told() -> None:
    with pytest.raises(UsageError, match="'demo': found no store of it on this machine; want --store URL"):
        ask_about("demo", {}, no_question)
    with pytest.raises(UsageError, match="found no job with a store of its own on this machine"):
        ask_everywhere({}, no_question, print)


@pytest.mark.usefixtures("nothing_here")
@pytest.mark.parametrize("job_id", ["", "a/b", ".jobs", "a b"])
def test_what_cannot_be_a_job_is_refused_before_anything_is_asked(job_id: str) -> None:
    with pytest.raises(UsageError, match=r"JOB=.*: want 1 to 128 letters"):
        ask_about(job_id, given(store="etcd://127.0.0.1:1"), no_question)
