from __future__ import annotations

import pytest

from baguarun.errors import UsageError
from baguarun.launcher import devices
from baguarun.launcher.binding import BindingPolicy, plan_binding, read_topology, resolve_slots
from baguarun.launcher.devices import Gpu, Topology

TWO_NODES = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}


def gpus(*numa_nodes: int | None) -> tuple[Gpu, ...]:
    return tuple(Gpu(name="H200", numa_node=node) for node in numa_nodes)


def bound(
    slots: int, topology: Topology, policy: BindingPolicy = BindingPolicy.NUMA
) -> list[tuple[int, ...]]:
    return [worker.cpus for worker in plan_binding(slots, topology, policy, {"OMP_NUM_THREADS": "4"}).workers]


def test_a_worker_runs_on_the_numa_node_of_its_gpu():
    topology = Topology(numa_cpus=TWO_NODES, gpus=gpus(1, 1, 0, 0))
    assert bound(4, topology) == [TWO_NODES[1], TWO_NODES[1], TWO_NODES[0], TWO_NODES[0]]
    assert bound(1, topology) == [TWO_NODES[1]]


def test_cpu_workers_are_spread_evenly_and_neighbours_share_a_node():
    topology = Topology(numa_cpus=TWO_NODES)
    assert bound(4, topology) == [TWO_NODES[0], TWO_NODES[0], TWO_NODES[1], TWO_NODES[1]]
    assert bound(2, topology) == [TWO_NODES[0], TWO_NODES[1]]


def test_a_node_with_more_usable_cpus_takes_more_workers():
    topology = Topology(numa_cpus={0: (0, 1, 2, 3, 4, 5), 1: (6, 7)})
    assert [cpus[0] for cpus in bound(4, topology)] == [0, 0, 0, 6]


def test_more_workers_than_gpus_are_spread_like_cpu_workers():
    assert bound(2, Topology(numa_cpus=TWO_NODES, gpus=gpus(1))) == [TWO_NODES[0], TWO_NODES[1]]


@pytest.mark.parametrize(
    ("slots", "topology", "policy"),
    [
        (2, Topology(numa_cpus={0: (0, 1)}, gpus=gpus(0, 0)), BindingPolicy.NUMA),
        (4, Topology(numa_cpus=TWO_NODES), BindingPolicy.NONE),
        # One worker keeps the whole machine.
        (1, Topology(numa_cpus=TWO_NODES), BindingPolicy.NUMA),
    ],
)
def test_nothing_is_bound_where_it_could_only_hurt(slots, topology, policy):
    assert bound(slots, topology, policy) == [()] * slots


def test_a_gpu_whose_node_is_not_known_leaves_its_worker_unbound_and_says_so():
    plan = plan_binding(
        3, Topology(numa_cpus=TWO_NODES, gpus=gpus(0, None, 9)), BindingPolicy.NUMA, {"OMP_NUM_THREADS": "1"}
    )
    assert [worker.cpus for worker in plan.workers] == [TWO_NODES[0], (), ()]
    assert plan.notices == ("local ranks [1, 2] are not bound: the NUMA node of their GPU is not known",)


def test_several_workers_get_one_thread_each_unless_the_user_chose():
    topology = Topology(numa_cpus={0: (0, 1)})
    plan = plan_binding(2, topology, BindingPolicy.NUMA, {})
    assert [worker.env for worker in plan.workers] == [{"OMP_NUM_THREADS": "1"}] * 2
    assert "OMP_NUM_THREADS=1" in plan.notices[0]
    for slots, environ in ((1, {}), (2, {"OMP_NUM_THREADS": "3"})):
        alone = plan_binding(slots, topology, BindingPolicy.NUMA, environ)
        assert all(worker.env == {} for worker in alone.workers)
        assert alone.notices == ()


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "²", "1 "])
def test_slots_that_make_no_sense_are_refused_by_name(text):
    with pytest.raises(UsageError, match=r"--nproc-per-node .*want gpu, cpu, auto or a number"):
        resolve_slots(text, {})


def test_slots_follow_the_machine(monkeypatch):
    monkeypatch.setattr(devices, "count_cpus", lambda: 6)
    monkeypatch.setattr(devices, "read_gpus", lambda environ: gpus(0, 0, 1))
    assert [resolve_slots(text, {}) for text in ("cpu", "gpu", "auto", "12")] == [6, 3, 3, 12]
    monkeypatch.setattr(devices, "read_gpus", lambda environ: ())
    assert resolve_slots("auto", {}) == 6
    with pytest.raises(UsageError, match=r"gpu: no GPU found on this node; look at `nvidia-smi`"):
        resolve_slots("gpu", {})
    with pytest.raises(UsageError, match=r"no GPU found on this node with CUDA_VISIBLE_DEVICES='-1'"):
        resolve_slots("gpu", {"CUDA_VISIBLE_DEVICES": "-1"})


def test_this_machine_can_be_read():
    topology = read_topology({})
    assert sum(map(len, topology.numa_cpus.values())) >= 1
