"""prepare: the recipe's prompt files -> tokenised prompts at `<dataset.uri>-inputs`.

Reads JSONL and Parquet with Ray Data, one task per file; applies the verifier's chat template and tokeniser; drops
duplicates; refuses what cannot be used, row by row, with a reason. Fails when more than dataset.max_reject_share was.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from ray_jobs import job
from ray_jobs.inputs import Inputs, Verifier, inputs_hash, open_verifier
from ray_jobs.prompts import (
    PROMPTS_SCHEMA,
    REJECTS_SCHEMA,
    Limits,
    end_ids,
    fingerprints,
    input_files,
    load_tokenizer,
    prepare_file,
)
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from ray_jobs.verifier import resolve_verifier
from storage.errors import RecipeError, StatehouseError


def _prepare(file: dict[str, Any], model: str, revision: str | None, trust: bool, limits: Limits) -> Iterator[Any]:
    folder = str(resolve_verifier(model, revision=revision))
    tokenizer = load_tokenizer(folder, trust)
    limits = Limits(limits.vocab_size, limits.max_length, end_ids(folder, tokenizer))
    # Ray Data wants the same columns in every row: rejects carry empty lists, prompts an empty reason.
    blank: dict[str, Any] = dict.fromkeys((*PROMPTS_SCHEMA.names, *REJECTS_SCHEMA.names, "error"), "")
    blank |= {"token_ids": np.zeros(0, np.int32), "loss_mask": np.zeros(0, bool)}
    try:
        for row in prepare_file(file["path"], file["source"], file["limit"], tokenizer, limits, file["skip"]):
            yield {**blank, **row.get("reject", row)}
    except RecipeError as error:  # would come back wrapped in a traceback of Ray's
        yield {**blank, "error": str(error)}


def collect(recipe: Recipe, verifier: Verifier, files: list[dict[str, Any]]) -> tuple[pa.Table, pa.Table, int]:
    """(accepted `PROMPTS_SCHEMA` ordered by id, rejects `REJECTS_SCHEMA`, duplicates dropped). Needs Ray."""
    import ray.data

    job.quiet_ray_data()
    limits = Limits(verifier.facts["vocab_size"], recipe.dataset.max_length)
    arguments = (recipe.verifier.model, recipe.verifier.revision, recipe.verifier.trust_remote_code, limits)
    rows = ray.data.from_items(files, override_num_blocks=len(files)).flat_map(_prepare, fn_args=arguments)
    accepted: dict[str, dict[str, Any]] = {}
    rejects: list[dict[str, Any]] = []
    duplicates = 0
    for row in rows.iter_rows():
        if row["error"]:
            raise RecipeError(row["error"])
        if row["reason"]:
            rejects.append({name: row[name] for name in REJECTS_SCHEMA.names})
            continue
        prompt = {name: row[name] for name in PROMPTS_SCHEMA.names}
        known = accepted.get(prompt["id"])
        duplicates += known is not None
        if known is None or (prompt["source"], prompt["row"]) < (known["source"], known["row"]):
            accepted[prompt["id"]] = prompt
    ordered = [accepted[key] for key in sorted(accepted)]
    rejects.sort(key=lambda reject: (reject["source"], reject["row"]))
    return (
        pa.Table.from_pylist(ordered, schema=PROMPTS_SCHEMA),
        pa.Table.from_pylist(rejects, schema=REJECTS_SCHEMA),
        duplicates,
    )


def run(recipe: Recipe, args: argparse.Namespace) -> None:
    files = input_files(recipe)
    verifier = open_verifier(recipe)
    inputs = Inputs(recipe.dataset.inputs_uri)
    inputs.store.probe()
    inputs.clear()
    before = fingerprints(recipe)
    job.start_ray()
    prompts, rejects, duplicates = collect(recipe, verifier, files)
    total = len(prompts) + len(rejects) + duplicates
    if not total:
        raise RecipeError(
            f"prompts: {', '.join(file['path'] for file in files)}: no rows; add prompts, one JSON object a line"
        )
    if len(rejects):
        where = inputs.write_rejects(rejects)
        job.log.info("prepare rejects=%d where=%s", len(rejects), where)
        if len(rejects) > recipe.dataset.max_reject_share * total or not len(prompts):
            first = rejects.slice(0, 1).to_pylist()[0]
            raise StatehouseError(
                f"{len(rejects)} of {total} prompts were refused, dataset.max_reject_share allows "
                f"{recipe.dataset.max_reject_share:.1%}; the first is {first['row']}: {first['reason']}; "
                f"all are in {where}; correct them, or raise dataset.max_reject_share to leave them out"
            )
    sources = Counter(prompts["source"].to_pylist())
    kinds = Counter(prompts["kind"].to_pylist())
    tokens = int(pa.compute.sum(pa.compute.list_value_length(prompts["token_ids"])).as_py())
    if fingerprints(recipe) != before:
        raise RecipeError("prompts: files changed while they were prepared; run prepare again")
    summary = {
        "files": before,
        "inputs_hash": inputs_hash(recipe, verifier),
        "prompts": len(prompts),
        "rejects": len(rejects),
        "duplicates": duplicates,
        "tokens": tokens,
        "sources": dict(sources),
        "kinds": dict(kinds),
        "provenance": provenance(recipe),
    }
    inputs.write_prompts(prompts, summary)
    job.log.info(
        "prepare done prompts=%d to_generate=%d tokens=%s rejects=%d duplicates=%d sources=%s where=%s",
        len(prompts),
        kinds["generate"],
        f"{tokens:,}",
        len(rejects),
        duplicates,
        ",".join(f"{name}:{count}" for name, count in sorted(sources.items())),
        inputs.store.uri,
    )


if __name__ == "__main__":
    job.main(job.parser("prepare", __doc__ or ""), run)
