"""coverage: counts the tokens of a sealed dataset with Ray Data and tells how much each draft vocabulary would cover.

Counts loss-bearing tokens by source, apart for the held-out prompt groups; writes to `<dataset.uri>-vocab`:
coverage.json, counts.parquet (what the vocabulary is chosen on), held_out_counts.parquet, and the draft vocabulary
(d2t, t2d) as draft_vocab.safetensors + draft_vocab.json.
"""

from __future__ import annotations

import argparse
import io
import json
from typing import Any

import numpy as np
from rich.console import Console

from ray_jobs import job
from ray_jobs.inputs import open_verifier
from ray_jobs.prompts import load_tokenizer
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from storage import Dataset, StatehouseError, open_dataset
from storage.errors import ContractMismatch, ShardCorrupt
from storage.objects import open_store
from vocab.counts import TokenCounts, count_by_source
from vocab.coverage import CoverageTable, percent
from vocab.mapping import HEADER, TENSORS, DraftVocab
from vocab.split import held_out_mask

# Tokens of one counting task: large enough that opening the dataset is not seen, small enough to spread.
_TASK_TOKENS = 4 << 20


def counting_tasks(dataset: Dataset, held_out: np.ndarray) -> list[dict[str, Any]]:
    """{uri, rows, held}: rows of the dataset that lie together and fall on one side of the split."""
    length = dataset.sequences["length"].to_numpy().astype(np.int64)
    start = dataset.sequences["start"].to_numpy()
    tasks = []
    for held in (False, True):
        rows = np.flatnonzero(held_out == held)
        rows = rows[np.argsort(start[rows])]
        cuts = np.flatnonzero(np.diff(np.cumsum(length[rows]) // _TASK_TOKENS)) + 1
        tasks += [{"uri": dataset.uri, "rows": part, "held": held} for part in np.split(rows, cuts) if len(part)]
    return tasks


def _count(task: dict[str, Any]) -> dict[str, Any]:
    try:
        dataset = open_dataset(task["uri"])
        parts = [dataset.tokens(int(row)) for row in task["rows"]]
        sources = dataset.sequences["source"].take(task["rows"]).to_pylist()
        counts = count_by_source(
            np.concatenate([token_ids for token_ids, _ in parts]),
            np.concatenate([mask for _, mask in parts]),
            np.array([len(token_ids) for token_ids, _ in parts]),
            sources,
            dataset.contract.vocab_size,
        )
    except StatehouseError as error:  # would come back wrapped in a traceback of Ray's
        return {"held": bool(task["held"]), "counts": b"", "error": str(error)}
    sink = io.BytesIO()
    counts.to_parquet(sink)
    return {"held": bool(task["held"]), "counts": sink.getvalue(), "error": ""}


def count_dataset(dataset: Dataset, held_out: np.ndarray) -> tuple[TokenCounts, TokenCounts]:
    """Counts of loss-bearing tokens (chosen on, held out), asserted against the plan's totals. Needs Ray.

    held_out: bool [sequences].
    """
    import ray.data

    job.quiet_ray_data()
    tasks = counting_tasks(dataset, held_out)
    vocab_size = dataset.contract.vocab_size
    sides = {held: TokenCounts.empty(vocab_size) for held in (False, True)}
    for row in ray.data.from_items(tasks, override_num_blocks=len(tasks)).map(_count).iter_rows():
        if row["error"]:
            raise ShardCorrupt(row["error"])
        sides[bool(row["held"])] += TokenCounts.from_parquet(row["counts"])
    loss_tokens = dataset.sequences["loss_tokens"].to_numpy()
    for held, counts in sides.items():
        planned = int(loss_tokens[held_out == held].sum())
        if counts.tokens != planned:
            raise ShardCorrupt(f"{dataset.uri}: counted {counts.tokens:,} loss tokens, the plan says {planned:,}")
    return sides[False], sides[True]


def special_ids(recipe: Recipe, dataset: Dataset) -> list[int]:
    """The tokeniser's special tokens. Raises ContractMismatch when the verifier's tokeniser is not the dataset's."""
    verifier = open_verifier(recipe)
    if verifier.facts["tokenizer_hash"] != dataset.contract.tokenizer_hash:
        raise ContractMismatch(
            f"{dataset.uri}: made with another tokeniser than verifier.model {recipe.verifier.model}; use its own recipe"
        )
    tokenizer = load_tokenizer(verifier.folder, recipe.verifier.trust_remote_code)
    return sorted({int(token) for token in tokenizer.all_special_ids if token < dataset.contract.vocab_size})


def run(recipe: Recipe, args: argparse.Namespace) -> None:
    dataset = open_dataset(recipe.dataset.uri)
    contract = dataset.contract
    wanted = recipe.vocab.size
    job.require(
        wanted is None or wanted <= contract.vocab_size,
        f"vocab.size is {wanted}, the verifier has {contract.vocab_size:,} ids; set vocab.size to at most that",
    )
    forced = special_ids(recipe, dataset) if recipe.vocab.force_special_tokens else []
    store = open_store(recipe.dataset.vocab_uri)
    store.probe()
    job.start_ray()
    held_out = held_out_mask(dataset.sequences["group"].to_pylist(), recipe.evaluation.held_out, recipe.evaluation.seed)
    chosen_on, held = count_dataset(dataset, held_out)
    job.require(
        chosen_on.tokens > 0, f"{dataset.uri}: no loss tokens to choose a vocabulary on; check the prompts' loss masks"
    )
    table = CoverageTable.measure(
        chosen_on,
        held if held.tokens else None,
        sizes=sorted({*(recipe.vocab.sizes or ()), *([wanted] if wanted else [])}) if recipe.vocab.sizes else None,
        hidden_size=contract.hidden_size,
        force_ids=forced,
    )
    origin = {"datasets": {dataset.uri: dataset.fingerprint}, "counts_hash": chosen_on.hash, **provenance(recipe)}
    results = {
        "coverage.json": json.dumps({**table.to_dict(), "provenance": origin}, indent=1).encode() + b"\n",
        "counts.parquet": _parquet(chosen_on),
        "held_out_counts.parquet": _parquet(held),
    }
    vocabulary = None
    if wanted is not None:
        vocabulary = DraftVocab.from_counts(chosen_on.total(), wanted, force_ids=forced, provenance=origin)
        results |= vocabulary.to_bytes()
    for name in (TENSORS, HEADER):
        if name not in results:
            store.delete(name)  # of an earlier run: it would not belong to this report
    for name, data in results.items():
        store.put(name, data)
    table.render(Console(width=None if Console().is_terminal else 110))
    job.log.info(
        "coverage done tokens=%s held_out_tokens=%s where=%s%s",
        f"{chosen_on.tokens:,}",
        f"{held.tokens:,}",
        store.uri,
        f" draft_vocab={vocabulary.size} held_out_coverage={_held_out(vocabulary, held)} hash={vocabulary.hash[:12]}"
        if vocabulary
        else "",
    )


def _held_out(vocabulary: DraftVocab, held: TokenCounts) -> str:
    return percent(vocabulary.coverage(held.total()) if held.tokens else None).replace(" ", "")


def _parquet(counts: TokenCounts) -> bytes:
    sink = io.BytesIO()
    counts.to_parquet(sink)
    return sink.getvalue()


if __name__ == "__main__":
    job.main(job.parser("coverage", __doc__ or ""), run)
