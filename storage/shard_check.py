"""Every byte of one shard object: what `verify --full` and a repair do with each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from storage import layout
from storage.codecs import codec_by_name
from storage.errors import ShardCorrupt
from storage.objects import ObjectStore
from storage.receipt import Receipt
from storage.shard import Footer, ShardIdentity, read_footer
from storage.zarr_array import strip_crc32c

# Bytes of a shard that are read and checked at once, by each thread.
_PIECE = 8 << 20
Progress = Callable[[int], None]


def check_shard(
    store: ObjectStore,
    key: str,
    footer: Footer,
    identity: ShardIdentity,
    progress: Progress | None = None,
) -> None:
    """Reads every byte of a shard object's data, in pieces of about 8 MiB. Raises ShardCorrupt, ObjectMissing.

    The footer is taken as checked: `read_footer` covers the bytes of receipt and index.
    """
    geometry, codec, receipt = identity.geometry, codec_by_name(identity.codec), footer.receipt
    used = -(-receipt.rows // geometry.chunk_tokens)
    sha = hashlib.sha256()
    position, number = 0, 0
    while number < used:
        last = number
        while last + 1 < used and footer.chunk_range(number, last + 1)[1] <= _PIECE:
            last += 1
        start, length = footer.chunk_range(number, last)
        if start != position:
            raise ShardCorrupt(f"chunk {number} begins at byte {start:,}, the one before ends at {position:,}")
        data = store.get_range(key, start, length)
        if len(data) != length:
            raise ShardCorrupt(f"ends within chunk {number} (truncated)")
        sha.update(data)
        view = memoryview(data)
        for chunk in range(number, last + 1):
            for plane in range(2):
                at, size = (int(value) for value in footer.index[plane, chunk])
                try:
                    plain = codec.decompress(strip_crc32c(view[at - start : at - start + size]), geometry.chunk_bytes)
                except ValueError as error:
                    raise ShardCorrupt(f"chunk {chunk}, plane {plane}: {error}") from None
                beyond = (receipt.rows - chunk * geometry.chunk_tokens) * geometry.layers * geometry.hidden_size
                rest = np.frombuffer(plain, np.uint8)[max(0, beyond) :]
                if (rest != codec.fill_value).any():
                    raise ShardCorrupt(f"chunk {chunk}, plane {plane}: something else than fill behind the last token")
        position, number = start + length, last + 1
        if progress:
            progress(length)
    if position != receipt.data_bytes or sha.hexdigest() != receipt.data_sha256:
        raise ShardCorrupt(
            f"{position:,} bytes of data with sha256 {sha.hexdigest()[:12]}, its receipt says {receipt.data_bytes:,} "
            f"and {receipt.data_sha256[:12]}"
        )


def require_shard(
    store: ObjectStore, identity: ShardIdentity, shard: int, *, offset: str | None, rows: int | None = None
) -> Receipt:
    """Reads and checks every byte of one shard. Raises ObjectMissing, or ShardCorrupt naming it."""
    key = layout.shard_key(shard)
    footer = read_footer(store, key, identity, shard, offset=offset, rows=rows)
    try:
        check_shard(store, key, footer, identity)
    except ShardCorrupt as error:
        raise ShardCorrupt(
            f"{store.uri}/{key}: {error}; extract it again with `python -m ray_jobs.extract RECIPE --repair "
            f"--shards {shard}`"
        ) from None
    return footer.receipt
