"""Newcomers find the places of loaders in another phase of a script than that in which others began."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import baguarun
from baguarun.comm.groups import read_worker_env
from baguarun.elastic import ElasticSampler, State
from baguarun.elastic.training import switching
from tests.elastic.training.fake_agent import FakeAgent
from tests.elastic.training.resized import hold_until_news

SAMPLES = 36
HOLDS = {(8, 1), (10, 2)}
"""By committed steps and generation; the second phase begins at step 6."""


def train_in_phases(folder: Path) -> None:
    # Asked at every commit, as slow steps are.
    switching._ASK_EVERY_S = 0.0
    baguarun.init_process_group()
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = baguarun.DistributedDataParallel(net, optimizers=[optimizer])
    state = State(model=model, optimizer=optimizer, is_warm=False)

    def make_loader(length: int) -> DataLoader:
        data = torch.arange(float(length)).unsqueeze(1)
        return DataLoader(data, batch_sampler=ElasticSampler(data, 2))

    warm_up, training = make_loader(24), make_loader(SAMPLES)

    def go_through(loader: DataLoader) -> None:
        for micro_batches in state.steps(loader):
            if (state.committed_steps, read_worker_env().generation) in HOLDS:
                (folder / f"holds-{state.committed_steps}-{os.getpid()}").touch()
                hold_until_news()
            given = []
            state.optimizer.zero_grad()
            for batch in micro_batches:
                state.model(batch).mean().backward()
                given += batch.flatten().tolist()
            state.optimizer.step()
            state.commit()
            with (folder / f"given-{os.getpid()}").open("a") as file:
                file.write(json.dumps([state.committed_steps, given]) + "\n")

    @baguarun.elastic.run
    def train(state: State) -> None:
        if not state.is_warm:
            go_through(warm_up)
            state.is_warm = True
        go_through(training)

    train(state)
    places = [(place["length"], place["epoch"]) for place in state._all_places()]
    (folder / f"end-{os.getpid()}").write_text(json.dumps([state.committed_steps, places]))


def test_who_joins_in_the_second_phase_deals_what_the_others_deal(tmp_path: Path) -> None:
    """And who joins later still is told of the first phase by one that has not been in it."""
    with FakeAgent(train_in_phases, tmp_path) as agent:
        agent.start(2)
        for step, members in [(8, [0, 1, 2]), (10, [2, 3])]:
            newcomer = agent.start_newcomer(members[-1])
            count = len(agent.members)
            agent.run_until(lambda: len(list(tmp_path.glob(f"holds-{step}-*"))) == count)
            agent.run_until(lambda: newcomer.ready is not None)
            agent.change(members, polite=True)
        agent.run_to_the_end()
        assert agent.losses == []
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("end-*")]
    assert ends == [[15, [[24, 1], [SAMPLES, 1]]]] * 2
    lines = [line for path in tmp_path.glob("given-*") for line in path.read_text().splitlines()]
    given = [sample for step, samples in map(json.loads, lines) if step > 6 for sample in samples]
    assert sorted(given) == list(range(SAMPLES))
