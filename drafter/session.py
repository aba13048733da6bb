"""A training run from end to end: from URIs to a finished drafter. What Ray's workers run, and a single process too.

`drafter.sources` checks what was given, `drafter.claim` makes or finds the run (once, before any worker), `train` does the
rest.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from drafter.cache import cached_opener
from drafter.checkpoint import Snapshot, Writer
from drafter.claim import chosen_by, drafter_config, layer_ids
from drafter.errors import DrafterError
from drafter.initial import new_drafter, parameter_counts
from drafter.journal import Journal
from drafter.loader import Counts, Loader, until
from drafter.model import Drafter
from drafter.patience import patiently
from drafter.progress import TELEMETRY, Progress, describe, evaluation_entry, shares, update_line
from drafter.run import Run
from drafter.sampler import Epoch, pack_rows
from drafter.sources import Request, open_sources, open_verifier_weights
from drafter.start import begin
from drafter.team import Stopped, Team
from drafter.tracking import open_trackers
from drafter.trainer import Trainer, learning_rate
from drafter.verifier_head import VerifierHead
from storage.buffers import BufferPool
from storage.errors import StatehouseError

log = logging.getLogger("statehouse")

Result = TypeVar("Result")
# Seconds between two log lines.
_LOG_EVERY_S = 5.0


def train(
    request: Request,
    team: Team | None = None,
    stop: Callable[[], bool] = lambda: False,
    leave: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Trains the claimed run from its newest checkpoint to its end, on this worker of the team; returns its summary.

    stop: asked after each update; when it says so on any worker, a checkpoint is written and None returned. leave: the
    same, asked before each micro-batch of an evaluation, which is made anew when the run is carried on.
    Raises StatehouseError, on all workers of the team if on any.
    """
    team = team or Team()
    session, error = None, None
    try:
        session = Session(request, team, leave)
    except StatehouseError as caught:
        error = caught
    team.agree(error)
    assert session is not None
    return session.run_to_end(stop)


class Session:
    """One worker's part of one run."""

    def __init__(self, request: Request, team: Team, leave: Callable[[], bool] = lambda: False) -> None:
        self.request, self.settings, self.team, self.leave = request, request.training, team, leave
        self.sources = open_sources(request, cached_opener(self.settings.loader))
        self.run = Run(request.run)
        self.weights = open_verifier_weights(request.verifier, self.sources.dataset)
        self.config = drafter_config(request, self.sources, self.weights)
        dtype = getattr(torch, self.settings.dtype)
        drafter = self._new_drafter()
        self._log("train begins %s", begin(drafter, request.drafter, self.weights.config))
        if not self.config.own_embedding:  # frozen
            drafter.embed_tokens.to(dtype)
        norm = self.weights.final_norm(self.sources.dataset.contract, request.dataset)
        head = VerifierHead(self.weights.lm_head_VD.to(team.device, dtype), self.sources.vocabulary, norm)
        if self.settings.parallel == "shard" and team.world == 1 and not torch.distributed.is_initialized():
            raise DrafterError(
                "training.parallel: shard shares weights out over several workers, and there is one: set it to replicate"
            )
        name_of = self.sources.name_of
        self.trainer = Trainer(drafter.to(team.device), head, request.drafter, self.settings, team, name_of)
        self.rows = self.sources.items.rows(self.sources.training_items, self.sources.weights)
        self.per_epoch = self.rows.updates_per_epoch(self.settings.global_batch_tokens)
        self.total = self.per_epoch * self.settings.epochs
        self.every = self.settings.evaluate_every or self.per_epoch
        self.progress = Progress()
        self.journal = Journal(self.run, [], [])
        self.writer = Writer()
        self.buffers = BufferPool(self.settings.loader.ahead_bytes)
        self.run_id = ""  # once resumed
        self.saved = 0  # update of the newest checkpoint

    def _new_drafter(self) -> Drafter:
        return new_drafter(self.config, self.sources.vocabulary, self.weights, self.request.drafter, self.settings.seed)

    # ---- the way ----

    def run_to_end(self, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """See `train`."""
        try:
            self._resume()
            self._say_what()
            if not self.progress.evaluations or self.progress.evaluation_due(self.every, self.total):
                self._evaluate()
            self._updates(stop)
            if self.progress.evaluations and self.progress.evaluations[-1]["update"] < self.progress.update:
                self._evaluate()
            if self.saved < self.progress.update:  # else it was stopped right behind its last checkpoint
                self._checkpoint()
            self._checkpoint_end()
            summary = self._finish()
            self.journal.close(summary)
            return summary
        except Stopped:
            if self.saved != self.progress.update:
                self._checkpoint()
            self._checkpoint_end()
            self._log("train stopped update=%d/%d; it carries on from there", self.progress.update, self.total)
            return None
        finally:
            self.writer.wait()
            self.journal.close()

    def _updates(self, stop: Callable[[], bool]) -> None:
        """All updates that are left, or until training.patience ends. Raises Stopped when it is stopped on the way."""
        progress, settings = self.progress, self.settings
        began, seconds_before = time.monotonic(), progress.seconds
        last_line, last_update, positions, first = began, began, 0, progress.update
        tokens_at_start, waited_at_start, seen = progress.tokens, progress.waited_s, Counts()
        with self._loader(self._own_micro_batches(first)) as loader:
            for update in range(first, self.total):
                if settings.patience is not None and progress.without_gain() >= settings.patience:
                    self._log("train ends early update=%d/%d patience=%d", update, self.total, settings.patience)
                    break
                chosen, tokens = self._batches(update)
                lr = learning_rate(update, self.total, settings)
                own = len(chosen[self.team.rank :: self.team.world])
                measured = self.trainer.update(islice(loader, own), lr)
                positions += measured.positions
                counts = loader.counts()
                stopping, failed, loading = self._tell(stop(), counts.since(seen))
                seen, now = counts, time.monotonic()
                progress.update, progress.skipped = update + 1, self.trainer.skipped
                progress.tokens += tokens
                progress.seconds = seconds_before + now - began
                progress.waited_s += loading.waited_s / self.team.world
                progress.bad_sequences += loading.bad_sequences
                self._record(update_line(
                    update, update // self.per_epoch, measured, lr, tokens, now - last_update, loading, self.team.world
                ))  # fmt: skip
                last_update = now
                epoch_ends = progress.update % self.per_epoch == 0
                if epoch_ends and positions == 0 and first == 0 and update < self.per_epoch:
                    raise DrafterError(
                        f"{self.sources.dataset.uri}: no loss tokens to train on: in a whole epoch no two tokens in a row "
                        f"bear loss; check the prompts' loss masks"
                    )
                if failed:
                    self._checkpoint_end()
                if progress.evaluations and progress.evaluation_due(self.every, self.total):
                    best = self._evaluate()
                    if best and settings.keep_best:
                        self._checkpoint()
                    last_update, seen = time.monotonic(), counts.with_shared(loader.counts())
                if stopping and progress.update < self.total:
                    raise Stopped
                if progress.update % settings.checkpoint_every == 0 and progress.update not in (self.total, self.saved):
                    self._checkpoint()  # the last one: with the last evaluation
                if now - last_line >= _LOG_EVERY_S or progress.update == self.total:
                    last_line = now
                    took = max(now - began, 1e-9)
                    self._log(
                        "train update=%d/%d epoch=%d loss=%.3f acc=%s lr=%.1e tokens_per_s=%s wait=%.0f%% eta=%.0fs%s%s",
                        progress.update, self.total, update // self.per_epoch + 1, measured.loss,
                        shares(measured.accuracy), lr, f"{(progress.tokens - tokens_at_start) / took:,.0f}",
                        100 * (progress.waited_s - waited_at_start) / took,
                        (self.total - progress.update) * took / (progress.update - first),
                        f" skipped={progress.skipped}" if progress.skipped else "",
                        f" bad_sequences={progress.bad_sequences}" if progress.bad_sequences else "",
                    )  # fmt: skip

    def _tell(self, stop: bool, loading: Counts) -> tuple[bool, bool, Counts]:
        """Whether any worker was asked to stop, whether the last checkpoint failed, what loading took all workers."""
        own = asdict(loading)
        stops, failures, *sums = self.team.sums([stop, self.writer.failed(), *(own[name] for name in TELEMETRY)])
        whole: dict[str, Any] = {name: type(own[name])(value) for name, value in zip(TELEMETRY, sums, strict=True)}
        return stops > 0, failures > 0, Counts(**whole)

    def _resume(self) -> None:
        trainer, run = self.trainer, self.run
        shapes, newest, error, lines = trainer.shapes(), None, None, []
        try:
            self.run_id = run.checkpoints.run_id = self._patiently(run.id)
            if self.team.rank == 0:
                self._patiently(lambda: run.require_own(self.request.owner, self.run_id))
                newest = self._patiently(lambda: run.checkpoints.newest(shapes))
        except StatehouseError as caught:
            error = caught
        self.team.agree(error)
        update, snapshot = self.team.from_first(0 if newest is None else newest), None
        try:
            if update:
                state, snapshot = self._patiently(lambda: run.checkpoints.load(update, shapes))
                for name in self.progress.to_dict():
                    setattr(self.progress, name, state[name])
                lines = run.metrics(update) if self.team.rank == 0 else []
            if self.team.rank == 0:
                config = {"drafter": self.request.drafter.model_dump(mode="json"), "training": self.settings.learnt()}
                trackers = open_trackers(self.settings.trackers, run.store, self.run_id, update, config)
                self.journal = Journal(run, lines, trackers)
                self.journal.resumed(update, self.progress.evaluations)
        except StatehouseError as caught:
            error = caught
        except (KeyError, ValueError, TypeError) as caught_in_it:
            error = DrafterError(
                f"{run.uri}: state.json of update {update}: expected the counters of a checkpoint, found "
                f"{caught_in_it!r}; start the run over with --fresh"
            )
        self.team.agree(error)
        if snapshot is None:
            return
        trainer.restore(snapshot)
        self.progress.update = self.saved = update
        self.progress.resumed += 1
        trainer.skipped = self.progress.skipped
        self._log("train resumed update=%d/%d where=%s", update, self.total, run.uri)

    def _finish(self) -> dict[str, Any]:
        """Puts the drafter and the summary; all workers return the latter."""
        progress, sources = self.progress, self.sources
        summary = progress.summary() | {
            "updates": progress.update,
            "ended_early": progress.update < self.total,
            "epochs": self.settings.epochs,
            **sources.counts(self.request.drafter.ttt_steps),
            "exported": progress.update,
            "chosen_by": chosen_by(self.settings),
            "workers": self.team.world,
            "parameters": parameter_counts(self.trainer.drafter),
            "draft_vocab_size": sources.vocabulary.size,
        }
        best, weights = summary["best"], self.trainer.weights.whole(self.trainer.trained)
        error = None
        try:
            if self.team.rank == 0:
                wanted = best["update"] if self.settings.export == "best" and best else progress.update
                if wanted != progress.update and (found := self._best_weights(wanted)):
                    weights, summary["exported"] = found, wanted
                self._patiently(lambda: self._put_results(weights, summary))
        except StatehouseError as caught:
            error = caught
        self.team.agree(error)
        self._log("train done %s", describe(summary, self.run.uri))
        return summary

    def _best_weights(self, update: int) -> dict[str, torch.Tensor] | None:
        try:
            return self._patiently(lambda: self.run.checkpoints.load(update, self.trainer.shapes()))[1].model
        except DrafterError as error:
            log.warning("the best checkpoint is gone, the last becomes the drafter: %s", error)
            return None

    def _put_results(self, weights: Mapping[str, torch.Tensor], summary: Mapping[str, Any]) -> None:
        run, drafter = self.run, self._new_drafter()
        with torch.no_grad():
            for name, one in drafter.named_parameters():
                if name in weights:
                    one.copy_(weights[name])
        run.require_own(self.request.owner, self.run_id)
        run.put_drafter(
            drafter, layer_ids(self.request, self.config, self.weights), getattr(torch, self.settings.dtype)
        )
        run.require_own(self.request.owner, self.run_id)  # a drafter takes a while to store
        run.put_summary(summary)

    # ---- its steps ----

    def _loader(self, micro_batches: Iterator[NDArray[np.int64]] | list[NDArray[np.int64]]) -> Loader:
        settings = self.settings
        return Loader(
            self.sources.mixture, self.sources.items, micro_batches, settings.loader,
            bad_shards=settings.bad_shards, device=self.team.device, buffers=self.buffers,
        )  # fmt: skip

    def _batches(self, update: int) -> tuple[list[NDArray[np.int64]], int]:
        """Micro-batches of items of this update, over all workers, and their tokens."""
        epoch, within = divmod(update, self.per_epoch)
        if getattr(self, "_epoch", (None, None))[0] != epoch:
            self._epoch = (epoch, self._make_epoch(epoch))
        packed = [self.sources.training_items[part] for part in self._epoch[1][within]]
        return packed, int(sum(self.sources.items.length[part].sum() for part in packed))

    def _make_epoch(self, epoch: int) -> Epoch:
        settings = self.settings
        return Epoch(
            settings.seed, epoch, self.rows,
            global_batch_tokens=settings.global_batch_tokens, micro_batch_tokens=settings.micro_batch_tokens,
        )  # fmt: skip

    def _own_micro_batches(self, first: int) -> Iterator[NDArray[np.int64]]:
        """This worker's micro-batches from update `first` on; runs in the loader's thread."""
        start, within = divmod(first, self.per_epoch)
        for number in range(start, self.settings.epochs):
            epoch = self._make_epoch(number)
            for update in range(within if number == start else 0, len(epoch)):
                for part in epoch[update][self.team.rank :: self.team.world]:
                    yield self.sources.training_items[part]

    def _evaluate(self) -> bool:
        """The loss on the held-out sequences, if there are any; whether it is the best so far. Raises Stopped."""
        held, items = self.sources.held_items, self.sources.items
        if not len(held):
            return False
        packed = [
            held[part] for part in pack_rows(np.arange(len(held)), items.length[held], self.settings.micro_batch_tokens)
        ]
        with self._loader(packed[self.team.rank :: self.team.world]) as loader:
            asked: list[bool] = []
            measured = self.trainer.evaluate(until(self.leave, loader, asked), self.sources.source_of(held))
        if self.team.from_any(bool(asked)):  # of a part of the sequences on some worker: it says nothing
            raise Stopped
        entry = evaluation_entry(self.progress.update, measured)
        self.progress.evaluations.append(entry)
        self.journal.evaluation(entry)
        self._log(
            "evaluate update=%d held_out_sequences=%d loss=%.3f acc=%s",
            self.progress.update, self.sources.sequences(held), measured.loss, shares(measured.accuracy),
        )  # fmt: skip
        return self.progress.best() is entry

    def _record(self, line: dict[str, Any]) -> None:
        if self.team.rank == 0:
            self.journal.update(line)

    def _checkpoint(self) -> None:
        """Begins to write one, once the one before is there. All workers call it."""
        self._checkpoint_end()
        snapshot, update = self.trainer.snapshot(), self.progress.update
        best = (self.progress.best() or {}).get("update") if self.settings.keep_best else None
        if self.team.rank == 0:
            counters = {
                "epoch": update // self.per_epoch,
                "update_in_epoch": update % self.per_epoch,
                **self.progress.to_dict(),
                "evaluations": list(self.progress.evaluations),
                "written_by": {"pid": os.getpid(), "workers": self.team.world},
            }
            store_metrics = self.journal.storing()
            self.writer.start(
                lambda: self._patiently(lambda: self._write(update, snapshot, counters, best, store_metrics))
            )
        self.saved = update

    def _write(
        self,
        update: int,
        snapshot: Snapshot,
        counters: Mapping[str, Any],
        best: int | None,
        metrics: Callable[[], None],
    ) -> None:
        """In the writer's thread."""
        began = time.monotonic()
        self.run.require_own(self.request.owner, self.run_id)
        metrics()
        self.run.checkpoints.save(update, snapshot, counters, self.settings.keep_checkpoints, best)
        self._log("checkpoint update=%d seconds=%.1f", update, time.monotonic() - began)

    def _checkpoint_end(self) -> None:
        """Waits for the checkpoint that is being written. Raises its error on all workers."""
        self.team.agree(self.writer.wait())

    def _patiently(self, action: Callable[[], Result]) -> Result:
        return patiently(action, self.settings.loader.patience_s)

    def _say_what(self) -> None:
        counts, sources = parameter_counts(self.trainer.drafter), self.sources
        self._log(
            "train start run=%s sequences=%d held_out=%d updates=%d epochs=%d tokens_an_update=%s workers=%d "
            "parameters=%s trained=%s draft_vocab=%d dtype=%s%s",
            self.run.uri, sources.sequences(sources.training_items), sources.sequences(sources.held_items), self.total,
            self.settings.epochs, f"{self.rows.lengths.sum() / self.per_epoch:,.0f}", self.team.world,
            f"{counts['all']:,}", f"{counts['trained']:,}", sources.vocabulary.size, self.settings.dtype,
            sources.said(self.request.drafter.ttt_steps),
        )  # fmt: skip

    def _log(self, message: str, *parts: object) -> None:
        if self.team.rank == 0:
            log.info(message, *parts)
