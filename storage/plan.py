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

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.codecs import codec_by_name
from storage.contract import Contract, sha256_json
from storage.errors import StatehouseError

# A chunk of one plane is at least this large, so that zstd's tables pay and requests stay few.
_CHUNK_BYTES = 256 * 1024
_MIN_CHUNK_TOKENS = 32
# A shard is encoded in memory and PUT at once.
_SHARD_BYTES = 512 * 1024 * 1024
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
    """S: about 512 MiB raw, less for small datasets, but room for the longest sequence; a multiple of C."""
    chunk = chunk_tokens(layers, hidden_size)
    most = max(chunk, _SHARD_BYTES // (2 * layers * hidden_size))
    most = 1 << (most.bit_length() - 1)
    wanted = max(longest, min(most, -(-total // _MIN_SHARDS)))
    return -(-wanted // chunk) * chunk


def shard_capacity(lengths: np.ndarray, layers: int, hidden_size: int, wanted: int | None = None) -> int:
    """S: `wanted` rounded up to whole chunks, or the planner's choice. lengths: [n] int.

    Raises StatehouseError when the longest sequence does not fit `wanted`.
    """
    longest, chunk = int(lengths.max()), chunk_tokens(layers, hidden_size)
    if wanted is None:
        return shard_tokens(int(lengths.sum(dtype=np.int64)), longest, layers, hidden_size)
    if wanted < longest:
        raise StatehouseError(
            f"dataset.shard_tokens is {wanted}, but the longest sequence has {longest} tokens; "
            f"set it to at least {longest} or leave it out"
        )
    return -(-wanted // chunk) * chunk


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Best fit decreasing: each length goes, longest first, into the fullest shard that still has room.

    lengths: [n] int, each in 1..capacity; equal lengths are placed in the order given.
    Returns shard [n] int32, offset within the shard [n] int32, and the number of shards.
    """
    shard = np.empty(len(lengths), np.int32)
    offset = np.empty(len(lengths), np.int32)
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a shard with room r is open: finds the tightest fit with two big-int operations
    shards = 0
    for index in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[index])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            place = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, place = capacity, shards
            shards += 1
        shard[index], offset[index] = place, capacity - room
        if left := room - length:
            by_room.setdefault(left, []).append(place)
            rooms |= 1 << left
    return shard, offset, shards


@dataclass(frozen=True)
class WorkUnit:
    """One shard's worth of work. `rows` index the plan's table, in the order in which they lie in the shard."""

    shard: int
    rows: np.ndarray
    tokens: int


@dataclass(frozen=True)
class Plan:
    """`table` is `PLAN_SCHEMA` ordered by id; everything else of the store follows from it."""

    contract: Contract
    codec: str
    geometry: Geometry
    table: pa.Table

    @cached_property
    def hash(self) -> str:
        digest = hashlib.sha256()
        for column in self.table.columns:
            values = column.combine_chunks()
            if pa.types.is_string(values.type):
                for text in values.to_pylist():
                    raw = text.encode()
                    digest.update(len(raw).to_bytes(4, "little") + raw)
            else:
                digest.update(values.to_numpy(zero_copy_only=False).tobytes())
        return sha256_json(
            {
                "contract": self.contract.hash,
                "codec": self.codec,
                "geometry": self.geometry.model_dump(),
                "sequences": digest.hexdigest(),
            }
        )

    @property
    def tokens(self) -> int:
        """Tokens that will be stored."""
        return int(np.sum(self.column("length")))

    @property
    def loss_tokens(self) -> int:
        return int(np.sum(self.column("loss_tokens")))

    def column(self, name: str) -> np.ndarray:
        return self.table[name].to_numpy()

    def shard_rows(self) -> np.ndarray:
        """Used tokens of each shard: [shards] int64. They lie at its beginning without a gap."""
        return np.bincount(self.column("shard"), weights=self.column("length"), minlength=self.geometry.shards).astype(
            np.int64
        )

    def units(self) -> Iterator[WorkUnit]:
        """Shards in order."""
        shard, start, length = self.column("shard"), self.column("start"), self.column("length")
        order = np.lexsort((start, shard))
        for rows in np.split(order, np.flatnonzero(np.diff(shard[order])) + 1):
            yield WorkUnit(int(shard[rows[0]]), rows, int(length[rows].sum()))


def make_plan(sequences: pa.Table, contract: Contract, codec: str, *, shard_length: int | None = None) -> Plan:
    """Places `sequences` (`TOKENS_SCHEMA`, ordered by id, ids unique).

    Raises StatehouseError when there are none, when an id is outside the vocabulary, or when `shard_length` is too
    short for the longest sequence.
    """
    codec_by_name(codec)
    if not len(sequences):
        raise StatehouseError("there is nothing to plan: no sequences; check that prepare accepted some prompts")
    lists = sequences["token_ids"].combine_chunks()
    lengths = lists.value_lengths().to_numpy().astype(np.int32)
    ids = lists.flatten().to_numpy()
    if len(outside := np.flatnonzero((ids < 0) | (ids >= contract.vocab_size))):
        row = int(np.searchsorted(np.cumsum(lengths), outside[0], side="right"))
        raise StatehouseError(
            f"sequence {sequences['id'][row]} holds token id {ids[outside[0]]}, "
            f"outside the verifier's vocabulary of {contract.vocab_size}"
        )
    layers, hidden_size = contract.layers, contract.hidden_size
    chunk = chunk_tokens(layers, hidden_size)
    capacity = shard_capacity(lengths, layers, hidden_size, shard_length)
    shard, offset, shards = pack(lengths, capacity)
    table = pa.table(
        {
            "id": sequences["id"],
            "source": sequences["source"],
            "group": sequences["group"],
            "start": shard.astype(np.int64) * capacity + offset,
            "length": lengths,
            "loss_tokens": _loss_tokens(sequences),
            "shard": shard,
        },
        schema=PLAN_SCHEMA,
    )
    geometry = Geometry(
        layers=layers, hidden_size=hidden_size, chunk_tokens=chunk, shard_tokens=capacity, shards=shards
    )
    return Plan(contract, codec, geometry, table)


def _loss_tokens(sequences: pa.Table) -> np.ndarray:
    masks = sequences["loss_mask"].combine_chunks()
    flat = masks.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    starts = masks.offsets.to_numpy()[:-1] - masks.offsets.to_numpy()[0]
    return np.add.reduceat(flat, starts).astype(np.int32)
