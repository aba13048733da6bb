"""`--plan`: what a recipe would make and cost, from lengths and shapes alone. Nothing is written, no GPU is touched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ray_jobs.inputs import Inputs, Verifier, answered, make_contract, open_verifier, prompt_rows, sampling_hashes
from ray_jobs.prompt_files import input_files
from ray_jobs.prompts import Limits, end_ids, load_tokenizer, prepare_file
from ray_jobs.recipe import Recipe
from ray_jobs.replicas.replica import validate_layers
from ray_jobs.training_plan import training_estimate, training_rows
from ray_jobs.verifier import VerifierShape, default_capture_layers
from storage.codecs import codec_by_name
from storage.errors import RecipeError
from storage.plan import chunk_tokens, pack, shard_capacity
from storage.reuse import find_reusable
from storage.teacher import bytes_per_token as teacher_bytes


def verifier_shape(recipe: Recipe) -> VerifierShape:
    """From verifier.shape, or a config.json (weights are not needed). Raises RecipeError when there is neither."""
    if recipe.verifier.shape is not None:
        return recipe.verifier.shape
    config = Path(recipe.verifier.model).expanduser() / "config.json"
    if config.is_file():
        return VerifierShape.from_config(json.loads(config.read_text()))
    if recipe.verifier.model.startswith("bundled:"):
        facts = open_verifier(recipe).facts
        return VerifierShape(**{name: facts[name] for name in VerifierShape.model_fields})
    raise RecipeError(
        f"verifier.model {recipe.verifier.model} is not on this machine; "
        "give verifier.shape: {vocab_size, hidden_size, num_layers} to plan without it"
    )


@dataclass(frozen=True)
class Lengths:
    """tokens: [sequences] int64. basis: where they come from. ids: of the sequences that are known, None of the others (those
    that are yet to be answered). sources: of all of them, None where nobody knows yet."""

    tokens: np.ndarray
    basis: str
    ids: list[str | None]
    sources: list[str] | None = None


def sequence_lengths(recipe: Recipe) -> Lengths:
    """Responses not yet generated count with their longest."""
    expected = recipe.dataset.expected
    if expected is not None:
        if expected.mean_tokens > recipe.dataset.max_length:
            raise RecipeError(
                f"dataset.expected.mean_tokens is {expected.mean_tokens:,}, above dataset.max_length "
                f"{recipe.dataset.max_length:,}; correct one of them"
            )
        spread = _spread(expected.sequences, expected.mean_tokens, recipe.dataset.max_length)
        return Lengths(spread, "dataset.expected", [None] * len(spread))
    verifier = open_verifier(recipe)
    inputs = Inputs(recipe.dataset.inputs_uri)
    if inputs.read_summary() is None:
        return _tokenised_now(recipe, verifier)
    prompts = inputs.read_prompts(recipe, verifier, "--plan, or give dataset.expected: {sequences, mean_tokens}")
    responses = inputs.read_responses(sampling_hashes(recipe, verifier, prompts))
    lengths: dict[str, int] = {}
    ids: dict[str, str | None] = {}
    sources: dict[str, str] = {}
    waiting = 0
    for prompt in prompt_rows(prompts):
        key, length = prompt["id"], len(prompt["token_ids"])
        if prompt["kind"] != "generate":
            lengths[key], ids[key] = length, key
        elif key not in responses:
            waiting += 1
            lengths[key], ids[key] = length + _longest_response(recipe, prompt), None
        elif len(responses[key].token_ids):  # neither empty nor given up
            lengths[key], ids[key] = length + len(responses[key].token_ids), answered(prompt, responses[key]).id
        sources[key] = prompt["source"]
    basis = f"{len(prompts):,} prepared prompts" + (f", {waiting:,} responses at their longest" if waiting else "")
    return _lengths(recipe, lengths, basis, ids, sources)


def _longest_response(recipe: Recipe, prompt: dict[str, Any]) -> int:
    return recipe.generation.of(prompt["source"]).max_new_tokens


def _lengths(
    recipe: Recipe, tokens: dict[str, int], basis: str, ids: dict[str, str | None], sources: dict[str, str]
) -> Lengths:
    """The dicts: by the id of the prompt."""
    cut = np.minimum(np.array(list(tokens.values()), np.int64), recipe.dataset.max_length)
    return Lengths(cut, basis, list(ids.values()), [sources[key] for key in tokens])


def _tokenised_now(recipe: Recipe, verifier: Verifier) -> Lengths:
    """Of the recipe's prompts where `prepare` has not run: tokenised in this process, kept nowhere."""
    tokenizer = load_tokenizer(verifier.folder, recipe.verifier.trust_remote_code)
    limits = Limits(verifier.facts["vocab_size"], recipe.dataset.max_length, end_ids(verifier.folder, tokenizer))
    lengths: dict[str, int] = {}
    ids: dict[str, str | None] = {}
    sources: dict[str, str] = {}
    rejects = 0
    for file in input_files(recipe):
        for row in prepare_file(file, tokenizer, limits):
            if "reject" in row:
                rejects += 1
            else:
                open_ = row["kind"] == "generate"
                lengths[row["id"]] = len(row["token_ids"]) + (_longest_response(recipe, row) if open_ else 0)
                ids[row["id"]] = None if open_ else row["id"]
                sources[row["id"]] = row["source"]
    if not lengths:
        raise RecipeError(f"prompts: no row of {len(input_files(recipe))} files can be used ({rejects} are refused)")
    basis = f"{len(lengths):,} prompts, not prepared yet, responses at their longest; {rejects} refused"
    return _lengths(recipe, lengths, basis, ids, sources)


def reused(recipe: Recipe, lengths: Lengths) -> tuple[int, int, dict[str, str]]:
    """Sequences and tokens that `dataset.reuse` holds, of those that are known yet; and {uri: why it gives nothing}."""
    at = {key: row for row, key in enumerate(lengths.ids) if key is not None}
    if not recipe.dataset.reuse or not at:
        return 0, 0, {}
    contract = make_contract(recipe, open_verifier(recipe))
    kinds = {"codec": recipe.dataset.codec, "teacher": recipe.extraction.teacher}
    found = find_reusable(recipe.dataset.reuse, contract, list(at), **kinds)
    rows = [at[key] for key in found.places]
    return len(rows), int(lengths.tokens[rows].sum()), found.skipped


def _spread(sequences: int, mean: int, longest: int) -> np.ndarray:
    """Log-normal lengths (sigma 0.8, as chat corpora have) with exactly this sum: [sequences] int64 in 1..longest."""
    normal = NormalDist(0, 0.8)
    shape = np.exp([normal.inv_cdf((row + 0.5) / sequences) for row in range(sequences)])
    low, high = 0.0, float(longest) * 2  # bisect the scale, since clipping lowers the mean
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(shape * middle, 1, longest).mean() < mean else (low, middle)
    lengths = np.clip(shape * low, 1, longest).astype(np.int64)
    short = sequences * min(mean, longest) - int(lengths.sum())
    room = np.flatnonzero(lengths < longest)[: max(0, short)]
    lengths[room] += 1
    return lengths


def estimate(recipe: Recipe) -> dict[str, Any]:
    """The figures that `print_plan` prints, by name."""
    shape = verifier_shape(recipe)
    layers = recipe.extraction.capture_layers or tuple(default_capture_layers(shape.num_layers))
    validate_layers(layers, shape.num_layers)
    stored_layers = len(layers) + (recipe.extraction.layers == "all")
    sequences = sequence_lengths(recipe)
    lengths = sequences.tokens
    tokens = int(lengths.sum())
    length = shard_capacity(lengths, stored_layers, shape.hidden_size, recipe.dataset.shard_tokens)
    _, _, shards = pack(lengths, length)
    per_token = 2 * stored_layers * shape.hidden_size
    raw = tokens * per_token
    teacher = tokens * teacher_bytes(recipe.extraction.teacher)
    stored = raw / codec_by_name(recipe.dataset.codec).typical_ratio + teacher
    rate = recipe.extraction.tokens_per_second
    known, known_tokens, skipped = reused(recipe, sequences)
    hours = (tokens - known_tokens) / rate / recipe.extraction.replicas / 3600 if rate else None
    price = recipe.extraction.usd_per_replica_hour
    return {
        "basis": sequences.basis,
        "capture_layers": list(layers),
        "sequences": len(lengths),
        "tokens": tokens,
        "reused_sequences": known,
        "reused_tokens": known_tokens,
        "reuse_skips": skipped,
        "bytes_per_token": per_token,
        "raw_bytes": raw,
        "stored_bytes": int(stored),
        "teacher_bytes": teacher,
        "shards": shards,
        "shard_tokens": length,
        "chunk_tokens": chunk_tokens(stored_layers, shape.hidden_size),
        "replicas": recipe.extraction.replicas,
        "gpus": recipe.extraction.replicas * recipe.extraction.replica.gpus,
        # Two shards in flight in each replica: states, planes and the encoded object of each.
        "memory_per_replica_bytes": 2 * 3 * length * per_token,
        "hours": hours,
        "usd_of_replicas": hours * recipe.extraction.replicas * price if hours and price is not None else None,
        "usd_per_million_tokens": price / rate / 3600 * 1e6 if rate and price is not None else None,
        "usd_per_month": stored / 1e9 * recipe.dataset.usd_per_gb_month,
        "training": training_estimate(recipe, shape, layers, lengths, sequences.sources),
    }


def print_plan(recipe: Recipe) -> None:
    """The estimate as a table, with a JSON line last for scripts."""
    plan = estimate(recipe)
    gib = 2**30
    hours = "unknown (give extraction.tokens_per_second)" if plan["hours"] is None else f"{plan['hours']:.2f}"
    rows = {
        "recipe": f"{recipe.name}: {recipe.verifier.model} -> {recipe.dataset.uri}",
        "lengths from": plan["basis"],
        "layers": f"outputs of decoder layers {plan['capture_layers']}"
        + (" and the final state" if recipe.extraction.layers == "all" else ""),
        "teacher": f"{recipe.extraction.teacher}, {plan['teacher_bytes'] / gib:,.2f} GiB",
        "sequences": f"{plan['sequences']:,}",
        "tokens": f"{plan['tokens']:,} at {plan['bytes_per_token']:,} bytes",
        **_reuse_row(recipe, plan),
        "raw": f"{plan['raw_bytes'] / gib:,.2f} GiB",
        "stored": f"{plan['stored_bytes'] / gib:,.2f} GiB as {recipe.dataset.codec}",
        "shards": f"{plan['shards']:,} of {plan['shard_tokens']:,} tokens, in chunks of {plan['chunk_tokens']}",
        "replicas": f"{plan['replicas']} x {recipe.extraction.replica.engine}, {plan['gpus']} GPUs",
        "host memory": f"{plan['memory_per_replica_bytes'] / gib:,.2f} GiB a replica for shards in flight",
        "hours": hours,
        **(
            {}
            if plan["usd_of_replicas"] is None
            else {
                "replica cost": f"${plan['usd_of_replicas']:,.2f}, "
                f"${plan['usd_per_million_tokens']:,.4f} a million tokens"
            }
        ),
        "storage": f"${plan['usd_per_month']:,.2f} a month",
        **training_rows(plan["training"]),
    }
    for name, value in rows.items():
        print(f"{name:<14}{value}")
    print(json.dumps(plan), flush=True)


def _reuse_row(recipe: Recipe, plan: dict[str, Any]) -> dict[str, str]:
    if not recipe.dataset.reuse:
        return {}
    text = (
        f"{plan['reused_sequences']:,} sequences, {plan['reused_tokens']:,} tokens are copied; "
        f"{plan['tokens'] - plan['reused_tokens']:,} tokens are extracted"
    )
    for uri, why in plan["reuse_skips"].items():
        text += f"; {uri} gives nothing: {why}"
    return {"reuse": text}
