"""Curves for those who watch: TensorBoard by default, Weights & Biases, MLflow and trackio through their own libraries.

Only the first worker tracks. `metrics.jsonl` is written whatever is chosen here, and is what resuming goes by.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter.errors import DrafterError
from drafter.run import TENSORBOARD
from storage.objects import ObjectStore

# The library behind each, and what installs it.
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


class Tracker:
    """Takes numbers by name; this one drops them."""

    def log(self, update: int, values: Mapping[str, float]) -> None:
        """values: of this update."""

    def again(self, update: int, values: Mapping[str, float]) -> None:
        """values: logged before the run was stopped at this update, from which it is carried on."""

    def store(self) -> None:
        """Brings what is on this machine to where it stays."""

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Ends it. summary: of a finished run."""


class TensorBoard(Tracker):
    """An event file, written on this machine and copied into the run's folder with every checkpoint.

    Each start of a run has a file of its own: TensorBoard reads them as one.
    """

    def __init__(self, store: ObjectStore, update: int) -> None:
        writer = _library("tensorboard").SummaryWriter
        self._store, self._folder = store, Path(tempfile.mkdtemp(prefix="statehouse-tensorboard-"))
        self._name = f"events.out.tfevents.{int(time.time())}.{update}"
        self._writer = writer(str(self._folder), purge_step=update or None, flush_secs=3600)
        self._stored = -1

    def log(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)

    def again(self, update: int, values: Mapping[str, float]) -> None:
        self.log(update, values)  # purge_step hides what the files before have of it, which lines of a lost run need

    def store(self) -> None:
        self._writer.flush()
        for path in self._folder.glob("events.out.tfevents.*"):
            if path.stat().st_size != self._stored:
                self._store.put(f"{TENSORBOARD}/{self._name}", path.read_bytes())
                self._stored = path.stat().st_size

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        try:
            self.store()
        finally:
            self._writer.close()
            shutil.rmtree(self._folder, ignore_errors=True)


class WandB(Tracker):
    def __init__(self, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        # The same id after a resume; what is logged again for an update that was logged is left out by W&B.
        self._run = _library("wandb").init(id=run_id, name=name, resume="allow", config=dict(config))

    def log(self, update: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=update)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        for key, value in _numbers(summary).items():
            self._run.summary[key] = value
        self._run.finish()


class MLflow(Tracker):
    def __init__(self, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        mlflow = _library("mlflow")
        self._client = mlflow.tracking.MlflowClient()
        experiment = self._client.get_experiment_by_name("statehouse")
        where = experiment.experiment_id if experiment else self._client.create_experiment("statehouse")
        found = self._client.search_runs([where], f"tags.statehouse_run = '{run_id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            run = self._client.create_run(where, run_name=name, tags={"statehouse_run": run_id})
            self._id = run.info.run_id
            for key, value in _flat(config).items():
                self._client.log_param(self._id, key, str(value)[:500])

    def log(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=update)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        for key, value in _numbers(summary).items():
            self._client.log_metric(self._id, f"summary/{key}", value)
        self._client.set_terminated(self._id, "FINISHED" if summary is not None else "KILLED")


class Trackio(Tracker):
    def __init__(self, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        unique = f"{name}-{run_id}"
        self._run = _library("trackio").init(project="statehouse", name=unique, resume="allow", config=dict(config))

    def log(self, update: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=update)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        self._run.finish()


_REMOTE: dict[str, Callable[[str, str, Mapping[str, Any]], Tracker]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def open_trackers(
    names: Sequence[str], store: ObjectStore, run_id: str, update: int, config: Mapping[str, Any]
) -> list[Tracker]:
    """The trackers of these names for a run that is at `update`. Raises DrafterError for a library that is not there."""
    name = store.uri.rstrip("/").rsplit("/", 1)[-1]
    made: list[Tracker] = []
    for one in names:
        try:
            if one == "tensorboard":
                made.append(TensorBoard(store, update))
            else:
                made.append(_REMOTE[one](run_id, name, config))
        except DrafterError:
            raise
        except Exception as error:  # of the library: no account, no server, ...
            raise DrafterError(
                f"training.trackers: {one} cannot be started: {type(error).__name__}: {' '.join(str(error).split())[:300]}; "
                f"set it up as its own documentation says, or leave it out"
            ) from None
    return made


def require_trackers(names: Sequence[str]) -> None:
    """Raises DrafterError when the library of one of them is not there; before anything is started."""
    for name in names:
        _library(name)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(_PACKAGES[name])
    except ImportError:
        raise DrafterError(
            f"training.trackers: {name} needs the package {_PACKAGES[name]}, which is not installed: "
            f"pip install {_PACKAGES[name]}, or leave it out"
        ) from None


def _numbers(summary: Mapping[str, Any] | None) -> dict[str, float]:
    return {key: value for key, value in (summary or {}).items() if isinstance(value, (int, float))}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
