"""Counting what the verifier would say, where datasets hold a teacher summary: one more pass over their sequences."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ray_jobs.counting import opened, run_tasks
from storage import Dataset, StatehouseError
from storage.teacher import NONE, TeacherSummary, join
from vocab.counting import Split
from vocab.teacher import TeacherCounts

# Tokens counted at a time: 8 bytes each, and 8 more for every one of the top-k.
_AT_ONCE = 1 << 18


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
    # In the order in which they lie, so that each shard is read once; each side's are counted when they are many enough.
    held: dict[int, list[tuple[np.ndarray, TeacherSummary]]] = {side: [] for side in range(split.sides)}
    tokens = dict.fromkeys(held, 0)
    for row, side in zip(rows.tolist(), sides.tolist(), strict=True):
        summary = dataset.teacher(row)
        assert summary is not None
        held[side].append((dataset.tokens(row)[1], summary))
        tokens[side] += len(summary)
        if tokens[side] >= _AT_ONCE:
            _add(counts, side, held[side])
            held[side], tokens[side] = [], 0
    for side, rest in held.items():
        if rest:
            _add(counts, side, rest)
    return counts


def _add(counts: TeacherCounts, side: int, held: list[tuple[np.ndarray, TeacherSummary]]) -> None:
    masks, all_of = [mask for mask, _ in held], join([summary for _, summary in held])
    counts.add(
        side,
        np.concatenate(masks),
        all_of.argmax,
        all_of.logsumexp,
        all_of.topk_ids,
        all_of.topk_logits,
        lengths=[len(mask) for mask in masks],
    )
