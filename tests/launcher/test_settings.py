from __future__ import annotations

import sys
from typing import Any

import pytest

from baguarun.errors import UsageError
from baguarun.launcher.binding import BindingPolicy
from baguarun.launcher.options import OPTIONS
from baguarun.launcher.settings import (
    CommandKind,
    ElasticMode,
    OnHang,
    RdzvBackend,
    RunRequest,
    RunSettings,
    read_settings,
    without_password,
)
from baguarun.launcher.step_clock import HangLimit


def request(*words: str, **environ: str) -> RunRequest:
    found = read_settings([*words, "train.py"], environ)
    assert found is not None
    return found


def settings(*words: str, **environ: str) -> RunSettings:
    return request(*words, **environ).settings


EFFECTS: list[tuple[list[str], dict[str, Any]]] = [
    (["--nproc-per-node", "3"], {"nproc_per_node": "3"}),
    (["--nproc-per-node", "gpu"], {"nproc_per_node": "gpu"}),
    (["--bind", "none"], {"bind": BindingPolicy.NONE}),
    (["--numa-binding", "node"], {"bind": BindingPolicy.NUMA}),
    (["--algorithm", "bytegrad"], {"algorithm": "bytegrad"}),
    (["--bagua-net"], {"bagua_net": True}),
    (["--role", "trainer"], {"role": "trainer"}),
    (["--nnodes", "3"], {"min_nodes": 3, "max_nodes": 3, "job_id": "none"}),
    (["--nnodes", "2:5"], {"min_nodes": 2, "max_nodes": 5}),
    (["--store", "etcd://h:1"], {"store": "etcd://h:1"}),
    (["--job-id", "j1"], {"job_id": "j1"}),
    (["--rdzv-id", "j2"], {"job_id": "j2"}),
    (["--rdzv-backend", "c10d"], {"rdzv_backend": RdzvBackend.C10D}),
    (["--rdzv-endpoint", "h:1"], {"rdzv_endpoint": "h:1"}),
    (["--rdzv-conf", "join_timeout=30"], {"rdzv_conf": {"join_timeout": "30"}, "join_timeout_s": 30.0}),
    (["--rdzv-conf", "keep_alive_interval=2"], {"detect_timeout_s": 6.0}),
    (["--standalone"], {"standalone": True}),
    (["--master-addr", "h"], {"master_addr": "h"}),
    (["--master-port", "1234"], {"master_port": 1234}),
    (["--nnodes", "2", "--node-rank", "1"], {"node_rank": 1}),
    (["--local-addr", "10.0.0.1"], {"local_addr": "10.0.0.1"}),
    (["--node-name", "n7"], {"node_name": "n7"}),
    (["--elastic", "restart"], {"elastic": ElasticMode.RESTART}),
    (["--elastic", "in-place"], {"elastic": ElasticMode.IN_PLACE, "max_restarts": 2**31 - 1}),
    (["--elastic", "in-place", "--spares", "2"], {"spares": 2}),
    (["--elastic", "in-place"], {"hang_limit": HangLimit(), "on_hang": None}),
    (["--elastic", "in-place", "--hang-timeout", "off"], {"hang_limit": None}),
    (["--elastic", "in-place", "--hang-timeout", "9.5"], {"hang_limit": HangLimit(fixed_s=9.5)}),
    (["--elastic", "in-place", "--on-hang", "report"], {"on_hang": OnHang.REPORT}),
    (["--elastic", "in-place", "--max-restarts", "0"], {"max_restarts": 0}),
    (["--max-restarts", "4"], {"max_restarts": 4}),
    (["--detect-timeout", "2.5"], {"detect_timeout_s": 2.5}),
    (["--join-timeout", "7"], {"join_timeout_s": 7.0}),
    (["--shutdown-timeout", "0"], {"shutdown_timeout_s": 0.0}),
    (["-m"], {"command_kind": CommandKind.MODULE}),
    (["--no-python"], {"command_kind": CommandKind.PROGRAM}),
    (["--run-path"], {"command_kind": CommandKind.SCRIPT}),
    (["--log-dir", "/l"], {"log_dir": "/l"}),
    (["--tee", "0:3,1:1"], {"tee": "0:3,1:1"}),
    (["-r", "2"], {"redirects": "2"}),
    (["--local-ranks-filter", "0,2"], {"local_ranks_filter": "0,2"}),
    (["--metrics-port", "0"], {"metrics_port": 0}),
    (["--timeline", "t.json"], {"timeline": "t.json"}),
]


@pytest.mark.parametrize(("words", "fields"), EFFECTS, ids=lambda value: " ".join(value))
def test_a_flag_lands_in_its_field(words: list[str], fields: dict[str, Any]) -> None:
    found = settings(*words)
    assert {name: getattr(found, name) for name in fields} == fields


def test_every_option_has_an_effect_or_says_that_it_has_none() -> None:
    tested = {word.removeprefix("--") for words, _ in EFFECTS for word in words} | {"module", "redirects"}
    for option in OPTIONS:
        assert option.name in tested or option.no_effect or option.refusal, option.name


def test_the_defaults_are_torchruns_where_torchrun_has_one() -> None:
    found = settings()
    assert (found.nproc_per_node, found.min_nodes, found.max_nodes) == ("1", 1, 1)
    assert (found.max_restarts, found.role, found.tee, found.redirects) == (0, "default", "0", "0")
    assert (found.shutdown_timeout_s, found.join_timeout_s) == (30.0, 600.0)
    assert found.python == sys.executable
    assert found.detect_timeout_s == 5.0


def test_flag_beats_our_variable_beats_torchruns() -> None:
    assert settings("--max-restarts", "1", BAGUARUN_MAX_RESTARTS="2", PET_MAX_RESTARTS="3").max_restarts == 1
    assert settings(BAGUARUN_MAX_RESTARTS="2", PET_MAX_RESTARTS="3").max_restarts == 2
    assert settings(PET_MAX_RESTARTS="3").max_restarts == 3


def test_secrets_and_tools_come_from_the_environment_and_stay_out_of_sight() -> None:
    found = settings(BAGUARUN_STORE_PASSWORD="s3cret", BAGUARUN_ETCD="/opt/etcd", PYTHON_EXEC="/opt/python")
    assert (found.store_password, found.etcd_binary, found.python) == ("s3cret", "/opt/etcd", "/opt/python")
    assert "s3cret" not in repr(found)
    assert found.environ["BAGUARUN_ETCD"] == "/opt/etcd"


def test_a_job_alone_on_its_node_gets_an_id_of_its_own_and_a_shared_one_does_not() -> None:
    assert settings().job_id != settings().job_id
    assert settings("--nnodes", "2").job_id == "none"


def test_the_scripts_words_are_kept_as_they_are() -> None:
    hostile = ["a'; echo foo", "", "--nnodes", "3", "$(x)", "ü\n"]
    found = read_settings(["my script.py", *hostile], {})
    assert found is not None
    assert found.settings.script == "my script.py"
    assert found.settings.script_args == tuple(hostile)
    assert found.settings.max_nodes == 1


def test_help_is_none() -> None:
    assert read_settings(["--help"], {}) is None


REFUSED = [
    (["--nnodes", "4:1"], r"--nnodes=4:1: want 1 <= MIN <= MAX"),
    (["--nnodes", "0"], r"--nnodes=0:0: want 1 <= MIN <= MAX"),
    (["--nnodes", "two"], r"--nnodes=two: want a number of nodes N, or MIN:MAX"),
    (["--nnodes", "1:"], r"--nnodes=1:: want a number"),
    (["--nnodes", "1:2:3"], r"--nnodes=1:2:3: want a number"),
    (["--nproc-per-node", "0"], r"--nproc-per-node=0: want a number from 1, or gpu, cpu or auto"),
    (["--nproc-per-node", "-2"], r"--nproc-per-node=-2: want a number from 1"),
    (["--nproc-per-node", "xpu"], r"--nproc-per-node=xpu: want a number from 1"),
    (["--nproc-per-node", "²"], r"--nproc-per-node=²: want a number from 1"),
    (["--node-rank", "1"], r"--node-rank=1: want 0 <= N < 1.*--nnodes"),
    (["--node-rank", "x"], r"--node-rank=x: want a whole number"),
    (["--max-restarts", "-1"], r"--max-restarts=-1: want 0"),
    (["--elastic", "in-place", "--no-python"], r"--elastic=in-place, --no-python: want one of them"),
    (["--elastic", "in-place", "--spares", "-1"], r"--spares=-1: want 0 or more"),
    (["--elastic", "often"], r"--elastic=often: want one of restart, in-place"),
    (["--detect-timeout", "0.4"], r"--detect-timeout=0.4: want seconds, at least 0.5"),
    (["--detect-timeout", "nan"], r"--detect-timeout=nan: want seconds"),
    (["--join-timeout", "inf"], r"--join-timeout=inf: want seconds"),
    (["--shutdown-timeout", "soon"], r"--shutdown-timeout=soon: want a number of seconds"),
    (["--job-id", "a/b"], r"--job-id=a/b: want 1 to 128"),
    (["--job-id", ".."], r"--job-id=\.\.: want 1 to 128"),
    (["--job-id", ""], r"--job-id=: want 1 to 128"),
    (["--node-name", "a b"], r"--node-name=a b: want 1 to 128"),
    (["--algorithm", "Byte Grad"], r"--algorithm=Byte Grad: want a name in lower case"),
    (["--store", "http://h:1"], r"--store: .*want etcd://host:port"),
    (["--store", "etcd://h:port"], r"--store: .*want a port"),
    (
        ["--store", "etcd://h:1?cacert=/no/such/file"],
        r"--store: .*cacert=/no/such/file: want a readable file",
    ),
    (["--rdzv-backend", "zeus"], r"--rdzv-backend=zeus: want one of c10d, etcd, etcd-v2, static"),
    (["--bind", "exclusive"], r"--bind=exclusive: want node or none"),
    (["--tee", "4"], r"--tee=4: want 0 \(none\), 1 \(stdout\)"),
    (["--redirects", "0:9"], r"--redirects=0:9: want 0"),
    (["--local-ranks-filter", "0;1"], r"--local-ranks-filter=0;1: want local ranks joined by commas"),
    (["--metrics-port", "70000"], r"--metrics-port=70000: want a port, 0 to 65535"),
    (["--master-port", "-1"], r"--master-port=-1: want a port"),
    (["--no-python", "-m"], r"--no-python, --module: want one of them"),
    (["--no-python", "--run-path"], r"--no-python, --run-path: want one of them"),
    (["--spares", "1"], r"^--spares=1: want --elastic in-place with it"),
    (["--hang-timeout", "auto"], r"^--hang-timeout=auto: want --elastic in-place with it"),
    (["--on-hang", "remove"], r"^--on-hang=remove: want --elastic in-place with it"),
    (["--elastic", "in-place", "--hang-timeout", "0.5"], r"--hang-timeout=0.5: want seconds, at least 1"),
    (["--elastic", "in-place", "--hang-timeout", "long"], r"--hang-timeout=long: want .*seconds"),
    (["--virtual-local-rank"], r"--virtual-local-rank: not here: .*LOCAL_RANK"),
    (["--event-log-handler", "db"], r"--event-log-handler: not here"),
    (["--logs-specs", "mine"], r"--logs-specs: not here: use --log-dir"),
    (["--signals-to-handle", "SIGUSR1"], r"--signals-to-handle: not here"),
    (["--duplicate-stdout-filters", "a"], r"--duplicate-stdout-filters: not here"),
    (["--host_list", "a,b"], r"--host-list: not here: .* start this on each node: baguarun run --nnodes N"),
    (["--ssh_port", "22"], r"--ssh-port: not here: .*ssh"),
    (["--autotune_level", "1"], r"--autotune-level: not here: .* leave it out"),
    (["--autotune_max_samples", "60"], r"--autotune-max-samples: not here"),
    (["--bagua_service_port", "29501"], r"--bagua-service-port: not here"),
    (["--default_bucket_size", "10"], r"--default-bucket-size: not here: .*bucket_cap_mb"),
    (["--report_metrics"], r"--report-metrics: not here: use --metrics-port"),
    (["--set_additional_flag"], r"--set-additional-flag: not here: .*LOCAL_RANK"),
    (["--enable_bagua_net"], r"--enable-bagua-net: not here: use --bagua-net"),
    (["--rdzv-conf", "colour=red"], r"--rdzv-conf colour=red: want one of join_timeout, "),
    (["--rdzv-conf", "join_timeout"], r"--rdzv-conf=join_timeout: want key=value pairs"),
    (["--rdzv-conf", "join_timeout=-1"], r"--rdzv-conf join_timeout=-1: want a number above 0"),
    (["--rdzv-conf", "store_type=file"], r"--rdzv-conf store_type=file: want tcp"),
    (["--rdzv-conf", "rank=1"], r"--rdzv-conf rank=1: .*use --node-rank"),
    (
        ["--rdzv-conf", "join_timeout=3", "--join-timeout", "4"],
        r"--join-timeout=4, --rdzv-conf=.*want one of them",
    ),
]


@pytest.mark.parametrize(
    ("words", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else None
)
def test_an_impossible_value_is_named_with_what_is_wanted(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(*words)


def test_no_script_says_how_to_give_one() -> None:
    with pytest.raises(UsageError, match=r"no script: want baguarun run \[options\] SCRIPT"):
        read_settings(["--nnodes", "1"], {})


def test_a_message_about_a_value_from_the_environment_names_the_variable() -> None:
    with pytest.raises(UsageError, match=r"--nnodes=4:1: want .*\(--nnodes is set by PET_NNODES\)"):
        settings(PET_NNODES="4:1")
    with pytest.raises(UsageError, match=r"^PET_MAX_RESTARTS=many: want a whole number$"):
        settings(PET_MAX_RESTARTS="many")
    with pytest.raises(UsageError, match=r"^PET_VIRTUAL_LOCAL_RANK: not here"):
        settings(PET_VIRTUAL_LOCAL_RANK="1")


def test_the_own_default_of_a_refused_option_passes() -> None:
    words = [
        "--autotune_level",
        "0",
        "--event-log-handler",
        "null",
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ]
    assert request(*words).notices == ()


@pytest.mark.parametrize(
    "words",
    [
        ["--monitor-interval", "1"],
        ["--start-method", "fork"],
        ["--run-path"],
        ["--rdzv-conf", "last_call_timeout=5"],
    ],
)
def test_an_option_without_effect_says_so_in_one_line(words: list[str]) -> None:
    (notice,) = request(*words).notices
    assert "has no effect: " in notice
    assert words[0] in notice
    assert "\n" not in notice


def test_a_password_in_the_url_is_never_shown() -> None:
    assert without_password("etcd://u:p@ss:w@h:1") == "etcd://u@h:1"
    with pytest.raises(UsageError) as error:
        settings("--store", "etcd://u:hunter2@h:1/path")
    assert "hunter2" not in str(error.value)


def test_settings_made_in_python_are_checked_too() -> None:
    with pytest.raises(UsageError, match="--max-restarts"):
        RunSettings(script="x", max_restarts=-1)
