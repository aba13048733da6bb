"""One shard object: a Zarr v3 shard whose unreferenced bytes before the index hold the receipt.

    [chunk, crc32c] ...                the planes of one chunk of tokens side by side, so a sequence is one range
    receipt                            JSON
    "SHRC" length:u32 crc32c:u32       little-endian; the crc32c is the receipt's
    index                              2 * S/C entries (offset:u64, size:u64), C order over [plane, chunk]; 2**64-1 = absent
    crc32c of the index : u32

T: rows used. L: layers. H: hidden size. S, C: tokens of a shard and of a chunk. Chunks up to the last used row are
present, later ones absent; the rest of the last one is fill.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from storage.errors import ShardCorrupt
from storage.object_store import ObjectStore, Tail
from storage.plan import Geometry
from storage.receipt import Receipt
from storage.teacher import NONE, teacher_keys
from storage.zarr_array import crc32c, strip_crc32c

_MAGIC = b"SHRC"
_TRAILER = struct.Struct("<4sII")
RECEIPT_TRAILER = _TRAILER.size
ABSENT = np.uint64(2**64 - 1)
# Enough for the receipts seen (about 1.5 KB at L = 4), so that a footer costs one request.
_RECEIPT_GUESS = 8192


def to_bits(states_TLH: np.ndarray) -> np.ndarray:
    """bf16 bit patterns uint16 [T, L, H] of bfloat16 (as it is) or float32 (rounded to nearest even) states."""
    import ml_dtypes

    if states_TLH.dtype == np.uint16:
        return states_TLH
    if states_TLH.dtype != ml_dtypes.bfloat16:
        if states_TLH.dtype != np.float32:
            raise ValueError(f"states must be bfloat16 or float32, found {states_TLH.dtype}")
        states_TLH = states_TLH.astype(ml_dtypes.bfloat16)
    return states_TLH.view(np.uint16)


@dataclass(frozen=True)
class ShardIdentity:
    """What a shard must say of itself to belong to a dataset."""

    plan_hash: str
    contract_hash: str
    codec: str
    geometry: Geometry
    teacher: str = NONE

    @property
    def entries(self) -> int:
        return 2 * self.geometry.chunks_per_shard

    @property
    def index_bytes(self) -> int:
        return 16 * self.entries + 4


def pack_trailer(receipt: bytes) -> bytes:
    """What stands between a receipt's JSON and the index."""
    return _TRAILER.pack(_MAGIC, len(receipt), crc32c(receipt))


@dataclass(frozen=True, eq=False)
class Footer:
    """A shard's receipt and index, read back. index: uint64 [2, S/C, 2] (offset, size). object_bytes: of all of it.

    text: the receipt as it is written, with the keys of a later minor version. tag: of the object (`ObjectStore.get_tail`).
    """

    receipt: Receipt
    index: np.ndarray
    object_bytes: int
    text: str = ""
    tag: str | None = None

    def chunk_range(self, first: int, last: int) -> tuple[int, int]:
        """(start, length) in bytes of chunks first..last of both planes: one range, by construction of the object."""
        entries = self.index[:, first : last + 1]
        start = int(entries[..., 0].min())
        return start, int((entries[..., 0] + entries[..., 1]).max()) - start


def read_footer(
    store: ObjectStore, key: str, identity: ShardIdentity, shard: int, *, offset: str | None, rows: int | None = None
) -> Footer:
    """Reads and checks the end of a shard object, in one request.

    offset: hash of the exponent offsets that count. rows: as planned, where known.
    Raises ObjectMissing, or ShardCorrupt saying what was expected and found.
    """
    where = f"{store.uri}/{key}"
    tail = store.get_tail(key, identity.index_bytes + RECEIPT_TRAILER + _RECEIPT_GUESS)
    footer = _parse_footer(tail, identity, where, store, key)
    receipt = footer.receipt
    expected = {
        "plan_hash": identity.plan_hash,
        "contract_hash": identity.contract_hash,
        "codec": identity.codec,
        "offset_hash": offset,
        "shard": shard,
    }
    if rows is not None:
        expected["rows"] = rows
    for field, value in expected.items():
        if getattr(receipt, field) != value:
            raise corrupt(where, f"its receipt says {field} {getattr(receipt, field)!r}, expected {value!r}")
    if sorted(receipt.teacher) != sorted(teacher_keys(identity.teacher, shard)):
        raise corrupt(
            where, f"its receipt names teacher objects {sorted(receipt.teacher)}, planned: {identity.teacher}"
        )
    return footer


def corrupt(where: str, what: str) -> ShardCorrupt:
    return ShardCorrupt(
        f"{where}: {what}; `python -m ray_jobs.extract RECIPE --repair` makes this shard again, before and after the seal; "
        "`statehouse repair URI --from COPY_URI` restores it from a copy"
    )


def _parse_footer(end: Tail, identity: ShardIdentity, where: str, store: ObjectStore, key: str) -> Footer:
    tail, size, tag = end
    if len(tail) < identity.index_bytes + RECEIPT_TRAILER:
        raise corrupt(where, f"{size} bytes are too few for a shard (truncated?)")
    index_bytes = tail[-identity.index_bytes :]
    try:
        plain = strip_crc32c(memoryview(index_bytes))
    except ValueError:
        raise corrupt(where, "the crc32c of its index does not match (truncated or damaged)") from None
    head = tail[: -identity.index_bytes]
    magic, length, checksum = _TRAILER.unpack(head[-RECEIPT_TRAILER:])
    if magic != _MAGIC or size < identity.index_bytes + RECEIPT_TRAILER + length:
        raise corrupt(where, "there is no receipt before its index")
    text = head[-RECEIPT_TRAILER - length : -RECEIPT_TRAILER]
    if len(text) < length:
        start = size - identity.index_bytes - RECEIPT_TRAILER - length
        text = store.get_range(key, start, length)
    if crc32c(text) != checksum:
        raise corrupt(where, "the crc32c of its receipt does not match")
    try:
        receipt = Receipt.model_validate_json(text)
    except ValidationError as error:
        raise corrupt(where, f"its receipt is not readable ({error.errors()[0]['msg']})") from None
    if receipt.data_bytes + length + RECEIPT_TRAILER + identity.index_bytes != size:
        raise corrupt(
            where,
            f"{size} bytes, its receipt makes {receipt.data_bytes + length + RECEIPT_TRAILER + identity.index_bytes}",
        )
    if receipt.index_sha256 != hashlib.sha256(index_bytes).hexdigest():
        raise corrupt(where, "its index is not the one its receipt was written for")
    index = np.frombuffer(plain, "<u8").reshape(2, identity.geometry.chunks_per_shard, 2)
    used = -(-receipt.rows // identity.geometry.chunk_tokens)
    if (index[:, :used] == ABSENT).any() or (index[:, used:] != ABSENT).any():
        raise corrupt(where, f"its index does not hold exactly the {used} chunks that {receipt.rows} rows need")
    return Footer(receipt, index, size, text.decode(), tag)
