"""Data-parallel training processes, started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This process's rank, the number of processes, and this process's device, on which exchanged
    tensors must be (NCCL)."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    def join(cls, device: str) -> Processes:
        """Join torchrun's processes; on GPUs each uses the GPU of its local rank."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(0, 1, torch.device(device))
        on_gpus = device.startswith("cuda")
        if on_gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if on_gpus else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), torch.device(device))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.count == 1:
            return flag
        found = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average gradients over processes."""
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.count
