from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baguarun.errors import UsageError
from baguarun.launcher import metrics
from baguarun.launcher.metrics import AgentStatus, MetricsServer, render

Talk = Callable[[bytes], Awaitable[bytes]]


def serve(test: Callable[[MetricsServer, AgentStatus, int], Awaitable[None]]) -> None:
    """Run `test` against a server on a free loopback port."""

    async def scenario() -> None:
        status = AgentStatus(job_id="j", node="n1")
        server = MetricsServer(status)
        port = await server.start(0)
        try:
            await asyncio.wait_for(test(server, status, port), 60)
        finally:
            await server.close()

    asyncio.run(scenario())


async def talk(port: int, words: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words)
    if not words.endswith(b"\r\n\r\n"):
        writer.write_eof()
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def value(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"baguarun_{name}{{")]
    return line.rpartition(" ")[2]


def test_the_text_has_every_figure_with_help_and_type() -> None:
    status = AgentStatus(job_id='a"b\\', node="n1", workers_running=2, restarts_total=1, store_up=False)
    status.enter(3, 8, now_s=100.0)
    text = render(status, now_s=112.5)
    found = {
        name: value(text, name)
        for name in (
            *("generation", "world_size", "workers_running"),
            *("restarts_total", "store_up", "seconds_in_generation"),
        )
    }
    assert list(found.values()) == ["3", "8", "2", "1", "0", "12.5"]
    assert text.count("# HELP ") == text.count("# TYPE ") == 6
    assert "# TYPE baguarun_restarts_total counter" in text
    assert 'job="a\\"b\\\\",node="n1"' in text
    assert text.endswith("\n")


def test_before_the_first_world_no_time_has_passed_in_one() -> None:
    assert value(render(AgentStatus(job_id="j", node="n"), now_s=1e6), "seconds_in_generation") == "0.0"


def test_a_scrape_sees_the_status_of_that_moment() -> None:
    async def scenario(_server: MetricsServer, status: AgentStatus, port: int) -> None:
        for generation in (1, 2):
            status.enter(generation, 4, now_s=0.0)
            answer = (await talk(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).decode()
            head, _, body = answer.partition("\r\n\r\n")
            assert head.startswith("HTTP/1.1 200 OK")
            assert f"Content-Length: {len(body)}" in head
            assert value(body, "generation") == str(generation)

    serve(scenario)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 200"),
        (b"hello\r\n\r\n", b"HTTP/1.1 400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /metrics HT", b""),
        (b"", b""),
        (b"A" * 100_000, b""),
    ],
)
def test_whatever_a_stranger_sends_the_next_scrape_is_answered(words: bytes, answer: bytes) -> None:
    async def scenario(_server: MetricsServer, _status: AgentStatus, port: int) -> None:
        found = await talk(port, words)
        assert found.startswith(answer) if answer else found == b""
        assert (await talk(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")

    serve(scenario)


def test_clients_that_say_nothing_are_dropped_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_TIMEOUT_S", 0.2)

    async def scenario(server: MetricsServer, _status: AgentStatus, port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for reader, writer in silent:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()
        assert (await talk(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")

    serve(scenario)


def test_closing_does_not_wait_for_a_silent_client() -> None:
    async def scenario(server: MetricsServer, _status: AgentStatus, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await talk(port, b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(server.close(), 2)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()

    serve(scenario)


def test_a_port_that_is_taken_is_named() -> None:
    async def scenario(_server: MetricsServer, status: AgentStatus, port: int) -> None:
        with pytest.raises(UsageError, match=f"--metrics-port={port}: cannot listen on 127.0.0.1:{port}"):
            await MetricsServer(status).start(port)

    serve(scenario)
