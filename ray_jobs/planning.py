"""`--plan`: what a recipe would make and cost, from lengths and shapes alone. Nothing is written, no GPU is touched."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa

from ray_jobs.inputs import Inputs, Verifier, open_verifier, sampling_hashes
from ray_jobs.prompt_files import input_files
from ray_jobs.prompts import Limits, end_ids, load_tokenizer, prepare_file
from ray_jobs.recipe import Recipe
from ray_jobs.replicas.replica import validate_layers
from ray_jobs.training_plan import training_estimate, training_rows
from ray_jobs.verifier import VerifierShape, default_capture_layers
from storage.codecs import codec_by_name
from storage.errors import RecipeError
from storage.plan import chunk_tokens, pack, shard_capacity
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


def sequence_lengths(recipe: Recipe) -> tuple[np.ndarray, str]:
    """Lengths [sequences] int64 and where they come from. Responses not yet generated count with their longest."""
    expected = recipe.dataset.expected
    if expected is not None:
        if expected.mean_tokens > recipe.dataset.max_length:
            raise RecipeError(
                f"dataset.expected.mean_tokens is {expected.mean_tokens:,}, above dataset.max_length "
                f"{recipe.dataset.max_length:,}; correct one of them"
            )
        return _spread(expected.sequences, expected.mean_tokens, recipe.dataset.max_length), "dataset.expected"
    verifier = open_verifier(recipe)
    inputs = Inputs(recipe.dataset.inputs_uri)
    if inputs.read_summary() is None:
        return _tokenised_now(recipe, verifier)
    prompts = inputs.read_prompts(recipe, verifier, "--plan, or give dataset.expected: {sequences, mean_tokens}")
    responses = inputs.read_responses(sampling_hashes(recipe, verifier, prompts))
    lengths = pa.compute.list_value_length(prompts["token_ids"]).to_numpy().astype(np.int64)
    waiting = 0
    for row, (prompt, kind) in enumerate(zip(prompts["id"].to_pylist(), prompts["kind"].to_pylist(), strict=True)):
        if kind == "generate" and prompt in responses:
            lengths[row] += len(responses[prompt].token_ids)
        elif kind == "generate":
            waiting += 1
            lengths[row] += recipe.generation.max_new_tokens
    basis = f"{len(prompts):,} prepared prompts" + (f", {waiting:,} responses at their longest" if waiting else "")
    return np.minimum(lengths, recipe.dataset.max_length), basis


def _tokenised_now(recipe: Recipe, verifier: Verifier) -> tuple[np.ndarray, str]:
    """Lengths of the recipe's prompts where `prepare` has not run: tokenised in this process, kept nowhere."""
    tokenizer = load_tokenizer(verifier.folder, recipe.verifier.trust_remote_code)
    limits = Limits(verifier.facts["vocab_size"], recipe.dataset.max_length, end_ids(verifier.folder, tokenizer))
    lengths, rejects = {}, 0
    for file in input_files(recipe):
        for row in prepare_file(file, tokenizer, limits):
            if "reject" in row:
                rejects += 1
            else:
                answer = recipe.generation.max_new_tokens if row["kind"] == "generate" else 0
                lengths[row["id"]] = len(row["token_ids"]) + answer
    if not lengths:
        raise RecipeError(f"prompts: no row of {len(input_files(recipe))} files can be used ({rejects} are refused)")
    basis = f"{len(lengths):,} prompts, not prepared yet, responses at their longest; {rejects} refused"
    return np.minimum(np.array(list(lengths.values()), np.int64), recipe.dataset.max_length), basis


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
    lengths, basis = sequence_lengths(recipe)
    tokens = int(lengths.sum())
    length = shard_capacity(lengths, stored_layers, shape.hidden_size, recipe.dataset.shard_tokens)
    _, _, shards = pack(lengths, length)
    per_token = 2 * stored_layers * shape.hidden_size
    raw = tokens * per_token
    teacher = tokens * teacher_bytes(recipe.extraction.teacher)
    stored = raw / codec_by_name(recipe.dataset.codec).typical_ratio + teacher
    rate = recipe.extraction.tokens_per_second
    hours = tokens / rate / recipe.extraction.replicas / 3600 if rate else None
    price = recipe.extraction.usd_per_replica_hour
    return {
        "basis": basis,
        "capture_layers": list(layers),
        "sequences": len(lengths),
        "tokens": tokens,
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
        "training": training_estimate(recipe, shape, layers, lengths),
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
