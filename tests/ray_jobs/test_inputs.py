"""What lies between the jobs: nothing half-written, stale or mixed counts as prepared, and responses join by identity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_run import composed

from ray_jobs.answers import commit, unit_key
from ray_jobs.generate import make_units
from ray_jobs.inputs import Inputs, make_contract, open_verifier, sampling_hash, sampling_hashes
from ray_jobs.planning import sequence_lengths
from ray_jobs.recipe import Recipe, load_recipe
from ray_jobs.replicas.replica import Sampling
from ray_jobs.thinking import Response
from ray_jobs.units import GenerateUnit
from storage.contract import Contract
from storage.errors import RecipeError, StatehouseError

Make = Callable[..., Path]
Prepared = Callable[[Path], Path]


def store(inputs: Inputs, sampling: str, answers: dict[str, tuple[list[int], str]]) -> bool:
    """answers: {prompt id: (token ids, finish reason)}, of one work unit."""
    ids, count = list(answers), len(answers)
    drawn = [sampling] * count
    unit = GenerateUnit(inputs.uri, unit_key(ids, drawn), ids, [], [Sampling()] * count, [None] * count, drawn)
    return commit(
        inputs.store, unit, {at: Response(np.array(a, np.int32), b) for at, (a, b) in enumerate(answers.values())}
    )


@pytest.fixture
def ready(recipe: Make, prepared: Prepared) -> Recipe:
    return load_recipe(prepared(recipe([{"prompt": f"Question {n}?"} for n in range(4)])))


def test_prompts_of_an_interrupted_or_mixed_prepare_do_not_count(ready: Recipe) -> None:
    inputs, verifier = Inputs(ready.dataset.inputs_uri), open_verifier(ready)
    assert len(inputs.read_prompts(ready, verifier, "generate")) == 4
    whole = inputs.store.get("prompts.parquet")
    for damaged in (whole[:-1], b"", whole[:100] + b"x" + whole[101:]):
        inputs.store.put("prompts.parquet", damaged)
        with pytest.raises(StatehouseError, match="not what prepare.json names"):
            inputs.read_prompts(ready, verifier, "generate")
    inputs.store.put("prompts.parquet", whole)
    inputs.store.delete("prepare.json")
    with pytest.raises(StatehouseError, match="no prepared prompts"):
        inputs.read_prompts(ready, verifier, "generate")


def test_prompt_files_that_changed_since_are_noticed(ready: Recipe, tmp_path: Path) -> None:
    inputs, verifier = Inputs(ready.dataset.inputs_uri), open_verifier(ready)
    file = tmp_path / "prompts.jsonl"
    text = file.read_text()
    file.write_text(text + '{"prompt": null}\n')
    with pytest.raises(StatehouseError, match=r"prompts\.jsonl changed since they were prepared"):
        inputs.read_prompts(ready, verifier, "generate")
    file.write_text(text)
    assert len(inputs.read_prompts(ready, verifier, "generate")) == 4
    file.unlink()  # the corpus may be gone when the states are extracted
    assert len(inputs.read_prompts(ready, verifier, "generate")) == 4


def test_nonsense_in_the_summary_is_an_error_of_ours(ready: Recipe) -> None:
    inputs, verifier = Inputs(ready.dataset.inputs_uri), open_verifier(ready)
    for junk in (b"5", b"[1]", b"null", b"{", b'{"inputs_hash": 3}'):
        inputs.store.put("prepare.json", junk)
        with pytest.raises(StatehouseError, match=r"ray_jobs\.prepare|prepare job"):
            inputs.read_prompts(ready, verifier, "generate")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"extraction": {"capture_layers": [1, 3, 7]}}, r"cannot capture layers \[1, 3, 7\]"),
        ({"extraction": {"capture_layers": [3, 1]}}, r"cannot capture layers \[3, 1\]"),
        ({"dataset": {"max_length": 2048}}, "expected at most 2,047: the verifier's max_position_embeddings is 2,048"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_anything_is_written(
    recipe: Make, section: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        open_verifier(load_recipe(recipe(**section)))


def test_sglang_keeps_seven_tokens_of_its_context_and_of_its_cache(recipe: Make) -> None:
    """Its `max_req_input_len` is min(context, cache) - 6, in 0.5.23, and one token is sampled behind each."""

    def opened(length: int, **replica: object) -> None:
        open_verifier(
            load_recipe(recipe(dataset={"max_length": length}, extraction={"replica": {"engine": "sglang", **replica}}))
        )

    opened(2041)
    with pytest.raises(RecipeError, match=r"expected at most 2,041: .* is 2,048, of which sglang keeps 7"):
        opened(2042)
    opened(993, max_total_tokens=1000)
    with pytest.raises(RecipeError, match=r"at most 993: extraction\.replica\.max_total_tokens is 1,000"):
        opened(994, max_total_tokens=1000)
    with pytest.raises(RecipeError, match=r"at most 505: extraction\.replica\.args\.context_length is 512"):
        opened(506, args={"context_length": 512})


def test_engine_arguments_that_may_change_the_states_are_part_of_the_contract(recipe: Make) -> None:
    def contract(args: dict[str, object]) -> Contract:
        made = load_recipe(recipe(extraction={"replica": {"engine": "transformers", "args": args}}))
        return make_contract(made, open_verifier(made))

    plain, neutral, other = contract({}), contract({"mem_fraction_static": 0.5}), contract({"quantization": "fp8"})
    assert plain.hash == neutral.hash != other.hash


def test_sequences_are_prompt_and_response_with_the_mask_on_the_response(ready: Recipe) -> None:
    inputs, verifier = Inputs(ready.dataset.inputs_uri), open_verifier(ready)
    prompts = inputs.read_prompts(ready, verifier, "extract")
    sampling = sampling_hash(ready, verifier)
    ids = prompts["id"].to_pylist()
    store(inputs, sampling, {ids[0]: ([7, 8, 2], "stop"), ids[1]: ([9], "length")})
    with pytest.raises(StatehouseError, match="2 of 4 prompts have no response yet"):
        composed(prompts, inputs.read_responses(dict.fromkeys(ids, sampling)), inputs.uri)
    assert store(inputs, sampling, {ids[2]: ([5, 2], "stop"), ids[3]: ([], "stop")})
    assert not store(inputs, sampling, {ids[2]: ([6, 2], "stop"), ids[3]: ([1], "stop")})
    table, counts = composed(prompts, inputs.read_responses(dict.fromkeys(ids, sampling)), inputs.uri)
    assert counts == {"given": 0, "generated": 3, "length_capped": 1, "empty": 1, "quarantined": 0, "duplicates": 0}
    said = {tuple(np.array(row["token_ids"])[np.array(row["loss_mask"])].tolist()) for row in table}
    assert said == {(7, 8, 2), (9,), (5, 2)}
    questions = dict(zip(ids, prompts["token_ids"].to_pylist(), strict=True))
    for row in table:
        assert np.array(row["token_ids"])[~np.array(row["loss_mask"])].tolist() in list(questions.values())


def test_responses_drawn_with_other_settings_are_other_responses(ready: Recipe) -> None:
    inputs, verifier = Inputs(ready.dataset.inputs_uri), open_verifier(ready)
    hotter = ready.model_copy(update={"generation": ready.generation.model_copy(update={"temperature": 1.0})})
    assert sampling_hash(hotter, verifier) != sampling_hash(ready, verifier)
    store(inputs, sampling_hash(hotter, verifier), {"p": ([1], "stop")})
    assert inputs.read_responses({"p": sampling_hash(ready, verifier)}) == {}


def test_answers_stay_answers_when_the_size_of_the_units_changes(ready: Recipe) -> None:
    inputs, verifier = Inputs(ready.dataset.inputs_uri), open_verifier(ready)
    other = ready.model_copy(update={"generation": ready.generation.model_copy(update={"batch_size": 3})})
    assert sampling_hash(other, verifier) == sampling_hash(ready, verifier)
    prompts = inputs.read_prompts(ready, verifier, "generate")
    hashes = sampling_hashes(ready, verifier, prompts)
    ids = prompts["id"].to_pylist()
    store(inputs, hashes[ids[0]], {ids[0]: ([7, 2], "stop"), ids[1]: ([8, 2], "stop")})
    found = inputs.read_responses(sampling_hashes(other, verifier, prompts))
    assert sorted(found) == sorted(ids[:2])
    settings = {"numbers": (Sampling(), None)}
    units = make_units(other, prompts.to_pylist(), settings, hashes, inputs.uri, found)
    assert [key for unit in units for key in unit.prompt_ids] == ids[2:]


@pytest.mark.parametrize("done", [True, False])
def test_the_plan_counts_with_the_longest_response_of_each_source(recipe: Make, prepared: Prepared, done: bool) -> None:
    def total(**more: object) -> int:
        path = recipe([{"prompt": f"Question {n}?"} for n in range(4)], generation={"max_new_tokens": 8, **more})
        made = load_recipe(prepared(path) if done else path)
        return int(sequence_lengths(made).tokens.sum())

    assert total(sources={"numbers": {"max_new_tokens": 20}}) == total() + 4 * 12


def test_a_damaged_response_file_is_named(ready: Recipe) -> None:
    inputs = Inputs(ready.dataset.inputs_uri)
    inputs.store.put("responses/x.parquet", b"junk")
    with pytest.raises(StatehouseError, match=r"responses/x\.parquet: damaged; delete it"):
        inputs.read_responses({"p": "s"})


def test_the_contract_says_what_the_verifier_is(ready: Recipe) -> None:
    contract = make_contract(ready, open_verifier(ready))
    assert (contract.vocab_size, contract.hidden_size, contract.num_layers) == (49152, 64, 8)
    assert contract.capture_layers == (1, 3, 4)
    assert contract.layers == 4
    assert contract.engine == "transformers"


def test_a_shape_that_is_not_the_verifiers_is_refused(recipe: Make, tiny_verifier: Path) -> None:
    shape = {"vocab_size": 49152, "hidden_size": 128, "num_layers": 8}
    path = recipe(verifier={"model": str(tiny_verifier), "shape": shape})
    with pytest.raises(RecipeError, match=r"verifier.shape.hidden_size is 128, but .* says 64"):
        open_verifier(load_recipe(path))
