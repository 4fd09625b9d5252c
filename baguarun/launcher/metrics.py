"""The agent's state as Prometheus text, over a tiny HTTP endpoint on the agent's own event loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from baguarun.errors import UsageError

_REQUEST_TIMEOUT_S = 5.0
_MAX_REQUEST_BYTES = 8192
_MAX_CLIENTS = 16


@dataclass(kw_only=True)
class AgentStatus:
    """What the agent knows of itself; it writes, the endpoint reads. Threads: the agent's event loop."""

    job_id: str
    node: str
    generation: int = 0
    """Generation of the World that runs here, 0 before the first."""
    generation_since_s: float = 0.0
    """`time.monotonic()` at which that World started; 0 before the first."""
    world_size: int = 0
    workers_running: int = 0
    """Workers of this node that are alive."""
    restarts_total: int = 0
    """Restarts charged to the job."""
    store_up: bool = True
    """Whether the store answered last; True for a job without one."""

    def enter(self, generation: int, world_size: int, now_s: float) -> None:
        """A World started; `now_s` by `time.monotonic()`."""
        self.generation, self.world_size, self.generation_since_s = generation, world_size, now_s


def render(status: AgentStatus, now_s: float) -> str:
    """Prometheus text format 0.0.4; `now_s` by `time.monotonic()`."""
    in_generation_s = now_s - status.generation_since_s if status.generation else 0.0
    rows = (
        ("generation", "gauge", "Number of the World that runs on this node.", status.generation),
        ("world_size", "gauge", "Workers in that World.", status.world_size),
        ("workers_running", "gauge", "Workers of this node that are alive.", status.workers_running),
        ("restarts_total", "counter", "Restarts charged to the job.", status.restarts_total),
        ("store_up", "gauge", "Whether the store answers (1) or is out of reach (0).", int(status.store_up)),
        ("seconds_in_generation", "gauge", "Age of the World.", round(in_generation_s, 3)),
    )
    labels = f'job="{_escaped(status.job_id)}",node="{_escaped(status.node)}"'
    lines = []
    for name, kind, text, value in rows:
        full = f"baguarun_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full}{{{labels}}} {value}"]
    return "\n".join(lines) + "\n"


class MetricsServer:
    """Serves `GET /metrics`. Strangers, slow clients and garbage cost a bounded time and nothing else."""

    def __init__(self, status: AgentStatus) -> None:
        self._status = status
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self, port: int, host: str = "127.0.0.1") -> int:
        """Listen; returns the port, which differs from `port` if that was 0. `UsageError` if it is taken."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=_MAX_REQUEST_BYTES)
        except OSError as error:
            raise UsageError(
                f"--metrics-port={port}: cannot listen on {host}:{port} ({error.strerror}); "
                "want a free port, or 0 for any"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and drop the clients that are still there."""
        if self._server is not None:
            self._server.close()
        for task in list(self._clients):
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= _MAX_CLIENTS:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await asyncio.wait_for(self._answer(reader), _REQUEST_TIMEOUT_S)
            writer.write(answer)
            await asyncio.wait_for(writer.drain(), _REQUEST_TIMEOUT_S)
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), _REQUEST_TIMEOUT_S)
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            # A client that went away, talks too long or says nothing: not our trouble.
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):
            return _response("400 Bad Request", "want GET /metrics\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "want GET /metrics\n")
        if words[1].split(b"?")[0] not in (b"/metrics", b"/"):
            return _response("404 Not Found", "want /metrics\n")
        return _response("200 OK", render(self._status, time.monotonic()), with_body=words[0] == b"GET")


def _response(status: str, body: str, *, with_body: bool = True) -> bytes:
    data = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (data if with_body else b"")


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
