"""extract: plan (or find the plan), fill the shards with hidden states, seal.

Run it again after any failure, on any machine, with any number of replicas, even at the same time: finished shards are
found and kept, and nothing is ever written twice.

`--repair` reads every byte, deletes what is damaged and makes it again, before and after the seal. A sealed shard whose
states come out the same is restored to the byte; if any come out differently, `seal-0002.json` names the changed shards.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from typing import Any

import numpy as np
import pyarrow as pa

from ray_jobs import job
from ray_jobs.inputs import Inputs, compose_sequences, make_contract, open_verifier, sampling_hash
from ray_jobs.provenance import provenance
from ray_jobs.recipe import Recipe
from ray_jobs.supervisor import Supervisor
from ray_jobs.worker import ExtractUnit, replicas_of
from storage import layout
from storage.commit import publish_plan
from storage.errors import DatasetNotSealed, ShardCorrupt, StatehouseError
from storage.objects import ObjectStore, open_store
from storage.plan import Plan, make_plan
from storage.repair import clear_damaged_plan, damaged_shards, require_whole, restore_offset, settle
from storage.reuse import Reusable, fill_reusable, find_reusable
from storage.seal import Seal, load_seal, scan_shards, seal_dataset, some
from storage.writer import ShardWriter, shard_identity


def make_units(
    plan: Plan, sequences: pa.Table, shards: set[int], reusable: Reusable | None = None
) -> list[ExtractUnit]:
    """The work units of `shards`. sequences: `TOKENS_SCHEMA`, the table the plan was made from."""
    token_ids = sequences["token_ids"].combine_chunks()
    flat, offsets = token_ids.flatten().to_numpy(), token_ids.offsets.to_numpy()
    offsets = offsets - offsets[0]
    return [
        ExtractUnit(
            unit.shard,
            [flat[offsets[row] : offsets[row + 1]] for row in unit.rows],
            reusable.known(plan, unit) if reusable else {},
        )
        for unit in plan.units()
        if not shards.isdisjoint(range(unit.shard, unit.shard + unit.shards))
    ]


def calibration_batch(plan: Plan, sequences: pa.Table, count: int) -> list[np.ndarray]:
    """Token ids of `count` sequences spread over the plan: every k-th by id, so all sources have their share."""
    rows = np.unique(np.linspace(0, len(plan.table) - 1, min(count, len(plan.table))).astype(int))
    return [np.array(sequences["token_ids"][int(row)].as_py(), np.int32) for row in rows]


def run(recipe: Recipe, args: argparse.Namespace, replicas: Supervisor | None = None) -> None:
    """replicas: to be used and left running; by default the job's own."""
    job.require(args.repair or not args.shards, "--shards names the shards that --repair checks; give --repair, too")
    verifier = open_verifier(recipe)
    inputs = Inputs(recipe.dataset.inputs_uri)
    prompts = inputs.read_prompts(recipe, verifier, "extract")
    responses = inputs.read_responses(sampling_hash(recipe, verifier))
    sequences, counts = compose_sequences(prompts, responses, inputs.store.uri)
    contract = make_contract(recipe, verifier)
    plan = make_plan(sequences, contract, recipe.dataset.codec, shard_length=recipe.dataset.shard_tokens)
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
    if sealed is not None and not args.repair:
        require_whole(store)
        seal = sealed
    else:
        if sealed is not None and restore_offset(store):
            job.log.warning("repair writes again key=%s", layout.OFFSET)
        missing = missing_shards(store, plan, repair=args.repair, only=args.shards)
        reusable = reuse(recipe, store, plan, missing)
        if missing:
            job.start_ray()
            with contextlib.nullcontext(replicas) if replicas else replicas_of(recipe, verifier) as supervisor:
                _fill(recipe, store, plan, sequences, missing, supervisor, reusable)
        seal = settle(store, plan, provenance(recipe)) if sealed else seal_dataset(store, plan, provenance(recipe))
        if sealed is not None:
            job.log.info(
                "repair %s",
                f"sealed anew number={seal.number} changed={some(seal.changed_shards)}"
                if seal.number != sealed.number
                else "the sealed content is whole again",
            )
    job.log.info(
        "extract sealed fingerprint=%s sequences=%d tokens=%s raw=%.1fMB stored=%.1fMB ratio=%.3f where=%s",
        seal.fingerprint[:12],
        seal.sequences,
        f"{seal.tokens:,}",
        seal.raw_bytes / 1e6,
        seal.stored_bytes / 1e6,
        seal.raw_bytes / seal.stored_bytes,
        store.uri,
    )


def _sealed(store: ObjectStore) -> Seal | None:
    try:
        return load_seal(store)
    except DatasetNotSealed:
        return None


def missing_shards(store: ObjectStore, plan: Plan, *, repair: bool, only: set[int] | None = None) -> set[int]:
    """Shards to be extracted. With `repair`, which reads every byte, those that were read twice and found bad both times
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
                store.delete(layout.shard_key(shard))
                deleted = True
        if deleted and not sealed:
            store.delete(layout.SHARDS)  # left by a seal that was cut off: it would name the old receipts
    good, bad = scan_shards(store, plan)
    if bad:
        raise ShardCorrupt(bad[min(bad)])
    return set(range(plan.geometry.shards)) - set(good)


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


def _fill(
    recipe: Recipe,
    store: ObjectStore,
    plan: Plan,
    sequences: pa.Table,
    missing: set[int],
    supervisor: Supervisor,
    reusable: Reusable,
) -> None:
    done_before = plan.geometry.shards - len(missing)
    job.log.info("extract start shards=%d finished_before=%d", len(missing), done_before)
    uri = store.uri  # absolute: a worker may run in another folder
    if not ShardWriter(store, shard_identity(plan)).calibrated:
        supervisor.call("calibrate", uri, calibration_batch(plan, sequences, recipe.extraction.calibration_sequences))
    units = make_units(plan, sequences, missing, reusable)
    # Two drivers started at once walk the shards in different orders, and so share most of the work.
    random.shuffle(units)
    total = sum(1 for _ in plan.units())  # fewer than shards where a sequence takes a run of them
    progress = job.Progress("extract", "shards", total, total - len(units))
    stored = {"bytes": 0, "adopted": 0}

    def done(work: tuple[str, ExtractUnit], result: dict[str, Any]) -> None:
        stored["bytes"] += result["data_bytes"]
        stored["adopted"] += not result["created"]
        if result.get("non_finite"):
            job.log.warning("shard=%d non_finite=%d", result["shard"], result["non_finite"])
        seconds = max(progress.seconds, 1e-9)
        progress.step(
            work[1].tokens,
            stored_MB_per_s=f"{stored['bytes'] / 1e6 / seconds:.2f}",
            adopted=stored["adopted"],
            restarts=supervisor.restarts,
            replicas=len(supervisor.actors),
        )

    supervisor.run("extract", [(uri, unit) for unit in units], done, progress.wait)


def _numbers(text: str) -> set[int]:
    return {int(part) for part in text.split(",")}


if __name__ == "__main__":
    arguments = job.parser("extract", __doc__ or "")
    arguments.add_argument("--repair", action="store_true", help="delete damaged objects and make them again")
    arguments.add_argument(
        "--shards",
        type=_numbers,
        metavar="N,N",
        help="with --repair: check these shards only, as `statehouse verify` names them",
    )
    job.main(arguments, run)
