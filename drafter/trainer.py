"""One update of a drafter: forward and backward over packed micro-batches, summed over workers, clipped, applied.

The loss of an update is divided by the *positions* of the whole global batch, known only once all micro-batches have been
counted; so gradients are summed (drafter.parallel), then divided.

Shape suffixes as in drafter/model.py, and K steps.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafter.allocator import keep_freed_memory
from drafter.batch import PackedBatch, Planes
from drafter.checkpoint import Shapes, Snapshot
from drafter.divergences import ACCEPTANCE
from drafter.errors import DrafterError
from drafter.loss import Loss, ttt_loss
from drafter.metrics import Fair, fair_metrics
from drafter.model import Drafter
from drafter.optimizer import Optimizer
from drafter.parallel import Replicated, Sharded, Weights
from drafter.precision import bf16_over_fp32
from drafter.recipe import DrafterSection, TrainingSection
from drafter.team import Team
from drafter.verifier_cache import VerifierCache
from drafter.verifier_head import VerifierHead
from storage.errors import StatehouseError

log = logging.getLogger("statehouse")


@dataclass(frozen=True)
class Measured:
    """Sums over some batches, divided. loss: per step-0 position. accuracy: [K] greedy matches with the verifier's
    likeliest token of its whole vocabulary. covered: [K] share whose likeliest token the drafter can propose. fair: by
    source, where it was asked for (`drafter.metrics`).
    """

    loss: float
    positions: int
    accuracy: tuple[float, ...]
    covered: tuple[float, ...]
    grad_norm: float = math.nan
    skipped: bool = False
    fair: Mapping[str, Fair] = field(default_factory=dict)


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
        self,
        drafter: Drafter,
        head: VerifierHead,
        section: DrafterSection,
        settings: TrainingSection,
        team: Team,
        name_of: Callable[[int], str] = str,
    ) -> None:
        """name_of: what to call a row of a batch (`PackedBatch.rows`) in an error."""
        self.name_of = name_of
        self.drafter, self.head, self.section, self.settings, self.team = drafter, head, section, settings, team
        if section.lm_head == "frozen" and drafter.lm_head.weight.shape == head.draft_weight_WD.shape:
            # The very rows that teach: in the dtype of the products, and kept once.
            drafter.lm_head.weight = torch.nn.Parameter(head.draft_weight_WD, requires_grad=False)
        self.cache = VerifierCache(head, inside=section.loss in ACCEPTANCE)
        # Mean acceptance of each step in the update before, NaN where none has learnt anything yet: what `lk_hybrid` weighs
        # its parts by. Of this update it would be known only after all micro-batches of all workers.
        self.accepted: tuple[float, ...] | None = None
        if team.device.type == "cpu":
            keep_freed_memory()
            if settings.dtype == "bfloat16" and team.rank == 0 and (times := bf16_over_fp32()) > 2:
                log.warning(
                    "training.dtype: this CPU takes %.0f times as long for a product in bfloat16 as in float32: "
                    "training.dtype=float32 is faster here", times,
                )  # fmt: skip
        if settings.recompute:
            recompute_mlp(drafter)
        if settings.compile:
            compile_layer(drafter)
        self.weights: Weights = (Sharded if settings.parallel == "shard" else Replicated)(drafter, team)
        self.optimizer = Optimizer(self.weights.trained, settings)
        self.skipped = self.skipped_in_a_row = 0

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return self.weights.trained

    def update(self, batches: Iterable[PackedBatch | Planes], lr: float) -> Measured:
        """One update from this worker's micro-batches of the global batch, which may be none. lr: for this update.

        An update whose loss or gradient is not finite, on any worker, changes nothing and is counted; several in a row
        are a DrafterError, and so is a sequence whose stored states are not finite, unless settings.bad_shards skips it.
        An error of the store while reading, on any worker, is raised on all.
        """
        self.weights.begin()
        sums, error = self._sums(), None
        try:
            for batch in batches:
                loss = self.weights.forward(lambda batch=batch: self._loss(batch, self.accepted))  # type: ignore[misc]
                loss.loss.backward()
                sums += _flat(loss)
        except StatehouseError as caught:
            error = caught
        self.team.agree(error)
        self.team.add(sums)
        self.weights.finish()
        positions = int(sums[1])
        if positions == 0:  # nothing to learn from
            return self._measured(sums, grad_norm=0.0)
        norm = self.weights.norm() / positions
        if not math.isfinite(norm) or not math.isfinite(float(sums[0])):
            self._skip(norm)
            return self._measured(sums, grad_norm=norm, skipped=True)
        self.skipped_in_a_row = 0
        share = min(1.0, self.settings.clip / norm if norm else 1.0) / positions
        for gradient in self.weights.gradients():
            gradient *= share
        self.optimizer.step(lr)
        if self.section.loss == "lk_hybrid":
            learnt, accepted = sums[1:].view(5, -1)[3:].tolist()
            before = self.accepted or [math.nan] * len(learnt)
            self.accepted = tuple(a / n if n else old for a, n, old in zip(accepted, learnt, before, strict=True))
        return self._measured(sums, grad_norm=norm)

    def snapshot(self) -> Snapshot:
        """Weights and optimiser as they are now, copied to the CPU; empty but on the first worker. All workers call it."""
        return Snapshot(
            self.weights.whole(self.trained), self.weights.whole(self.optimizer.moments()), self.optimizer.steps,
            self.accepted,
        )  # fmt: skip

    def restore(self, snapshot: Snapshot) -> None:
        """Weights and optimiser as they were. All workers call it, each with the whole snapshot."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(self.weights.like(parameter, snapshot.model[name]))
        moments = {
            name: self.weights.like(self.trained[name.rsplit(".", 1)[0]], one) for name, one in snapshot.moments.items()
        }
        self.optimizer.restore(moments, snapshot.steps)
        self.accepted = snapshot.accepted

    def shapes(self) -> Shapes:
        """What a snapshot of this drafter holds."""
        model = {name: tuple(one.shape) for name, one in self.trained.items()}
        return Shapes(model, self.optimizer.shapes(), self.section.ttt_steps)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[PackedBatch | Planes], source_of: Mapping[int, str] | None = None) -> Measured:
        """The loss and its counts on this worker's share of the batches, summed over workers; changes nothing.

        `lk_hybrid` weighs each row by its own acceptance here, so that losses of different updates can be compared.
        source_of: of every row (`PackedBatch.rows`) that any worker has, the same on all: then the fair numbers are there
        for each source.
        """
        sums, error = self._sums(), None
        fair = {name: Fair.zero(self.section.ttt_steps) for name in sorted(set((source_of or {}).values()))}
        self.weights.gather()
        try:
            for batch in batches:
                sums += _flat(self._loss(batch))
                if source_of:
                    for name, found in self._fair(batch, [source_of[row] for row in batch.rows]).items():
                        fair[name] = fair[name] + found
        except StatehouseError as caught:
            error = caught
        self.team.agree(error)
        self.weights.release()
        self.team.add(sums)
        for name, found in fair.items():
            self.team.add(flat := found.flat().to(self.team.device))
            fair[name] = Fair.of_flat(flat, self.section.ttt_steps)
        return replace(self._measured(sums), fair=fair)

    def _fair(self, given: PackedBatch | Planes, sources: list[str]) -> dict[str, Fair]:
        batch = given.to(self.team.device)
        with self._precision():
            return fair_metrics(
                self.drafter, self.head, batch.token_ids_T, batch.loss_mask_T, batch.features_TF, batch.final_TD,
                batch.lengths, sources, self.section.ttt_steps, batch.top_k,
            )  # fmt: skip

    def _loss(self, given: PackedBatch | Planes, accepted: Sequence[float] | None = None) -> Loss:
        """The summed loss (not yet divided) of one micro-batch. accepted: as `ttt_loss` takes it."""
        batch = self.cache.fill(given.to(self.team.device))
        loss = self._of(batch, accepted)
        # A state that no counted row reads leaves the loss alone, but not the gradients: 0 * NaN.
        if not (loss.loss.isfinite() and sound(batch)) and (bad := not_finite(batch)):
            said = "; ".join(
                f"{self.name_of(row)}: expected finite states, found {count:,}" for row, count in bad.items()
            )
            if self.settings.bad_shards == "stop":
                raise DrafterError(f"{said} that are not")
            log.warning("sequence skipped: %s that are not", said)
            loss = self._of(batch.without(set(bad)), accepted)
        return loss

    def _of(self, batch: PackedBatch, accepted: Sequence[float] | None) -> Loss:
        with self._precision():
            return ttt_loss(
                self.drafter, self.head, batch.token_ids_T, batch.loss_mask_T, batch.features_TF, batch.final_TD,
                batch.lengths, steps=self.section.ttt_steps, decay=self.section.step_decay, denominator=1,
                argmax_T=batch.argmax_T, inside_T=batch.inside_T, kind=self.section.loss,
                out_of_vocabulary=self.section.out_of_vocabulary, step_weights=self.section.step_weights,
                top_k=batch.top_k, accepted_K=accepted,
            )  # fmt: skip

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        narrow = self.settings.dtype == "bfloat16"
        return torch.autocast(self.team.device.type, torch.bfloat16) if narrow else contextlib.nullcontext()

    def _sums(self) -> Tensor:
        return torch.zeros(1 + 5 * self.section.ttt_steps, dtype=torch.float64, device=self.team.device)

    def _measured(self, sums: Tensor, grad_norm: float = math.nan, skipped: bool = False) -> Measured:
        loss = float(sums[0])
        positions, covered, matched = sums[1:].view(5, -1)[:3].tolist()
        share = lambda part: tuple(n / max(1.0, of) for n, of in zip(part, positions, strict=True))  # noqa: E731
        return Measured(
            loss / max(1.0, positions[0]), int(positions[0]), share(matched), share(covered), grad_norm, skipped
        )

    def _skip(self, norm: float) -> None:
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.settings.max_skipped:
            raise DrafterError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite (norm {norm}); "
                f"the newest checkpoint is from before them: lower training.lr (now {self.settings.lr:g}) or "
                f"training.clip, with training.run=<other name>, or check the dataset with `statehouse verify`"
            )


def _flat(loss: Loss) -> Tensor:
    """What workers add up, [1 + 5K] float64: summed loss, and of each step its positions, covered and matched ones, those
    that were learnt from, and their acceptance.
    """
    parts = (loss.positions, loss.covered, loss.matched, loss.learnt, loss.accepted)
    return torch.cat([loss.loss.detach()[None].double(), *(part.double() for part in parts)])


def sound(batch: PackedBatch) -> bool:
    """Whether all stored values are finite. In one pass, a tenth of the time that counting them takes."""
    states = [one for one in (batch.features_TF, batch.final_TD) if one is not None]
    return all(bool(extreme.isfinite()) for one in states for extreme in one.aminmax())


def not_finite(batch: PackedBatch) -> dict[int, int]:
    """{row: stored values that are NaN or infinite} of the batch's sequences that have some."""
    parts = [batch.features_TF] if batch.final_TD is None else [batch.features_TF, batch.final_TD]
    found = [
        sum(int((~one.isfinite()).sum()) for one in states)
        for states in zip(*(part.split(batch.lengths) for part in parts), strict=True)
    ]
    return {row: count for row, count in zip(batch.rows, found, strict=True) if count}


def recompute_mlp(drafter: Drafter) -> None:
    """Lets the MLP, which holds three times its inner width for every row and step, be computed again when it is due."""
    mlp = drafter.midlayer.mlp
    forward = mlp.forward
    mlp.forward = lambda *given: checkpoint(forward, *given, use_reentrant=False)  # type: ignore[method-assign]


def compile_layer(drafter: Drafter) -> None:
    """Compiles what the decoder layer does after attention, row by row. Lengths may vary.

    Not what comes before: it is called with views of several kinds, each of which would be compiled anew, and given up.
    """
    layer = drafter.midlayer
    layer.outputs = torch.compile(layer.outputs, dynamic=True)  # type: ignore[method-assign]
