"""The fit against walks that were really walked: a trained drafter on real text, restricted to smaller vocabularies.

The text is the source of Python's standard library, the drafter a back-off trigram model that drafts from its own
drafts. It is no neural network, but it shares none of the fit's assumptions: its hits depend on contexts, not on bins,
and a restricted one really proposes its next best id (so it is rescued where its first choice was outside).
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from vocab.acceptance_model import AcceptanceModel, Walks, bracket, chain_from_tau, join_walks, walks_of
from vocab.mapping import DraftVocab

K = 4


class Trigram:
    """Next ids by count after two, one or no tokens; the first allowed one is proposed."""

    def __init__(self, texts: list[np.ndarray]) -> None:
        seen: list[dict[tuple[int, ...], Counter[int]]] = [defaultdict(Counter) for _ in range(3)]
        for ids in texts:
            row = ids.tolist()
            for at in range(2, len(row)):
                for order in range(3):
                    seen[order][tuple(row[at - order : at])][row[at]] += 1
        self.next = [{key: [i for i, _ in one.most_common(64)] for key, one in level.items()} for level in seen]

    def propose(self, context: tuple[int, int], allowed: list[bool]) -> int:
        for order in (2, 1, 0):
            for candidate in self.next[order].get(context[2 - order :], ()):
                if allowed[candidate]:
                    return candidate
        return allowed.index(True)

    def walks(self, ids: np.ndarray, t2d: np.ndarray) -> Walks:
        row, accepted, allowed = ids.tolist(), np.full(ids.size, -1), t2d.tolist()
        for at in range(1, len(row) - 1):
            context, kept = (row[at - 1], row[at]), 0
            while kept < K and at + 1 + kept < len(row):
                draft = self.propose(context, allowed)
                if draft != row[at + 1 + kept]:
                    break
                context, kept = (context[1], draft), kept + 1
            accepted[at] = kept
        found = walks_of(accepted, ids, np.arange(ids.size) >= 1, K)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def texts() -> tuple[list[np.ndarray], int]:
    """Files as ids, and the number of ids."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:56]
    words = [re.findall(r"\w+|[^\w\s]|\n +", path.read_text(errors="replace"))[:1500] for path in files]
    index: dict[str, int] = {}
    return [np.array([index.setdefault(word, len(index)) for word in one]) for one in words if len(one) > 300], len(
        index
    )


def test_predicted_tau_is_within_three_percent_of_walked_tau(texts: tuple[list[np.ndarray], int]) -> None:
    """Two halves, each predicted by a fit on the other: together in tau, each alone in what is left of the whole's."""
    rows, vocab = texts
    train, halves = rows[0::2], (rows[1::4], rows[3::4])
    drafter, whole = Trigram(train), np.ones(vocab, bool)
    counts = np.bincount(np.concatenate(train), minlength=vocab)
    full = [join_walks([drafter.walks(ids, whole) for ids in half]) for half in halves]
    models = [AcceptanceModel.fit(walks, counts) for walks in reversed(full)]
    for size in (vocab, vocab // 2, vocab // 8, vocab // 32):
        t2d = DraftVocab.from_counts(counts, size).t2d
        walked = [join_walks([drafter.walks(ids, t2d) for ids in half]) for half in halves]
        predicted = [model.tau(t2d, K, counts=counts) for model in models]
        truth = join_walks(walked).tau()
        assert np.average(predicted, weights=[one.matched.size for one in walked]) == pytest.approx(truth, rel=0.03), (
            size
        )
        for model, tau, one, before in zip(models, predicted, walked, full, strict=True):
            assert tau / model.tau_full(K) == pytest.approx(one.tau() / before.tau(), rel=0.03), size
        of_judged = np.bincount(np.concatenate([ids for half in halves for ids in half]), minlength=vocab)
        everything = join_walks(full)
        chain = chain_from_tau({k: everything.tau(k) for k in range(1, K + 1)}, K)
        bounds = bracket(chain, float(of_judged[t2d].sum() / of_judged.sum()), K)
        assert bounds.average - 0.01 <= truth <= bounds.none + 0.01, size
