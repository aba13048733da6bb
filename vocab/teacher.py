"""Coverage of what the verifier would say, not of what the text says: its argmax, and its probability mass.

For datasets that hold a teacher summary (`storage.teacher`): the likeliest id after each token and the log-sum-exp over
the whole vocabulary, or the top-k ids and logits too. The mass needs the top-k. A dataset without a summary has no such
coverage, and none is made up for it. Both are sums, so any number of workers can count any part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocab.errors import VocabError


@dataclass(frozen=True, eq=False)
class TeacherCounts:
    """What the verifier would say on loss-bearing positions, summed by side of a Split; add them up with `+`.

    argmax: [sides, vocab] int64, how often an id is the likeliest. mass: [sides, vocab] float64, probability of an id, over
    the positions that have a top-k. rest: [sides] float64, what lies outside the top-k there. masses: [sides] int64, how
    many such positions there are.
    """

    argmax: NDArray[np.int64]
    mass: NDArray[np.float64]
    rest: NDArray[np.float64]
    masses: NDArray[np.int64]

    @classmethod
    def empty(cls, sides: int, vocab_size: int) -> TeacherCounts:
        shape = (sides, vocab_size)
        return cls(np.zeros(shape, np.int64), np.zeros(shape), np.zeros(sides), np.zeros(sides, np.int64))

    def __add__(self, other: TeacherCounts) -> TeacherCounts:
        return TeacherCounts(
            self.argmax + other.argmax, self.mass + other.mass, self.rest + other.rest, self.masses + other.masses
        )

    def add(
        self,
        side: int,
        loss_mask: np.ndarray,
        argmax: np.ndarray,
        logsumexp: np.ndarray,
        topk_ids: np.ndarray | None = None,
        topk_logits: np.ndarray | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Count one sequence, or some end to end. loss_mask: [T] bool. The others: [T] or [T, k], row t speaks of token
        t + 1. lengths: of the sequences, with sum T. Many at once are quicker: each call adds up the whole vocabulary.

        A row counts where the token it speaks of bears loss; rows that say nothing (id -1, a quarantined sequence's) do
        not. Raises VocabError for shapes that do not fit and ids outside the vocabulary.
        """
        vocab_size = self.argmax.shape[1]
        ids, norm = np.asarray(argmax), np.asarray(logsumexp, float)
        mask = np.asarray(loss_mask, np.bool_)
        if ids.ndim != 1 or not ids.shape == norm.shape == mask.shape:
            raise VocabError(f"teacher: expected three of [T], found {[list(a.shape) for a in (ids, norm, mask)]}")
        counted = np.append(mask[1:], False) & (ids >= 0)
        if lengths is not None:
            counted[np.cumsum(lengths) - 1] = False  # the last row of each speaks of no token
        kept = ids[counted]
        if kept.size and int(kept.max()) >= vocab_size:
            raise VocabError(f"teacher: likeliest id {int(kept.max())} is outside the vocabulary of {vocab_size}")
        self.argmax[side] += np.bincount(kept, minlength=vocab_size)
        if topk_ids is None or topk_logits is None:
            return
        top, logits = np.asarray(topk_ids)[counted], np.asarray(topk_logits, float)[counted]
        if top.shape != logits.shape or top.ndim != 2:
            raise VocabError(f"teacher: expected top-k ids and logits [T, k], found {top.shape} and {logits.shape}")
        if top.size and not 0 <= int(top.min()) <= int(top.max()) < vocab_size:
            raise VocabError(f"teacher: a top-k id is outside the vocabulary of {vocab_size}")
        probability = np.exp(logits - norm[counted, None])
        self.mass[side] += np.bincount(top.reshape(-1), weights=probability.reshape(-1), minlength=vocab_size)
        self.rest[side] += float(np.clip(1 - probability.sum(axis=1), 0, 1).sum())
        self.masses[side] += kept.size


def teacher_coverage(counts: TeacherCounts, tables: np.ndarray, sizes: int) -> dict[str, Any] | None:
    """Coverage of the likeliest ids and of the probability mass at every size, each side judged by its own table.

    tables: [sides, vocab] uint8 of `vocab.counting.side_tables`; the last side is the held-out one. Returns `{positions,
    argmax, mass, held_out}` with lists over the sizes and mass as `{low, high}` (outside the top-k nobody knows), None
    where nothing was counted; None in all when there is no summary.
    """
    if not counts.argmax.any():
        return None

    def of(sides: slice) -> dict[str, Any] | None:
        hits, inside = np.zeros(sizes + 1), np.zeros(sizes + 1)
        for table, argmax, mass in zip(tables[sides], counts.argmax[sides], counts.mass[sides], strict=True):
            hits += np.bincount(table, weights=argmax, minlength=sizes + 1)
            inside += np.bincount(table, weights=mass, minlength=sizes + 1)
        total, masses, rest = hits.sum(), int(counts.masses[sides].sum()), counts.rest[sides].sum()
        if not total:
            return None
        low = np.cumsum(inside)[:-1] / masses if masses else None
        return {
            "positions": int(total),
            "argmax": (np.cumsum(hits)[:-1] / total).tolist(),
            "mass": None if low is None else {"low": low.tolist(), "high": np.minimum(low + rest / masses, 1).tolist()},
        }

    folds, held_out = of(slice(None, -1)), of(slice(-1, None))
    nothing: dict[str, Any] = {"positions": 0, "argmax": None, "mass": None}
    return {**(folds or nothing), "held_out": held_out}
