"""Which sequences make which update: a pure function of seed, epoch and lengths. Numpy only.

The invariant: every row of the training set comes exactly once an epoch, in the same global batches whatever the number
of workers; worker r of W takes micro-batches r, r + W, r + 2W, ... of each. So a run is resumed, with any number of
workers, from two integers: epoch, and update within it.

Shards are shuffled and opened a window at a time; rows are shuffled within a window. A store then sees reads from few
shards at once, and with a window of 64 shards of 8,192 tokens an update of 16,384 tokens is still drawn from 500,000.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError

# Shards that are open at a time.
WINDOW = 64


class Epoch(Sequence[list[NDArray[np.int64]]]):
    """The global batches of one epoch, in order; each is a list of micro-batches, each an array of rows.

    lengths: [R] tokens of each training row. shards: [R] the shard it lies in. Rows are numbers from 0 to R - 1.
    A global batch holds about `global_batch_tokens`: the epoch's tokens are shared out evenly over
    `updates_per_epoch`, so that no update is made of a few left-over sequences. A micro-batch never holds more than
    `micro_batch_tokens`; those of one global batch are of nearly equal size, so that workers are, too.
    Raises DrafterError for no rows, or a row that is longer than a micro-batch.
    """

    def __init__(
        self,
        seed: int,
        epoch: int,
        lengths: NDArray[np.int64],
        shards: NDArray[np.int64],
        *,
        global_batch_tokens: int,
        micro_batch_tokens: int,
        window: int = WINDOW,
    ) -> None:
        check_lengths(lengths, micro_batch_tokens)
        self.lengths, self.micro_batch_tokens = np.asarray(lengths, np.int64), micro_batch_tokens
        self.order = shuffled_rows(np.random.default_rng([seed, epoch]), np.asarray(shards), window)
        self._ends = _batch_ends(self.lengths[self.order], updates_per_epoch(lengths, global_batch_tokens))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, update: int) -> list[NDArray[np.int64]]:  # type: ignore[override]
        """The micro-batches of this update. Rows are packed when they are asked for: a million would take seconds."""
        if not 0 <= update < len(self):
            raise IndexError(f"update {update} of {len(self)}")
        first = int(self._ends[update - 1]) if update else 0
        return pack_rows(self.order[first : self._ends[update]], self.lengths, self.micro_batch_tokens)


def updates_per_epoch(lengths: NDArray[np.int64], global_batch_tokens: int) -> int:
    """Global batches of an epoch: as many as come closest to `global_batch_tokens` each, at least one."""
    return int(min(len(lengths), max(1, round(int(np.sum(lengths)) / global_batch_tokens))))


def check_lengths(lengths: NDArray[np.int64], micro_batch_tokens: int) -> None:
    """Raises DrafterError unless there are rows, and each fits into a micro-batch."""
    if not len(lengths):
        raise DrafterError("no sequences to train on: expected at least one that is not held out, found none")
    longest = int(np.max(lengths))
    if longest > micro_batch_tokens:
        raise DrafterError(
            f"training.micro_batch_tokens is {micro_batch_tokens:,}, but the longest sequence has {longest:,} tokens "
            f"and sequences are not split; set training.micro_batch_tokens={longest} or more"
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
