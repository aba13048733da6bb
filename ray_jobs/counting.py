"""Counting with Ray Data: tasks over datasets and over plain files of ids, two passes, sums in the driver.

A task names rows of one dataset, or one file; a worker streams its tokens a few million at a time and returns counts
that do not grow with them. Nothing is counted twice: a sequence that is in two datasets is taken from the first, a file
named twice once.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ray_jobs import job
from storage import Dataset, StatehouseError, open_dataset
from storage.commit import get_checked, load_plan_document
from storage.errors import ContractMismatch, ShardCorrupt
from storage.layout import TOKEN_CHUNK, token_key
from storage.zarr_array import decode_chunk
from vocab.counting import SideCounts, Split, Units, count_sides, cover_units
from vocab.counts import TokenCounts
from vocab.files import find_files
from vocab.folds import FoldCounts
from vocab.groups import GroupCoverage
from vocab.inputs import Batch, read_batches

# Tokens of a task: enough that a worker's opening of the dataset (tens of milliseconds) is not seen.
_LEAST_TASK_TOKENS = 4 << 20
# Tasks a core, so that no core waits long for the last one.
_TASKS_A_CORE = 4
# Tokens of a batch, which a worker has in memory: counts of 163,840 ids are made and added once for so many.
_BATCH_TOKENS = 4 << 20


def open_all(uris: Sequence[str]) -> list[Dataset]:
    """The sealed datasets at these URIs, once each. Raises ContractMismatch for two tokenisers or vocabularies."""
    datasets = [open_dataset(uri) for uri in dict.fromkeys(uris)]
    first = datasets[0]
    for other in datasets[1:]:
        for field in ("tokenizer_hash", "vocab_size"):
            here, there = getattr(first.contract, field), getattr(other.contract, field)
            if here != there:
                raise ContractMismatch(
                    f"{other.uri}: {field} is {there}, {first.uri} has {here}; token ids of two tokenisers cannot be "
                    "counted together: choose a draft vocabulary for each"
                )
    return datasets


def dataset_tasks(datasets: Sequence[Dataset], cores: int) -> tuple[list[dict[str, Any]], int]:
    """Tasks {uri, rows} over all sequences that no earlier dataset holds, and their planned loss tokens."""
    seen: np.ndarray = np.zeros(0, dtype="U1")
    picked: list[tuple[Dataset, np.ndarray]] = []
    tokens = loss_tokens = 0
    for dataset in datasets:
        rows = np.arange(len(dataset))
        if len(datasets) > 1:
            ids = dataset.sequences["id"].to_numpy(zero_copy_only=False).astype(str)
            rows = rows[~np.isin(ids, seen)]
            seen = np.concatenate([seen, ids])
        loss_tokens += int(dataset.sequences["loss_tokens"].to_numpy()[rows].sum())
        tokens += int(dataset.sequences["length"].to_numpy()[rows].sum())
        picked.append((dataset, rows))
    budget = max(_LEAST_TASK_TOKENS, -(-tokens // max(1, cores * _TASKS_A_CORE)))
    tasks = []
    for dataset, rows in picked:
        rows = rows[np.argsort(dataset.sequences["start"].to_numpy()[rows], kind="stable")]
        length = dataset.sequences["length"].to_numpy().astype(np.int64)[rows]
        cuts = np.flatnonzero(np.diff((np.cumsum(length) - 1) // budget)) + 1
        tasks += [{"uri": dataset.uri, "rows": part.astype(np.int64)} for part in np.split(rows, cuts) if len(part)]
    return tasks, loss_tokens


def file_tasks(patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Tasks {path} over the files that globs name, local or on object storage, each once.

    Raises VocabError for a glob that names none.
    """
    return [{"path": path} for path in find_files(patterns, "vocab.files")]


class _Tokens:
    """Token ids and masks of a dataset, whole chunks at a time: a call a sequence would cost more than its counting."""

    def __init__(self, uri: str) -> None:
        self.dataset = open_dataset(uri)
        self.document = load_plan_document(self.dataset.store)
        names = ("start", "length")
        self.start, self.length = (self.dataset.sequences[name].to_numpy().astype(np.int64) for name in names)
        self._last: dict[tuple[str, int], np.ndarray] = {}

    def window(self, array: str, dtype: str, first: int, end: int) -> np.ndarray:
        """The chunks of an array that hold the positions [first, end), side by side; its first position is a multiple
        of TOKEN_CHUNK. Raises ShardCorrupt."""
        found: dict[tuple[str, int], np.ndarray] = {}
        for chunk in range(first // TOKEN_CHUNK, (end - 1) // TOKEN_CHUNK + 1):
            key = (array, chunk)
            if (known := self._last.get(key)) is None:
                data = get_checked(self.dataset.store, token_key(array, chunk), self.document)
                known = decode_chunk(data, dtype, [TOKEN_CHUNK])
            found[key] = known
        self._last = {key: one for key, one in self._last.items() if key[0] != array} | dict([list(found.items())[-1]])
        return np.concatenate(list(found.values())) if len(found) > 1 else next(iter(found.values()))


@functools.lru_cache(maxsize=2)
def opened(uri: str) -> _Tokens:
    return _Tokens(uri)


def task_batches(task: dict[str, Any], split: Split | None) -> Iterator[Batch]:
    """The sequences of a task, a few million tokens at a time, those of one side and source end to end.

    In that order counting needs no further copy of the tokens. split: None where sides do not matter.
    """
    if task.get("path"):
        yield from read_batches([task["path"]], "prompt_group")
        return
    tokens, rows = opened(task["uri"]), task["rows"]
    table = tokens.dataset.sequences.select(["source", "group"]).take(rows)
    sources, groups = table["source"].to_pylist(), table["group"].to_pylist()
    start, length = tokens.start[rows], tokens.length[rows]
    # A batch spans so many positions, padding and rows of other tasks included: that is what lies in memory.
    cuts = np.flatnonzero(np.diff((start - start[0]) // _BATCH_TOKENS)) + 1
    for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)], strict=True):
        first, last = int(start[begin]), int(start[end - 1] + length[end - 1])
        ids = tokens.window("tokens", "int32", first, last)
        mask = tokens.window("loss_mask", "bool", first, last)
        sides = split.side_of(groups[begin:end]) if split else np.zeros(end - begin, np.int64)
        names = np.unique(np.array(sources[begin:end], dtype=str), return_inverse=True)[1]
        order = np.lexsort((names, sides))
        low = start[begin:end][order] - first // TOKEN_CHUNK * TOKEN_CHUNK
        spans = [slice(a, b) for a, b in zip(low.tolist(), (low + length[begin:end][order]).tolist(), strict=True)]
        yield Batch(
            token_ids=np.concatenate([ids[span] for span in spans]),
            loss_mask=np.concatenate([mask[span] for span in spans]),
            lengths=length[begin:end][order],
            sources=[sources[begin + at] for at in order.tolist()],
            groups=[groups[begin + at] for at in order.tolist()],
            where=tokens.dataset.uri,
            sides=sides[order] if split else None,
        )


def count_all(tasks: list[dict[str, Any]], vocab_size: int, split: Split) -> SideCounts:
    """First pass: loss-bearing tokens by side and source. Needs Ray. Raises StatehouseError as a worker found it."""
    sums = Sums(vocab_size, split)
    for row in run_tasks(tasks, functools.partial(_count, vocab_size=vocab_size, split=split)):
        sums.add(row)
    return sums.total()


def cover_all(tasks: list[dict[str, Any]], split: Split, tables: np.ndarray, sizes: int) -> Units:
    """Second pass: coverage by prompt group. tables: [sides, vocab] uint8 of `vocab.counting.side_tables`. Needs Ray."""
    import ray

    reference = ray.put(tables)
    total = Units.empty(sizes)
    for row in run_tasks(tasks, functools.partial(_cover, split=split, tables=reference, sizes=sizes)):
        with np.load(io.BytesIO(row["units"]), allow_pickle=False) as part:
            coverage = GroupCoverage(part["counts"], part["positions"])
            found = Units(part["group"], part["source"], part["held_out"], tuple(part["sources"].tolist()), coverage)
        total = total + found
    return total


def run_tasks(tasks: list[dict[str, Any]], function: Any) -> Iterator[dict[str, Any]]:
    """Rows of all tasks, one task a block; an error found by a worker is raised here, without Ray's traceback."""
    import ray.data

    job.quiet_ray_data()
    # It would keep cores free for operators that there are not: one task ran at a time on two cores for half of a pass.
    ray.data.DataContext.get_current().op_resource_reservation_enabled = False
    for row in ray.data.from_items(tasks, override_num_blocks=len(tasks)).map(function).iter_rows():
        if row["error"]:
            raise ShardCorrupt(row["error"])
        yield row


def _count(task: dict[str, Any], *, vocab_size: int, split: Split) -> dict[str, Any]:
    try:
        counts = count_sides(task_batches(task, split), vocab_size, split)
    except StatehouseError as error:  # would come back wrapped in a traceback of Ray's
        return {"sides": [], "sources": [], "kind": "", "counts": b"", "error": str(error)}
    return {**_packed(counts), "error": ""}


def _cover(task: dict[str, Any], *, split: Split, tables: Any, sizes: int) -> dict[str, Any]:
    import ray

    try:
        units = cover_units(task_batches(task, split), split, ray.get(tables), sizes)
    except StatehouseError as error:
        return {"units": b"", "error": str(error)}
    sink = io.BytesIO()
    np.savez(
        sink,
        group=units.group,
        source=units.source,
        held_out=units.held_out,
        sources=np.array(units.sources, dtype=str),
        counts=units.coverage.counts,
        positions=units.coverage.positions,
    )
    return {"units": sink.getvalue(), "error": ""}


def _packed(counts: SideCounts) -> dict[str, Any]:
    """Counts as a row that Ray Data carries: sides, source names and the dense rows [kinds, vocab] as bytes of type `kind`.

    Dense: 4 bytes an id of the vocabulary, source and side, whatever was counted; most ids occur, and taking the zeros
    out took longer than counting a million tokens.
    """
    sides = [*counts.folds.folds, counts.held_out]
    rows = [(side, name) for side, part in enumerate(sides) for name in part.sources]
    largest = max((int(part.counts.max(initial=0)) for part in sides), default=0)
    kind = "<u4" if largest < 2**32 else "<i8"
    return {
        "sides": [side for side, _ in rows],
        "sources": [name for _, name in rows],
        "kind": kind,
        "counts": b"".join(part.counts.astype(kind).tobytes() for part in sides),
    }


class Sums:
    """The sum of packed counts, kept in place: one addition a kind, however many tasks there are."""

    def __init__(self, vocab_size: int, split: Split) -> None:
        self.vocab_size, self.split = vocab_size, split
        self._rows: dict[tuple[int, str], np.ndarray] = {}

    def add(self, row: dict[str, Any]) -> None:
        dense = np.frombuffer(row["counts"], row["kind"]).reshape(-1, self.vocab_size)
        for at, counts in zip(zip(row["sides"], row["sources"], strict=True), dense, strict=True):
            if at in self._rows:
                self._rows[at] += counts
            else:
                self._rows[at] = counts.astype(np.int64)

    def total(self) -> SideCounts:
        parts = []
        for wanted in range(self.split.sides):
            mine = [at for at in self._rows if at[0] == wanted]
            rows = np.stack([self._rows[at] for at in mine]) if mine else np.zeros((0, self.vocab_size), np.int64)
            parts.append(TokenCounts(rows, tuple(name for _, name in mine), self.vocab_size))
        return SideCounts(FoldCounts(tuple(parts[: self.split.folds]), self.split.seed), parts[self.split.folds])
