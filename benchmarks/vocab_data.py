"""Synthetic token ids for `benchmarks.vocab`: Zipf-like over 163,840, an eighth of every sequence without loss.

In memory, as a Parquet file, and as a sealed dataset. All of it is made from one seed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCAB, LENGTH = 163_840, 1024
# Ids of which longer data are made: drawing them all would take a minute for a billion.
_POOL = 1 << 24
_BLOCK = 1 << 20


def zipf_ids(tokens: int, seed: int = 0) -> np.ndarray:
    """[tokens] int32 ids with frequency about 1 / rank^1.05, ranks shuffled over the vocabulary."""
    random = np.random.default_rng(seed)
    share = np.cumsum(1.0 / np.arange(1, VOCAB + 1) ** 1.05)
    ids = np.random.default_rng(0).permutation(VOCAB).astype(np.int32)
    out = np.empty(tokens, np.int32)
    for start in range(0, tokens, _BLOCK):
        draws = random.random(min(_BLOCK, tokens - start)) * share[-1]
        out[start : start + draws.size] = ids[np.searchsorted(share, draws)]
    return out


def loss_mask(tokens: int) -> np.ndarray:
    """[tokens] bool: whole sequences of `LENGTH`, the first eighth of each is the prompt."""
    mask = np.ones((tokens // LENGTH, LENGTH), np.bool_)
    mask[:, : LENGTH // 8] = False
    return mask.reshape(-1)


@functools.lru_cache(maxsize=1)
def _pool() -> np.ndarray:
    return zipf_ids(_POOL)


def sequences(count: int) -> Iterator[np.ndarray]:
    """`count` sequences of `LENGTH` ids, no two alike: each a window of one pool of ids, at an offset of its own."""
    offsets = np.random.default_rng(1).choice(_POOL - LENGTH, count, replace=False)
    return (_pool()[at : at + LENGTH] for at in offsets.tolist())


def write_parquet(path: Path, tokens: int) -> None:
    """One Parquet file of token_ids and loss_mask, a million tokens a row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("token_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))])
    flat = np.concatenate(list(sequences(tokens // LENGTH)))
    with pq.ParquetWriter(path, schema, compression="lz4", use_dictionary=False) as writer:
        for start in range(0, flat.size, _BLOCK):
            part = flat[start : start + _BLOCK]
            offsets = pa.array(np.arange(0, part.size + 1, LENGTH, dtype=np.int32))
            ids = pa.ListArray.from_arrays(offsets, pa.array(part))
            mask = pa.ListArray.from_arrays(offsets, pa.array(loss_mask(part.size)))
            writer.write_table(pa.Table.from_arrays([ids, mask], schema=schema))


def write_dataset(uri: str, tokens: int) -> None:
    """A sealed dataset of the same sequences in three sources, with states of width 1: small beside their tokens."""
    import ml_dtypes

    from storage.commit import publish_plan
    from storage.contract import Contract
    from storage.objects import open_store
    from storage.plan import make_plan
    from storage.seal import seal_dataset
    from storage.sequences import Sequence, sequence_table
    from storage.writer import ShardWriter

    mask, names = loss_mask(LENGTH), ("chat", "code", "maths")
    table = sequence_table(
        Sequence(names[at % 3], f"group-{at // 2}", ids, mask) for at, ids in enumerate(sequences(tokens // LENGTH))
    )
    contract = Contract.model_validate(
        {"verifier": "synthetic", "config_hash": "c", "weights_hash": "w", "vocab_size": VOCAB, "hidden_size": 1,
         "num_layers": 8, "tokenizer_hash": "t", "capture_layers": (1,), "engine": "none", "engine_version": "1",
         "engine_dtype": "bfloat16"}
    )  # fmt: skip
    plan = make_plan(table, contract, "raw")
    publish_plan(open_store(uri), plan, table)
    writer = ShardWriter.from_uri(uri)
    for unit in plan.units():
        rows = int(plan.column("length")[unit.rows].sum())
        bits = np.zeros((rows, plan.geometry.layers, 1), ml_dtypes.bfloat16).view(np.uint16)
        if not writer.calibrated:
            writer.calibrate(bits[:64])
        writer.write(unit.shard, bits, len(unit.rows))
    seal_dataset(open_store(uri), plan)
