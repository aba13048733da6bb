"""Training runs in a bucket, read as plain JSON: what each was trained on, and what came of it.

A dataset knows nothing of runs; a run names its datasets by fingerprint (`run.json`, written by `drafter.run`). So "which
runs used this dataset" is asked of the runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from storage import layout
from storage.errors import StatehouseError, StoreError
from storage.objects import ObjectMissing, ObjectStore, open_store
from storage.seal import load_seals

RUN, SUMMARY, EVALUATION = "run.json", "summary.json", "evaluation.json"


@dataclass(frozen=True)
class FoundRun:
    """datasets: {fingerprint: weight}. tau: by draft length, where `ray_jobs.evaluate` has run. problem: of run.json."""

    uri: str
    datasets: dict[str, float] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    tau: dict[str, float] | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rsplit("/", 1)[-1]


def find_runs(uri: str, *, depth: int = 4) -> list[FoundRun]:
    """The runs at or under `uri`, at most `depth` folders down, sorted by URI. A damaged one is listed with its problem."""
    store = open_store(uri)
    found: list[FoundRun] = []

    def look(prefix: str, left: int) -> None:
        if store.exists(_join(prefix, RUN)):
            found.append(read_run(store, prefix))
        elif left and not store.exists(_join(prefix, layout.PLAN)):  # nothing below a dataset
            for name in store.folders(prefix):
                if not name.startswith("."):
                    look(_join(prefix, name), left - 1)

    look("", depth)
    return sorted(found, key=lambda run: run.uri)


def read_run(store: ObjectStore, prefix: str = "") -> FoundRun:
    """The run in this folder of a store."""
    uri = _join(store.uri, prefix) if prefix else store.uri
    try:
        document = _json(store, _join(prefix, RUN)) or {}
        identity = document["identity"]
        datasets = identity.get("datasets") or {identity["dataset"]: 1.0}
        summary, evaluation = (_json(store, _join(prefix, name)) for name in (SUMMARY, EVALUATION))
        return FoundRun(uri, dict(datasets), identity, document.get("provenance") or {}, summary, _taus(evaluation))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return FoundRun(uri, problem=f"expected a training run, found {error!r}")


def fingerprints_of(dataset: str) -> set[str]:
    """All that a dataset ever had (a repair gives it another), or just `dataset` where that is no URI but one of them."""
    if len(dataset) == 64 and set(dataset) <= set("0123456789abcdef"):
        return {dataset}
    try:
        return {seal.fingerprint for seal in load_seals(open_store(dataset))}
    except StoreError:
        raise
    except StatehouseError as error:
        raise StatehouseError(f"{error}; or give its fingerprint, 64 hex digits") from None


def _taus(evaluation: dict[str, Any] | None) -> dict[str, float] | None:
    if evaluation is None:
        return None
    measured = evaluation["sources"]["all"]["drafters"]["drafter"]["tau"]
    return {k: one["tau"] for k, one in measured.items() if one["tau"] is not None}


def _json(store: ObjectStore, key: str) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(store.get(key))
    except ObjectMissing:
        return None
    return document


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
