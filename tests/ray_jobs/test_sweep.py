"""Sweeps: arms over one dataset, each a run of its own; resumed where they stood; one table in the end."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from jobs import ROOT
from test_train import with_vocabulary, write_recipe
from tiny import VOCAB
from tiny_training import DRAFTED, Tiny, changed, make_tiny

from drafter.claim import claim
from drafter.session import train
from drafter.sources import open_sources
from ray_jobs import sweep as sweep_job
from ray_jobs import train as train_job
from ray_jobs.measuring import measured_as
from ray_jobs.recipe import load_recipe
from ray_jobs.sweep import compare, main, plan_arms, steps_left
from storage.errors import RecipeError, StatehouseError
from storage.objects import open_store
from vocab.mapping import DraftVocab

if TYPE_CHECKING:
    from tiny_run import TinyRun


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("sweep")
    return with_vocabulary(make_tiny(str(folder), folder))


def test_arms_are_all_combinations_each_a_run_with_a_vocabulary_of_its_own_where_that_changes(
    tiny: Tiny, tmp_path: Path
) -> None:
    path = str(write_recipe(tiny, tmp_path / "recipe.yaml"))
    arms = plan_arms(path, ["vocab.size=[16,32]", "training.lr=[1e-3,2e-3]", "training.epochs=2"])
    assert [arm.name for arm in arms] == [f"tiny-size-{size}-lr-{lr}" for size in (16, 32) for lr in ("1e-3", "2e-3")]
    assert {arm.recipe.training.epochs for arm in arms} == {2}
    assert [arm.recipe.training.lr for arm in arms] == [1e-3, 2e-3] * 2
    assert len({arm.recipe.run_uri for arm in arms}) == 4
    assert len({arm.recipe.vocab_uri for arm in arms}) == 2
    assert {arm.recipe.dataset.uri for arm in arms} == {f"{tiny.root}/dataset"}
    assert steps_left(arms[0], evaluate=True) == ["coverage", "train", "evaluate"]
    uris = {
        fixed: plan_arms(path, ["vocab.size=[16,32]", *fixed.split()])[0].recipe.vocab_uri.rsplit("/", 1)[-1]
        for fixed in ("", "training.epochs=2", "evaluation.seed=1", "evaluation.seed=1 evaluation.held_out=0.3")
    }
    assert list(uris.values()) == [
        "size-16", "size-16", "size-16-evaluation.seed-1", "size-16-evaluation.seed-1-evaluation.held_out-0.3",
    ]  # fmt: skip
    # A fixed key that makes another vocabulary is no reason to take the recipe's.
    fixed = plan_arms(path, ["training.lr=[1e-3,2e-3]", "vocab.size=16", "evaluation.seed=1"])
    assert {arm.recipe.vocab_uri.rsplit("/", 1)[-1] for arm in fixed} == {"size-16-evaluation.seed-1"}
    assert {arm.recipe.vocab.size for arm in fixed} == {16}
    (plain,) = {arm.recipe.vocab_uri for arm in plan_arms(path, ["training.lr=[1e-3,2e-3]"])}
    assert plain == f"{tiny.root}/dataset-vocab"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.lr=1e-3"], "at least one key with a list"),
        (["dataset.uri=[a,b]"], "all arms read one dataset"),
        (["training.lr=[1e-3,1e-3]"], "different values"),
        (["training.lrr=[1e-3,2e-3]"], "unknown key 'training.lrr'"),
        (["training.lr=[1e-3,-1]"], "training.lr"),
        (["vocab.size=[4096,8192"], "the value is not YAML; quote it"),
        (["vocab.size=[16,32]", "training.draft_vocabulary=a"], "leave one of them out"),
        (["training.lr=[1e-3,2e-3]", "training.lr=5"], "training.lr is given twice"),
        (["vocab=[{size: 16},{size: 32}]"], "expected a key inside vocab"),
    ],
)
def test_what_is_no_sweep_is_one_line(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    path = str(write_recipe(tiny, tmp_path / "recipe.yaml"))
    with pytest.raises(RecipeError, match=message.replace("[", r"\[")):
        plan_arms(path, settings)
    assert main([path, *settings]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_a_key_that_takes_a_list_is_fixed_by_one_and_an_axis_by_a_list_of_lists(tiny: Tiny, tmp_path: Path) -> None:
    path = str(write_recipe(tiny, tmp_path / "recipe.yaml"))
    rates = "training.lr=[1e-3,2e-3]"
    for fixed in ("evaluation.draft_lengths=[1,2,5]", "training.betas=[0.8,0.9]", "training.trackers=[]"):
        arms = plan_arms(path, [fixed, rates])
        assert [list(arm.settings) for arm in arms] == [["training.lr"]] * 2
    assert arms[0].recipe.training.trackers == ()
    assert plan_arms(path, ["evaluation.draft_lengths=[1,2,5]", rates])[0].recipe.evaluation.draft_lengths == (1, 2, 5)
    arms = plan_arms(path, ["training.betas=[[0.8,0.9],[0.9,0.95]]"])
    assert [arm.recipe.training.betas for arm in arms] == [(0.8, 0.9), (0.9, 0.95)]
    with pytest.raises(RecipeError, match="at least one key with a list"):
        plan_arms(path, ["vocab.sizes=[16,32]"])


def test_a_file_that_cannot_be_written_is_said_before_any_work_and_the_unexpected_is_one_line(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_recipe(tiny, tmp_path / "recipe.yaml"))
    monkeypatch.setattr(sweep_job.Jobs, "do", lambda *_: pytest.fail("it started to work"))
    for to in (tmp_path / "none" / "x.json", tmp_path):
        assert main([path, "training.lr=[1e-3]", "--json", str(to)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --json {to}: ")
    monkeypatch.undo()
    monkeypatch.setattr(sweep_job, "steps_left", lambda *_: 1 // 0)
    assert main([path, "training.lr=[1e-3]"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: tiny-lr-1e-3: unexpected ZeroDivisionError")
    monkeypatch.setattr(sweep_job, "plan_arms", lambda *_: 1 // 0)
    assert main([path, "training.lr=[1e-3]"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: unexpected ZeroDivisionError")


def test_the_table_compares_what_is_there(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_recipe(tiny, tmp_path / "recipe.yaml", epochs=1))
    settings = ["training.lr=[1e-3,3e-3]"]
    arms = plan_arms(path, settings)
    request = changed(
        tiny.request(epochs=1), run=arms[1].recipe.run_uri, training=arms[1].recipe.training, owner="sweep"
    )
    torch.set_num_threads(1)
    claim(request, open_sources(request))
    assert train(request) is not None
    assert steps_left(arms[0], evaluate=False) == ["train"]
    assert steps_left(arms[1], evaluate=False) == []
    assert steps_left(arms[1], evaluate=True) == ["evaluate"]
    # What was measured at other draft lengths is no answer.
    taus = {"all": {"drafters": {"drafter": {"tau": {"3": {"tau": 1.5}}}}}}
    measured = {"sources": taus, "evaluation": measured_as(arms[1].recipe)}
    open_store(arms[1].recipe.run_uri).put("evaluation.json", json.dumps(measured).encode())
    other = tmp_path / "other.yaml"
    other.write_text(Path(path).read_text().replace("held_out: 0.2", "held_out: 0.2\n  draft_lengths: [1, 5]"))
    for one, left, tau in (path, [], {"3": 1.5}), (str(other), ["evaluate"], None):
        (_, arm) = plan_arms(one, settings)
        assert steps_left(arm, evaluate=True) == left
        assert compare([arm])[0]["tau"] == tau
    rows = compare(arms)
    assert [row["finished"] for row in rows] == [False, True]
    assert rows[1]["parameters"]["trained"] > 0
    out = tmp_path / "out.json"
    assert main([path, *settings, "--table", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "unfinished" in shown
    assert "held-out loss" in shown
    stored = json.loads((Path(f"{tiny.root}/dataset-runs") / "tiny.sweep.json").read_text())
    assert stored == json.loads(out.read_text())
    # The same arms of another experiment: its name is that of a finished run, which is not its own.
    other = [path, "training.lr=[3e-3]", "training.epochs=2"]
    for more in ([], ["--table"]):
        assert main([*other, *more]) == 1
        said = capsys.readouterr()
        assert "this run is of something else: training.epochs" in said.err
        assert "unfinished" in said.out
    assert main([path, "training.lr=[3e-3]"]) == 0


def test_a_draft_vocabulary_of_other_settings_is_refused_or_made_again_where_it_is_the_sweeps_own(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(tiny, tmp_path / "recipe.yaml", run="other-size")
    arguments = argparse.Namespace(fresh=False)
    with pytest.raises(
        StatehouseError, match=r"dataset-vocab: .*vocab.size: expected 16, found 32; run coverage again"
    ):
        train_job.run(load_recipe(path, ["vocab.size=16"]), arguments)
    assert main([str(path), "training.lr=[1e-3]", "evaluation.seed=1", "--table"]) == 0  # its own, not there yet
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text().replace(f"size: {DRAFTED}", "size: 16"))
    with pytest.raises(StatehouseError, match="run coverage again"):
        steps_left(plan_arms(str(other), ["training.lr=[1e-3]"])[0], evaluate=False)
    # Made for the arms of a sweep, by a recipe that was changed since.
    (arm,) = plan_arms(str(path), ["vocab.size=[16]"])
    assert steps_left(arm, evaluate=False) == ["coverage", "train"]
    for policy, left in (("frequency", ["train"]), ("balanced", ["coverage", "train"])):
        made_with = {"vocab": {"policy": policy}, "evaluation": {"held_out": 0.2}}
        vocabulary = DraftVocab.from_ids(range(16), VOCAB, provenance={"recipe": made_with})
        for name, data in vocabulary.to_bytes().items():
            open_store(arm.recipe.vocab_uri).put(name, data)
        assert steps_left(arm, evaluate=False) == left
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_sweep_over_vocabulary_sizes_ends_with_taus_and_does_nothing_twice(
    tiny_run: TinyRun, ray_cluster: dict[str, str], tmp_path: Path
) -> None:
    import os

    command = [
        sys.executable, "-m", "ray_jobs.sweep", str(tiny_run.path), "vocab.size=[64,256]", "training.epochs=1",
        "training.run=sizes", "--evaluate", "--parallel", "2", "--json", str(tmp_path / "out.json"),
    ]  # fmt: skip
    environment = {**os.environ, **ray_cluster}
    first = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert first.returncode == 0, first.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["arms"]
    assert [row["draft_vocab_size"] for row in rows] == [64, 256]
    assert all(row["tau"] and row["finished"] for row in rows)
    assert len({tuple(row["datasets"]) for row in rows}) == 1
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0
    assert "start arm=" not in again.stderr
