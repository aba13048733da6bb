"""Repairing: bring every object back to what plan and seal say, or seal anew what came out differently.

What can be made again without a verifier (copies of receipts, tables of receipts, exponent offsets) is made again by
`repair`; with another copy of the dataset everything is. Shards without a copy are extracted again by the job
`ray_jobs.extract --repair`, which uses the functions below: damaged objects are deleted, the job fills the holes, and
`settle` restores the sealed bytes where the new states are the same, or writes a further seal.

Nothing is lost by dying half way: a deleted shard is missing, which every reader refuses, and the same command carries on.
One repair at a time; readers may go on reading what is whole.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa

from storage import layout
from storage.codecs import codec_by_name
from storage.commit import (
    PlanDocument,
    digest,
    load_document,
    load_offset,
    load_plan,
    load_plan_document,
    offset_hash,
    restore_command,
)
from storage.errors import DatasetMissing, DatasetNotSealed, PlanConflict, ShardCorrupt, StatehouseError
from storage.fetch import twice
from storage.objects import ObjectMissing, ObjectStore
from storage.plan import Plan
from storage.proof import Proof
from storage.receipt import Receipt
from storage.seal import Seal, load_seals, load_shards_table, receipt_copy, reseal, scan_shards, seal_key
from storage.shard import ShardIdentity, corrupt, pack_trailer, read_footer
from storage.shard_check import Progress, require_shard
from storage.teacher import wrong_object
from storage.token_chunks import SequenceRows
from storage.verify import Finding, Report, verify
from storage.writer import document_identity, shard_identity

Say = Callable[[str], None]
# Documents, then shards, then what is judged by them: three rounds bring everything back that can be.
_ROUNDS = 4


def repair(
    store: ObjectStore, copy: ObjectStore | None = None, *, say: Say = print, progress: Progress | None = None
) -> Report:
    """Repairs what can be repaired without a verifier, and returns what a full verification finds afterwards.

    copy: another copy of the same dataset. say: called with one line for each object that is written again.
    Raises PlanConflict when the copy is another dataset, DatasetMissing, ShardCorrupt when plan.json is lost.
    """
    if copy is not None:
        if _older(store, copy) and (report := verify(store, full=True, progress=progress)).ok:
            say(f"whole as it is; {copy.uri} was repaired and sealed anew, which this dataset does not need")
            return report
        _restore_documents(store, copy, say)
    report = verify(store, full=True, progress=progress)
    bad = report.bad_shards()
    for _ in range(_ROUNDS):
        if report.ok:
            break
        proof = None if copy is None else _proof(store, copy)
        for finding in report.findings:
            if copy is not None and proof is not None and _restore(store, copy, finding.key, proof, say):
                say(f"{finding.key}: restored from {copy.uri} ({finding.what})")
        _make_again(store, report, say)
        # Once more: what belongs to a shard can be judged only when the shard is there again.
        before, report = report, verify(store, full=True, only=bad, progress=progress)
        if report.findings == before.findings:
            break
    return report


def _older(store: ObjectStore, copy: ObjectStore) -> bool:
    """Whether the copy has further seals than the dataset, whose own are readable."""
    try:
        load_plan_document(store)
        return len(load_seals(store)) < len(load_seals(copy))
    except StatehouseError:
        return False


def _restore_documents(store: ObjectStore, copy: ObjectStore, say: Say) -> None:
    """plan.json and the seals: everything else is checked against them."""
    theirs, seals = twice(lambda: load_plan_document(copy)), twice(lambda: load_seals(copy))
    proof = Proof(theirs, seals, None)
    try:
        ours: PlanDocument | None = load_plan_document(store)
    except (DatasetMissing, ShardCorrupt):
        ours = None
    if ours is not None and ours.plan_hash != theirs.plan_hash:
        raise PlanConflict(
            f"{copy.uri} is no copy of {store.uri}: it holds plan {theirs.plan_hash[:12]}, expected {ours.plan_hash[:12]}; "
            "give the URI of a copy of this very dataset"
        )
    if ours is None:
        if theirs.plan_hash not in _plan_hashes(store):
            raise PlanConflict(
                f"{store.uri}: its {layout.PLAN} is lost, and nothing else here says that it was the plan of {copy.uri} "
                f"({theirs.plan_hash[:12]}); if it is, copy the whole dataset to a new place with `statehouse cp`"
            )
        if _restore(store, copy, layout.PLAN, proof, say):
            say(f"{layout.PLAN}: restored from {copy.uri}")
    try:
        load_seals(store)
    except StatehouseError:
        _require_same_shards(store, copy, theirs, seals[-1])
    for seal in seals:
        key = seal_key(seal.number)
        try:
            found = load_document(store, key, Seal)
        except (ObjectMissing, ShardCorrupt):
            if _restore(store, copy, key, proof, say):
                say(f"{key}: restored from {copy.uri}")
            continue
        if found.fingerprint != seal.fingerprint:
            raise PlanConflict(
                f"{copy.uri} is no copy of {store.uri}: its {key} names {seal.fingerprint[:12]}, expected "
                f"{found.fingerprint[:12]}; their shards were extracted apart, so give a real copy"
            )


def _require_same_shards(store: ObjectStore, copy: ObjectStore, document: PlanDocument, seal: Seal) -> None:
    """Where our own seal is lost, the shards say what it sealed. Raises PlanConflict when the copy holds others."""
    identity = document_identity(document)
    for row in load_shards_table(copy, seal).to_pylist():
        try:
            found = read_footer(
                store, layout.shard_key(row["shard"]), identity, row["shard"], offset=seal.offset_hash
            ).receipt
        except (ObjectMissing, ShardCorrupt):
            continue
        if (found.data_sha256, found.index_sha256) != (row["data_sha256"], row["index_sha256"]):
            raise PlanConflict(
                f"{copy.uri} is no copy of {store.uri}: shard {row['shard']} holds {row['data_sha256'][:12]} there and "
                f"{found.data_sha256[:12]} here; seal what is here with `statehouse seal {store.uri}`, or give a real copy"
            )


def _proof(store: ObjectStore, copy: ObjectStore) -> Proof | None:
    """What our plan and seals, which are restored by now, say of the copy's bytes. None when they are not readable."""
    try:
        document, seals = load_plan_document(store), load_seals(store)
    except StatehouseError:
        return None
    for place in (store, copy):
        with contextlib.suppress(ShardCorrupt):
            return Proof(document, seals, load_shards_table(place, seals[-1]))
    return Proof(document, seals, None)


def _restore(store: ObjectStore, copy: ObjectStore, key: str, proof: Proof, say: Say) -> bool:
    def checked() -> bytes:
        data = copy.get(key)
        if (what := proof.wrong(key, data)) is not None:
            raise ShardCorrupt(what)
        return data

    try:
        data = twice(checked)
    except ObjectMissing:
        say(f"{key}: the copy {copy.uri} has none either")
        return False
    except ShardCorrupt as error:
        say(f"{key}: not restored, the one in the copy {copy.uri} is damaged, too ({error})")
        return False
    store.put(key, data)
    return True


def _make_again(store: ObjectStore, report: Report, say: Say) -> None:
    """Offsets from the seal, copies of receipts and tables of receipts from the shards."""
    damaged = {finding.key for finding in report.findings}
    if layout.OFFSET in damaged and restore_offset(store):
        say(f"{layout.OFFSET}: made again from the seal")
    try:
        plan = load_plan(store)
    except StatehouseError:
        return
    good, bad = scan_shards(store, plan)
    for shard, one in good.items():
        if (key := layout.receipt_key(shard)) in damaged:
            store.put(key, receipt_copy(one.receipt))
            say(f"{key}: made again from its shard")
    if any(key.startswith("shards") for key in damaged) and not bad and len(good) == plan.geometry.shards:
        try:
            before = load_seals(store)[-1]
        except StatehouseError:
            return
        after = reseal(store, plan, before.provenance)
        say(f"{layout.SHARDS}: made again from the shards, {seal_key(after.number)} counts")


def restore_offset(store: ObjectStore) -> bool:
    """Writes the exponent offsets as the newest seal holds them, if they are not there any more. True if it did."""
    try:
        seal = load_seals(store)[-1]
    except DatasetNotSealed:
        return False
    if seal.offset_object is None:
        return False
    data = base64.b64decode(seal.offset_object)
    try:
        if store.get(layout.OFFSET) == data:
            return False
    except ObjectMissing:
        pass
    store.put(layout.OFFSET, data)
    return True


def clear_damaged_plan(store: ObjectStore, plan: Plan, sequences: pa.Table | SequenceRows | None = None) -> list[str]:
    """Deletes objects of the plan that were read twice and are damaged, so that `publish_plan` writes them again; returns
    their keys.

    plan: made again from the same input. sequences: the table it was made from; with it, an object is deleted only if the
    one that would replace it has the digest that plan.json names. A damaged plan.json is deleted only if something else in
    the store names the plan that will replace it. Raises PlanConflict otherwise; then nothing is deleted.
    """
    try:
        document = twice(lambda: load_plan_document(store))
    except DatasetMissing:
        return []
    except ShardCorrupt as error:
        if plan.hash not in _plan_hashes(store):
            raise PlanConflict(
                f"{str(error).split(';')[0]}; and nothing else here says that it was the plan of this recipe "
                f"({plan.hash[:12]}): restore it from a copy, or choose another dataset.uri"
            ) from None
        store.delete(layout.PLAN)
        return [layout.PLAN]
    if document.plan_hash != plan.hash:
        return []  # `publish_plan` says how they differ
    damaged = []
    for key in document.objects:
        try:
            if all(digest(store.get(key)) != document.objects[key].sha256 for _ in range(2)):
                damaged.append(key)
        except ObjectMissing:
            pass
    if damaged and sequences is not None:
        for key, data in layout.plan_objects(plan, sequences):
            if key in damaged and digest(data) != document.objects[key].sha256:
                raise PlanConflict(
                    f"{store.uri}/{key}: damaged, and the versions here write it with sha256 {digest(data)[:12]}, plan.json "
                    f"says {document.objects[key].sha256[:12]}; repair it with those that made it ({document.written_by}), "
                    f"or with `{restore_command(store.uri)}`"
                )
    for key in damaged:
        store.delete(key)
    return damaged


def _plan_hashes(store: ObjectStore) -> set[str]:
    """What the root group, the seal and the copies of receipts say of the plan."""
    found = set()
    with contextlib.suppress(StatehouseError):
        found.add(load_seals(store)[-1].plan_hash)
    for key in [layout.ROOT, *(key for key in store.sizes("receipts") if key.endswith(".json"))][:3]:
        try:
            document = _json(store.get(key))
        except StatehouseError:
            continue
        found.add(str(document.get("plan_hash") or document.get("attributes", {}).get("plan_hash")))
    return found


def _json(data: bytes) -> dict[str, Any]:
    import json

    try:
        document = json.loads(data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def damaged_shards(
    store: ObjectStore, plan: Plan, only: Iterable[int] | None = None, *, threads: int = 4
) -> dict[int, str]:
    """{shard: why} of planned shards that were read, every byte, and are not whole. Missing ones are not in it.

    Each is asked for by its key, since a list may leave objects out. A whole shard of this plan that is not the sealed one
    is no damage: `settle` decides what becomes of it. Raises ShardCorrupt when the offsets that shards were encoded with
    are lost: then nothing can be said of any shard.
    """
    identity, rows = shard_identity(plan), plan.shard_rows()
    offset = offset_hash(plan.codec, load_offset(store, (plan.geometry.layers, plan.geometry.hidden_size)))
    no_offset = offset is None and codec_by_name(plan.codec).needs_offset
    bad: dict[int, str] = {}

    def check(shard: int) -> None:
        if no_offset:
            if store.exists(layout.shard_key(shard)):
                raise ShardCorrupt(
                    f"{store.uri}/{layout.OFFSET}: missing, though shard {shard} was encoded with it; restore it with "
                    f"`{restore_command(store.uri)}`, or delete hidden/c yourself to extract all shards again"
                )
            return
        try:
            receipt = require_shard(store, identity, shard, offset=offset, rows=int(rows[shard]))
            for key, named in receipt.teacher.items():
                if what := wrong_object(store, key, named, None, full=True):
                    raise ShardCorrupt(f"{store.uri}/{key}: {what}")
        except ObjectMissing:
            pass
        except ShardCorrupt as error:
            bad[shard] = str(error)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check, range(plan.geometry.shards) if only is None else only))
    return dict(sorted(bad.items()))


def settle(store: ObjectStore, plan: Plan, provenance: dict[str, Any] | None = None) -> Seal:
    """After damaged shards of a sealed dataset were extracted again: the seal that counts from now on.

    A shard with the sealed data gets its sealed receipt back, and so its sealed bytes. If any other data remain, a further
    seal names them. Raises ShardCorrupt and DatasetNotSealed as `reseal`.
    """
    newest = load_seals(store)[-1]
    identity = shard_identity(plan)
    try:
        sealed = load_shards_table(store, newest)
    except ShardCorrupt:
        return reseal(store, plan, provenance)
    for row in sealed.to_pylist():
        shard, before = row["shard"], Receipt.model_validate_json(row["receipt"])
        key = layout.shard_key(shard)
        try:
            found = read_footer(store, key, identity, shard, offset=newest.offset_hash)
        except ObjectMissing:
            continue
        now = found.receipt
        same = (now.data_sha256, now.index_sha256, now.teacher_sha256) == (
            before.data_sha256,
            before.index_sha256,
            before.teacher_sha256,
        )
        if same and found.text != row["receipt"]:
            data = replace_receipt(
                twice(partial(_sealed_data, store, key, before, identity)), identity, now, row["receipt"].encode()
            )
            store.put(key, data)
            store.put(layout.receipt_key(shard), receipt_copy(before))
    return reseal(store, plan, provenance)


def _sealed_data(store: ObjectStore, key: str, sealed: Receipt, identity: ShardIdentity) -> bytes:
    """A shard object whose data and index are those that were sealed. Raises ShardCorrupt."""
    data = store.get(key)
    found = hashlib.sha256(memoryview(data)[: sealed.data_bytes]).hexdigest()
    if (found, digest(data[-identity.index_bytes :])) != (sealed.data_sha256, sealed.index_sha256):
        raise corrupt(f"{store.uri}/{key}", f"sha256 {found[:12]}, its receipt says {sealed.data_sha256[:12]}")
    return data


def replace_receipt(data: bytes, identity: ShardIdentity, receipt: Receipt, text: bytes) -> bytes:
    """The shard object `data` with another receipt (as JSON) in place of its own, `receipt`."""
    return b"".join([data[: receipt.data_bytes], text, pack_trailer(text), data[-identity.index_bytes :]])


def require_whole(store: ObjectStore) -> None:
    """The quick verification of a sealed dataset. Raises ShardCorrupt naming every bad object and the first fix."""
    report = verify(store)
    if not report.ok:
        first: Finding = report.findings[0]
        others = f" ({len(report.findings)} bad objects: {', '.join(f.key for f in report.findings[:8])})"
        raise ShardCorrupt(
            f"{store.uri}/{first.key}: {first.what}{others if len(report.findings) > 1 else ''}; run `{first.fix.replace(', or ', '` or `')}`"
        )
