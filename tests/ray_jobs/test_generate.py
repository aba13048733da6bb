"""Responses are drawn as their source asks, kept as they are, counted, and never drawn twice."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from jobs import Finished
from tiny_run import InProcess, composed

from ray_jobs import generate, job
from ray_jobs.generate import make_units, prompt_seed, settings_of, tally
from ray_jobs.inputs import Inputs, open_verifier, sampling_hash, sampling_hashes
from ray_jobs.prompts import load_tokenizer
from ray_jobs.recipe import load_recipe
from ray_jobs.replicas import open_replica
from ray_jobs.replicas.replica import ReplicaConfig, Sampling
from ray_jobs.thinking import Budget, Response, respond
from ray_jobs.verifier import default_capture_layers
from storage.errors import RecipeError

Make = Callable[..., Path]
Prepared = Callable[[Path], Path]
SOURCES = {"numbers": {"temperature": 0.0, "top_p": 0.5, "max_new_tokens": 3, "stop": ["<|im_start|>"]}}


def stored(uri: str) -> list[dict[str, Any]]:
    files = sorted(Path(f"{uri}-inputs/responses").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def answer(path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, replicas: Any = None) -> None:
    recipe = load_recipe(path, list(overrides))
    monkeypatch.setattr(job, "start_ray", lambda: None)
    generate.run(recipe, argparse.Namespace(), replicas or InProcess(recipe))


def test_every_source_has_its_settings_and_every_prompt_its_seed(recipe: Make, prepared: Prepared) -> None:
    path = prepared(recipe(generation={"temperature": 0.9, "max_new_tokens": 500, "sources": SOURCES}))
    loaded = load_recipe(path)
    verifier = open_verifier(loaded)
    tokenizer = load_tokenizer(verifier.folder)
    settings = settings_of(loaded, ["numbers", "other"], tokenizer)
    rows = [
        {"id": "a", "source": "numbers", "token_ids": [5] * 10},
        {"id": "b", "source": "other", "token_ids": [5] * 10},
    ]
    (unit,) = make_units(loaded, rows, settings, {"a": "h", "b": "k"}, "somewhere")
    assert [(one.temperature, one.top_p, one.max_new_tokens) for one in unit.samplings] == [
        (0.0, 0.5, 3),
        (0.9, 0.95, 150),
    ]
    assert [one.stop_token_ids for one in unit.samplings] == [(1,), ()]
    assert [one.seed for one in unit.samplings] == [prompt_seed(0, "a"), prompt_seed(0, "b")]
    with pytest.raises(RecipeError, match="generation.sources.numbers: no prompt comes from it; the sources are other"):
        settings_of(loaded, ["other"], tokenizer)
    with pytest.raises(RecipeError, match="generation.think_tokens: expected a single token"):
        settings_of(load_recipe(path, ["generation.thinking_budget=3"]), ["numbers"], tokenizer)


def test_a_driver_that_comes_later_has_the_same_units(recipe: Make) -> None:
    loaded = load_recipe(recipe(generation={"batch_size": 4}))
    settings: Any = {"s": (Sampling(), None)}
    rows = [{"id": f"{n:02}", "source": "s", "token_ids": [5]} for n in range(10)]
    hashes = {row["id"]: "h" for row in rows}
    units = [unit.prompt_ids for unit in make_units(loaded, rows, settings, hashes, "")]
    later = [unit.prompt_ids for unit in make_units(loaded, rows, settings, hashes, "", set(units[1]))]
    assert later == [units[0], units[2]]
    assert [unit.prompt_ids for unit in make_units(loaded, rows, settings, hashes, "", {"05"})] == [
        units[0],
        ["04", "06", "07"],
        units[2],
    ]


def test_changed_settings_of_one_source_leave_the_others_answers_alone(recipe: Make) -> None:
    plain, changed = load_recipe(recipe()), load_recipe(recipe(generation={"sources": SOURCES}))
    verifier = open_verifier(plain)
    assert sampling_hash(plain, verifier, "other") == sampling_hash(changed, verifier, "other")
    assert sampling_hash(plain, verifier, "numbers") != sampling_hash(changed, verifier, "numbers")


def test_what_was_capped_or_empty_or_cut_short_in_thinking_is_counted() -> None:
    ids = [np.array(one, np.int32) for one in ([], [2], [7, 2], [7, 7, 9])]
    responses = [Response(one, "length" if len(one) == 3 else "stop", 1 if len(one) == 3 else None) for one in ids]
    assert tally(responses, frozenset([2])) == Counter(
        responses=4, tokens=6, length_capped=1, empty=2, thinking_ended=1
    )


def test_a_job_that_dies_between_two_units_draws_nothing_twice(
    recipe: Make, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepared(recipe(generation={"batch_size": 5, "max_new_tokens": 3}))
    loaded = load_recipe(path)
    replicas = InProcess(loaded)
    drawn: list[str] = []

    class Dying(InProcess):
        def __init__(self, after: int) -> None:
            self.after = after

        def run(self, method: str, units: Any, done: Any, _waiting: Any, *_: Any) -> None:
            for number, unit in enumerate(units):
                if number == self.after:
                    raise KeyboardInterrupt
                drawn.extend(unit.prompt_ids)
                done(unit, replicas.actor.generate(unit).value)

    with pytest.raises(KeyboardInterrupt):
        answer(path, monkeypatch, replicas=Dying(2))
    before = stored(loaded.dataset.uri)
    assert len(before) == 10
    answer(path, monkeypatch, replicas=Dying(99))
    answer(path, monkeypatch, replicas=Dying(0))  # nothing is left to draw
    rows = stored(loaded.dataset.uri)
    assert Counter(drawn) == dict.fromkeys(drawn, 1)
    assert sorted(row["prompt_id"] for row in rows) == sorted(drawn)
    assert all(row in rows for row in before)
    assert {(row["temperature"], row["top_p"]) for row in rows} == {(0.7, 0.95)}
    assert {row["seed"] for row in rows} == {prompt_seed(0, row["prompt_id"]) for row in rows}
    verifier = open_verifier(loaded)
    inputs = Inputs(loaded.dataset.inputs_uri)
    prompts = inputs.read_prompts(loaded, verifier, "extract")
    responses = inputs.read_responses(sampling_hashes(loaded, verifier, prompts))
    sequences, _ = composed(prompts, responses, inputs.uri)
    how = {row["id"]: row for row in pq.read_table(f"{inputs.uri}/generated.parquet").to_pylist()}
    assert sorted(how) == [row["id"] for row in sequences]
    by_prompt = {row["prompt_id"]: row for row in rows}
    for row in how.values():
        assert {
            name: row[name] for name in ("seed", "finish_reason", "temperature", "top_p", "forced")
        }.items() <= by_prompt[row["prompt_id"]].items()
    summary = json.loads(Path(f"{loaded.dataset.inputs_uri}/generate.json").read_text())
    assert summary["responses"] == 24
    assert summary["length_capped"] == sum(row["finish_reason"] == "length" for row in rows)
    assert summary["sources"]["numbers"]["settings"]["max_new_tokens"] == 3


def test_a_quarantined_prompt_is_told_left_out_and_can_be_asked_again(
    recipe: Make, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepared(recipe(generation={"batch_size": 5, "max_new_tokens": 3}, extraction={"max_quarantined": 0.05}))
    loaded = load_recipe(path)
    replicas = InProcess(loaded)
    limits: list[int] = []

    class Poisoned(InProcess):
        """The first prompt of the second unit kills every replica."""

        def __init__(self, poison: bool) -> None:
            self.poison = poison

        def run(self, method: str, units: Any, done: Any, _waiting: Any, limit: int, *_: Any) -> None:
            limits.append(limit)
            for number, unit in enumerate(units):
                unit = unit.without({0: "it died\nof it"}) if self.poison and number == min(1, len(units) - 1) else unit
                done(unit, replicas.actor.generate(unit).value)

    answer(path, monkeypatch, replicas=Poisoned(True))
    inputs, verifier = Inputs(loaded.dataset.inputs_uri), open_verifier(loaded)
    prompts = inputs.read_prompts(loaded, verifier, "extract")
    hashes = sampling_hashes(loaded, verifier, prompts)
    summary = json.loads(Path(f"{inputs.uri}/generate.json").read_text())
    (poison,) = summary["quarantined"]
    assert (summary["quarantined"][poison], summary["responses"], summary["empty"]) == ("it died", 23, 0)
    _, counts = composed(prompts, inputs.read_responses(hashes), inputs.uri)
    assert (counts["generated"], counts["quarantined"], counts["empty"]) == (23, 1, 0)

    answer(path, monkeypatch, replicas=Poisoned(True))  # it is not asked again unless somebody says so
    again = argparse.Namespace(retry_quarantined=True)
    generate.run(loaded, again, Poisoned(True))  # type: ignore[arg-type]
    assert json.loads(Path(f"{inputs.uri}/generate.json").read_text())["quarantined"] == {poison: "it died"}
    generate.run(loaded, again, Poisoned(False))  # type: ignore[arg-type]
    assert limits == [1, 1, 1]
    assert json.loads(Path(f"{inputs.uri}/generate.json").read_text())["quarantined"] == {}
    sequences, counts = composed(prompts, inputs.read_responses(hashes), inputs.uri)
    assert (counts["generated"], counts["quarantined"], len(sequences)) == (24, 0, 24)


def test_a_thinking_budget_ends_a_real_verifiers_thinking(
    recipe: Make, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The template's own marks stand for a think block, which every prompt then leaves open.
    generation = {"max_new_tokens": 12, "thinking_budget": 5, "think_tokens": ["<|im_start|>", "<|im_end|>"]}
    path = prepared(recipe([{"prompt": f"Say {n}."} for n in range(4)], generation=generation))
    answer(path, monkeypatch)
    loaded = load_recipe(path)
    inputs, verifier = Inputs(loaded.dataset.inputs_uri), open_verifier(loaded)
    prompts = inputs.read_prompts(loaded, verifier, "extract")
    responses = inputs.read_responses(sampling_hashes(loaded, verifier, prompts))
    ended = [one for one in responses.values() if one.forced is not None]
    assert ended
    assert all(one.forced == 5 and one.token_ids[5] == 2 and len(one.token_ids) <= 12 for one in ended)
    table, counts = composed(prompts, responses, inputs.uri)
    assert counts["generated"] == 4
    masks = {len(row["token_ids"]) - sum(row["loss_mask"]) for row in table}
    lengths = {len(row["token_ids"]) for row in prompts.to_pylist()}
    assert masks <= lengths | {length + 1 for length in lengths}  # the forced token does not count


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(280)
def test_a_driver_killed_half_way_through_keeps_every_stored_answer(
    recipe: Make,
    prepared: Prepared,
    start_job: Callable[..., subprocess.Popen[str]],
    run_job: Callable[..., Finished],
    tmp_path: Path,
) -> None:
    rows = [{"prompt": f"Say the number {n}."} for n in range(200)]
    path = prepared(recipe(rows, generation={"batch_size": 4, "max_new_tokens": 8}))
    folder = tmp_path / "dataset-inputs" / "responses"
    process = start_job("generate", path)
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*.parquet"))) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(5)  # Ray notices and ends the driver's actors, which store what they finish until then
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.parquet")}
    assert len(before) < 50
    finished = run_job("generate", path)
    assert finished.code == 0, finished.err
    after = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.parquet")}
    assert {name: after[name] for name in before} == before
    assert f"answered_before={4 * len(before)}" in finished.err
    answered = Counter(row["prompt_id"] for row in stored(str(tmp_path / "dataset")))
    assert len(answered) == 200
    assert not list((tmp_path / "dataset-inputs" / "parts").rglob("*.parquet"))
    assert set(answered.values()) == {1}


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(280)
def test_sglang_goes_on_behind_a_forced_token_as_if_it_had_said_it_and_draws_the_same_in_two_rounds(
    smollm2: Path,
) -> None:
    pytest.importorskip("sglang")
    tokenizer = load_tokenizer(str(smollm2))
    config = ReplicaConfig(dtype="float32", start_timeout_s=240, request_timeout_s=120)
    asked = [f"Name {n} animals and say where each of them lives." for n in range(3, 9)]
    prompts = [
        np.array(tokenizer(f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n")["input_ids"], np.int32)
        for one in asked
    ]
    opened, closed = (
        Budget(6, 1, 2),
        Budget(6, 1, 198),
    )  # <|im_start|> opens; a line break, the last of the prompt, closes
    samplings = [Sampling(0.8, 0.95, 24, seed, ignore_eos=True) for seed in range(6)]
    with open_replica(config, smollm2, default_capture_layers(30)) as replica:
        free = replica.generate(prompts, samplings)
        held = respond(replica.generate, prompts, samplings, [opened] * 6)
        in_two = respond(replica.generate, prompts, samplings, [closed] * 6)
        behind = replica.generate(
            [np.concatenate([prompt, one.token_ids[:7]]) for prompt, one in zip(prompts, held, strict=True)],
            [replace(one, max_new_tokens=17) for one in samplings],
        )
    for one, first, rest in zip(held, free, behind, strict=True):
        assert one.forced == 6
        assert one.token_ids[:7].tolist() == [*first.token_ids[:6].tolist(), 2]
        assert one.token_ids[7:].tolist() == rest.token_ids.tolist()
        assert len(one.token_ids) == 24
    assert [one.token_ids.tolist() for one in in_two] == [one.token_ids.tolist() for one in free]
    assert all(one.forced is None for one in in_two)
