"""Checkpoints: whole or not there, whenever the writer is killed; damage is named and passed over."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drafter import checkpoint
from drafter.checkpoint import Checkpoints, Shapes, Snapshot, Writer, read_whole
from drafter.errors import DrafterError
from drafter.optimizer import Optimizer
from drafter.recipe import TrainingSection
from storage.objects import LocalStore, ObjectStore, open_store


class Killed(BaseException):
    pass


class DyingStore(LocalStore):
    """Dies before the request with this number (writes and deletes are counted)."""

    left = 1 << 30

    def _spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def put(self, key: str, data: bytes) -> None:
        self._spend()
        super().put(key, data)

    def delete(self, key: str) -> None:
        self._spend()
        super().delete(key)


def model(seed: int = 0, steps: int = 3, kind: str = "adamw") -> tuple[dict[str, nn.Parameter], Optimizer]:
    torch.manual_seed(seed)
    trained = {name: nn.Parameter(torch.randn(3, 2)) for name in ("a", "b", "lm_head")}
    optimizer = Optimizer(trained, TrainingSection(optimizer=kind))
    for _ in range(steps):
        for one in trained.values():
            one.grad = torch.randn_like(one)
        optimizer.step(0.1)
    return trained, optimizer


def shapes(kind: str = "adamw") -> Shapes:
    trained, optimizer = model(0, 0, kind)
    return Shapes({name: tuple(one.shape) for name, one in trained.items()}, optimizer.shapes())


def snapshot(trained: dict[str, nn.Parameter], optimizer: Optimizer) -> Snapshot:
    copies = ({name: one.detach().clone() for name, one in part.items()} for part in (trained, optimizer.moments()))
    return Snapshot(*copies, optimizer.steps)


def save(
    store: ObjectStore, update: int, keep: int = 2, checkpoints: Checkpoints | None = None, best: int | None = None
) -> None:
    counters = {"epoch": update // 3, "tokens": 7}
    (checkpoints or Checkpoints(store)).save(update, snapshot(*model(update)), counters, keep, best)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_checkpoint_brings_back_weights_optimiser_and_counters(uri: str, kind: str) -> None:
    checkpoints = Checkpoints(open_store(uri))
    trained, optimizer = model(1, kind=kind)
    assert checkpoints.newest(shapes(kind)) is None
    checkpoints.save(12, snapshot(trained, optimizer), {"epoch": 3, "tokens": 7}, 2)
    other, its_optimizer = model(2, 0, kind)
    assert checkpoints.newest(shapes(kind)) == 12
    state, found = checkpoints.load(12, shapes(kind))
    assert (state["update"], state["epoch"], state["tokens"], state["optimizer_steps"]) == (12, 3, 7, 3)
    with torch.no_grad():
        for name, one in other.items():
            one.copy_(found.model[name])
    its_optimizer.restore(found.moments, found.steps)
    for parameters, own in ((trained, optimizer), (other, its_optimizer)):
        for one in parameters.values():
            one.grad = torch.ones_like(one)
        own.step(0.1)
    assert all(torch.equal(trained[name], other[name]) for name in trained)  # the next step is the same, too


def test_only_the_newest_are_kept(uri: str) -> None:
    store = open_store(uri)
    for update in (5, 10, 15, 20):
        save(store, update)
    assert Checkpoints(store).updates() == [15, 20]
    assert {key.split("/")[1] for key in store.sizes("checkpoints")} == {"00000015", "00000020"}


def test_the_best_is_kept_beside_the_newest(uri: str) -> None:
    store = open_store(uri)
    for update, best in ((5, 5), (10, 5), (15, 5), (20, 20), (25, 20)):
        save(store, update, best=best, keep=1)
        expected = {update, best}
        assert set(Checkpoints(store).updates()) == expected


def test_large_files_are_read_in_ranges_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counting(tmp_path)
    save(store, 5)
    monkeypatch.setattr(checkpoint, "RANGE_BYTES", 100)
    checkpoints = Checkpoints(store)
    assert checkpoints.newest(shapes()) == 5
    asked = dict(store.asked)
    sizes = store.sizes("checkpoints")
    for name in ("model", "optimizer"):
        key = f"checkpoints/00000005/{name}.safetensors"
        assert asked[key] == [(start, min(100, sizes[key] - start)) for start in range(0, sizes[key], 100)]
    _, found = checkpoints.load(5, shapes())
    assert store.asked == asked  # what newest read
    assert all(torch.equal(found.model[name], one) for name, one in model(5)[0].items())
    assert read_whole(store, "checkpoints/00000005/state.json").startswith(b"{")


class Counting(LocalStore):
    """Notes the ranges of each key; whole objects may only be small ones."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: dict[str, list[tuple[int, int]]] = {}

    def get(self, key: str) -> bytes:
        assert not key.endswith(".safetensors")
        return super().get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.asked[key] = sorted([*self.asked.get(key, []), (start, length)])
        return super().get_range(key, start, length)


def test_checkpoints_are_written_in_a_thread_one_at_a_time_and_errors_come_out_of_wait() -> None:
    writer, gate, order = Writer(), threading.Event(), []

    def slow() -> None:
        gate.wait(20)
        order.append("written")

    writer.start(slow)
    with pytest.raises(AssertionError):
        writer.start(slow)
    order.append("trained on")
    gate.set()
    assert writer.wait() is None
    assert order == ["trained on", "written"]

    def broken() -> None:
        raise DrafterError("full")

    writer.start(broken)
    while not writer.failed():
        time.sleep(0.001)
    assert str(writer.wait()) == "full"
    assert writer.wait() is None
    assert not writer.failed()


def test_killed_at_any_request_a_whole_checkpoint_is_left(tmp_path: Path) -> None:
    for requests in range(40):
        store = DyingStore(tmp_path / str(requests))
        save(store, 1, keep=1)
        save(store, 2, keep=1)
        store.left = requests
        try:
            save(store, 3, keep=1)
        except Killed:
            pass
        else:
            break
        newest = Checkpoints(LocalStore(store.root)).newest(shapes())
        assert newest in (2, 3)
        save(LocalStore(store.root), 3, keep=1)  # the next run gets there again
        assert Checkpoints(store).updates() == [3]
        assert len(store.sizes("checkpoints")) == 3
        store.left = requests
        with contextlib.suppress(Killed):
            save(store, 3, keep=1)  # and once more: there is no other
        assert Checkpoints(LocalStore(store.root)).newest(shapes()) == 3
    assert requests > 5  # so it was killed between all of them


def test_a_damaged_one_is_named_and_the_one_before_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore(tmp_path)
    for update in (5, 10):
        save(store, update)
    path = tmp_path / "checkpoints/00000010/model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with caplog.at_level(logging.WARNING, "statehouse"):
        assert Checkpoints(store).newest(shapes()) == 5
    assert f"{path}: expected" in caplog.text
    save(store, 10)  # gets there again, over the damaged one
    assert Checkpoints(store).newest(shapes()) == 10


def test_later_ones_that_were_fallen_behind_of_go_with_the_next(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for update in (5, 10):
        save(store, update)
    (tmp_path / "checkpoints/00000010/optimizer.safetensors").unlink()
    checkpoints = Checkpoints(store)
    assert checkpoints.newest(shapes()) == 5
    save(store, 7, checkpoints=checkpoints)
    assert checkpoints.updates() == [5, 7]


def test_later_ones_of_a_driver_that_has_taken_over_stay(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for update in (5, 10):
        save(store, update)
    save(store, 7, keep=1)
    assert Checkpoints(store).updates() == [7, 10]


def test_one_of_the_run_that_was_here_before_is_passed_over_and_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(tmp_path)
    save(store, 10, checkpoints=Checkpoints(store, "before"))
    checkpoints = Checkpoints(store, "now")
    assert checkpoints.newest(shapes()) is None
    assert not caplog.records
    save(store, 5, checkpoints=checkpoints)
    assert checkpoints.updates() == [5]
    save(store, 5, checkpoints=Checkpoints(store, "later"))  # over it
    assert checkpoints.newest(shapes()) is None


@pytest.mark.parametrize("resealed", [False, True], ids=["changed behind its state", "state fits"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "b: expected this tensor, found none"),
        ("extra", "c: expected no such tensor"),
        ("misshapen", r"b: expected float32 \[3, 2\], found float32 \[2, 3\]"),
    ],
)
def test_missing_left_over_and_misshapen_tensors_are_named(
    tmp_path: Path, change: str, message: str, resealed: bool
) -> None:
    import hashlib

    store = LocalStore(tmp_path)
    save(store, 5)
    folder = tmp_path / "checkpoints/00000005"
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        del tensors["b"]
    elif change == "extra":
        tensors["c"] = torch.zeros(1)
    else:
        tensors["b"] = tensors["b"].T.contiguous()
    save_file(tensors, folder / "model.safetensors")
    if resealed:
        state = json.loads((folder / "state.json").read_text())
        data = (folder / "model.safetensors").read_bytes()
        state["files"]["model.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DrafterError, match=rf"model.safetensors: {message}"):
        Checkpoints(store).newest(shapes())


def test_a_state_that_is_no_state_is_damage(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for update in (5, 10):
        save(store, update)
    whole = json.loads((tmp_path / "checkpoints/00000010/state.json").read_text())
    odd = (
        "much",
        "12",
        3,
        [0.5],
        [0.5, 0.5, 0.5],
        [0.5, -1],
        [0.5, 10**400],
        ["0.5", "0.5"],
        [0.5, True],
        {"1": 2},
        [],
    )
    others = [json.dumps(whole | {"accepted": rubbish}) for rubbish in odd]
    others.append(json.dumps(whole | {"accepted": [0.5, math.nan]}))
    for text in ("{", "[]", "{}", '{"format": "x", "update": 10, "optimizer_steps": 1, "files": {}}', *others):
        (tmp_path / "checkpoints/00000010/state.json").write_text(text)
        assert Checkpoints(store).newest(Shapes(shapes().model, shapes().moments, 2)) == 5
