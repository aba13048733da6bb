"""A training run in a bucket: `<dataset.uri>-runs/<name>/`. It names its dataset by fingerprint; a dataset knows no runs.

run.json                 what is trained on what: settings, fingerprints, provenance; an `id`, new with each start over
owner.json               which driver trains it: the one that started last
checkpoints/<update>/    model.safetensors, optimizer.safetensors, state.json (put last: it commits the checkpoint)
metrics.jsonl            one line an update, as of the newest checkpoint
drafter/                 config.json, model.safetensors: the finished drafter as SGLang serves it
tensorboard/             event files, one of each start of the run
summary.json             put last of all: the run is finished
report.html, curves.png  loss and accuracy over updates, drawn by `ray_jobs.train` when it is done
evaluation.json, evaluation.svg, serve.json    what `ray_jobs.evaluate` and `ray_jobs.serve` found
walks.npz                evaluate's rounds of a drafter with the whole vocabulary: what `vocab.walks` reads
"""

from __future__ import annotations

import json
import math
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from drafter.checkpoint import Checkpoints, read_whole
from drafter.errors import DrafterError
from drafter.export import CONFIG, TENSORS, export_sglang
from drafter.model import Drafter
from storage.objects import ObjectMissing, open_store

RUN, OWNER, METRICS, SUMMARY = "run.json", "owner.json", "metrics.jsonl", "summary.json"
REPORT, CURVES, TENSORBOARD = "report.html", "curves.png", "tensorboard"
EVALUATION, EVALUATION_PLOT, SERVED = "evaluation.json", "evaluation.svg", "serve.json"
WALKS = "walks.npz"
_DRAFTER = "drafter"
_FORMAT = "statehouse-run-1"
_MISSING = "-"
# What every summary says, and is asked for.
_FIGURES = ("updates", "seconds", "loss_before", "accuracy_after")


class Run:
    """One run, finished or not. uri: its folder, local or on object storage."""

    def __init__(self, uri: str) -> None:
        self.store = open_store(uri)
        self.uri = self.store.uri
        self.checkpoints = Checkpoints(self.store)

    def claim(self, identity: Mapping[str, Any], provenance: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Makes this the run of `identity`, or finds that it is. fresh: what is there is deleted first.

        identity: nested dicts of what JSON can hold. Raises DrafterError naming each field that differs from what
        the run was started with.
        """
        wanted = json.loads(json.dumps(identity))
        if fresh:
            self._clear()
        document = {"format": _FORMAT, "id": secrets.token_hex(8), "identity": wanted, "provenance": provenance}
        if self.store.create(RUN, json.dumps(document, indent=1).encode() + b"\n"):
            return
        found = self.identity()
        if differing := _differences(found, wanted) or _another_order(found, wanted):
            raise DrafterError(
                f"{self.uri}/{RUN}: this run is of something else: {'; '.join(differing)}; train beside it with "
                f"training.run=<other name>, or start it over with --fresh"
            )

    def identity(self) -> dict[str, Any]:
        """What the run was started with. Raises DrafterError when there is no run here."""
        identity: dict[str, Any] = self._document()["identity"]
        return identity

    def provenance(self) -> dict[str, Any]:
        """What the run came from, as whoever started it said. Raises DrafterError when there is no run here."""
        provenance: dict[str, Any] = self._document().get("provenance") or {}
        return provenance

    def id(self) -> str:
        """Of this run, and no other that was or will be here. Raises DrafterError when there is no run here."""
        return str(self._document().get("id", ""))

    def take_over(self, owner: str) -> None:
        """Makes this driver the one that trains the run; another that still does ends at its next checkpoint."""
        self.store.put(OWNER, json.dumps({"owner": owner}).encode() + b"\n")

    def require_own(self, owner: str, run_id: str) -> None:
        """Raises DrafterError unless this driver is still the last that took over, and the run still this one."""
        found = (self._json(OWNER) or {}).get("owner")
        if found != owner:
            raise DrafterError(
                f"{self.uri}/{OWNER}: owner: expected {owner}, found {found}: another driver has taken over this run; "
                f"leave it to that one, or run this command again to take over in turn"
            )
        if (now := self.id()) != run_id:
            raise DrafterError(
                f"{self.uri}/{RUN}: id: expected {run_id}, found {now}: the run was started over by another driver; "
                f"run this command again to carry on with the new one"
            )

    def _document(self) -> dict[str, Any]:
        document = self._json(RUN)
        if document is None:
            raise DrafterError(f"{self.uri}/{RUN}: no such object: there is no run here; start one with ray_jobs.train")
        if document.get("format") != _FORMAT or not isinstance(document.get("identity"), dict):
            raise DrafterError(
                f"{self.uri}/{RUN}: format: expected {_FORMAT}, found {document.get('format')}; "
                f"start the run over with --fresh"
            )
        return document

    def summary(self) -> dict[str, Any] | None:
        """Figures of the finished run; None while it is not finished. Raises DrafterError for what is no summary."""
        summary = self._json(SUMMARY)
        if summary is not None and (missing := [name for name in _FIGURES if name not in summary]):
            raise DrafterError(
                f"{self.uri}/{SUMMARY}: {missing[0]}: expected this figure of a finished run, found none; "
                f"delete the file to finish the run again"
            )
        return summary

    def put_summary(self, summary: Mapping[str, Any]) -> None:
        """Commits the run as finished."""
        self.store.put(SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")

    def metrics(self, before: float = math.inf) -> list[str]:
        """The stored lines of the updates below `before`, in order. Raises DrafterError for what is no such line."""
        try:
            lines = self.store.get(METRICS).decode().splitlines()
            return [line for line in lines if json.loads(line)["update"] < before]
        except ObjectMissing:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise DrafterError(
                f"{self.uri}/{METRICS}: expected one JSON object with its update a line, found {error!r}; "
                f"delete it to carry on without the lines so far, or start the run over with --fresh"
            ) from None

    def put_metrics(self, lines: Sequence[str]) -> None:
        self.store.put(METRICS, "".join(line + "\n" for line in lines).encode())

    def put_drafter(
        self, drafter: Drafter, layer_ids: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """The finished drafter, for SGLang. layer_ids, dtype: as for `export_sglang`."""
        with tempfile.TemporaryDirectory(prefix="statehouse-export-") as folder:
            export_sglang(drafter, folder, layer_ids=layer_ids, dtype=dtype)
            for name in (TENSORS, CONFIG):
                self.store.put(f"{_DRAFTER}/{name}", Path(folder, name).read_bytes())

    def fetch_drafter(self, folder: Path) -> Path:
        """Copies the finished drafter into `folder` and returns it. Raises DrafterError when there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, TENSORS):
            try:
                (folder / name).write_bytes(read_whole(self.store, f"{_DRAFTER}/{name}"))
            except ObjectMissing:
                raise DrafterError(
                    f"{self.uri}/{_DRAFTER}/{name}: no such object: this run has no finished drafter; "
                    "run `python -m ray_jobs.train RECIPE` (it carries on where it stood)"
                ) from None
        return folder

    def _clear(self) -> None:
        """Deletes the run, its end first and its beginning last, so that a half deleted one is never taken for whole."""
        self.store.delete(SUMMARY)
        self.checkpoints.clear()
        drafter = (f"{_DRAFTER}/{CONFIG}", f"{_DRAFTER}/{TENSORS}")
        for name in (
            EVALUATION,
            EVALUATION_PLOT,
            WALKS,
            SERVED,
            REPORT,
            CURVES,
            *drafter,
            *self.store.sizes(TENSORBOARD),
            METRICS,
            RUN,
        ):
            self.store.delete(name)

    def _json(self, name: str) -> dict[str, Any] | None:
        try:
            document = json.loads(self.store.get(name))
        except ObjectMissing:
            return None
        except ValueError as error:
            raise DrafterError(f"{self.uri}/{name}: expected JSON, found {error}; start over with --fresh") from None
        if not isinstance(document, dict):
            raise DrafterError(f"{self.uri}/{name}: expected a JSON object, found {type(document).__name__}")
        return document


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`section.field: found -> wanted` of each field that is not equal."""
    said = []
    for name in sorted(set(found) | set(wanted)):
        old, new = found.get(name, _MISSING), wanted.get(name, _MISSING)
        if isinstance(old, dict) and isinstance(new, dict):
            said += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            said.append(f"{prefix}{name}: {_short(old)} -> {_short(new)}")
    return said


def _another_order(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The same datasets in another order: sequences are numbered in it, so others would be left in the epoch."""
    old, new = (list(identity.get("datasets") or {}) for identity in (found, wanted))
    if old == new:
        return []
    return [
        f"order of training.datasets: {', '.join(map(_short, old))} -> {', '.join(map(_short, new))} (name them as they "
        f"were, to carry on)"
    ]


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}..." if _is_hash(text) else text


def _is_hash(text: str) -> bool:
    """Whether this is a SHA-256, of which twelve characters are enough to read."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
