"""prepare: the recipe's prompt files -> tokenised prompts at `<dataset.uri>-inputs`.

With Ray Data: one task a file reads its lines, tasks on every core of the cluster tokenise them in blocks, and this process
puts the blocks together in the order of the recipe's files and their rows, so the result does not depend on the cluster. It
drops what it has seen already and refuses what cannot be used, row by row, with a reason. Fails when more than
dataset.max_reject_share was.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator

import pyarrow as pa

from ray_jobs import job
from ray_jobs.collecting import Collected
from ray_jobs.inputs import Inputs, Verifier, inputs_hash, open_verifier
from ray_jobs.prompt_files import PromptFile, fingerprints, input_files
from ray_jobs.prompts import Limits
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from ray_jobs.tokenising import read_file, tokenise_block
from storage.errors import RecipeError, StatehouseError

# Lines travel to the tokenising tasks in blocks of about this many bytes: a thousand tasks a gigabyte, of a second each.
BLOCK_BYTES = 1 << 20


def collect(recipe: Recipe, verifier: Verifier, files: list[PromptFile]) -> Collected:
    """All rows of the files, tokenised on the cluster. Needs Ray."""
    import ray.data

    job.quiet_ray_data()
    limits = Limits(verifier.facts["vocab_size"], recipe.dataset.max_length)
    asked = (recipe.verifier.model, recipe.verifier.revision, recipe.verifier.trust_remote_code)
    collected = Collected(files)
    with _in_order_and_small_blocks():
        # Other shares of a core than below, or Ray Data makes one task of reading and tokenising; together one core, or a
        # reader that waits for room would keep the only core from who makes it.
        lines = ray.data.from_items([{"at": at} for at in range(len(files))], override_num_blocks=len(files))
        lines = lines.map_batches(read_file, batch_size=1, batch_format="pyarrow", fn_args=(files,), num_cpus=0.25)
        done = lines.map_batches(
            tokenise_block, batch_size=None, batch_format="pyarrow", fn_args=(files, asked, limits), num_cpus=0.75
        )
        for block in done.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2):
            collected.add(block)
    return collected


@contextlib.contextmanager
def _in_order_and_small_blocks() -> Iterator[None]:
    """Ray Data's settings are the process's; another job may follow in it."""
    import ray.data

    context = ray.data.DataContext.get_current()
    before = context.target_max_block_size, context.execution_options.preserve_order
    context.target_max_block_size, context.execution_options.preserve_order = BLOCK_BYTES, True
    try:
        yield
    finally:
        context.target_max_block_size, context.execution_options.preserve_order = before


def run(recipe: Recipe, args: argparse.Namespace) -> None:
    files = input_files(recipe)
    verifier = open_verifier(recipe)
    inputs = Inputs(recipe.dataset.inputs_uri)
    inputs.store.probe()
    inputs.clear()
    before = fingerprints(recipe)
    job.start_ray()
    began = time.monotonic()
    collected = collect(recipe, verifier, files)
    data, rejects = collected.finish(), collected.rejects
    seconds = time.monotonic() - began
    if not collected.rows:
        raise RecipeError(
            f"prompts: {', '.join(file.path for file in files)}: no rows; add prompts, one JSON object a line"
        )
    if len(rejects):
        _report(recipe, inputs, collected, rejects)
    if fingerprints(recipe) != before:
        raise RecipeError("prompts: files changed while they were prepared; run prepare again")
    summary = {
        "files": before,
        "inputs_hash": inputs_hash(recipe, verifier),
        "rows": collected.rows,
        "prompts": collected.prompts,
        "rejects": len(rejects),
        "rejects_by_code": dict(collected.codes),
        "duplicates": collected.duplicates,
        "tokens": collected.tokens,
        "loss_tokens": collected.loss_tokens,
        "sources": dict(collected.sources),
        "kinds": dict(collected.kinds),
        "seconds": round(seconds, 1),
        "provenance": provenance(recipe),
    }
    inputs.write_prompts(data, summary)
    job.log.info(
        "prepare done prompts=%d to_generate=%d tokens=%s rejects=%d duplicates=%d sources=%s seconds=%.1f where=%s",
        collected.prompts,
        collected.kinds["generate"],
        f"{collected.tokens:,}",
        len(rejects),
        collected.duplicates,
        ",".join(f"{name}:{count}" for name, count in sorted(collected.sources.items())),
        seconds,
        inputs.store.uri,
    )


def _report(recipe: Recipe, inputs: Inputs, collected: Collected, rejects: pa.Table) -> None:
    """Writes rejects.parquet. Raises StatehouseError when there are more than the recipe allows."""
    where = inputs.write_rejects(rejects)
    codes = ",".join(f"{code}:{count}" for code, count in sorted(collected.codes.items()))
    job.log.info("prepare rejects=%d codes=%s where=%s", len(rejects), codes, where)
    if len(rejects) > recipe.dataset.max_reject_share * collected.rows or not collected.prompts:
        first = rejects.slice(0, 1).to_pylist()[0]
        raise StatehouseError(
            f"{len(rejects)} of {collected.rows} prompts were refused ({codes}), dataset.max_reject_share allows "
            f"{recipe.dataset.max_reject_share:.1%}; the first is {first['file']}:{first['row']}: {first['reason']}; "
            f"all are in {where}; correct them, or raise dataset.max_reject_share to leave them out"
        )


if __name__ == "__main__":
    job.main(job.parser("prepare", __doc__ or ""), run)
