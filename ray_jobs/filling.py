"""The second act of `extract`: the shards that are missing become work units, and the supervisor runs them on replicas."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ray_jobs import job
from ray_jobs.fill_report import FillReport
from ray_jobs.policies import first_line
from ray_jobs.recipe import Recipe
from ray_jobs.self_check import chosen
from ray_jobs.supervisor import Supervisor
from ray_jobs.units import CalibrationUnit, ExtractUnit
from storage.objects import ObjectStore
from storage.plan import Plan
from storage.reuse import Reusable
from storage.token_chunks import SequenceRows
from storage.writer import ShardWriter, shard_identity


def make_units(
    uri: str,
    plan: Plan,
    sequences: SequenceRows,
    shards: set[int],
    reusable: Reusable | None = None,
    check: set[str] | None = None,
) -> list[ExtractUnit]:
    """The work units of `shards`. sequences: what the plan was made from. check: ids to be checked."""
    units = []
    for unit in plan.units():
        if shards.isdisjoint(range(unit.shard, unit.shard + unit.shards)):
            continue
        ids = plan.table["id"].take(unit.rows).to_pylist()
        units.append(
            ExtractUnit(
                uri,
                unit.shard,
                ids,
                [sequences.row(int(row))[0] for row in unit.rows],
                reusable.known(plan, unit) if reusable else {},
                check=tuple(at for at, key in enumerate(ids) if key in (check or ())),
            )
        )
    return units


def calibration_unit(uri: str, plan: Plan, sequences: SequenceRows, count: int) -> CalibrationUnit:
    """`count` sequences spread over the plan: every k-th by id, so all sources have their share."""
    rows = np.unique(np.linspace(0, len(plan.table) - 1, min(count, len(plan.table))).astype(int))
    return CalibrationUnit(uri, [sequences.row(int(row))[0] for row in rows])


def fill(
    recipe: Recipe,
    store: ObjectStore,
    plan: Plan,
    sequences: SequenceRows,
    missing: set[int],
    supervisor: Supervisor,
    reusable: Reusable,
    quarantined_before: int = 0,
) -> FillReport:
    """Fills the missing shards. quarantined_before: sequences that the finished shards already lack.

    Raises ReplicaFailed, StatehouseError when too many sequences are quarantined or states drift, StoreError.
    """
    config = recipe.extraction
    job.log.info("extract start shards=%d finished_before=%d", len(missing), plan.geometry.shards - len(missing))
    uri = store.uri  # absolute: a worker may run in another folder
    limit = max(0, int(config.max_quarantined * len(plan.table)) - quarantined_before)
    units = make_units(uri, plan, sequences, missing, reusable, chosen(plan.table["id"].to_pylist(), config.self_check))
    # Two drivers started at once walk the shards in different orders, and so share most of the work.
    random.shuffle(units)
    total = sum(1 for _ in plan.units())  # fewer than shards where a sequence takes a run of them
    report = FillReport(recipe, plan, total, total - len(units), supervisor)

    def done(unit: ExtractUnit, result: dict[str, Any]) -> None:
        for row, reason in unit.quarantined.items():
            job.log.warning("quarantined sequence=%s shard=%d reason=%s", unit.ids[row], unit.shard, first_line(reason))
        report.step(unit, result)

    if not ShardWriter(store, shard_identity(plan)).calibrated:
        unit = calibration_unit(uri, plan, sequences, config.calibration_sequences)
        supervisor.run("calibrate", [unit], lambda _unit, _value: None, report.progress.wait, len(unit.token_ids) - 1)
    supervisor.run("extract", units, done, report.wait, limit, report.begin)
    report.end()
    return report
