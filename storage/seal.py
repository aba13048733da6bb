"""The third act: every planned shard is checked against its receipt, then seal.json is PUT, create-only.

The seal's fingerprint names the content: contract, plan, and the digest of every shard. Readers refuse datasets without.
Shards that are repaired later and come out differently (another engine, another GPU) get a seal of their own,
`seal-0002.json`, which names its parent's fingerprint and the changed shards: the newest seal counts, and an older
fingerprint still resolves (`resolve_fingerprint`), with a message that says what became of it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from storage import layout
from storage.commit import (
    digest,
    load_document,
    load_offset,
    offset_hash,
    package_versions,
    restore_command,
    signed_json,
)
from storage.errors import DatasetNotSealed, ShardCorrupt
from storage.fingerprint import content_fingerprint, covered
from storage.objects import ObjectMissing, ObjectStore
from storage.plan import Plan
from storage.receipt import Receipt
from storage.shard import ShardIdentity, corrupt, read_footer
from storage.shards_table import TEACHER_COLUMN, Scanned, covered_by, holds, shards_table
from storage.teacher import FOLDER, NONE, wrong_object
from storage.writer import shard_identity

Progress = Callable[[int], None]


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
    # The kind of teacher summary (`storage.teacher`); since format 1.1.
    teacher: str = NONE
    # 1 for seal.json, 2 for seal-0002.json, ...; parent is the fingerprint of the seal before.
    number: int = 1
    parent: str | None = None
    changed_shards: list[int] = []
    # The bytes of the exponent_offset object (base64), so that losing it loses nothing: about 16 KB at H = 7168.
    offset_object: str | None = None


def seal_key(number: int) -> str:
    return layout.SEAL if number == 1 else f"seal-{number:04d}.json"


def shards_table_key(number: int) -> str:
    return layout.SHARDS if number == 1 else f"shards-{number:04d}.parquet"


def scan_shards(
    store: ObjectStore,
    plan: Plan,
    only: Iterable[int] | None = None,
    threads: int = 16,
    progress: Progress | None = None,
) -> tuple[dict[int, Scanned], dict[int, str]]:
    """Reads the footer of every planned shard: what the good ones say, {shard: why} of the bad.

    Shards in neither are missing: each is asked for by its key, since a list may leave objects out. Bad: damaged, of
    another plan, or with other offsets than those stored. progress(1) is called for each shard that was looked at.
    """
    identity: ShardIdentity = shard_identity(plan)
    offset = offset_hash(plan.codec, load_offset(store, (plan.geometry.layers, plan.geometry.hidden_size)))
    rows = plan.shard_rows()
    listed = store.sizes(FOLDER.rstrip("/")) if plan.teacher != NONE else {}
    good: dict[int, Scanned] = {}
    bad: dict[int, str] = {}

    def check(shard: int) -> None:
        key = layout.shard_key(shard)
        try:
            footer = read_footer(store, key, identity, shard, offset=offset, rows=int(rows[shard]))
            for name, named in footer.receipt.teacher.items():
                if what := wrong_object(store, name, named, listed.get(name), full=False):
                    raise corrupt(f"{store.uri}/{name}", what)
            good[shard] = Scanned(footer.receipt, footer.object_bytes, footer.text)
        except ObjectMissing:
            pass
        except ShardCorrupt as error:
            bad[shard] = str(error)
        if progress is not None:
            progress(1)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check, range(plan.geometry.shards) if only is None else only))
    return good, bad


def seal_dataset(
    store: ObjectStore,
    plan: Plan,
    provenance: dict[str, Any] | None = None,
    *,
    max_quarantine_share: float = 0.01,
    progress: Progress | None = None,
) -> Seal:
    """Seals a complete dataset; returns the newest seal that is there if somebody else was first.

    progress(1) is called for each shard that was looked at.

    Raises ShardCorrupt naming bad shards, DatasetNotSealed naming missing ones or too many quarantined sequences.
    """
    receipts = _all_receipts(store, plan, progress)
    quarantined = {key: why for one in receipts for key, why in one.receipt.quarantined.items()}
    if len(quarantined) > max_quarantine_share * len(plan.table):
        key, why = min(quarantined.items())
        raise DatasetNotSealed(
            f"{store.uri}: {len(quarantined)} of {len(plan.table)} sequences are quarantined ({key}: {why}; ...), more than "
            f"the share of {max_quarantine_share:g} that a seal accepts; fix the cause and run "
            f"`python -m ray_jobs.extract RECIPE --repair`, or accept them with `statehouse seal {store.uri} --max-quarantine 1`"
        )
    _complete_copies(store, receipts)
    found = _seals(store)
    if not found:
        seal = _publish(store, plan, receipts, 1, None, [], provenance)
        if seal is not None:
            return seal
        found = _seals(store)
    if found[-1].fingerprint != _fingerprint_of(plan, receipts):
        raise ShardCorrupt(
            f"{store.uri}/{seal_key(found[-1].number)}: seals {found[-1].fingerprint[:12]}, but the shards make another "
            "content; somebody changed shards after the seal: run `python -m ray_jobs.extract RECIPE --repair`, "
            f"or `{restore_command(store.uri)}`"
        )
    return found[-1]


def reseal(store: ObjectStore, plan: Plan, provenance: dict[str, Any] | None = None) -> Seal:
    """After a repair: the newest seal if the shards are again what it names, otherwise a further one that names it.

    Raises DatasetNotSealed when the dataset was never sealed, ShardCorrupt naming shards that are still bad.
    """
    newest, receipts = load_seal(store), _all_receipts(store, plan)
    _complete_copies(store, receipts)
    table = shards_table(receipts)
    try:
        sealed = load_shards_table(store, newest)
    except ShardCorrupt:
        data = layout.parquet_bytes(table)
        if digest(data) == newest.shards_sha256:
            store.put(shards_table_key(newest.number), data)
            return newest
        sealed = table.slice(0, 0)
    if sealed.equals(table):
        return newest
    names = ["object_bytes", "data_sha256", "index_sha256"]
    names += [TEACHER_COLUMN.name] if TEACHER_COLUMN.name in table.schema.names else []
    before = {row["shard"]: tuple(row.get(name) for name in names) for row in sealed.to_pylist()}
    changed = [row["shard"] for row in table.to_pylist() if before.get(row["shard"]) != tuple(row[n] for n in names)]
    if not len(sealed):  # the old table is lost: only the fingerprint tells whether anything changed
        same = newest.fingerprint == _fingerprint_of(plan, receipts)
        changed = [] if same else changed
    seal = _publish(store, plan, receipts, newest.number + 1, newest.fingerprint, changed, provenance)
    if seal is None:  # somebody else's, or our own whose answer was lost
        seal = load_seal(store)
        if (seal.parent, seal.fingerprint) == (newest.fingerprint, _fingerprint_of(plan, receipts)):
            return seal
        raise ShardCorrupt(
            f"{store.uri}/{seal_key(newest.number + 1)}: another repair sealed at the same time; "
            f"run `statehouse verify {store.uri}`"
        )
    return seal


def _all_receipts(store: ObjectStore, plan: Plan, progress: Progress | None = None) -> list[Scanned]:
    good, bad = scan_shards(store, plan, progress=progress)
    if bad:
        shard, why = min(bad.items())
        raise ShardCorrupt(f"{why}" if len(bad) == 1 else f"{len(bad)} bad shards ({some(bad)}); shard {shard}: {why}")
    if missing := sorted(set(range(plan.geometry.shards)) - set(good)):
        raise DatasetNotSealed(
            f"{store.uri}: {len(missing)} of {plan.geometry.shards} shards are missing ({some(missing)}); "
            "run the extract job again to fill them"
        )
    return [good[shard] for shard in range(plan.geometry.shards)]


def _complete_copies(store: ObjectStore, receipts: list[Scanned]) -> None:
    copies = store.sizes("receipts")
    for receipt, _, _ in receipts:  # a writer killed between a shard and its copy left it out
        if layout.receipt_key(receipt.shard) not in copies:
            store.put(layout.receipt_key(receipt.shard), receipt_copy(receipt))


def receipt_copy(receipt: Receipt) -> bytes:
    """receipts/<shard>.json, for people: what lies inside the shard object counts."""
    return receipt.model_dump_json(indent=1).encode() + b"\n"


def _fingerprint_of(plan: Plan, receipts: list[Scanned]) -> str:
    digests = [
        covered(one.receipt.data_sha256, one.receipt.index_sha256, one.receipt.teacher_sha256) for one in receipts
    ]
    return content_fingerprint(plan.contract.hash, plan.hash, receipts[0].receipt.offset_hash, digests)


def _publish(
    store: ObjectStore,
    plan: Plan,
    receipts: list[Scanned],
    number: int,
    parent: str | None,
    changed: list[int],
    provenance: dict[str, Any] | None,
) -> Seal | None:
    """PUTs the table of receipts, then the seal that names it. None when another seal of this number is there."""
    table, key = shards_table(receipts), shards_table_key(number)
    data = layout.parquet_bytes(table)
    if not store.create(key, data) and not holds(data := store.get(key), table):
        if number == 1:
            raise ShardCorrupt(
                f"{store.uri}/{key}: does not hold the receipts of the shards; delete it and run the extract job again"
            )
        data = layout.parquet_bytes(table)
        store.put(key, data)  # left by a repair that was cut off before its seal: nothing names it
    first = receipts[0].receipt
    seal = Seal(
        format=layout.FORMAT,
        format_version=layout.FORMAT_VERSION,
        fingerprint=_fingerprint_of(plan, receipts),
        plan_hash=plan.hash,
        contract_hash=plan.contract.hash,
        offset_hash=first.offset_hash,
        shards_sha256=digest(data),
        sequences=len(plan.table),
        tokens=plan.tokens,
        loss_tokens=plan.loss_tokens,
        shards=plan.geometry.shards,
        raw_bytes=plan.tokens * plan.geometry.bytes_per_token,
        stored_bytes=sum(
            one.object_bytes + sum(named.bytes for named in one.receipt.teacher.values()) for one in receipts
        ),
        teacher=plan.teacher,
        quarantined={key: why for one in receipts for key, why in one.receipt.quarantined.items()},
        sealed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        written_by=package_versions("statehouse", "pyarrow", "numpy", "zstandard"),
        provenance=provenance or {},
        number=number,
        parent=parent,
        changed_shards=changed,
        offset_object=None if first.offset_hash is None else base64.b64encode(store.get(layout.OFFSET)).decode(),
    )
    return seal if store.create(seal_key(number), signed_json(seal)) else None


def load_seal(store: ObjectStore) -> Seal:
    """The newest seal. Raises DatasetNotSealed when there is none, ShardCorrupt when one is damaged or missing."""
    return load_seals(store)[-1]


def load_seals(store: ObjectStore) -> list[Seal]:
    """All seals, oldest first. Raises DatasetNotSealed when there is none, ShardCorrupt when the chain is broken."""
    if found := _seals(store):
        return found
    raise DatasetNotSealed(
        f"{store.uri}: not sealed, so shards may be missing; finish it with `python -m ray_jobs.extract RECIPE`, "
        "or open it with partial=True (--partial) to see the finished shards only"
    )


def _seals(store: ObjectStore) -> list[Seal]:
    """One request a seal and one that finds no further one."""
    found: list[Seal] = []
    try:
        while True:
            found.append(load_document(store, seal_key(len(found) + 1), Seal))
            before = found[-2].fingerprint if len(found) > 1 else None
            if found[-1].number != len(found) or found[-1].parent != before:
                raise ShardCorrupt(
                    f"{store.uri}/{seal_key(len(found))}: says number {found[-1].number}, parent {found[-1].parent}; "
                    f"expected {len(found)}, {before}: restore the seals with `{restore_command(store.uri)}`"
                )
    except ObjectMissing:
        pass
    if not found and store.exists(seal_key(2)):
        raise ShardCorrupt(
            f"{store.uri}/{layout.SEAL}: missing, though {seal_key(2)} is there; "
            f"restore it with `{restore_command(store.uri)}`"
        )
    return found


def resolve_fingerprint(store: ObjectStore, fingerprint: str) -> tuple[Seal, str | None]:
    """The newest seal, and a message when `fingerprint` (or its first digits) is that of an older one.

    Raises DatasetNotSealed, or ShardCorrupt when the dataset never had this fingerprint.
    """
    seals = load_seals(store)
    newest = seals[-1]
    if newest.fingerprint.startswith(fingerprint):
        return newest, None
    for index, seal in enumerate(seals):
        if seal.fingerprint.startswith(fingerprint):
            changed = sorted({shard for later in seals[index + 1 :] for shard in later.changed_shards})
            return newest, (
                f"{store.uri}: fingerprint {seal.fingerprint[:12]} of {seal.sealed_at} was superseded by "
                f"{newest.fingerprint[:12]} of {newest.sealed_at}: {len(changed)} of {newest.shards} shards "
                f"({some(changed)}) were lost and extracted again with other values"
            )
    known = ", ".join(seal.fingerprint[:12] for seal in seals)
    raise ShardCorrupt(
        f"{store.uri}: never had the fingerprint {fingerprint[:12]} (it has {known}); check the URI: it is another dataset"
    )


def load_shards_table(store: ObjectStore, seal: Seal) -> pa.Table:
    """`SHARDS_SCHEMA`, ordered by shard. Raises ShardCorrupt when it is not what the seal names."""
    key = shards_table_key(seal.number)
    try:
        data = store.get(key)
    except ObjectMissing:
        data = b""
    if digest(data) != seal.shards_sha256:
        raise ShardCorrupt(
            f"{store.uri}/{key}: {'changed since the seal' if data else 'missing'}; "
            f"make it again from the shards with `statehouse repair {store.uri}`"
        )
    table = pq.read_table(pa.BufferReader(data))
    shards = covered_by(table)
    if content_fingerprint(seal.contract_hash, seal.plan_hash, seal.offset_hash, shards) != seal.fingerprint:
        raise ShardCorrupt(
            f"{store.uri}/{seal_key(seal.number)}: its fingerprint {seal.fingerprint[:12]} is not that of its contract, plan, "
            f"offsets and shards; restore it with `{restore_command(store.uri)}`"
        )
    return table


def some(shards: Iterable[int]) -> str:
    """The first few, for messages."""
    named = sorted(shards)
    return ", ".join(map(str, named[:8])) + (", ..." if len(named) > 8 else "")
