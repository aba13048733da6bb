"""shards.parquet: what the receipts of all shards say, as one table."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from storage.fingerprint import covered
from storage.receipt import Receipt

SHARDS_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("rows", pa.int32()),
        ("sequences", pa.int32()),
        ("object_bytes", pa.int64()),
        ("data_bytes", pa.int64()),
        ("data_sha256", pa.string()),
        ("index_sha256", pa.string()),
        ("non_finite", pa.int64()),
        ("layer_rms", pa.list_(pa.float64())),
        ("receipt", pa.string()),
    ]
)


# Of datasets with a teacher summary: one digest over the shard's teacher objects.
TEACHER_COLUMN = pa.field("teacher_sha256", pa.string())


class Scanned(NamedTuple):
    """What the footer of a shard says. text: the receipt as it is written, with the keys of a later minor version."""

    receipt: Receipt
    object_bytes: int
    text: str


def shards_table(receipts: list[Scanned]) -> pa.Table:
    """`SHARDS_SCHEMA` of receipts in the order of their shards."""
    columns: dict[str, list[Any]] = {
        name: [getattr(one.receipt, name) for one in receipts]
        for name in SHARDS_SCHEMA.names
        if name not in ("object_bytes", "receipt")
    }
    columns["object_bytes"] = [one.object_bytes for one in receipts]
    columns["receipt"] = [one.text for one in receipts]
    table = pa.table({name: columns[name] for name in SHARDS_SCHEMA.names}, schema=SHARDS_SCHEMA)
    if not any(one.receipt.teacher for one in receipts):
        return table
    return table.append_column(TEACHER_COLUMN, pa.array([one.receipt.teacher_sha256 for one in receipts], pa.string()))


def covered_by(table: pa.Table) -> list[list[str]]:
    """What the fingerprint covers of each shard."""
    digests = [table[name].to_pylist() for name in ("data_sha256", "index_sha256")]
    there = TEACHER_COLUMN.name in table.schema.names
    teacher = table[TEACHER_COLUMN.name].to_pylist() if there else [None] * len(table)
    return [covered(*three) for three in zip(*digests, teacher, strict=True)]


def holds(data: bytes, table: pa.Table) -> bool:
    """Whether bytes are a Parquet file of this very table."""
    try:
        return bool(pq.read_table(pa.BufferReader(data)).equals(table))
    except (pa.ArrowException, OSError):  # OSError: what pyarrow calls a damaged file
        return False
