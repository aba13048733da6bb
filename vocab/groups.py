"""Coverage of every prompt group and of every stretch of a response, in one pass over the tokens.

Ids are looked up in a small table that says at which of the wanted sizes an id enters the draft vocabulary ("band"); a
group's tokens are counted by band, and a cumulative sum over bands gives its covered tokens at every size at once. With
cross-fitting each fold of groups has a table of its own, made from the other folds' counts, so that every token is
judged by a vocabulary that was not chosen on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vocab.coverage import check_size
from vocab.errors import VocabError

# Positions in the response are kept by powers of two: 0, 1, 2-3, 4-7, ... up to 2^20 and after.
POSITION_BANDS = 22


def bands(order: np.ndarray, sizes: Sequence[int]) -> NDArray[np.uint8]:
    """The index of the smallest of `sizes` that holds an id, len(sizes) where none does: [vocab] uint8.

    order: [vocab] int64, ids in the order they enter. sizes: ascending, at most 254 of them.
    """
    wanted = [check_size(size, order.size) for size in sizes]
    if wanted != sorted(set(wanted)) or len(wanted) > 254:
        raise VocabError(f"sizes: expected at most 254 ascending sizes, found {list(sizes)}")
    table = np.full(order.size, len(wanted), np.uint8)
    start = 0
    for band, size in enumerate(wanted):
        table[order[start:size]] = band
        start = size
    return table


@dataclass(eq=False)
class GroupCoverage:
    """Tokens by group and band, and by position in the response and band.

    counts: [units, S + 1] int64, one row a unit (a pair of group and source, say). positions: [POSITION_BANDS, S + 1].
    The last column holds tokens that no size covers.
    """

    counts: NDArray[np.int64]
    positions: NDArray[np.int64]

    @classmethod
    def empty(cls, units: int, sizes: int) -> GroupCoverage:
        return cls(np.zeros((units, sizes + 1), np.int64), np.zeros((POSITION_BANDS, sizes + 1), np.int64))

    def add(
        self,
        token_ids: np.ndarray,
        loss_mask: np.ndarray,
        lengths: np.ndarray,
        units: np.ndarray,
        tables: np.ndarray,
        table_of: np.ndarray,
    ) -> None:
        """Count S sequences that lie end to end.

        token_ids: [N] integers in range. loss_mask: [N] bool. lengths: [S]. units: [S], the row of each sequence.
        tables: [folds, vocab] uint8 of `bands`. table_of: [S], which table judges a sequence.
        """
        spans = np.asarray(lengths, np.int64)
        mask = np.asarray(loss_mask, np.bool_)
        sequence = np.repeat(np.arange(spans.size), spans)[mask]
        flat = np.asarray(table_of, np.int64)[sequence] * tables.shape[1] + np.asarray(token_ids)[mask]
        band = tables.reshape(-1)[flat].astype(np.int64)
        width = self.counts.shape[1]
        rows, place = np.unique(np.asarray(units, np.int64), return_inverse=True)
        found = np.bincount(place[sequence] * width + band, minlength=rows.size * width)
        self.counts[rows] += found.reshape(rows.size, width)
        # How many loss tokens of the same sequence come before each.
        of_sequence = np.bincount(sequence, minlength=spans.size)
        position = np.arange(sequence.size) - np.repeat(np.cumsum(of_sequence) - of_sequence, of_sequence)
        step = np.minimum(np.frexp(position.astype(np.float64))[1], POSITION_BANDS - 1)  # 0 -> 0, 1 -> 1, 2-3 -> 2, ...
        self.positions += np.bincount(step * width + band, minlength=POSITION_BANDS * width).reshape(-1, width)

    def __add__(self, other: GroupCoverage) -> GroupCoverage:
        return GroupCoverage(self.counts + other.counts, self.positions + other.positions)

    def covered(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Covered tokens [units, S] at each size, and tokens [units]."""
        return np.cumsum(self.counts, axis=1)[:, :-1], self.counts.sum(axis=1)

    def by_position(self) -> list[dict[str, object]]:
        """[{from, tokens, coverage: [S]}] of the positions that hold tokens."""
        found: list[dict[str, object]] = []
        for band, row in enumerate(self.positions):
            if row.sum():
                first = 0 if band == 0 else 1 << (band - 1)
                coverage = (np.cumsum(row)[:-1] / row.sum()).tolist()
                found.append({"from": first, "tokens": int(row.sum()), "coverage": coverage})
        return found
