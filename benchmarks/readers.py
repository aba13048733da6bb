"""Ways to read the states of one sequence from S3: ours, the peers', and the ceiling of them all.

Each is made once (connections, indexes and buffers are then warm) and called with a row; all return the sequence's bf16
bits, except `raw_gets`, which is what the store can deliver: the very ranges that ours reads, fetched and dropped.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.corpus import Corpus
from storage import layout, open_dataset
from storage.decode import PART_BYTES
from storage.objects import open_store

Reader = Callable[[int], object]


def ours(corpus: Corpus, threads: int) -> Reader:
    dataset = open_dataset(corpus.dataset_uri, threads=threads)
    return lambda row: dataset.read(row).hidden.view(np.uint16)


def raw_gets(corpus: Corpus, threads: int) -> Reader:
    """The same ranges of the same objects with the same number of threads, nothing decoded, nothing kept."""
    dataset = open_dataset(corpus.dataset_uri)
    reader, size = dataset._reader, corpus.plan.geometry.shard_tokens
    pool = ThreadPoolExecutor(threads)
    starts, lengths = corpus.plan.column("start"), corpus.lengths

    def read(row: int) -> None:
        shard, first = divmod(int(starts[row]), size)
        key = layout.shard_key(shard)
        parts = reader._parts(reader.footer(shard), first, int(lengths[row]))
        list(pool.map(lambda part: len(dataset.store.get_view(key, part.start, part.length)), parts))

    return read


def safetensors_parallel(corpus: Corpus, threads: int) -> Reader:
    """A tuned reader of safetensors: parallel range GETs of at most 16 MiB, copied into one reused buffer."""
    store, pool = open_store(corpus.uri), ThreadPoolExecutor(threads)
    largest = int(corpus.lengths.max()) * corpus.plan.geometry.bytes_per_token
    buffer, header = np.empty(largest + 4096, np.uint8), 4096  # the header and its length fit in the first part

    def read(row: int) -> np.ndarray:
        length = int(corpus.lengths[row])
        size = length * corpus.plan.geometry.bytes_per_token + header

        def part(start: int) -> int:
            data = np.frombuffer(store.get_view(f"safetensors/{row}", start, min(PART_BYTES, size - start)), np.uint8)
            buffer[start : start + len(data)] = data
            return start + len(data)

        end = max(pool.map(part, range(0, size, PART_BYTES)))
        begin = 8 + int.from_bytes(buffer[:8].tobytes(), "little")
        return buffer[begin:end].view(np.uint16).reshape(length, *corpus.block.shape[1:])

    return read


def safetensors_one_get(corpus: Corpus, threads: int) -> Reader:
    """As speculators reads: the whole object, then safetensors' own loader."""
    from safetensors.torch import load

    store = open_store(corpus.uri)
    return lambda row: _bits(load(store.get(f"safetensors/{row}"))["hidden_states"])


def torch_one_get(corpus: Corpus, threads: int) -> Reader:
    """As SpecForge reads: the whole object, then torch.load."""
    import torch

    store = open_store(corpus.uri)

    def read(row: int) -> np.ndarray:
        return _bits(torch.load(io.BytesIO(store.get(f"torch/{row}")), weights_only=True)["hidden_states"])

    return read


def _bits(tensor: object) -> np.ndarray:
    import torch

    assert isinstance(tensor, torch.Tensor)
    return tensor.view(torch.int16).numpy().view(np.uint16)


def zarr_python(corpus: Corpus, threads: int) -> Reader:
    """Stock zarr-python on our own store (through obstore, its fastest), planes joined as in docs/dataset-format.md."""
    import zarr
    from zarr.storage import ObjectStore as ZarrObjectStore

    remote = open_store(corpus.dataset_uri)
    group = zarr.open_group(ZarrObjectStore(remote._store, read_only=True), mode="r")  # type: ignore[attr-defined]
    hidden, offset = group["hidden"], group["exponent_offset"][:]
    starts, lengths = corpus.plan.column("start"), corpus.lengths

    def read(row: int) -> np.ndarray:
        start = int(starts[row])
        exponent, rest = hidden[:, start : start + int(lengths[row])].astype(np.uint16)
        return ((exponent + offset) & 0xFF) << 7 | rest & 0x7F | (rest & 0x80) << 8

    return read


READERS: dict[str, Callable[[Corpus, int], Reader]] = {
    "raw GETs of the same bytes": raw_gets,
    "Statehouse": ours,
    "safetensors, parallel GETs, reused buffer": safetensors_parallel,
    "safetensors, one GET": safetensors_one_get,
    "torch.save, one GET": torch_one_get,
    "zarr-python on the same store": zarr_python,
}
