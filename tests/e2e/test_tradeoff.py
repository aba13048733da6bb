"""What the trade-off says a smaller draft vocabulary costs, against a trained drafter that is really restricted to it.

SmolLM2 writes the responses, an EAGLE-3 drafter over all 49,152 ids is trained on some of them for a few minutes, and is
walked on the held-out ones, whole and with its head cut to each smaller vocabulary. The fit sees one half of the held-out
sequences and is judged by the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from restricting import run_over

from drafter.acceptance import Tally
from drafter.run import WALKS, Run
from drafter.verifier_weights import read_verifier_weights
from ray_jobs.evaluate import DRAFTER, Measured, measure
from ray_jobs.inputs import Inputs, open_verifier
from ray_jobs.measuring import held_out_sequences
from ray_jobs.recipe import Recipe, load_recipe
from ray_jobs.verifier import resolve_verifier
from storage import open_dataset
from storage.objects import open_store
from vocab.acceptance_model import AcceptanceModel, Walks, bracket, chain_from_tau, join_walks, load_walks
from vocab.counts import TokenCounts
from vocab.mapping import DraftVocab

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.ray, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parent.parent.parent
K = 3
SIZES = (16384, 4096, 1024, 256)


def python(*arguments: str, seconds: float = 1200) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def overrides(uri: Path) -> list[str]:
    return [
        *(f"prompts.{source}.limit=32" for source in range(5)),
        f"dataset.uri={uri}",
        "generation.max_new_tokens=80",
        "generation.batch_size=80",
        "extraction.replicas=1",
        "extraction.replica.threads=1",  # two collapse on busy cores
        "vocab.size=49152",
        "evaluation.held_out=0.35",
        "training.run=whole",
    ]


def test_the_fitted_trade_off_is_within_three_percent_of_a_drafter_that_is_really_restricted(tmp_path: Path) -> None:
    uri = tmp_path / "smollm2"
    given = overrides(uri)
    for job in ("prepare", "generate", "extract", "coverage"):
        python("-m", f"ray_jobs.{job}", "recipes/smollm2.yaml", *given)
    verifier = resolve_verifier("bundled:smollm2-135m-instruct")
    python(
        "-m", "drafter.train", "--dataset", str(uri), "--draft-vocab", f"{uri}-vocab", "--run", f"{uri}-runs/whole",
        "--verifier", str(verifier), "drafter.lm_head=frozen", "drafter.ttt_steps=3", "training.lr=2e-3",
        "training.epochs=3", "training.global_batch_tokens=1024", "training.micro_batch_tokens=1024",
        "training.dtype=float32", "evaluation.held_out=0.35",
    )  # fmt: skip
    python("-m", "ray_jobs.evaluate", "recipes/smollm2.yaml", *given)
    judge(load_recipe(ROOT / "recipes" / "smollm2.yaml", given), tmp_path)

    # And the command that a user gives.
    walks, counts, out = f"{uri}-runs/whole/{WALKS}", f"{uri}-vocab/counts.parquet", tmp_path / "out.json"
    python(
        "-m", "vocab", "tradeoff", "--verifier-config", str(verifier / "config.json"), "--sizes", "1024,4096",
        "--walks", walks, "--counts", counts, "--json", str(out),
    )  # fmt: skip
    assert json.loads(out.read_text())["taus_full"][str(K)] == pytest.approx(load_walks(walks).tau())


def judge(recipe: Recipe, scratch: Path) -> list[str]:
    """Asserts it for each size; returns what was found, a line a size."""
    dataset, whole = open_dataset(recipe.dataset.uri), Run(recipe.run_uri)
    prompts = Inputs(recipe.dataset.inputs_uri).read_prompts(recipe, open_verifier(recipe), "evaluate")
    rows = held_out_sequences(dataset, prompts, recipe.evaluation).rows.tolist()
    halves = (rows[0::2], rows[1::2])
    counts = TokenCounts.from_parquet(open_store(recipe.dataset.vocab_uri).get("counts.parquet")).total()
    weights = read_verifier_weights(resolve_verifier(recipe.verifier.model))
    walks = [walks_of_all(measure(recipe, half)) for half in halves]
    models = [AcceptanceModel.fit(one, counts) for one in walks]
    found = []
    for size in SIZES:
        vocabulary = DraftVocab.from_counts(counts, size)
        run_over(whole, f"cut-{size}", vocabulary, weights, scratch / "drafter")
        cut = recipe.model_copy(
            update={"training": recipe.training.model_copy(update={"run": f"cut-{size}"})}
        )  # another run of the same recipe
        truth = [tau_of_all(measure(cut, half)) for half in halves]
        # What the fit on the other half says this vocabulary keeps of the gain that was measured on this one.
        predicted = [
            1 + (one.tau() - 1) * (model.tau(vocabulary.t2d, K, counts=counts) - 1) / (model.tau_full(K) - 1)
            for one, model in zip(walks, reversed(models), strict=True)
        ]
        # And with the level of the whole drafter taken from the other half too: this half is not looked at.
        unseen = [model.tau(vocabulary.t2d, K, counts=counts) for model in reversed(models)]
        everything = join_walks(walks)
        chain = chain_from_tau({k: everything.tau(k) for k in range(1, K + 1)}, K)
        inside = np.concatenate([dataset.tokens(row)[0][dataset.tokens(row)[1]] for row in rows])
        bounds = bracket(chain, float(vocabulary.t2d[inside].mean()), K)
        found.append(
            f"{size}: coverage {vocabulary.t2d[inside].mean():.3f} whole {[round(one.tau(), 3) for one in walks]} "
            f"truth {np.round(truth, 3).tolist()} predicted {np.round(predicted, 3).tolist()} "
            f"unseen {np.round(unseen, 3).tolist()} bracket {bounds.average:.3f}-{bounds.none:.3f}"
        )
        print(found[-1])
        assert predicted == pytest.approx(truth, rel=0.03), found[-1]
        passes = [one.matched.size for one in walks]
        assert np.average(unseen, weights=passes) == pytest.approx(np.average(truth, weights=passes), rel=0.03)
    return found


def walks_of_all(measured: Sequence[Measured]) -> Walks:
    return join_walks([one.walks for one in measured if one.walks is not None])


def tau_of_all(measured: Sequence[Measured]) -> float:
    return sum((one.tallies[DRAFTER][K] for one in measured), Tally.zero(K)).tau
