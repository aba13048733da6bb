"""train: a drafter from the store, by Ray Train: `training.workers` processes, each reading its own share of every batch.

Run it again after any failure: it carries on from the run's newest checkpoint, with any number of workers. A finished
run is left as it is; `--fresh` deletes it and starts over.

Ray Train starts the workers, joins them, and starts them again when one dies. Checkpoints are ours (drafter.checkpoint),
in the run's own store, where a new driver on any machine finds them; Ray's are not used, so the RunConfig.storage_path
that Ray asks for holds a few markers and is a temporary folder, on every node its own.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import tempfile
import threading
import time
from typing import Any

from drafter.recipe import TrainingSection
from drafter.run import REPORT
from ray_jobs import job
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from ray_jobs.replicas.sglang import engine_layer_ids
from ray_jobs.training_report import put_report
from ray_jobs.verifier import read_config, resolve_verifier, text_config
from storage.errors import RecipeError, StatehouseError
from storage.objects import open_store
from vocab.chosen import require_chosen_as
from vocab.mapping import DraftVocab

# Seconds between two looks at what the workers said.
_POLL_S = 0.5
# Seconds that a stopped driver gives its workers, at most, to finish an update and write a checkpoint: that of Kimi-K2.5's
# drafter is 13 GB. Below RAY_JOB_STOP_WAIT_TIME_S of deploy/node.env.
_STOP_S = 110.0
# How often Ray looks after its workers: the loss of one is seen, and the end of training reported, this much later.
_HEALTH_CHECK_S = "0.5"


class Mailbox:
    """An actor between driver and workers: their log lines and errors go one way, the wish to stop the other."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] = []
        self._errors: list[str] = []
        self._starts = 0
        self._stop, self._left = False, True  # nobody is there yet

    def started(self) -> int:
        """Worker 0 began; returns how often by now. What the workers before it said is over."""
        self._starts, self._left = self._starts + 1, False
        self._errors.clear()
        return self._starts

    def post(self, level: int, line: str) -> None:
        self._lines.append((level, line))

    def fail(self, line: str, by_others: bool) -> None:
        """A worker's error. by_others: it only says that another worker has one."""
        self._errors.insert(len(self._errors) if by_others else 0, line)

    def take(self) -> list[tuple[int, str]]:
        lines, self._lines = self._lines, []
        return lines

    def error(self) -> str | None:
        return self._errors[0] if self._errors else None

    def stop(self) -> None:
        self._stop = True

    def stopping(self) -> bool:
        return self._stop

    def leave(self) -> None:
        """Worker 0 ended, whichever way."""
        self._left = True

    def left(self) -> bool:
        return self._left


class _ToMailbox(logging.Handler):
    def __init__(self, mailbox: Any) -> None:
        super().__init__()
        self.mailbox = mailbox

    def emit(self, record: logging.LogRecord) -> None:
        self.mailbox.post.remote(record.levelno, record.getMessage())


class _StopAsked:
    """Asks the mailbox twice a second, in a thread: so the answer is there when an update ends, and costs it nothing."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox, self._asked, self._over = mailbox, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._ask, name="stop-asked", daemon=True)
        self._thread.start()

    def __call__(self) -> bool:
        return self._asked.is_set()

    def close(self) -> None:
        self._over.set()
        self._thread.join(2 * _POLL_S)

    def _ask(self) -> None:
        import ray

        while not self._over.wait(_POLL_S):
            try:
                if ray.get(self._mailbox.stopping.remote()):
                    self._asked.set()
                    return
            except ray.exceptions.RayError:  # the driver is gone, and this worker will follow
                return


def _work(config: dict[str, Any]) -> dict[str, Any] | None:
    """One worker, in a process that Ray Train has joined to the others. Returns the run's summary, None when stopped.

    Errors that a user can cause go to the mailbox, and the worker returns: raised, they would be taken for a lost
    worker and tried `max_failures` times again.
    """
    import ray
    import ray.train
    import ray.train.torch
    import torch

    from drafter.session import train
    from drafter.sources import Request
    from drafter.team import OthersFailed, Team

    mailbox, request = config["mailbox"], Request(**config["request"])
    context = ray.train.get_context()
    team = Team(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    if team.device.type == "cpu":
        torch.set_num_threads(request.training.cpus_per_worker)
    log = logging.getLogger("statehouse")
    handler = _ToMailbox(mailbox)
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        if team.rank == 0 and (starts := ray.get(mailbox.started.remote())) > 1:
            log.warning("workers started again restarts=%d", starts - 1)
        error = None
        try:  # on this node it may lie elsewhere, or have to be fetched
            folder = resolve_verifier(config["model"], revision=config["revision"])
            request = Request(**{**config["request"], "verifier": str(folder)})
        except StatehouseError as caught:
            error = caught
        team.agree(error)
        with contextlib.closing(_StopAsked(mailbox)) as asked:
            return train(request, team, asked, asked)
    except StatehouseError as error:
        ray.get(mailbox.fail.remote(str(error), isinstance(error, OthersFailed)))
        return None
    finally:
        log.removeHandler(handler)
        if team.rank == 0:
            ray.get(mailbox.leave.remote())


def require_resources(settings: TrainingSection) -> None:
    """Raises RecipeError when the cluster can never hold the workers (they would wait for ever)."""
    cpus, gpus = job.cluster_size()
    fit = job.fitting(settings.cpus_per_worker, settings.gpus_per_worker)
    if fit < (settings.min_workers or settings.workers):
        raise RecipeError(
            f"training.workers is {settings.workers}, each needs {settings.cpus_per_worker} CPUs and "
            f"{settings.gpus_per_worker} GPUs, but the cluster has {cpus:g} CPUs and {gpus:g} GPUs: {fit} fit; add nodes, "
            f"or set training.workers={max(1, fit)}"
            + (f" and training.min_workers={max(1, fit)}" if settings.min_workers else "")
            + ("" if fit else " and lower training.gpus_per_worker or .cpus_per_worker")
        )


def request_of(recipe: Recipe) -> dict[str, Any]:
    """The fields of `drafter.sources.Request`, with the verifier as this machine has it and absolute URIs."""
    folder = resolve_verifier(recipe.verifier.model, revision=recipe.verifier.revision)
    mixed = tuple(one.model_copy(update={"uri": open_store(one.uri).uri}) for one in recipe.training.datasets)
    return {
        "dataset": open_store(recipe.dataset.uri).uri,
        "vocabulary": open_store(recipe.vocab_uri).uri,
        "run": open_store(recipe.run_uri).uri,
        "verifier": str(folder),
        "drafter": recipe.drafter,
        "training": recipe.training.model_copy(update={"datasets": mixed}),
        "held_out": recipe.evaluation.held_out,
        "split_seed": recipe.evaluation.seed,
        "provenance": provenance(recipe),
        "model_type": str(text_config(read_config(folder)).get("model_type", "")),
    }


def run(recipe: Recipe, args: argparse.Namespace) -> None:
    from drafter.claim import claim, drafter_config, finished, require_start
    from drafter.progress import describe
    from drafter.sources import Request, open_sources, open_verifier_weights

    fresh = getattr(args, "fresh", False)  # other jobs call this one, too
    fields = request_of(recipe)
    model_type = fields.pop("model_type")
    request = Request(**fields)
    sources = open_sources(request)
    require_vocabulary(recipe, sources.vocabulary)
    weights = open_verifier_weights(request.verifier, sources.dataset)
    require_start(request, drafter_config(request, sources, weights), weights.config, fresh=fresh)
    fields["owner"] = request.owner
    fields["layer_ids"] = tuple(engine_layer_ids(sources.dataset.contract.capture_layers, model_type))
    if not fresh and (summary := finished(request, sources)) is not None:
        job.log.info("train finished already %s", describe(summary, request.run))
        if not open_store(request.run).exists(REPORT):  # it was ended just before
            put_report(request.run)
        return
    job.start_ray()
    require_resources(recipe.training)
    claim(request, sources, fresh=fresh)
    _train(recipe, fields)
    if (summary := finished(request, sources)) is not None:
        job.log.info("train report=%s", put_report(request.run))


def require_vocabulary(recipe: Recipe, vocabulary: DraftVocab) -> None:
    """Raises VocabError for a draft vocabulary that the recipe's settings would not make, unless it is named."""
    if recipe.training.draft_vocabulary is None:
        judged = recipe.evaluation
        require_chosen_as(
            vocabulary, recipe.vocab, held_out=judged.held_out, seed=judged.seed, where=open_store(recipe.vocab_uri).uri
        )


def _train(recipe: Recipe, fields: dict[str, Any]) -> None:
    """Runs the workers to the end of the run. Raises StatehouseError; on a signal, whatever the signal raised."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)  # it dies with us alone
    mailbox = ray.remote(num_cpus=0, scheduling_strategy=here)(Mailbox).remote()
    config = {
        "mailbox": mailbox,
        "request": fields,
        "model": recipe.verifier.model,
        "revision": recipe.verifier.revision,
    }
    outcome: dict[str, Any] = {}

    def fit() -> None:
        try:
            outcome["summary"] = _trainer(recipe, config).fit().return_value
        except Exception as error:
            outcome["error"] = error

    # Not in the main thread: there Ray Train would put its own handler in the place of ours.
    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    try:
        _relay(mailbox, thread)
    except (KeyboardInterrupt, SystemExit):
        job.log.info("train stopping: the workers finish their update and write a checkpoint")
        with contextlib.suppress(Exception):
            ray.get(mailbox.stop.remote(), timeout=_STOP_S)
            _relay(mailbox, time.monotonic() + _STOP_S)
        raise
    if error := ray.get(mailbox.error.remote()):
        raise StatehouseError(error)
    if failure := outcome.get("error"):
        raise StatehouseError(
            f"training failed for good after training.max_failures={recipe.training.max_failures} restarts: "
            f"{_reason(failure)}; what the newest checkpoint holds stays, run the same command again once the cause is gone"
        )
    if outcome.get("summary") is None:
        raise StatehouseError("training ended without a summary; run the same command again to carry on")


def _relay(mailbox: Any, until: threading.Thread | float) -> None:
    """Logs what the workers say until the training thread ends; or until they left, and a point in time at the latest.

    (A signal ends Ray's wait in the training thread, too: then the thread says nothing of the workers.)
    """
    import ray

    while True:
        if isinstance(until, threading.Thread):
            over = not until.is_alive()
        else:
            over = ray.get(mailbox.left.remote()) or time.monotonic() > until
        for level, line in ray.get(mailbox.take.remote()):
            job.log.log(level, "%s", line)
        if over:
            return
        time.sleep(_POLL_S)


def _trainer(recipe: Recipe, config: dict[str, Any]) -> Any:
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _HEALTH_CHECK_S)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    logging.getLogger("ray.train").setLevel(logging.ERROR)
    settings = recipe.training
    resources: dict[str, float] = {"CPU": settings.cpus_per_worker}
    if settings.gpus_per_worker:
        resources["GPU"] = settings.gpus_per_worker
    return TorchTrainer(
        _work,
        train_loop_config=config,
        torch_config=TorchConfig(timeout_s=settings.collective_timeout_s),
        scaling_config=ScalingConfig(
            # As many as fit, at least min_workers: Ray Train starts them anew when nodes go or come.
            num_workers=(settings.min_workers, settings.workers) if settings.min_workers else settings.workers,
            use_gpu=settings.gpus_per_worker > 0,
            resources_per_worker=resources,
        ),
        run_config=RunConfig(
            name=f"{recipe.name}-{os.getpid()}",
            storage_path=os.path.join(tempfile.gettempdir(), f"statehouse-ray-train-{os.getuid()}"),
            failure_config=FailureConfig(max_failures=settings.max_failures),
        ),
    )


def _reason(error: BaseException) -> str:
    """The last line of what a worker raised; Ray hands over whole tracebacks."""
    failures = getattr(error, "worker_failures", None)
    first: BaseException = next(iter(failures.values())) if failures else error
    lines = [line.strip() for line in str(first).splitlines() if line.strip()]
    return f"{type(first).__name__}: {lines[-1][:300] if lines else ''}"


def parser() -> argparse.ArgumentParser:
    parsed = job.parser("train", __doc__ or "")
    parsed.add_argument("--fresh", action="store_true", help="delete what is in the run and start over")
    return parsed


if __name__ == "__main__":
    job.main(parser(), run)
