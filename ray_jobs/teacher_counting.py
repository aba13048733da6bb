"""Counting what the verifier would say, where datasets hold a teacher summary: one more pass over their sequences."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ray_jobs.counting import opened, run_tasks
from storage import Dataset, StatehouseError
from storage.teacher import NONE
from vocab.counting import Split
from vocab.teacher import TeacherCounts


def count_teachers(
    datasets: Sequence[Dataset], tasks: Sequence[dict[str, Any]], vocab_size: int, split: Split
) -> TeacherCounts:
    """Sums over the tasks of datasets that have a summary. tasks: of `dataset_tasks`. Needs Ray where there are any."""
    total = TeacherCounts.empty(split.sides, vocab_size)
    having = {dataset.uri for dataset in datasets if dataset.plan.teacher != NONE}
    mine = [task for task in tasks if task.get("uri") in having]
    if mine:
        for row in run_tasks(mine, functools.partial(_count, vocab_size=vocab_size, split=split)):
            parts = (np.frombuffer(row[name], kind) for name, kind in _FIELDS.items())
            argmax, mass, rest, masses = parts
            shape = (split.sides, vocab_size)
            total = total + TeacherCounts(argmax.reshape(shape), mass.reshape(shape), rest, masses)
    return total


_FIELDS = {"argmax": "<i8", "mass": "<f8", "rest": "<f8", "masses": "<i8"}


def _count(task: dict[str, Any], *, vocab_size: int, split: Split) -> dict[str, Any]:
    try:
        counts = count_task(task, vocab_size, split)
    except StatehouseError as error:  # would come back wrapped in a traceback of Ray's
        return {**dict.fromkeys(_FIELDS, b""), "error": str(error)}
    return {**{name: getattr(counts, name).tobytes() for name in _FIELDS}, "error": ""}


def count_task(task: dict[str, Any], vocab_size: int, split: Split) -> TeacherCounts:
    """Sums over the sequences of one task {uri, rows}."""
    dataset = opened(task["uri"]).dataset
    rows = np.asarray(task["rows"])
    sides = split.side_of(dataset.sequences["group"].take(rows).to_pylist())
    counts = TeacherCounts.empty(split.sides, vocab_size)
    for row, side in zip(rows.tolist(), sides.tolist(), strict=True):
        summary = dataset.teacher(row)
        assert summary is not None
        _, loss_mask = dataset.tokens(row)
        counts.add(side, loss_mask, summary.argmax, summary.logsumexp, summary.topk_ids, summary.topk_logits)
    return counts
