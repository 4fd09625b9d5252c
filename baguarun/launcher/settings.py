"""What one `baguarun run` was asked to do: flags over environment over defaults, merged and checked here.

This is the agent side's only reader of the environment.
"""

from __future__ import annotations

import enum
import math
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baguarun.elastic.membership.job import UNLIMITED_RESTARTS
from baguarun.errors import UsageError
from baguarun.launcher import rdzv_conf
from baguarun.launcher.binding import BindingPolicy
from baguarun.launcher.command_line import (
    CommandLine,
    Given,
    is_digits,
    read_command_line,
    read_environment,
)
from baguarun.launcher.options import OPTIONS
from baguarun.launcher.step_clock import HangLimit

NO_JOB_ID = "none"
"""torchrun's name for a job that got none; fine as long as the job has its store to itself."""


class CommandKind(enum.Enum):
    """How `script` is started."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


class ElasticMode(enum.Enum):
    """What happens to workers when the World changes."""

    RESTART = "restart"
    IN_PLACE = "in-place"


class OnHang(enum.Enum):
    """What happens to a worker that hangs; its stacks are written in any case."""

    REMOVE = "remove"
    REPORT = "report"


class RdzvBackend(enum.Enum):
    """torchrun's rendezvous backends, as far as they have a meaning here."""

    C10D = "c10d"
    ETCD = "etcd"
    ETCD_V2 = "etcd-v2"
    STATIC = "static"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One node's part in a job. Checked when made: an impossible value is a `UsageError` naming its flag."""

    script: str
    """Script, module or program, as given."""
    script_args: tuple[str, ...] = ()
    """What follows it, untouched."""
    command_kind: CommandKind = CommandKind.SCRIPT
    """`-m` and `--no-python` say that `script` is a module or a program."""
    python: str = sys.executable
    """Interpreter for the workers; `$PYTHON_EXEC` if set, as in torchrun."""

    nproc_per_node: str = "1"
    """Workers on this node: a number, or `gpu`, `cpu`, `auto` to be resolved by `binding.resolve_slots`."""
    bind: BindingPolicy = BindingPolicy.NUMA
    """CPUs that workers are kept on; no effect on a machine with one NUMA node."""
    algorithm: str | None = None
    """Handed to workers as BAGUARUN_ALGORITHM; None leaves it to the script."""
    bagua_net: bool = False
    """Let NCCL in the workers use our network plugin."""
    role: str = "default"
    """ROLE_NAME of the workers; otherwise unused."""

    min_nodes: int = 1
    """Fewest nodes that the job runs on."""
    max_nodes: int = 1
    """Most nodes that the job runs on; more wait as standby."""
    job_id: str = NO_JOB_ID
    """Name of the job, part of store keys and of log paths, the same on all its nodes."""
    store: str | None = None
    """URL of an etcd of one's own: `etcd://host:port[,host:port]`, `etcds://` for TLS."""
    store_password: str | None = field(default=None, repr=False)
    """From BAGUARUN_STORE_PASSWORD alone: a flag would show it to every user of the machine."""
    etcd_binary: str | None = None
    """From BAGUARUN_ETCD: the etcd to start where this agent hosts the store; None searches for one."""
    standalone: bool = False
    """One node with a store of its own, said aloud."""
    rdzv_backend: RdzvBackend | None = None
    """torchrun's choice of meeting place; None when not given."""
    rdzv_endpoint: str | None = None
    """torchrun's meeting place, `host[:port]`, or several of an etcd's."""
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    """torchrun's further settings, known keys only (see `rdzv_conf.py`)."""
    master_addr: str | None = None
    """Static job: host of rank 0."""
    master_port: int | None = None
    """Static job: port of rank 0's TCPStore; None means torchrun's 29500."""
    node_rank: int | None = None
    """Static job: this node's place. Else a wish, honoured in the first World."""
    local_addr: str | None = None
    """Address at which other nodes reach this one; None finds it by routing."""
    node_name: str = "localhost"
    """This node in output prefixes and reports; its host name unless given."""

    elastic: ElasticMode = ElasticMode.RESTART
    """What happens to workers when the World changes."""
    max_restarts: int = 0
    """Failures that the whole job survives, counted for the job and not per node. In place, unless it is
    given, only failing without progress ends the job."""
    spares: int = 0
    """In place: workers beyond the node's slots that wait to take the place of a lost one."""
    hang_timeout: str | None = None
    """In place: `auto`, `off` or seconds that a step may take; None means `auto`."""
    on_hang: OnHang | None = None
    """In place: what happens to a worker whose step takes longer; None means that it is reported."""
    detect_timeout_s: float = 5.0
    """Silence after which a node is lost; lease, abort and settle times are derived from it."""
    join_timeout_s: float = 600.0
    """How long the job waits for `min_nodes`; in place also for a network between workers that all live."""
    shutdown_timeout_s: float = 30.0
    """Grace between SIGTERM and SIGKILL: time to write a checkpoint."""

    log_dir: str | None = None
    """Base folder for the workers' output; None keeps none unless `tee` or `redirects` ask for it."""
    tee: str = "0"
    """Streams to files and console, torchrun's notation: 0-3, or `local_rank:0-3` joined by commas."""
    redirects: str = "0"
    """Streams to files only, same notation."""
    local_ranks_filter: str = ""
    """Local ranks shown on the console, joined by commas; empty shows all. Files are not affected."""
    metrics_port: int | None = None
    """Port of the Prometheus endpoint, 0 for any; None serves none."""
    timeline: str | None = None
    """File for what the workers' engines did when; None records nothing."""

    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The agent's environment, which the workers inherit."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_names()
        self._check_times()
        self._check_output()
        self._check_in_place()

    def _check_sizes(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise UsageError(
                f"--nnodes={self.min_nodes}:{self.max_nodes}: want 1 <= MIN <= MAX; "
                "write the fewest nodes first, as --nnodes 1:4"
            )
        slots = self.nproc_per_node
        if slots not in ("gpu", "cpu", "auto") and not (is_digits(slots) and int(slots) >= 1):
            raise UsageError(f"--nproc-per-node={slots}: want a number from 1, or gpu, cpu or auto")
        if self.node_rank is not None and not 0 <= self.node_rank < self.max_nodes:
            raise UsageError(
                f"--node-rank={self.node_rank}: want 0 <= N < {self.max_nodes}, the number of nodes; "
                "give --nnodes too, or another rank"
            )
        if self.max_restarts < 0:
            raise UsageError(
                f"--max-restarts={self.max_restarts}: want 0 or more; 0 ends the job at its first failure"
            )

    @property
    def hang_limit(self) -> HangLimit | None:
        """In place: how long a step may take; None: nobody looks."""
        if self.hang_timeout in (None, "auto", "off"):
            return None if self.hang_timeout == "off" else HangLimit()
        return HangLimit(fixed_s=Given(self.hang_timeout, "--hang-timeout").seconds())

    def _check_in_place(self) -> None:
        limit = self.hang_limit
        if limit is not None and limit.fixed_s is not None:
            _want_seconds("--hang-timeout", limit.fixed_s, at_least=1.0)
        if self.spares < 0:
            raise UsageError(f"--spares={self.spares}: want 0 or more")
        if self.elastic is not ElasticMode.IN_PLACE:
            if self.spares:
                raise UsageError(
                    f"--spares={self.spares}: want --elastic in-place with it; a restart needs no spares"
                )
            for flag, value in (
                ("--hang-timeout", self.hang_timeout),
                ("--on-hang", self.on_hang and self.on_hang.value),
            ):
                if value is not None:
                    raise UsageError(
                        f"{flag}={value}: want --elastic in-place with it; other workers do not tell their "
                        "agent when they have done a step"
                    )
        elif self.command_kind is CommandKind.PROGRAM:
            raise UsageError(
                "--elastic=in-place, --no-python: want one of them; a worker that is resized in place is a "
                "Python script that calls baguarun.elastic.run"
            )

    def _check_names(self) -> None:
        want_word("--job-id", self.job_id)
        want_word("--node-name", self.node_name)
        want_word("--role", self.role)
        if self.algorithm is not None and not re.fullmatch(r"[a-z][a-z0-9_]*", self.algorithm):
            raise UsageError(
                f"--algorithm={self.algorithm}: want a name in lower case, as gradient_allreduce or bytegrad"
            )
        if self.store is not None:
            from baguarun.elastic.membership.store_url import StoreUrl

            try:
                StoreUrl.parse(self.store, password=self.store_password)
            except UsageError as error:
                raise UsageError(f"--store: {error}") from error

    def _check_times(self) -> None:
        _want_seconds("--detect-timeout", self.detect_timeout_s, at_least=0.5)
        _want_seconds("--join-timeout", self.join_timeout_s, at_least=1.0)
        _want_seconds("--shutdown-timeout", self.shutdown_timeout_s, at_least=0.0)

    def _check_output(self) -> None:
        for flag, value in (("--tee", self.tee), ("--redirects", self.redirects)):
            if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", value):
                raise UsageError(
                    f"{flag}={value}: want 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
                    "or one per local rank, as 0:3,1:2"
                )
        if self.local_ranks_filter and not re.fullmatch(r"\d+(,\d+)*", self.local_ranks_filter):
            raise UsageError(
                f"--local-ranks-filter={self.local_ranks_filter}: want local ranks joined by commas, as 0,1"
            )
        for flag, port in (("--master-port", self.master_port), ("--metrics-port", self.metrics_port)):
            if port is not None and not 0 <= port <= 65535:
                raise UsageError(f"{flag}={port}: want a port, 0 to 65535")

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.min_nodes < self.max_nodes


@dataclass(frozen=True)
class RunRequest:
    """A command line understood: the settings, and what to tell the user about them."""

    settings: RunSettings
    notices: tuple[str, ...]
    """One line for each option that was given and has no effect here."""
    given: Mapping[str, Given]
    """Options that were given, by name, with where each came from."""


def read_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> RunRequest | None:
    """What follows `baguarun run`, merged with the environment; None when help was asked for."""
    environ = dict(os.environ if environ is None else environ)
    line = read_command_line(argv)
    if line.help_wanted:
        return None
    given = {**read_environment(environ), **line.given}
    try:
        notices = _answer_foreign_options(given)
        settings = RunSettings(**_merge(given, line, environ))
    except UsageError as error:
        raise UsageError(with_sources(str(error), given)) from error
    return RunRequest(settings, (*notices, *rdzv_conf.no_effect_notices(settings.rdzv_conf)), given)


def read_store_options(line: Mapping[str, Given]) -> tuple[dict[str, Given], str | None]:
    """For commands about a running job: `line` over the environment's options, and the store's password."""
    environ = dict(os.environ)
    return {**read_environment(environ), **line}, environ.get("BAGUARUN_STORE_PASSWORD") or None


def with_sources(message: str, given: Mapping[str, Given]) -> str:
    """The message, and for every flag in it that was set by a variable the name of that variable."""
    named = set(re.findall(r"--[a-z-]+", message))
    variables = [
        f"{option.flag} is set by {given[option.name].source}"
        for option in OPTIONS
        if option.flag in named and option.name in given and given[option.name].source != option.flag
    ]
    return f"{message} ({', '.join(variables)})" if variables else message


def without_password(url: str) -> str:
    """A store URL as it may be shown."""
    scheme, separator, rest = url.partition("://")
    login, at, tail = rest.rpartition("@")
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{tail}"


def _answer_foreign_options(given: Mapping[str, Given]) -> list[str]:
    """Refuse what torchrun offers and this does not; a notice for each option without effect."""
    notices = []
    for option in OPTIONS:
        value = given.get(option.name)
        if value is None:
            continue
        if option.refusal and not (option.harmless and value.text == option.harmless):
            raise UsageError(f"{value.source}: {option.refusal}")
        if option.no_effect:
            notices.append(f"{value.source} has no effect: {option.no_effect}")
    return notices


def _merge(given: Mapping[str, Given], line: CommandLine, environ: Mapping[str, str]) -> dict[str, Any]:
    """Constructor arguments of `RunSettings`: what was given, the rest left to its defaults."""
    if line.script is None:
        raise UsageError(
            "no script: want baguarun run [options] SCRIPT [its arguments]; see baguarun run --help"
        )
    values: dict[str, Any] = {
        "script": line.script,
        "script_args": line.script_args,
        "command_kind": _command_kind(given),
        "environ": environ,
        "node_name": given["node-name"].text if "node-name" in given else socket.gethostname(),
    }
    if environ.get("PYTHON_EXEC"):
        values["python"] = environ["PYTHON_EXEC"]
    values["store_password"] = environ.get("BAGUARUN_STORE_PASSWORD") or None
    values["etcd_binary"] = environ.get("BAGUARUN_ETCD") or None
    for name in _TEXTS:
        if name in given:
            values[name.replace("-", "_")] = given[name].text
    for name in _NUMBERS:
        if name in given:
            values[name.replace("-", "_")] = given[name].integer()
    for name in _SECONDS:
        if name in given:
            values[name.replace("-", "_") + "_s"] = given[name].seconds()
    for name, kind in _CHOICES.items():
        if name in given:
            values[name.replace("-", "_")] = given[name].choice(kind)
    if values.get("elastic") is ElasticMode.IN_PLACE:
        values.setdefault("max_restarts", UNLIMITED_RESTARTS)
    values["standalone"] = "standalone" in given
    values["bagua_net"] = "bagua-net" in given
    if "bind" in given:
        values["bind"] = _binding(given["bind"])
    if "nnodes" in given:
        values["min_nodes"], values["max_nodes"] = _node_range(given["nnodes"])
    _merge_rdzv_conf(values, given)
    if "job_id" not in values and values.get("max_nodes", 1) == 1:
        values["job_id"] = f"run-{os.urandom(4).hex()}"
    return values


_TEXTS = (
    "nproc-per-node",
    "algorithm",
    "role",
    "job-id",
    "store",
    "rdzv-endpoint",
    "master-addr",
    "local-addr",
    "log-dir",
    "tee",
    "redirects",
    "local-ranks-filter",
    "timeline",
    "hang-timeout",
)
_NUMBERS = ("master-port", "node-rank", "max-restarts", "metrics-port", "spares")
_SECONDS = ("detect-timeout", "join-timeout", "shutdown-timeout")
_CHOICES: Mapping[str, type[enum.Enum]] = {
    "elastic": ElasticMode,
    "on-hang": OnHang,
    "rdzv-backend": RdzvBackend,
}


def _command_kind(given: Mapping[str, Given]) -> CommandKind:
    if "no-python" not in given:
        return CommandKind.MODULE if "module" in given else CommandKind.SCRIPT
    for other in ("module", "run-path"):
        if other in given:
            raise UsageError(
                f"--no-python, --{other}: want one of them; --no-python starts the program itself"
            )
    return CommandKind.PROGRAM


def _binding(value: Given) -> BindingPolicy:
    """`node`, as torchrun calls it, or `none`; torchrun's finer policies are not built."""
    policies = {"node": BindingPolicy.NUMA, "none": BindingPolicy.NONE}
    if value.text not in policies:
        raise UsageError(
            f"{value.source}={value.text}: want {' or '.join(policies)}; others are not built yet"
        )
    return policies[value.text]


def _merge_rdzv_conf(values: dict[str, Any], given: Mapping[str, Given]) -> None:
    if "rdzv-conf" not in given:
        return
    for_etcd = values.get("rdzv_backend") in (RdzvBackend.ETCD, RdzvBackend.ETCD_V2)
    conf = rdzv_conf.parse_rdzv_conf(given["rdzv-conf"].text, for_etcd=for_etcd)
    values["rdzv_conf"] = conf
    for name, seconds in (
        ("join_timeout_s", rdzv_conf.join_timeout_s(conf)),
        ("detect_timeout_s", rdzv_conf.detect_timeout_s(conf)),
    ):
        if seconds is not None and values.setdefault(name, seconds) != seconds:
            flag = "--" + name.removesuffix("_s").replace("_", "-")
            raise UsageError(
                f"{flag}={values[name]:g}, --rdzv-conf={given['rdzv-conf'].text}: "
                f"want one of them; the latter means {seconds:g} s"
            )


def _node_range(value: Given) -> tuple[int, int]:
    low, colon, high = value.text.partition(":")
    if not is_digits(low) or (colon and not is_digits(high)):
        raise UsageError(f"{value.source}={value.text}: want a number of nodes N, or MIN:MAX")
    return int(low), int(high) if colon else int(low)


def want_word(flag: str, value: str) -> None:
    """Names go into store keys, paths and line prefixes: one word that is hostile to none of them."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=-]{0,127}", value):
        raise UsageError(
            f"{flag}={value}: want 1 to 128 letters, digits or _.:@+=-, the first a letter, digit or _"
        )


def _want_seconds(flag: str, value: float, *, at_least: float) -> None:
    if not (math.isfinite(value) and value >= at_least):
        raise UsageError(f"{flag}={value:g}: want seconds, at least {at_least:g}")
