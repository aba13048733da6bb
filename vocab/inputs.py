"""Files of token ids, Parquet, Arrow or JSON lines, read as batches of flat arrays.

Columns: `token_ids` or `input_ids` (list of integers); if there, `loss_mask` (list of booleans or 0/1, as long as the
ids), `source` (text) and a column that names the prompt group. Arrow files are those of Hugging Face `datasets` too
(`save_to_disk`, which SpecForge and speculators read); local ones are mapped, not copied. Parquet and Arrow go from
Arrow's buffers to numpy without a Python object a token (70 M tokens/s against 5 M); what Arrow cannot say plainly goes
through rows, which name the bad one. A path may be a URI of object storage.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocab.errors import VocabError
from vocab.files import is_remote, open_file

_ROWS = 1024
# Tokens of a batch of Parquet, about: 4 MiB of int32.
_TOKENS = 1 << 20
_IDS = ("token_ids", "input_ids")


@dataclass(frozen=True)
class Batch:
    """Some sequences, end to end.

    token_ids: [N] int32 or int64. loss_mask: [N] bool. lengths: [S] int64. sources, groups: S of each; groups is None when the
    rows name none. where: the file and its first row, for messages. sides: [S] of a Split, where known already. path, row:
    of the first sequence, where the others follow it in one file.
    """

    token_ids: NDArray[Any]
    loss_mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    sources: list[str]
    groups: list[str] | None
    where: str
    sides: NDArray[np.int64] | None = None
    path: str = ""
    row: int = 0

    def located(self, error: VocabError, vocab_size: int) -> VocabError:
        """The error with the place of the first id outside [0, vocab_size), if that is what it is about."""
        wrong = np.flatnonzero((self.token_ids < 0) | (self.token_ids >= vocab_size))
        if not (self.path and wrong.size):
            return VocabError(f"{self.where}: {error}")
        ends = np.cumsum(self.lengths)
        at = int(np.searchsorted(ends, wrong[0], side="right"))
        position = int(wrong[0] - ends[at] + self.lengths[at])
        return VocabError(
            f"{self.path}: row {self.row + at}: token id {int(self.token_ids[wrong[0]])} at position {position} is outside "
            f"the vocabulary of {vocab_size:,} ids; were these ids made by the verifier's own tokenizer?"
        )


def read_batches(paths: Sequence[str], group_column: str) -> Iterator[Batch]:
    """Batches of all files in turn. A row without a source is of the source `all`.

    Raises VocabError that names the file, and the row, when it is not readable as described above.
    """
    for path in paths:
        name = path.removesuffix(".gz")
        if not name.endswith((".parquet", ".arrow", ".feather", ".jsonl", ".json", ".ndjson")):
            raise VocabError(f"{path}: expected a name that ends in .parquet, .arrow, .jsonl or .jsonl.gz")
        try:
            row = 1
            if name.endswith((".parquet", ".arrow", ".feather")):
                tables = _parquet if name.endswith(".parquet") else _arrow
                for table in tables(path, group_column):
                    found = _arrow_batch(path, row, table, group_column)
                    yield found or _batch(path, row, table.to_pylist(), group_column)
                    row += table.num_rows
            else:
                for rows in _json_lines(path):
                    yield _batch(path, row, rows, group_column)
                    row += len(rows)
        except OSError as error:
            raise VocabError(f"{path}: cannot read it: {error.strerror or error}") from error


def largest_id(paths: Sequence[str]) -> int:
    """The largest token id in the files, -1 without tokens. Raises VocabError as `read_batches` does."""
    largest = (int(batch.token_ids.max()) for batch in read_batches(paths, "") if batch.token_ids.size)
    return max(largest, default=-1)


def _parquet(path: str, group_column: str) -> Iterator[Any]:
    """Record batches of the columns that matter."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_file(path) as opened, pq.ParquetFile(path if not is_remote(path) else opened) as file:
            wanted = (*_IDS, "loss_mask", "source", group_column)
            columns = [name for name in file.schema_arrow.names if name in wanted]
            if not set(_IDS) & set(columns):
                raise VocabError(f"{path}: expected a column token_ids, found {file.schema_arrow.names}")
            at = file.schema_arrow.names.index(next(name for name in _IDS if name in columns))
            mean = 1
            if file.metadata.num_rows and at < file.metadata.num_columns:
                first = file.metadata.row_group(0)
                mean = max(1, first.column(at).num_values // max(1, first.num_rows))
            yield from file.iter_batches(max(1, _TOKENS // mean), columns=columns)
    except pa.ArrowException as error:
        raise VocabError(f"{path}: not a Parquet file that can be read: {str(error).splitlines()[0]}") from error


def _arrow(path: str, group_column: str) -> Iterator[Any]:
    """Record batches of the columns that matter, of an Arrow file or stream, by memory map."""
    import pyarrow as pa

    wanted = (*_IDS, "loss_mask", "source", group_column)
    try:
        with pa.PythonFile(open_file(path), mode="r") if is_remote(path) else pa.memory_map(path) as source:
            try:
                file = pa.ipc.open_file(source)
                batches = (file.get_batch(at) for at in range(file.num_record_batches))
            except pa.ArrowInvalid:
                source.seek(0)
                batches = iter(pa.ipc.open_stream(source))
            for batch in batches:
                names = [name for name in batch.schema.names if name in wanted]
                if not set(_IDS) & set(names):
                    raise VocabError(f"{path}: expected a column token_ids, found {batch.schema.names}")
                kept = batch.select(names)
                bytes_a_row = max(1, kept.nbytes // max(1, kept.num_rows))
                rows = max(1, _TOKENS * 16 // bytes_a_row)
                for start in range(0, kept.num_rows, rows):
                    yield kept.slice(start, rows)
    except pa.ArrowException as error:
        raise VocabError(f"{path}: not an Arrow file that can be read: {str(error).splitlines()[0]}") from error


def _arrow_batch(path: str, first: int, table: Any, group_column: str) -> Batch | None:
    """A record batch as a Batch, without Python objects for tokens; None when rows must be looked at one by one."""
    import pyarrow as pa

    names = table.schema.names
    ids = table.column(next(name for name in _IDS if name in names))
    kind = ids.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
        return None
    values, offsets = ids.flatten(), ids.offsets.to_numpy()
    if ids.null_count or values.null_count:
        return None
    lengths = np.diff(offsets).astype(np.int64)
    mask = np.ones(len(values), np.bool_)
    if "loss_mask" in names:
        column = table.column("loss_mask")
        listed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if not listed or not (
            pa.types.is_boolean(column.type.value_type) or pa.types.is_integer(column.type.value_type)
        ):
            return None
        flags = column.flatten()
        if column.null_count or flags.null_count or not np.array_equal(np.diff(column.offsets.to_numpy()), lengths):
            return None
        mask = flags.to_numpy(zero_copy_only=False)
        mask = mask if mask.dtype == np.bool_ else mask != 0
    sources = table.column("source").to_pylist() if "source" in names else [None] * len(lengths)
    groups = table.column(group_column).to_pylist() if group_column in names else [None] * len(lengths)
    return Batch(
        token_ids=values.to_numpy(zero_copy_only=False),
        loss_mask=mask,
        lengths=lengths,
        sources=["all" if source is None else str(source) for source in sources],
        groups=None if any(group is None for group in groups) else [str(group) for group in groups],
        where=f"{path}: row {first} and after",
        path=path,
        row=first,
    )


def _json_lines(path: str) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    number = 0
    try:
        with open_file(path) as opened:
            plain = gzip.GzipFile(fileobj=opened) if path.endswith(".gz") else opened
            for number, line in enumerate(io.TextIOWrapper(plain, encoding="utf-8"), 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict) or not set(_IDS) & set(row):
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
        given = row["token_ids"] if "token_ids" in row else row["input_ids"]
        ids.append(_flat(given, "iu", f"{path}: row {number}: token_ids: expected a list of integers"))
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
        path=path,
        row=first,
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
