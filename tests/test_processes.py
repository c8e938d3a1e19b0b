"""Training in several processes: what they exchange, and where it lies."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from graftwork.training.processes import Processes

TWO = """
import os, sys, torch
from graftwork.training.processes import Processes
rank = int(sys.argv[1])
os.environ |= {"RANK": sys.argv[1], "WORLD_SIZE": "2", "LOCAL_RANK": sys.argv[1],
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
processes = Processes.join("cpu")
weight = torch.nn.Parameter(torch.zeros(2))
weight.grad = torch.tensor([1.0, 2.0]) * (rank + 1)
processes.average([weight, torch.nn.Parameter(torch.zeros(1))])
print(processes.rank, processes.any(rank == 1), processes.any(False), weight.grad.tolist())
"""


@pytest.mark.long
def test_two_processes_agree(unused_port: int) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(rank), str(unused_port)], stdout=-1, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0].strip() for process in started]
    assert said == ["0 True False [1.5, 3.0]", "1 True False [1.5, 3.0]"]


def test_alone_nothing_is_exchanged() -> None:
    alone = Processes.join("cpu")
    assert (alone.rank, alone.count) == (0, 1)
    assert alone.any(True) and not alone.any(False)


def test_what_is_exchanged_lies_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes nothing else."""
    seen: list[torch.device] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: seen.append(tensor.device))
    with pytest.raises(RuntimeError, match="meta"):  # no data to read
        Processes(0, 2, torch.device("meta")).any(True)
    assert seen == [torch.device("meta")]


def test_each_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", done.append)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert Processes.join("cuda").rank == 1
    assert done == [1, "nccl"]
