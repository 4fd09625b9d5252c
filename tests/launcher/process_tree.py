"""A worker with company: 4 loader processes, a subprocess in a session of its own and a daemon: 7 in all.

Those that outlive a worker under other launchers; all ignore SIGTERM and SIGHUP.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time


def load(queue: "multiprocessing.Queue[int]") -> None:
    queue.get()


def daemonise() -> None:
    """Returns when the daemon is no copy of this process any more."""
    executes, held = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "300"])
        os._exit(0)
    os.wait()
    os.close(held)
    # The daemon's end is closed by exec.
    assert os.read(executes, 1) == b""
    os.close(executes)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    for _ in range(4):
        context.Process(target=load, args=(queue,)).start()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    daemonise()
    # In one write, whatever PYTHONUNBUFFERED says: another tree writes to the same pipe.
    os.write(1, b"ready\n")
    time.sleep(300)
