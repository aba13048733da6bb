"""The second act: shards are filled, one create-only PUT each, by any number of writers at once.

Whoever finds the object already there (another worker, a retry after a lost response) validates and adopts it. Nothing
is ever changed, so a writer may be killed at any instruction and the next one just carries on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from storage import layout
from storage.codecs import codec_by_name
from storage.commit import load_offset, load_plan_document, offset_hash, publish_offset
from storage.errors import StatehouseError
from storage.objects import ObjectMissing, ObjectStore, open_store
from storage.plan import Plan
from storage.receipt import Receipt
from storage.shard import Footer, ShardIdentity, encode_shard, read_footer


def shard_identity(plan: Plan) -> ShardIdentity:
    return ShardIdentity(plan.hash, plan.contract.hash, plan.codec, plan.geometry)


@dataclass(frozen=True)
class Written:
    """receipt: what the store holds now. created: False when another writer was first and its shard was adopted."""

    receipt: Receipt
    created: bool


class ShardWriter:
    """Writes shards of one planned dataset. Safe to share between threads.

    `from_uri` reads the plan; the exponent offsets are read when they are first needed, and are the same for all
    writers since the first `calibrate` that reaches the store wins.
    """

    def __init__(self, store: ObjectStore, identity: ShardIdentity) -> None:
        self.store = store
        self.identity = identity
        self.codec = codec_by_name(identity.codec)
        self._offset_LH: np.ndarray | None = None

    @classmethod
    def from_uri(cls, uri: str) -> ShardWriter:
        store = open_store(uri)
        document = load_plan_document(store)
        identity = ShardIdentity(document.plan_hash, document.contract.hash, document.codec, document.geometry)
        return cls(store, identity)

    @property
    def calibrated(self) -> bool:
        return not self.codec.needs_offset or self.offset() is not None

    def offset(self) -> np.ndarray | None:
        """uint8 [L, H], or None where the codec needs none or nothing is calibrated yet."""
        if self._offset_LH is None and self.codec.needs_offset:
            geometry = self.identity.geometry
            self._offset_LH = load_offset(self.store, (geometry.layers, geometry.hidden_size))
        return self._offset_LH

    def calibrate(self, bits_TLH: np.ndarray) -> None:
        """Offers exponent offsets from a sample of states (uint16 [T, L, H]); those first in the store count."""
        offset = self.codec.calibrate(bits_TLH)
        if offset is not None and not self.calibrated:
            self._offset_LH = publish_offset(self.store, offset)

    def find(self, shard: int, rows: int) -> Receipt | None:
        """The receipt of a shard that is already there, or None. Raises ShardCorrupt when it is damaged."""
        footer = find_footer(self.store, self.identity, shard, rows, offset_hash(self.identity.codec, self.offset()))
        return footer.receipt if footer else None

    def write(
        self,
        shard: int,
        bits_TLH: np.ndarray,
        sequences: int,
        *,
        written_by: Mapping[str, str | int | float] | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> Written:
        """Encodes and PUTs one shard, or adopts the one that is there. bits_TLH: uint16 [T, L, H].

        Raises ShardCorrupt when the key holds something else, StoreError when the store refuses.
        """
        offset = self.offset()
        if self.codec.needs_offset and offset is None:
            raise StatehouseError(f"{self.store.uri}: no exponent offsets yet; calibrate before the first shard")
        data, receipt = encode_shard(
            bits_TLH,
            self.identity,
            shard,
            sequences,
            offset,
            written_by=written_by,
            seconds=seconds,
        )
        created = self.store.create(layout.shard_key(shard), data)
        if not created:
            found = self.find(shard, len(bits_TLH))
            if found is None:
                raise ObjectMissing(f"{self.store.uri}: shard {shard} vanished while it was adopted; run again")
            receipt = found
        self.store.put(layout.receipt_key(shard), receipt.model_dump_json(indent=1).encode() + b"\n")
        return Written(receipt, created)


def find_footer(
    store: ObjectStore, identity: ShardIdentity, shard: int, rows: int, offset: str | None
) -> Footer | None:
    """The checked footer of a shard, or None when it is not there. Raises ShardCorrupt."""
    try:
        return read_footer(store, layout.shard_key(shard), identity, shard, offset=offset, rows=rows)
    except ObjectMissing:
        return None
