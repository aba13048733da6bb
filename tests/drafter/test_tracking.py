"""Trackers: TensorBoard's files are real and lie in the run; a library that is missing is one line; a broken one is left."""

from __future__ import annotations

import logging
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_training import Tiny

from drafter.claim import claim
from drafter.errors import DrafterError
from drafter.journal import Journal
from drafter.recipe import TrainingSection
from drafter.run import Run
from drafter.session import train
from drafter.sources import open_sources
from drafter.tracking import Tracker, open_trackers, require_trackers
from storage.objects import open_store


def events(data: bytes) -> list[Any]:
    from tensorboardX.proto import event_pb2

    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack("<Q", data[at : at + 8])
        found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
        at += 12 + length + 4
    return found


def test_tensorboard_reads_what_a_run_leaves_also_after_a_stop(tiny: Tiny) -> None:
    request = tiny.request("tracked", epochs=2)
    claim(request, open_sources(request))
    asked = iter([False] * 3 + [True])
    assert train(request, stop=lambda: next(asked)) is None
    summary = train(request)
    assert summary is not None
    run = Run(request.run)
    files = [run.store.get(key) for key in run.store.sizes("tensorboard")]
    assert len(files) == 2  # one of each start
    losses = {
        event.step: value.simple_value
        for data in files
        for event in events(data)
        for value in event.summary.value
        if value.tag == "train/loss"
    }
    assert sorted(losses) == list(range(summary["updates"]))
    tags = {value.tag for data in files for event in events(data) for value in event.summary.value}
    assert {"held_out/loss", "held_out/accuracy_0", "train/lr", "train/wait_share", "train/grad_norm"} <= tags


def test_the_held_out_point_of_the_update_that_a_run_resumes_at_is_shown(tiny: Tiny) -> None:
    request = tiny.request("at-evaluation", epochs=1, evaluate_every=2)
    claim(request, open_sources(request))
    asked = iter([False, True])
    assert train(request, stop=lambda: next(asked)) is None
    summary = train(request)
    assert summary is not None
    run, shown = Run(request.run), dict[int, float]()
    for key in sorted(run.store.sizes("tensorboard"), key=lambda name: int(name.rsplit(".", 1)[-1])):
        for event in events(run.store.get(key)):
            if event.HasField("session_log"):  # START: TensorBoard purges from here on
                shown = {step: value for step, value in shown.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == "held_out/loss":
                    shown[event.step] = value.simple_value
    assert shown == {one["update"]: pytest.approx(one["loss"]) for one in summary["evaluations"]}
    assert 2 in shown


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_library_that_is_not_there_is_one_line_before_anything_starts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DrafterError, match=f"training.trackers: {name} needs the package {name}.*pip install {name}"):
        require_trackers(["tensorboard", name])
    settings = tiny.request().training.model_dump() | {"trackers": [name]}
    request = tiny.request("untracked")
    object.__setattr__(request, "training", TrainingSection.model_validate(settings))
    with pytest.raises(DrafterError, match="pip install"):
        claim(request, open_sources(request))
    assert not (Path(request.run) / "run.json").exists()


def test_a_server_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_options: Any) -> None:
        raise RuntimeError("api_key not configured\nuse wandb login")

    module: Any = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(
        DrafterError, match="wandb cannot be started: RuntimeError: api_key not configured use"
    ) as caught:
        open_trackers(["wandb"], open_store(tmp_path), "id", 0, {})
    assert "\n" not in str(caught.value)


def test_wandb_gets_numbers_by_update_and_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library is not among ours: this one stands for the four calls that its documentation names."""
    said: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: said.append((step, values)), finish=lambda: said.append("end"), summary={}
    )
    module: Any = ModuleType("wandb")
    module.init = lambda **options: said.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    (tracker,) = open_trackers(["wandb"], open_store(tmp_path / "first"), "id", 0, {"training": {"lr": 1}})
    tracker.log(3, {"train/loss": 1.5})
    tracker.close({"tokens": 10, "evaluations": []})
    assert said == [
        {"id": "id", "name": "first", "resume": "allow", "config": {"training": {"lr": 1}}},
        (3, {"train/loss": 1.5}),
        "end",
    ]
    assert run.summary == {"tokens": 10}


def test_a_tracker_that_fails_is_left_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Tracker):
        def log(self, update: int, values: Any) -> None:
            raise ConnectionError("gone")

    journal = Journal(Run(str(tmp_path)), [], [Broken()])
    with caplog.at_level(logging.WARNING, "statehouse"):
        for update in range(2):
            journal.update({"update": update, "loss": 1.0, "accuracy": [0.5]})
    journal.storing()()
    assert len(journal.lines) == 2
    assert [record.message for record in caplog.records] == ["tracker left name=broken: gone"]
