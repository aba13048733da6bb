"""Checkpoints: whole or not there, whenever the writer is killed; damage is named and passed over."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drafter.checkpoint import Checkpoints
from drafter.errors import DrafterError
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


def model(seed: int = 0, steps: int = 3) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(seed)
    trained = {name: nn.Parameter(torch.randn(3, 2)) for name in ("a", "b")}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.1, fused=True)
    for _ in range(steps):
        for one in trained.values():
            one.grad = torch.randn_like(one)
        optimizer.step()
    return trained, optimizer


def save(
    store: ObjectStore, update: int, keep: int = 2, checkpoints: Checkpoints | None = None
) -> dict[str, nn.Parameter]:
    trained, optimizer = model(update)
    (checkpoints or Checkpoints(store)).save(update, trained, optimizer, {"epoch": update // 3, "tokens": 7}, keep)
    return trained


def test_a_checkpoint_brings_back_weights_optimiser_and_counters(uri: str) -> None:
    checkpoints = Checkpoints(open_store(uri))
    trained, optimizer = model(1)
    assert checkpoints.newest(trained) is None
    checkpoints.save(12, trained, optimizer, {"epoch": 3, "tokens": 7}, 2)
    other, its_optimizer = model(2, steps=0)
    assert checkpoints.newest(other) == 12
    state = checkpoints.load(12, other, its_optimizer)
    assert (state["update"], state["epoch"], state["tokens"], state["optimizer_steps"]) == (12, 3, 7, 3)
    for parameters, own in ((trained, optimizer), (other, its_optimizer)):
        for one in parameters.values():
            one.grad = torch.ones_like(one)
        own.step()
    assert all(torch.equal(trained[name], other[name]) for name in trained)  # the next step is the same, too


def test_only_the_newest_are_kept(uri: str) -> None:
    store = open_store(uri)
    for update in (5, 10, 15, 20):
        save(store, update)
    assert Checkpoints(store).updates() == [15, 20]
    assert {key.split("/")[1] for key in store.sizes("checkpoints")} == {"00000015", "00000020"}


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
        newest = Checkpoints(LocalStore(store.root)).newest(model()[0])
        assert newest in (2, 3)
        save(LocalStore(store.root), 3, keep=1)  # the next run gets there again
        assert Checkpoints(store).updates() == [3]
        assert len(store.sizes("checkpoints")) == 3
        store.left = requests
        with contextlib.suppress(Killed):
            save(store, 3, keep=1)  # and once more: there is no other
        assert Checkpoints(LocalStore(store.root)).newest(model()[0]) == 3
    assert requests > 5  # so it was killed between all of them


def test_a_damaged_one_is_named_and_the_one_before_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore(tmp_path)
    for update in (5, 10):
        save(store, update)
    path = tmp_path / "checkpoints/00000010/model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with caplog.at_level(logging.WARNING, "statehouse"):
        assert Checkpoints(store).newest(model()[0]) == 5
    assert f"{path}: expected" in caplog.text
    save(store, 10)  # gets there again, over the damaged one
    assert Checkpoints(store).newest(model()[0]) == 10


def test_later_ones_that_were_fallen_behind_of_go_with_the_next(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for update in (5, 10):
        save(store, update)
    (tmp_path / "checkpoints/00000010/optimizer.safetensors").unlink()
    checkpoints = Checkpoints(store)
    assert checkpoints.newest(model()[0]) == 5
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
    assert checkpoints.newest(model()[0]) is None
    assert not caplog.records
    save(store, 5, checkpoints=checkpoints)
    assert checkpoints.updates() == [5]
    save(store, 5, checkpoints=Checkpoints(store, "later"))  # over it
    assert checkpoints.newest(model()[0]) is None


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
        Checkpoints(store).newest(model()[0])


def test_a_state_that_is_no_state_is_damage(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for update in (5, 10):
        save(store, update)
    for text in ("{", "[]", "{}", '{"format": "x", "update": 10, "optimizer_steps": 1, "files": {}}'):
        (tmp_path / "checkpoints/00000010/state.json").write_text(text)
        assert Checkpoints(store).newest(model()[0]) == 5
