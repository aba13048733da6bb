"""Copying a sealed dataset between stores: every object is checked on its way, and the seal is written last.

The copy is a dataset like any other while it is made: planned first, sealed last, so whoever meets it half done is told
so. Run the same command again after any failure: what is there and right is not sent twice.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storage import layout
from storage.commit import load_plan_document
from storage.errors import DatasetMissing, PlanConflict, ShardCorrupt
from storage.fetch import twice
from storage.objects import ObjectMissing, ObjectStore
from storage.proof import Proof
from storage.receipt import Receipt
from storage.seal import load_seals, load_shards_table, seal_key, shards_table_key
from storage.shard import read_footer
from storage.shard_check import Progress
from storage.verify import Report, planned_keys, verify


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
    document, seals = twice(lambda: load_plan_document(source)), twice(lambda: load_seals(source))
    table = twice(lambda: load_shards_table(source, seals[-1]))
    target.probe()
    try:
        if (there := load_plan_document(target)).plan_hash != document.plan_hash:
            raise PlanConflict(
                f"{target.uri} already holds another dataset (plan {there.plan_hash[:12]}, {source.uri} has "
                f"{document.plan_hash[:12]}); choose another target"
            )
    except DatasetMissing:
        pass
    copier = _Copier(source, target, Proof(document, seals, table), progress or (lambda _bytes: None))
    rows = {layout.shard_key(row["shard"]): row for row in table.to_pylist()}
    sizes = source.sizes()
    last = [shards_table_key(seal.number) for seal in seals] + [seal_key(seal.number) for seal in seals]
    planned = planned_keys(document, len(seals))
    rest = [key for key in sizes if key in planned or key.startswith("teacher/")]
    small = [key for key in rest if key not in rows and key not in last and key != layout.PLAN]
    copier.small(layout.PLAN)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(copier.small, sorted(small)))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda key: copier.shard(key, rows[key]), sorted(rows, key=lambda k: rows[k]["shard"])))
    for key in last:
        if key in sizes or key.endswith(".json"):  # tables of older seals may be gone
            copier.small(key)
    return verify(target, full=full)


class _Copier:
    def __init__(self, source: ObjectStore, target: ObjectStore, proof: Proof, progress: Progress) -> None:
        self.source, self.target, self.proof, self.progress = source, target, proof, progress
        self.there = target.sizes()

    def small(self, key: str) -> None:
        data = twice(lambda: self._read(key))
        if self.there.get(key) == len(data) and self.target.get(key) == data:
            self.progress(len(data))
        else:
            self._write(key, data)

    def shard(self, key: str, row: dict[str, Any]) -> None:
        sealed = Receipt.model_validate_json(row["receipt"])
        if self.there.get(key) == row["object_bytes"]:
            try:
                footer = read_footer(self.target, key, self.proof.identity, row["shard"], offset=sealed.offset_hash)
            except (ShardCorrupt, ObjectMissing):
                pass
            else:
                if footer.text == row["receipt"]:
                    self.progress(row["object_bytes"])
                    return
        self._write(key, twice(lambda: self._read(key)))

    def _read(self, key: str) -> bytes:
        data = self.source.get(key)
        if (what := self.proof.wrong(key, data)) is not None:
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
