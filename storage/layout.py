"""Keys and array metadata of a dataset: the one place that knows how its folder is laid out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.codecs import codec_by_name
from storage.plan import Plan
from storage.teacher import teacher_metadata
from storage.token_chunks import SequenceRows, TableRows, token_chunks
from storage.zarr_array import array_metadata, group_metadata, sharded_metadata

FORMAT = "statehouse"
# Readers refuse a higher major version; a minor one only adds what old readers may ignore.
FORMAT_VERSION = "1.1"

PLAN = "plan.json"
ROOT = "zarr.json"
SEQUENCES = "sequences.parquet"
SHARDS = "shards.parquet"
SEAL = "seal.json"
OFFSET = "exponent_offset/c/0/0"

# Token ids and masks: 1 Mi tokens an object, so 1.7 billion tokens are 1,622 objects of each.
TOKEN_CHUNK = 1 << 20


def shard_key(shard: int) -> str:
    return f"hidden/c/0/{shard}/0/0"


def receipt_key(shard: int) -> str:
    return f"receipts/{shard}.json"


def token_key(array: str, chunk: int) -> str:
    return f"{array}/c/{chunk}"


def parquet_bytes(table: pa.Table) -> bytes:
    """Deterministic for one version of pyarrow (recorded in the plan)."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=1 << 17)
    return sink.getvalue().to_pybytes()


def plan_objects(plan: Plan, sequences: pa.Table | SequenceRows) -> Iterator[tuple[str, bytes]]:
    """Every object that is written at plan time except plan.json: (key, bytes), one at a time.

    sequences: what the plan was made from, a table of `TOKENS_SCHEMA` or `storage.spool.SpooledSequences`.
    """
    geometry, contract, codec = plan.geometry, plan.contract, codec_by_name(plan.codec)
    total, layers, hidden_size = geometry.tokens, geometry.layers, geometry.hidden_size
    attributes = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "plan_hash": plan.hash,
        "codec": plan.codec,
        "contract": contract.model_dump(mode="json"),
        "teacher": plan.teacher,
    }
    yield ROOT, group_metadata(attributes)
    yield SEQUENCES, parquet_bytes(plan.table)
    yield (
        "hidden/zarr.json",
        sharded_metadata(
            shape=[2, total, layers, hidden_size],
            shards=[2, geometry.shard_tokens, layers, hidden_size],
            chunks=[1, geometry.chunk_tokens, layers, hidden_size],
            fill_value=codec.fill_value,
            dimension_names=["plane", "token", "layer", "channel"],
            inner_codecs=codec.zarr_codecs,
        ),
    )
    if codec.needs_offset:
        shape = [layers, hidden_size]
        yield "exponent_offset/zarr.json", array_metadata(shape, shape, "uint8", 0, ["layer", "channel"])
    yield from teacher_metadata(plan.teacher, total, geometry.shard_tokens)
    for array, dtype, fill in (("tokens", np.dtype("int32"), -1), ("loss_mask", np.dtype("bool"), False)):
        yield f"{array}/zarr.json", array_metadata([total], [TOKEN_CHUNK], dtype.name, fill, ["token"])
    rows = TableRows(sequences) if isinstance(sequences, pa.Table) else sequences
    for chunk, ids, mask in token_chunks(plan.column("start"), plan.column("length"), total, rows, TOKEN_CHUNK):
        yield token_key("tokens", chunk), ids
        yield token_key("loss_mask", chunk), mask
