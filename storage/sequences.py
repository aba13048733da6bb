"""Sequences: one tokenised conversation each, with its loss mask, identified by its content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

# In memory, between prepare and the plan. `group` names the shared prompt, so that hold-outs never split one.
TOKENS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("group", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)

_LIST_VALUES = 1 << 30


def sequence_id(token_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """32 hex digits: sha256 over the number of tokens, the ids (int32, little-endian) and the mask (a byte each)."""
    digest = hashlib.sha256(len(token_ids).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(token_ids, "<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, np.uint8).tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Sequence:
    """token_ids: [T] int32. loss_mask: [T] bool, True where the drafter is to be trained."""

    source: str
    group: str
    token_ids: np.ndarray
    loss_mask: np.ndarray

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.shape != self.loss_mask.shape or not len(self.token_ids):
            raise ValueError(
                f"token_ids {self.token_ids.shape} and loss_mask {self.loss_mask.shape} must be [T], T > 0"
            )

    @property
    def id(self) -> str:
        return sequence_id(self.token_ids, self.loss_mask)


def sequence_table(sequences: Iterable[Sequence]) -> pa.Table:
    """`TOKENS_SCHEMA`, ordered by id; of equal contents the first by (source, group) stays."""
    kept: dict[str, Sequence] = {}
    for sequence in sequences:
        key = sequence.id
        if key not in kept or (sequence.source, sequence.group) < (kept[key].source, kept[key].group):
            kept[key] = sequence
    ids = sorted(kept)
    return tokens_table(ids, [kept[key] for key in ids])


def tokens_table(ids: Seq[str], rows: Seq[Sequence]) -> pa.Table:
    """`TOKENS_SCHEMA` of sequences with these ids, in the order given."""
    return pa.table(
        {
            "id": ids,
            "source": [row.source for row in rows],
            "group": [row.group for row in rows],
            "token_ids": list_column([row.token_ids for row in rows], np.int32),
            "loss_mask": list_column([row.loss_mask for row in rows], np.bool_),
        },
        schema=TOKENS_SCHEMA,
    )


def list_column(arrays: Seq[np.ndarray], dtype: type[np.generic]) -> pa.ChunkedArray:
    """One list for each array, in pieces of less than 2**31 values as Arrow's 32-bit offsets need; three times pa.array's speed."""
    ends = np.cumsum([len(one) for one in arrays], dtype=np.int64)
    kind, pieces, low = pa.from_numpy_dtype(dtype), [], 0
    while low < len(arrays):
        before = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + _LIST_VALUES, side="right")))
        offsets = np.concatenate([[0], ends[low:high] - before]).astype(np.int32)
        values = pa.array(np.concatenate(arrays[low:high]).astype(dtype, copy=False), kind)
        pieces.append(pa.ListArray.from_arrays(pa.array(offsets), values))
        low = high
    return pa.chunked_array(pieces, pa.list_(kind))
