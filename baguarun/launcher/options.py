"""The options of `baguarun run` as one table, and the reading of a command line and an environment by it.

A reader of our own, because the rules differ from argparse's where it matters: options end at the script
(argparse takes a `--` out of the script's arguments), every value knows where it came from (flag or
variable), and both spellings `--max-restarts` and `--max_restarts` are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baguarun.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: how it is spelled, where its default may come from, and its line of help."""

    name: str
    """Long name without dashes; the variable is `BAGUARUN_` and this, upper case."""
    metavar: str = ""
    """What the value looks like; empty for a switch."""
    help: str
    """One line for `--help`; empty for an option that is understood only to be answered."""
    group: str
    short: str = ""
    alias: str = ""
    """A second long name."""
    pet: str = ""
    """torchrun's variable for it, without `PET_`; empty where torchrun reads none."""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables that set it, strongest first."""
        own = f"BAGUARUN_{self.name.replace('-', '_').upper()}"
        return (own, f"PET_{self.pet}") if self.pet else (own,)


@dataclass(frozen=True)
class Given:
    """A value as the user gave it, and where: `--nnodes`, `BAGUARUN_NNODES` or `PET_NNODES`."""

    text: str
    source: str


@dataclass(frozen=True)
class CommandLine:
    """A command line taken apart: options by name, then the script and what belongs to it."""

    given: Mapping[str, Given] = field(default_factory=dict)
    script: str | None = None
    script_args: tuple[str, ...] = ()
    help_wanted: bool = False


WORKERS, NODES, ELASTIC, PROGRAM, OUTPUT, TORCHRUN = (
    "Workers",
    "Nodes and where they meet",
    "Failures and elasticity",
    "The program",
    "Output",
    "Understood for torchrun's sake",
)
GROUPS = (WORKERS, NODES, ELASTIC, PROGRAM, OUTPUT, TORCHRUN)

OPTIONS: tuple[Option, ...] = (
    Option(
        name="nproc-per-node",
        metavar="N|gpu|cpu|auto",
        group=WORKERS,
        pet="NPROC_PER_NODE",
        help="workers on this node (1); gpu: one per GPU, cpu: one per CPU, auto: gpu if there is one",
    ),
    Option(
        name="bind",
        metavar="node|exclusive|none",
        group=WORKERS,
        alias="numa-binding",
        help="keep each worker on the CPUs next to its GPU (node)",
    ),
    Option(
        name="algorithm",
        metavar="NAME",
        group=WORKERS,
        help="communication algorithm where the script names none, as gradient_allreduce or bytegrad",
    ),
    Option(name="role", metavar="NAME", group=WORKERS, pet="ROLE", help="ROLE_NAME of the workers (default)"),
    Option(
        name="nnodes",
        metavar="N|MIN:MAX",
        group=NODES,
        pet="NNODES",
        help="nodes, or the fewest and the most that the job may have (1)",
    ),
    Option(
        name="store",
        metavar="URL",
        group=NODES,
        help="etcd where the nodes meet: etcd://host:2379[,host:2379], etcds:// for TLS",
    ),
    Option(
        name="job-id",
        metavar="ID",
        group=NODES,
        alias="rdzv-id",
        pet="RDZV_ID",
        help="name of the job, the same on all its nodes",
    ),
    Option(
        name="rdzv-backend",
        metavar="c10d|etcd|static",
        group=NODES,
        pet="RDZV_BACKEND",
        help="torchrun's way to say where the nodes meet",
    ),
    Option(
        name="rdzv-endpoint",
        metavar="HOST[:PORT]",
        group=NODES,
        pet="RDZV_ENDPOINT",
        help="meet at this node, which starts a private etcd there (port 29400)",
    ),
    Option(
        name="rdzv-conf",
        metavar="K=V,...",
        group=NODES,
        pet="RDZV_CONF",
        help="join_timeout, keep_alive_interval, keep_alive_max_attempt, is_host",
    ),
    Option(
        name="standalone",
        group=NODES,
        pet="STANDALONE",
        help="one node, nothing to meet (the default when --nnodes is 1)",
    ),
    Option(
        name="master-addr",
        metavar="HOST",
        group=NODES,
        pet="MASTER_ADDR",
        help="static job: where rank 0 runs",
    ),
    Option(
        name="master-port",
        metavar="PORT",
        group=NODES,
        pet="MASTER_PORT",
        help="static job: port of rank 0 (29500)",
    ),
    Option(
        name="node-rank",
        metavar="N",
        group=NODES,
        pet="NODE_RANK",
        help="static job: which node this is; else the place that this node would like",
    ),
    Option(
        name="local-addr",
        metavar="ADDR",
        group=NODES,
        pet="LOCAL_ADDR",
        help="address by which the other nodes reach this one (found by routing)",
    ),
    Option(
        name="node-name",
        metavar="NAME",
        group=NODES,
        help="name of this node in output and reports (its host name)",
    ),
    Option(
        name="elastic",
        metavar="restart|in-place",
        group=ELASTIC,
        help="what happens to workers when nodes come or go (restart)",
    ),
    Option(
        name="max-restarts",
        metavar="N",
        group=ELASTIC,
        pet="MAX_RESTARTS",
        help="failures that the job as a whole survives by starting its workers again (0)",
    ),
    Option(
        name="detect-timeout",
        metavar="SECONDS",
        group=ELASTIC,
        help="a node unheard of for this long is lost; other waits follow from it (5)",
    ),
    Option(
        name="join-timeout",
        metavar="SECONDS",
        group=ELASTIC,
        help="give up when too few nodes came in this time (600)",
    ),
    Option(
        name="shutdown-timeout",
        metavar="SECONDS",
        group=ELASTIC,
        pet="SHUTDOWN_TIMEOUT",
        help="time for workers to end after SIGTERM, before SIGKILL (30)",
    ),
    Option(
        name="module",
        short="m",
        group=PROGRAM,
        pet="MODULE",
        help="SCRIPT is a module, run as by `python -m`",
    ),
    Option(
        name="no-python",
        group=PROGRAM,
        pet="NO_PYTHON",
        help="SCRIPT is a program of its own, run without Python",
    ),
    Option(
        name="log-dir",
        metavar="DIR",
        group=OUTPUT,
        pet="LOG_DIR",
        help="keep every worker's output in files here",
    ),
    Option(
        name="tee",
        short="t",
        metavar="0-3|R:0-3,...",
        group=OUTPUT,
        pet="TEE",
        help="streams to files and to the console: 1 stdout, 2 stderr, 3 both",
    ),
    Option(
        name="redirects",
        short="r",
        metavar="0-3|R:0-3,...",
        group=OUTPUT,
        pet="REDIRECTS",
        help="streams to files only",
    ),
    Option(
        name="local-ranks-filter",
        metavar="R,R,...",
        group=OUTPUT,
        pet="LOCAL_RANKS_FILTER",
        help="show only these local ranks on the console",
    ),
    Option(
        name="metrics-port",
        metavar="PORT",
        group=OUTPUT,
        help="serve Prometheus metrics on 127.0.0.1 (0: a free port, printed)",
    ),
    Option(
        name="monitor-interval",
        metavar="SECONDS",
        group=TORCHRUN,
        pet="MONITOR_INTERVAL",
        help="no effect: a worker's end is seen at once",
    ),
    Option(
        name="start-method",
        metavar="METHOD",
        group=TORCHRUN,
        pet="START_METHOD",
        help="no effect: every worker is a fresh process",
    ),
    Option(
        name="run-path",
        group=TORCHRUN,
        pet="RUN_PATH",
        help="no effect: SCRIPT runs in a fresh Python anyway",
    ),
    # Known to torchrun or planned, and answered with what to do instead.
    Option(name="signals-to-handle", metavar="LIST", group=TORCHRUN, pet="SIGNALS_TO_HANDLE", help=""),
    Option(name="event-log-handler", metavar="NAME", group=TORCHRUN, pet="EVENT_LOG_HANDLER", help=""),
    Option(name="logs-specs", metavar="NAME", group=TORCHRUN, help=""),
    Option(
        name="duplicate-stdout-filters",
        metavar="LIST",
        group=TORCHRUN,
        pet="DUPLICATE_STDOUT_FILTERS",
        help="",
    ),
    Option(
        name="duplicate-stderr-filters",
        metavar="LIST",
        group=TORCHRUN,
        pet="DUPLICATE_STDERR_FILTERS",
        help="",
    ),
    Option(name="virtual-local-rank", group=TORCHRUN, pet="VIRTUAL_LOCAL_RANK", help=""),
    Option(name="spares", metavar="N", group=ELASTIC, help=""),
    Option(name="bagua-net", group=WORKERS, help=""),
    Option(name="timeline", metavar="FILE", group=OUTPUT, help=""),
)

_BY_NAME = {name: option for option in OPTIONS for name in (option.name, option.alias) if name}
_BY_SHORT = {option.short: option for option in OPTIONS if option.short}


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Take apart what follows `baguarun run`. Options end at the first word that is none, or after `--`."""
    given: dict[str, Given] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        if word in ("-h", "--help"):
            return CommandLine(help_wanted=True)
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        option, text = _split(word)
        position += 1
        if option.is_switch:
            if text is not None:
                raise UsageError(f"{word}: want {option.flag} without a value")
            text = "1"
        elif text is None:
            following = argv[position] if position < len(argv) else None
            if following is None or _looks_like_option(following):
                raise UsageError(f"{word}: want a value after it: {option.flag} {option.metavar}")
            text = following
            position += 1
        given[option.name] = Given(text, option.flag)
    rest = tuple(argv[position:])
    return CommandLine(given, rest[0] if rest else None, rest[1:])


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Options set by variables; an empty variable counts as unset, a switch is set by 1/true/yes/on."""
    given: dict[str, Given] = {}
    for option in OPTIONS:
        for variable in option.variables:
            text = environ.get(variable, "")
            if text:
                if not option.is_switch or _truth(variable, text):
                    given[option.name] = Given(text, variable)
                break
    return given


def listed(group: str) -> Iterator[Option]:
    """The options of one group that `--help` shows."""
    return (option for option in OPTIONS if option.group == group and option.help)


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing when no known word is near."""
    from difflib import get_close_matches

    found = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _split(word: str) -> tuple[Option, str | None]:
    if word.startswith("--"):
        name, equals, text = word[2:].partition("=")
        option = _BY_NAME.get(name.replace("_", "-"))
        if option is not None:
            return option, text if equals else None
    else:
        option = _BY_SHORT.get(word[1:2])
        if option is not None and (len(word) == 2 or not option.is_switch):
            return option, word[2:].removeprefix("=") or None
    name = word.partition("=")[0]
    hint = nearest(name.replace("_", "-"), [f"--{known}" for known in _BY_NAME])
    raise UsageError(
        f"{name}: unknown flag{hint or '; `baguarun run --help` lists them'} (a script's own flags come after the script)"
    )


def _looks_like_option(word: str) -> bool:
    name = word[2:].partition("=")[0].replace("_", "-")
    return (word.startswith("--") and name in _BY_NAME) or (len(word) == 2 and word[1:] in _BY_SHORT)


def _truth(source: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{source}={text}: want 1 or 0")
