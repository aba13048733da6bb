"""From batches of sequences to counts by side and source, and to coverage by group: two passes over the tokens.

A side is a fold, or the held-out part: `Split` decides it from the prompt group alone, so that any worker says the same.
Memory is one batch plus the counts, however many tokens there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vocab.counts import TokenCounts, count_by_key
from vocab.errors import VocabError
from vocab.folds import FoldCounts
from vocab.groups import GroupCoverage, bands
from vocab.inputs import Batch
from vocab.split import fold_of, held_out_mask


@dataclass(frozen=True)
class Split:
    """Which side a prompt group is on: folds 0 to `folds` - 1, or `folds`, the held-out side."""

    folds: int = 5
    held_out: float = 0.0
    seed: int = 0

    @property
    def sides(self) -> int:
        return self.folds + 1

    def side_of(self, groups: Sequence[str] | np.ndarray) -> NDArray[np.int64]:
        """[N] int64, the side of each group."""
        side = fold_of(groups, self.folds, self.seed)
        if self.held_out:
            side[held_out_mask(groups, self.held_out, self.seed)] = self.folds
        return side


@dataclass(frozen=True, eq=False)
class SideCounts:
    """Counts of every fold and of the held-out side."""

    folds: FoldCounts
    held_out: TokenCounts

    def __add__(self, other: SideCounts) -> SideCounts:
        return SideCounts(self.folds + other.folds, self.held_out + other.held_out)

    @classmethod
    def empty(cls, vocab_size: int, split: Split) -> SideCounts:
        nothing = TokenCounts.empty(vocab_size)
        return cls(FoldCounts((nothing,) * split.folds, split.seed), nothing)


def count_sides(batches: Iterable[Batch], vocab_size: int, split: Split) -> SideCounts:
    """Loss-bearing tokens by side and source. Batches need the groups of their rows.

    Raises VocabError that names where the batch came from: ids outside the vocabulary, groups missing.
    """
    sums: dict[tuple[int, str], NDArray[np.int64]] = {}
    for batch in batches:
        side = split.side_of(_groups(batch)) if batch.sides is None else batch.sides
        names = sorted(set(batch.sources))
        of_source = np.array([names.index(source) for source in batch.sources], np.int64)
        kinds, key = np.unique(side * len(names) + of_source, return_inverse=True)
        at = [(kind // len(names), names[kind % len(names)]) for kind in kinds.tolist()]
        rows = [_row(sums, one, vocab_size) for one in at]
        try:
            count_by_key(batch.token_ids, batch.loss_mask, batch.lengths, key, rows, vocab_size)
        except VocabError as error:
            raise batch.located(error, vocab_size) from error
    return SideCounts(
        FoldCounts(tuple(_of_side(sums, side, vocab_size) for side in range(split.folds)), split.seed),
        _of_side(sums, split.folds, vocab_size),
    )


def _row(sums: dict[tuple[int, str], NDArray[np.int64]], at: tuple[int, str], vocab_size: int) -> NDArray[np.int64]:
    if at not in sums:
        sums[at] = np.zeros(vocab_size, np.int64)
    return sums[at]


def _of_side(sums: dict[tuple[int, str], NDArray[np.int64]], side: int, vocab_size: int) -> TokenCounts:
    names = [source for at, source in sums if at == side]
    if not names:
        return TokenCounts.empty(vocab_size)
    return TokenCounts(np.stack([sums[side, name] for name in names]), tuple(names), vocab_size)


def _groups(batch: Batch) -> list[str]:
    if batch.groups is None:
        raise VocabError(f"{batch.where}: prompt groups are needed to hold any out, and the rows name none")
    return batch.groups


@dataclass(frozen=True, eq=False)
class Units:
    """Coverage by unit: a pair of prompt group and source, on one side.

    group: [units] uint64, a hash. source: [units], index into `sources`. held_out: [units] bool. coverage: the tokens.
    """

    group: NDArray[np.uint64]
    source: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    sources: tuple[str, ...]
    coverage: GroupCoverage

    def __add__(self, other: Units) -> Units:
        names = sorted({*self.sources, *other.sources})
        parts = (self, other)
        source = np.concatenate([np.array([names.index(n) for n in p.sources], np.int64)[p.source] for p in parts])
        counts = np.concatenate([p.coverage.counts for p in parts])
        positions = self.coverage.positions + other.coverage.positions
        return _merged(
            np.concatenate([p.group for p in parts]),
            source,
            np.concatenate([p.held_out for p in parts]),
            tuple(names),
            counts,
            positions,
        )

    @classmethod
    def empty(cls, sizes: int) -> Units:
        nothing = np.zeros(0, np.int64)
        return cls(nothing.astype(np.uint64), nothing, nothing.astype(bool), (), GroupCoverage.empty(0, sizes))

    def side(self, held_out: bool) -> tuple[GroupCoverage, dict[str, NDArray[np.int64]]]:
        """Coverage of the units on one side (positions are of all), and the rows of each source in it."""
        rows = np.flatnonzero(self.held_out == held_out)
        by_source = {name: np.flatnonzero(self.source[rows] == at) for at, name in enumerate(self.sources)}
        return GroupCoverage(self.coverage.counts[rows], self.coverage.positions), by_source


def _merged(
    group: NDArray[np.uint64],
    source: NDArray[np.int64],
    held_out: NDArray[np.bool_],
    sources: tuple[str, ...],
    counts: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> Units:
    """Rows of the same group and source added up."""
    pairs = np.stack([group, source.astype(np.uint64)], axis=1)
    unique, first, place = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    summed = np.zeros((len(unique), counts.shape[1]), np.int64)
    np.add.at(summed, place.reshape(-1), counts)
    return Units(group[first], source[first], held_out[first], sources, GroupCoverage(summed, positions))


def side_tables(
    orders: dict[int, NDArray[np.int64]], whole: np.ndarray, sizes: Sequence[int], split: Split
) -> NDArray[np.uint8]:
    """[sides, vocab] uint8: `vocab.groups.bands` of each fold's own order, and of the whole choice for the held-out side.

    orders: `vocab.folds.fold_orders`; a fold that cannot be judged gets the whole choice. whole: [vocab] order.
    """
    table = bands(whole, sizes)
    return np.stack([bands(orders[fold], sizes) if fold in orders else table for fold in range(split.folds)] + [table])


def cover_units(batches: Iterable[Batch], split: Split, tables: np.ndarray, sizes: int) -> Units:
    """Coverage by group and source, each token judged by the table of its own side. tables: of `side_tables`."""
    result = Units.empty(sizes)
    pending: list[Units] = []
    for batch in batches:
        groups = _groups(batch)
        names = sorted(set(batch.sources))
        hashes = np.array([_hash(group) for group in groups], np.uint64)
        source = np.array([names.index(one) for one in batch.sources], np.int64)
        side = split.side_of(groups) if batch.sides is None else batch.sides
        part = GroupCoverage.empty(len(groups), sizes)
        part.add(batch.token_ids, batch.loss_mask, batch.lengths, np.arange(len(groups)), tables, side)
        held = side == split.folds
        pending.append(_merged(hashes, source, held, tuple(names), part.counts, part.positions))
        if len(pending) == 16:
            result, pending = sum(pending, result), []
    return sum(pending, result)


def _hash(group: str) -> int:
    raw = group.encode("utf-8", "surrogatepass") if isinstance(group, str) else bytes(group)
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
