"""torchrun's own lines, word for word after the program's name, through the real launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import BAGUARUN, environment
from tests.support.etcd_servers import free_port

REPORT = """\
import json, os, pathlib, sys
place = {name: os.environ.get(name) for name in os.environ["REPORT_NAMES"].split(",")}
name = f"{os.environ['GROUP_RANK']}-{os.environ['LOCAL_RANK']}.json"
pathlib.Path(os.environ["REPORT_DIR"], name).write_text(json.dumps({"argv": sys.argv[1:], **place}))
"""
NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "BAGUARUN_ALGORITHM"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train er.py").write_text(REPORT)
    (tmp_path / "trainer.py").write_text(REPORT)
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*BAGUARUN, "run", *words],
        cwd=folder,
        env=environment(REPORT_DIR=str(folder), REPORT_NAMES=",".join(NAMES)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(*agents: subprocess.Popen[str]) -> None:
    try:
        for agent in agents:
            output, _ = agent.communicate(timeout=120)
            assert agent.returncode == 0, output
    finally:
        for agent in agents:
            agent.kill()


def places(folder: Path) -> list[dict[str, Any]]:
    """What the workers reported, by rank."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda place: int(place["RANK"]))


def test_a_standalone_line_gives_workers_every_variable_of_torchrun(folder: Path) -> None:
    words = ("--standalone", "--nproc_per_node=2", "--rdzv_id", "j1", "--role", "r", "--max-restarts", "2")
    end(
        start(folder, *words, "--algorithm", "bytegrad", "train er.py", "--nnodes", "3", "a'; echo", "--", "")
    )
    first, second = places(folder)
    assert first["argv"] == ["--nnodes", "3", "a'; echo", "--", ""]
    assert [name for name in NAMES if not first[name]] == []
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["ROLE_RANK"]) == ("0", "1", "1", "1")
    assert {first[name] for name in NAMES if name.endswith("WORLD_SIZE") and "GROUP" not in name} == {"2"}
    assert (first["GROUP_WORLD_SIZE"], first["ROLE_NAME"], first["TORCHELASTIC_RUN_ID"]) == ("1", "r", "j1")
    assert (first["TORCHELASTIC_MAX_RESTARTS"], first["TORCHELASTIC_RESTART_COUNT"]) == ("2", "0")
    assert first["BAGUARUN_ALGORITHM"] == "bytegrad"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "trainer", "x"),
        ("--module", "trainer", "x"),
        ("--no_python", sys.executable, "trainer.py", "x"),
        ("--run-path", "trainer.py", "x"),
        ("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--nnodes=1", "trainer.py", "x"),
        ("--master_port", "0", "trainer.py", "x"),
    ],
    ids=lambda words: words[0],
)
def test_each_way_to_name_the_program_runs_it(folder: Path, words: tuple[str, ...]) -> None:
    end(start(folder, *words))
    (place,) = places(folder)
    assert (place["argv"], place["WORLD_SIZE"]) == (["x"], "1")


def test_a_static_line_on_two_nodes_shares_out_the_ranks(folder: Path) -> None:
    port = str(free_port())
    words = ("--nnodes=2", "--nproc_per_node=2", "--master_addr=127.0.0.1", "--master_port", port)
    end(*(start(folder, *words, "--node_rank", str(rank), "trainer.py") for rank in (0, 1)))
    found = places(folder)
    assert [place["RANK"] for place in found] == ["0", "1", "2", "3"]
    assert [place["GROUP_RANK"] for place in found] == ["0", "0", "1", "1"]
    assert {(place["MASTER_ADDR"], place["MASTER_PORT"], place["WORLD_SIZE"]) for place in found} == {
        ("127.0.0.1", port, "4")
    }


def test_a_c10d_line_on_two_agents_needs_no_etcd_of_ones_own(folder: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    words = ("--nnodes=2", "--rdzv_id=7", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}")
    end(*(start(folder, *words, "--node-name", name, "trainer.py") for name in ("n1", "n2")))
    first, second = places(folder)
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"], second["WORLD_SIZE"]) == ("0", "1", "2", "2")
    assert first["TORCHELASTIC_RUN_ID"] == "7"
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == (second["MASTER_ADDR"], second["MASTER_PORT"])


def test_torch_sees_itself_launched_by_torchelastic(folder: Path) -> None:
    (folder / "seen.py").write_text(
        "import torch.distributed as dist; assert dist.is_torchelastic_launched()\n"
        "dist.init_process_group('gloo'); assert dist.get_world_size() == 2; dist.destroy_process_group()"
    )
    end(start(folder, "--nproc-per-node", "2", "seen.py"))
