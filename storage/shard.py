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
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from pydantic import ValidationError

from storage.codecs import codec_by_name
from storage.codecs.codec import Codec
from storage.commit import offset_hash
from storage.errors import ShardCorrupt
from storage.objects import ObjectStore
from storage.plan import Geometry
from storage.receipt import Receipt
from storage.zarr_array import add_crc32c, crc32c, strip_crc32c

_MAGIC = b"SHRC"
_TRAILER = struct.Struct("<4sII")
ABSENT = np.uint64(2**64 - 1)
# Enough for the receipts seen (about 1.5 KB at L = 4), so that a footer costs one request.
_RECEIPT_GUESS = 8192
# Rows converted at once when statistics are taken in float32: bounds the temporary copy to about 16 MiB.
_STATISTICS_VALUES = 1 << 22


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


def layer_statistics(bits_TLH: np.ndarray) -> tuple[list[float], int]:
    """Root mean square of the finite values of each layer, and the number of values that are not finite."""
    tokens, layers, hidden_size = bits_TLH.shape
    squares, finite_values = np.zeros(layers), np.zeros(layers, np.int64)
    step = max(1, _STATISTICS_VALUES // (layers * hidden_size))
    for low in range(0, tokens, step):
        block = (bits_TLH[low : low + step].astype(np.uint32) << 16).view(np.float32)
        sums = np.einsum("tlh,tlh->l", block, block, dtype=np.float64)
        counts = np.full(layers, block.shape[0] * hidden_size, np.int64)
        if not np.isfinite(sums).all() or not np.isfinite(block.sum()):
            finite = np.isfinite(block)
            block = np.where(finite, block, 0)
            sums = np.einsum("tlh,tlh->l", block, block, dtype=np.float64)
            counts = finite.sum(axis=(0, 2))
        squares += sums
        finite_values += counts
    rms = np.sqrt(squares / np.maximum(finite_values, 1))
    return rms.tolist(), int(bits_TLH.size - finite_values.sum())


@dataclass(frozen=True)
class ShardIdentity:
    """What a shard must say of itself to belong to a dataset."""

    plan_hash: str
    contract_hash: str
    codec: str
    geometry: Geometry

    @property
    def entries(self) -> int:
        return 2 * self.geometry.chunks_per_shard

    @property
    def index_bytes(self) -> int:
        return 16 * self.entries + 4


def encode_shard(
    bits_TLH: np.ndarray,
    identity: ShardIdentity,
    shard: int,
    sequences: int,
    offset_LH: np.ndarray | None,
    *,
    written_by: Mapping[str, str | int | float] | None = None,
    seconds: Mapping[str, float] | None = None,
    quarantined: Mapping[str, str] | None = None,
) -> tuple[bytes, Receipt]:
    """The bytes of one shard object, and the receipt that lies in them.

    bits_TLH: uint16 [T, L, H], the shard's rows from its beginning, 0 < T <= S. offset_LH: uint8 [L, H] or None.
    """
    began = perf_counter()
    geometry, codec = identity.geometry, codec_by_name(identity.codec)
    rows = len(bits_TLH)
    if not 0 < rows <= geometry.shard_tokens or bits_TLH.shape[1:] != (geometry.layers, geometry.hidden_size):
        raise ValueError(f"states {bits_TLH.shape} do not fit a shard of {geometry}")
    index = np.full((2, geometry.chunks_per_shard, 2), ABSENT, "<u8")
    parts: list[bytes] = []
    position = 0
    for number, low in enumerate(range(0, rows, geometry.chunk_tokens)):
        planes = _full_chunk(codec, bits_TLH[low : low + geometry.chunk_tokens], offset_LH, geometry)
        for plane in range(2):
            data = add_crc32c(codec.compress(planes[plane]))
            index[plane, number] = position, len(data)
            position += len(data)
            parts.append(data)
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    index_bytes = add_crc32c(index.tobytes())
    rms, non_finite = layer_statistics(bits_TLH)
    receipt = Receipt(
        plan_hash=identity.plan_hash,
        contract_hash=identity.contract_hash,
        offset_hash=offset_hash(identity.codec, offset_LH),
        codec=identity.codec,
        shard=shard,
        rows=rows,
        sequences=sequences,
        data_bytes=position,
        data_sha256=sha.hexdigest(),
        index_sha256=hashlib.sha256(index_bytes).hexdigest(),
        layer_rms=rms,
        non_finite=non_finite,
        quarantined=dict(quarantined or {}),
        written_by=dict(written_by or {}),
        seconds={**(seconds or {}), "encode": round(perf_counter() - began, 4)},
    )
    text = receipt.model_dump_json().encode()
    return b"".join([*parts, text, _TRAILER.pack(_MAGIC, len(text), crc32c(text)), index_bytes]), receipt


def _full_chunk(codec: Codec, bits: np.ndarray, offset_LH: np.ndarray | None, geometry: Geometry) -> np.ndarray:
    planes = codec.split(bits, offset_LH)
    if len(bits) == geometry.chunk_tokens:
        return planes
    full = np.full((2, geometry.chunk_tokens, *bits.shape[1:]), codec.fill_value, np.uint8)
    full[:, : len(bits)] = planes
    return full


@dataclass(frozen=True, eq=False)
class Footer:
    """A shard's receipt and index, read back. index: uint64 [2, S/C, 2] (offset, size)."""

    receipt: Receipt
    index: np.ndarray

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
    tail, size = store.get_tail(key, identity.index_bytes + _TRAILER.size + _RECEIPT_GUESS)
    footer = _parse_footer(tail, size, identity, where, store, key)
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
            raise _corrupt(where, f"its receipt says {field} {getattr(receipt, field)!r}, expected {value!r}")
    return footer


def _corrupt(where: str, what: str) -> ShardCorrupt:
    return ShardCorrupt(
        f"{where}: {what}; before the seal, `python -m ray_jobs.extract RECIPE --repair` extracts this shard again; "
        "after it, restore the object from a copy"
    )


def _parse_footer(tail: bytes, size: int, identity: ShardIdentity, where: str, store: ObjectStore, key: str) -> Footer:
    if len(tail) < identity.index_bytes + _TRAILER.size:
        raise _corrupt(where, f"{size} bytes are too few for a shard (truncated?)")
    index_bytes = tail[-identity.index_bytes :]
    try:
        plain = strip_crc32c(memoryview(index_bytes))
    except ValueError:
        raise _corrupt(where, "the crc32c of its index does not match (truncated or damaged)") from None
    head = tail[: -identity.index_bytes]
    magic, length, checksum = _TRAILER.unpack(head[-_TRAILER.size :])
    if magic != _MAGIC or size < identity.index_bytes + _TRAILER.size + length:
        raise _corrupt(where, "there is no receipt before its index")
    text = head[-_TRAILER.size - length : -_TRAILER.size]
    if len(text) < length:
        start = size - identity.index_bytes - _TRAILER.size - length
        text = store.get_range(key, start, length)
    if crc32c(text) != checksum:
        raise _corrupt(where, "the crc32c of its receipt does not match")
    try:
        receipt = Receipt.model_validate_json(text)
    except ValidationError as error:
        raise _corrupt(where, f"its receipt is not readable ({error.errors()[0]['msg']})") from None
    if receipt.data_bytes + length + _TRAILER.size + identity.index_bytes != size:
        raise _corrupt(
            where,
            f"{size} bytes, its receipt makes {receipt.data_bytes + length + _TRAILER.size + identity.index_bytes}",
        )
    if receipt.index_sha256 != hashlib.sha256(index_bytes).hexdigest():
        raise _corrupt(where, "its index is not the one its receipt was written for")
    index = np.frombuffer(plain, "<u8").reshape(2, identity.geometry.chunks_per_shard, 2)
    used = -(-receipt.rows // identity.geometry.chunk_tokens)
    if (index[:, :used] == ABSENT).any() or (index[:, used:] != ABSENT).any():
        raise _corrupt(where, f"its index does not hold exactly the {used} chunks that {receipt.rows} rows need")
    return Footer(receipt, index)


def decode_rows(
    data: bytes,
    start: int,
    footer: Footer,
    first: int,
    last: int,
    identity: ShardIdentity,
    offset_LH: np.ndarray | None,
    where: str,
) -> np.ndarray:
    """Chunks first..last of a shard -> uint16 [rows of these chunks, L, H].

    data: the object's bytes from `start` on, as `Footer.chunk_range` names them. Raises ShardCorrupt.
    """
    geometry, codec = identity.geometry, codec_by_name(identity.codec)
    shape = (geometry.chunk_tokens, geometry.layers, geometry.hidden_size)
    out = np.empty(((last - first + 1) * geometry.chunk_tokens, *shape[1:]), np.uint16)
    view = memoryview(data)
    planes = np.empty((2, *shape), np.uint8)
    for number in range(first, last + 1):
        for plane in range(2):
            at, size = (int(x) for x in footer.index[plane, number])
            try:
                plain = codec.decompress(strip_crc32c(view[at - start : at - start + size]), geometry.chunk_bytes)
            except ValueError as error:
                raise _corrupt(where, f"chunk {number}, plane {plane}: {error}") from None
            planes[plane] = np.frombuffer(plain, np.uint8).reshape(shape)
        low = (number - first) * geometry.chunk_tokens
        codec.join(planes, offset_LH, out[low : low + geometry.chunk_tokens])
    return out
