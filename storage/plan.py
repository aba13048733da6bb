"""The plan: where every sequence will lie, decided by a pure function before the first GPU second is spent.

Equal sequences and an equal contract give an equal plan with an equal hash, on any machine. Work units, resume,
exactly-once, progress and cost estimates all follow from it.

L: layers stored for a token. H: hidden size. N: length of the token axis. S: tokens of a shard. C: tokens of a chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.codecs import codec_by_name
from storage.contract import Contract, sha256_json
from storage.errors import StatehouseError
from storage.teacher import NONE, parse_teacher

if TYPE_CHECKING:
    from storage.spool import SpooledSequences

# A chunk of one plane is at least this large, so that zstd's tables pay and requests stay few.
_CHUNK_BYTES = 256 * 1024
_MIN_CHUNK_TOKENS = 32
# A shard is encoded in memory and PUT at once.
_SHARD_BYTES = 512 * 1024 * 1024
# Up to this much raw, one shard still holds the longest sequence whole (18,700 tokens at H = 7168): it is encoded in memory
# and a single PUT is limited to 5 GB. Longer sequences take a run of ordinary shards.
_WHOLE_BYTES = 1024 * 1024 * 1024
# S3 takes no more than 5 GB in one PUT; lossless states may grow by 0.4 % when they are noise.
_LARGEST_BYTES = 4_900_000_000
# Small datasets are still cut into about this many shards, so that replicas share the work and a resume saves some.
_MIN_SHARDS = 16

PLAN_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("group", pa.string()),
        ("start", pa.int64()),
        ("length", pa.int32()),
        ("loss_tokens", pa.int32()),
        ("shard", pa.int32()),
    ]
)


class Geometry(BaseModel):
    """Shapes of the store. `hidden` is uint8 [2, N, L, H] in shards [2, S, L, H] of chunks [1, C, L, H]."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    chunk_tokens: int = Field(gt=0)
    shard_tokens: int = Field(gt=0)
    shards: int = Field(gt=0)

    @model_validator(mode="after")
    def _whole_chunks(self) -> Geometry:
        if self.shard_tokens % self.chunk_tokens:
            raise ValueError(f"shard_tokens {self.shard_tokens} is no multiple of chunk_tokens {self.chunk_tokens}")
        return self

    @property
    def tokens(self) -> int:
        """N, unused places at the ends of shards included (they are never stored)."""
        return self.shards * self.shard_tokens

    @property
    def chunks_per_shard(self) -> int:
        return self.shard_tokens // self.chunk_tokens

    @property
    def bytes_per_token(self) -> int:
        """Raw bf16."""
        return 2 * self.layers * self.hidden_size

    @property
    def chunk_bytes(self) -> int:
        """One plane of one chunk."""
        return self.chunk_tokens * self.layers * self.hidden_size


def chunk_tokens(layers: int, hidden_size: int) -> int:
    """C: 32 at H = 7168; at small H the next power of two that makes a plane's chunk >= 256 KiB."""
    tokens = _MIN_CHUNK_TOKENS
    while tokens * layers * hidden_size < _CHUNK_BYTES:
        tokens *= 2
    return tokens


def shard_tokens(total: int, longest: int, layers: int, hidden_size: int) -> int:
    """S: about 512 MiB raw, less for small datasets, and room for the longest sequence up to 1 GiB; a multiple of C."""
    chunk = chunk_tokens(layers, hidden_size)
    per_token = 2 * layers * hidden_size
    most = max(chunk, _SHARD_BYTES // per_token)
    most = 1 << (most.bit_length() - 1)
    wanted = min(most, -(-total // _MIN_SHARDS))
    wanted = max(longest, wanted) if longest * per_token <= _WHOLE_BYTES else most
    return -(-wanted // chunk) * chunk


def shard_capacity(lengths: np.ndarray, layers: int, hidden_size: int, wanted: int | None = None) -> int:
    """S: `wanted` rounded up to whole chunks, or the planner's choice. lengths: [n] int."""
    chunk = chunk_tokens(layers, hidden_size)
    if wanted is None:
        return shard_tokens(int(lengths.sum(dtype=np.int64)), int(lengths.max()), layers, hidden_size)
    return -(-wanted // chunk) * chunk


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Best fit decreasing: each length goes, longest first, into the fullest shard that still has room.

    lengths: [n] int, each at least 1; equal lengths are placed in the order given. One above `capacity` takes a run of
    new shards from the beginning of the first; what is left of the last one is room for others.
    Returns shard [n] int32 (the first of a run), offset within the shard [n] int32, and the number of shards.
    """
    shard = np.empty(len(lengths), np.int32)
    offset = np.empty(len(lengths), np.int32)
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a shard with room r is open: finds the tightest fit with two big-int operations
    shards = 0
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    places: list[int] = []
    offsets: list[int] = []
    for length in lengths[order].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            same = by_room[room]
            place = last = same.pop()
            if not same:
                rooms ^= 1 << room
        else:
            run = -(-length // capacity)
            room, place, last = run * capacity, shards, shards + run - 1
            shards += run
        places.append(place)
        offsets.append(max(0, capacity - room))
        if left := room - length:
            if left in by_room:
                by_room[left].append(last)
            else:
                by_room[left] = [last]
            rooms |= 1 << left
    shard[order], offset[order] = places, offsets
    return shard, offset, shards


@dataclass(frozen=True)
class WorkUnit:
    """One shard's worth of work, or a run of shards where a sequence is longer than one.

    shard: the first. rows index the plan's table, in the order in which they lie on the axis, without a gap; their
    `tokens` fill shards `shard` to `shard + shards - 1` from the beginning.
    """

    shard: int
    rows: np.ndarray
    tokens: int
    shards: int = 1


@dataclass(frozen=True)
class Plan:
    """`table` is `PLAN_SCHEMA` ordered by id; everything else of the store follows from it."""

    contract: Contract
    codec: str
    geometry: Geometry
    table: pa.Table
    # The kind of teacher summary that is stored beside the states (`storage.teacher`).
    teacher: str = NONE

    @cached_property
    def hash(self) -> str:
        digest = hashlib.sha256()
        for column in self.table.columns:
            for values in column.chunks:
                plain = _length_prefixed(values) if pa.types.is_string(values.type) else values.to_numpy()
                digest.update(plain.data)
        said = {
            "contract": self.contract.hash,
            "codec": self.codec,
            "geometry": self.geometry.model_dump(),
            "sequences": digest.hexdigest(),
        }
        return sha256_json(said if self.teacher == NONE else {**said, "teacher": self.teacher})

    @property
    def tokens(self) -> int:
        """Tokens that will be stored."""
        return int(np.sum(self.column("length")))

    @property
    def loss_tokens(self) -> int:
        return int(np.sum(self.column("loss_tokens")))

    def column(self, name: str) -> np.ndarray:
        return self.table[name].to_numpy()

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last shard of each sequence: [n] int64 each. They differ for sequences longer than a shard."""
        start, length = self.column("start"), self.column("length").astype(np.int64)
        return self.column("shard").astype(np.int64), (start + length - 1) // self.geometry.shard_tokens

    def shard_rows(self) -> np.ndarray:
        """Used tokens of each shard: [shards] int64. They lie at its beginning without a gap."""
        end = np.zeros(self.geometry.shards, np.int64)
        first, last = self._spans
        np.maximum.at(end, last, self.column("start") + self.column("length"))
        used = end - np.arange(self.geometry.shards, dtype=np.int64) * self.geometry.shard_tokens
        for row in np.flatnonzero(first != last):
            used[first[row] : last[row]] = self.geometry.shard_tokens
        return used

    def units(self) -> Iterator[WorkUnit]:
        """In the order of their shards. What lies in the last shard of a run belongs to the run's unit."""
        first, last = self._spans
        head = np.arange(self.geometry.shards, dtype=np.int64)
        runs = first != last
        head[last[runs]] = first[runs]
        start, length = self.column("start"), self.column("length").astype(np.int64)
        order = np.lexsort((start, head[first]))
        unit = head[first][order]
        for rows in np.split(order, np.flatnonzero(np.diff(unit)) + 1):
            yield WorkUnit(
                int(first[rows[0]]), rows, int(length[rows].sum()), int(last[rows].max() - first[rows[0]]) + 1
            )


def _length_prefixed(values: pa.Array) -> np.ndarray:
    """Each string as its length in bytes (u32, little-endian) and its UTF-8, one after the other: uint8."""
    if not len(values):
        return np.empty(0, np.uint8)
    _, offset_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer or b"", np.uint8)[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)
    prefixes = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    if (lengths == lengths[0]).all():
        return np.concatenate([prefixes, data.reshape(len(lengths), -1)], axis=1).reshape(-1)
    out = np.empty(len(data) + prefixes.size, np.uint8)
    text = np.ones(len(out), bool)
    at = offsets[:-1] - offsets[0] + 4 * np.arange(len(lengths))
    for byte in range(4):
        out[at + byte] = prefixes[:, byte]
        text[at + byte] = False
    out[text] = data
    return out


def make_plan(
    sequences: pa.Table | SpooledSequences,
    contract: Contract,
    codec: str,
    *,
    shard_length: int | None = None,
    teacher: str = NONE,
) -> Plan:
    """Places `sequences` (`TOKENS_SCHEMA`, ordered by id, ids unique; or `storage.spool`, where they fit no memory).

    Raises StatehouseError when there are none, when an id is outside the vocabulary, or when `shard_length` is too
    large for one PUT.
    """
    if not isinstance(sequences, pa.Table):
        sequences.require_vocabulary(contract.vocab_size)
        return plan_lengths(sequences.table, contract, codec, shard_length=shard_length, teacher=teacher)
    _check_ids(sequences, contract.vocab_size)
    lengths = np.concatenate([chunk.value_lengths().to_numpy() for chunk in sequences["token_ids"].chunks] or [[]])
    return plan_lengths(
        pa.table(
            {
                "id": sequences["id"],
                "source": sequences["source"],
                "group": sequences["group"],
                "length": lengths.astype(np.int32),
                "loss_tokens": _loss_tokens(sequences),
            }
        ),
        contract,
        codec,
        shard_length=shard_length,
        teacher=teacher,
    )


def plan_lengths(
    sequences: pa.Table, contract: Contract, codec: str, *, shard_length: int | None = None, teacher: str = NONE
) -> Plan:
    """`make_plan` without the tokens: 1.7 billion of them are 8.5 GB, their lengths 4 MB.

    sequences: columns id, source, group, length, loss_tokens as in `PLAN_SCHEMA`, ordered by id, ids unique.
    """
    codec = codec_by_name(codec).name
    if not len(sequences):
        raise StatehouseError("there is nothing to plan: no sequences; check that prepare accepted some prompts")
    lengths = sequences["length"].to_numpy()
    layers, hidden_size = contract.layers, contract.hidden_size
    capacity = shard_capacity(lengths, layers, hidden_size, shard_length)
    if 2 * layers * hidden_size * capacity > _LARGEST_BYTES:
        raise StatehouseError(
            f"dataset.shard_tokens makes shards of {2 * layers * hidden_size * capacity / 1e9:.1f} GB, but one PUT is "
            f"limited to 5 GB; set it to at most {_LARGEST_BYTES // (2 * layers * hidden_size)} or leave it out"
        )
    shard, offset, shards = pack(lengths, capacity)
    table = pa.table(
        {
            "id": sequences["id"],
            "source": sequences["source"],
            "group": sequences["group"],
            "start": shard.astype(np.int64) * capacity + offset,
            "length": lengths,
            "loss_tokens": sequences["loss_tokens"],
            "shard": shard,
        },
        schema=PLAN_SCHEMA,
    )
    geometry = Geometry(
        layers=layers,
        hidden_size=hidden_size,
        chunk_tokens=chunk_tokens(layers, hidden_size),
        shard_tokens=capacity,
        shards=shards,
    )
    return Plan(contract, codec, geometry, table, parse_teacher(teacher))


def _check_ids(sequences: pa.Table, vocab_size: int) -> None:
    # By chunk of the column: one Arrow list holds at most 2**31 - 1 tokens.
    before = 0
    for lists in sequences["token_ids"].chunks:
        ids = lists.flatten().to_numpy()
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            outside = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
            row = before + int(np.searchsorted(np.cumsum(lists.value_lengths().to_numpy()), outside, side="right"))
            raise StatehouseError(
                f"sequence {sequences['id'][row]} holds token id {ids[outside]}, "
                f"outside the verifier's vocabulary of {vocab_size}"
            )
        before += len(lists)


def _loss_tokens(sequences: pa.Table) -> np.ndarray:
    """Tokens that bear loss, of each sequence: [n] int32."""
    counts = [np.empty(0, np.int32)]
    for masks in sequences["loss_mask"].chunks:
        flat = masks.flatten().to_numpy(zero_copy_only=False)
        offsets = masks.offsets.to_numpy() - masks.offsets.to_numpy()[0]
        # In place of reduceat, which gives a neighbour's value for an empty list.
        total = np.concatenate([[0], np.cumsum(flat, dtype=np.int64)])
        counts.append((total[offsets[1:]] - total[offsets[:-1]]).astype(np.int32))
    return np.concatenate(counts)
