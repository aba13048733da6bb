"""Coverage of what the verifier would say, not of what the text says: its argmax, and its probability mass.

For datasets that hold a teacher summary: the argmax id of each position, or its top-k ids and logits with the
log-sum-exp over the whole vocabulary. Pure functions; a dataset without a summary has no such coverage, and none is
made up for it.
"""

from __future__ import annotations

import numpy as np

from vocab.errors import VocabError


def argmax_coverage(argmax: np.ndarray, loss_mask: np.ndarray | None, t2d: np.ndarray) -> float:
    """Share of positions whose verifier argmax is in the draft vocabulary: what a greedy verifier can accept at all.

    argmax: [N] integers. loss_mask: [N] bool or None. t2d: [vocab] bool. Raises VocabError when nothing counts.
    """
    ids = np.asarray(argmax)
    ids = ids if loss_mask is None else ids[np.asarray(loss_mask, np.bool_)]
    if ids.size == 0:
        raise VocabError("argmax coverage: no loss-bearing positions")
    if int(ids.min()) < 0 or int(ids.max()) >= t2d.size:
        raise VocabError(
            f"argmax coverage: ids from {int(ids.min())} to {int(ids.max())}, the vocabulary has {t2d.size}"
        )
    return float(np.asarray(t2d, np.bool_)[ids].mean())


def mass_coverage(
    top_ids: np.ndarray, top_logits: np.ndarray, logsumexp: np.ndarray, t2d: np.ndarray
) -> tuple[float, float]:
    """Bounds (low, high) of the mean probability that the verifier gives to the draft vocabulary.

    top_ids, top_logits: [N, k], the k likeliest ids and their logits. logsumexp: [N] over the whole vocabulary. What lies
    outside the top k may be all outside (low) or all inside (high). Raises VocabError for shapes that do not fit.
    """
    ids, logits, norm = np.asarray(top_ids), np.asarray(top_logits, float), np.asarray(logsumexp, float)
    if ids.ndim != 2 or ids.shape != logits.shape or norm.shape != ids.shape[:1] or ids.size == 0:
        raise VocabError(
            f"mass coverage: expected [N, k], [N, k] and [N], found {list(ids.shape)}, {list(logits.shape)}, {list(norm.shape)}"
        )
    probability = np.exp(logits - norm[:, None])
    inside = np.asarray(t2d, np.bool_)[ids]
    low = (probability * inside).sum(axis=1)
    rest = np.clip(1 - probability.sum(axis=1), 0, 1)
    return float(low.mean()), float(np.minimum(low + rest, 1).mean())
