"""Checkpoints of a run: safetensors and JSON, whole or not there.

    checkpoints/<update>/model.safetensors       trained parameters, fp32, by their names in the drafter
    checkpoints/<update>/optimizer.safetensors   `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`
    checkpoints/<update>/state.json              put last: counters, and sizes and digests of the two

A checkpoint without its state.json was never finished, or is on its way out (state.json is deleted first): it is passed
over without a word, whenever the writer was killed. One whose files do not fit its state.json is damaged: the one
before is taken, and a line says so. One that names another run (`run_id`: this one was started over since) is passed
over, too. There is no generator state to keep: after the start, all random numbers are the sampler's, a function of
seed and epoch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from drafter.errors import DrafterError
from storage.objects import LocalStore, ObjectMissing, ObjectStore

log = logging.getLogger("statehouse")

FOLDER = "checkpoints"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_FORMAT = "statehouse-checkpoint-1"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FIX = "restore it from a copy, or start the run over with --fresh"


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

    def updates(self) -> list[int]:
        """Updates of the finished checkpoints, ascending."""
        found = (re.fullmatch(rf"{FOLDER}/(\d+)/{STATE}", key) for key in self.store.sizes(FOLDER))
        return sorted(int(match[1]) for match in found if match)

    def save(
        self,
        update: int,
        trained: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        counters: Mapping[str, Any],
        keep: int,
    ) -> None:
        """Stores a checkpoint after `update` updates, then deletes all but the newest `keep` finished ones.

        trained: the parameters by name, those of `optimizer`. counters: what JSON can hold.
        A whole one of this update stays as it is. Later ones go where `newest` passed over them.
        """
        if update in self.updates():
            try:
                self._read(update, trained)
            except _Damaged:
                self.store.delete(f"{_folder(update)}/{STATE}")
            else:
                self._passed_over.discard(update)
                self._prune(update, keep)
                return
        files = {
            MODEL: save({name: one.detach().cpu().contiguous() for name, one in trained.items()}),
            OPTIMIZER: save(_moments(trained, optimizer)),
        }
        state = {
            "format": _FORMAT,
            "update": update,
            "run_id": self.run_id or "",
            **counters,
            "optimizer_steps": _steps(trained, optimizer),
            "files": {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in files.items()},
        }
        folder = _folder(update)
        for name, data in files.items():
            self.store.put(f"{folder}/{name}", data)
        self.store.put(f"{folder}/{STATE}", json.dumps(state, indent=1).encode() + b"\n")
        self._passed_over.discard(update)
        self._prune(update, keep)

    def newest(self, trained: Mapping[str, Tensor]) -> int | None:
        """The update of the newest whole checkpoint for these parameters; None when none was ever finished.

        A damaged one is named in a warning, and passed over. Raises DrafterError when all are damaged, or when a
        whole one holds other tensors than these parameters.
        """
        damage = None
        for update in reversed(self.updates()):
            try:
                self._read(update, trained)
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

    def load(self, update: int, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Puts the checkpoint into parameters and optimiser, and returns its state.json. Raises DrafterError."""
        state, model, moments = self._read(update, trained)
        steps = float(state["optimizer_steps"])
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(model[name])
                optimizer.state[parameter] = {
                    "step": torch.tensor(steps, device=parameter.device),
                    **{kind: moments[f"{name}.{kind}"].to(parameter.device) for kind in _MOMENTS},
                }
        return state

    def clear(self) -> None:
        """Deletes all checkpoints."""
        for update in self.updates():
            self.store.delete(f"{_folder(update)}/{STATE}")
        for key in self.store.sizes(FOLDER):
            self._delete(key)

    def _read(
        self, update: int, trained: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
        """state.json and the two files, checked. Raises _Damaged, or DrafterError for tensors of another drafter."""
        folder = _folder(update)
        state = self._state(f"{folder}/{STATE}", update)
        shapes = {name: tuple(one.shape) for name, one in trained.items()}
        moments = {f"{name}.{kind}": shape for name, shape in shapes.items() for kind in _MOMENTS}
        model = self._tensors(f"{folder}/{MODEL}", state["files"][MODEL], shapes)
        return state, model, self._tensors(f"{folder}/{OPTIMIZER}", state["files"][OPTIMIZER], moments)

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
            data = self.store.get(key)
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

    def _prune(self, newest: int, keep: int) -> None:
        finished = self.updates()
        kept = set([one for one in finished if one <= newest and one not in self._passed_over][-keep:])

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


def _folder(update: int) -> str:
    return f"{FOLDER}/{update:08d}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _moments(trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's running means; zeros before its first step, when it has none."""
    return {
        f"{name}.{kind}": optimizer.state.get(one, {}).get(kind, torch.zeros_like(one)).detach().cpu().contiguous()
        for name, one in trained.items()
        for kind in _MOMENTS
    }


def _steps(trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Updates that the optimiser applied: the same for all parameters."""
    return max((int(optimizer.state.get(one, {}).get("step", 0)) for one in trained.values()), default=0)
