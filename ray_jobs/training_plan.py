"""What `--plan` says of training: updates, tokens, the drafter's size. From lengths and shapes alone, without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter.config import DrafterConfig
from ray_jobs.recipe import Recipe
from ray_jobs.verifier import VerifierShape
from storage.errors import StatehouseError
from storage.reader import open_dataset

# Fewer have not been enough for any published EAGLE-3 drafter.
FEW_UPDATES = 5000


def training_estimate(
    recipe: Recipe, shape: VerifierShape, layers: Sequence[int], lengths: np.ndarray
) -> dict[str, Any]:
    """updates, updates_per_epoch, epochs, tokens_per_update, workers, gpus; parameters {trained, all}, or None where
    the verifier's config.json is not at hand and the recipe's drafter.config does not say enough.

    lengths: [sequences] of the whole dataset; the held-out share is taken off. training.datasets are opened.
    """
    settings = recipe.training
    lengths = _mixed(recipe, lengths)
    # Which groups are held out is known once they are there; their share of the tokens is close enough.
    tokens = round(int(lengths.sum()) * (1 - recipe.evaluation.held_out))
    per_epoch = max(1, min(len(lengths), round(tokens / settings.global_batch_tokens)))
    if settings.max_length is not None:
        over = lengths > settings.max_length
        if settings.long_sequences == "drop":
            lengths = lengths[~over] if not over.all() else lengths[:1]
        else:
            lengths = np.minimum(lengths, settings.max_length)
    longest = int(lengths.max())
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
        "fits_micro_batch": longest <= settings.micro_batch_tokens,
        "parameters": drafter_parameters(recipe, shape, layers),
    }


def _mixed(recipe: Recipe, lengths: np.ndarray) -> np.ndarray:
    """Lengths of an epoch's sequences: those of the dataset and of the others, as often as they weigh."""
    found = {recipe.dataset.uri: (lengths, 1.0)}
    for one in recipe.training.datasets:
        own = lengths if one.uri == recipe.dataset.uri else open_dataset(one.uri).sequences["length"].to_numpy()
        found[one.uri] = (own, one.weight)
    parts = []
    for own, weight in found.values():
        share = round((weight - int(weight)) * len(own))
        parts += [own] * int(weight) + [own[np.linspace(0, len(own) - 1, share).astype(np.int64)]]
    return np.concatenate(parts).astype(np.int64)


def drafter_parameters(recipe: Recipe, shape: VerifierShape, layers: Sequence[int]) -> dict[str, int] | None:
    """`trained` and `all` (with the embedding, and the head where it is frozen) parameters of the recipe's drafter."""
    found = Path(recipe.verifier.model).expanduser() / "config.json"
    document: dict[str, Any] = json.loads(found.read_text()) if found.is_file() else {}
    if not document:
        document = {"vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "max_position_embeddings": 1}
    try:
        config = DrafterConfig.from_verifier(
            document, min(recipe.vocab.size or shape.vocab_size, shape.vocab_size), layers, **recipe.drafter.config
        )
    except StatehouseError:
        return None
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
    if warnings:
        rows["warning"] = "; ".join(warnings)
    return rows
