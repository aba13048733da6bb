"""How workers share the weights of one drafter: each has them whole, or each keeps a share (FSDP2).

Both see to it that after `finish` every trained parameter's gradient is the *sum* over all micro-batches of all workers,
whatever the number of micro-batches that each had, none included. So neither is DistributedDataParallel, which averages
over workers, and wants every worker to take as many backward passes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from drafter.loss import Loss
from drafter.model import Drafter
from drafter.team import Team


class Weights(ABC):
    """The trained parameters of a drafter and their gradients."""

    trained: dict[str, nn.Parameter]

    @abstractmethod
    def begin(self) -> None:
        """Before the first micro-batch of an update."""

    @abstractmethod
    def forward(self, compute: Callable[[], Loss]) -> Loss:
        """The loss of a micro-batch; its gradient is added up by `loss.loss.backward()`."""

    @abstractmethod
    def finish(self) -> None:
        """After the last one: adds the gradients up over the workers. All workers call it."""

    @abstractmethod
    def gradients(self) -> Iterable[Tensor]:
        """What this worker holds of the sum, to be changed in place."""

    @abstractmethod
    def norm(self) -> float:
        """Of the whole sum; the same on all workers, who all call it."""

    @abstractmethod
    def gather(self) -> None:
        """Makes the drafter's parameters whole tensors on all workers, who all call it; until `release`."""

    @abstractmethod
    def release(self) -> None: ...

    @abstractmethod
    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the CPU, whole, of tensors that lie as the parameters do. All workers call it."""

    @abstractmethod
    def like(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """A whole CPU tensor as this worker keeps such a one."""


class Replicated(Weights):
    """Every worker's own tensors, added up one by one. The first micro-batch's gradients become `.grad` as autograd made
    them: nothing is zeroed, copied or kept in a buffer of its own.
    """

    def __init__(self, drafter: Drafter, team: Team) -> None:
        self.team = team
        self.trained = {name: one for name, one in drafter.named_parameters() if one.requires_grad}

    def begin(self) -> None:
        for one in self.trained.values():
            one.grad = None

    def forward(self, compute: Callable[[], Loss]) -> Loss:
        return compute()

    def finish(self) -> None:
        for one in self.trained.values():
            if one.grad is None:  # no micro-batch here, but perhaps elsewhere
                one.grad = torch.zeros_like(one)
            self.team.add(one.grad)

    def gradients(self) -> list[Tensor]:
        return [one.grad for one in self.trained.values() if one.grad is not None]

    def norm(self) -> float:
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in self.gradients()])))

    def gather(self) -> None:
        pass

    def release(self) -> None:
        pass

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.team.rank:
            return {}  # only the first one writes
        return {name: one.detach().to("cpu", copy=True).contiguous() for name, one in tensors.items()}

    def like(self, parameter: Tensor, whole: Tensor) -> Tensor:
        return whole.to(parameter.device)


class Sharded(Weights):
    """Each worker keeps its share of fp32 weights, gradients' sum and optimiser (`fully_shard`, ZeRO-3 between updates).

    Within an update the weights are whole on every worker: one all_gather at its beginning, one reduce_scatter at its
    end, whatever the number of micro-batches in between; so workers need not take equally many.
    """

    def __init__(self, drafter: Drafter, team: Team) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.team, self.module = team, _Computes(drafter)
        frozen = {one for one in drafter.parameters() if not one.requires_grad}
        mesh = init_device_mesh(team.device.type, (team.world,))
        fully_shard(self.module, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
        self.module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        self.module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # else gloo refuses the factor
        self.module.set_reshard_after_backward(False)  # type: ignore[operator]
        self.trained = {name: one for name, one in drafter.named_parameters() if one.requires_grad}
        self.drafter = drafter

    def begin(self) -> None:
        for one in self.trained.values():
            one.grad = None
        self.module.set_requires_gradient_sync(False)  # type: ignore[operator]
        self.module.unshard()  # type: ignore[operator]

    def forward(self, compute: Callable[[], Loss]) -> Loss:
        found: list[Loss] = []

        def keeping() -> Tensor:
            found.append(compute())
            return found[0].loss

        value = self.module(keeping)
        return replace(found[0], loss=value)

    def finish(self) -> None:
        self.module.set_requires_gradient_sync(True)  # type: ignore[operator]
        # A pass through all parameters that adds nothing: those who had no micro-batch take part in the sum, too.
        parameters = [one for one in self.drafter.parameters() if one.requires_grad]
        self.module(lambda: torch.stack([one.flatten()[0] * 0 for one in parameters]).sum()).backward()
        self.module.reshard()  # type: ignore[operator]

    def gradients(self) -> Iterable[Tensor]:
        return [_local(one.grad) for one in self.trained.values() if one.grad is not None]

    def norm(self) -> float:
        squares = torch.zeros(1, dtype=torch.float64, device=self.team.device)
        for part in self.gradients():
            squares += torch.linalg.vector_norm(part).double() ** 2
        self.team.add(squares)
        return math.sqrt(squares) if math.isfinite(squares) else math.nan

    def gather(self) -> None:
        self.module.unshard()  # type: ignore[operator]

    def release(self) -> None:
        self.module.reshard()  # type: ignore[operator]

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for name, one in tensors.items():
            full = one.detach().full_tensor()  # type: ignore[attr-defined]
            if self.team.rank == 0:
                made[name] = full.to("cpu", copy=True).contiguous()
        return made

    def like(self, parameter: Tensor, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        # Every worker has read the whole of it: each cuts out its share, and nobody sends.
        return distribute_tensor(
            whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )


class _Computes(nn.Module):
    """Runs a computation on the drafter as a forward pass of its own: what FSDP's hooks want to see."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


def _local(tensor: Tensor) -> Tensor:
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part
