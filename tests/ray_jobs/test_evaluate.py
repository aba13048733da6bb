"""evaluate on a tiny verifier: tau of a good drafter beside its controls, and everything that it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from jobs import Finished
from tiny_run import ARGUMENTS, InProcess, TinyRun, finish, make_dataset, write_recipe

from drafter.errors import DrafterError
from drafter.export import CONFIG, TENSORS, load_sglang
from drafter.run import EVALUATION, EVALUATION_PLOT, RUN, Run
from drafter.verifier_weights import read_verifier_weights
from ray_jobs import evaluate, extract, job
from ray_jobs.evaluate import CEILING, DRAFTER, SHIFTED, UNTRAINED
from ray_jobs.inputs import Inputs, open_verifier
from ray_jobs.measuring import held_out_sequences
from storage import open_dataset
from storage.errors import ContractMismatch, DatasetNotSealed, StatehouseError

pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def made(tiny_run: TinyRun) -> TinyRun:
    return tiny_run


def evaluated(made: TinyRun, *overrides: str) -> dict[str, Any]:
    evaluate.run(made.changed(*overrides), ARGUMENTS)
    found: dict[str, Any] = json.loads(made.run.store.get(EVALUATION))
    return found


def test_a_good_drafter_is_above_its_controls_and_below_the_ceiling(
    made: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluated(made)
    every = found["sources"]["all"]
    taus = {name: {k: one["tau"][k]["tau"] for k in ("1", "3")} for name, one in every["drafters"].items()}
    for k in ("1", "3"):
        assert taus[CEILING][k] >= taus[DRAFTER][k] > 1.3
        assert taus[DRAFTER][k] > taus[UNTRAINED][k] + 0.2
        assert taus[DRAFTER][k] > taus[SHIFTED][k] + 0.2
    assert taus[DRAFTER]["3"] > taus[DRAFTER]["1"]
    assert every["own_argmax"] > 0.95  # greedy output, up to states in bf16
    low, high = every["drafters"][DRAFTER]["tau"]["3"]["interval_95"]
    assert low <= taus[DRAFTER]["3"] <= high
    out = capsys.readouterr().out
    for name in (DRAFTER, UNTRAINED, SHIFTED, CEILING, "numbers", "colours", "Left out of the held-out sequences"):
        assert name in out
    assert found["dataset"]["fingerprint"] == open_dataset(made.recipe.dataset.uri).fingerprint
    assert found["identity"] == made.run.identity()
    assert found["provenance"]["packages"]["torch"]
    plot = ElementTree.fromstring(made.run.store.get(EVALUATION_PLOT))
    assert plot.tag.endswith("svg")


def test_a_dataset_without_final_states_gives_the_same_tau_by_its_stored_top_k(
    made: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = made.changed(f"dataset.uri={tmp_path / 'aux'}", "extraction.layers=aux", "extraction.teacher=topk(16)")
    for part in ("inputs_uri", "vocab_uri"):
        shutil.copytree(getattr(made.recipe.dataset, part), getattr(recipe.dataset, part))
    monkeypatch.setattr(job, "start_ray", lambda: None)
    extract.run(recipe, ARGUMENTS, InProcess(recipe))  # type: ignore[arg-type]
    assert open_dataset(recipe.dataset.uri).contract.layers == 3
    embedding = read_verifier_weights(made.verifier).embedding_VD
    finish(recipe, made.verifier, load_sglang(made.run.fetch_drafter(tmp_path / "drafter"), embedding))
    evaluate.run(recipe, ARGUMENTS)
    found = json.loads(Run(recipe.run_uri).store.get(EVALUATION))["sources"]["all"]
    expected = evaluated(made)["sources"]["all"]
    assert found["own_argmax"] == pytest.approx(expected["own_argmax"], abs=0.02)  # of states in bf16 there
    for name in (DRAFTER, UNTRAINED, SHIFTED):
        ours, theirs = found["drafters"][name], expected["drafters"][name]
        assert ours["tau"] == theirs["tau"]
        assert ours["fair"]["positions"] == theirs["fair"]["positions"]
        assert ours["fair"]["greedy"] == pytest.approx(theirs["fair"]["greedy"], abs=0.02)
        assert ours["fair"]["overlap_T1"] == pytest.approx(theirs["fair"]["overlap_T1"], abs=0.05)


def test_sources_add_up_and_given_answers_are_left_out(made: TinyRun) -> None:
    found = evaluated(made)
    sources = found["sources"]
    assert set(sources) == {"numbers", "colours", "all"}
    assert found["left_out"]["given"] > 0
    for name in (DRAFTER, UNTRAINED, SHIFTED, CEILING):
        for k in ("1", "3"):
            for count in ("verifies", "accepted", "cut_verifies", "cut_accepted"):
                parts = [sources[source]["drafters"][name]["tau"][k][count] for source in ("numbers", "colours")]
                assert sum(parts) == sources["all"]["drafters"][name]["tau"][k][count]
    one = sources["all"]["drafters"][DRAFTER]["tau"]["3"]
    assert one["tau"] == pytest.approx(1 + one["accepted"] / one["verifies"], abs=1e-6)
    # Every token but the first of each response came from a pass: its accepted drafts, and one token more unless cut.
    written = sources["all"]["tokens"] - sources["all"]["sequences"]
    assert one["accepted"] + one["verifies"] - written <= sources["all"]["sequences"]
    assert one["accepted"] + one["verifies"] >= written


@pytest.mark.ray
def test_the_job_spread_over_ray_tasks_measures_the_same(made: TinyRun, run_job: Callable[..., Finished]) -> None:
    alone = evaluated(made)["sources"]
    finished = run_job("evaluate", made.path, "evaluation.task_tokens=200")
    assert finished.code == 0, finished.err
    assert re.search(r"tasks=([2-9])/\1 ", finished.err)
    assert "ceiling" in finished.out
    assert json.loads(made.run.store.get(EVALUATION))["sources"] == alone


def test_the_filter_of_training_is_said_and_restricts_nothing(
    made: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = evaluated(made)["sources"]
    assert "training.filter" not in capsys.readouterr().out
    document = json.loads(made.run.store.get(RUN))
    document["identity"]["training"] = {"filter": {"sources": ["numbers"], "min_length": None, "max_length": 99}}
    untouched = made.run.store.get(RUN)
    made.run.store.put(RUN, json.dumps(document).encode())
    try:
        assert evaluated(made)["sources"] == whole
        assert "those of training.filter (sources=['numbers'], max_length=99) alone" in " ".join(
            capsys.readouterr().out.split()
        )
    finally:
        made.run.store.put(RUN, untouched)


@pytest.mark.parametrize("how", ["WorkerCrashedError", "OutOfMemoryError", "RayTaskError"])
def test_a_task_that_dies_is_one_line(made: TinyRun, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    import ray

    error = {
        "WorkerCrashedError": ray.exceptions.WorkerCrashedError,
        "OutOfMemoryError": lambda: ray.exceptions.OutOfMemoryError(
            "Task was killed\ndue to the node running low on memory"
        ),
        "RayTaskError": lambda: ray.exceptions.RayTaskError("measure", "Traceback ...", MemoryError("of this worker")),
    }[how]()

    def get(_reference: object) -> None:
        raise error

    task = SimpleNamespace(remote=lambda *_: object())
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _function: task)
    monkeypatch.setattr(ray, "wait", lambda waiting, num_returns: (waiting[:1], waiting[1:]))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(job, "start_ray", lambda: None)
    monkeypatch.setattr(evaluate, "_require_room", lambda _recipe: None)
    recipe = made.changed("evaluation.task_tokens=200")
    lengths = open_dataset(recipe.dataset.uri).sequences["length"].to_numpy()
    with pytest.raises(
        StatehouseError, match=r"a task of evaluate was lost: \w+: .*lower evaluation\.task_tokens"
    ) as said:
        evaluate.measure_all(recipe, list(range(len(lengths))), lengths)
    assert "\n" not in str(said.value)


def test_batches_change_nothing(made: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    together = evaluated(made)["sources"]
    monkeypatch.setattr(evaluate, "_BATCH_TOKENS", 50)
    assert evaluated(made)["sources"] == together


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["training.run=absent"], DrafterError, "there is no run here"),
        (["evaluation.held_out=0"], StatehouseError, "raise evaluation.held_out"),
        (["evaluation.held_out=0.9"], StatehouseError, "set them as they were in training"),
        (["evaluation.seed=7"], StatehouseError, "set them as they were in training"),
        (["dataset.uri=ABSENT"], StatehouseError, "no run here|no dataset"),
    ],
)
def test_what_does_not_belong_together_is_one_line(
    made: TinyRun, tmp_path: Path, overrides: list[str], error: type[Exception], message: str
) -> None:
    given = [one.replace("ABSENT", str(tmp_path / "absent")) for one in overrides]
    with pytest.raises(error, match=message) as raised:
        evaluate.run(made.changed(*given), ARGUMENTS)
    assert "\n" not in str(raised.value)


@pytest.fixture
def copied(made: TinyRun, tmp_path: Path) -> Path:
    """The run's folder under another name, to be damaged."""
    uri = Path(f"{made.recipe.dataset.uri}-runs") / f"copy-{tmp_path.name}"
    shutil.copytree(made.recipe.run_uri, uri)
    return uri


def test_a_run_of_several_datasets_says_which_of_them_were_not_measured(
    made: TinyRun, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((copied / "run.json").read_text())
    document["identity"]["datasets"]["f" * 64] = 0.5
    document["provenance"] = {"datasets": [{"uri": "s3://states/other", "fingerprint": "f" * 64}]}
    (copied / "run.json").write_text(json.dumps(document))
    evaluated(made, f"training.run={copied.name}")
    found = json.loads((copied / EVALUATION).read_text())
    assert found["left_out"]["datasets"] == ["s3://states/other"]
    assert "The run was trained on s3://states/other, too" in capsys.readouterr().out
    assert json.loads(made.run.store.get(EVALUATION))["left_out"]["datasets"] == []


def test_a_run_without_a_finished_drafter_is_named(made: TinyRun, copied: Path) -> None:
    shutil.rmtree(copied / "drafter")
    with pytest.raises(DrafterError, match="no finished drafter"):
        evaluated(made, f"training.run={copied.name}")


def test_a_damaged_drafter_is_named_with_its_place_in_the_run(made: TinyRun, copied: Path) -> None:
    path = copied / "drafter" / TENSORS
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DrafterError, match=rf"{copied.name}/drafter/{TENSORS}: expected a safetensors file"):
        evaluated(made, f"training.run={copied.name}")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("statehouse", {"capture_layers": [0, 3, 4]}, r"capture_layers: expected \[1, 3, 4\], found \[0, 3, 4\]"),
        ("vocab_size", 49000, "vocab_size: expected 49152, found 49000"),
        ("target_hidden_size", 96, "hidden_size: expected 64, found 96"),
    ],
)
def test_a_drafter_of_another_verifier_is_refused_by_the_field(
    made: TinyRun, copied: Path, field: str, value: Any, message: str
) -> None:
    config = json.loads((copied / "drafter" / CONFIG).read_text())
    (copied / "drafter" / CONFIG).write_text(json.dumps({**config, field: value}))
    with pytest.raises(ContractMismatch, match=message):
        evaluated(made, f"training.run={copied.name}")


def test_a_drafter_of_a_finetuned_verifier_is_refused(made: TinyRun, copied: Path) -> None:
    document = json.loads((copied / "run.json").read_text())
    document["identity"]["verifier_weights"] = "0" * 64
    (copied / "run.json").write_text(json.dumps(document))
    with pytest.raises(ContractMismatch, match="weights_hash"):
        evaluated(made, f"training.run={copied.name}")


def test_an_unsealed_dataset_is_refused(made: TinyRun, tmp_path: Path) -> None:
    uri = tmp_path / "dataset"
    for suffix in ("", "-inputs", "-vocab", "-runs"):
        shutil.copytree(f"{made.recipe.dataset.uri}{suffix}", f"{uri}{suffix}")
    for seal in uri.glob("seal*.json"):
        seal.unlink()
    with pytest.raises(DatasetNotSealed):
        evaluated(made, f"dataset.uri={uri}")


def test_a_dataset_of_given_text_alone_has_no_tau(tiny_verifier: Path, tmp_path: Path) -> None:
    rows = {"given": [{"prompt": f"Question {n}?", "response": f"Answer {n}."} for n in range(12)]}
    with pytest.MonkeyPatch.context() as patch:
        recipe = make_dataset(write_recipe(tmp_path, tiny_verifier, rows), patch)
    dataset = open_dataset(recipe.dataset.uri)
    prompts = Inputs(recipe.dataset.inputs_uri).read_prompts(recipe, open_verifier(recipe), "evaluate")
    with pytest.raises(StatehouseError, match="was written by the verifier .* given, not generated"):
        held_out_sequences(dataset, prompts, recipe.evaluation)
    with pytest.raises(StatehouseError, match="of prompts that are not at hand"):
        held_out_sequences(dataset, prompts.slice(0, 0), recipe.evaluation)


def test_an_interval_is_shown_for_five_sequences_and_more_only(made: TinyRun) -> None:
    measured = evaluate.measure(made.recipe, range(4))
    assert evaluate.summarise(measured, [3])["all"]["drafters"][DRAFTER]["tau"]["3"]["interval_95"] == [None, None]
