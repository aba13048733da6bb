"""Reading: random access by sequence. Opening reads a few small objects; shard indexes load when first needed.

Nothing missing ever reads as a number: an unsealed dataset is refused, an absent chunk, a wrong checksum or a shard that
is not the one the seal names is a ShardCorrupt that says which and what to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from storage import layout
from storage.commit import get_checked, load_offset, load_plan, load_plan_document, offset_hash
from storage.contract import Contract
from storage.errors import DatasetNotSealed, ShardCorrupt, StatehouseError
from storage.objects import LocalStore, ObjectMissing, ObjectStore, open_store
from storage.seal import Seal, load_seal, load_shards_table, scan_shards
from storage.shard import Footer, decode_rows, read_footer
from storage.writer import shard_identity
from storage.zarr_array import decode_chunk

if TYPE_CHECKING:
    import torch

# Decoded token chunks kept: 64 x (4 + 1) MiB, so 64 Mi tokens.
_TOKEN_CACHE = 64


@dataclass(frozen=True, eq=False)
class States:
    """One sequence as it was extracted.

    token_ids: [T] int32. loss_mask: [T] bool. hidden: [T, L, H] ml_dtypes.bfloat16: the captured layers in ascending
    order, then the final state.
    """

    id: str
    source: str
    group: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    hidden: np.ndarray

    def torch(self) -> torch.Tensor:
        """`hidden` as a torch.bfloat16 tensor on the same memory."""
        import torch

        return torch.from_numpy(self.hidden.view(np.int16)).view(torch.bfloat16)


class Dataset:
    """A dataset opened for reading. Safe to share between threads. Use `open_dataset`."""

    def __init__(self, store: ObjectStore, *, partial: bool = False) -> None:
        self.store = store
        self._document = load_plan_document(store)
        self.seal: Seal | None = None
        try:
            self.seal = load_seal(store)
        except DatasetNotSealed:
            if not partial:
                raise
        self.plan = load_plan(store, self._document)
        self._identity = shard_identity(self.plan)
        geometry = self.plan.geometry
        offset = load_offset(store, (geometry.layers, geometry.hidden_size))
        self._offset_LH, self._offset_hash = offset, offset_hash(self.plan.codec, offset)
        self._footers: dict[int, Footer] = {}
        self._tokens: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()
        self._lock = Lock()
        if self.seal is not None:
            self._shards = self._sealed_shards(self.seal)
            self.sequences = self.plan.table
        else:
            good, _ = scan_shards(store, self.plan)
            self._shards = {shard: (r.data_sha256, r.index_sha256) for shard, (r, _) in good.items()}
            finished = pa.array(np.isin(self.plan.column("shard"), list(good)))
            self.sequences = self.plan.table.filter(finished)

    def _sealed_shards(self, seal: Seal) -> dict[int, tuple[str, str]]:
        for field, here in (
            ("plan_hash", self._document.plan_hash),
            ("contract_hash", self.contract.hash),
            ("offset_hash", self._offset_hash),
        ):
            if getattr(seal, field) != here:
                raise ShardCorrupt(
                    f"{self.uri}: the seal names {field} {getattr(seal, field)}, the dataset holds {here}; "
                    "objects of two datasets were mixed: restore them from a copy"
                )
        table = load_shards_table(self.store, seal)
        sizes = self.store.sizes("hidden")
        for shard, size in zip(table["shard"].to_pylist(), table["object_bytes"].to_pylist(), strict=True):
            key = layout.shard_key(shard)
            if sizes.get(key) != size:
                raise ShardCorrupt(
                    f"{self.uri}/{key}: {sizes.get(key, 'no')} bytes, sealed with {size}; restore the object from a copy"
                )
        columns = (table[name].to_pylist() for name in ("shard", "data_sha256", "index_sha256"))
        return {shard: (data, index) for shard, data, index in zip(*columns, strict=True)}

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def contract(self) -> Contract:
        return self.plan.contract

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
        return {name: self.sequences[name].to_numpy() for name in ("start", "length", "shard")}

    def _place(self, index: int) -> tuple[int, int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.uri}: sequence {index} of {len(self)}")
        columns = self._columns
        return int(columns["start"][index]), int(columns["length"][index]), int(columns["shard"][index])

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """token_ids [T] int32 and loss_mask [T] bool of one sequence."""
        start, length, _ = self._place(index)
        return self._token_range("tokens", start, length), self._token_range("loss_mask", start, length)

    def _token_range(self, array: str, start: int, length: int) -> np.ndarray:
        parts = []
        for chunk in range(start // layout.TOKEN_CHUNK, (start + length - 1) // layout.TOKEN_CHUNK + 1):
            low = chunk * layout.TOKEN_CHUNK
            parts.append(self._token_chunk(array, chunk)[max(0, start - low) : start + length - low])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _token_chunk(self, array: str, chunk: int) -> np.ndarray:
        key = (array, chunk)
        with self._lock:
            if key in self._tokens:
                self._tokens.move_to_end(key)
                return self._tokens[key]
        data = get_checked(self.store, layout.token_key(array, chunk), self._document)
        decoded = decode_chunk(data, "int32" if array == "tokens" else "bool", [layout.TOKEN_CHUNK])
        with self._lock:
            self._tokens[key] = decoded
            while len(self._tokens) > _TOKEN_CACHE:
                self._tokens.popitem(last=False)
        return decoded

    def read(self, index: int) -> States:
        """One sequence, by its row in `sequences`. Raises IndexError, ShardCorrupt, StoreError."""
        start, length, shard = self._place(index)
        token_ids, loss_mask = self.tokens(index)
        row = self.sequences.slice(index % len(self), 1).to_pylist()[0]
        hidden = self._hidden(shard, start - shard * self.plan.geometry.shard_tokens, length)
        return States(row["id"], row["source"], row["group"], token_ids, loss_mask, hidden)

    def read_many(self, indices: Sequence[int], threads: int = 4) -> list[States]:
        """Several sequences, read in parallel, in the order asked for."""
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.read, indices))

    def stream(self, order: Sequence[int] | None = None, *, ahead: int = 4) -> Iterator[States]:
        """Sequences in `order` (default: as they lie in the store), at most `ahead` of them read in advance."""
        ahead = max(1, ahead)
        if order is None:
            order = np.argsort(self._columns["start"]).tolist()
        with ThreadPoolExecutor(ahead) as pool:
            waiting = [pool.submit(self.read, index) for index in order[:ahead]]
            for index in [*order[ahead:], *[None] * len(waiting)]:
                states = waiting.pop(0).result()
                if index is not None:
                    waiting.append(pool.submit(self.read, index))
                yield states

    def shards_table(self) -> pa.Table:
        """Receipts of all shards (`storage.seal.SHARDS_SCHEMA`). Raises DatasetNotSealed."""
        return load_shards_table(self.store, self.seal or load_seal(self.store))

    def _footer(self, shard: int) -> Footer:
        if (footer := self._footers.get(shard)) is not None:
            return footer
        key = layout.shard_key(shard)
        try:
            footer = read_footer(self.store, key, self._identity, shard, offset=self._offset_hash)
        except ObjectMissing:
            raise ShardCorrupt(f"{self.uri}/{key}: shard {shard} is missing; restore it from a copy") from None
        found = (footer.receipt.data_sha256, footer.receipt.index_sha256)
        if shard not in self._shards or found != self._shards[shard]:
            raise ShardCorrupt(
                f"{self.uri}/{key}: holds {found[0][:12]}, the seal names "
                f"{self._shards.get(shard, ('no such shard',))[0][:12]}; it was replaced after the seal: restore it from a copy"
            )
        self._footers[shard] = footer
        return footer

    def _hidden(self, shard: int, first_row: int, rows: int) -> np.ndarray:
        import ml_dtypes

        footer, chunk = self._footer(shard), self.plan.geometry.chunk_tokens
        first, last = first_row // chunk, (first_row + rows - 1) // chunk
        start, length = footer.chunk_range(first, last)
        key = layout.shard_key(shard)
        data = self.store.get_range(key, start, length)
        where = f"{self.uri}/{key}"
        bits = decode_rows(data, start, footer, first, last, self._identity, self._offset_LH, where)
        low = first_row - first * chunk
        return bits[low : low + rows].view(ml_dtypes.bfloat16)


def open_dataset(uri: str, *, partial: bool = False) -> Dataset:
    """Opens a sealed dataset at a folder or object-store URI; with `partial`, an unsealed one too (finished shards only).

    Raises DatasetMissing, DatasetNotSealed, ShardCorrupt, StoreError.
    """
    return Dataset(open_store(uri), partial=partial)


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

    if isinstance(store, LocalStore) and store.root.is_file():
        raise StatehouseError(f"{uri}: a file, expected a folder or a prefix that holds datasets")
    look("", depth)
    return sorted(found)
