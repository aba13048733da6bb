"""demo: the whole way on one machine, on real input: from prompts to a drafter that speeds up the verifier in SGLang.

prepare, generate, extract, coverage, train, evaluate, serve. `make demo` runs it on SmolLM2-135M with two CPU cores in
minutes. Run it again and it finds most of it done.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from drafter.run import Run
from ray_jobs import coverage, evaluate, extract, generate, job, prepare, serve, train
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
        print(f"\n[{len(seconds) + 1}/7] {name}: {what}", flush=True)
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
    what = "an EAGLE-3 drafter from scratch, by Ray Train, straight from the dataset"
    step("train", what, lambda: train.run(recipe, args))
    what = "its acceptance length on held-out sequences, beside two controls"
    step("evaluate", what, lambda: evaluate.run(recipe, args))
    what = "speculative decoding in SGLang with it; is the output the verifier's own?"
    step("serve", what, lambda: serve.run(recipe, args))
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
    inputs = Inputs(recipe.dataset.inputs_uri).read_summary() or {}
    run_ = Run(recipe.run_uri)
    learnt = run_.summary() or {}
    longest = str(max(recipe.evaluation.draft_lengths))
    walked = json.loads(run_.store.get(evaluate.EVALUATION))["sources"]["all"]["drafters"]
    tau = {name: one["tau"][longest]["tau"] for name, one in walked.items()}
    served = json.loads(run_.store.get(serve.SERVED))["served"]["drafter"]["total"]
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
  training    {learnt["updates"]:,} updates of {recipe.training.workers} workers, held-out loss \
{learnt["loss_before"]:.2f} -> {learnt["loss_after"]:.2f}
  offline     tau({longest}) on held-out sequences: {_tau(tau, evaluate.DRAFTER)} \
(untrained {_tau(tau, evaluate.UNTRAINED)}, shifted d2t {_tau(tau, evaluate.SHIFTED)}; \
at most {_tau(tau, evaluate.CEILING)} on sampled text)
  served      tau({longest}) {served["tau"]:.3f} in SGLang (offline, same text: {served["offline_tau"]:.3f}); \
{served["identical"]} of {served["responses"]} outputs are the verifier's own, {served["accepted"]} drafts accepted
  sequence 0  {states.hidden.shape[0]} tokens, hidden {list(states.hidden.shape)} bf16
              {text[:90]!r}...

Where things are
  {uri}  the dataset (Zarr v3, sealed, fingerprint {seal.fingerprint[:12]})
  {open_store(recipe.dataset.inputs_uri).uri}  prompts and responses
  {open_store(recipe.vocab_uri).uri}  coverage.json, token counts, d2t/t2d
  {run_.uri}  the run: drafter/ (for SGLang), checkpoints, metrics.jsonl, evaluation.json and .svg, serve.json

Try next
  .venv/bin/statehouse info {uri}
  .venv/bin/statehouse head {uri} --tokenizer {folder}
  .venv/bin/python -m ray_jobs.extract recipes/kimi_k25.yaml --plan
  .venv/bin/python -m ray_jobs.train {recipe_path} dataset.uri={uri} training.run=longer training.epochs=20
  .venv/bin/python -m ray_jobs.serve {recipe_path} dataset.uri={uri} --controls"""
    )


def _tau(found: dict[str, float | None], name: str) -> str:
    value = found.get(name)
    return "-" if value is None else f"{value:.3f}"


def load_vocabulary(recipe: Recipe) -> tuple[DraftVocab, TokenCounts]:
    """The draft vocabulary that `coverage` saved, and the held-out counts."""
    store = open_store(recipe.vocab_uri)
    parts = {name: store.get(name) for name in (TENSORS, HEADER)}
    return DraftVocab.from_bytes(parts, store.uri), TokenCounts.from_parquet(store.get("held_out_counts.parquet"))


if __name__ == "__main__":
    arguments = job.parser("demo", __doc__ or "")
    arguments.set_defaults(repair=False, retry_quarantined=False, shards=None, fresh=False, controls=False)
    job.main(arguments, run)
