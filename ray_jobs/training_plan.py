"""What `--plan` says of training: updates, tokens, the drafter's size. From lengths and shapes alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter.config import follow, missing_fields
from drafter.sampler import cut
from ray_jobs.recipe import Recipe
from ray_jobs.verifier import VerifierShape, resolve_verifier
from storage.errors import RecipeError
from storage.reader import open_dataset

# Fewer have not been enough for any published EAGLE-3 drafter.
FEW_UPDATES = 5000


def training_estimate(
    recipe: Recipe,
    shape: VerifierShape,
    layers: Sequence[int],
    lengths: np.ndarray,
    sources: Sequence[str] | None = None,
) -> dict[str, Any]:
    """updates, updates_per_epoch, epochs, tokens_per_update, workers, gpus; parameters {trained, all}, or None where
    the verifier's config.json is not at hand and the recipe's drafter.config does not say enough.

    lengths: [sequences] of the whole dataset, sources: of each, where known; the held-out share is taken off.
    training.datasets are opened. Raises StatehouseError when filter and max_length leave nothing, and for a
    drafter.config that no drafter has.
    """
    settings = recipe.training
    kept = _mixed(recipe, lengths, sources)
    # Which groups are held out is known once they are there; their share of the tokens is close enough.
    tokens = round(int(kept.sum()) * (1 - recipe.evaluation.held_out))
    per_epoch = max(1, min(len(kept), round(tokens / settings.global_batch_tokens)))
    longest = int(kept.max())
    return {
        "updates": per_epoch * settings.epochs,
        "updates_per_epoch": per_epoch,
        "epochs": settings.epochs,
        "tokens_per_update": round(tokens / per_epoch),
        "workers": settings.workers,
        "gpus": settings.workers * settings.gpus_per_worker,
        "hours": tokens * settings.epochs / settings.tokens_per_second / settings.workers / 3600
        if settings.tokens_per_second
        else None,
        "longest_sequence": longest,
        "sources_filtered": settings.filter.sources is None or sources is not None,
        "fits_micro_batch": longest <= settings.micro_batch_tokens,
        "parameters": drafter_parameters(recipe, shape, layers),
    }


def _mixed(recipe: Recipe, lengths: np.ndarray, sources: Sequence[str] | None) -> np.ndarray:
    """Lengths of what an epoch trains on, held-out pieces included: of the dataset and the others, as often as they weigh."""
    found = {recipe.dataset.uri: (_used(recipe, recipe.dataset.uri, lengths, sources), 1.0)}
    for one in recipe.training.datasets:
        if one.uri == recipe.dataset.uri:
            found[one.uri] = (found[one.uri][0], one.weight)
        else:
            table = open_dataset(one.uri).sequences
            own = _used(recipe, one.uri, table["length"].to_numpy(), table["source"].to_pylist())
            found[one.uri] = (own, one.weight)
    parts = []
    for own, weight in found.values():
        share = round((weight - int(weight)) * len(own))
        parts += [own] * int(weight) + [own[np.linspace(0, len(own) - 1, share).astype(np.int64)]]
    mixed = np.concatenate(parts).astype(np.int64)
    if not len(mixed):
        raise RecipeError("training.datasets: the weights leave epochs without a sequence; raise them")
    return mixed


def _used(recipe: Recipe, uri: str, lengths: np.ndarray, sources: Sequence[str] | None) -> np.ndarray:
    """Lengths of what is left of a dataset by training.filter and max_length, in pieces. Raises RecipeError for nothing."""
    settings, wanted = recipe.training, recipe.training.filter
    kept = np.ones(len(lengths), np.bool_)
    if wanted.sources is not None and sources is not None:
        kept &= np.isin(np.array(sources), wanted.sources)
    kept &= lengths >= (wanted.min_length or 0)
    if wanted.max_length is not None:
        kept &= lengths <= wanted.max_length
    if not kept.any():
        raise RecipeError(f"training.filter: none of the {len(lengths)} sequences of {uri} is left; widen it")
    left = lengths[kept].astype(np.int64)
    if settings.max_length is None:
        return left
    if settings.long_sequences == "split":
        return cut(left, settings.max_length)[2]
    if not (left <= settings.max_length).any():
        raise RecipeError(
            f"training.max_length is {settings.max_length}, and all {len(left)} sequences of {uri} are longer; raise it, "
            f"or set training.long_sequences=split"
        )
    return left[left <= settings.max_length]


def _config_of(model: str) -> dict[str, Any]:
    """The verifier's config.json where it is at hand, else nothing."""
    folder = resolve_verifier(model) if model.startswith("bundled:") else Path(model).expanduser()
    found = folder / "config.json"
    document: dict[str, Any] = json.loads(found.read_text()) if found.is_file() else {}
    return document


def drafter_parameters(recipe: Recipe, shape: VerifierShape, layers: Sequence[int]) -> dict[str, int] | None:
    """`trained` and `all` (with the embedding, and the head where it is frozen) parameters of the recipe's drafter."""
    document = _config_of(recipe.verifier.model)
    if not document:
        document = {"vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "max_position_embeddings": 1}
        if missing_fields(document, recipe.drafter.config):
            return None
    size = min(recipe.vocab.size or shape.vocab_size, shape.vocab_size)
    config = follow(document, size, layers, recipe.drafter.config)
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = 2 * width * (queries + 2 * keys) + queries * width
    body = width * config.feature_size + attention + 3 * width * inner + 4 * width
    head, embedding = config.draft_vocab_size * width, config.vocab_size * width
    trained = body + (0 if recipe.drafter.lm_head == "frozen" else head) + config.own_embedding * embedding
    return {"trained": trained, "all": body + head + embedding, "kv_bytes_per_token": config.kv_bytes_per_token}


def training_rows(plan: dict[str, Any]) -> dict[str, str]:
    """The estimate as rows of the table that `--plan` prints, warnings included."""
    parameters = plan["parameters"]
    rows = {
        "training": f"{plan['updates']:,} updates of about {plan['tokens_per_update']:,} tokens, {plan['epochs']} epochs, "
        f"{plan['workers']} workers, {plan['gpus']} GPUs, "
        + (
            "hours unknown (give training.tokens_per_second)" if plan["hours"] is None else f"{plan['hours']:.1f} hours"
        ),
        "drafter": "unknown (give drafter.config the fields of the verifier's config.json)"
        if parameters is None
        else f"{parameters['trained'] / 1e6:,.1f} M parameters trained, {parameters['all'] / 1e6:,.1f} M with the embedding, "
        f"{parameters['kv_bytes_per_token']:,} bytes of keys and values a token",
    }
    warnings = []
    if plan["updates"] < FEW_UPDATES:
        warnings.append(f"fewer than {FEW_UPDATES:,} updates: more epochs, or a smaller training.global_batch_tokens")
    if not plan["fits_micro_batch"]:
        warnings.append(
            f"the longest sequence has {plan['longest_sequence']:,} tokens: raise training.micro_batch_tokens"
        )
    if not plan["sources_filtered"]:
        warnings.append("training.filter.sources is not counted: the sources are known once prompts are prepared")
    if warnings:
        rows["warning"] = "; ".join(warnings)
    return rows
