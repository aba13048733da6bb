"""One update of a drafter: forward and backward over packed micro-batches, summed over workers, clipped, applied.

Gradients lie in one flat fp32 buffer, of which every parameter's `.grad` is a view: accumulation needs no code, and the
workers' sum is one all_reduce. Not DistributedDataParallel, because it averages over *workers* and wants every worker
to take as many backward passes, while here micro-batches are dealt out as they come (a worker may have none) and the
loss of an update is divided by the *positions* of the whole global batch, known only once all have counted. What is
lost is the overlap of the sum with the backward pass.

Shape suffixes as in drafter/model.py, and K steps, P trained parameters' numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.argmax_cache import ArgmaxCache
from drafter.errors import DrafterError
from drafter.loader import PackedBatch
from drafter.loss import Loss, ttt_loss
from drafter.model import Drafter
from drafter.recipe import DrafterSection, TrainingSection
from drafter.team import Team
from drafter.verifier_head import VerifierHead
from storage.errors import StatehouseError

# Updates in a row without finite numbers, after which a run ends: more is no bad batch but a broken run.
NON_FINITE_IN_A_ROW = 5


@dataclass(frozen=True)
class Measured:
    """Sums over some batches, divided. loss: per step-0 position. accuracy: [K] greedy matches with the verifier's
    likeliest token of its whole vocabulary. covered: [K] share whose likeliest token the drafter can propose.
    """

    loss: float
    positions: int
    accuracy: tuple[float, ...]
    covered: tuple[float, ...]
    grad_norm: float = math.nan
    skipped: bool = False


def learning_rate(update: int, total: int, settings: TrainingSection) -> float:
    """Of the update with this number (from 0): a line from near 0 up to lr, then half a cosine to its end share."""
    rising = math.ceil(settings.warmup * total)
    if update < rising:
        return settings.lr * (update + 1) / rising
    progress = (update - rising) / max(1, total - rising)
    floor = settings.min_lr_share
    return settings.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


class Trainer:
    """A drafter with its optimiser on this worker's device. All workers hold the same numbers after every update."""

    def __init__(
        self, drafter: Drafter, head: VerifierHead, section: DrafterSection, settings: TrainingSection, team: Team
    ) -> None:
        self.drafter, self.head, self.section, self.settings, self.team = drafter, head, section, settings, team
        self.cache = ArgmaxCache(head)
        self.trained = {name: one for name, one in drafter.named_parameters() if one.requires_grad}
        self.grad_P = torch.zeros(sum(one.numel() for one in self.trained.values()), device=team.device)
        start = 0
        for one in self.trained.values():
            one.grad = self.grad_P[start : start + one.numel()].view_as(one)
            start += one.numel()
        decayed = [one for one in self.trained.values() if one.ndim > 1]
        others = [one for one in self.trained.values() if one.ndim == 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
        self.skipped = self.skipped_in_a_row = 0

    def update(self, batches: Iterable[PackedBatch], lr: float) -> Measured:
        """One update from this worker's micro-batches of the global batch, which may be none. lr: for this update.

        An update whose loss or gradient is not finite changes nothing and is counted; several in a row are a
        DrafterError. An error of the store while reading, on any worker, is raised on all.
        """
        self.grad_P.zero_()
        sums, error = self._sums(), None
        try:
            for batch in batches:
                loss = self._loss(batch)
                loss.loss.backward()
                sums += _flat(loss)
        except StatehouseError as caught:
            error = caught
        self.team.agree(error)
        self.team.add(sums)
        self.team.add(self.grad_P)
        positions = int(sums[1])
        if positions == 0:  # nothing to learn from
            return self._measured(sums, grad_norm=0.0)
        self.grad_P /= positions
        norm = float(torch.linalg.vector_norm(self.grad_P))
        if not math.isfinite(norm) or not math.isfinite(float(sums[0])):
            self._skip(norm)
            return self._measured(sums, grad_norm=norm, skipped=True)
        self.skipped_in_a_row = 0
        if norm > self.settings.clip:
            self.grad_P *= self.settings.clip / norm
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return self._measured(sums, grad_norm=norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[PackedBatch]) -> Measured:
        """The loss and its counts on this worker's share of the batches, summed over workers; changes nothing."""
        sums, error = self._sums(), None
        try:
            for batch in batches:
                sums += _flat(self._loss(batch))
        except StatehouseError as caught:
            error = caught
        self.team.agree(error)
        self.team.add(sums)
        return self._measured(sums)

    def _loss(self, batch: PackedBatch) -> Loss:
        """The summed loss (not yet divided) of one micro-batch."""
        batch = self.cache.fill(batch.to(self.team.device))
        narrow = self.settings.dtype == "bfloat16"
        with torch.autocast(self.team.device.type, torch.bfloat16) if narrow else contextlib.nullcontext():
            return ttt_loss(
                self.drafter, self.head, batch.token_ids_T, batch.loss_mask_T, batch.features_TF, batch.final_TD,
                batch.lengths, steps=self.section.ttt_steps, decay=self.section.step_decay, denominator=1,
                argmax_T=batch.argmax_T,
            )  # fmt: skip

    def _sums(self) -> Tensor:
        return torch.zeros(1 + 3 * self.section.ttt_steps, dtype=torch.float64, device=self.team.device)

    def _measured(self, sums: Tensor, grad_norm: float = math.nan, skipped: bool = False) -> Measured:
        loss = float(sums[0])
        positions, covered, matched = sums[1:].view(3, -1).tolist()
        share = lambda part: tuple(n / max(1.0, of) for n, of in zip(part, positions, strict=True))  # noqa: E731
        return Measured(
            loss / max(1.0, positions[0]), int(positions[0]), share(matched), share(covered), grad_norm, skipped
        )

    def _skip(self, norm: float) -> None:
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= NON_FINITE_IN_A_ROW:
            raise DrafterError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite (norm {norm}); "
                f"the newest checkpoint is from before them: lower training.lr (now {self.settings.lr:g}) or "
                f"training.clip, with training.run=<other name>, or check the dataset with `statehouse verify`"
            )


def _flat(loss: Loss) -> Tensor:
    """What workers add up, [1 + 3K] float64: summed loss, and of each step its positions, covered and matched ones."""
    counts = torch.cat([loss.positions, loss.covered, loss.matched])
    return torch.cat([loss.loss.detach()[None].double(), counts.double()])
