from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from baguarun.contract import World
from baguarun.errors import JobFailedError, UsageError
from baguarun.launcher.keeper import Keeper
from baguarun.launcher.logs import Logs, LogSettings
from baguarun.launcher.workers import WorkerCommand, WorkerGroup

TREE = str(Path(__file__).with_name("process_tree.py"))


class Node:
    """Keeper and logs of one agent; its console goes nowhere unless given."""

    def __init__(self, tmp_path: Path, console_fd: int | None = None, log_dir: str | None = None) -> None:
        self.keeper = Keeper.fork()
        null = os.open(os.devnull, os.O_WRONLY) if console_fd is None else console_fd
        settings = LogSettings.from_flags(log_dir=log_dir)
        self.logs = Logs(settings, job_id="job", node="n", stdout_fd=null, stderr_fd=null)
        self._tmp_path = tmp_path

    def error_file(self, local_rank: int) -> str:
        return str(self._tmp_path / "errors" / f"{local_rank}.json")

    async def start(
        self, *scripts: str, first_rank: int = 0, port: int = 29500, env: dict[str, str] | None = None
    ) -> WorkerGroup:
        """One Python worker per script."""
        argvs = [(sys.executable, "-c", textwrap.dedent(script)) for script in scripts]
        return await self.start_commands(*argvs, first_rank=first_rank, port=port, env=env)

    async def start_commands(
        self,
        *argvs: tuple[str, ...],
        first_rank: int = 0,
        port: int = 29500,
        env: dict[str, str] | None = None,
    ) -> WorkerGroup:
        world = World(
            job_id="job",
            generation=3,
            node_rank=0,
            num_nodes=1,
            first_rank=first_rank,
            local_world_size=len(argvs),
            world_size=first_rank + len(argvs),
            master_addr="127.0.0.1",
            master_port=port,
            restart_count=0,
            max_restarts=0,
        )
        commands = [
            WorkerCommand(
                local_rank=local_rank,
                argv=argv,
                env={**(env or os.environ), "TORCHELASTIC_ERROR_FILE": self.error_file(local_rank)},
                error_file=self.error_file(local_rank),
            )
            for local_rank, argv in enumerate(argvs)
        ]
        return await WorkerGroup.start(self.keeper, commands, world=world, node="n", logs=self.logs)

    async def close(self) -> None:
        await self.keeper.close()
        await self.logs.close()


SLEEP = "import time; time.sleep(300)"


def test_workers_that_all_exit_with_0_are_a_success(as_agent, tmp_path):
    async def scenario():
        node = Node(tmp_path)
        group = await node.start_commands(("true",), ("true",), ("sh", "-c", "sleep 0.1"))
        result = await group.wait()
        assert len(set(group.pids)) == 3
        assert await group.stop(0) == ()
        await node.close()
        return result.failure, result.port_in_use

    assert as_agent(scenario) == (None, False)


def test_the_first_failure_has_place_code_traceback_and_log(as_agent, tmp_path):
    async def scenario():
        node = Node(tmp_path, log_dir=str(tmp_path / "logs"))
        group = await node.start(SLEEP, "print('hello')\nraise ValueError('loss is nan')", first_rank=4)
        failure = (await group.wait()).failure
        pid = group.pids[1]
        await group.stop(0)
        await node.close()
        return failure, pid

    failure, pid = as_agent(scenario)
    assert (failure.node, failure.rank, failure.local_rank, failure.generation) == ("n", 5, 1, 3)
    assert (failure.pid, failure.exit_code, failure.signal) == (pid, 1, None)
    assert failure.message == "ValueError: loss is nan"
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert failure.log_path == str(tmp_path / "logs/job/generation-3/rank-5")
    assert (Path(failure.log_path) / "stdout.log").read_text() == "hello\n"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_worker_ended_by_a_signal_is_a_failure_by_that_signal(as_agent, tmp_path, name):
    async def scenario():
        node = Node(tmp_path)
        group = await node.start(SLEEP, f"import os, signal; os.kill(os.getpid(), signal.{name})")
        failure = (await group.wait()).failure
        await group.stop(0)
        await node.close()
        return failure

    failure = as_agent(scenario)
    assert (failure.signal, failure.exit_code) == (signal.Signals[name], None)
    assert failure.process_exit_code == 128 + signal.Signals[name]


def test_an_exception_that_torch_recorded_is_reported_as_recorded(as_agent, tmp_path):
    script = """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise KeyError("recorded")

        main()
    """

    async def scenario():
        node = Node(tmp_path)
        group = await node.start(script)
        failure = (await group.wait()).failure
        await group.stop(0)
        await node.close()
        return failure

    failure = as_agent(scenario)
    assert failure.message == "KeyError: 'recorded'"
    assert "line 6, in main" in failure.traceback


def test_a_worker_that_recorded_first_and_died_later_is_the_cause(as_agent, tmp_path):
    """Its peers fail of it, and their exits are seen earlier than its own."""
    slow = """
        import json, os, time
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": "the cause"}, file)
        time.sleep(0.5)
        raise SystemExit(3)
    """
    quick = """
        import os, time
        while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].replace("1.json", "0.json")):
            time.sleep(0.01)
        time.sleep(0.1)
        raise ConnectionError("peer is gone")
    """

    async def scenario():
        node = Node(tmp_path)
        group = await node.start(slow, quick)
        failure = (await group.wait()).failure
        await group.stop(0)
        await node.close()
        return failure

    failure = as_agent(scenario)
    assert (failure.rank, failure.exit_code, failure.message) == (0, 3, "the cause")


def test_an_error_file_of_an_earlier_generation_is_not_believed(as_agent, tmp_path):
    async def scenario():
        node = Node(tmp_path)
        stale = Path(node.error_file(0))
        stale.parent.mkdir(parents=True)
        stale.write_text('{"message": "old news"}')
        group = await node.start("raise SystemExit(2)")
        failure = (await group.wait()).failure
        await group.stop(0)
        await node.close()
        return failure

    failure = as_agent(scenario)
    assert (failure.exit_code, failure.message) == (2, "")


def test_waiting_can_be_cancelled_and_taken_up_again(as_agent, tmp_path):
    async def scenario():
        node = Node(tmp_path)
        group = await node.start(SLEEP)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(group.wait(), 0.05)
        await group.signal(signal.SIGUSR1)
        failure = (await group.wait()).failure
        await group.stop(0)
        await node.close()
        return failure

    failure = as_agent(scenario)
    assert failure.signal == signal.SIGUSR1


def test_if_one_command_cannot_be_executed_none_stays(as_agent, tmp_path, processes):
    async def scenario():
        node = Node(tmp_path)
        with pytest.raises(UsageError, match="'/no/such/program'"):
            await node.start_commands(("sleep", "300"), ("/no/such/program",), env=processes.env)
        survivors = processes.alive()
        await node.close()
        return survivors

    assert as_agent(scenario) == []


def test_output_written_before_the_end_is_complete_when_stop_returns(as_agent, tmp_path):
    script = "import os\nfor i in range(20000): print(i, flush=i == 19999)\nos.write(2, b'bye'); os._exit(1)"

    async def scenario():
        node = Node(tmp_path, log_dir=str(tmp_path / "logs"))
        group = await node.start(script, script)
        await group.wait()
        await group.stop(30)
        await node.close()

    as_agent(scenario)
    kept = [
        (tmp_path / f"logs/job/generation-3/rank-{rank}/{name}.log").read_text().splitlines()
        for rank in (0, 1)
        for name in ("stdout", "stderr")
    ]
    # One of the two may have been stopped by SIGTERM before it was through.
    complete = [str(i) for i in range(20000)]
    assert [complete, ["bye"]] in (kept[:2], kept[2:])


def test_a_failing_worker_whose_children_hold_its_stderr_is_reported_at_once(as_agent, tmp_path, processes):
    """Stopping ends them; the traceback does not wait for their end of file."""
    script = """
        import os, subprocess, sys
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        raise ValueError("with child")
    """

    async def scenario():
        node = Node(tmp_path)
        group = await node.start(script, env=processes.env)
        failure = (await group.wait()).failure
        assert len(processes.alive()) == 1
        assert await group.stop(30) == ()
        survivors = processes.alive()
        await node.close()
        return failure.message, survivors

    assert as_agent(scenario) == ("ValueError: with child", [])


@pytest.mark.parametrize(("offset", "in_use"), [(0, True), (1, False)])
def test_a_store_that_cannot_have_its_port_is_told_from_other_failures(as_agent, tmp_path, offset, in_use):
    """`offset` 1: the worker failed on a port of its own, which a retry would not mend."""
    script = """
        import os
        from datetime import timedelta
        from torch.distributed import TCPStore
        TCPStore("127.0.0.1", int(os.environ["PORT"]), 1, is_master=True, timeout=timedelta(seconds=60))
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def scenario():
            node = Node(tmp_path)
            env = {**os.environ, "PORT": str(port)}
            group = await node.start(script, port=port + offset, env=env)
            result = await group.wait()
            await group.stop(0)
            await node.close()
            return result

        result = as_agent(scenario)
    assert result.failure.exit_code == 1
    assert result.port_in_use is in_use


def test_losing_the_keeper_fails_the_job_and_stop_still_works(as_agent, tmp_path, processes):
    async def scenario():
        node = Node(tmp_path)
        group = await node.start_commands((sys.executable, TREE), env=processes.env)
        await asyncio.to_thread(processes.wait_until, 7)
        os.kill(node.keeper.pid, signal.SIGKILL)
        with pytest.raises(JobFailedError, match="process keeper"):
            await group.wait()
        survivors = processes.alive()
        assert await group.stop(30) == ()
        with pytest.raises(JobFailedError, match="process keeper"):
            await node.start_commands(("true",))
        await node.close()
        return survivors

    assert as_agent(scenario) == []
