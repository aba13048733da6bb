"""A sealed dataset of a million sequences, without its states: what opening it costs does not depend on them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.corpus import contract
from storage import layout, seal
from storage.commit import ObjectDigest, digest, plan_document, publish_offset, signed_json
from storage.objects import ObjectStore
from storage.plan import Plan, plan_lengths
from storage.receipt import Receipt
from storage.shards_table import Scanned
from storage.writer import offset_hash


def length_mix(count: int) -> np.ndarray:
    """Log-normal lengths as chat corpora have them: mean about 1,700, at most 8,192: [count] int32."""
    return np.clip(np.random.default_rng(0).lognormal(7.13, 0.8, count), 1, 8192).astype(np.int32)


def length_table(count: int) -> pa.Table:
    lengths, source = length_mix(count), np.array(["chat", "code", "maths"])
    digits = np.random.default_rng(1).bytes(16 * count).hex()  # ids are hashes: no Parquet makes them smaller
    return pa.table(
        {
            "id": sorted(digits[32 * row : 32 * row + 32] for row in range(count)),
            "source": source[np.arange(count) % 3],
            "group": [f"g{row // 2}" for row in range(count)],
            "length": lengths,
            "loss_tokens": lengths // 2,
        }
    )


def write_without_states(store: ObjectStore, plan: Plan) -> None:
    """Everything that opening reads, with receipts of states that are not there."""
    offset = publish_offset(store, np.full((plan.geometry.layers, plan.geometry.hidden_size), 127, np.uint8))
    parquet = layout.parquet_bytes(plan.table)
    store.put(layout.SEQUENCES, parquet)
    objects = {layout.SEQUENCES: ObjectDigest(bytes=len(parquet), sha256=digest(parquet))}
    for chunk in range(-(-plan.geometry.tokens // layout.TOKEN_CHUNK)):
        for array in ("tokens", "loss_mask"):
            objects[layout.token_key(array, chunk)] = ObjectDigest(bytes=1 << 21, sha256=digest(b"%d" % chunk))
    store.put(layout.PLAN, signed_json(plan_document(plan, objects)))
    rows = plan.shard_rows().tolist()
    common = {
        "plan_hash": plan.hash,
        "contract_hash": plan.contract.hash,
        "offset_hash": offset_hash(plan.codec, offset),
        "codec": plan.codec,
    }
    receipts = [_receipt(common, shard, used) for shard, used in enumerate(rows)]
    assert seal._publish(store, plan, receipts, 1, None, [], None) is not None


def _receipt(common: dict[str, Any], shard: int, rows: int) -> Scanned:
    receipt = Receipt(
        **common,
        shard=shard,
        rows=rows,
        sequences=5,
        data_bytes=rows * 38000,
        data_sha256=digest(b"data %d" % shard),
        index_sha256=digest(b"index %d" % shard),
        layer_rms=[1.0, 2.0, 3.0, 4.0 + shard],
        non_finite=0,
        written_by={"host": "node", "pid": shard, "engine": "synthetic"},
    )
    return Scanned(receipt, rows * 38000 + 10_000, receipt.model_dump_json())


class CountingStore:
    """Passes everything on to a store and counts the calls."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self.calls = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if not callable(value):
            return value

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return value(*args, **kwargs)

        return counted


__all__ = ["CountingStore", "contract", "length_table", "plan_lengths", "write_without_states"]
