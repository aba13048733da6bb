"""A question whose tau comes from a full-vocabulary drafter's walks, instead of a bracket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vocab.acceptance_model import AcceptanceModel, Walks
from vocab.counts import TokenCounts
from vocab.policies import choose
from vocab.tradeoff import Question


def with_walks(
    question: Question,
    walks: Walks,
    counts: TokenCounts,
    *,
    policy: str = "frequency",
    force_ids: Sequence[int] | np.ndarray = (),
    listed: Sequence[int] | np.ndarray = (),
) -> Question:
    """The question with draft lengths 1 to the walks' own, their measured tau, and a fitted one for every size.

    counts: what the draft vocabularies are chosen on, by `policy`; it also weighs the ids inside a bin of the fit.
    Raises VocabError when walks and counts are of different vocabularies.
    """
    model = AcceptanceModel.fit(walks, counts.total())
    lengths = tuple(range(1, walks.k + 1))
    forced = len(np.unique(np.asarray(force_ids, np.int64)))
    taus: dict[int, dict[int, float]] = {}
    for size in question.sizes:
        if size >= max(1, forced):
            t2d = choose(policy, counts, size, force_ids=force_ids, listed=listed).t2d
            # What a restricted drafter keeps of the whole one's gain, so that the fit's own error cancels.
            kept = [(model.tau(t2d, k, counts=counts.total()) - 1) / max(model.tau_full(k) - 1, 1e-12) for k in lengths]
            taus[size] = {k: 1 + (walks.tau(k) - 1) * min(1.0, part) for k, part in zip(lengths, kept, strict=True)}
    return replace(
        question, draft_lengths=lengths, taus={k: walks.tau(k) for k in lengths}, assumed_tau=False, fitted=taus
    )
