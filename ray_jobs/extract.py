"""extract: plan (or find the plan), fill the shards with hidden states, seal.

Run it again after any failure, on any machine, with any number of replicas, even at the same time: finished shards are
found and kept, and nothing is ever written twice.

`--repair` reads every byte, deletes what is damaged and makes it again, before and after the seal. A sealed shard whose
states come out the same is restored to the byte; if any come out differently, `seal-0002.json` names the changed shards.
"""

from __future__ import annotations

import argparse
import contextlib

from ray_jobs import job
from ray_jobs.filling import fill
from ray_jobs.inputs import Inputs, Verifier, compose_sequences, make_contract, open_verifier, sampling_hashes
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from ray_jobs.supervisor import Supervisor
from ray_jobs.worker import replicas_of
from storage import layout
from storage.commit import publish_plan
from storage.errors import DatasetNotSealed, ShardCorrupt, StatehouseError
from storage.objects import ObjectStore, open_store
from storage.plan import Plan, make_plan
from storage.repair import clear_damaged_plan, damaged_shards, require_whole, restore_offset, settle
from storage.reuse import Reusable, fill_reusable, find_reusable
from storage.seal import Seal, load_seal, scan_shards, seal_dataset, some
from storage.shards_table import Scanned
from storage.spool import SequenceSpool, SpooledSequences
from storage.teacher import teacher_keys
from storage.writer import ShardWriter, shard_identity


def run(recipe: Recipe, args: argparse.Namespace, replicas: Supervisor | None = None) -> None:
    """replicas: to be used and left running; by default the job's own."""
    retry = bool(getattr(args, "retry_quarantined", False))
    job.require(args.repair or not args.shards, "--shards names the shards that --repair checks; give --repair, too")
    verifier = open_verifier(recipe)
    with SequenceSpool() as spool:  # tokens wait on disk; in memory lie those of the shards that are missing
        _run(recipe, args, retry, verifier, spool, replicas)


def _run(
    recipe: Recipe,
    args: argparse.Namespace,
    retry: bool,
    verifier: Verifier,
    spool: SequenceSpool,
    replicas: Supervisor | None,
) -> None:
    sequences, counts = _sequences(recipe, verifier, spool)
    contract = make_contract(recipe, verifier)
    plan = make_plan(
        sequences,
        contract,
        recipe.dataset.codec,
        shard_length=recipe.dataset.shard_tokens,
        teacher=recipe.extraction.teacher,
    )
    store = open_store(recipe.dataset.uri)
    store.probe()
    if args.repair:
        for key in clear_damaged_plan(store, plan, sequences):
            job.log.warning("repair writes again key=%s", key)
    committed = publish_plan(store, plan, sequences)
    job.log.info(
        "extract plan=%s %s sequences=%d tokens=%s shards=%d where=%s %s",
        plan.hash[:12],
        "committed" if committed else "found",
        len(plan.table),
        f"{plan.tokens:,}",
        plan.geometry.shards,
        store.uri,
        " ".join(f"{name}={count}" for name, count in counts.items() if count),
    )
    sealed = _sealed(store)
    if sealed is not None and not args.repair and not (retry and sealed.quarantined):
        require_whole(store)
        seal = sealed
    else:
        if sealed is not None and restore_offset(store):
            job.log.warning("repair writes again key=%s", layout.OFFSET)
        good = existing_shards(store, plan, repair=args.repair, only=args.shards)
        if retry:
            forget_quarantined(store, plan, good)
        missing = set(range(plan.geometry.shards)) - set(good)
        quarantined = sum(len(one.receipt.quarantined) for one in good.values())
        reusable = reuse(recipe, store, plan, missing)
        if missing:
            job.start_ray()
            with contextlib.nullcontext(replicas) if replicas else replicas_of(recipe, verifier) as supervisor:
                fill(recipe, store, plan, sequences, missing, supervisor, reusable, quarantined)
        if sealed:
            seal = settle(store, plan, provenance(recipe))
        else:
            share = recipe.extraction.max_quarantined
            seal = seal_dataset(store, plan, provenance(recipe), max_quarantine_share=share)
        if sealed is not None:
            job.log.info(
                "%s %s",
                "retry" if retry else "repair",
                f"sealed anew number={seal.number} changed={some(seal.changed_shards)}"
                if seal.number != sealed.number
                else "the sealed content is whole again",
            )
    job.log.info(
        "extract sealed fingerprint=%s sequences=%d quarantined=%d tokens=%s raw=%.1fMB stored=%.1fMB ratio=%.3f where=%s",
        seal.fingerprint[:12],
        seal.sequences,
        len(seal.quarantined),
        f"{seal.tokens:,}",
        seal.raw_bytes / 1e6,
        seal.stored_bytes / 1e6,
        seal.raw_bytes / seal.stored_bytes,
        store.uri,
    )


def _sequences(recipe: Recipe, verifier: Verifier, spool: SequenceSpool) -> tuple[SpooledSequences, dict[str, int]]:
    inputs = Inputs(recipe.dataset.inputs_uri)
    prompts = inputs.read_prompts(recipe, verifier, "extract")
    responses = inputs.read_responses(sampling_hashes(recipe, verifier, prompts))
    return compose_sequences(spool, prompts, responses, inputs.store.uri)


def _sealed(store: ObjectStore) -> Seal | None:
    try:
        return load_seal(store)
    except DatasetNotSealed:
        return None


def missing_shards(store: ObjectStore, plan: Plan, *, repair: bool, only: set[int] | None = None) -> set[int]:
    """Shards to be extracted: all but `existing_shards`."""
    return set(range(plan.geometry.shards)) - set(existing_shards(store, plan, repair=repair, only=only))


def existing_shards(
    store: ObjectStore, plan: Plan, *, repair: bool, only: set[int] | None = None
) -> dict[int, Scanned]:
    """Shards that need not be extracted. With `repair`, which reads every byte, those that were read twice and found bad both times
    are deleted; without, a bad one is a ShardCorrupt. Missing ones are filled and never deleted.

    only: with `repair`, the shards that are checked.
    """
    if outside := sorted(one for one in only or () if not 0 <= one < plan.geometry.shards):
        raise StatehouseError(f"--shards {outside[0]}: the plan has shards 0 to {plan.geometry.shards - 1}")
    if repair:
        sealed = _sealed(store) is not None
        deleted = False
        for shard, reason in damaged_shards(store, plan, only).items():
            # Another driver may have repaired, or even sealed, since the scan: its good shard must stay.
            if not sealed and _sealed(store) is not None:
                raise ShardCorrupt(
                    f"{store.uri}: sealed by another driver during the repair; run the same command again"
                )
            if shard in damaged_shards(store, plan, [shard]):
                job.log.warning("repair deletes shard=%d reason=%s", shard, reason)
                _delete_shard(store, plan, shard)
                deleted = True
        if deleted and not sealed:
            store.delete(layout.SHARDS)  # left by a seal that was cut off: it would name the old receipts
    good, bad = scan_shards(store, plan)
    if bad:
        raise ShardCorrupt(bad[min(bad)])
    return good


def _delete_shard(store: ObjectStore, plan: Plan, shard: int) -> None:
    """The shard first: where it is, its teacher objects are."""
    store.delete(layout.shard_key(shard))
    for key in teacher_keys(plan.teacher, shard):
        store.delete(key)


def forget_quarantined(store: ObjectStore, plan: Plan, good: dict[int, Scanned]) -> None:
    """Deletes the shards that lack sequences, so that these are tried again; takes them out of `good`.

    Of a run of shards the last one's receipt names them, and all of the run may hold their NaN.
    """
    lacking = {shard: len(one.receipt.quarantined) for shard, one in good.items() if one.receipt.quarantined}
    if not lacking:
        return
    for unit in plan.units():
        run = range(unit.shard, unit.shard + unit.shards)
        if found := sum(lacking.get(shard, 0) for shard in run):
            job.log.warning("retry deletes shards=%d-%d quarantined=%d", run[0], run[-1], found)
            for shard in run:
                _delete_shard(store, plan, shard)
                good.pop(shard, None)


def reuse(recipe: Recipe, store: ObjectStore, plan: Plan, missing: set[int]) -> Reusable:
    """Copies what `dataset.reuse` names and takes the shards that are then complete out of `missing`: they need no
    replica. Sequences of other shards are copied by the workers, which find them in the units.
    """
    if not recipe.dataset.reuse or not missing:
        return Reusable()
    ids = plan.table["id"].to_pylist()
    found = find_reusable(recipe.dataset.reuse, plan.contract, ids, codec=plan.codec, teacher=plan.teacher)
    for uri, why in found.skipped.items():
        job.log.warning("reuse skips uri=%s reason=%s", uri, why)
    whole = [unit for unit in found.units(plan) if not missing.isdisjoint(range(unit.shard, unit.shard + unit.shards))]
    job.log.info(
        "reuse sequences=%d of=%d shards=%d of=%d", len(found), len(plan.table), len(whole), plan.geometry.shards
    )
    if whole:
        progress = job.Progress("reuse", "shards", len(whole))
        writer = ShardWriter(store, shard_identity(plan))
        missing -= set(fill_reusable(writer, plan, found, units=whole, done=lambda unit, _: progress.step(unit.tokens)))
    return found


def _numbers(text: str) -> set[int]:
    return {int(part) for part in text.split(",")}


if __name__ == "__main__":
    arguments = job.parser("extract", __doc__ or "")
    arguments.add_argument("--repair", action="store_true", help="delete damaged objects and make them again")
    arguments.add_argument(
        "--retry-quarantined",
        action="store_true",
        help="extract shards again that lack sequences, before or after the seal",
    )
    arguments.add_argument(
        "--shards",
        type=_numbers,
        metavar="N,N",
        help="with --repair: check these shards only, as `statehouse verify` names them",
    )
    job.main(arguments, run)
