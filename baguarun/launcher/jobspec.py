"""What must be equal on all nodes of a job, as one line and as a digest of it."""

from __future__ import annotations

import hashlib
import shlex

from baguarun.elastic.membership.job import UNLIMITED_RESTARTS, JobSpec
from baguarun.launcher.bagua_net import SECRET
from baguarun.launcher.settings import CommandKind, ElasticMode, RunSettings


def job_spec(settings: RunSettings) -> JobSpec:
    """Command, number of nodes, restarts, mode, algorithm and how workers connect.

    Workers per node, paths and addresses may differ; the script is compared by the words given.
    """
    return JobSpec(
        job_id=settings.job_id,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        max_restarts=settings.max_restarts,
        digest=hashlib.sha256(_canonical(settings).encode()).hexdigest()[:32],
        summary=_summary(settings),
        in_place=settings.elastic is ElasticMode.IN_PLACE,
    )


def _canonical(settings: RunSettings) -> str:
    parts = (
        settings.command_kind.value,
        settings.script,
        settings.script_args,
        settings.min_nodes,
        settings.max_nodes,
        settings.max_restarts,
        settings.elastic.value,
        settings.algorithm,
        settings.bagua_net,
        _has_secret(settings),
    )
    return repr(parts)


def _has_secret(settings: RunSettings) -> bool:
    """Whether the user brings one. Which one is nobody's business: the transport tells when two differ."""
    return bool(settings.environ.get(SECRET))


def _summary(settings: RunSettings) -> str:
    prefix = {CommandKind.SCRIPT: [], CommandKind.MODULE: ["-m"], CommandKind.PROGRAM: ["--no-python"]}
    command = shlex.join([*prefix[settings.command_kind], settings.script, *settings.script_args])
    # A line of a message, not a record: the digest decides.
    command = "".join(c if c.isprintable() else repr(c)[1:-1] for c in command)
    command = command if len(command) <= 200 else command[:197] + "..."
    algorithm = f" --algorithm {settings.algorithm}" if settings.algorithm else ""
    network = " --bagua-net" if settings.bagua_net else ""
    secret = f"{SECRET}=*** " if _has_secret(settings) else ""
    restarts = ""
    if settings.max_restarts != UNLIMITED_RESTARTS:
        restarts = f"--max-restarts {settings.max_restarts} "
    return (
        f"{secret}--nnodes {settings.min_nodes}:{settings.max_nodes} {restarts}"
        f"--elastic {settings.elastic.value}{algorithm}{network} {command}"
    )
