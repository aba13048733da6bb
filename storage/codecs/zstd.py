"""Huffman coding in ordinary zstd frames: what stands behind the byte planes of most codecs."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
import zstandard

ZSTD_CHAIN: list[dict[str, Any]] = [
    {"name": "bytes"},
    {"name": "zstd", "configuration": {"level": 1, "checksum": False}},
]
# Matches in a plane of exponents are noise and cost more bits than they save: a tiny hash table and long minimal
# matches suppress them and leave zstd its Huffman stage. The frames stay ordinary zstd.
_FAST = {"window_log": 17, "hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7}
_PARAMETERS = zstandard.ZstdCompressionParameters(**_FAST, target_length=0, strategy=zstandard.STRATEGY_FAST)
# With strides of 1,024 bytes the search for matches costs next to nothing: 22 % less CPU and .3 % fewer bytes. zstd then
# wants to be told that literals are to be coded all the same, which zstandard's cffi backend can and its other cannot
# (`zstd_cffi`).
_local = threading.local()  # zstandard's contexts must not be shared between threads

# From this size on a look at a sample pays. zstd itself stores a block as it is when coding would save less than 1/64,
# 7.875 bits a byte; the entropy of 4,096 bytes reads 0.045 below that of what they are drawn from.
_LOOK_BYTES, _SAMPLE, _RANDOM_BITS = 1 << 16, 4096, 7.83
# Below this, Huffman's whole bit for every byte is too much, and matches pay (the scales of fp8).
_REPEATING_BITS = 1.0
_BLOCK = 1 << 17
_STORED_MAGIC = b"\x28\xb5\x2f\xfd\xa0"


def zstd_compress(data: bytes | memoryview | np.ndarray) -> bytes:
    """One frame that declares its size."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    return _local.compressor.compress(data)


def compress_plane(plane: np.ndarray) -> bytes:
    """The same for a contiguous plane of bytes, by what it is: stored without trying where it is random (signs and
    mantissas are: .11 s/GB), its bytes Huffman coded (exponents), or with matches (a few scales and many zeros)."""
    plain = plane.reshape(-1).view(np.uint8)
    if len(plain) < _LOOK_BYTES:
        return zstd_compress(plain)
    bits = _entropy(plain[:: len(plain) // _SAMPLE])
    if bits > _RANDOM_BITS:
        return _stored(plain)
    if bits < _REPEATING_BITS or (lib := _library()) is None:
        return zstd_compress(plain)
    if not hasattr(_local, "huffman"):
        _local.huffman = lib.Huffman()
    return _local.huffman.compress(plain)


@cache
def _library() -> Any:
    """The cffi backend, or None where there is none: planes are then coded with `zstd_compress`, a little slower."""
    try:
        from storage.codecs import zstd_cffi
    except (ImportError, AttributeError):  # not installed, or of a zstandard that does not know the parameter
        return None
    return zstd_cffi


def _entropy(sample: np.ndarray) -> float:
    """Bits a byte."""
    counts = np.bincount(sample)
    share = counts[counts > 0] / len(sample)
    return float(-(share * np.log2(share)).sum())


def _stored(plain: np.ndarray) -> bytes:
    """A zstd frame of raw blocks (RFC 8878, 3.1.1): one segment, content size in 4 bytes, blocks of 128 KiB."""
    parts: list[bytes | memoryview] = [_STORED_MAGIC + len(plain).to_bytes(4, "little")]
    for low in range(0, len(plain), _BLOCK):
        block = plain[low : low + _BLOCK]
        last = low + _BLOCK >= len(plain)
        parts += [(last | len(block) << 3).to_bytes(3, "little"), block.data]
    return b"".join(parts)


def is_stored(data: memoryview, size: int) -> bool:
    """Whether this is a frame of raw blocks as `compress_plane` writes it, and whole, so that byte i of the plane lies at
    12 + i + 3 * (i >> 17) and can be used where it is.
    """
    blocks = -(-size // _BLOCK)
    if len(data) != 9 + 3 * blocks + size or data[:9] != _STORED_MAGIC + size.to_bytes(4, "little"):
        return False
    heads = (int.from_bytes(data[at : at + 3], "little") for at in range(9, len(data), 3 + _BLOCK))
    left = size - _BLOCK * (blocks - 1)
    return all(head == (1 | left << 3 if at + 1 == blocks else _BLOCK << 3) for at, head in enumerate(heads))


def _decompressor(data: bytes | memoryview, size: int) -> zstandard.ZstdDecompressor:
    # The declared size is checked first, so that a damaged header cannot ask for the machine's memory.
    if (declared := zstandard.frame_content_size(data)) != size:
        raise ValueError(f"zstd frame declares {declared} bytes, expected {size}")
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor


def zstd_decompress(data: bytes | memoryview, size: int) -> bytes:
    """Raises ValueError when the frame is damaged or does not hold exactly `size` bytes."""
    try:
        plain = _decompressor(data, size).decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from None
    if len(plain) != size:
        raise ValueError(f"zstd frame holds {len(plain)} bytes, expected {size}")
    return plain


def zstd_decompress_into(data: bytes | memoryview, out: np.ndarray) -> None:
    """The same into contiguous uint8 memory. Where all of a frame's output has room, zstd writes it there directly."""
    try:
        with _decompressor(data, out.nbytes).stream_reader(data) as frame:
            found = frame.readinto(out.reshape(-1))
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from None
    if found != out.nbytes:
        raise ValueError(f"zstd frame holds {found} bytes, expected {out.nbytes}")
