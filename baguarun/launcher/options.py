"""The options of `baguarun run`, one table: parsing, environment, help and refusals all follow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: how it is spelled, where its default may come from, and its line of help."""

    name: str
    """Long name without dashes; the variable is `BAGUARUN_` and this, upper case."""
    metavar: str = ""
    """What the value looks like; empty for a switch."""
    group: str
    help: str = ""
    """One line for `--help`."""
    short: str = ""
    alias: str = ""
    """A second long name."""
    pet: str = ""
    """torchrun's variable for it, without `PET_`; empty where torchrun reads none."""
    no_effect: str = ""
    """Why it changes nothing here; listed, and printed when it is given. For pure tuning knobs only."""
    refusal: str = ""
    """Why it is refused, and what to do instead; such an option is not listed by `--help`."""
    harmless: str = ""
    """The one value of a refused option that asks for nothing."""

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


_AUTOTUNE = (
    "not here: there is no autotune service, and buckets have the sizes that measured best; leave it out"
)
_SSH = (
    "not here: nothing is started over ssh; start this on each node: baguarun run --nnodes N "
    "--rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id JOB SCRIPT, or name an etcd by --store "
    "(docs/bagua.md)"
)

WORKERS, NODES, ELASTIC, PROGRAM, OUTPUT, TORCHRUN = (
    "Workers",
    "Nodes and where they meet",
    "Failures and elasticity",
    "The program",
    "Output",
    "Understood for torchrun's sake",
)
BAGUA = "Understood for Bagua's sake"
"""All refused, so `--help` has no such group."""
GROUPS = (WORKERS, NODES, ELASTIC, PROGRAM, OUTPUT, TORCHRUN)

OPTIONS: tuple[Option, ...] = (
    Option(
        name="nproc-per-node",
        metavar="N|gpu|cpu|auto",
        group=WORKERS,
        pet="NPROC_PER_NODE",
        help="workers on this node (1): a number, one per GPU or CPU, or by what is there",
    ),
    Option(
        name="bind",
        metavar="node|none",
        group=WORKERS,
        alias="numa-binding",
        help="keep workers on the CPUs next to their GPU (node)",
    ),
    Option(
        name="algorithm",
        metavar="NAME",
        group=WORKERS,
        help="algorithm where the script names none: gradient_allreduce, bytegrad",
    ),
    Option(
        name="bagua-net",
        group=WORKERS,
        help="let NCCL send over several TCP streams: loads our network plugin",
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
        help="etcd where they meet: etcd://host:2379[,host:2379], etcds:// for TLS",
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
        help="static job: which node this is; else the place it would like",
    ),
    Option(
        name="local-addr",
        metavar="ADDR",
        group=NODES,
        pet="LOCAL_ADDR",
        help="address at which the others reach this node (found by routing)",
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
        help="what happens to workers when others come or go (restart)",
    ),
    Option(
        name="spares",
        metavar="N",
        group=ELASTIC,
        help="in place: workers per node that wait, warm, to replace lost ones (0)",
    ),
    Option(
        name="hang-timeout",
        metavar="auto|off|SECONDS",
        group=ELASTIC,
        help="in place: how long a step may take (auto: by the steps before, at least 60)",
    ),
    Option(
        name="on-hang",
        metavar="report|remove",
        group=ELASTIC,
        help="in place: what happens to the worker whose step takes longer (report)",
    ),
    Option(
        name="max-restarts",
        metavar="N",
        group=ELASTIC,
        pet="MAX_RESTARTS",
        help="worker failures that the job survives (0; in place: any, while it gets on)",
    ),
    Option(
        name="detect-timeout",
        metavar="SECONDS",
        group=ELASTIC,
        help="a node silent for this long is lost; other waits follow from it (5)",
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
        name="timeline",
        metavar="FILE",
        group=OUTPUT,
        help="record compute, codecs and messages of every bucket, for ui.perfetto.dev",
    ),
    Option(
        name="monitor-interval",
        metavar="SECONDS",
        group=TORCHRUN,
        pet="MONITOR_INTERVAL",
        no_effect="a worker's end is seen at once",
    ),
    Option(
        name="start-method",
        metavar="METHOD",
        group=TORCHRUN,
        pet="START_METHOD",
        no_effect="every worker is a fresh process",
    ),
    Option(
        name="run-path",
        group=TORCHRUN,
        pet="RUN_PATH",
        no_effect="the script runs in a fresh Python anyway",
    ),
    # Known to torchrun or to Bagua's launchers, or planned: answered, never ignored.
    Option(
        name="signals-to-handle",
        metavar="LIST",
        group=TORCHRUN,
        pet="SIGNALS_TO_HANDLE",
        harmless="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        refusal="not here: the agent acts on SIGTERM, SIGINT and SIGHUP; send one of these",
    ),
    Option(
        name="event-log-handler",
        metavar="NAME",
        group=TORCHRUN,
        pet="EVENT_LOG_HANDLER",
        harmless="null",
        refusal="not here: read --metrics-port or the log",
    ),
    Option(
        name="logs-specs",
        metavar="NAME",
        group=TORCHRUN,
        harmless="default",
        refusal="not here: use --log-dir, --tee and --redirects",
    ),
    Option(
        name="duplicate-stdout-filters",
        metavar="LIST",
        group=TORCHRUN,
        pet="DUPLICATE_STDOUT_FILTERS",
        refusal="not here: use --tee 1 and filter the files",
    ),
    Option(
        name="duplicate-stderr-filters",
        metavar="LIST",
        group=TORCHRUN,
        pet="DUPLICATE_STDERR_FILTERS",
        refusal="not here: use --tee 2 and filter the files",
    ),
    Option(
        name="virtual-local-rank",
        group=TORCHRUN,
        pet="VIRTUAL_LOCAL_RANK",
        refusal="not here: every worker sees all devices; take yours by LOCAL_RANK",
    ),
    Option(name="host-list", metavar="HOST,...", group=BAGUA, refusal=_SSH),
    Option(name="ssh-port", metavar="PORT", group=BAGUA, refusal=_SSH),
    Option(name="autotune-level", metavar="N", group=BAGUA, harmless="0", refusal=_AUTOTUNE),
    Option(name="autotune-max-samples", metavar="N", group=BAGUA, refusal=_AUTOTUNE),
    Option(name="autotune-sampling-confidence-time", metavar="SECONDS", group=BAGUA, refusal=_AUTOTUNE),
    Option(name="autotune-warmup-time", metavar="SECONDS", group=BAGUA, refusal=_AUTOTUNE),
    Option(name="is-output-autotune-log", group=BAGUA, refusal=_AUTOTUNE),
    Option(name="bagua-service-port", metavar="PORT", group=BAGUA, refusal=_AUTOTUNE),
    Option(
        name="default-bucket-size",
        metavar="BYTES",
        group=BAGUA,
        refusal="not here: buckets have the sizes that measured best; in the script, "
        "DistributedDataParallel(bucket_cap_mb=...)",
    ),
    Option(name="report-metrics", group=BAGUA, refusal="not here: use --metrics-port"),
    Option(
        name="set-additional-flag",
        group=BAGUA,
        refusal="not here: scripts get no --local_rank; read LOCAL_RANK",
    ),
    Option(name="enable-bagua-net", group=BAGUA, refusal="not here: use --bagua-net"),
)


def listed(group: str) -> Iterator[Option]:
    """The options of one group that `--help` shows."""
    return (option for option in OPTIONS if option.group == group and not option.refusal)
