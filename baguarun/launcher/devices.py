"""What this machine has: CPUs we may use, NUMA nodes, GPUs as CUDA will show them to a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baguarun.errors import SetupError

_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as CUDA shows it to the workers: its place in the list is the local rank that uses it."""

    name: str
    numa_node: int | None
    """None if the machine does not say, or if CUDA's order of the GPUs is not known."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What of the machine matters for placing workers."""

    numa_cpus: Mapping[int, tuple[int, ...]]
    """Usable CPUs by NUMA node; a node without any is left out."""
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NvmlGpu:
    """One GPU as the driver lists it, in PCI order."""

    name: str
    uuid: str
    numa_node: int | None


def count_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may keep busy: its affinity, cut down to the cgroup's quota, at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(root)
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _cgroup_quota(root: Path) -> float | None:
    """CPUs' worth of time that the tightest enclosing cgroup (v1 or v2) grants, None for no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += [_quota_v2(folder) for folder in _with_parents(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            quotas += [_quota_v1(folder) for folder in _with_parents(root / "sys/fs/cgroup/cpu", path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _with_parents(mount: Path, path: str) -> list[Path]:
    folder = mount / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent == mount or mount in parent.parents)]


def _quota_v2(folder: Path) -> float | None:
    words = _read_words(folder / "cpu.max")
    return None if not words or words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read_words(folder / "cpu.cfs_quota_us"), _read_words(folder / "cpu.cfs_period_us")
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_numa_cpus(root: Path = Path("/")) -> dict[int, tuple[int, ...]]:
    """Usable CPUs by NUMA node; a machine that does not say is one node."""
    usable = os.sched_getaffinity(0)
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        listed = parse_cpu_list((folder / "cpulist").read_text())
        cpus = tuple(cpu for cpu in listed if cpu in usable)
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes or {0: tuple(sorted(usable))}


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's notation: `0-3,8,10-11`."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def read_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a worker started with `environ` will see, in CUDA's order; none without a driver."""
    listed = _ask_driver()
    ordered = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in listed}) <= 1
    return visible_gpus(listed, environ.get("CUDA_VISIBLE_DEVICES"), ordered)


def visible_gpus(listed: Sequence[NvmlGpu], visible: str | None, ordered: bool) -> tuple[Gpu, ...]:
    """What CUDA_VISIBLE_DEVICES leaves; as in CUDA, the first entry that is no GPU ends the list.

    Without `ordered`, CUDA puts the fastest GPU first and a number does not say which one it is.
    """
    gpus: list[Gpu] = []
    entries = [str(index) for index in range(len(listed))] if visible is None else visible.split(",")
    for entry in map(str.strip, entries):
        if entry.isdecimal() and int(entry) < len(listed):
            gpu = listed[int(entry)]
            gpus.append(Gpu(name=gpu.name, numa_node=gpu.numa_node if ordered else None))
        elif entry.startswith("MIG-"):
            gpus.append(Gpu(name=entry, numa_node=None))
        else:
            matches = [gpu for gpu in listed if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
            if len(matches) != 1:
                break
            gpus.append(Gpu(name=matches[0].name, numa_node=matches[0].numa_node))
    return tuple(gpus)


def _ask_driver() -> list[NvmlGpu]:
    if not any(os.path.exists(path) for path in _DRIVER_FILES):
        return []
    try:
        import pynvml
    except ImportError as error:
        raise SetupError(
            "this node has an NVIDIA driver, but the GPUs cannot be listed: `pip install nvidia-ml-py`"
        ) from error
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        # A container that was not given the GPUs, or a driver without its library: CUDA sees none either.
        return []
    except pynvml.NVMLError as error:
        raise SetupError(
            f"the NVIDIA driver does not list its GPUs: {error}; look at `nvidia-smi`"
        ) from error
    try:
        return [_describe(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _describe(handle: object) -> NvmlGpu:
    import pynvml

    # Eight digits of PCI domain here, four in /sys.
    domain, rest = pynvml.nvmlDeviceGetPciInfo(handle).busId.lower().split(":", 1)
    words = _read_words(Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node"))
    return NvmlGpu(
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        numa_node=int(words[0]) if words and int(words[0]) >= 0 else None,
    )
