"""A finished run on the tiny verifier, made in this process by the jobs' own code: dataset, draft vocabulary, drafter."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml

from drafter.config import DrafterConfig
from drafter.initial import new_drafter
from drafter.loss import ttt_loss
from drafter.model import Drafter
from drafter.run import Run
from drafter.sources import Request, open_sources
from drafter.verifier_head import VerifierHead
from drafter.verifier_weights import read_verifier_weights
from ray_jobs import extract, generate, job
from ray_jobs.inputs import Inputs, compose_sequences, inputs_hash, open_verifier
from ray_jobs.policies import Outcome
from ray_jobs.prompt_files import fingerprints, input_files
from ray_jobs.prompts import PROMPTS_SCHEMA, Limits, load_tokenizer, prepare_file
from ray_jobs.recipe import Recipe, load_recipe
from ray_jobs.worker import ReplicaActor
from storage import open_dataset
from storage.spool import SequenceSpool
from vocab.mapping import DraftVocab

SIZE, STEPS = 300, 3
ARGUMENTS = argparse.Namespace(repair=False, shards=None, controls=False)


def prepare(path: Path) -> None:
    """What the prepare job does, in this process."""
    recipe = load_recipe(path)
    verifier = open_verifier(recipe)
    limits = Limits(verifier.facts["vocab_size"], recipe.dataset.max_length)
    tokenizer = load_tokenizer(verifier.folder)
    files = input_files(recipe)
    rows = [row for f in files for row in prepare_file(f, tokenizer, limits)]
    rows.sort(key=lambda row: row["id"])
    Inputs(recipe.dataset.inputs_uri).write_prompts(
        pa.Table.from_pylist(rows, schema=PROMPTS_SCHEMA),
        {"inputs_hash": inputs_hash(recipe, verifier), "files": fingerprints(recipe)},
    )


def composed(prompts: pa.Table, responses: Any, uri: str) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The sequences that `extract` would plan, as rows, and their counts."""
    with SequenceSpool() as spool:
        found, counts = compose_sequences(spool, prompts, responses, uri)
        rows = [
            {"id": key, "token_ids": ids.tolist(), "loss_mask": mask.tolist()}
            for key, (ids, mask) in zip(found.table["id"].to_pylist(), map(found.row, range(len(found))), strict=True)
        ]
    return rows, counts


def write_recipe(folder: Path, verifier: Path, rows: dict[str, list[dict[str, Any]]], **sections: Any) -> Path:
    for source, lines in rows.items():
        (folder / f"{source}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = {
        "name": "tiny",
        "verifier": {"model": str(verifier)},
        "prompts": [{"path": str(folder / f"{source}.jsonl")} for source in rows],
        "generation": {"temperature": 0, "max_new_tokens": 24, "batch_size": 40},
        "dataset": {"uri": str(folder / "dataset"), "max_length": 160, "shard_tokens": 2048},
        "extraction": {"replica": {"engine": "transformers", "dtype": "float32"}, "self_check": 0},
        "evaluation": {"held_out": 0.4, "draft_lengths": [1, 3]},
        "vocab": {"size": SIZE},
        **sections,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    prepare(path)
    return path


class InProcess:
    """A supervisor without Ray: the actor's methods are called here."""

    def __init__(self, recipe: Recipe) -> None:
        self.actor = ReplicaActor(recipe, open_verifier(recipe).capture_layers)

    def counts(self) -> dict[str, int]:
        return {}

    def run(self, method: str, units: Any, done: Callable[[Any, Any], None], _waiting: Any, *_: Any) -> None:
        for unit in units:
            result = getattr(self.actor, method)(unit)
            done(unit, result.value if isinstance(result, Outcome) else result)


@dataclass
class TinyRun:
    """path: of the recipe. The drafter is fitted to every sequence, the held-out ones too: it is only to be good."""

    path: Path
    recipe: Recipe
    verifier: Path

    @property
    def run(self) -> Run:
        return Run(self.recipe.run_uri)

    def changed(self, *overrides: str) -> Recipe:
        return load_recipe(self.path, list(overrides))


def make_dataset(path: Path, monkeypatch: Any) -> Recipe:
    """Answers the prepared prompts of the recipe and extracts them."""
    recipe = load_recipe(path)
    monkeypatch.setattr(job, "start_ray", lambda: None)
    replicas: Any = InProcess(recipe)
    generate.run(recipe, ARGUMENTS, replicas)
    extract.run(recipe, ARGUMENTS, replicas)
    return recipe


# "given": nobody knows who wrote these answers.
ROWS: dict[str, list[dict[str, Any]]] = {
    "numbers": [{"prompt": f"Say the number {n}."} for n in range(12)],
    "colours": [{"prompt": f"Name {n} colours."} for n in range(12)],
    "given": [{"prompt": f"Question {n}?", "response": f"Answer {n} and some more words."} for n in range(8)],
}


def make_run(path: Path, verifier: Path, monkeypatch: Any) -> TinyRun:
    """Everything up to a finished drafter."""
    recipe = make_dataset(path, monkeypatch)
    dataset = open_dataset(recipe.dataset.uri)
    counts = np.zeros(dataset.contract.vocab_size, np.int64)
    for row in range(len(dataset)):
        token_ids, mask = dataset.tokens(row)
        counts += np.bincount(token_ids[mask], minlength=len(counts))
    vocabulary = DraftVocab.from_counts(counts, SIZE)
    vocabulary.save(recipe.dataset.vocab_uri)
    finish(recipe, verifier, fit(recipe, verifier, vocabulary))
    return TinyRun(path, recipe, verifier)


def finish(recipe: Recipe, verifier: Path, drafter: Drafter) -> None:
    """Puts the drafter where the recipe's run has its own."""
    request = Request(
        recipe.dataset.uri,
        recipe.dataset.vocab_uri,
        recipe.run_uri,
        str(verifier),
        recipe.drafter,
        recipe.training,
        recipe.evaluation.held_out,
        recipe.evaluation.seed,
    )
    run = Run(recipe.run_uri)
    run.claim(open_sources(request).identity(request), {})
    run.put_drafter(drafter)


def fit(recipe: Recipe, verifier: Path, vocabulary: DraftVocab, updates: int = 40) -> Drafter:
    """A drafter that knows these sequences nearly by heart, as far as the draft vocabulary goes."""
    dataset = open_dataset(recipe.dataset.uri)
    weights = read_verifier_weights(verifier)
    config = DrafterConfig.from_verifier(weights.config, vocabulary.size, dataset.contract.capture_layers)
    drafter = new_drafter(config, vocabulary, weights, recipe.drafter, 0).float()
    head = VerifierHead(weights.lm_head_VD.float(), vocabulary)
    states = dataset.read_many(range(len(dataset)))
    ids = torch.from_numpy(np.concatenate([one.token_ids for one in states])).long()
    mask = torch.from_numpy(np.concatenate([one.loss_mask for one in states]))
    hidden = torch.cat([one.torch() for one in states]).float()
    batch = (ids, mask, hidden[:, :-1].flatten(1), hidden[:, -1], [len(one.token_ids) for one in states])
    best = head.argmax(batch[3])
    optimizer = torch.optim.Adam([one for one in drafter.parameters() if one.requires_grad], lr=5e-3)
    for _ in range(updates):
        optimizer.zero_grad()
        ttt_loss(drafter, head, *batch, steps=STEPS, argmax_T=best).loss.backward()
        optimizer.step()
    return drafter
