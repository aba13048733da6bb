"""Small files of token ids, Parquet or JSON lines, read as batches of flat arrays. No Ray: for a look on one machine.

Columns: `token_ids` (list of integers); if there, `loss_mask` (list of booleans or 0/1, as long as token_ids), `source`
(text) and a column that names the prompt group.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocab.errors import VocabError

_ROWS = 1024


@dataclass(frozen=True)
class Batch:
    """Some sequences, end to end.

    token_ids: [N] int64. loss_mask: [N] bool. lengths: [S] int64. sources, groups: S of each; groups is None when the
    rows name none. where: the file and its first row, for messages.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    sources: list[str]
    groups: list[str] | None
    where: str


def read_batches(paths: Sequence[str], group_column: str) -> Iterator[Batch]:
    """Batches of all files in turn. A row without a source is of the source `all`.

    Raises VocabError that names the file, and the row, when it is not readable as described above.
    """
    for path in paths:
        name = path.removesuffix(".gz")
        if name.endswith(".parquet"):
            chunks = _parquet(path, group_column)
        elif name.endswith((".jsonl", ".json", ".ndjson")):
            chunks = _json_lines(path)
        else:
            raise VocabError(f"{path}: expected a name that ends in .parquet, .jsonl or .jsonl.gz")
        try:
            row = 1
            for rows in chunks:
                yield _batch(path, row, rows, group_column)
                row += len(rows)
        except OSError as error:
            raise VocabError(f"{path}: cannot read it: {error.strerror or error}") from error


def _parquet(path: str, group_column: str) -> Iterator[list[dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            wanted = ("token_ids", "loss_mask", "source", group_column)
            columns = [name for name in file.schema_arrow.names if name in wanted]
            if "token_ids" not in columns:
                raise VocabError(f"{path}: expected a column token_ids, found {file.schema_arrow.names}")
            for batch in file.iter_batches(_ROWS, columns=columns):
                yield batch.to_pylist()
    except pa.ArrowException as error:
        raise VocabError(f"{path}: not a Parquet file that can be read: {str(error).splitlines()[0]}") from error


def _json_lines(path: str) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    number = 0
    try:
        with gzip.open(path, "rt") if path.endswith(".gz") else Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict) or "token_ids" not in row:
                    raise VocabError(
                        f"{path}: line {number}: expected an object with token_ids, found {line.strip()[:60]!r}"
                    )
                rows.append(row)
                if len(rows) == _ROWS:
                    yield rows
                    rows = []
    except (EOFError, ValueError) as error:
        if isinstance(error, VocabError):
            raise
        raise VocabError(f"{path}: line {max(number, 1)}: expected JSON, found {error}") from error
    if rows:
        yield rows


def _batch(path: str, first: int, rows: list[dict[str, Any]], group_column: str) -> Batch:
    ids, masks, sources, groups = [], [], [], []
    for number, row in enumerate(rows, first):
        ids.append(_flat(row["token_ids"], "iu", f"{path}: row {number}: token_ids: expected a list of integers"))
        if row.get("loss_mask") is None:
            masks.append(np.ones(ids[-1].size, np.bool_))
        else:
            masks.append(
                _flat(row["loss_mask"], "biu", f"{path}: row {number}: loss_mask: expected a list of booleans") != 0
            )
        if masks[-1].size != ids[-1].size:
            raise VocabError(
                f"{path}: row {number}: loss_mask: expected {ids[-1].size} values, as token_ids, found {masks[-1].size}"
            )
        source, group = row.get("source"), row.get(group_column)
        sources.append("all" if source is None else str(source))
        if group is not None:
            groups.append(str(group))
    return Batch(
        token_ids=np.concatenate(ids),
        loss_mask=np.concatenate(masks),
        lengths=np.array([part.size for part in ids], np.int64),
        sources=sources,
        groups=groups if len(groups) == len(rows) else None,
        where=f"{path}: row {first} and after",
    )


def _flat(value: object, kinds: str, expected: str) -> NDArray[Any]:
    """A list of numbers as [n]; of nothing as [0] int64. Raises VocabError that starts with `expected`."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise VocabError(f"{expected}, found lists of unequal lengths") from error
    if array.shape == (0,):
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise VocabError(f"{expected}, found {str(value)[:40]}")
    return array.astype(np.int64)
