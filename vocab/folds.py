"""Coverage by cross-fitting: each fold of prompt groups is judged by a vocabulary chosen on the other folds.

Everything here works on counts alone, one TokenCounts a fold, so that no policy or size needs another pass over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vocab.counts import TokenCounts
from vocab.errors import VocabError
from vocab.policies import policy_order


@dataclass(frozen=True, eq=False)
class FoldCounts:
    """Counts of each fold. Folds are a pure function of group and seed, so those of other datasets add fold by fold."""

    folds: tuple[TokenCounts, ...]
    seed: int

    def __post_init__(self) -> None:
        if len(self.folds) < 2:
            raise VocabError(f"folds: expected at least 2, found {len(self.folds)}")
        sizes = {fold.vocab_size for fold in self.folds}
        if len(sizes) != 1:
            raise VocabError(f"folds: expected counts over one vocabulary, found sizes {sorted(sizes)}")

    @property
    def vocab_size(self) -> int:
        return self.folds[0].vocab_size

    def total(self) -> TokenCounts:
        """All folds together."""
        result = self.folds[0]
        for fold in self.folds[1:]:
            result = result + fold
        return result

    def without(self, fold: int) -> TokenCounts:
        """All folds but one: what that one's vocabulary is chosen on."""
        result = TokenCounts.empty(self.vocab_size)
        for at, counts in enumerate(self.folds):
            if at != fold:
                result = result + counts
        return result

    def __add__(self, other: FoldCounts) -> FoldCounts:
        """Raises VocabError when the folds were not made alike."""
        if len(self.folds) != len(other.folds) or self.seed != other.seed:
            raise VocabError(
                f"folds: expected {len(self.folds)} folds of seed {self.seed}, found {len(other.folds)} of {other.seed}; "
                "count again with the same folds and seed"
            )
        return FoldCounts(tuple(a + b for a, b in zip(self.folds, other.folds, strict=True)), self.seed)

    def usable(self) -> list[int]:
        """Folds that hold tokens while the others hold some too."""
        tokens = [fold.tokens for fold in self.folds]
        return [fold for fold, count in enumerate(tokens) if count and sum(tokens) > count]


@dataclass(frozen=True, eq=False)
class FoldCurves:
    """Held-out coverage of a policy at S sizes. Shares in [0, 1]; NaN where nothing was held out.

    pooled: [S], over the tokens of all folds, each under its own fold's vocabulary. by_fold: [folds, S].
    by_source: {source: [S]}. stability: [S], share of the whole choice's ids that the average fold's choice has too.
    """

    sizes: tuple[int, ...]
    pooled: NDArray[np.float64]
    by_fold: NDArray[np.float64]
    by_source: dict[str, NDArray[np.float64]]
    stability: NDArray[np.float64]

    def worst_source(self) -> list[tuple[str, float] | None]:
        """The source with the lowest coverage at each size, with it."""
        found: list[tuple[str, float] | None] = []
        for at in range(len(self.sizes)):
            known = [(float(curve[at]), name) for name, curve in self.by_source.items() if not np.isnan(curve[at])]
            found.append((min(known)[1], min(known)[0]) if known else None)
        return found


def fold_orders(
    counts: FoldCounts,
    policy: str = "frequency",
    *,
    force_ids: Sequence[int] | np.ndarray = (),
    listed: Sequence[int] | np.ndarray = (),
) -> dict[int, NDArray[np.int64]]:
    """{fold: order of all ids chosen without it, [vocab]} for the folds that can be judged."""
    return {
        fold: policy_order(policy, counts.without(fold), force_ids=force_ids, listed=listed) for fold in counts.usable()
    }


def cross_fit(
    counts: FoldCounts,
    sizes: Sequence[int],
    policy: str = "frequency",
    *,
    force_ids: Sequence[int] | np.ndarray = (),
    listed: Sequence[int] | np.ndarray = (),
) -> FoldCurves:
    """Held-out coverage of `policy` at each size. Raises VocabError when no fold can be judged (one group, say)."""
    orders = fold_orders(counts, policy, force_ids=force_ids, listed=listed)
    if not orders:
        raise VocabError("folds: all tokens are in one fold; more prompt groups are needed to hold any out")
    last = np.asarray(sizes, np.int64) - 1
    names = sorted({source for fold in counts.folds for source in fold.sources})
    covered = {name: np.zeros(last.size) for name in names}
    tokens = dict.fromkeys(names, 0)
    by_fold = np.full((len(counts.folds), last.size), np.nan)
    whole = policy_order(policy, counts.total(), force_ids=force_ids, listed=listed)
    stability = np.zeros(last.size)
    for fold, order in orders.items():
        part = counts.folds[fold]
        sums = np.cumsum(part.counts[:, order], axis=1)[:, last]
        by_fold[fold] = sums.sum(axis=0) / part.tokens
        for row, name in enumerate(part.sources):
            covered[name] += sums[row]
            tokens[name] += int(part.counts[row].sum())
        rank = np.empty(order.size, np.int64)
        rank[order] = np.arange(order.size)
        stability += np.array([(rank[whole[:size]] < size).mean() for size in sizes])
    total = sum(tokens.values())
    return FoldCurves(
        sizes=tuple(int(size) for size in sizes),
        pooled=np.sum(list(covered.values()), axis=0) / total,
        by_fold=by_fold,
        by_source={
            name: covered[name] / tokens[name] if tokens[name] else np.full(last.size, np.nan) for name in names
        },
        stability=stability / len(orders),
    )
