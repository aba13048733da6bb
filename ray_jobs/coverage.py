"""coverage: counts the tokens of sealed datasets with Ray Data and answers which draft vocabulary a drafter needs.

Counts loss-bearing tokens by source; the held-out prompt groups apart, the others in folds that judge one another.
Writes to `<dataset.uri>-vocab`: report.html and coverage.json (curves, intervals, sources, policies, trade-off),
counts.parquet (what the vocabulary is chosen on; counts/fold-*.parquet add up to it), held_out_counts.parquet, and the
draft vocabulary (d2t, t2d) as draft_vocab.safetensors + draft_vocab.json.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ray_jobs import job
from ray_jobs.counting import count_all, cover_all, dataset_tasks, file_tasks, open_all
from ray_jobs.inputs import open_verifier
from ray_jobs.prompts import load_tokenizer
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from ray_jobs.teacher_counting import count_teachers
from storage import Dataset
from storage.errors import ContractMismatch, ShardCorrupt, StatehouseError
from storage.objects import open_store
from vocab.acceptance_model import Walks, load_walks
from vocab.config import VocabConfig
from vocab.counting import SideCounts, Split, side_tables
from vocab.counts import TokenCounts
from vocab.coverage import CoverageTable, default_sizes, percent
from vocab.fitted import with_walks
from vocab.folds import fold_orders
from vocab.hardware import gpu
from vocab.keep import read_ids
from vocab.mapping import HEADER, TENSORS, DraftVocab
from vocab.policies import choose, policy_order
from vocab.report import report_html
from vocab.roofline import Machine
from vocab.shapes import DRAFTERS, VERIFIERS, Drafter, Verifier, verifier_of
from vocab.study import study
from vocab.tables import render_teacher
from vocab.teacher import teacher_coverage
from vocab.tradeoff import Question, Tradeoff, answer


class Tokens:
    """What the tokeniser says: the special ids, and the string of an id. Nothing where no tokeniser is needed or found."""

    def __init__(self, recipe: Recipe, dataset: Dataset) -> None:
        self.special: list[int] = []
        self.text: Callable[[int], str] | None = None
        self.config: dict[str, Any] | None = None
        try:
            verifier = open_verifier(recipe)
        except StatehouseError:
            if recipe.vocab.force_special_tokens:
                raise
            return
        if verifier.facts["tokenizer_hash"] != dataset.contract.tokenizer_hash:
            raise ContractMismatch(
                f"{dataset.uri}: made with another tokeniser than verifier.model {recipe.verifier.model}; use its own recipe"
            )
        tokenizer = load_tokenizer(verifier.folder, recipe.verifier.trust_remote_code)
        self.config = json.loads((Path(verifier.folder) / "config.json").read_text())
        self.special = sorted(
            {int(token) for token in tokenizer.all_special_ids if token < dataset.contract.vocab_size}
        )
        self.text = lambda token: str(tokenizer.decode([token]))


def run(recipe: Recipe, args: argparse.Namespace) -> None:
    config = recipe.vocab
    datasets = open_all([recipe.dataset.uri, *config.datasets])
    dataset, contract = datasets[0], datasets[0].contract
    wanted = config.size
    job.require(
        wanted is None or wanted <= contract.vocab_size,
        f"vocab.size is {wanted}, the verifier has {contract.vocab_size:,} ids; set vocab.size to at most that",
    )
    machine = Machine(gpu(config.gpu), config.tensor_parallel or 1, server=config.server)
    tokens = Tokens(recipe, dataset)
    forced = tokens.special if config.force_special_tokens else []
    listed = read_ids(config.keep_ids) if config.keep_ids else np.zeros(0, np.int64)
    job.require(config.policy != "list" or listed.size > 0, "vocab.policy is list: name the ids in vocab.keep_ids")
    sizes = wanted_sizes(config, contract.vocab_size, len(forced))
    walks = load_walks(config.walks) if config.walks else None
    more = file_tasks(config.files)
    store = open_store(recipe.vocab_uri)
    store.probe()
    job.start_ray()
    split = Split(config.folds, recipe.evaluation.held_out, recipe.evaluation.seed)
    tasks, planned = dataset_tasks(datasets, int(job.cluster_size()[0]))
    counts = count_all(tasks, contract.vocab_size, split)
    counted = counts.folds.total().tokens + counts.held_out.tokens
    if counted != planned:
        raise ShardCorrupt(f"{dataset.uri}: counted {counted:,} loss tokens, the plan says {planned:,}")
    if more:
        counts, tasks = counts + count_all(more, contract.vocab_size, split), tasks + more
    chosen_on, held = counts.folds.total(), counts.held_out
    job.require(
        chosen_on.tokens > 0, f"{dataset.uri}: no loss tokens to choose a vocabulary on; check the prompts' loss masks"
    )
    choice: dict[str, Any] = {"policy": config.policy, "force_ids": forced, "listed": listed}
    orders = fold_orders(counts.folds, **choice)
    tables = side_tables(orders, policy_order(counts=chosen_on, **choice), sizes, split)
    units = cover_all(tasks, split, tables, len(sizes))
    teacher = teacher_coverage(count_teachers(datasets, tasks, contract.vocab_size, split), tables, len(sizes))
    judged = units.side(held_out=False)
    found = study(
        counts.folds,
        sizes,
        held_out=held,
        groups=judged[0],
        group_sources=judged[1],
        held_out_groups=units.side(held_out=True)[0],
        special_ids=tokens.special,
        size=wanted,
        resamples=config.resamples,
        text_of=tokens.text,
        **choice,
    )
    if teacher is not None:
        found["teacher"] = teacher
    table = CoverageTable.measure(
        chosen_on,
        held if held.tokens else None,
        sizes=sizes,
        hidden_size=contract.hidden_size,
        force_ids=forced,
    )
    origin = {
        "datasets": {one.uri: one.fingerprint for one in datasets},
        # Training refuses a draft vocabulary that was made for another one.
        "verifier": {name: getattr(contract, name) for name in ("vocab_size", "tokenizer_hash", "weights_hash")},
        "counts_hash": chosen_on.hash,
        **provenance(recipe),
    }
    worked_out = trade_off(recipe, machine, tokens.config, dataset, found, chosen_on, choice, walks)
    content = {**table.to_dict(), "study": found, "tradeoff": worked_out, "provenance": origin}
    results = {
        "coverage.json": json.dumps(content, indent=1).encode() + b"\n",
        "report.html": report_html(f"Draft vocabulary of {recipe.name}", found, worked_out).encode(),
        **_counts_files(counts),
    }
    vocabulary = None
    if wanted is not None:
        vocabulary = choose(config.policy, chosen_on, wanted, force_ids=forced, listed=listed, provenance=origin)
        results |= vocabulary.to_bytes()
    for name in (TENSORS, HEADER):
        if name not in results:
            store.delete(name)  # of an earlier run: it would not belong to this report
    for name, data in results.items():
        store.put(name, data)
    console = Console(width=None if Console().is_terminal else 110)
    table.render(console)
    if teacher is not None:
        render_teacher(found, console)
    job.log.info(
        "coverage done tokens=%s held_out_tokens=%s where=%s report=%s/report.html%s",
        f"{chosen_on.tokens:,}",
        f"{held.tokens:,}",
        store.uri,
        store.uri,
        f" draft_vocab={vocabulary.size} held_out_coverage={_held_out(vocabulary, held)} hash={vocabulary.hash[:12]}"
        if vocabulary
        else "",
    )


def trade_off(
    recipe: Recipe,
    machine: Machine,
    config: dict[str, Any] | None,
    dataset: Dataset,
    found: dict[str, Any],
    counts: TokenCounts,
    choice: dict[str, Any],
    walks: Walks | None,
) -> dict[str, Any] | None:
    """The trade-off for the coverage that was found, as a dict; None where the verifier's shape is not known."""
    name = verifier_of(dataset.contract.vocab_size, dataset.contract.hidden_size)
    if config is not None:
        verifier = Verifier.from_config(config, name or Path(recipe.verifier.model).name)
        drafter = Drafter.from_config(
            config, changed=recipe.drafter.config, features=len(dataset.contract.capture_layers)
        )
    elif name is not None:
        verifier, drafter = VERIFIERS[name], DRAFTERS[name]
    else:
        return None
    shares = found.get("held_out") or found.get("cross_fitted") or found["chosen_on"]
    coverage = {size: share for size, share in zip(found["sizes"], shares, strict=True) if share}
    question = Question(
        verifier,
        drafter,
        machine,
        sizes=tuple(found["sizes"]),
        coverage=coverage,
        taus=recipe.vocab.tau or {3: 2.0},
        assumed_tau=not recipe.vocab.tau,
        ttt_steps=recipe.drafter.ttt_steps,
        training_workers=recipe.training.workers,
    )
    if walks is not None:
        question = with_walks(question, walks, counts, **choice)
    worked_out: Tradeoff = answer(question)
    return worked_out.to_dict()


def wanted_sizes(config: VocabConfig, vocab_size: int, forced: int) -> list[int]:
    """The sizes of the report, ascending: those of the recipe, or the usual ones that hold the forced ids.

    Raises RecipeError for one that is larger than the vocabulary or has no place for the forced ids.
    """
    given = [*(config.sizes or ()), *([config.size] if config.size else [])]
    for size in given:
        job.require(
            forced <= size <= vocab_size,
            f"vocab.sizes: {size:,} ids: expected {max(1, forced):,} (the special tokens, which are forced in) to "
            f"{vocab_size:,} (the verifier's vocabulary)",
        )
    usual = [] if config.sizes else [size for size in default_sizes(vocab_size) if size >= forced]
    return sorted({*given, *usual})


def _counts_files(counts: SideCounts) -> dict[str, bytes]:
    files = {"counts.parquet": counts.folds.total(), "held_out_counts.parquet": counts.held_out}
    files |= {f"counts/fold-{at}.parquet": fold for at, fold in enumerate(counts.folds.folds)}
    return {name: _parquet(part) for name, part in files.items()}


def _held_out(vocabulary: DraftVocab, held: TokenCounts) -> str:
    return percent(vocabulary.coverage(held.total()) if held.tokens else None).replace(" ", "")


def _parquet(counts: TokenCounts) -> bytes:
    sink = io.BytesIO()
    counts.to_parquet(sink)
    return sink.getvalue()


if __name__ == "__main__":
    job.main(job.parser("coverage", __doc__ or ""), run)
