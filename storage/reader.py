"""Reading: random access by sequence. Opening reads a few small objects; shard indexes load when first needed.

Nothing missing ever reads as a number: an unsealed dataset is refused, an absent chunk, a wrong checksum or a shard that
is not the one the seal names is a ShardCorrupt that says which and what to do.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from storage import layout
from storage.buffers import BufferPool
from storage.commit import load_offset, load_plan, load_plan_document, offset_hash
from storage.contract import Contract
from storage.errors import DatasetNotSealed, ShardCorrupt, StatehouseError
from storage.fetch import ShardReader, Spent, twice
from storage.object_store import CannotList
from storage.objects import LocalStore, ObjectStore, open_store
from storage.receipt import Receipt
from storage.seal import Seal, load_seal, load_shards_table, scan_shards, seal_key
from storage.shard import Footer
from storage.states import States
from storage.stream import read_ahead
from storage.teacher import NONE, TeacherObject, TeacherReader, TeacherSummary
from storage.token_reader import TokenReader
from storage.writer import shard_identity

# Opening compares every object's size with the seal up to this many shards: 10 list requests. Above, each shard is
# checked when it is first read (as it is below, too).
_LISTED_SHARDS = 10_000
# GETs at once: 8 of 16 MiB keep a link of 10 Gbit/s full at 100 ms, and more cores than 2 busy decoding.
THREADS = 8
# Buffers of states that wait for the next sequence: a few at H = 7168 (100 MB for 1,700 tokens).
_IDLE_BYTES = 512 << 20


class Dataset:
    """A dataset opened for reading. Safe to share between threads. Use `open_dataset`."""

    def __init__(self, store: ObjectStore, *, partial: bool = False, threads: int = THREADS) -> None:
        self.store = store
        self._options: dict[str, Any] = {"partial": partial, "threads": threads}
        self._process = os.getpid()
        self._document = twice(lambda: load_plan_document(store))
        self.seal: Seal | None = None
        try:
            self.seal = twice(lambda: load_seal(store))
        except DatasetNotSealed:
            if not partial:
                raise
        self.plan = twice(lambda: load_plan(store, self._document))
        geometry = self.plan.geometry
        offset = twice(lambda: load_offset(store, (geometry.layers, geometry.hidden_size)))
        self._offset_LH, self._offset_hash = offset, offset_hash(self.plan.codec, offset)
        self._token_reader = TokenReader(store, self._document)
        self._buffers = BufferPool(_IDLE_BYTES)
        identity = shard_identity(self.plan)
        self._reader = ShardReader(store, identity, offset, self._offset_hash, self._check_footer, threads)
        # Of each shard: object bytes (0: not finished), sha256 of data and of index.
        self._object_bytes = np.zeros(geometry.shards, np.int64)
        self._teacher = TeacherReader(store, self.plan.teacher, geometry.shard_tokens, self._teacher_objects)
        self._receipts: pa.ChunkedArray | dict[int, Receipt] = {}
        self._digests: tuple[pa.ChunkedArray, pa.ChunkedArray] | dict[int, tuple[str, str]]
        if self.seal is not None:
            self._digests = self._sealed_shards(self.seal)
            self.sequences = self._without(self.plan.table, set(self.seal.quarantined))
        else:
            good, _ = scan_shards(store, self.plan)
            self._digests = {at: (one.receipt.data_sha256, one.receipt.index_sha256) for at, one in good.items()}
            self._receipts = {at: one.receipt for at, one in good.items()}
            for shard, one in good.items():
                self._object_bytes[shard] = one.object_bytes
            quarantined = {key for one in good.values() for key in one.receipt.quarantined}
            self.sequences = self._without(self.plan.table.filter(pa.array(self._finished())), quarantined)

    def _finished(self) -> np.ndarray:
        """Whether all shards of a sequence are there: [sequences] bool."""
        before = np.concatenate([[0], np.cumsum(self._object_bytes == 0)])  # unfinished shards before each
        start, length = self.plan.column("start"), self.plan.column("length")
        size = self.plan.geometry.shard_tokens
        return before[start // size] == before[(start + length - 1) // size + 1]

    @staticmethod
    def _without(table: pa.Table, ids: set[str]) -> pa.Table:
        if not ids:
            return table
        return table.filter(pa.array([key not in ids for key in table["id"].to_pylist()]))

    def _sealed_shards(self, seal: Seal) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        for name, here in (
            ("plan_hash", self.plan.hash),
            ("contract_hash", self.contract.hash),
            ("offset_hash", self._offset_hash),
        ):
            if getattr(seal, name) != here:
                raise ShardCorrupt(
                    f"{self.uri}: the seal names {name} {getattr(seal, name)}, the dataset holds {here}; "
                    f"objects of two datasets were mixed: restore them with `statehouse repair {self.uri} --from COPY_URI`"
                )
        table = twice(lambda: load_shards_table(self.store, seal))
        if not np.array_equal(table["shard"].to_numpy(), np.arange(self.plan.geometry.shards)):
            raise ShardCorrupt(
                f"{self.uri}: the seal's table of shards does not list shards 0 to {self.plan.geometry.shards - 1}; "
                f"make it again with `statehouse repair {self.uri}`"
            )
        self._object_bytes = table["object_bytes"].to_numpy()
        if self.plan.teacher != NONE:
            self._receipts = table["receipt"]
        if len(table) <= _LISTED_SHARDS:
            with contextlib.suppress(CannotList):  # a web server: each shard is checked when it is first read
                twice(self._check_sizes)
        return table["data_sha256"], table["index_sha256"]

    def _check_sizes(self) -> None:
        sizes = self.store.sizes("hidden")
        for shard, size in enumerate(self._object_bytes.tolist()):
            key = layout.shard_key(shard)
            if sizes.get(key) != size:
                raise ShardCorrupt(
                    f"{self.uri}/{key}: {sizes.get(key, 'no')} bytes, sealed with {size}; restore the object with "
                    f"`statehouse repair {self.uri} --from COPY_URI`"
                )

    def _check_footer(self, shard: int, footer: Footer) -> None:
        """Raises ShardCorrupt when a shard is not the one that was sealed (or finished when the dataset was opened)."""
        digests, sealed = self._digests, ("no such shard", "")
        if not isinstance(digests, dict):
            sealed = (digests[0][shard].as_py(), digests[1][shard].as_py())
        elif shard in digests:
            sealed = digests[shard]
        receipt = footer.receipt
        if (receipt.data_sha256, receipt.index_sha256) != sealed or footer.object_bytes != self._object_bytes[shard]:
            if self.seal is not None and self.store.exists(seal_key(self.seal.number + 1)):
                raise ShardCorrupt(
                    f"{self.uri}/{layout.shard_key(shard)}: repaired and sealed anew since this dataset was opened with "
                    f"fingerprint {self.seal.fingerprint[:12]}; open it again, which gives the new content"
                )
            raise ShardCorrupt(
                f"{self.uri}/{layout.shard_key(shard)}: holds {receipt.data_sha256[:12]} in {footer.object_bytes} bytes, the "
                f"seal names {sealed[0][:12]} in {self._object_bytes[shard]}; it was replaced after the seal: restore it "
                f"with `statehouse repair {self.uri} --from COPY_URI`"
            )

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def contract(self) -> Contract:
        return self.plan.contract

    @property
    def exponent_offset(self) -> np.ndarray | None:
        """uint8 [L, H], or None where the codec has none."""
        return self._offset_LH if self._offset_hash is not None else None

    @property
    def fingerprint(self) -> str:
        """Raises DatasetNotSealed."""
        if self.seal is None:
            load_seal(self.store)
            raise DatasetNotSealed(f"{self.uri}: sealed since it was opened; open it again")
        return self.seal.fingerprint

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        return {name: self.sequences[name].to_numpy() for name in ("start", "length")}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens it again: threads, connections and caches cannot be sent."""
        return functools.partial(open_dataset, **self._options), (self.uri,)

    @property
    def threads(self) -> int:
        """Range GETs at once."""
        return self._reader.threads

    def state_bytes(self, index: int) -> int:
        """Bytes of one sequence's states in memory."""
        return self._place(index)[1] * self.plan.geometry.bytes_per_token

    def _place(self, index: int) -> tuple[int, int]:
        if os.getpid() != self._process:
            raise StatehouseError(
                f"{self.uri}: opened in process {self._process} and used in its fork {os.getpid()}, where the threads that "
                "read are gone; call open_dataset in each process, or start them with 'spawn'"
            )
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.uri}: sequence {index} of {len(self)}")
        columns = self._columns
        return int(columns["start"][index]), int(columns["length"][index])

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """token_ids [T] int32 and loss_mask [T] bool of one sequence."""
        return self._token_reader.ask(*self._place(index))()

    def read(self, index: int, out: np.ndarray | None = None, *, part: tuple[int, int] | None = None) -> States:
        """One sequence, by its row in `sequences`, or the tokens `part[0]` to `part[1] - 1` of it.

        out: memory for its hidden states, [at least T, L, H] bfloat16 (or its bits, uint16 or int16), contiguous; a view of
        a pinned torch tensor for instance. Without it, memory of sequences that are no longer in use is used again.
        Raises IndexError, ValueError when `out` does not fit, ShardCorrupt, StoreError.
        """
        start, length = self._range(index, part)
        geometry = self.plan.geometry
        shape = (length, geometry.layers, geometry.hidden_size)
        if out is None:
            bits = (
                self._buffers.take(2 * length * geometry.layers * geometry.hidden_size).view(np.uint16).reshape(shape)
            )
        else:
            bits = _fitting(out, shape)
        tokens = self._token_reader.ask(start, length)  # on their way while the states are read
        self._reader.read(start, bits)
        return self._states(index, bits, *tokens(), part)

    def read_planes(
        self, index: int, out: np.ndarray | None = None, *, part: tuple[int, int] | None = None
    ) -> np.ndarray:
        """The byte planes of one sequence, uncompressed but not joined: uint8 [2, T, L, H] (`storage.torch_decode`).

        out: memory for them, of that shape; its planes may lie apart. part: as for `read`.
        """
        start, length = self._range(index, part)
        shape = (2, length, self.plan.geometry.layers, self.plan.geometry.hidden_size)
        if out is None:
            out = self._buffers.take(int(np.prod(shape))).reshape(shape)
        elif out.shape != shape or out.dtype != np.uint8:
            raise ValueError(f"out must be {list(shape)} uint8, found {list(out.shape)} {out.dtype}")
        self._reader.read_planes(start, out)
        return out

    def teacher(self, index: int, *, part: tuple[int, int] | None = None) -> TeacherSummary | None:
        """What the verifier says after each token of a sequence, without its states; None where none is stored.

        part: as for `read`. Raises IndexError, ShardCorrupt, StoreError.
        """
        return self._teacher.read(*self._range(index, part))

    def _teacher_objects(self, shard: int) -> Mapping[str, TeacherObject]:
        receipts = self._receipts
        if isinstance(receipts, dict):
            return receipts[shard].teacher
        return Receipt.model_validate_json(receipts[shard].as_py()).teacher

    def _range(self, index: int, part: tuple[int, int] | None) -> tuple[int, int]:
        """Start on the token axis and length of (a part of) a sequence."""
        start, length = self._place(index)
        low, high = part or (0, length)
        if not 0 <= low < high <= length:
            raise IndexError(f"{self.uri}: tokens {low} to {high} of sequence {index}, which has {length}")
        return start + low, high - low

    @property
    def spent(self) -> Spent:
        """What reading states took so far, over all threads."""
        return self._reader.spent

    def _states(
        self,
        index: int,
        bits: np.ndarray,
        token_ids: np.ndarray,
        loss_mask: np.ndarray,
        part: tuple[int, int] | None = None,
    ) -> States:
        import ml_dtypes

        row = self.sequences.slice(index % len(self), 1).to_pylist()[0]
        hidden, teacher = bits.view(ml_dtypes.bfloat16), functools.partial(self.teacher, index, part=part)
        return States(row["id"], row["source"], row["group"], token_ids, loss_mask, hidden, teacher)

    def read_many(self, indices: Sequence[int], threads: int = 4) -> list[States]:
        """Several sequences, read in parallel, in the order asked for."""
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.read, indices))

    def stream(
        self, order: Sequence[int] | None = None, *, ahead: int | None = None, ahead_bytes: int | None = None
    ) -> Iterator[States]:
        """Sequences in `order` (default: as they lie in the store), read in advance while the caller works.

        ahead: sequences that are read or wait; by default 4, or 64 with `ahead_bytes`. ahead_bytes: bytes of their states
        together (the next sequence is always read, however long). Beside them lie the one the caller holds, the parts in
        flight (16 MiB for each thread that fetches) and idle buffers no larger than what was in use.
        """
        if order is None:
            order = np.argsort(self._columns["start"]).tolist()
        return read_ahead([(self, index) for index in order], ahead=ahead, ahead_bytes=ahead_bytes)

    def shards_table(self) -> pa.Table:
        """Receipts of all shards (`storage.shards_table.SHARDS_SCHEMA`). Raises DatasetNotSealed."""
        return load_shards_table(self.store, self.seal or load_seal(self.store))


def _fitting(out: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """The first rows of a caller's memory as uint16. Raises ValueError that says what does not fit."""
    if out.dtype.itemsize != 2 or out.ndim != 3 or out.shape[1:] != shape[1:] or len(out) < shape[0]:
        raise ValueError(f"out must be [>= {shape[0]}, {shape[1]}, {shape[2]}] bfloat16, found {out.shape} {out.dtype}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out must be contiguous and writable")
    return out[: shape[0]].view(np.uint16)


def open_dataset(uri: str, *, partial: bool = False, threads: int = THREADS) -> Dataset:
    """Opens a sealed dataset at a folder or object-store URI; with `partial`, an unsealed one too (finished shards only).

    threads: range GETs at once (each at most 16 MiB).
    Raises DatasetMissing, DatasetNotSealed, ShardCorrupt, StoreError.
    """
    return Dataset(open_store(uri), partial=partial, threads=threads)


def find_datasets(uri: str, *, depth: int = 3) -> list[str]:
    """URIs of the datasets at or under `uri`, at most `depth` folders down, sorted. Raises StatehouseError if it is a file."""
    store = open_store(uri)
    found: list[str] = []

    def look(prefix: str, left: int) -> None:
        if store.exists(f"{prefix}/{layout.PLAN}" if prefix else layout.PLAN):
            found.append(f"{store.uri}/{prefix}" if prefix else store.uri)
        elif left:
            for name in store.folders(prefix):
                if not name.startswith("."):
                    look(f"{prefix}/{name}" if prefix else name, left - 1)

    if isinstance(store, LocalStore) and os.path.isfile(store.root):
        raise StatehouseError(f"{uri}: a file, expected a folder or a prefix that holds datasets")
    look("", depth)
    return sorted(found)
