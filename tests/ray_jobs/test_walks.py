"""evaluate keeps the rounds of a drafter with the whole vocabulary, and the trade-off reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from restricting import run_over
from tiny_run import ARGUMENTS, TinyRun

from drafter.run import EVALUATION, WALKS, Run
from drafter.verifier_weights import read_verifier_weights
from ray_jobs import evaluate
from ray_jobs.evaluate import DRAFTER
from storage import open_dataset
from vocab.__main__ import main
from vocab.acceptance_model import load_walks
from vocab.counts import TokenCounts, count_by_source
from vocab.mapping import DraftVocab

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def whole(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny run's drafter over all 49,152 ids."""
    vocab_size = open_dataset(tiny_run.recipe.dataset.uri).contract.vocab_size
    weights = read_verifier_weights(tiny_run.verifier)
    made = run_over(tiny_run.run, "whole", DraftVocab.full(vocab_size), weights, tmp_path_factory.mktemp("scratch"))
    evaluate.run(tiny_run.changed("training.run=whole"), ARGUMENTS)
    return made


def test_walks_are_the_rounds_that_tau_was_measured_on(whole: Run) -> None:
    walks = load_walks(f"{whole.uri}/{WALKS}")
    found = json.loads(whole.store.get(EVALUATION))["sources"]["all"]["drafters"][DRAFTER]["tau"]["3"]
    assert walks.k == 3
    assert (walks.matched.size, int(walks.matched.sum())) == (found["verifies"], found["accepted"])
    assert walks.tau() == pytest.approx(found["tau"], abs=1e-6)
    assert walks.tau() > 1.3


def test_the_trade_off_takes_its_tau_from_the_walks(whole: Run, tiny_run: TinyRun, tmp_path: Path) -> None:
    dataset = open_dataset(tiny_run.recipe.dataset.uri)
    total = TokenCounts.empty(dataset.contract.vocab_size)
    for row in range(len(dataset)):
        ids, mask = dataset.tokens(row)
        total += count_by_source(ids, mask, [len(ids)], ["all"], total.vocab_size)
    total.to_parquet(tmp_path / "counts.parquet")
    out = tmp_path / "out.json"
    files = ["--walks", f"{whole.uri}/{WALKS}", "--counts", str(tmp_path / "counts.parquet"), "--json", str(out)]
    config = ["--verifier-config", str(tiny_run.verifier / "config.json"), "--sizes", "100,300"]
    assert main(["tradeoff", *config, *files]) == 0
    found = json.loads(out.read_text())
    walks = load_walks(f"{whole.uri}/{WALKS}")
    assert found["taus_full"]["3"] == pytest.approx(walks.tau())
    taus = [row["tau"]["3"]["none"] for row in found["sizes"]]
    assert 1 < taus[0] < taus[1] <= taus[2] == pytest.approx(walks.tau())


def test_a_drafter_of_a_smaller_vocabulary_leaves_no_walks(tiny_run: TinyRun) -> None:
    tiny_run.run.store.put(WALKS, b"of an earlier evaluation")
    evaluate.run(tiny_run.recipe, ARGUMENTS)
    assert WALKS not in tiny_run.run.store.sizes()
