"""The third act: every planned shard is checked against its receipt, then seal.json is PUT, create-only.

The seal's fingerprint names the content: contract, plan, and the digest of every shard. Readers refuse datasets without.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from storage import layout
from storage.commit import digest, load_document, load_offset, offset_hash, package_versions
from storage.contract import canonical_json, sha256_json
from storage.errors import DatasetNotSealed, ShardCorrupt
from storage.objects import ObjectMissing, ObjectStore
from storage.plan import Plan
from storage.receipt import Receipt
from storage.shard import ShardIdentity, read_footer
from storage.writer import shard_identity

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


class Seal(BaseModel):
    """seal.json. Keys of a later minor version are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: str
    format_version: str
    fingerprint: str
    plan_hash: str
    contract_hash: str
    offset_hash: str | None
    shards_sha256: str
    sequences: int
    tokens: int
    loss_tokens: int
    shards: int
    raw_bytes: int
    stored_bytes: int
    quarantined: dict[str, str] = {}
    sealed_at: str
    written_by: dict[str, str]
    provenance: dict[str, Any] = {}


def scan_shards(
    store: ObjectStore, plan: Plan, only: Sequence[int] | None = None, threads: int = 16
) -> tuple[dict[int, tuple[Receipt, int]], dict[int, str]]:
    """Reads the footer of every planned shard: {shard: (receipt, object bytes)} of the good ones, {shard: why} of the bad.

    Shards in neither are missing. Bad: damaged, of another plan, or with other offsets than those stored.
    """
    identity: ShardIdentity = shard_identity(plan)
    offset = offset_hash(plan.codec, load_offset(store, (plan.geometry.layers, plan.geometry.hidden_size)))
    sizes = store.sizes("hidden")
    rows = plan.shard_rows()
    wanted = range(plan.geometry.shards) if only is None else only
    present = [shard for shard in wanted if layout.shard_key(shard) in sizes]
    good: dict[int, tuple[Receipt, int]] = {}
    bad: dict[int, str] = {}

    def check(shard: int) -> None:
        key = layout.shard_key(shard)
        try:
            footer = read_footer(store, key, identity, shard, offset=offset, rows=int(rows[shard]))
            good[shard] = (footer.receipt, sizes[key])
        except ObjectMissing:
            pass
        except ShardCorrupt as error:
            bad[shard] = str(error)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check, present))
    return good, bad


def seal_dataset(store: ObjectStore, plan: Plan, provenance: dict[str, Any] | None = None) -> Seal:
    """Seals a complete dataset; returns the seal that is there if somebody else was first.

    Raises ShardCorrupt naming bad shards, DatasetNotSealed naming missing ones.
    """
    good, bad = scan_shards(store, plan)
    if bad:
        shard, why = min(bad.items())
        raise ShardCorrupt(f"{why}" if len(bad) == 1 else f"{len(bad)} bad shards ({_some(bad)}); shard {shard}: {why}")
    if missing := sorted(set(range(plan.geometry.shards)) - set(good)):
        raise DatasetNotSealed(
            f"{store.uri}: {len(missing)} of {plan.geometry.shards} shards are missing ({_some(missing)}); "
            "run the extract job again to fill them"
        )
    receipts = [good[shard] for shard in range(plan.geometry.shards)]
    copies = store.sizes("receipts")
    for receipt, _ in receipts:  # a writer killed between a shard and its copy left it out
        if layout.receipt_key(receipt.shard) not in copies:
            store.put(layout.receipt_key(receipt.shard), receipt.model_dump_json(indent=1).encode() + b"\n")
    table = _shards_table(receipts)
    fingerprint = sha256_json(
        {
            "contract": plan.contract.hash,
            "plan": plan.hash,
            "shards": [[receipt.data_sha256, receipt.index_sha256] for receipt, _ in receipts],
        }
    )
    store.create(layout.SHARDS, layout.parquet_bytes(table))
    stored = store.get(layout.SHARDS)
    if not _holds(stored, table):
        raise ShardCorrupt(
            f"{store.uri}/{layout.SHARDS}: does not hold the receipts of the shards; delete it and run the extract job again"
        )
    seal = Seal(
        format=layout.FORMAT,
        format_version=layout.FORMAT_VERSION,
        fingerprint=fingerprint,
        plan_hash=plan.hash,
        contract_hash=plan.contract.hash,
        offset_hash=receipts[0][0].offset_hash,
        shards_sha256=digest(stored),
        sequences=len(plan.table),
        tokens=plan.tokens,
        loss_tokens=plan.loss_tokens,
        shards=plan.geometry.shards,
        raw_bytes=plan.tokens * plan.geometry.bytes_per_token,
        stored_bytes=sum(size for _, size in receipts),
        quarantined={key: why for receipt, _ in receipts for key, why in receipt.quarantined.items()},
        sealed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        written_by=package_versions("statehouse", "pyarrow", "numpy", "zstandard"),
        provenance=provenance or {},
    )
    if not store.create(layout.SEAL, canonical_json(seal.model_dump(mode="json")) + b"\n"):
        found = load_seal(store)
        if found.fingerprint != fingerprint:
            raise ShardCorrupt(
                f"{store.uri}/{layout.SEAL}: seals {found.fingerprint[:12]}, but the shards make {fingerprint[:12]}; "
                "somebody changed shards after the seal: restore them from a copy"
            )
        return found
    return seal


def load_seal(store: ObjectStore) -> Seal:
    """Raises DatasetNotSealed when there is none, ShardCorrupt when it is damaged."""
    try:
        return load_document(store, layout.SEAL, Seal)
    except ObjectMissing:
        raise DatasetNotSealed(
            f"{store.uri}: not sealed, so shards may be missing; finish it with `python -m ray_jobs.extract RECIPE`, "
            "or open it with partial=True (--partial) to see the finished shards only"
        ) from None


def load_shards_table(store: ObjectStore, seal: Seal) -> pa.Table:
    """`SHARDS_SCHEMA`, ordered by shard. Raises ShardCorrupt when it is not what the seal names."""
    try:
        data = store.get(layout.SHARDS)
    except ObjectMissing:
        data = b""
    if digest(data) != seal.shards_sha256:
        raise ShardCorrupt(f"{store.uri}/{layout.SHARDS}: missing or changed since the seal; restore it from a copy")
    return pq.read_table(pa.BufferReader(data))


def _holds(data: bytes, table: pa.Table) -> bool:
    """Whether bytes are a Parquet file of this very table."""
    try:
        return bool(pq.read_table(pa.BufferReader(data)).equals(table))
    except pa.ArrowException:
        return False


def _shards_table(receipts: list[tuple[Receipt, int]]) -> pa.Table:
    columns: dict[str, list[Any]] = {
        name: [getattr(receipt, name) for receipt, _ in receipts]
        for name in SHARDS_SCHEMA.names
        if name not in ("object_bytes", "receipt")
    }
    columns["object_bytes"] = [size for _, size in receipts]
    columns["receipt"] = [receipt.model_dump_json() for receipt, _ in receipts]
    return pa.table({name: columns[name] for name in SHARDS_SCHEMA.names}, schema=SHARDS_SCHEMA)


def _some(shards: Any) -> str:
    named = sorted(shards)
    return ", ".join(map(str, named[:8])) + (", ..." if len(named) > 8 else "")
