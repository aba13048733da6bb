"""Tokens and masks as they are stored: every sequence at its place on the token axis, in chunks of 1 Mi tokens.

Chunks are encoded by a few threads and given one after the other, so memory does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa

from storage.windowed import in_order
from storage.zarr_array import encode_chunk

_THREADS = 4


class SequenceRows(Protocol):
    """Token ids and masks of a plan's sequences, by row of the plan's table. Safe to share between threads."""

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """token_ids [T] int32, loss_mask [T] bool."""


class TableRows:
    """A table of `TOKENS_SCHEMA`. In the chunks it came in: one Arrow list array holds at most 2**31 - 1 values."""

    def __init__(self, table: pa.Table) -> None:
        self._ids, self._masks = _Lists(table["token_ids"]), _Lists(table["loss_mask"])

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._ids.row(index), self._masks.row(index)


class _Lists:
    def __init__(self, column: pa.ChunkedArray) -> None:
        self._flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
        self._offsets = [chunk.offsets.to_numpy() for chunk in column.chunks]
        self._first = np.cumsum([0, *map(len, column.chunks)])

    def row(self, index: int) -> np.ndarray:
        chunk = int(np.searchsorted(self._first, index, side="right")) - 1
        offsets, at = self._offsets[chunk], index - int(self._first[chunk])
        return self._flat[chunk][offsets[at] - offsets[0] : offsets[at + 1] - offsets[0]]


def token_chunks(
    starts: np.ndarray, lengths: np.ndarray, tokens: int, rows: SequenceRows, chunk_tokens: int
) -> Iterator[tuple[int, bytes, bytes]]:
    """(chunk, encoded token ids, encoded mask) of every chunk of the token axis, in order.

    starts, lengths: [sequences], each sequence's place on the axis, which is `tokens` long.
    """
    order = np.argsort(starts)
    start = starts[order]
    end = start + lengths.astype(np.int64)[order]

    def encode(chunk: int) -> tuple[int, bytes, bytes]:
        low, high = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
        ids, mask = np.full(chunk_tokens, -1, np.int32), np.zeros(chunk_tokens, np.bool_)
        first = int(np.searchsorted(end, low, side="right"))
        last = int(np.searchsorted(start, high, side="left"))
        for at in range(first, last):
            begin, stop, zero = max(low, int(start[at])), min(high, int(end[at])), int(start[at])
            token_ids, loss_mask = rows.row(int(order[at]))
            ids[begin - low : stop - low] = token_ids[begin - zero : stop - zero]
            mask[begin - low : stop - low] = loss_mask[begin - zero : stop - zero]
        return chunk, encode_chunk(ids), encode_chunk(mask)

    yield from in_order(encode, range(-(-tokens // chunk_tokens)), _THREADS)
