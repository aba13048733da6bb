"""Training by Ray Train, for real: learning, killed workers and drivers, S3, `ray job submit`, and what is refused."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jobs import ROOT, Finished
from safetensors.torch import load, load_file, save_file
from tiny_training import DRAFTED, Tiny, changed, make_dataset, make_sequences, make_tiny, make_vocabulary, planned_only

from drafter.claim import claim
from drafter.run import Run
from drafter.session import train
from drafter.sources import open_sources
from ray_jobs import job
from ray_jobs import train as train_job
from ray_jobs.recipe import load_recipe
from ray_jobs.verifier import VerifierShape
from storage.errors import StatehouseError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]
Start = Callable[..., subprocess.Popen[str]]
RunJob = Callable[..., Finished]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("training")
    return make_tiny(str(folder), folder)


def write_recipe(tiny: Tiny, path: Path, **training: Any) -> Path:
    """A recipe for the tiny dataset, with the settings of `tiny.request`, two workers."""
    settings = tiny.request().training.model_dump(mode="json", exclude_defaults=True)
    document = {
        "name": "tiny",
        "verifier": {"model": str(tiny.verifier)},
        "prompts": [{"path": "none.jsonl"}],
        "dataset": {"uri": f"{tiny.root}/dataset"},
        "drafter": {"ttt_steps": 2},
        "training": {**settings, "workers": 2, **training},
        "evaluation": {"held_out": 0.2},
        "vocab": {"size": DRAFTED},
    }
    path.write_text(yaml.safe_dump(document))
    return path


def with_vocabulary(tiny: Tiny) -> Tiny:
    """The draft vocabulary where the jobs look for it."""
    make_vocabulary(f"{tiny.root}/dataset-vocab")
    return tiny


def wait_for_checkpoint(run: Run, process: subprocess.Popen[str], beyond: int = 0, seconds: float = 200) -> int:
    deadline = time.monotonic() + seconds
    while not (updates := [one for one in run.checkpoints.updates() if one > beyond]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    return updates[-1]


def written_by(run: Run, update: int) -> dict[str, int]:
    """`pid` of the first worker, and how many `workers` there were."""
    found: dict[str, int] = json.loads(run.store.get(f"checkpoints/{update:08d}/state.json"))["written_by"]
    return found


def writer_of(run: Run, update: int) -> int:
    return written_by(run, update)["pid"]


def exported(run: Run) -> dict[str, torch.Tensor]:
    return load(run.store.get("drafter/model.safetensors"))


def test_two_workers_of_ray_train_end_where_one_process_does(
    tiny: Tiny, tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_vocabulary(tiny)
    path = write_recipe(tiny, tmp_path / "recipe.yaml", epochs=3, run="two", min_workers=1)
    run = Run(f"{tiny.root}/dataset-runs/two")
    finished = run_job("train", path)
    assert finished.code == 0, finished.err
    summary = run.summary()
    assert summary is not None
    assert summary["workers"] == 2
    assert {"report.html", "curves.png"} <= set(run.store.sizes())
    assert len(run.provenance()["source"]) == 64
    assert any(key.startswith("tensorboard/events") for key in run.store.sizes())
    alone = tiny.request("alone", epochs=3)
    claim(alone, open_sources(alone))
    torch.set_num_threads(1)
    reference = train(alone)
    assert reference is not None
    assert summary["loss_after"] == pytest.approx(reference["loss_after"], rel=1e-3)
    ours, theirs = (
        [json.loads(line)["loss"] for line in one.store.get("metrics.jsonl").decode().splitlines()]
        for one in (run, Run(alone.run))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)

    # A finished run, and one of something else, are seen before any Ray is started.
    monkeypatch.setattr(job, "start_ray", lambda: pytest.fail("it started Ray"))
    arguments = argparse.Namespace(fresh=False)
    run.store.delete("report.html")
    train_job.run(load_recipe(path), arguments)
    assert run.store.exists("report.html")
    with pytest.raises(StatehouseError, match=r"training.lr: 0.003 -> 0.5.*training.run=<other name>"):
        train_job.run(load_recipe(path, ["training.lr=0.5"]), arguments)


@pytest.mark.slow
def test_an_error_inside_the_workers_is_one_line_and_is_not_tried_again(
    tiny: Tiny, tmp_path: Path, run_job: RunJob
) -> None:
    with_vocabulary(tiny)
    path = write_recipe(tiny, tmp_path / "recipe.yaml", run="misshapen", epochs=1)
    request = changed(tiny.request(epochs=1), run=f"{tiny.root}/dataset-runs/misshapen")
    claim(request, open_sources(request))
    asked = iter([False, False, True])
    torch.set_num_threads(1)
    train(request, stop=lambda: next(asked))
    folder = Path(request.run) / "checkpoints/00000003"
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
    save_file(tensors, folder / "model.safetensors")
    state = json.loads((folder / "state.json").read_text())
    data = (folder / "model.safetensors").read_bytes()
    state["files"]["model.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "state.json").write_text(json.dumps(state))
    failed = run_job("train", path)
    assert failed.code == 1, failed.err
    assert len(failed.errors) == 1
    assert "checkpoints/00000003/model.safetensors: fc.weight: expected float32 [64, 192]" in failed.errors[0]
    assert "Traceback" not in failed.err
    assert "restarts=" not in failed.err


def test_a_wish_to_stop_is_known_when_the_update_ends_though_nobody_asked_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    class Driver:
        wish = False

        @property
        def stopping(self) -> Any:
            return argparse.Namespace(remote=lambda: self.wish)

    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(train_job, "_POLL_S", 0.01)
    driver = Driver()
    with contextlib.closing(train_job._StopAsked(driver)) as asked:
        assert not asked()
        driver.wish = True
        time.sleep(1)  # an update
        assert asked()
    assert not asked._thread.is_alive()


@pytest.mark.slow
def test_sigterm_of_the_driver_leaves_a_checkpoint(tiny: Tiny, tmp_path: Path, start_job: Start) -> None:
    with_vocabulary(tiny)
    path = write_recipe(tiny, tmp_path / "recipe.yaml", epochs=400, checkpoint_every=5, run="sigterm")
    run = Run(f"{tiny.root}/dataset-runs/sigterm")
    driver = start_job("train", path)
    wait_for_checkpoint(run, driver)
    driver.terminate()
    _, err = driver.communicate(timeout=90)
    assert driver.returncode == 143, err
    assert "train stopped update=" in err


@pytest.mark.slow
def test_from_object_storage_to_object_storage(
    s3_server: str, tmp_path: Path, start_job: Start, run_job: RunJob
) -> None:
    tiny = with_vocabulary(make_tiny(f"s3://statehouse/train-{os.getpid()}", tmp_path))
    path = write_recipe(tiny, tmp_path / "recipe.yaml", epochs=60, checkpoint_every=5)
    run = Run(f"{tiny.root}/dataset-runs/tiny")
    driver = start_job("train", path)
    wait_for_checkpoint(run, driver)
    driver.kill()
    driver.communicate()
    finished = run_job("train", path)
    assert finished.code == 0, finished.err
    assert "train resumed" in finished.err
    assert "drafter/model.safetensors" in run.store.sizes()


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_ray_job_submit_and_stop_and_submit_again(tiny: Tiny, tmp_path: Path, ray_cluster: dict[str, str]) -> None:
    with_vocabulary(tiny)
    path = write_recipe(tiny, tmp_path / "recipe.yaml", epochs=200, checkpoint_every=5, run="submitted")
    run, ray = Run(f"{tiny.root}/dataset-runs/submitted"), Path(sys.executable).parent / "ray"
    environment = {name: value for name, value in {**os.environ, **ray_cluster}.items() if name != "RAY_ADDRESS"}

    def submit(name: str) -> subprocess.Popen[str]:
        command = [ray, "job", "submit", "--submission-id", name, "--working-dir", ".", "--"]
        return subprocess.Popen(
            [*command, "python", "-m", "ray_jobs.train", str(path)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    first = submit("train-1")
    wait_for_checkpoint(run, first)
    subprocess.run([ray, "job", "stop", "train-1"], env=environment, check=True, capture_output=True, timeout=120)
    out, _ = first.communicate(timeout=60)
    assert "train stopped update=" in out, out
    stood = run.checkpoints.updates()[-1]
    assert f"train stopped update={stood}/" in out
    assert run.summary() is None, "it ended before it was stopped"
    again = submit("train-2")
    out, _ = again.communicate(timeout=240)
    assert again.returncode == 0, out
    assert f"train resumed update={stood}/" in out
    assert "train done" in out
    assert run.summary() is not None


class NoRay:
    """A cluster of 4 CPUs that must not be used."""

    @pytest.fixture(autouse=True)
    def _cluster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(job, "start_ray", lambda: None)
        monkeypatch.setattr(job, "cluster_size", lambda: (4.0, 0.0))
        monkeypatch.setattr(job, "fitting", lambda cpus, gpus: 0 if gpus else int(4 // cpus))
        monkeypatch.setattr(train_job, "_train", lambda *_: pytest.fail("it trained"))


class TestBadInput(NoRay):
    @pytest.fixture
    def refused(self, tiny: Tiny, tmp_path: Path) -> Callable[..., str]:
        with_vocabulary(tiny)

        def refused(*overrides: str) -> str:
            recipe = load_recipe(write_recipe(tiny, tmp_path / "recipe.yaml", run="refused"), list(overrides))
            with pytest.raises(StatehouseError) as caught:
                train_job.run(recipe, argparse.Namespace(fresh=False))
            assert "\n" not in str(caught.value)
            assert not (Path(recipe.run_uri) / "run.json").exists()
            return str(caught.value)

        return refused

    def test_no_dataset_and_one_that_is_not_sealed(self, refused: Callable[..., str], tmp_path: Path) -> None:
        assert "no dataset" in refused(f"dataset.uri={tmp_path}/nothing")
        planned_only(f"{tmp_path}/planned")
        assert "not sealed" in refused(f"dataset.uri={tmp_path}/planned")

    def test_a_draft_vocabulary_that_is_not_there_or_of_another_verifier(
        self, refused: Callable[..., str], tiny: Tiny, tmp_path: Path
    ) -> None:
        uri = f"{tmp_path}/dataset"
        make_dataset(uri, tiny.verifier)
        assert "ray_jobs.coverage" in refused(f"dataset.uri={uri}")
        make_vocabulary(f"{uri}-vocab", 999)
        assert "another verifier" in refused(f"dataset.uri={uri}")

    def test_no_loss_tokens(self, refused: Callable[..., str], tiny: Tiny, tmp_path: Path) -> None:
        uri = f"{tmp_path}/dataset"
        make_dataset(uri, tiny.verifier, make_sequences(loss=False))
        make_vocabulary(f"{uri}-vocab")
        assert "no loss tokens" in refused(f"dataset.uri={uri}")

    def test_another_verifier(self, refused: Callable[..., str], tiny: Tiny, tmp_path: Path) -> None:
        from tiny_training import make_verifier

        assert "weights_hash" in refused(f"verifier.model={make_verifier(tmp_path / 'other', seed=1)}")

    def test_gpus_and_workers_that_the_cluster_has_not(self, refused: Callable[..., str]) -> None:
        assert "4 CPUs and 0 GPUs: 0 fit" in refused("training.gpus_per_worker=1")
        assert "training.workers=4" in refused("training.workers=5")

    def test_a_sequence_longer_than_a_micro_batch(self, refused: Callable[..., str]) -> None:
        assert "training.micro_batch_tokens is 20" in refused("training.micro_batch_tokens=20")


class TestRoom(NoRay):
    def test_the_advice_for_too_few_nodes_is_a_recipe_that_loads(self, tiny: Tiny, tmp_path: Path) -> None:
        path = write_recipe(tiny, tmp_path / "recipe.yaml")
        for given in (["training.workers=8"], ["training.workers=8", "training.min_workers=6"]):
            with pytest.raises(StatehouseError, match="4 fit; add nodes, or set ") as caught:
                train_job.require_resources(load_recipe(path, given).training)
            advised = re.findall(r"training\.\w+=\d+", str(caught.value))
            assert len(advised) == len(given)
            train_job.require_resources(load_recipe(path, [*given, *advised]).training)


def test_workers_wait_for_one_whose_node_fetches_the_verifier(tiny: Tiny, tmp_path: Path) -> None:
    path = write_recipe(tiny, tmp_path / "recipe.yaml")
    for more, seconds in ([], 7200), (["training.collective_timeout_s=60"], 60):
        trainer = train_job._trainer(load_recipe(path, more), {})
        assert trainer.backend_config.timeout_s == seconds


def test_the_plan_of_the_recipe_for_kimi(capsys: pytest.CaptureFixture[str]) -> None:
    from ray_jobs.planning import estimate, print_plan

    recipe = load_recipe(ROOT / "recipes/kimi_k25.yaml")
    plan = estimate(recipe)["training"]
    assert plan["updates"] == 10 * round(17_300_000 * 0.98 / 16384)
    assert plan["gpus"] == 8
    assert plan["parameters"]["trained"] == pytest.approx(1.058e9, rel=0.01)
    assert plan["parameters"]["all"] == pytest.approx(2.23e9, rel=0.01)
    print_plan(recipe)
    assert "warning" not in capsys.readouterr().out
    rate = ["training.tokens_per_second=1000"]
    known = estimate(load_recipe(ROOT / "recipes/kimi_k25.yaml", rate))["training"]
    assert known["hours"] == pytest.approx(10 * 17_300_000 * 0.98 / 8 / 1000 / 3600, rel=1e-3)
    half = ["training.datasets=[{uri: s3://hidden-states/kimi-k25, weight: 1.5}]"]
    mixed = estimate(load_recipe(ROOT / "recipes/kimi_k25.yaml", half))["training"]
    assert mixed["updates"] == pytest.approx(1.5 * plan["updates"], rel=1e-2)
    print_plan(load_recipe(ROOT / "recipes/kimi_k25.yaml", ["training.epochs=2"]))
    assert "fewer than 5,000 updates" in capsys.readouterr().out


def test_the_plan_counts_what_is_left_to_train_on() -> None:
    from ray_jobs.training_plan import training_estimate, training_rows

    shape = VerifierShape(vocab_size=163840, hidden_size=7168, num_layers=61)
    lengths, sources = np.array([1000] * 1000 + [9000] * 1000), ["chat"] * 500 + ["code"] * 1500

    def plan(*overrides: str, known: bool = True) -> dict[str, Any]:
        always = ["evaluation.held_out=0", "training.global_batch_tokens=2000"]
        recipe = load_recipe(ROOT / "recipes/kimi_k25.yaml", [*always, *overrides])
        return training_estimate(recipe, shape, [1, 29, 57], lengths, sources if known else None)

    assert plan()["updates_per_epoch"] == 2000  # no more than there are sequences
    dropped = plan("training.max_length=2000")
    assert (dropped["updates_per_epoch"], dropped["tokens_per_update"]) == (500, 2000)
    assert plan("training.max_length=2000", "training.long_sequences=split")["updates_per_epoch"] == 5000
    assert plan("training.filter={max_length: 2000}")["updates_per_epoch"] == 500
    assert plan("training.filter={min_length: 2000}")["updates_per_epoch"] == 1000
    assert plan("training.filter={sources: [chat]}")["updates_per_epoch"] == 250
    assert "fewer than" not in training_rows(plan())["warning"]
    assert "fewer than 5,000 updates" in training_rows(plan("training.filter={sources: [chat]}"))["warning"]
    unknown = plan("training.filter={sources: [chat]}", known=False)
    assert "training.filter.sources is not counted" in training_rows(unknown)["warning"]
    for overrides, said in (
        ("training.filter={sources: [prose]}", "training.filter: none of the 2000 sequences of s3://"),
        ("training.max_length=10", "training.max_length is 10, and all 2000 sequences"),
        (
            "drafter.config.draft_vocab_size=5",
            "drafter.config.draft_vocab_size: expected nothing, found 5: .* vocab.size",
        ),
        ("drafter.config.hidden_size=abc", "drafter.config.hidden_size: .* valid integer.* found 'abc'"),
        ("drafter.config.num_attention_heads=0", "drafter.config.num_attention_heads: .*greater than 0, found 0"),
        ("drafter.config.heads=3", "drafter.config.heads: expected one of .*num_attention_heads"),
        ("drafter.config.num_key_value_heads=7", "num_attention_heads: expected a multiple of num_key_value_heads"),
    ):
        with pytest.raises(StatehouseError, match=said):
            plan(overrides)


def test_the_plan_knows_the_parameters_of_a_bundled_verifiers_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray_jobs import training_plan

    config = {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(training_plan, "resolve_verifier", lambda model: tmp_path)  # making it takes a minute
    recipe = load_recipe(ROOT / "recipes/smollm2.yaml")
    shape = VerifierShape(vocab_size=49152, hidden_size=576, num_layers=30)
    found = training_plan.drafter_parameters(recipe, shape, [1, 14, 26])
    assert found is not None
    assert found["all"] - found["trained"] == 49152 * 576  # the embedding
