"""Which prompts are served: those of evaluation.prompts, or the dataset's held-out ones, an equal share of each source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ray_jobs.conversations import Reject
from ray_jobs.inputs import Inputs, Verifier
from ray_jobs.prompt_files import files_of, read_rows
from ray_jobs.prompts import Limits, load_tokenizer, tokenise
from ray_jobs.recipe import Recipe
from ray_jobs.verifier import read_config, text_config
from storage.errors import RecipeError, StatehouseError
from vocab.split import held_out_mask


@dataclass(frozen=True)
class ServePrompt:
    """token_ids: [T] int32, the chat template around it. row: "file:line" it came from."""

    source: str
    row: str
    token_ids: np.ndarray


def choose_prompts(recipe: Recipe, verifier: Verifier) -> list[ServePrompt]:
    """At most evaluation.serve_prompts of them, in turn from each source.

    Raises RecipeError for a file without prompts, or a row that is no prompt or too long for the engine; StatehouseError
    when nothing is held out.
    """
    by_source = _own(recipe, verifier) if recipe.evaluation.prompts else _held_out(recipe, verifier)
    turns = chain.from_iterable(zip_longest(*(by_source[source] for source in sorted(by_source))))
    return [one for one in turns if one is not None][: recipe.evaluation.serve_prompts]


def room_for_prompts(recipe: Recipe, folder: str) -> int:
    """Tokens that a prompt may have, so that response and drafts still fit. Raises RecipeError when nobody says."""
    config = recipe.extraction.replica
    limits = [text_config(read_config(Path(folder))).get("max_position_embeddings")]
    if config.gpus == 0:
        limits.append(config.max_total_tokens)
    known = [limit for limit in limits if isinstance(limit, int)]
    if not known:
        raise RecipeError(
            f"{folder}/config.json: max_position_embeddings: expected the longest sequence that the verifier reads, "
            f"found none; add it"
        )
    return min(known) - recipe.evaluation.serve_tokens - max(recipe.evaluation.draft_lengths) - 2


def _own(recipe: Recipe, verifier: Verifier) -> dict[str, list[ServePrompt]]:
    tokenizer = load_tokenizer(verifier.folder, recipe.verifier.trust_remote_code)
    room = room_for_prompts(recipe, verifier.folder)
    limits = Limits(verifier.facts["vocab_size"], room + 1)
    found: dict[str, list[ServePrompt]] = {}
    for file in files_of(recipe.evaluation.prompts):
        chosen = found.setdefault(file.source, [])
        rows = 0
        for row_name, row in read_rows(file.path, file.entry.limit, file.entry.skip):
            rows += 1
            if len(chosen) >= recipe.evaluation.serve_prompts:
                break
            chosen.append(ServePrompt(file.source, row_name, _tokens(row_name, row, tokenizer, limits)))
        if not rows:
            raise RecipeError(f"evaluation.prompts: {file.path}: no rows; add prompts, one JSON object a line")
    return found


def _tokens(row_name: str, row: dict[str, Any] | Reject, tokenizer: Any, limits: Limits) -> np.ndarray:
    try:
        if isinstance(row, Reject):
            raise row
        if isinstance(turns := row.get("turns"), list) and turns:  # Spec-Bench: the first question
            row = {"prompt": turns[0]}
        made = tokenise({key: row[key] for key in ("messages", "prompt") if key in row}, tokenizer, limits)[0]
        if made["kind"] != "generate":
            raise Reject("bad_row", "it ends with an answer; end it with a question")
    except Reject as reject:
        raise RecipeError(
            f"evaluation.prompts: {row_name}: {reject}; correct it, or lower evaluation.serve_tokens if it is too long"
        ) from None
    ids: np.ndarray = made["token_ids"]
    return ids


def _held_out(recipe: Recipe, verifier: Verifier) -> dict[str, list[ServePrompt]]:
    inputs = Inputs(recipe.dataset.inputs_uri)
    prompts = inputs.read_prompts(recipe, verifier, "serve")
    held = held_out_mask(prompts["group"].to_pylist(), recipe.evaluation.held_out, recipe.evaluation.seed)
    generated = pa.compute.equal(prompts["kind"], "generate")
    rows = prompts.filter(pa.compute.and_(generated, pa.array(held))).to_pylist()
    if not rows:
        raise StatehouseError(
            f"{inputs.uri}: none of its {len(prompts)} prompts is held out to be served (evaluation.held_out="
            f"{recipe.evaluation.held_out:g}); name a file in evaluation.prompts, or raise evaluation.held_out and train again"
        )
    room = room_for_prompts(recipe, verifier.folder)
    if long := [row["row"] for row in rows if len(row["token_ids"]) > room]:
        raise RecipeError(
            f"evaluation.serve_tokens is {recipe.evaluation.serve_tokens}, which leaves room for prompts of {room:,} tokens; "
            f"{len(long)} held-out ones are longer, the first is {long[0]}; lower it"
        )
    return _by_source(ServePrompt(row["source"], row["row"], np.array(row["token_ids"], np.int32)) for row in rows)


def _by_source(prompts: Iterable[ServePrompt]) -> dict[str, list[ServePrompt]]:
    found: dict[str, list[ServePrompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.source, []).append(prompt)
    return found
