from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_jobs import job
from ray_jobs.planning import estimate, print_plan, sequence_lengths
from ray_jobs.prompt_files import fingerprints
from ray_jobs.provenance import redact
from ray_jobs.recipe import load_recipe
from storage.errors import RecipeError, StatehouseError

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(**changes: Any) -> Path:
        document = {
            "name": "x",
            "verifier": {"model": "org/model", "shape": {"vocab_size": 10, "hidden_size": 4, "num_layers": 8}},
            "prompts": [{"path": "p.jsonl"}],
            "dataset": {"uri": "out/x", "expected": {"sequences": 10, "mean_tokens": 5}},
            **changes,
        }
        path = tmp_path / "r.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_we_ship_are_valid(path: Path) -> None:
    assert load_recipe(path).name


@pytest.mark.parametrize(("stem", "layers"), [("kimi_k25", [1, 29, 57]), ("qwen3_8b", [1, 17, 32])])
def test_plan_works_without_weights_and_without_a_network(
    stem: str, layers: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    print_plan(load_recipe(ROOT / "recipes" / f"{stem}.yaml"))
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["capture_layers"] == layers
    assert plan["stored_bytes"] < plan["raw_bytes"]


def test_the_plan_counts_teacher_and_layers_and_the_price() -> None:
    kimi = ROOT / "recipes" / "kimi_k25.yaml"
    whole = estimate(load_recipe(kimi, ["extraction.tokens_per_second=9000", "extraction.usd_per_replica_hour=24"]))
    assert whole["teacher_bytes"] == 8 * whole["tokens"]
    assert whole["usd_per_million_tokens"] == pytest.approx(24 / 3600 / 9000 * 1e6)
    assert whole["usd_of_replicas"] == pytest.approx(whole["usd_per_million_tokens"] * whole["tokens"] / 1e6)
    aux = estimate(load_recipe(kimi, ["extraction.layers=aux", "extraction.teacher=topk(8)"]))
    assert aux["raw_bytes"] * 4 == whole["raw_bytes"] * 3
    assert aux["teacher_bytes"] == 72 * aux["tokens"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("extraction.layers=aux", "must be topk"),
        ("extraction.teacher=best", "none, argmax or topk"),
        ("extraction.teacher=topk(0)", "none, argmax or topk"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"extraction.teacher.*{message}"):
        load_recipe(ROOT / "recipes" / "kimi_k25.yaml", [override])


def test_the_kimi_plan_gives_the_known_figures() -> None:
    plan = estimate(load_recipe(ROOT / "recipes" / "kimi_k25.yaml"))
    assert plan["bytes_per_token"] == 57_344
    assert plan["tokens"] == 17_300_000
    assert round(plan["raw_bytes"] / 2**30, 1) == 923.9
    assert plan["shard_tokens"] == 8192
    assert plan["shards"] * 8192 <= 1.02 * plan["tokens"]


def test_plan_refuses_what_the_job_would_refuse(written: Any) -> None:
    for override, message in (
        ("extraction.capture_layers=[3,1]", "cannot capture layers"),
        ("dataset.expected.mean_tokens=100000", "above dataset.max_length"),
    ):
        with pytest.raises(StatehouseError, match=message):
            estimate(load_recipe(written(), [override]))


def test_plan_of_prompts_that_are_not_prepared_tokenises_them_and_writes_nothing(tmp_path: Path) -> None:
    uri = tmp_path / "dataset"
    recipe = load_recipe(ROOT / "recipes" / "smollm2.yaml", [f"dataset.uri={uri}", "dataset.shard_tokens=1000"])
    recipe = recipe.model_copy(
        update={"prompts": tuple(p.model_copy(update={"path": str(ROOT / p.path)}) for p in recipe.prompts)}
    )
    plan = estimate(recipe)
    assert plan["sequences"] == 120
    assert plan["shard_tokens"] == 1024
    assert list(tmp_path.iterdir()) == []


def test_expected_lengths_spread_but_keep_their_sum(written: Any) -> None:
    recipe = load_recipe(written(), ["dataset.expected.sequences=1000", "dataset.expected.mean_tokens=500"])
    lengths = sequence_lengths(recipe).tokens
    assert len(lengths) == 1000
    assert int(lengths.sum()) == 500_000
    assert 1 <= lengths.min() < lengths.max() <= recipe.dataset.max_length


def test_overrides_set_keys_in_sections_and_lists(written: Any) -> None:
    recipe = load_recipe(
        written(), ["extraction.replicas=2", "prompts.0.limit=3", "generation.temperature=1e-1", "vocab.size=null"]
    )
    assert recipe.extraction.replicas == 2
    assert recipe.prompts[0].limit == 3
    assert recipe.generation.temperature == 0.1
    assert recipe.vocab.size is None


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({}, ["extraction.replica.gpu=8"], r"unknown key 'extraction.replica.gpu'; did you mean 'gpus'\?"),
        ({}, ["prompts.0.sorce=x"], r"unknown key 'prompts.0.sorce'; did you mean 'source'\?"),
        ({"trainig": {}}, [], r"unknown key 'trainig'; (did you mean|known keys)"),
        ({}, ["dataset.codec=gzip"], "key 'dataset.codec' is 'gzip': must be one of lossless"),
        ({}, ["dataset.uri=''"], "key 'dataset.uri' is '': must name a folder"),
        ({}, ["dataset.uri=x", "dataset.reuse=[x/]"], "dataset.reuse names dataset.uri itself"),
        ({}, ["extraction.replicas=0"], "key 'extraction.replicas' is 0"),
        ({"prompts": []}, [], "key 'prompts'"),
        ({"dataset": {}}, [], "key 'dataset.uri' is missing"),
        ({}, ["extraction.replica.ports=abc"], "ports"),
        ({}, ["extraction.replica.args={disable_radix_cache: false}"], "disable_radix_cache"),
        ({}, ["nonsense"], "expected section.key=value"),
        ({}, ["prompts.7.path=x"], "no section"),
        ({}, ["name=a/b"], "key 'name'"),
        ({}, ["generation.temperature=.inf"], "key 'generation.temperature'"),
        ({}, ["dataset.uri=2026-13-45"], "not YAML"),
        ({}, ["extraction.capture_layers=[]"], "key 'extraction.capture_layers'"),
        ({}, ["evaluation.seed=-1"], "key 'evaluation.seed' is -1"),
        ({}, ["training.seed=-1"], "key 'training.seed' is -1"),
    ],
)
def test_a_bad_recipe_is_one_line_that_names_key_and_fix(
    written: Any, changes: dict[str, Any], overrides: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(written(**changes), overrides)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_and_one_that_is_no_yaml_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such recipe"):
        load_recipe(tmp_path / "absent.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1, 2")
    with pytest.raises(RecipeError, match="not YAML"):
        load_recipe(bad)
    bad.write_text("name: a\nname: b\n")
    with pytest.raises(RecipeError, match="key 'name' stands twice"):
        load_recipe(bad)
    bad.write_text("x: 2026-13-45")
    with pytest.raises(RecipeError, match="not YAML"):
        load_recipe(bad)
    bad.write_text("just text")
    with pytest.raises(RecipeError, match="expected sections"):
        load_recipe(bad)


def test_provenance_hides_secrets() -> None:
    hidden = redact({"args": {"api_key": "s3cr3t", "tp_size": 2, "hf_token": "abc"}, "l": [{"password": "x"}]})
    assert hidden == {"args": {"api_key": "***", "tp_size": 2, "hf_token": "***"}, "l": [{"password": "***"}]}


def test_prompt_files_of_two_copies_of_a_working_folder_have_the_same_fingerprints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for copy in ("here", "elsewhere"):
        shutil.copytree(ROOT / "recipes", tmp_path / copy / "recipes")
        shutil.copytree(ROOT / "prompts", tmp_path / copy / "prompts")
        monkeypatch.chdir(tmp_path / copy)
        found.append(fingerprints(load_recipe("recipes/smollm2.yaml")))
    assert found[0] == found[1]
    assert "prompts/code.jsonl" in found[0]


@pytest.mark.parametrize(
    "override",
    [
        "dataset.uri=states",
        "training.draft_vocabulary=out/vocab",
        "drafter.start_from=out/drafter",
        "training.datasets=[{uri: out/more}]",
        "vocab.datasets=[out/more]",
        "dataset.reuse=[out/more]",
    ],
)
def test_a_submitted_job_is_refused_a_folder_that_ray_deletes(
    written: Any, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _, value = override.partition("=")
    lasting = ["dataset.uri=s3://bucket/states", override]
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(RecipeError, match=f"{key} '.*' is relative to a folder that Ray deletes"):
        job._require_lasting(load_recipe(written(), lasting))
    for elsewhere in ("s3://bucket/", "/shared/", "~/"):
        there = value.replace("out/", elsewhere).replace("states", f"{elsewhere}states")
        job._require_lasting(load_recipe(written(), ["dataset.uri=s3://bucket/states", f"{key}={there}"]))
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    job._require_lasting(load_recipe(written(), lasting))
