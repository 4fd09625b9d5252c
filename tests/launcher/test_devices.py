from __future__ import annotations

import os
from pathlib import Path

import pytest

from baguarun.launcher.devices import (
    Gpu,
    NvmlGpu,
    count_cpus,
    parse_cpu_list,
    read_gpus,
    read_numa_cpus,
    visible_gpus,
)

LISTED = [NvmlGpu(name=f"gpu{i}", uuid=f"GPU-{i}{i}-aaaa", numa_node=i // 2) for i in range(4)]


def names(visible: str | None) -> list[str]:
    return [gpu.name for gpu in visible_gpus(LISTED, visible, ordered=True)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["gpu0", "gpu1", "gpu2", "gpu3"]),
        ("", []),
        ("-1", []),
        ("2", ["gpu2"]),
        ("3, 1", ["gpu3", "gpu1"]),
        ("GPU-22,GPU-00-aaaa", ["gpu2", "gpu0"]),
        # As CUDA reads it, the first entry that is no GPU ends the list.
        ("1,9,2", ["gpu1"]),
        ("1,GPU-,2", ["gpu1"]),
        ("MIG-7c,0", ["MIG-7c", "gpu0"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible, expected):
    assert names(visible) == expected


def test_a_number_says_nothing_of_the_numa_node_when_cuda_orders_by_speed():
    assert visible_gpus(LISTED, "0,GPU-33", ordered=False) == (
        Gpu(name="gpu0", numa_node=None),
        Gpu(name="gpu3", numa_node=1),
    )


def test_the_kernels_lists_of_cpus_are_read():
    assert parse_cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpu_list("\n") == ()


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_numa_nodes_hold_the_cpus_that_we_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 9})
    nodes = tmp_path / "sys/devices/system/node"
    put(nodes, {"node0/cpulist": "0-7\n", "node1/cpulist": "8-15\n", "node2/cpulist": "\n", "online": "0-2"})
    assert read_numa_cpus(tmp_path) == {0: (0, 1), 1: (9,)}
    assert read_numa_cpus(tmp_path / "nowhere") == {0: (0, 1, 9)}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        # The tightest of the enclosing groups counts.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
    ],
)
def test_cpus_are_counted_within_affinity_and_quota(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert count_cpus(put(tmp_path, files)) == expected


@pytest.mark.gpu
def test_the_driver_and_cuda_agree_about_the_gpus():
    import torch

    gpus = read_gpus(dict(os.environ))
    assert [gpu.name for gpu in gpus] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
