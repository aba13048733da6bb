"""A training run from end to end: from URIs to a finished drafter. What Ray's workers run, and a single process too.

`drafter.sources` checks what was given, `claim` makes or finds the run (once, before any worker), `train` does the rest.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from drafter.config import DrafterConfig
from drafter.errors import DrafterError
from drafter.export import require_servable
from drafter.initial import new_drafter, parameter_counts
from drafter.loader import Loader
from drafter.run import RUN, Run
from drafter.sampler import Epoch, pack_rows, updates_per_epoch
from drafter.sources import Request, Sources, open_sources, open_verifier_weights
from drafter.team import Team
from drafter.trainer import Measured, Trainer, learning_rate
from drafter.verifier_head import VerifierHead
from drafter.verifier_weights import VerifierWeights
from storage.errors import StatehouseError

log = logging.getLogger("statehouse")

# Seconds between two log lines.
_LOG_EVERY_S = 5.0


def claim(request: Request, sources: Sources, *, fresh: bool = False) -> dict[str, Any] | None:
    """Makes or finds the run; returns the summary of a finished one, else None. Once for all workers, before they start.

    A driver that is still training the run ends at its next checkpoint. Raises DrafterError when the run is of something
    else.
    """
    run = Run(request.run)
    run.store.probe()
    if fresh:
        run.take_over(request.owner)  # first, so that nobody writes into what is deleted
    run.claim(sources.identity(request), request.provenance, fresh=fresh)
    if (summary := run.summary()) is None:
        run.take_over(request.owner)
    return summary


def finished(request: Request, sources: Sources) -> dict[str, Any] | None:
    """The summary of the run if it is there and finished, else None; writes nothing.

    Raises DrafterError when the run is of something else.
    """
    run = Run(request.run)
    if not run.store.exists(RUN):
        return None
    run.claim(sources.identity(request), request.provenance)
    return run.summary()


def drafter_config(request: Request, sources: Sources, weights: VerifierWeights) -> DrafterConfig:
    """The drafter that is asked for. Raises DrafterError when there can be none such, or none that SGLang serves."""
    layers, changed = sources.dataset.contract.capture_layers, request.drafter.config
    try:
        config = DrafterConfig.from_verifier(weights.config, sources.vocabulary.size, layers, **changed)
    except (TypeError, ZeroDivisionError) as error:
        raise DrafterError(
            f"drafter.config: expected fields of a drafter that differ from the verifier's, found {changed}: {error}"
        ) from None
    require_servable(config)
    return config


class Progress:
    """Counters of a run, which its checkpoints carry."""

    def __init__(self) -> None:
        self.update = self.tokens = self.skipped = self.resumed = 0
        self.seconds = self.waited_s = 0.0
        self.evaluations: list[dict[str, Any]] = []

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "update"}


def train(
    request: Request, team: Team | None = None, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Trains the claimed run from its newest checkpoint to its end, on this worker of the team; returns its summary.

    stop: asked after each update; when it says so on any worker, a checkpoint is written and None returned.
    Raises StatehouseError, on all workers of the team if on any.
    """
    team = team or Team()
    session, error = None, None
    try:
        session = Session(request, team)
    except StatehouseError as caught:
        error = caught
    team.agree(error)
    assert session is not None
    return session.run_to_end(stop)


class Session:
    """One worker's part of one run."""

    def __init__(self, request: Request, team: Team) -> None:
        self.request, self.settings, self.team = request, request.training, team
        self.sources = open_sources(request)
        self.run = Run(request.run)
        dataset, vocabulary = self.sources.dataset, self.sources.vocabulary
        weights = open_verifier_weights(request.verifier, dataset)
        config = drafter_config(request, self.sources, weights)
        dtype = getattr(torch, self.settings.dtype)
        drafter = new_drafter(config, vocabulary, weights, request.drafter, self.settings.seed)
        drafter.embed_tokens.to(dtype)
        head = VerifierHead(weights.lm_head_VD.to(team.device, dtype), vocabulary)
        self.trainer = Trainer(drafter.to(team.device), head, request.drafter, self.settings, team)
        lengths, shards = (dataset.sequences[name].to_numpy().astype(np.int64) for name in ("length", "shard"))
        self.lengths, self.shards = lengths, shards
        self.per_epoch = updates_per_epoch(lengths[self.sources.training_rows], self.settings.global_batch_tokens)
        self.total = self.per_epoch * self.settings.epochs
        self.progress = Progress()
        self.metrics: list[str] = []
        self.run_id = ""  # once resumed
        self.saved = 0  # update of the newest checkpoint

    # ---- the way ----

    def run_to_end(self, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """See `train`."""
        self._resume()
        self._say_what()
        if not self.progress.evaluations:
            self._evaluate()
        stopped = self._updates(stop)
        if stopped:
            return None
        if self.progress.evaluations and self.progress.evaluations[-1]["update"] < self.total:
            self._evaluate()
        if self.saved < self.total:  # else it was stopped right behind its last checkpoint
            self._checkpoint()
        return self._finish()

    def _updates(self, stop: Callable[[], bool]) -> bool:
        """All updates that are left. Returns whether it was stopped before the last."""
        progress = self.progress
        began, seconds_before, waited_before = time.monotonic(), progress.seconds, progress.waited_s
        last_line, positions = began, 0
        first = progress.update
        tokens_at_start = progress.tokens
        with Loader(self.sources.dataset, self._own_micro_batches(first)) as loader:
            for update in range(first, self.total):
                batches, tokens = self._batches(update)
                own = len(batches[self.team.rank :: self.team.world])
                lr = learning_rate(update, self.total, self.settings)
                measured = self.trainer.update((_take(loader) for _ in range(own)), lr)
                positions += measured.positions
                progress.update, progress.skipped = update + 1, self.trainer.skipped
                progress.tokens += tokens
                progress.seconds = seconds_before + time.monotonic() - began
                progress.waited_s = waited_before + loader.waited_s
                self._record(update, measured, lr, tokens)
                epoch_ends = progress.update % self.per_epoch == 0
                if epoch_ends and positions == 0 and first == 0 and update < self.per_epoch:
                    raise DrafterError(
                        f"{self.sources.dataset.uri}: no loss tokens to train on: in a whole epoch no two tokens in a row "
                        f"bear loss; check the prompts' loss masks"
                    )
                if epoch_ends and progress.update < self.total and self.progress.evaluations:
                    self._evaluate()
                stopping = bool(self.team.from_any(stop()))
                if stopping and progress.update < self.total:
                    self._checkpoint()
                    self._log("train stopped update=%d/%d; it carries on from there", progress.update, self.total)
                    return True
                if progress.update % self.settings.checkpoint_every == 0 and progress.update < self.total:
                    self._checkpoint()  # the last one: with the last evaluation
                now = time.monotonic()
                if now - last_line >= _LOG_EVERY_S or progress.update == self.total:
                    last_line = now
                    rate = (progress.tokens - tokens_at_start) / max(now - began, 1e-9)
                    eta = (self.total - progress.update) * (now - began) / (progress.update - first)
                    wait = loader.waited_s / max(now - began, 1e-9)
                    self._log(
                        "train update=%d/%d epoch=%d loss=%.3f acc=%s lr=%.1e tokens_per_s=%s wait=%.0f%% eta=%.0fs%s",
                        progress.update, self.total, update // self.per_epoch + 1, measured.loss,
                        _shares(measured.accuracy), lr, f"{rate:,.0f}", 100 * wait, eta,
                        f" skipped={progress.skipped}" if progress.skipped else "",
                    )  # fmt: skip
        return False

    def _resume(self) -> None:
        trainer, run = self.trainer, self.run
        newest, error = None, None
        try:
            self.run_id = run.checkpoints.run_id = run.id()
            if self.team.rank == 0:
                run.require_own(self.request.owner, self.run_id)
                newest = run.checkpoints.newest(trainer.trained)
        except StatehouseError as caught:
            error = caught
        self.team.agree(error)
        update = self.team.from_first(0 if newest is None else newest)
        if not update:
            return
        try:
            state = run.checkpoints.load(update, trainer.trained, trainer.optimizer)
            for name in self.progress.to_dict():
                setattr(self.progress, name, state[name])
            if self.team.rank == 0:
                self.metrics = run.metrics(update)
        except StatehouseError as caught:
            error = caught
        except (KeyError, ValueError, TypeError) as caught_in_it:
            error = DrafterError(
                f"{run.uri}: state.json of update {update}: expected the counters of a checkpoint, found "
                f"{caught_in_it!r}; start the run over with --fresh"
            )
        self.team.agree(error)
        self.progress.update = self.saved = update
        self.progress.resumed += 1
        trainer.skipped = self.progress.skipped
        self._log("train resumed update=%d/%d where=%s", update, self.total, run.uri)

    def _finish(self) -> dict[str, Any]:
        """Puts the drafter and the summary; all workers return the latter."""
        progress, run = self.progress, self.run
        dtype = getattr(torch, self.settings.dtype)
        before, after = (progress.evaluations[at] if progress.evaluations else {} for at in (0, -1))
        summary = {
            "updates": self.total,
            "epochs": self.settings.epochs,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 1),
            "tokens_per_s": round(progress.tokens / max(progress.seconds, 1e-9), 1),
            "wait_share": round(progress.waited_s / max(progress.seconds, 1e-9), 4),
            "sequences": len(self.sources.training_rows),
            "held_out_sequences": len(self.sources.held_rows),
            "loss_before": before.get("loss"),
            "loss_after": after.get("loss"),
            "accuracy_before": before.get("accuracy"),
            "accuracy_after": after.get("accuracy"),
            "evaluations": progress.evaluations,
            "skipped_updates": progress.skipped,
            "resumed": progress.resumed,
            "workers": self.team.world,
            "parameters": parameter_counts(self.trainer.drafter),
            "draft_vocab_size": self.sources.vocabulary.size,
        }
        error = None
        try:
            if self.team.rank == 0:
                run.require_own(self.request.owner, self.run_id)
                run.put_drafter(self.trainer.drafter, self.request.layer_ids, dtype)
                run.require_own(self.request.owner, self.run_id)  # a drafter takes a while to store
                run.put_summary(summary)
        except StatehouseError as caught:
            error = caught
        self.team.agree(error)
        self._log("train done %s", describe(summary, run.uri))
        return summary

    # ---- its steps ----

    def _batches(self, update: int) -> tuple[list[NDArray[np.int64]], int]:
        """Micro-batches of dataset rows of this update, over all workers, and their tokens."""
        rows = self.sources.training_rows
        epoch, within = divmod(update, self.per_epoch)
        if getattr(self, "_epoch", (None, None))[0] != epoch:
            self._epoch = (epoch, self._make_epoch(epoch))
        packed = [rows[part] for part in self._epoch[1][within]]
        return packed, int(sum(self.lengths[part].sum() for part in packed))

    def _make_epoch(self, epoch: int) -> Epoch:
        rows = self.sources.training_rows
        return Epoch(
            self.settings.seed,
            epoch,
            self.lengths[rows],
            self.shards[rows],
            global_batch_tokens=self.settings.global_batch_tokens,
            micro_batch_tokens=self.settings.micro_batch_tokens,
        )

    def _own_micro_batches(self, first: int) -> Iterator[NDArray[np.int64]]:
        """This worker's micro-batches from update `first` on; runs in the loader's thread."""
        rows = self.sources.training_rows
        start, within = divmod(first, self.per_epoch)
        for number in range(start, self.settings.epochs):
            epoch = self._make_epoch(number)
            for update in range(within if number == start else 0, len(epoch)):
                for part in epoch[update][self.team.rank :: self.team.world]:
                    yield rows[part]

    def _evaluate(self) -> None:
        """The loss on the held-out sequences, if there are any."""
        rows = self.sources.held_rows
        if not len(rows):
            return
        packed = pack_rows(rows, self.lengths, self.settings.micro_batch_tokens)
        with Loader(self.sources.dataset, packed[self.team.rank :: self.team.world]) as loader:
            measured = self.trainer.evaluate(loader)
        entry = {
            "update": self.progress.update,
            "loss": measured.loss,
            "accuracy": list(measured.accuracy),
            "covered": list(measured.covered),
            "positions": measured.positions,
        }
        self.progress.evaluations.append(entry)
        self._log(
            "evaluate update=%d held_out_sequences=%d loss=%.3f acc=%s",
            self.progress.update, len(rows), measured.loss, _shares(measured.accuracy),
        )  # fmt: skip

    def _record(self, update: int, measured: Measured, lr: float, tokens: int) -> None:
        if self.team.rank:
            return
        line = {
            "update": update,
            "epoch": update // self.per_epoch,
            "loss": measured.loss if np.isfinite(measured.loss) else None,
            "accuracy": [round(share, 5) for share in measured.accuracy],
            "positions": measured.positions,
            "lr": lr,
            "grad_norm": measured.grad_norm if np.isfinite(measured.grad_norm) else None,
            "tokens": tokens,
            "seconds": round(self.progress.seconds, 3),
            "waited_s": round(self.progress.waited_s, 3),
        }
        self.metrics.append(json.dumps(line | ({"skipped": True} if measured.skipped else {})))

    def _checkpoint(self) -> None:
        error, began = None, time.monotonic()
        try:
            if self.team.rank == 0:
                self.run.require_own(self.request.owner, self.run_id)
                self.run.put_metrics(self.metrics)
                self.run.checkpoints.save(
                    self.progress.update,
                    self.trainer.trained,
                    self.trainer.optimizer,
                    {
                        "epoch": self.progress.update // self.per_epoch,
                        "update_in_epoch": self.progress.update % self.per_epoch,
                        **self.progress.to_dict(),
                        "written_by": {"pid": os.getpid()},
                    },
                    self.settings.keep_checkpoints,
                )
        except StatehouseError as caught:
            error = caught
        self.team.agree(error)
        self.saved = self.progress.update
        self._log("checkpoint update=%d seconds=%.1f", self.progress.update, time.monotonic() - began)

    def _say_what(self) -> None:
        counts = parameter_counts(self.trainer.drafter)
        self._log(
            "train start run=%s sequences=%d held_out=%d updates=%d epochs=%d tokens_an_update=%s workers=%d "
            "parameters=%s trained=%s draft_vocab=%d dtype=%s",
            self.run.uri, len(self.sources.training_rows), len(self.sources.held_rows), self.total,
            self.settings.epochs, f"{self.lengths[self.sources.training_rows].sum() / self.per_epoch:,.0f}",
            self.team.world, f"{counts['all']:,}", f"{counts['trained']:,}", self.sources.vocabulary.size,
            self.settings.dtype,
        )  # fmt: skip

    def _log(self, message: str, *parts: object) -> None:
        if self.team.rank == 0:
            log.info(message, *parts)


def describe(summary: Mapping[str, Any], uri: str) -> str:
    """One line of fields about a finished run."""
    loss = (
        f"loss={summary['loss_before']:.3f}->{summary['loss_after']:.3f} acc={_shares(summary['accuracy_after'])} "
        if summary["loss_before"] is not None
        else ""
    )
    return f"updates={summary['updates']} seconds={summary['seconds']:.0f} {loss}where={uri}"


def _take(loader: Loader) -> Any:
    batch = loader.next()
    assert batch is not None  # as many as the sampler dealt out
    return batch


def _shares(shares: Any) -> str:
    return "[" + " ".join(f"{share:.2f}".lstrip("0") or "0" for share in shares) + "]"
