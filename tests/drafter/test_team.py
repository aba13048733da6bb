"""Several workers train to what one does: the number of them, and of what one of them lacks, changes nothing."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import Tiny, after, changed, exported, losses, whole_run

from drafter.claim import claim
from drafter.errors import DrafterError
from drafter.run import Run
from drafter.session import Session, train
from drafter.sources import Request, open_sources
from drafter.team import Team
from storage.errors import StatehouseError


def _worker(rank: int, world: int, meeting: str, request: Request, stop_after: int, error: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        if rank == world - 1 and error.value == b"break":
            request = changed(request, verifier="/nowhere")
        if rank == world - 1 and error.value == b"poison":  # its loss is no number in one update
            poison(at=2)
        train(request, Team(rank, world), after(stop_after) if stop_after and rank == 0 else lambda: False)
    except StatehouseError as failure:
        error.value = str(failure).encode()[:500] if rank == world - 1 else error.value
        os._exit(7)
    torch.distributed.destroy_process_group()
    # Gloo's threads live on, and one that lets go of a tensor while Python ends aborts the process.
    os._exit(0)


def poison(at: int) -> None:
    """Every trainer's update with this number finds a loss that is no number, in this process."""
    from dataclasses import replace

    from drafter.trainer import Trainer

    update, compute, count = Trainer.update, Trainer._loss, iter(range(1000))
    now = [-1]

    def counted(self: Any, *given: Any) -> Any:
        now[0] = next(count)
        return update(self, *given)

    def poisoned(self: Any, *given: Any) -> Any:
        loss = compute(self, *given)
        return replace(loss, loss=loss.loss * math.nan) if now[0] == at else loss

    Trainer.update, Trainer._loss = counted, poisoned  # type: ignore[method-assign]


def together(request: Request, world: int, stop_after: int = 0, told: str = "") -> tuple[list[int], str]:
    """Exit codes of `world` gloo processes that train the run, and the last one's error. told: `break` or `poison` it."""
    claim(request, open_sources(request))
    spawn = multiprocessing.get_context("spawn")
    error = spawn.Array("c", 600)
    error.value = told.encode()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [(rank, world, f"{folder}/meeting", request, stop_after, error) for rank in range(world)]
        workers = [spawn.Process(target=_worker, args=one) for one in ranks]
        for one in workers:
            one.start()
        for one in workers:
            one.join(120)
        late = [number for number, one in enumerate(workers) if one.is_alive()]
        for number in late:
            workers[number].kill()
            workers[number].join()
    assert not late, f"workers {late} did not end"
    return [int(one.exitcode or 0) for one in workers], error.value.decode()


def test_two_workers_train_to_what_one_does_also_when_the_number_changes_on_the_way(tiny: Tiny) -> None:
    # A micro-batch as large as a global batch: one of the two workers has nothing to do, and must still take part.
    alone, two, idle = (
        tiny.request(name, epochs=1, micro_batch_tokens=micro)
        for name, micro in (("one", 80), ("two", 80), ("idle", 1000))
    )
    whole_run(alone)
    assert together(two, 2, stop_after=3)[0] == [0, 0]
    assert Run(two.run).summary() is None
    whole_run(two)  # carried on by one
    assert together(idle, 2)[0] == [0, 0]
    reference = exported(alone)
    for other in (two, idle):
        np.testing.assert_allclose(losses(other), losses(alone), rtol=2e-4)
        for name, tensor in exported(other).items():
            assert torch.allclose(tensor.float(), reference[name].float(), atol=3e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["soft_cross_entropy", "lk_hybrid"])
def test_eight_workers_train_to_what_one_does(tiny: Tiny, loss: str) -> None:
    alone, eight = (tiny.request(f"{name}-{loss}", {"loss": loss}, epochs=1) for name in ("one-of-eight", "eight"))
    whole_run(alone)
    assert together(eight, 8)[0] == [0] * 8
    np.testing.assert_allclose(losses(eight), losses(alone), rtol=2e-4)


def test_one_worker_has_nobody_to_share_weights_with(tiny: Tiny) -> None:
    with pytest.raises(DrafterError, match="training.parallel: shard .* set it to replicate"):
        Session(tiny.request("lonely", parallel="shard"), Team())


@pytest.mark.slow
def test_sharded_weights_train_to_what_whole_ones_do_and_either_carries_on_the_other(tiny: Tiny) -> None:
    alone = tiny.request("alone", epochs=1)
    whole_run(alone)
    shared = tiny.request("shared", epochs=1, parallel="shard")
    assert together(shared, 2, stop_after=3, told="poison")[0] == [0, 0]
    whole_run(tiny.request("shared", epochs=1))  # carried on whole, by one
    cut = tiny.request("cut-whole", epochs=1)
    assert whole_run(cut, stop=after(3)) is None
    assert together(tiny.request("cut-whole", epochs=1, parallel="shard"), 2)[0] == [0, 0]
    np.testing.assert_allclose(losses(cut), losses(alone), rtol=2e-4)
    for name, tensor in exported(cut).items():
        assert torch.allclose(tensor.float(), exported(alone)[name].float(), atol=3e-3), name
    # A loss that is no number on one worker is skipped by both.
    lines = [json.loads(line) for line in Run(shared.run).store.get("metrics.jsonl").decode().splitlines()]
    assert [line["update"] for line in lines if line.get("skipped")] == [2]
    np.testing.assert_allclose(losses(shared)[:2].astype(float), losses(alone)[:2], rtol=2e-4)
    summary = Run(shared.run).summary()
    assert summary is not None
    assert summary["skipped_updates"] == 1


@pytest.mark.slow
def test_an_error_of_one_worker_ends_all_of_them_with_its_line(tiny: Tiny) -> None:
    codes, line = together(tiny.request("broken"), 2, told="break")
    assert codes == [7, 7]
    assert "/nowhere" in line
