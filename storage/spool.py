"""Sequences on disk until they are planned and stored: for more tokens than memory holds.

>>> with SequenceSpool() as spool:
...     spool.add_parquet("tokens.parquet")
...     sequences = spool.finish()
...     publish_plan(store, make_plan(sequences, contract, "lossless"), sequences)  # doctest: +SKIP

1.7 billion tokens take 8.5 GB of a temporary folder, and about as much again while they are stored; in memory lie ids,
sources, groups and places (about 150 bytes a sequence) and one batch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import StatehouseError
from storage.sequences import TOKENS_SCHEMA, Sequence, sequence_id, tokens_table
from storage.token_chunks import TableRows
from storage.windowed import in_order

# Tokens of a batch: what lies in memory at once, and what single sequences are gathered to.
_BATCH_TOKENS, _BATCH_ROWS = 1 << 22, 2048
# Threads that make ids again: sha256 lets the next batch be read meanwhile.
_HASHING = 2


class SequenceSpool:
    """Takes sequences in any order, duplicates included; `finish` orders them by id and drops the duplicates."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """folder: where a temporary folder is made; TMPDIR or the system's own by default."""
        self._folder = Path(tempfile.mkdtemp(prefix="statehouse-spool-", dir=folder))
        self._file: BinaryIO = open(self._folder / "tokens", "w+b")  # noqa: SIM115 (closed by `close`)
        self._rows: list[pa.Table] = []
        self._waiting: list[tuple[str, Sequence]] = []
        self._waiting_tokens = self._bytes = 0
        # Sequences added, duplicates included; smallest and largest token id among them.
        self.count, self.lowest, self.highest = 0, 0, 0

    def __enter__(self) -> SequenceSpool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the temporary folder."""
        with contextlib.suppress(OSError):  # it writes what is left, and the disk may be full
            self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, sequence: Sequence) -> str:
        """Returns the sequence's id."""
        key = sequence.id
        self._waiting.append((key, sequence))
        self._waiting_tokens += len(sequence.token_ids)
        if self._waiting_tokens >= _BATCH_TOKENS:
            self._flush()
        return key

    def _flush(self) -> None:
        if self._waiting:
            keys, sequences = zip(*self._waiting, strict=True)
            self._waiting, self._waiting_tokens = [], 0
            self.add_table(tokens_table(keys, sequences))

    def add_parquet(self, path: str | Path) -> None:
        """The rows of a Parquet file of `TOKENS_SCHEMA`, a few thousand at a time. Every id is made again from its tokens.

        Raises StatehouseError when the file is no such thing or an id does not belong to its tokens.
        """
        try:
            # Otherwise the whole file is read before the first batch comes.
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
                names = set(file.schema_arrow.names)
                if missing := [name for name in TOKENS_SCHEMA.names if name not in names]:
                    raise StatehouseError(
                        f"{path}: no column {missing[0]!r}; expected {', '.join(TOKENS_SCHEMA.names)}"
                    )
                batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=TOKENS_SCHEMA.names)
                for table in in_order(lambda batch: _checked(batch, str(path)), batches, _HASHING):
                    self.add_table(table)
        except (OSError, pa.ArrowException) as error:
            raise StatehouseError(f"{path}: no Parquet file of sequences ({error}); make it again") from None

    def add_table(self, table: pa.Table) -> None:
        """Rows of `TOKENS_SCHEMA` whose ids are known to be right."""
        for batch in table.to_batches():
            lists, masks = batch["token_ids"], batch["loss_mask"]
            ids, flags = lists.flatten().to_numpy(), masks.flatten().to_numpy(zero_copy_only=False).view(np.uint8)
            ends = np.cumsum(length := lists.value_lengths().to_numpy(), dtype=np.int64)
            if (
                not length.all()
                or len(flags) != len(ids)
                or not np.array_equal(length, masks.value_lengths().to_numpy())
            ):
                raise StatehouseError(
                    f"sequences {batch['id'][0]}...: token_ids and loss_mask must be of one length, above 0; make them again"
                )
            starts = ends - length
            self._rows.append(
                pa.table(
                    {
                        "id": batch["id"],
                        "source": batch["source"],
                        "group": batch["group"],
                        "length": length.astype(np.int32),
                        "loss_tokens": np.add.reduceat(flags, starts, dtype=np.int32),
                        "ids_at": self._bytes + 4 * starts,
                        "mask_at": self._bytes + 4 * len(ids) + starts,
                    }
                )
            )
            self.count += len(batch)
            self.lowest, self.highest = min(self.lowest, int(ids.min())), max(self.highest, int(ids.max()))
            for part in (np.ascontiguousarray(ids, "<i4"), flags):
                self._write(part)

    def _write(self, part: np.ndarray) -> None:
        with self.writing():
            self._file.write(part.data)
        self._bytes += part.nbytes

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around writes into the folder: a disk that is full is one StatehouseError."""
        try:
            yield
        except OSError as error:
            raise StatehouseError(
                f"{self._folder}: {error.strerror}; sequences wait there until they are planned: free some space or set TMPDIR"
            ) from None

    def finish(self) -> SpooledSequences:
        """What was added, ordered by id; of equal contents the first by (source, group) stays. The spool must stay open."""
        self._flush()
        with self.writing():
            self._file.flush()
        if not self._rows:
            return SpooledSequences(self, _NOTHING)
        table = pa.concat_tables(self._rows).sort_by([(name, "ascending") for name in ("id", "source", "group")])
        self._rows = []
        ids = table["id"].combine_chunks()
        first = np.ones(len(ids), bool)
        if len(ids) > 1:
            first[1:] = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
        return SpooledSequences(self, table if first.all() else table.filter(pa.array(first)))

    def scratch(self) -> BinaryIO:
        """A further file in the temporary folder."""
        return open(self._folder / "objects", "w+b")

    def read(self, at: int, length: int) -> bytes:
        return os.pread(self._file.fileno(), length, at)


class SpooledSequences:
    """Sequences of a spool, ordered by id: `table` has the columns that `plan_lengths` takes. Safe to share between threads."""

    def __init__(self, spool: SequenceSpool, rows: pa.Table) -> None:
        self.spool = spool
        self.table = rows.select(["id", "source", "group", "length", "loss_tokens"])
        self._length, self._ids_at, self._mask_at = (rows[name].to_numpy() for name in ("length", "ids_at", "mask_at"))

    def __len__(self) -> int:
        return len(self.table)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """token_ids [T] int32, loss_mask [T] bool of a row of `table`."""
        length = int(self._length[index])
        ids = np.frombuffer(self.spool.read(int(self._ids_at[index]), 4 * length), "<i4")
        return ids, np.frombuffer(self.spool.read(int(self._mask_at[index]), length), np.bool_)

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raises StatehouseError that names a sequence with an id outside the verifier's vocabulary."""
        if not len(self) or (self.spool.lowest >= 0 and self.spool.highest < vocab_size):
            return
        for index in range(len(self)):
            ids, _ = self.row(index)
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if len(outside):
                raise StatehouseError(
                    f"sequence {self.table['id'][index]} holds token id {outside[0]}, "
                    f"outside the verifier's vocabulary of {vocab_size}"
                )


def _checked(batch: pa.RecordBatch, path: str) -> pa.Table:
    table = pa.Table.from_batches([batch]).cast(TOKENS_SCHEMA)
    rows = TableRows(table)
    for index, key in enumerate(table["id"].to_pylist()):
        if (found := sequence_id(*rows.row(index))) != key:
            raise StatehouseError(f"{path}: sequence {key}: its tokens and mask make id {found}; make the file again")
    return table


_NOTHING = pa.Table.from_batches(  # pa.array([]) would import pandas
    [],
    pa.schema(
        [
            ("id", pa.string()),
            ("source", pa.string()),
            ("group", pa.string()),
            ("length", pa.int32()),
            ("loss_tokens", pa.int32()),
            ("ids_at", pa.int64()),
            ("mask_at", pa.int64()),
        ]
    ),
)
