"""The second act: shards are filled, one create-only PUT each, by any number of writers at once.

Whoever finds the object already there (another worker, a retry after a lost response) validates and adopts it. Nothing
is ever changed, so a writer may be killed at any instruction and the next one just carries on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from storage import layout
from storage.codecs import codec_by_name
from storage.commit import PlanDocument, load_offset, load_plan_document, offset_hash, publish_offset
from storage.encode import encode_shard_view
from storage.errors import StatehouseError
from storage.objects import ObjectMissing, ObjectStore, open_store
from storage.plan import Plan
from storage.receipt import Receipt, SelfCheck
from storage.shard import Footer, ShardIdentity, read_footer
from storage.teacher import TeacherObject, TeacherSummary, check_summary, restore_teacher, write_teacher


def shard_identity(plan: Plan) -> ShardIdentity:
    return ShardIdentity(plan.hash, plan.contract.hash, plan.codec, plan.geometry, plan.teacher)


def document_identity(document: PlanDocument) -> ShardIdentity:
    return ShardIdentity(
        document.plan_hash, document.contract.hash, document.codec, document.geometry, document.teacher
    )


# Stores of this process that honour create-only PUTs.
_probed: set[str] = set()


def _unwatched(_stage: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Written:
    """receipt: what the store holds now. created: False when another writer was first and its shard was adopted."""

    receipt: Receipt
    created: bool


def _require_create_only(store: ObjectStore) -> None:
    """The store's probe, once in this process. Raises StoreError."""
    if store.uri not in _probed:
        store.probe()
        _probed.add(store.uri)


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
        _require_create_only(store)
        return cls(store, document_identity(document))

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
        """The receipt of a shard that is already there, or None. Raises ShardCorrupt when it is damaged.

        rows: of the work unit; above S, all shards of the run must be there, and the receipt is the last one's.
        """
        receipt = None
        for one, low, high in self._run(shard, rows):
            offset = offset_hash(self.identity.codec, self.offset())
            footer = find_footer(self.store, self.identity, one, high - low, offset)
            if footer is None:
                return None
            receipt = footer.receipt
        return receipt

    def _run(self, shard: int, rows: int) -> list[tuple[int, int, int]]:
        """(shard, its first row, the row after its last) of each shard that a work unit's rows fill."""
        size = self.identity.geometry.shard_tokens
        return [(shard + low // size, low, min(low + size, rows)) for low in range(0, rows, size)]

    def write(
        self,
        shard: int,
        bits_TLH: np.ndarray,
        sequences: int,
        *,
        teacher: TeacherSummary | None = None,
        self_check: SelfCheck | None = None,
        stage: Callable[[str], AbstractContextManager[None]] = _unwatched,
        written_by: Mapping[str, str | int | float] | None = None,
        seconds: Mapping[str, float] | None = None,
        quarantined: Mapping[str, str] | None = None,
    ) -> Written:
        """Encodes and PUTs one shard, or adopts the one that is there. bits_TLH: uint16 [T, L, H].

        Above S rows they are those of a run of shards that starts at `shard` (a `WorkUnit` of several): its first shard is
        PUT last, so that where that is, the others are; the receipt returned is the last shard's.
        teacher: its rows, of the kind that is planned; PUT before the states and adopted the same way.
        stage(name): entered around each "encode" and "upload", by whoever wants to know how long they take.
        quarantined: {sequence id: why} of sequences that could not be extracted; their states must be NaN.
        Raises ShardCorrupt when a key holds something else, StoreError when the store refuses.
        """
        offset = self.offset()
        if self.codec.needs_offset and offset is None:
            raise StatehouseError(f"{self.store.uri}: no exponent offsets yet; calibrate before the first shard")
        check_summary(self.identity.teacher, teacher, len(bits_TLH))
        written: list[Written] = []
        run = self._run(shard, len(bits_TLH))
        for one, low, high in reversed(run):
            last = one == run[-1][0]
            objects: dict[str, TeacherObject] | None = None
            stored: dict[str, bytes] = {}
            if teacher is not None:
                there = partial(self.store.exists, layout.shard_key(one))
                size = self.identity.geometry.shard_tokens
                with stage("upload"):
                    rows = teacher[low:high]
                    objects, stored = write_teacher(self.store, self.identity.teacher, one, rows, size, there)
            with stage("encode"):
                data, receipt = encode_shard_view(
                    bits_TLH[low:high],
                    self.identity,
                    one,
                    sequences if last else 1,
                    offset,
                    teacher=objects,
                    self_check=self_check if last else None,
                    written_by=written_by,
                    seconds=seconds,
                    quarantined=quarantined if last else None,
                )
            with stage("upload"):
                written.append(self._put(one, data, receipt))
                if objects and written[-1].created:
                    restore_teacher(self.store, objects, stored)
        return Written(written[0].receipt, all(one.created for one in written))

    def _put(self, shard: int, data: memoryview, receipt: Receipt) -> Written:
        created = self.store.create(layout.shard_key(shard), data)
        if not created:
            footer = find_footer(
                self.store, self.identity, shard, receipt.rows, offset_hash(self.identity.codec, self.offset())
            )
            if footer is None:
                raise ObjectMissing(f"{self.store.uri}: shard {shard} vanished while it was adopted; run again")
            receipt = footer.receipt
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
