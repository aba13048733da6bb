"""What may happen to a run's folder: damage in any of its files, a disk that is full, a process killed at any write."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import Tiny, after, changed, exported, losses, small_disk_at, whole_run

from drafter.errors import DrafterError
from drafter.run import Run
from drafter.sources import Request
from storage.errors import StoreError
from storage.objects import LocalStore


@pytest.mark.parametrize(("name", "rubbish"), [("metrics.jsonl", "{"), ("state.json", "tokens")])
def test_damaged_counters_are_one_line(tiny: Tiny, name: str, rubbish: str) -> None:
    request = tiny.request(f"counters-{name}")
    whole_run(request, stop=after(3))
    if name == "metrics.jsonl":
        Run(request.run).store.put(name, rubbish.encode())
    else:
        path = Path(request.run) / "checkpoints/00000003/state.json"
        state = json.loads(path.read_text())
        del state[rubbish]
        path.write_text(json.dumps(state))
    with pytest.raises(DrafterError, match=name) as refused:
        whole_run(request)
    assert "\n" not in str(refused.value)


def test_a_damaged_summary_is_one_line_and_the_run_finishes_again_without_it(tiny: Tiny) -> None:
    request = tiny.request("summary", epochs=1)
    assert whole_run(request) is not None
    path = Path(request.run) / "summary.json"
    before = exported(request)
    for rubbish in ("{}", "{", "[1]"):
        path.write_text(rubbish)
        with pytest.raises(DrafterError, match=r"summary\.json: ") as refused:
            whole_run(request)
        assert "\n" not in str(refused.value)
    path.unlink()
    assert whole_run(request) is not None
    assert all(torch.equal(exported(request)[name], one) for name, one in before.items())


def _train_until_killed(request: Request, requests: int) -> None:
    """In a process of its own: SIGKILL, as it were, before the write or delete with this number."""
    left = iter(range(requests))

    def spend(method: Any) -> Any:
        def spent(*given: Any) -> Any:
            if next(left, None) is None:
                os._exit(9)
            return method(*given)

        return spent

    for name in ("put", "create", "delete"):
        setattr(LocalStore, name, spend(getattr(LocalStore, name)))
    torch.set_num_threads(1)
    whole_run(request)
    os._exit(0)


@pytest.mark.slow
def test_killed_at_any_write_over_and_over_it_ends_in_the_bits_of_an_undisturbed_run(tiny: Tiny) -> None:
    request = tiny.request("whole-way", epochs=2, checkpoint_every=2)
    assert whole_run(request) is not None
    killed, server = changed(request, run=f"{tiny.root}/killed-on-the-way"), multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tiny_training"])  # torch is imported once
    # A start and its first checkpoint are 6 writes, one more checkpoint with what it deletes is 9: mostly it gets further.
    codes = []
    for requests in itertools.cycle((7, 13, 11, 15, 12, 16, 14)):
        process = server.Process(target=_train_until_killed, args=(killed, requests))
        process.start()
        process.join(60)
        codes.append(process.exitcode)
        assert process.exitcode in (0, 9)
        assert len(codes) < 60
        if process.exitcode == 0:
            break
    assert codes.count(9) >= 5
    assert all(torch.equal(exported(killed)[name], one) for name, one in exported(request).items())
    np.testing.assert_array_equal(losses(killed), losses(request))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk: a checkpoint fits, a second one does not."""
    with small_disk_at(tmp_path / "disk", "900k") as folder:
        yield folder


def test_a_full_disk_ends_the_run_in_one_line_and_it_carries_on_when_there_is_room(
    tiny: Tiny, small_disk: Path
) -> None:
    impatient = tiny.request().training.loader.model_copy(update={"patience_s": 0.0})
    request = tiny.request("full", loader=impatient, checkpoint_every=4)
    undisturbed = whole_run(request)
    cut = changed(request, run=str(small_disk / "run"))
    with pytest.raises(StoreError, match=r"No space left on device; free some space") as caught:
        whole_run(cut)
    assert "\n" not in str(caught.value)
    assert Run(cut.run).checkpoints.updates() == [4]
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    summary = whole_run(cut)
    assert summary is not None
    assert undisturbed is not None
    assert summary["resumed"] == 1
    assert all(torch.equal(exported(cut)[name], one) for name, one in exported(request).items())
