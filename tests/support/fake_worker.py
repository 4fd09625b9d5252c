"""A worker that is resized in place and trains nothing: `baguarun.contract` on its channel, no torch.

Run as the script of a job. What happens to it is a line of JSON in `<argv[1]>/<pid>`; files in that folder
tell all workers what to do: `finish` ends them, `idle` keeps them from training, `fail` makes those fail that
reach that step, `hold` keeps newcomers from being ready, `fail-on-NODE` makes those of that local rank there
fail a moment after they were taken in.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from baguarun.contract import ControlDecoder, ControlMessage, Topic, WorkerEnv, World

STEP_S = 0.01
_MOMENT_STEPS = 20


class FakeWorker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = open(folder / str(os.getpid()), "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.env = WorkerEnv.from_environ()
        self.generation, self.rank, self.steps = self.env.generation, self.env.rank, 0
        self.note("start", rank=self.rank, world_size=self.env.world_size, port=os.environ.get("MASTER_PORT"))
        assert self.env.control_fd is not None, "want a control channel"
        self.channel = socket.socket(fileno=self.env.control_fd)
        self.decoder = ControlDecoder()
        self.unread: list[ControlMessage] = []
        """Came together with the World that this worker has entered since."""
        self.expects_newcomers = False
        self.listener = socket.create_server(("127.0.0.1", 0))

    def note(self, event: str, **what: Any) -> None:
        line = {
            "event": event,
            "time": time.time(),
            "generation": self.generation,
            "local": self.env.local_rank,
        }
        self.log.write(json.dumps({**line, **what}) + "\n")

    def send(self, topic: Topic, **body: Any) -> None:
        self.channel.sendall(ControlMessage(topic, body).encode())

    def receive(self, wait_s: float) -> list[ControlMessage]:
        if self.unread:
            unread, self.unread = self.unread, []
            return unread
        if not select.select([self.channel], [], [], wait_s)[0]:
            return []
        data = self.channel.recv(65536)
        if not data:
            self.note("EOF")
            os._exit(0)
        messages = []
        for message in self.decoder.feed(data):
            if message.topic is Topic.PING:
                self.send(Topic.PONG, **message.body)
                if self.expects_newcomers != message.body["newcomers"]:
                    self.expects_newcomers = message.body["newcomers"]
                    self.note("EXPECTS" if self.expects_newcomers else "EXPECTS NONE")
            else:
                self.note(message.topic.name, body=dict(message.body))
                messages.append(message)
        return messages

    def run(self) -> None:
        if (self.folder / "stay-out").exists():
            return
        if (self.folder / "idle").exists():
            self.note("idles")
            time.sleep(600.0)
        if self.generation:
            self.progress()
        else:
            self.send(Topic.ARRIVED)
            while (self.folder / "hold").exists():
                time.sleep(STEP_S)
            self.wait_for_world()
        self.note("trains")
        told_s = 0.0
        while not (self.folder / "finish").exists():
            for message in self.receive(STEP_S):
                if message.topic is Topic.LEAVE:
                    self.note("left")
                    return
                # Else it came together with the World that it announced.
                if message.topic is not Topic.WORLD and message.body["generation"] > self.generation:
                    self.wait_for_world()
            self.steps += 1
            if (self.folder / "fail").exists() and self.steps >= int((self.folder / "fail").read_text()):
                raise ValueError("told to fail")
            if self.steps >= _MOMENT_STEPS and self.has_bad_luck():
                raise ValueError("no data on this node")
            if time.monotonic() > told_s + 0.05:
                told_s = time.monotonic()
                self.progress()
        self.note("finished")

    def has_bad_luck(self) -> bool:
        unlucky = self.folder / f"fail-on-{os.environ.get('NODE')}"
        return unlucky.exists() and unlucky.read_text() == str(self.env.local_rank)

    def progress(self) -> None:
        self.send(Topic.PROGRESS, generation=self.generation, steps=self.steps)

    def wait_for_world(self) -> None:
        self.note("waits")
        port = self.listener.getsockname()[1]
        self.send(Topic.READY, generation=self.generation, port=port, steps=self.steps)
        while True:
            messages = self.receive(10.0)
            for number, message in enumerate(messages, 1):
                if message.topic is Topic.LEAVE:
                    self.note("left")
                    raise SystemExit(0)
                if message.topic is Topic.WORLD:
                    world = World.from_json(json.dumps(dict(message.body)).encode())
                    self.generation, self.rank = world.generation, world.rank_of(self.env.local_rank)
                    self.note("entered", rank=self.rank, world_size=world.world_size)
                    self.progress()
                    self.unread = messages[number:]
                    return


if __name__ == "__main__":
    FakeWorker(Path(sys.argv[1])).run()
