"""`dataset.reuse`: what an earlier dataset holds is copied, only the rest reaches the verifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

from ray_jobs import extract, generate, job
from ray_jobs.planning import estimate, print_plan
from ray_jobs.recipe import load_recipe
from ray_jobs.worker import ReplicaActor
from storage import open_dataset
from storage.errors import DatasetMissing


def given(numbers: range) -> dict[str, list[dict[str, Any]]]:
    return {
        "given": [{"prompt": f"Question {n}?", "response": f"Answer {n} " + "and more " * (n % 7)} for n in numbers]
    }


def test_only_sequences_that_no_earlier_dataset_holds_are_extracted_and_planned(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    small = {"max_length": 160, "shard_tokens": 256}
    first = tiny_run.make_dataset(
        tiny_run.write_recipe(
            folders[0], tiny_verifier, given(range(12)), dataset={"uri": str(folders[0] / "dataset"), **small}
        ),
        monkeypatch,
    )
    before = open_dataset(first.dataset.uri)
    path = tiny_run.write_recipe(
        folders[1],
        tiny_verifier,
        given(range(24)),
        dataset={"uri": str(folders[1] / "dataset"), "reuse": [first.dataset.uri], **small},
    )
    prefilled: list[bytes] = []
    real = ReplicaActor._prefill

    def counted(self: ReplicaActor, batch: Any) -> Any:
        prefilled.extend(ids.tobytes() for ids in batch)
        return real(self, batch)

    monkeypatch.setattr(ReplicaActor, "_prefill", counted)
    monkeypatch.setattr(job, "start_ray", lambda: None)
    recipe = load_recipe(path)
    replicas: Any = tiny_run.InProcess(recipe)
    generate.run(recipe, tiny_run.ARGUMENTS, replicas)
    monkeypatch.setattr(replicas.actor, "calibrate", lambda unit: real_calibrate(replicas.actor, unit, prefilled))
    extract.run(recipe, tiny_run.ARGUMENTS, replicas)
    after = open_dataset(recipe.dataset.uri)
    assert len(before) == 12
    assert len(after) == 24
    rows = {states.id: states for states in before.stream()}
    old = {states.token_ids.tobytes() for states in rows.values()}
    assert len(prefilled) == 12
    assert not old & set(prefilled)
    for states in after.stream():
        if states.id in rows:
            assert (states.hidden.view(np.uint16) == rows[states.id].hidden.view(np.uint16)).all()
    plan = estimate(recipe)
    assert (plan["sequences"], plan["reused_sequences"]) == (24, 12)
    assert plan["reused_tokens"] == sum(len(states.token_ids) for states in rows.values())
    timed = [
        load_recipe(path, ["extraction.tokens_per_second=1", f"dataset.reuse={uris}"])
        for uris in ("[]", [first.dataset.uri])
    ]
    hours = [estimate(one)["hours"] for one in timed]
    assert (hours[0] - hours[1]) * 3600 == pytest.approx(plan["reused_tokens"])
    print_plan(recipe)
    assert "12 sequences, " in capsys.readouterr().out
    other = load_recipe(path, ["extraction.capture_layers=[0,1,2]"])
    assert estimate(other)["reused_tokens"] == 0
    assert "capture_layers" in estimate(other)["reuse_skips"][first.dataset.uri]
    told = [json.loads(row["receipt"])["written_by"] for row in after.shards_table().to_pylist()]
    assert sum(one.get("reused_sequences", 0) for one in told) == 12
    assert any(one.get("reused_sequences", 0) > 0 for one in told if "engine" in one or "host" in one)


def real_calibrate(actor: ReplicaActor, unit: Any, prefilled: list[bytes]) -> None:
    ReplicaActor.calibrate(actor, unit)
    prefilled.clear()  # a sample for the offsets is no extraction


def test_a_dataset_to_be_reused_that_is_not_there_is_an_error(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_run.write_recipe(
        tmp_path,
        tiny_verifier,
        given(range(4)),
        dataset={"uri": str(tmp_path / "dataset"), "max_length": 160, "reuse": [str(tmp_path / "nowhere")]},
    )
    with pytest.raises(DatasetMissing, match="nowhere"):
        tiny_run.make_dataset(path, monkeypatch)
