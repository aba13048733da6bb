"""demo: the whole way on one machine, on real input: prepare, generate, extract, coverage, and one sequence read back.

`make demo` runs it on SmolLM2-135M with two CPU cores in minutes. Run it again and it finds everything done.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from ray_jobs import coverage, extract, generate, job, prepare
from ray_jobs.inputs import Inputs, open_verifier
from ray_jobs.prompts import load_tokenizer
from ray_jobs.recipe import Recipe
from ray_jobs.verifier import resolve_verifier
from ray_jobs.worker import replicas_of
from storage import open_dataset
from storage.objects import open_store
from vocab.counts import TokenCounts
from vocab.coverage import percent
from vocab.mapping import HEADER, TENSORS, DraftVocab


def run(recipe: Recipe, args: argparse.Namespace) -> None:
    began = time.monotonic()
    seconds: dict[str, float] = {}

    def step(name: str, what: str, work: Callable[[], None]) -> None:
        print(f"\n[{len(seconds) + 1}/4] {name}: {what}", flush=True)
        step_began = time.monotonic()
        work()
        seconds[name] = time.monotonic() - step_began

    what = "prompts -> token ids, with the verifier's chat template"
    step("prepare", what, lambda: prepare.run(recipe, args))
    job.start_ray()
    with replicas_of(recipe, open_verifier(recipe)) as replicas:  # one start of the engines for both jobs
        what = "the verifier answers them (on-policy), in SGLang inside Ray actors"
        step("generate", what, lambda: generate.run(recipe, args, replicas))
        what = "the verifier's hidden states -> a sealed Zarr dataset"
        step("extract", what, lambda: extract.run(recipe, args, replicas))
    what = "which draft vocabulary would cover these tokens, counted by Ray Data"
    step("coverage", what, lambda: coverage.run(recipe, args))
    summarise(recipe, args.recipe, seconds, time.monotonic() - began)


def summarise(recipe: Recipe, recipe_path: str, seconds: dict[str, float], total: float) -> None:
    dataset = open_dataset(recipe.dataset.uri)
    seal = dataset.seal
    assert seal is not None
    uri = dataset.uri
    vocabulary, held = load_vocabulary(recipe)
    states = dataset.read(0)
    folder = resolve_verifier(recipe.verifier.model, revision=recipe.verifier.revision)
    text = load_tokenizer(str(folder), recipe.verifier.trust_remote_code).decode(states.token_ids[states.loss_mask])
    rms = np.sqrt((states.hidden.astype(np.float32) ** 2).mean((0, 2)))
    inputs = Inputs(recipe.dataset.inputs_uri).read_summary() or {}
    times = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    print(
        f"""
Done in {total:.0f} s ({times}).

  verifier    {recipe.verifier.model}, layers {list(dataset.contract.capture_layers)} and the final state, \
hidden size {dataset.contract.hidden_size}
  prompts     {inputs.get("prompts", 0):,} of {len(inputs.get("sources", {}))} sources
  dataset     {seal.sequences:,} sequences, {seal.tokens:,} tokens, {seal.loss_tokens:,} of them generated
  stored      {seal.stored_bytes / 1e6:,.1f} MB for {seal.raw_bytes / 1e6:,.1f} MB of bf16: \
{seal.raw_bytes / seal.stored_bytes:.3f}x, lossless
  vocabulary  {vocabulary.size:,} of {vocabulary.vocab_size:,} ids cover \
{percent(vocabulary.coverage(held.total()) if held.tokens else None)} of {held.tokens:,} held-out tokens
  sequence 0  {states.hidden.shape[0]} tokens, hidden {list(states.hidden.shape)} bf16, rms by layer \
{", ".join(f"{value:.1f}" for value in rms)}
              {text[:90]!r}...

Where things are
  {uri}  the dataset (Zarr v3, sealed, fingerprint {seal.fingerprint[:12]})
  {recipe.dataset.inputs_uri}  prompts and responses
  {recipe.dataset.vocab_uri}  coverage.json, token counts, d2t/t2d

Try next
  .venv/bin/statehouse info {uri}
  .venv/bin/statehouse head {uri} --tokenizer {folder}
  .venv/bin/python -m ray_jobs.extract recipes/kimi_k25.yaml --plan
  .venv/bin/python -m ray_jobs.extract {recipe_path} dataset.uri={uri}   # finds everything done"""
    )


def load_vocabulary(recipe: Recipe) -> tuple[DraftVocab, TokenCounts]:
    """The draft vocabulary that `coverage` saved, and the held-out counts."""
    store = open_store(recipe.dataset.vocab_uri)
    parts = {name: store.get(name) for name in (TENSORS, HEADER)}
    return DraftVocab.from_bytes(parts, store.uri), TokenCounts.from_parquet(store.get("held_out_counts.parquet"))


if __name__ == "__main__":
    arguments = job.parser("demo", __doc__ or "")
    arguments.set_defaults(repair=False)
    job.main(arguments, run)
