"""Runs in a bucket: found wherever they lie, named by what they were trained on, damaged ones listed with their problem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.cli import main
from storage.objects import open_store
from storage.runs import find_runs, fingerprints_of

A, B = "a" * 64, "b" * 64


def make_run(root: str, path: str, datasets: dict[str, float], finished: bool = True, tau: bool = False) -> None:
    store = open_store(f"{root}/{path}")
    identity = {"dataset": next(iter(datasets)), "datasets": datasets, "draft_vocabulary": "c" * 64}
    where = [{"uri": "s3://b/chat", "fingerprint": one} for one in datasets]
    store.put("run.json", json.dumps({"identity": identity, "provenance": {"datasets": where}}).encode())
    if finished:
        summary = {"updates": 10, "tokens": 1000, "loss_after": 1.5, "draft_vocab_size": 64}
        store.put("summary.json", json.dumps(summary).encode())
    if tau:
        taus = {"all": {"drafters": {"drafter": {"tau": {"1": {"tau": 1.3}, "3": {"tau": None}}}}}}
        store.put("evaluation.json", json.dumps({"sources": taus}).encode())


def test_runs_are_found_and_asked_for_their_dataset(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(uri, "chat-runs/first", {A: 1.0}, tau=True)
    make_run(uri, "chat-runs/mixed", {B: 1.0, A: 0.5}, finished=False)
    make_run(uri, "deep/er/code-runs/other", {B: 1.0})
    open_store(f"{uri}/chat-runs/broken").put("run.json", b"[1]")
    found = {run.name: run for run in find_runs(uri)}
    assert sorted(found) == ["broken", "first", "mixed", "other"]
    assert found["first"].tau == {"1": 1.3}
    assert found["broken"].problem is not None
    assert [run.name for run in find_runs(f"{uri}/chat-runs/first")] == ["first"]
    main(["runs", uri, "--dataset", A, "--json"])
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["first", "mixed"]
    main(["runs", uri])
    out = capsys.readouterr().out
    for word in ("chat aaaaaaaaaaaa", "x 0.5", "finished", "unfinished", "1: 1.300", "expected a training run"):
        assert word in out


def test_a_dataset_is_known_by_all_its_fingerprints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny import sealed, sequences

    _, seal = sealed(str(tmp_path / "dataset"), sequences(6, 40))
    assert fingerprints_of(str(tmp_path / "dataset")) == {seal.fingerprint}
    make_run(str(tmp_path), "dataset-runs/one", {seal.fingerprint: 1.0})
    main(["runs", str(tmp_path), "--dataset", str(tmp_path / "dataset"), "--json"])
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["one"]
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path), "--dataset", str(tmp_path / "nothing")])
    assert "64 hex digits" in capsys.readouterr().err
