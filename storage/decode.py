"""The chunks of one shard object -> states, straight into the caller's memory.

Every chunk is checked by its crc32c and by the size its frame declares before a value of it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from storage.buffers import thread_scratch
from storage.codecs import codec_by_name
from storage.shard import Footer, ShardIdentity, corrupt
from storage.zarr_array import strip_crc32c

# One GET fetches at most this much: enough to hide its latency, small enough that several run at once for a sequence
# (64 MB compressed at H = 7168 and 1,700 tokens) and that what is in flight stays bounded.
PART_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Part:
    """Chunks first..last of a shard, one range of its object: `length` bytes from `start`."""

    first: int
    last: int
    start: int
    length: int


def parts_of(footer: Footer, first: int, last: int, part_bytes: int = PART_BYTES) -> list[Part]:
    """Chunks first..last of both planes as ranges of about equal size, none above `part_bytes` unless a chunk is."""
    entries = footer.index[:, first : last + 1].astype(np.int64)
    begins, ends = entries[..., 0].min(0), entries.sum(-1).max(0)
    total = int(ends[-1] - begins[0])
    wanted = -(-total // -(-total // part_bytes))  # 17 MB make two of 8.5, not 16 and 1
    parts: list[Part] = []
    low = 0
    for at in range(len(begins)):
        size = int(ends[at] - begins[low])
        full = at + 1 == len(begins) or int(ends[at + 1] - begins[low]) > part_bytes
        if full or size >= wanted:
            parts.append(Part(first + low, first + at, int(begins[low]), size))
            low = at + 1
    return parts


def decode_part(
    data: memoryview,
    part: Part,
    footer: Footer,
    identity: ShardIdentity,
    offset_LH: np.ndarray | None,
    first_row: int,
    out_TLH: np.ndarray,
    where: str,
) -> None:
    """Decodes one part into the rows of `out_TLH` that it covers.

    data: the object's bytes that `part` names. out_TLH: uint16 [T, L, H], contiguous; its row 0 is row `first_row` of the
    shard; rows that the part holds beyond either end of it are dropped. Raises ShardCorrupt.
    """
    geometry, codec = identity.geometry, codec_by_name(identity.codec)
    chunk = geometry.chunk_tokens
    planes = thread_scratch((2, chunk, geometry.layers, geometry.hidden_size))
    for number in range(part.first, part.last + 1):
        # Checked when it is asked for: a plane of 1 MB is then still in the cache when it is decoded.
        chunks = (_checked(data, part.start, footer, number, plane, where) for plane in range(2))
        begin = number * chunk - first_row
        low, high = max(0, begin), min(len(out_TLH), begin + chunk)
        try:
            codec.decode(chunks, slice(low - begin, high - begin), offset_LH, planes, out_TLH[low:high])
        except ValueError as error:
            raise corrupt(where, f"chunk {number}: {error}") from None


def _checked(data: memoryview, start: int, footer: Footer, number: int, plane: int, where: str) -> memoryview:
    """The bytes of one chunk without their checksum. Raises ShardCorrupt when it does not fit."""
    at, size = (int(x) for x in footer.index[plane, number])
    try:
        return strip_crc32c(data[at - start : at - start + size])
    except ValueError as error:
        raise corrupt(where, f"chunk {number}, plane {plane}: {error}") from None


def _chunk_into(
    data: memoryview,
    start: int,
    footer: Footer,
    number: int,
    plane: int,
    identity: ShardIdentity,
    out: np.ndarray,
    where: str,
) -> None:
    try:
        codec_by_name(identity.codec).decompress_into(_checked(data, start, footer, number, plane, where), out)
    except ValueError as error:
        raise corrupt(where, f"chunk {number}, plane {plane}: {error}") from None


def decode_planes(
    data: memoryview, part: Part, footer: Footer, identity: ShardIdentity, first_row: int, out: np.ndarray, where: str
) -> None:
    """Like `decode_part`, but leaves the planes apart for a device that joins them: out uint8 [2, T, L, H]."""
    chunk = identity.geometry.chunk_tokens
    planes = thread_scratch((2, chunk, *out.shape[2:]))
    for number in range(part.first, part.last + 1):
        begin = number * chunk - first_row
        low, high = max(0, begin), min(out.shape[1], begin + chunk)
        for plane in range(2):
            _chunk_into(data, part.start, footer, number, plane, identity, planes[plane], where)
            out[plane, low:high] = planes[plane, low - begin : high - begin]
