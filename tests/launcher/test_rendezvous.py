from __future__ import annotations

import pytest

from baguarun.errors import UsageError
from baguarun.launcher.rendezvous import (
    Embedded,
    EndpointStore,
    ExternalStore,
    Rendezvous,
    Static,
    choose_rendezvous,
    no_effect_notices,
    parse_endpoint,
)
from baguarun.launcher.settings import read_settings


def choose(line: str, **environ: str) -> Rendezvous:
    request = read_settings([*line.split(), "train.py"], environ)
    assert request is not None
    return choose_rendezvous(request.settings)


def notices(line: str) -> list[str]:
    request = read_settings([*line.split(), "train.py"], {})
    assert request is not None
    return no_effect_notices(request.settings, choose_rendezvous(request.settings), request.given)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("", Embedded()),
        ("--standalone", Embedded()),
        ("--standalone --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id x", Embedded()),
        ("--nproc-per-node 4 --max-restarts 3", Embedded()),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0 --nnodes 1", Embedded()),
        ("--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29400", Embedded()),
        ("--rdzv-backend c10d", Embedded()),
        ("--rdzv-backend static", Embedded()),
        ("--master-port 0", Embedded()),
        # torchrun's lines for several nodes
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint n1:29500 --rdzv-id 7", EndpointStore("n1", 29500)),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint n1", EndpointStore("n1", 29400)),
        ("--nnodes 2 --rdzv-endpoint n1:1", EndpointStore("n1", 1)),
        ("--nnodes 2 --rdzv-endpoint [fd00::1]:29400", EndpointStore("fd00::1", 29400)),
        ("--nnodes 2 --rdzv-endpoint n1 --rdzv-conf is_host=true", EndpointStore("n1", 29400, True)),
        ("--nnodes 2 --rdzv-endpoint n1 --rdzv-conf is_host=0", EndpointStore("n1", 29400, False)),
        ("--nnodes 2 --rdzv-endpoint localhost:29400", EndpointStore("localhost", 29400)),
        ("--nnodes 2 --rdzv-endpoint n1:1 --master-addr n1 --master-port 2", EndpointStore("n1", 1)),
        # an etcd that somebody runs
        ("--nnodes 2 --store etcd://e:2379 --job-id j", ExternalStore("etcd://e:2379")),
        ("--store etcd://e:2379", ExternalStore("etcd://e:2379")),
        ("--nnodes 2 --store etcd://e --job-id j --node-rank 1", ExternalStore("etcd://e")),
        ("--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint e --rdzv-id j", ExternalStore("etcd://e:2379")),
        (
            "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint a:1,b --rdzv-id j",
            ExternalStore("etcd://a:1,b:2379"),
        ),
        (
            "--rdzv-backend etcd-v2 --rdzv-endpoint e --rdzv-conf protocol=https,cacert=/dev/null",
            ExternalStore("etcds://e:2379?cacert=/dev/null"),
        ),
        # static jobs
        ("--nnodes 2 --node-rank 1 --master-addr n0 --master-port 5", Static("n0", 5, 1)),
        ("--nnodes 2 --node-rank 0 --master-addr n0", Static("n0", 29500, 0)),
        ("--nnodes 2 --node-rank 1 --master-addr fd00::1", Static("fd00::1", 29500, 1)),
        ("--nnodes 2 --node-rank 1 --master-addr [fd00::1]", Static("fd00::1", 29500, 1)),
        ("--nnodes 2 --node-rank 1 --rdzv-backend static --rdzv-endpoint n0:6", Static("n0", 6, 1)),
        ("--master-port 29501", Static("127.0.0.1", 29501, 0)),
        ("--master-addr 127.0.0.1 --max-restarts 2", Static("127.0.0.1", 29500, 0)),
    ],
)
def test_a_line_names_one_meeting_place(line: str, place: Rendezvous) -> None:
    assert choose(line) == place


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--standalone --nnodes 2", r"--standalone, --nnodes=2: want one node"),
        ("--standalone --store etcd://u:pw@e", r"--standalone, --store=etcd://u@e: "),
        ("--standalone --rdzv-endpoint n1:1", r"--standalone, --rdzv-endpoint=n1:1: "),
        ("--standalone --master-addr n1", r"--standalone, --master-addr=n1: "),
        ("--standalone --rdzv-backend etcd", r"--standalone, --rdzv-backend=etcd: "),
        ("--store etcd://e --rdzv-endpoint n1", r"--store=etcd://e, --rdzv-endpoint=n1: want --store alone"),
        ("--store etcd://e --master-addr n1", r"--store=etcd://e, --master-addr=n1: want --store alone"),
        ("--store etcd://e --master-port 1", r"--store=etcd://e, --master-port=1: want --store alone"),
        (
            "--store etcd://e --rdzv-backend c10d",
            r"--store=etcd://e, --rdzv-backend=c10d: want --store alone",
        ),
        ("--nnodes 2 --store etcd://e", r"etcd://e: want --job-id NAME with it"),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e", r"etcd://e:2379: want --job-id NAME"),
        ("--rdzv-backend etcd", r"--rdzv-backend=etcd: want --rdzv-endpoint HOST:2379"),
        (
            "--rdzv-backend etcd --rdzv-endpoint e --master-addr n",
            r"--rdzv-backend=etcd: want no --master-addr",
        ),
        ("--nnodes 2 --rdzv-endpoint n1:0", r"--rdzv-endpoint=n1:0: want a port that the other nodes know"),
        ("--nnodes 2 --rdzv-endpoint n1 --master-addr n2", r"--rdzv-endpoint=n1, --master-addr=n2: want one"),
        ("--nnodes 2 --rdzv-endpoint http://n1:1", r"--rdzv-endpoint=http://n1:1: want HOST or HOST:PORT"),
        ("--nnodes 2 --rdzv-backend c10d --master-addr n1", r"want --rdzv-endpoint n1:29400 instead of"),
        ("--nnodes 2 --rdzv-backend c10d", r"want to know where the nodes meet"),
        ("--nnodes 2:3 --node-rank 1 --master-addr n1", r"--nnodes=2:3: want a fixed number of nodes"),
        ("--nnodes 2 --master-addr n1", r"--master-addr=n1: want --node-rank N"),
        ("--nnodes 2 --master-port 9 --node-rank 0", r"--master-port=9: want --master-addr HOST"),
        ("--nnodes 2 --master-addr n1 --master-port 0 --node-rank 0", r"--master-port=0: want a port"),
        (
            "--nnodes 2 --master-addr n1 --node-rank 0 --max-restarts 1",
            r"--max-restarts=1: want 0 with --master-addr",
        ),
    ],
)
def test_a_conflict_or_a_gap_is_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        choose(line)
    assert "pw" not in str(error.value)


@pytest.mark.parametrize("nnodes", ["2", "1:4"])
def test_several_nodes_without_a_meeting_place_are_shown_the_three_ways(nnodes: str) -> None:
    with pytest.raises(UsageError) as error:
        choose(f"--nnodes {nnodes}")
    text = str(error.value)
    assert text.startswith(f"--nnodes={nnodes}: want to know where the nodes meet")
    for way in ("--store etcd://", "--rdzv-backend c10d --rdzv-endpoint", "--master-addr HOST --node-rank"):
        assert way in text


def test_the_variables_of_a_kubernetes_operator_make_a_static_job() -> None:
    place = choose("", PET_NNODES="2", PET_NODE_RANK="1", PET_MASTER_ADDR="job-0", PET_MASTER_PORT="29400")
    assert place == Static("job-0", 29400, 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("n1", ("n1", 7)),
        ("n1:8", ("n1", 8)),
        ("10.0.0.1:8", ("10.0.0.1", 8)),
        ("[::1]", ("::1", 7)),
        ("[fe80::1%eth0]:8", ("fe80::1%eth0", 8)),
    ],
)
def test_an_endpoint_is_a_host_and_maybe_a_port(text: str, found: tuple[str, int]) -> None:
    assert parse_endpoint(text, 7) == found


@pytest.mark.parametrize(
    "text", ["", ":1", "n1:", "n1:x", "n1:1:2", "::1", "[::1", "[n1]:1", "a b", "n1:99999", "u@h", "a,b"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="want HOST or HOST:PORT"):
        parse_endpoint(text, 7)


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (
            "--nnodes 2 --rdzv-endpoint n1 --master-addr n1 --master-port 2",
            ["--master-addr", "--master-port"],
        ),
        ("--standalone --master-port 2", ["--master-port"]),
        ("--nnodes 2 --master-addr n --node-rank 0 --detect-timeout 9", ["--detect-timeout"]),
        ("--rdzv-backend static --rdzv-endpoint n:1 --master-port 2", ["--master-port"]),
        ("--master-port 29501 --local-addr 10.0.0.1", ["--local-addr"]),
        ("--standalone --rdzv-conf is_host=1", ["--rdzv-conf is_host"]),
        ("--nnodes 2 --master-addr n --node-rank 0 --master-port 2", []),
        ("--nnodes 2 --rdzv-endpoint n --detect-timeout 9 --join-timeout 9", []),
    ],
)
def test_a_flag_that_the_meeting_place_has_no_use_for_is_reported(line: str, flags: list[str]) -> None:
    assert [notice.partition(" has no effect: ")[0] for notice in notices(line)] == flags
