"""The workers of one run, alone or joined by torch.distributed, and the little that they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from drafter.errors import DrafterError
from storage.errors import StatehouseError


@dataclass(frozen=True)
class Team:
    """rank of world workers; with more than one, torch.distributed is initialised. device: where this one computes."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def add(self, tensor: Tensor) -> None:
        """Adds up the workers' tensors, in place, on every worker. Gloo and NCCL add in a fixed order."""
        if self.world > 1:
            distributed.all_reduce(tensor)

    def from_first(self, number: int) -> int:
        """Worker 0's number, on every worker."""
        told = torch.tensor([number if self.rank == 0 else 0], device=self.device)
        self.add(told)
        return int(told)

    def from_any(self, flag: bool) -> bool:
        """Whether the flag is set on any worker, on every worker."""
        told = torch.tensor([int(flag)], device=self.device)
        self.add(told)
        return bool(told)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Of these numbers, over the workers, on every worker."""
        told = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        self.add(told)
        return [float(one) for one in told.tolist()]

    def agree(self, error: StatehouseError | None) -> None:
        """Raises on every worker if any has an error: its own, or a line that points at the worker that has one.

        Without it a worker that leaves would let the others wait in the next sum until they time out.
        """
        failed = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        failed[self.rank] = error is not None
        self.add(failed)
        if error is not None:
            raise error
        if failed.any():
            raise OthersFailed(f"worker {int(failed.argmax())} of {self.world} failed; its own line says why")


class OthersFailed(DrafterError):
    """Another worker failed, and says why."""


class Stopped(Exception):
    """On all workers: one of them was asked to stop, and the run is left between two updates."""
