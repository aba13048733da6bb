"""Copying a sealed dataset between stores: every object is checked on its way, and the seal is written last.

The copy is a dataset like any other while it is made: planned first, sealed last, so whoever meets it half done is told
so. Run the same command again after any failure: what is there and right is not sent twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storage import layout
from storage.commit import digest, load_plan_document
from storage.errors import DatasetMissing, PlanConflict, ShardCorrupt
from storage.objects import ObjectMissing, ObjectStore
from storage.receipt import Receipt
from storage.seal import load_seals, load_shards_table, seal_key, shards_table_key
from storage.shard import ShardIdentity, read_footer
from storage.shard_check import Progress
from storage.verify import Report, planned_keys, verify

Check = Callable[[bytes], str | None]


def copy_dataset(
    source: ObjectStore,
    target: ObjectStore,
    *,
    full: bool = False,
    threads: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Copies a sealed dataset and verifies the copy: quickly, or with `full` by reading every byte of it again.

    threads: shards on their way at once, each whole in memory (about 350 MB at H = 7168).
    Raises DatasetNotSealed, ShardCorrupt naming an object that is damaged in the source or another one in the target, and
    PlanConflict when the target holds another dataset.
    """
    document, seals = load_plan_document(source), load_seals(source)
    table = load_shards_table(source, seals[-1])
    target.probe()
    try:
        if (there := load_plan_document(target)).plan_hash != document.plan_hash:
            raise PlanConflict(
                f"{target.uri} already holds another dataset (plan {there.plan_hash[:12]}, {source.uri} has "
                f"{document.plan_hash[:12]}); choose another target"
            )
    except DatasetMissing:
        pass
    copier = _Copier(source, target, progress or (lambda _bytes: None))
    identity = ShardIdentity(document.plan_hash, document.contract.hash, document.codec, document.geometry)
    rows = {layout.shard_key(row["shard"]): row for row in table.to_pylist()}
    sizes = source.sizes()
    last = [shards_table_key(seal.number) for seal in seals] + [seal_key(seal.number) for seal in seals]
    planned = planned_keys(document, len(seals))
    rest = [key for key in sizes if key in planned or key.startswith("teacher/")]
    small = [key for key in rest if key not in rows and key not in last and key != layout.PLAN]
    copier.small(layout.PLAN)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: copier.small(key, _plan_check(key, document.objects)), sorted(small)))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda key: copier.shard(key, rows[key], identity), sorted(rows, key=lambda k: rows[k]["shard"])))
    for key in last:
        if key in sizes:  # tables of older seals may be gone
            copier.small(key)
    return verify(target, full=full)


def _plan_check(key: str, objects: dict[str, Any]) -> Check:
    def check(data: bytes) -> str | None:
        if key in objects and digest(data) != objects[key].sha256:
            return f"sha256 {digest(data)[:12]}, plan.json says {objects[key].sha256[:12]}"
        return None

    return check


class _Copier:
    def __init__(self, source: ObjectStore, target: ObjectStore, progress: Progress) -> None:
        self.source, self.target, self.progress = source, target, progress
        self.there = target.sizes()

    def small(self, key: str, check: Check | None = None) -> None:
        data = self._read(key, check)
        if self.there.get(key) == len(data) and self.target.get(key) == data:
            self.progress(len(data))
        else:
            self._write(key, data)

    def shard(self, key: str, row: dict[str, Any], identity: ShardIdentity) -> None:
        sealed = Receipt.model_validate_json(row["receipt"])
        if self.there.get(key) == row["object_bytes"]:
            try:
                footer = read_footer(self.target, key, identity, row["shard"], offset=sealed.offset_hash)
            except (ShardCorrupt, ObjectMissing):
                pass
            else:
                if footer.receipt == sealed:
                    self.progress(row["object_bytes"])
                    return

        def check(data: bytes) -> str | None:
            if len(data) != row["object_bytes"]:
                return f"{len(data):,} bytes, sealed with {row['object_bytes']:,}"
            text = data[sealed.data_bytes : -identity.index_bytes - 12]
            whole = (
                hashlib.sha256(memoryview(data)[: sealed.data_bytes]).hexdigest() == sealed.data_sha256
                and digest(data[-identity.index_bytes :]) == sealed.index_sha256
                and text == row["receipt"].encode()
            )
            return None if whole else "its bytes are not those that were sealed"

        self._write(key, self._read(key, check))

    def _read(self, key: str, check: Check | None) -> bytes:
        data = self.source.get(key)
        if check is not None and (what := check(data)) is not None:
            raise ShardCorrupt(f"{self.source.uri}/{key}: {what}; run `statehouse verify {self.source.uri}`")
        return data

    def _write(self, key: str, data: bytes) -> None:
        if not self.target.create(key, data) and self.target.get(key) != data:
            raise ShardCorrupt(
                f"{self.target.uri}/{key}: holds something else than {self.source.uri}; if it is a copy that was damaged, "
                f"run `statehouse repair {self.target.uri} --from {self.source.uri}`, otherwise choose another target"
            )
        self.progress(len(data))


def copy_bytes(source: ObjectStore) -> int:
    """Bytes that `copy_dataset` moves. Raises DatasetNotSealed."""
    document, seals = load_plan_document(source), load_seals(source)
    planned = planned_keys(document, len(seals))
    return sum(size for key, size in source.sizes().items() if key in planned or key.startswith("teacher/"))
