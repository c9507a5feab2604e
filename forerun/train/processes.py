"""Several processes that train one model, as `accelerate launch` and `torchrun` start them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed, nn


@dataclass(frozen=True)
class Processes:
    """This process's number and how many there are."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, named: str | None) -> str | None:
        """The device named, else this process's GPU where there are enough."""
        own = int(os.environ.get("LOCAL_RANK", self.rank))
        if named is None and self.count > 1 and torch.cuda.device_count() > own:
            return f"cuda:{own}"
        return named

    def wait(self) -> None:
        """Until all have come here."""
        if self.count > 1:
            distributed.barrier()

    def average(self, model: nn.Module) -> None:
        """Makes the gradients of all the mean of theirs."""
        if self.count == 1:
            return
        for parameter in model.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self.count


def processes() -> Processes:
    """Those that were started together; meets the others."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    if not distributed.is_initialized():
        # Nobody is lost while the first makes the target's own output.
        distributed.init_process_group(timeout=timedelta(days=2))
    return Processes(distributed.get_rank(), distributed.get_world_size())
