"""How often each token id of the verifier occurs, by source, on the positions that carry loss.

`count_tokens` counts one flat array, `count_by_source` one batch of sequences. `TokenCounts` is the sum over many of
them: additive, so that any number of workers can count blocks in any order and add them up in a tree.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vocab.errors import VocabError

# Tokens are counted a block at a time: a block of int32, its selection and their int64 fit the last-level cache (at 163,840
# ids, blocks of 64 Ki lose half of the rate to adding up counts, blocks of 4 Mi a quarter to memory), and counting a
# memory-mapped array needs a few MiB, not 8 bytes a token.
_BLOCK = 1 << 18
_FORMAT = "statehouse-token-counts-1"


def count_tokens(
    token_ids: np.ndarray, loss_mask: np.ndarray | None, vocab_size: int, *, into: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Occurrences of each token id on the positions where `loss_mask` is true (everywhere when it is None).

    token_ids: [N] of any integer type. loss_mask: [N] bool. Returns [vocab_size] int64: new ones, or `into` with them
    added, which after an error holds a part of them.
    Raises VocabError for an id outside [0, vocab_size), masked or not, with the id and its position, and for shapes or
    types that do not fit.
    """
    ids, mask = _checked(token_ids, loss_mask, vocab_size)
    counts = np.zeros(vocab_size, np.int64) if into is None else into
    for start in range(0, ids.size, _BLOCK):
        block = ids[start : start + _BLOCK]
        _check_range(block, start, vocab_size)
        if mask is not None:
            block = block[mask[start : start + _BLOCK]]
        found = np.bincount(block.astype(np.int64, copy=False))
        counts[: found.size] += found
    return counts


def count_by_key(
    token_ids: np.ndarray,
    loss_mask: np.ndarray | None,
    lengths: np.ndarray,
    keys: np.ndarray,
    rows: Sequence[NDArray[np.int64]],
    vocab_size: int,
) -> None:
    """Add the counts of S sequences that lie end to end to the row of each one's kind.

    token_ids: [N] integers. loss_mask: [N] bool or None. lengths: [S] integers with sum N. keys: [S] integers below
    len(rows). rows: [vocab_size] int64 each; after an error they hold a part of the counts.
    Raises VocabError as `count_tokens` does, and for keys that do not fit the lengths.
    """
    ids, mask = _checked(token_ids, loss_mask, vocab_size)
    spans, kinds = np.asarray(lengths, np.int64), np.asarray(keys, np.int64)
    if kinds.shape != spans.shape or int(spans.sum()) != ids.size or bool(((kinds < 0) | (kinds >= len(rows))).any()):
        raise VocabError(
            f"keys: expected {spans.size} keys below {len(rows)} for {ids.size} tokens, found {kinds.size}"
        )
    # Runs of one key lie together already; the runs of a key are put end to end, which costs a copy but no index.
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    edges = np.concatenate([[0], np.cumsum(spans)])
    begins, ends = edges[starts], edges[np.append(starts[1:], kinds.size)] if starts.size else edges[:0]
    for key in np.unique(kinds).tolist():
        mine = kinds[starts] == key
        runs = [slice(a, b) for a, b in zip(begins[mine].tolist(), ends[mine].tolist(), strict=True)]
        part = ids[runs[0]] if len(runs) == 1 else np.concatenate([ids[run] for run in runs])
        kept = None
        if mask is not None:
            kept = mask[runs[0]] if len(runs) == 1 else np.concatenate([mask[run] for run in runs])
        try:
            count_tokens(part, kept, vocab_size, into=rows[key])
        except VocabError:
            count_tokens(ids, mask, vocab_size)  # names the position in the whole array
            raise


def count_by_source(
    token_ids: np.ndarray,
    loss_mask: np.ndarray | None,
    lengths: np.ndarray,
    sources: Sequence[str],
    vocab_size: int,
) -> TokenCounts:
    """Counts of a batch of S sequences that lie end to end, by the source of each.

    token_ids: [N] integers. loss_mask: [N] bool or None. lengths: [S] integers, tokens of each sequence, with sum N.
    sources: S names. Returns a TokenCounts with one row for each distinct source, also where it has no loss tokens.
    Raises VocabError as `count_tokens` does, and when lengths and sources do not fit the ids.
    """
    spans = np.asarray(lengths, np.int64)
    size = np.asarray(token_ids).size
    if spans.ndim != 1 or len(sources) != spans.size or bool((spans < 0).any()) or int(spans.sum()) != size:
        raise VocabError(
            f"lengths: expected {len(sources)} lengths (one a source label) that sum to {size} tokens, "
            f"found {spans.size} with sum {int(spans.sum())}"
        )
    names = sorted(set(sources))
    row_of = {name: row for row, name in enumerate(names)}
    keys = np.array([row_of[name] for name in sources], np.int64)
    counts = np.zeros((len(names), max(vocab_size, 0)), np.int64)
    count_by_key(token_ids, loss_mask, spans, keys, list(counts), vocab_size)
    return TokenCounts(counts, tuple(names), vocab_size)


def _checked(
    token_ids: np.ndarray, loss_mask: np.ndarray | None, vocab_size: int
) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Ids [N] of an integer type and mask [N] bool. Raises VocabError for shapes and types; ids are not looked at."""
    ids = np.asarray(token_ids)
    if ids.size == 0 and ids.ndim == 1:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise VocabError(f"token_ids: expected [N] integers, found {ids.dtype} of shape {list(ids.shape)}")
    if vocab_size < 1:
        raise VocabError(f"vocab_size: expected at least 1, found {vocab_size}")
    mask = None if loss_mask is None else np.asarray(loss_mask)
    if mask is not None and mask.size == 0:
        mask = mask.astype(bool)
    if mask is not None and (mask.shape != ids.shape or mask.dtype != np.bool_):
        raise VocabError(
            f"loss_mask: expected bool of shape {list(ids.shape)}, as token_ids, "
            f"found {mask.dtype} of shape {list(mask.shape)}"
        )
    return ids, mask


def _check_range(block: NDArray[Any], start: int, vocab_size: int) -> None:
    """Raises VocabError that names the first id outside [0, vocab_size) and its position in the whole array."""
    if block.size and (int(block.min()) < 0 or int(block.max()) >= vocab_size):
        at = int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
        raise VocabError(
            f"token id {int(block[at])} at position {start + at} is outside the vocabulary of {vocab_size} ids; "
            "were these ids made by the verifier's own tokenizer?"
        )


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Token counts by source.

    counts: [sources, vocab] int64, never negative; made read-only. sources: one name a row, distinct. Rows are kept in
    the order of their names, whatever order they came in, so that equal counts are equal objects with equal hashes.
    Raises VocabError when the parts do not fit one another.
    """

    counts: NDArray[np.int64]
    sources: tuple[str, ...]
    vocab_size: int

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts)
        sources = tuple(self.sources)
        shape = (len(sources), self.vocab_size)
        if self.vocab_size < 1 or counts.shape != shape or counts.dtype.kind not in "iu":
            raise VocabError(
                f"counts: expected integers of shape {list(shape)} (sources, vocab_size), "
                f"found {counts.dtype} of shape {list(counts.shape)}"
            )
        if len(set(sources)) != len(sources):
            raise VocabError(f"sources: expected distinct names, found {list(sources)}")
        if counts.size and int(counts.min()) < 0:
            row, token = (int(i) for i in np.argwhere(counts < 0)[0])
            raise VocabError(f"counts: token id {token} of source {sources[row]!r} has {int(counts[row, token])}")
        order = sorted(range(len(sources)), key=sources.__getitem__)
        counts = counts.astype(np.int64)[order]
        counts.flags.writeable = False
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "sources", tuple(sources[i] for i in order))

    @classmethod
    def empty(cls, vocab_size: int) -> TokenCounts:
        """Counts of nothing: the start of a sum."""
        return cls(np.zeros((0, vocab_size), np.int64), (), vocab_size)

    def total(self) -> NDArray[np.int64]:
        """Counts over all sources, [vocab] int64."""
        return self.counts.sum(axis=0)

    @property
    def tokens(self) -> int:
        """How many tokens were counted: the sum of everything."""
        return int(self.counts.sum())

    def of(self, source: str) -> NDArray[np.int64]:
        """Counts of one source, [vocab] int64. Raises VocabError for a source that is not there."""
        if source not in self.sources:
            raise VocabError(f"source {source!r} was not counted; there are {list(self.sources)}")
        return self.counts[self.sources.index(source)]

    def merge(self, other: TokenCounts) -> TokenCounts:
        """The sum: all sources of both. Raises VocabError when the vocabularies have different sizes."""
        if self.vocab_size != other.vocab_size:
            raise VocabError(
                f"cannot add counts over {self.vocab_size} ids and over {other.vocab_size}: "
                "both must come from the same verifier's tokenizer"
            )
        sources = tuple(sorted({*self.sources, *other.sources}))
        counts = np.zeros((len(sources), self.vocab_size), np.int64)
        for part in (self, other):
            counts[[sources.index(name) for name in part.sources]] += part.counts
        return TokenCounts(counts, sources, self.vocab_size)

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return self.merge(other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenCounts):
            return NotImplemented
        same_shape = self.sources == other.sources and self.vocab_size == other.vocab_size
        return same_shape and bool(np.array_equal(self.counts, other.counts))

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the content: vocabulary size, source names and counts."""
        head = json.dumps([_FORMAT, self.vocab_size, list(self.sources)]).encode()
        return hashlib.sha256(head + self.counts.astype("<i8").tobytes()).hexdigest()

    def to_parquet(self, where: str | os.PathLike[str] | IO[bytes]) -> None:
        """Write the counts above zero as rows (source, token_id, count), to a path or an open binary file.

        Vocabulary size, source names and content hash go into the schema's metadata.
        Raises VocabError when the path cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows, ids = np.nonzero(self.counts)
        head = {"format": _FORMAT, "vocab_size": self.vocab_size, "sources": list(self.sources), "hash": self.hash}
        schema = pa.schema(
            [("source", pa.dictionary(pa.int32(), pa.string())), ("token_id", pa.int32()), ("count", pa.int64())],
            metadata={"statehouse": json.dumps(head)},
        )
        names = pa.DictionaryArray.from_arrays(
            pa.array(rows.astype(np.int32)), pa.array(self.sources, pa.string()), safe=False
        )
        columns = [names, pa.array(ids.astype(np.int32)), pa.array(self.counts[rows, ids])]
        buffer = BytesIO()
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), buffer, compression="zstd")
        if isinstance(where, str | os.PathLike):
            try:
                Path(where).write_bytes(buffer.getvalue())
            except OSError as error:
                raise VocabError(f"cannot write token counts to {where}: {error.strerror or error}") from error
        else:
            where.write(buffer.getvalue())

    @classmethod
    def from_parquet(cls, where: str | os.PathLike[str] | IO[bytes] | bytes) -> TokenCounts:
        """Read what `to_parquet` wrote, from a path, an open binary file or bytes.

        Raises VocabError when it is missing, is no such file, or its content does not have the hash it was written
        with.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        name = os.fspath(where) if isinstance(where, str | os.PathLike) else "token counts"
        try:
            if isinstance(where, str | os.PathLike):
                data = Path(where).read_bytes()
            else:
                data = where if isinstance(where, bytes) else where.read()
            table = pq.read_table(BytesIO(data))
            head = json.loads((table.schema.metadata or {})[b"statehouse"])
            vocab_size, sources, found = int(head["vocab_size"]), tuple(head["sources"]), head["format"]
            if found != _FORMAT:
                raise VocabError(f"{name}: format: expected {_FORMAT}, found {found}; count the tokens again")
            result = cls(_dense(name, table, sources, vocab_size), sources, vocab_size)
        except VocabError:
            raise
        except OSError as error:
            raise VocabError(f"{name}: cannot read token counts: {error.strerror or error}") from error
        except (pa.ArrowException, KeyError, ValueError, TypeError) as error:
            raise VocabError(f"{name}: not a file of token counts ({error!r}); count the tokens again") from error
        if result.hash != head.get("hash"):
            raise VocabError(
                f"{name}: hash: expected {head.get('hash')}, found {result.hash}: the file is damaged; "
                "count the tokens again"
            )
        return result


def _dense(name: str, table: Any, sources: tuple[str, ...], vocab_size: int) -> NDArray[np.int64]:
    """Rows (source, token_id, count) -> [sources, vocab] int64. Raises VocabError for rows that fit neither axis."""
    import pyarrow.compute as pc

    labels = pc.dictionary_encode(table.column("source").cast("string")).combine_chunks()
    row_of = {source: row for row, source in enumerate(sources)}
    row_of_label = np.array([row_of.get(label, -1) for label in labels.dictionary.to_pylist()], np.int64)
    if any(table.column(column).null_count for column in table.column_names):
        raise VocabError(f"{name}: has rows with nothing in them; count the tokens again")
    rows = row_of_label[labels.indices.to_numpy()]
    ids = table.column("token_id").cast("int64").to_numpy()
    if bool((rows < 0).any()) or bool(((ids < 0) | (ids >= vocab_size)).any()):
        raise VocabError(
            f"{name}: rows name sources or token ids that its header does not have; count the tokens again"
        )
    counts = np.zeros((len(sources), vocab_size), np.int64)
    np.add.at(counts, (rows, ids), table.column("count").cast("int64").to_numpy())
    return counts
