"""`--bagua-net` on two hosts: what workers find in their environment makes the plugin work between them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import START_S, Cluster
from tests.lab import Host
from tests.lab.job import Job, baguarun_command

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(180)]

# Any program will do: this one loads the plugin as NCCL does, by the variables alone.
WORKER = """\
import ctypes, os, pathlib, time
from tests.net.vtable import Net, finish, until

assert (os.environ["NCCL_NET"], os.environ["NCCL_NET_PLUGIN_REF_COUNT"]) == ("BaguaNet", "1")
folder, rank = pathlib.Path(os.environ["MEETING"]), os.environ["RANK"]
(folder / f"secret{rank}").write_text(os.environ["BAGUA_NET_SECRET"])
net = Net(pathlib.Path(os.environ["NCCL_NET_PLUGIN"]))
assert net.name == "BaguaNet" and net.log[0].endswith("with a secret"), net.log
if rank == "0":
    handle, listener = net.listen()
    (folder / "part").write_bytes(handle.raw)
    (folder / "part").rename(folder / "handle")
    comm = until(lambda: net.accept(listener))
    room = ctypes.create_string_buffer(100)
    [size] = finish((net, net.irecv(comm, room)))
    (folder / "message").write_bytes(room.raw[:size])
else:
    until((folder / "handle").exists)
    handle = ctypes.create_string_buffer((folder / "handle").read_bytes(), 128)
    comm = until(lambda: net.connect(handle))
    text = b"from " + os.uname().nodename.encode()
    finish((net, net.isend(comm, ctypes.create_string_buffer(text, len(text)))))
    until((folder / "message").exists)
"""


def plugin_job(cluster: Cluster, where: list[str], tmp_path: Path) -> Job:
    (tmp_path / "worker.py").write_text(WORKER)

    def command(host: Host) -> list[str]:
        words = [*baguarun_command(), "run", "--nnodes", "2", "--bagua-net", *where, "--job-id", "job"]
        if "--master-addr" in where:
            words += ["--node-rank", str(cluster.nodes.index(host))]
        return [*words, "--no-python", sys.executable, str(tmp_path / "worker.py")]

    made = Job(cluster.scratch / "job", command)
    cluster.jobs.append(made)
    return made


@pytest.mark.parametrize("static", [False, True])
def test_workers_of_two_hosts_talk_through_the_plugin_with_the_job_s_secret(
    cluster: Cluster, tmp_path: Path, static: bool
) -> None:
    a, b, _ = cluster.nodes
    where = ["--master-addr", a.address] if static else ["--store", cluster.etcd.url]
    # Without a store nobody can hand a secret round: the user does.
    settings = {"BAGUA_NET_SECRET": "the user's own"} if static else {}
    with plugin_job(cluster, where, tmp_path) as job:
        job.start(a, b, env={"MEETING": str(tmp_path), "NCCL_SOCKET_IFNAME": "eth0", **settings})
        assert [job.wait_for_exit(host, START_S) for host in (a, b)] == [0, 0], job.logs()
        sender = next(host for host in (a, b) if f"from {host.name}" == (tmp_path / "message").read_text())
        assert sender == b or not static
        secrets = {(tmp_path / f"secret{rank}").read_text() for rank in (0, 1)}
        assert len(secrets) == 1
        assert secrets == {"the user's own"} or not static
        for host in (a, b):
            output = job.output(host)
            assert output.count('look for a line with "NET/BaguaNet : using"') == 1
            assert not any(secret in output for secret in secrets)
