from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from baguarun.errors import JobFailedError, SetupError, UsageError
from baguarun.launcher.keeper import Keeper, KeeperProcess, SpawnRequest
from baguarun.launcher.keeper_process import CONTROL_FD

TREE = str(Path(__file__).with_name("process_tree.py"))
TREE_SIZE = 7


async def spawn(keeper: Keeper, *argv: str, env=None, out: int | None = None, **rest) -> KeeperProcess:
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        return await keeper.spawn(
            SpawnRequest(
                argv=argv,
                env=dict(os.environ) if env is None else env,
                stdout_fd=null if out is None else out,
                stderr_fd=2,
                **rest,
            )
        )
    finally:
        os.close(null)


async def output_of(keeper: Keeper, *argv: str, **rest) -> bytes:
    read_fd, write_fd = os.pipe()
    await spawn(keeper, *argv, out=write_fd, **rest)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as file:
        return await asyncio.to_thread(file.read)


async def wait_for_line(read_fd: int) -> str:
    return (await asyncio.to_thread(os.read, read_fd, 100)).decode().strip()


@pytest.mark.parametrize(
    ("script", "exit_code", "signum"),
    [("exit 0", 0, None), ("exit 3", 3, None), ("kill -9 $$", None, 9), ("kill -SEGV $$", None, 11)],
)
def test_an_exit_code_or_a_signal_comes_back(as_agent, script, exit_code, signum):
    async def scenario():
        keeper = Keeper.fork()
        process = await spawn(keeper, "sh", "-c", script)
        notice = await process.exited
        await keeper.close()
        return notice.exit_code, notice.signal

    assert as_agent(scenario) == (exit_code, signum)


def test_two_hundred_short_processes_are_all_accounted_for(as_agent):
    async def scenario():
        keeper = Keeper.fork()
        started = await asyncio.gather(*(spawn(keeper, "/bin/true") for _ in range(200)))
        notices = await asyncio.gather(*(process.exited for process in started))
        left = await keeper.stop_all(5)
        await keeper.close()
        return [notice.exit_code for notice in notices], left

    assert as_agent(scenario) == ([0] * 200, ())


def test_a_worker_starts_with_a_clean_slate(as_agent):
    look = """
        import os, signal
        status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
        # Python itself ignores SIGPIPE and SIGXFSZ; 32 and 33 belong to libc, which lets nobody set them.
        ignored = {n for n in range(1, 32) if int(status["SigIgn"], 16) >> (n - 1) & 1}
        assert ignored <= {signal.SIGPIPE, signal.SIGXFSZ}, status["SigIgn"]
        assert int(status["SigBlk"], 16) == 0, status["SigBlk"]
        assert os.getsid(0) == os.getpgid(0) == os.getpid()
        assert os.readlink("/proc/self/fd/0") == "/dev/null"
        assert sorted(os.listdir("/proc/self/fd")) == ["0", "1", "2", "3"], os.listdir("/proc/self/fd")
        print("clean", os.getcwd(), sorted(os.sched_getaffinity(0)))
    """

    async def scenario():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
        keeper = Keeper.fork()
        out = await output_of(keeper, sys.executable, "-c", textwrap.dedent(look), cwd="/proc", cpus=(0,))
        await keeper.close()
        return out

    assert as_agent(scenario) == b"clean /proc [0]\n"


def test_a_worker_with_a_control_channel_has_its_end_and_takes_its_group_with_it(as_agent):
    script = "import socket, subprocess, sys; child = subprocess.Popen(['sleep', '1000'], close_fds=False)"
    script += f"; socket.socket(fileno={CONTROL_FD}).sendall(str(child.pid).encode()); child.wait()"

    async def scenario():
        keeper = Keeper.fork()
        ours, theirs = socket.socketpair()
        with theirs:
            worker = await spawn(keeper, sys.executable, "-c", script, control_fd=theirs.fileno())
            other = await spawn(keeper, "sleep", "1000")
        child = int((await asyncio.to_thread(ours.recv, 100)).decode())
        await keeper.signal(worker, signal.SIGTERM)
        notice = await worker.exited
        # Its pipe end was the child's, too: the end of the file is the child's end.
        gone = await asyncio.to_thread(ours.recv, 100)
        lives_on = not other.exited.done()
        await keeper.stop_all(0)
        await keeper.close()
        return notice.signal, gone, os.path.exists(f"/proc/{child}"), lives_on

    assert as_agent(scenario) == (signal.SIGTERM, b"", False, True)


def test_a_worker_that_ends_right_after_the_keeper_has_looked_for_dead_ones_keeps_it_from_nothing(
    as_agent, tmp_path
):
    doomed = tmp_path / "doomed"
    look = os.waitid

    def look_and_kill(*what):
        found = look(*what)
        if doomed.exists():
            pid = int(doomed.read_text())
            doomed.unlink()
            os.kill(pid, signal.SIGKILL)
            look(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return found

    async def scenario():
        # Forked from here, the keeper has it, too.
        os.waitid = look_and_kill
        keeper = Keeper.fork()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            worker = await spawn(keeper, "sleep", "1000", control_fd=theirs.fileno())
        other = await spawn(keeper, "sleep", "1000")
        (tmp_path / "pid").write_text(str(worker.pid))
        (tmp_path / "pid").rename(doomed)
        # Makes it look.
        await keeper.signal(worker, 0)
        ends = [await asyncio.wait_for(worker.exited, 30)]
        await keeper.signal(other, signal.SIGTERM)
        ends.append(await asyncio.wait_for(other.exited, 30))
        await keeper.close()
        return [end.signal for end in ends]

    assert as_agent(scenario) == [signal.SIGKILL, signal.SIGTERM]


def test_arguments_and_environment_arrive_byte_for_byte(as_agent):
    hostile = 'a\'; echo "$HOME" \n\t\udcff é 漢'
    big = "x" * 120_000

    async def scenario():
        keeper = Keeper.fork()
        script = "import os, sys; sys.stdout.buffer.write(os.fsencode(sys.argv[1] + os.environ['BIG0']))"
        env = {**os.environ, **{f"BIG{i}": big for i in range(8)}}
        out = await output_of(keeper, sys.executable, "-c", script, hostile, env=env)
        await keeper.close()
        return out

    assert as_agent(scenario) == os.fsencode(hostile) + big.encode()


def test_a_command_that_cannot_be_executed_is_named_with_its_remedy(as_agent, tmp_path):
    no_shebang = tmp_path / "no-shebang"
    no_shebang.write_bytes(b"\x01 not a program")
    no_shebang.chmod(0o755)
    not_executable = tmp_path / "not-executable"
    not_executable.write_text("#!/bin/sh\n")
    cases: dict[tuple[str, ...], tuple[type[Exception], str]] = {
        ("/no/such/file",): (UsageError, "'/no/such/file': No such file"),
        ("no-such-program",): (UsageError, "'no-such-program': No such file"),
        (str(not_executable),): (UsageError, "chmod"),
        (str(no_shebang),): (UsageError, "#!/bin/sh"),
        ("nul\0byte",): (UsageError, "null character"),
    }

    async def scenario():
        keeper = Keeper.fork()
        seen = {}
        for argv in cases:
            try:
                await spawn(keeper, *argv)
            except (UsageError, SetupError) as error:
                seen[argv] = (type(error), str(error))
        with pytest.raises(UsageError, match="folder '/no/such/folder'"):
            await spawn(keeper, "true", cwd="/no/such/folder")
        with pytest.raises(SetupError, match=r"CPUs \[9999\]"):
            await spawn(keeper, "true", cpus=(9999,))
        assert await keeper.stop_all(5) == ()
        await keeper.close()
        return seen

    seen = as_agent(scenario)
    for argv, (kind, words) in cases.items():
        assert seen[argv][0] is kind
        assert words in seen[argv][1]


def test_a_worker_that_ignores_sigterm_gets_sigkill_after_the_grace(as_agent):
    async def scenario():
        keeper = Keeper.fork()
        read_fd, write_fd = os.pipe()
        process = await spawn(keeper, "sh", "-c", "trap '' TERM; echo ready; sleep 300", out=write_fd)
        assert await wait_for_line(read_fd) == "ready"
        left = await keeper.stop_all(0.2)
        notice = await process.exited
        await keeper.close()
        return left, notice.signal

    assert as_agent(scenario) == ((), signal.SIGKILL)


def test_a_second_stop_shortens_the_grace_of_the_first(as_agent):
    async def scenario():
        keeper = Keeper.fork()
        read_fd, write_fd = os.pipe()
        process = await spawn(keeper, "sh", "-c", "trap '' TERM; echo ready; sleep 300", out=write_fd)
        assert await wait_for_line(read_fd) == "ready"
        first = asyncio.create_task(keeper.stop_all(3600))
        await asyncio.sleep(0)
        assert await keeper.stop_all(0) == ()
        assert await first == ()
        return (await process.exited).signal

    assert as_agent(scenario) == signal.SIGKILL


def test_a_worker_that_saves_on_sigterm_keeps_its_loader_processes_meanwhile(as_agent):
    script = (
        "sleep 300 & child=$!; trap 'kill -0 $child && echo saved with loader; exit 0' TERM; echo ready; wait"
    )

    async def scenario():
        keeper = Keeper.fork()
        read_fd, write_fd = os.pipe()
        process = await spawn(keeper, "sh", "-c", script, out=write_fd)
        assert await wait_for_line(read_fd) == "ready"
        assert await keeper.stop_all(30) == ()
        notice = await process.exited
        await keeper.close()
        return await wait_for_line(read_fd), notice.exit_code

    assert as_agent(scenario) == ("saved with loader", 0)


def test_a_program_behind_a_shell_wrapper_gets_its_sigterm_and_its_time(as_agent):
    inner = "trap 'echo saved; exit 0' TERM; echo ready; while true; do sleep 0.05; done"

    async def scenario():
        keeper = Keeper.fork()
        read_fd, write_fd = os.pipe()
        await spawn(keeper, "sh", "-c", f'sh -c "{inner}"; true', out=write_fd)
        assert await wait_for_line(read_fd) == "ready"
        assert await keeper.stop_all(30) == ()
        await keeper.close()
        return await wait_for_line(read_fd)

    assert as_agent(scenario) == "saved"


def test_a_frozen_worker_is_woken_to_hear_its_sigterm(as_agent):
    async def scenario():
        keeper = Keeper.fork()
        process = await spawn(keeper, "sleep", "300")
        os.kill(process.pid, signal.SIGSTOP)
        assert await keeper.stop_all(3600) == ()
        await keeper.close()
        return (await process.exited).signal

    assert as_agent(scenario) == signal.SIGTERM


def test_stopping_ends_loaders_own_sessions_and_daemons_too(as_agent, processes):
    async def scenario():
        keeper = Keeper.fork()
        await spawn(keeper, sys.executable, TREE, env=processes.env)
        await asyncio.to_thread(processes.wait_until, TREE_SIZE)
        assert await keeper.stop_all(0.1) == ()
        survivors = processes.alive()
        await keeper.close()
        return survivors

    assert as_agent(scenario) == []


def test_a_signal_reaches_the_whole_group_of_a_worker_and_an_ended_one_is_no_error(as_agent):
    async def scenario():
        keeper = Keeper.fork()
        process = await spawn(keeper, "sh", "-c", "sleep 300 & wait")
        await keeper.signal(process, signal.SIGUSR1)
        notice = await process.exited
        await keeper.signal(process, signal.SIGUSR1)
        assert await keeper.stop_all(0) == ()
        await keeper.close()
        return notice.signal

    assert as_agent(scenario) == signal.SIGUSR1


AGENT = """
import asyncio, os, sys
from baguarun.launcher.keeper import Keeper, SpawnRequest

async def main(keeper):
    request = SpawnRequest(argv=(sys.executable, sys.argv[1]), env=os.environ, stdout_fd=1, stderr_fd=2)
    processes = [await keeper.spawn(request) for _ in range(2)]
    etcd = await asyncio.create_subprocess_exec("sleep", "300")
    keeper.spare(etcd.pid)
    os.write(1, b"keeper %d %d\\n" % (keeper.pid, etcd.pid))
    try:
        await processes[0].exited
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    if "stop" in sys.argv:
        await keeper.stop_all(3600)
    etcd.kill()
    await etcd.wait()

asyncio.run(main(Keeper.fork()))
"""


def start_agent(processes, *args: str) -> tuple[subprocess.Popen[str], int, int]:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, TREE, *args], env=processes.env, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    # The agent's line, and "ready" of each tree: until then a daemon's short-lived parent is counted too.
    lines = sorted(agent.stdout.readline() for _ in range(3))
    assert lines[1:] == ["ready\n", "ready\n"]
    # Agent, keeper, "etcd" and two workers' trees.
    processes.wait_until(3 + 2 * TREE_SIZE)
    _, keeper_pid, etcd_pid = lines[0].split()
    return agent, int(keeper_pid), int(etcd_pid)


def test_nothing_survives_kill_9_of_the_agent(processes):
    agent, _, etcd_pid = start_agent(processes)
    agent.kill()
    agent.wait()
    # An etcd of the agent's own is not the keeper's to end.
    assert processes.wait_until(1) == [etcd_pid]


def test_nothing_survives_kill_9_of_the_agent_in_the_middle_of_a_stop(processes):
    agent, _, etcd_pid = start_agent(processes, "stop")
    first_worker = min(pid for pid in processes.alive() if _parent(pid) == _keeper_of(agent.pid, etcd_pid))
    os.kill(first_worker, signal.SIGKILL)
    processes.wait_until(3 + 2 * TREE_SIZE - 1)
    agent.kill()
    agent.wait()
    assert processes.wait_until(1) == [etcd_pid]


def test_kill_9_of_the_keeper_ends_the_workers_and_is_told_clearly(processes):
    agent, keeper_pid, _ = start_agent(processes)
    os.kill(keeper_pid, signal.SIGKILL)
    out, _ = agent.communicate(timeout=60)
    assert f"JobFailedError the process keeper (baguarun-keeper, pid {keeper_pid}) was killed" in out
    assert agent.returncode == 0
    assert processes.alive() == []


def test_workers_die_with_the_keeper_even_if_the_agent_is_frozen(processes):
    agent, keeper_pid, _ = start_agent(processes)
    workers = {pid for pid in processes.alive() if _parent(pid) == keeper_pid and _is_tree(pid)}
    os.kill(agent.pid, signal.SIGSTOP)
    os.kill(keeper_pid, signal.SIGKILL)
    processes.wait_until(2 + 2 * (TREE_SIZE - 1))
    assert not workers & set(processes.alive())
    os.kill(agent.pid, signal.SIGCONT)
    agent.communicate(timeout=60)
    assert processes.alive() == []


def test_the_keeper_cannot_be_ended_by_a_terminal_or_a_polite_signal(as_agent):
    async def scenario():
        keeper = Keeper.fork()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(keeper.pid, signum)
        process = await spawn(keeper, "true")
        code = (await process.exited).exit_code
        name = Path(f"/proc/{keeper.pid}/comm").read_text().strip()
        await keeper.close()
        with pytest.raises(JobFailedError, match="agent is leaving"):
            await spawn(keeper, "true")
        return code, name, os.getsid(0) == os.getsid(os.getpid())

    assert as_agent(scenario) == (0, "baguarun-keeper", True)


@pytest.mark.root
def test_a_process_stuck_in_the_kernel_is_named_and_left_behind(as_agent, processes):
    """A frozen control group holds its processes in state D, where SIGKILL does not reach them."""
    freezer = Path("/sys/fs/cgroup/freezer") / f"baguarun-c-{os.getpid()}"
    if not freezer.parent.is_dir():
        pytest.skip("this kernel has no control group freezer of version 1")
    freezer.mkdir()
    try:

        async def scenario():
            keeper = Keeper.fork()
            stuck = await spawn(keeper, "sleep", "300", env=processes.env)
            (freezer / "cgroup.procs").write_text(str(stuck.pid))
            (freezer / "freezer.state").write_text("FROZEN")
            left = await keeper.stop_all(0)
            assert [(one.pid, one.name) for one in left] == [(stuck.pid, "sleep")]
            # The next generation is not held up by what was given up before.
            process = await spawn(keeper, "true")
            assert (await process.exited).exit_code == 0
            assert await keeper.stop_all(3600) == ()
            (freezer / "freezer.state").write_text("THAWED")
            await keeper.close()

        as_agent(scenario)
        processes.wait_until(0)
    finally:
        (freezer / "freezer.state").write_text("THAWED")
        processes.wait_until(0)
        freezer.rmdir()


def _is_tree(pid: int) -> bool:
    return TREE in Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _keeper_of(agent_pid: int, etcd_pid: int) -> int:
    children = Path(f"/proc/{agent_pid}/task/{agent_pid}/children").read_text().split()
    (keeper_pid,) = {int(pid) for pid in children} - {etcd_pid}
    return keeper_pid
