"""Which sequences make which update: a pure function of seed, epoch, lengths and weights. Numpy only.

The invariant: every row of the training set comes as often as its weight says (once, mostly), in the same global
batches whatever the number of workers; worker r of W takes micro-batches r, r + W, r + 2W, ... of each. So a run is
resumed, with any number of workers, from two integers: epoch, and update within it.

Shards are shuffled and opened a window at a time; rows are shuffled within a window. A store then sees reads from few
shards at once, and with a window of 256 shards of 8,192 tokens an update of 16,384 tokens is still drawn from 2 million.
`mixing` says how far that is from a shuffle of everything.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError

# Shards that are open at a time: their indexes are what is kept of them, 16 KB each. For shards that each hold one source
# and one length class, 64 gives an update .96 of the entropy of a full shuffle, 256 .99.
WINDOW = 256


@dataclass(frozen=True, eq=False)
class Rows:
    """What an epoch is made of: rows numbered from 0, each a sequence or a piece of one.

    lengths: [R] tokens. shards: [R] the shard it lies in, numbered over all datasets. parts: [R] number of its dataset,
    an index into weights. weights: how often an epoch passes over the rows of each dataset; 0.5 takes a half of them,
    which moves on with every epoch.
    """

    lengths: NDArray[np.int64]
    shards: NDArray[np.int64]
    parts: NDArray[np.int64]
    weights: tuple[float, ...] = (1.0,)

    @classmethod
    def of_one(cls, lengths: NDArray[np.int64], shards: NDArray[np.int64]) -> Rows:
        """All rows of one dataset, once an epoch."""
        return cls(np.asarray(lengths, np.int64), np.asarray(shards), np.zeros(len(lengths), np.int64))

    def in_epoch(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The rows of an epoch, [n] int64, in no order that matters; those of a weight above 1 more than once."""
        if self.weights == (1.0,):
            return np.arange(len(self.lengths))
        chosen = []
        for number, weight in enumerate(self.weights):
            members = np.flatnonzero(self.parts == number)
            whole, share = int(weight), weight - int(weight)
            chosen += [members] * whole
            if share:  # a window over one order of the part, which moves on with every epoch
                shuffled = np.random.default_rng([seed, number]).permutation(members)
                low, high = (round(share * len(members) * at) for at in (epoch, epoch + 1))
                chosen.append(shuffled[np.arange(low, high) % len(members)] if len(members) else members)
        return np.concatenate(chosen).astype(np.int64)

    def updates_per_epoch(self, global_batch_tokens: int) -> int:
        """Global batches of an epoch, the same for every epoch: as come closest to `global_batch_tokens` each.

        Never more than the smallest epoch has rows. Raises DrafterError when the weights leave an epoch without any.
        """
        tokens, fewest = 0.0, 0
        for number, weight in enumerate(self.weights):
            own = self.lengths[self.parts == number]
            tokens += weight * int(own.sum())
            fewest += int(weight) * len(own) + int((weight - int(weight)) * len(own))
        if not fewest:
            raise DrafterError(
                f"training.datasets: weights {list(self.weights)} leave epochs without a sequence; raise them"
            )
        return int(min(fewest, max(1, round(tokens / global_batch_tokens))))


class Epoch(Sequence[list[NDArray[np.int64]]]):
    """The global batches of one epoch, in order; each is a list of micro-batches, each an array of rows.

    A global batch holds about `global_batch_tokens`: the epoch's tokens are shared out evenly over its updates, so that
    no update is made of a few left-over sequences. A micro-batch never holds more than `micro_batch_tokens`; those of
    one global batch are of nearly equal size, so that workers are, too.
    Raises DrafterError for no rows, or a row that is longer than a micro-batch.
    """

    def __init__(
        self,
        seed: int,
        epoch: int,
        rows: Rows,
        *,
        global_batch_tokens: int,
        micro_batch_tokens: int,
        window: int = WINDOW,
    ) -> None:
        check_lengths(rows.lengths, micro_batch_tokens)
        self.rows, self.micro_batch_tokens = rows, micro_batch_tokens
        chosen = rows.in_epoch(seed, epoch)
        self.order = chosen[shuffled_rows(np.random.default_rng([seed, epoch]), rows.shards[chosen], window)]
        self._ends = _batch_ends(rows.lengths[self.order], rows.updates_per_epoch(global_batch_tokens))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, update: int) -> list[NDArray[np.int64]]:  # type: ignore[override]
        """The micro-batches of this update. Rows are packed when they are asked for: a million would take seconds."""
        if not 0 <= update < len(self):
            raise IndexError(f"update {update} of {len(self)}")
        first = int(self._ends[update - 1]) if update else 0
        return pack_rows(self.order[first : self._ends[update]], self.rows.lengths, self.micro_batch_tokens)


def check_lengths(lengths: NDArray[np.int64], micro_batch_tokens: int) -> None:
    """Raises DrafterError unless there are rows, and each fits into a micro-batch."""
    if not len(lengths):
        raise DrafterError("no sequences to train on: expected at least one that is not held out, found none")
    longest = int(np.max(lengths))
    if longest > micro_batch_tokens:
        raise DrafterError(
            f"training.micro_batch_tokens is {micro_batch_tokens:,}, but the longest sequence has {longest:,} tokens; set "
            f"training.micro_batch_tokens={longest} or more, or training.max_length={micro_batch_tokens} with "
            f"training.long_sequences=drop or split"
        )


def shuffled_rows(random: np.random.Generator, shards: NDArray[np.int64], window: int = WINDOW) -> NDArray[np.int64]:
    """All rows, [R] int64: shards in random order, `window` of them at a time, and the rows of those mixed."""
    names, shard_of_row = np.unique(shards, return_inverse=True)
    window_of_shard = random.permutation(len(names)) // window
    # The noise orders rows within a window; windows stay apart.
    return np.lexsort((random.random(len(shards)), window_of_shard[shard_of_row])).astype(np.int64)


def pack_rows(rows: NDArray[np.int64], lengths: NDArray[np.int64], micro_batch_tokens: int) -> list[NDArray[np.int64]]:
    """These rows as few micro-batches of nearly equal tokens: the longest row first, each to the emptiest one."""
    longest_first = rows[np.argsort(-lengths[rows], kind="stable")]
    bins = max(1, -(-int(lengths[rows].sum()) // micro_batch_tokens))
    while True:
        emptiest = [(0, number) for number in range(bins)]
        packed: list[list[int]] = [[] for _ in range(bins)]
        for row in longest_first.tolist():
            tokens, number = heapq.heappop(emptiest)
            tokens += int(lengths[row])
            if tokens > micro_batch_tokens:
                break
            packed[number].append(row)
            heapq.heappush(emptiest, (tokens, number))
        else:
            return [np.array(part, np.int64) for part in packed if part]
        bins += 1


def _batch_ends(lengths: NDArray[np.int64], batches: int) -> NDArray[np.int64]:
    """Where each batch ends, [batches] int64: the row boundaries nearest to equal shares; none is empty."""
    ends = np.cumsum(lengths)
    wanted = ends[-1] * np.arange(1, batches + 1) / batches
    # The boundary below or above, whichever is nearer.
    above = np.searchsorted(ends, wanted)
    below = np.maximum(above - 1, 0)
    cut = np.where(wanted - ends[below] < ends[above] - wanted, below, above) + 1
    at = np.arange(batches)
    cut = np.maximum.accumulate(cut - at) + at  # strictly ascending
    return np.minimum(cut, len(lengths) - (batches - 1 - at)).astype(np.int64)


def cut(lengths: NDArray[np.int64], longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sequences as pieces of at most `longest` tokens, nearly equal within a sequence: (sequence, first token, tokens).

    lengths: [S]. Each of the three is [pieces] int64, in the order of the sequences; a shorter sequence is one piece.
    """
    pieces = np.maximum(1, -(-lengths // longest))
    sequence = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    low, high = (at * lengths[sequence] // pieces[sequence] for at in (number, number + 1))
    return sequence, low.astype(np.int64), (high - low).astype(np.int64)


def mixing(epoch: Epoch, labels: NDArray[np.int64]) -> dict[str, float]:
    """How well an epoch mixes rows of different labels (source, shard, length class), beside a shuffle of everything.

    labels: [R] integers. neighbours_alike: share of neighbouring rows that have one label, over what chance gives (1 is
    perfect). entropy: mean entropy of the labels within an update, over that of the same updates after a full shuffle.
    """
    order, count = epoch.order, int(labels.max()) + 1
    ends = np.asarray(epoch._ends)
    batch_of = np.searchsorted(ends, np.arange(len(order)), side="right")

    def entropy(rows: NDArray[np.int64]) -> float:
        table = np.bincount(batch_of * count + labels[rows], minlength=len(ends) * count).reshape(len(ends), count)
        share = table / table.sum(1, keepdims=True)
        return float(-(share * np.log(np.where(share > 0, share, 1.0))).sum(1).mean())

    shuffled = np.random.default_rng(0).permutation(order)
    share = np.bincount(labels[order], minlength=count) / len(order)
    alike = float((labels[order[1:]] == labels[order[:-1]]).mean())
    whole = entropy(shuffled)
    return {
        "neighbours_alike": alike / float((share**2).sum()),
        "entropy": entropy(order) / whole if whole else 1.0,
    }
