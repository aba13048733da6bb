"""Checkpoints of a run: safetensors and JSON, whole or not there.

    checkpoints/<update>/model.safetensors       trained parameters, fp32, by their names in the drafter
    checkpoints/<update>/optimizer.safetensors   `<parameter>.<what the optimiser keeps>`: `exp_avg`, `exp_avg_sq`, ...
    checkpoints/<update>/state.json              put last: counters, and sizes and digests of the two

A checkpoint without its state.json was never finished, or is on its way out (state.json is deleted first): it is passed
over without a word, whenever the writer was killed. One whose files do not fit its state.json is damaged: the one
before is taken, and a line says so. One that names another run (`run_id`: this one was started over since) is passed
over, too. There is no generator state to keep: after the start, all random numbers are the sampler's, a function of
seed and epoch.

Files are read in ranges, several at a time: one of many GB as a single request would run into the store's time limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from drafter.errors import DrafterError
from storage.errors import StatehouseError
from storage.objects import LocalStore, ObjectMissing, ObjectStore

log = logging.getLogger("statehouse")

FOLDER = "checkpoints"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_FORMAT = "statehouse-checkpoint-1"
# Bytes of one request, and how many at one time.
RANGE_BYTES, _RANGES_AT_ONCE = 64 << 20, 4
_FIX = "restore it from a copy, or start the run over with --fresh"


@dataclass(frozen=True)
class Snapshot:
    """Weights and optimiser on the CPU, fp32. model: by parameter. moments: by `<parameter>.<kind>`. steps: applied.
    accepted: mean acceptance of each step of training-time test in the last update, for `lk_hybrid`; NaN: unknown.
    """

    model: dict[str, Tensor]
    moments: dict[str, Tensor]
    steps: int
    accepted: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Shapes:
    """What a snapshot of a drafter holds. steps: of training-time test."""

    model: Mapping[str, tuple[int, ...]]
    moments: Mapping[str, tuple[int, ...]]
    steps: int = 0


class _Damaged(DrafterError):
    """This checkpoint's files are not those that its state.json names."""


class _Foreign(_Damaged):
    """This checkpoint is of a run that was here before, whose driver wrote on after this one had started over."""


class Checkpoints:
    """The checkpoints of one run. Only one worker writes; any number read.

    run_id: of the run (run.json), which its checkpoints carry; None: whichever.
    """

    def __init__(self, store: ObjectStore, run_id: str | None = None) -> None:
        self.store, self.run_id = store, run_id
        self._passed_over: set[int] = set()
        self._found: tuple[int, dict[str, Any], Snapshot] | None = None

    def updates(self) -> list[int]:
        """Updates of the finished checkpoints, ascending."""
        found = (re.fullmatch(rf"{FOLDER}/(\d+)/{STATE}", key) for key in self.store.sizes(FOLDER))
        return sorted(int(match[1]) for match in found if match)

    def save(
        self, update: int, snapshot: Snapshot, counters: Mapping[str, Any], keep: int, best: int | None = None
    ) -> None:
        """Stores a checkpoint after `update` updates, then deletes all but the newest `keep` finished ones and `best`.

        counters: what JSON can hold. A whole one of this update stays as it is. Later ones go where `newest` passed over
        them.
        """
        self._found = None
        if update in self.updates():
            model, moments = (
                {name: tuple(one.shape) for name, one in part.items()} for part in (snapshot.model, snapshot.moments)
            )
            shapes = Shapes(model, moments, len(snapshot.accepted or ()))
            try:
                self._read(update, shapes)
            except _Damaged:
                self.store.delete(f"{_folder(update)}/{STATE}")
            else:
                self._passed_over.discard(update)
                self._prune(update, keep, best)
                return
        files, described = ((MODEL, snapshot.model), (OPTIMIZER, snapshot.moments)), {}
        folder = _folder(update)
        for name, tensors in files:
            data = save(tensors)
            described[name] = {"bytes": len(data), "sha256": _sha256(data)}
            self.store.put(f"{folder}/{name}", data)
            del data  # before the next one is made
        state = {
            "format": _FORMAT,
            "update": update,
            "run_id": self.run_id or "",
            **counters,
            "optimizer_steps": snapshot.steps,
            "accepted": snapshot.accepted and [None if math.isnan(one) else one for one in snapshot.accepted],
            "files": described,
        }
        self.store.put(f"{folder}/{STATE}", json.dumps(state, indent=1).encode() + b"\n")
        self._passed_over.discard(update)
        self._prune(update, keep, best)

    def newest(self, shapes: Shapes) -> int | None:
        """The update of the newest whole checkpoint of these shapes; None when none was ever finished.

        A damaged one is named in a warning, and passed over. What was read is kept for `load`. Raises DrafterError when
        all are damaged, or when a whole one holds other tensors.
        """
        damage = None
        for update in reversed(self.updates()):
            try:
                self._found = (update, *self._read(update, shapes))
            except _Foreign:
                self._passed_over.add(update)
            except _Damaged as error:
                self._passed_over.add(update)
                damage = damage or error
                log.warning("checkpoint damaged, the one before is taken: %s", error)
            else:
                return update
        if damage is not None:
            raise DrafterError(f"{damage}; no other checkpoint is left: {_FIX}")
        return None

    def load(self, update: int, shapes: Shapes) -> tuple[dict[str, Any], Snapshot]:
        """state.json of the checkpoint, and what it holds; read now, unless `newest` just did. Raises DrafterError."""
        found, self._found = self._found, None
        return found[1:] if found is not None and found[0] == update else self._read(update, shapes)

    def clear(self) -> None:
        """Deletes all checkpoints."""
        for update in self.updates():
            self.store.delete(f"{_folder(update)}/{STATE}")
        for key in self.store.sizes(FOLDER):
            self._delete(key)

    def _read(self, update: int, shapes: Shapes) -> tuple[dict[str, Any], Snapshot]:
        """state.json and the two files, checked. Raises _Damaged, or DrafterError for tensors of another drafter."""
        folder = _folder(update)
        state = self._state(f"{folder}/{STATE}", update)
        model = self._tensors(f"{folder}/{MODEL}", state["files"][MODEL], shapes.model)
        moments = self._tensors(f"{folder}/{OPTIMIZER}", state["files"][OPTIMIZER], shapes.moments)
        accepted = _accepted(f"{self.store.uri}/{folder}/{STATE}", state.get("accepted"), shapes.steps)
        return state, Snapshot(model, moments, int(state["optimizer_steps"]), accepted)

    def _state(self, key: str, update: int) -> dict[str, Any]:
        where = f"{self.store.uri}/{key}"
        try:
            state = json.loads(self.store.get(key))
            good = state["format"] == _FORMAT and state["update"] == update and state["optimizer_steps"] >= 0
            good = good and all(
                isinstance(state["files"][name]["bytes"], int) and isinstance(state["files"][name]["sha256"], str)
                for name in (MODEL, OPTIMIZER)
            )
        except ObjectMissing as error:
            raise _Damaged(str(error)) from None
        except (ValueError, KeyError, TypeError) as error:
            raise _Damaged(f"{where}: expected the state of a checkpoint, found {error!r}") from None
        if not good:
            raise _Damaged(f"{where}: expected format {_FORMAT} of update {update}, found {state['format']}")
        if self.run_id not in (None, state.get("run_id", "")):
            raise _Foreign(f"{where}: run_id: expected {self.run_id}, found {state.get('run_id')}")
        result: dict[str, Any] = state
        return result

    def _tensors(
        self, key: str, expected: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        where = f"{self.store.uri}/{key}"
        try:
            data = read_whole(self.store, key)
        except ObjectMissing as error:
            raise _Damaged(str(error)) from None
        as_written = len(data) == expected["bytes"] and _sha256(data) == expected["sha256"]
        failure = DrafterError if as_written else _Damaged
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise failure(f"{where}: expected a safetensors file, found {error}") from None
        for name in sorted(set(shapes) | set(tensors)):
            if name not in tensors:
                raise failure(f"{where}: {name}: expected this tensor, found none of that name; {_FIX}")
            if name not in shapes:
                raise failure(f"{where}: {name}: expected no such tensor in this drafter, found one; {_FIX}")
            if tuple(tensors[name].shape) != shapes[name] or tensors[name].dtype != torch.float32:
                raise failure(
                    f"{where}: {name}: expected float32 {list(shapes[name])}, found "
                    f"{str(tensors[name].dtype).removeprefix('torch.')} {list(tensors[name].shape)}; {_FIX}"
                )
        if not as_written:
            raise _Damaged(
                f"{where}: expected {expected['bytes']} bytes with sha256 {expected['sha256'][:12]}, as {STATE} says, "
                f"found {len(data)} with {_sha256(data)[:12]}"
            )
        return tensors

    def _prune(self, newest: int, keep: int, best: int | None) -> None:
        finished = self.updates()
        kept = {*[one for one in finished if one <= newest and one not in self._passed_over][-keep:], best}

        def goes(update: int) -> bool:
            """Later ones are another driver's, who has taken over, unless this one saw that they are of no use."""
            return update not in kept and (update < newest or update in self._passed_over)

        for update in filter(goes, finished):
            self.store.delete(f"{_folder(update)}/{STATE}")
        for key in self.store.sizes(FOLDER):
            folder = key.split("/")[1]
            if not folder.isdigit() or goes(int(folder)):
                self._delete(key)

    def _delete(self, key: str) -> None:
        self.store.delete(key)
        if isinstance(self.store, LocalStore):  # a folder stays where an object store has none
            with contextlib.suppress(OSError):
                (self.store.root / key).parent.rmdir()


def _accepted(where: str, found: Any, steps: int) -> tuple[float, ...] | None:
    """What state.json has of `Snapshot.accepted`, NaN as null. Raises _Damaged."""
    if found is None:
        return None
    if (
        not isinstance(found, list)
        or len(found) != steps
        or not all(one is None or (type(one) in (int, float) and 0 <= one <= 1.001) for one in found)
    ):
        raise _Damaged(f"{where}: accepted: expected {steps} numbers from 0 to 1, found {json.dumps(found)[:60]}")
    return tuple(math.nan if one is None else float(one) for one in found)


def _folder(update: int) -> str:
    return f"{FOLDER}/{update:08d}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_whole(store: ObjectStore, key: str) -> bytes:
    """The object, in ranges of at most RANGE_BYTES. Raises ObjectMissing."""
    size = store.get_tail(key, 1).size
    if size <= RANGE_BYTES:
        return store.get(key)
    data = bytearray(size)

    def fetch(start: int) -> None:
        part = store.get_range(key, start, min(RANGE_BYTES, size - start))
        data[start : start + len(part)] = part

    with ThreadPoolExecutor(_RANGES_AT_ONCE) as pool:
        list(pool.map(fetch, range(0, size, RANGE_BYTES)))
    return bytes(data)


class Writer:
    """Writes checkpoints while training goes on: in a thread, never two at once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: StatehouseError | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begins to write. The one before must have been waited for."""
        assert self._thread is None

        def run() -> None:
            try:
                write()
            except StatehouseError as error:
                self._error = error
            except Exception as error:  # told in the trainer's own thread, not printed in this one
                self._error = DrafterError(
                    f"a checkpoint could not be written: unexpected {type(error).__name__}: {error}"
                )

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def failed(self) -> bool:
        """Whether the writing has ended in an error, without waiting for it."""
        return self._error is not None

    def wait(self) -> StatehouseError | None:
        """The end of what is being written, and its error, if it ended in one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error
