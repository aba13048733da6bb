"""Verifying: does the store still hold what was written?

`quick` lists the store and reads what is small: plan, seals, tables, and every shard's footer (receipt and index), each
compared with the seal; it costs one request a shard. `full` reads every byte: sha256 of every shard and plan object,
crc32c and length of every chunk, fill behind the last used token, and the content id of every sequence, made again from
its tokens and mask.

Nothing is changed and nothing raised for damage: a `Report` lists every finding with the command that fixes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.commit import (
    SIGNATURE,
    PlanDocument,
    get_checked,
    load_offset,
    load_plan_document,
    offset_hash,
    restore_command,
)
from storage.contract import canonical_json
from storage.errors import DatasetNotSealed, ShardCorrupt, StatehouseError
from storage.objects import ObjectMissing, ObjectStore
from storage.plan import PLAN_SCHEMA, Plan
from storage.receipt import Receipt
from storage.seal import (
    Seal,
    load_seals,
    load_shards_table,
    receipt_copy,
    seal_key,
    shards_table_key,
)
from storage.sequences import sequence_id
from storage.shard import read_footer
from storage.shard_check import Progress, check_shard
from storage.teacher import FOLDER, NONE, teacher_keys, wrong_object
from storage.writer import document_identity
from storage.zarr_array import decode_chunk

_TOKEN_ARRAYS = (("tokens", "int32"), ("loss_mask", "bool"))


@dataclass(frozen=True)
class Finding:
    """One object that is not what it must be. shard: its number, for shard objects. what: expected and found."""

    key: str
    what: str
    fix: str
    shard: int | None = None


@dataclass
class Report:
    """What `verify` found. `ok` says that everything which was looked at is whole."""

    uri: str
    mode: str
    sealed: bool = False
    fingerprint: str | None = None
    shards: int = 0
    shards_present: int = 0
    objects: int = 0
    bytes_checked: int = 0
    findings: list[Finding] = field(default_factory=list)
    # Keys that no plan and no seal names: harmless, `statehouse gc` removes them.
    unplanned: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def bad_shards(self) -> list[int]:
        return sorted({finding.shard for finding in self.findings if finding.shard is not None})


def verify(
    store: ObjectStore,
    *,
    full: bool = False,
    only: Iterable[int] | None = None,
    progress: Progress | None = None,
    threads: int = 4,
) -> Report:
    """Checks a dataset, sealed or not (then: what is there of it).

    only: of the shards, these. progress(bytes) is called as bytes have been checked.
    Raises DatasetMissing, and ShardCorrupt when plan.json itself is damaged (nothing can be checked without it).
    """
    return _Check(store, full, only, progress or (lambda _bytes: None), threads).run()


def planned_keys(document: PlanDocument, seals: int) -> set[str]:
    """Every key that belongs to a dataset with this plan and this many seals."""
    shards = range(document.geometry.shards)
    keys = {layout.PLAN, layout.OFFSET, *document.objects}
    keys |= {layout.shard_key(shard) for shard in shards} | {layout.receipt_key(shard) for shard in shards}
    keys |= {key for shard in shards for key in teacher_keys(document.teacher, shard)}
    keys |= {seal_key(number) for number in range(1, seals + 1)}
    return keys | {shards_table_key(number) for number in range(1, max(1, seals) + 1)}


def unplanned_keys(sizes: Iterable[str], document: PlanDocument, seals: int) -> list[str]:
    """Keys that no plan and no seal names. Datasets nested under this one, and arrays of later versions, are left out.

    So is the table of receipts of the next seal: a repair that was cut off leaves it, and the next one may take it up at any
    time, which a collector cannot notice.
    """
    sizes = set(sizes)
    nested = tuple(key[: -len(layout.PLAN)] for key in sizes if key.endswith(f"/{layout.PLAN}"))
    known = planned_keys(document, seals) | {shards_table_key(seals + 1)}
    later = document.teacher == NONE  # a summary that was added by other software
    return sorted(
        key
        for key in sizes
        if key not in known and not (later and key.startswith(FOLDER)) and not (nested and key.startswith(nested))
    )


def seals_beyond(keys: Iterable[str], seals: int) -> list[str]:
    """Keys that say that there were more seals than an unbroken chain of `seals`: later seals, and their tables of receipts.

    The table just after the chain says nothing: a repair that was cut off before its seal leaves it.
    """
    numbered = ((key, re.fullmatch(r"(?:seal-(\d{4,})\.json|shards-(\d{4,})\.parquet)", key)) for key in keys)
    return sorted(key for key, found in numbered if found and int(found[1] or int(found[2]) - 1) > seals)


class _Check:
    def __init__(
        self, store: ObjectStore, full: bool, only: Iterable[int] | None, progress: Progress, threads: int
    ) -> None:
        self.store, self.full, self.threads = store, full, threads
        self.document = load_plan_document(store)
        self.only = None if only is None else set(only)
        self.identity = document_identity(self.document)
        self.report = Report(store.uri, "full" if full else "quick", shards=self.document.geometry.shards)
        self.seal: Seal | None = None
        self._progress, self._lock = progress, Lock()

    def checked(self, count: int) -> None:
        with self._lock:
            self.report.bytes_checked += count
        self._progress(count)

    def bad(self, key: str, what: str, fix: str, shard: int | None = None) -> None:
        prefix = f"{self.store.uri}/{key}: "
        with self._lock:
            self.report.findings.append(Finding(key, what.removeprefix(prefix), fix, shard))

    @property
    def repair(self) -> str:
        return f"statehouse repair {self.store.uri}"

    @property
    def refill(self) -> str:
        other = f", or {restore_command(self.store.uri)}" if self.seal else ""
        return f"python -m ray_jobs.extract RECIPE --repair{other}"

    def run(self) -> Report:
        sizes = self.store.sizes()
        self.report.objects = len(sizes)
        table = self._seals()
        plan = self._plan_objects(sizes)
        offset = self._offset()
        receipts = self._shards(sizes, plan, table, offset)
        self._copies(sizes, receipts)
        if self.full and plan is not None and self.only is None:
            self._sequence_ids(plan)
        seals = self.seal.number if self.seal else 0
        self.report.unplanned = unplanned_keys(sizes, self.document, seals)
        if self.seal and (beyond := seals_beyond(sizes, seals)):
            what = f"missing, though {beyond[0]} is there"
            self.bad(seal_key(seals + 1), what, restore_command(self.store.uri))
        self.report.findings.sort(key=lambda finding: (finding.shard is not None, finding.shard or 0, finding.key))
        return self.report

    def _canonical(self, key: str) -> None:
        """A signed document is one byte string: whatever else reads the same was not written by us."""
        data = self.store.get(key)
        document = json.loads(data)
        if SIGNATURE not in document or data != canonical_json(document) + b"\n":
            self.bad(
                key,
                f"reads as it was written, but its bytes or its {SIGNATURE} do not",
                restore_command(self.store.uri),
            )

    def _seals(self) -> pa.Table | None:
        self._canonical(layout.PLAN)
        try:
            seals = load_seals(self.store)
        except DatasetNotSealed:
            return None
        except StatehouseError as error:
            key = next((k for k in map(seal_key, range(9, 0, -1)) if f"/{k}: " in str(error)), layout.SEAL)
            self.bad(key, str(error), restore_command(self.store.uri))
            return None
        self.seal = seal = seals[-1]
        self.report.sealed, self.report.fingerprint = True, seal.fingerprint
        for name, here in (("plan_hash", self.document.plan_hash), ("contract_hash", self.document.contract.hash)):
            if getattr(seal, name) != here:
                self.bad(
                    seal_key(seal.number), f"seals {name} {getattr(seal, name)}, plan.json has {here}", self.refill
                )
        for name in ("sequences", "tokens", "loss_tokens"):
            if getattr(seal, name) != getattr(self.document, name):
                what = f"{name} {getattr(seal, name):,}, plan.json says {getattr(self.document, name):,}"
                self.bad(seal_key(seal.number), what, restore_command(self.store.uri))
        newest: pa.Table | None = None
        for one in seals:
            self._canonical(seal_key(one.number))
            try:
                newest = load_shards_table(self.store, one)
            except ShardCorrupt as error:
                newest = None
                # Of an older seal only the fingerprint matters any more, and that is checked with its seal.
                if one is seal or "missing" not in str(error):
                    self.bad(shards_table_key(one.number), str(error), self.repair)
        return newest

    def _plan_objects(self, sizes: dict[str, int]) -> Plan | None:
        """Checks all plan objects; returns the plan when sequences.parquet is whole."""
        for key, expected in self.document.objects.items():
            if (found := sizes.get(key)) != expected.bytes:
                what = "missing" if found is None else f"{found:,} bytes, plan.json says {expected.bytes:,}"
                self.bad(key, what, self.refill)
            elif self.full or not key.startswith(("tokens/c/", "loss_mask/c/")):
                try:
                    self.checked(len(get_checked(self.store, key, self.document)))
                except ShardCorrupt as error:
                    self.bad(key, str(error).split("; ")[0], self.refill)
        if any(finding.key == layout.SEQUENCES for finding in self.report.findings):
            return None
        data = get_checked(self.store, layout.SEQUENCES, self.document)
        table = pq.read_table(pa.BufferReader(data)).cast(PLAN_SCHEMA)
        document = self.document
        plan = Plan(document.contract, document.codec, document.geometry, table, document.teacher)
        for name, here in (
            ("plan_hash", plan.hash),
            ("sequences", len(table)),
            ("tokens", plan.tokens),
            ("loss_tokens", plan.loss_tokens),
        ):
            if getattr(self.document, name) != here:
                what = f"{name} {getattr(self.document, name)}, {layout.SEQUENCES} makes {here}"
                self.bad(layout.PLAN, what, self.refill)
        return plan

    def _offset(self) -> str | None:
        """The hash of the offsets that count: the sealed one, or that of the object."""
        shape = (self.document.geometry.layers, self.document.geometry.hidden_size)
        fix = self.repair if self.seal and self.seal.offset_object else restore_command(self.store.uri)
        try:
            found = offset_hash(self.document.codec, load_offset(self.store, shape))
        except ShardCorrupt as error:
            self.bad(layout.OFFSET, str(error).split("; ")[0], fix)
            return self.seal.offset_hash if self.seal else None
        if self.seal and found != self.seal.offset_hash:
            what = f"holds {found[:12]}, sealed with {str(self.seal.offset_hash)[:12]}" if found else "missing"
            self.bad(layout.OFFSET, what, fix)
        return self.seal.offset_hash if self.seal else found

    def _shards(
        self, sizes: dict[str, int], plan: Plan | None, table: pa.Table | None, offset: str | None
    ) -> dict[int, Receipt]:
        rows = plan.shard_rows() if plan is not None else None
        sealed = {row["shard"]: row for row in table.to_pylist()} if table is not None else {}
        receipts: dict[int, Receipt] = {}

        def check(shard: int) -> None:
            key = layout.shard_key(shard)
            size = sizes.get(key)
            fix = f"python -m ray_jobs.extract RECIPE --repair --shards {shard}"
            if self.seal:
                fix += f", or {restore_command(self.store.uri)}"
            if size is None:
                if self.seal is not None:
                    self.bad(key, "missing", fix, shard)
                return
            if shard in sealed and size != sealed[shard]["object_bytes"]:
                self.bad(key, f"{size:,} bytes, sealed with {sealed[shard]['object_bytes']:,}", fix, shard)
                return
            try:
                planned = None if rows is None else int(rows[shard])
                footer = read_footer(self.store, key, self.identity, shard, offset=offset, rows=planned)
                if shard in sealed and footer.receipt != Receipt.model_validate_json(sealed[shard]["receipt"]):
                    raise ShardCorrupt("its receipt is not the sealed one: it was replaced after the seal")
                if self.full:
                    check_shard(self.store, key, footer, self.identity, self.checked)
                else:
                    self.checked(0)
                receipts[shard] = footer.receipt
                for name, named in footer.receipt.teacher.items():
                    if what := wrong_object(self.store, name, named, sizes.get(name), self.full):
                        self.bad(name, what, fix, shard)
                    else:
                        self.checked(named.bytes if self.full else 0)
            except ObjectMissing:
                self.bad(key, "vanished while it was verified", fix, shard)
            except ShardCorrupt as error:
                self.bad(key, str(error).split("; `python -m")[0], fix, shard)

        self.report.shards_present = sum(layout.shard_key(shard) in sizes for shard in range(self.report.shards))
        wanted = range(self.report.shards) if self.only is None else sorted(self.only)
        with ThreadPoolExecutor(self.threads if self.full else 4 * self.threads) as pool:
            list(pool.map(check, wanted))
        return receipts

    def _copies(self, sizes: dict[str, int], receipts: dict[int, Receipt]) -> None:
        """Copies of receipts: of an unsealed dataset they may still be missing, and only `full` reads them."""
        for shard, receipt in receipts.items():
            key = layout.receipt_key(shard)
            if key not in sizes:
                if self.seal is not None:
                    self.bad(key, "missing", self.repair)
            elif self.full:
                data = self.store.get(key)
                self.checked(len(data))
                if data != receipt_copy(receipt):
                    self.bad(key, "is no copy of the receipt inside its shard", self.repair)

    def _sequence_ids(self, plan: Plan) -> None:
        """Makes the id of every sequence again from the stored tokens and mask."""
        damaged = {finding.key for finding in self.report.findings}
        start, length = plan.column("start"), plan.column("length").astype(np.int64)
        ids = plan.table["id"]
        order = np.argsort(start)
        cache: dict[tuple[str, int], np.ndarray] = {}

        def values(array: str, dtype: str, low: int, high: int) -> np.ndarray | None:
            parts = []
            for chunk in range(low // layout.TOKEN_CHUNK, (high - 1) // layout.TOKEN_CHUNK + 1):
                key = layout.token_key(array, chunk)
                if key in damaged:
                    return None
                if (array, chunk) not in cache:
                    for old in [one for one in cache if one[0] == array and one[1] < chunk - 1]:
                        del cache[old]
                    try:
                        cache[array, chunk] = decode_chunk(self.store.get(key), dtype, [layout.TOKEN_CHUNK])
                    except ValueError as error:
                        self.bad(key, str(error), self.refill)
                        damaged.add(key)
                        return None
                base = chunk * layout.TOKEN_CHUNK
                parts.append(cache[array, chunk][max(0, low - base) : high - base])
            return np.concatenate(parts)

        for row in order.tolist():
            low, high = int(start[row]), int(start[row] + length[row])
            found = [values(array, dtype, low, high) for array, dtype in _TOKEN_ARRAYS]
            if found[0] is None or found[1] is None:
                continue
            if sequence_id(found[0], found[1]) != ids[row].as_py():
                key = layout.token_key("tokens", low // layout.TOKEN_CHUNK)
                self.bad(key, f"the tokens and mask at {low} do not make sequence {ids[row].as_py()}", self.refill)
                return
