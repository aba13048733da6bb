"""Packed micro-batches straight from the store: no padding, read ahead by threads, in bounded memory.

Sequences are read into the memory of their micro-batch, several at a time and across micro-batches, so that neither the
store nor the processor waits for the last one of each.

Shape suffixes as in drafter/model.py, and L stored states of a token: the captured layers, then the final one, unless the
dataset has the verifier's likeliest tokens instead; those are read along then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.batch import PackedBatch, Planes
from drafter.cache import CacheCounts, CachedStore
from drafter.errors import DrafterError
from drafter.patience import patiently
from drafter.recipe import LoaderSection
from drafter.sources import Items
from drafter.teacher import TopK
from storage.buffers import BufferPool
from storage.errors import ShardCorrupt
from storage.mix import Mixture
from storage.reader import Dataset
from storage.teacher import topk_of

log = logging.getLogger("statehouse")

# Bits of a bf16, as torch and numpy both know them.
_BITS = np.int16


@dataclass
class Counts:
    """What loading took so far; all but waited_s count what was read, be it handed over yet or not.

    waited_s: of the consumer. tokens, sequences, bytes: of states as bf16. read_s: seconds of the threads that read.
    fetched_bytes, fetch_s, decode_s: as in `storage.fetch.Spent`. cache_*: as in `CacheCounts`. bad_sequences,
    bad_tokens: of damaged shards, which teach nothing. padding: tokens that belong to no sequence: none, ever.
    """

    waited_s: float = 0.0
    sequences: int = 0
    tokens: int = 0
    padding: int = 0
    bytes: int = 0
    read_s: float = 0.0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    decode_s: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    bad_sequences: int = 0
    bad_tokens: int = 0

    def since(self, before: Counts) -> Counts:
        then = asdict(before)
        return Counts(**{name: value - then[name] for name, value in asdict(self).items()})

    def with_shared(self, now: Counts) -> Counts:
        """These with the part of `now` that datasets and caches count, for all loaders together: what another loader
        fetched in between is left out of what is counted since, and what this one read ahead beside it, too.
        """
        return replace(self, **{name: getattr(now, name) for name in _SHARED})


# What `Loader._elsewhere` gives.
_SHARED = ("fetched_bytes", "fetch_s", "decode_s", "cache_hits", "cache_misses")


@dataclass
class _Reading:
    """A micro-batch whose sequences are being read."""

    items: NDArray[np.int64]
    token_ids_T: Tensor
    loss_mask_T: Tensor
    states: Tensor
    futures: list[Future[None]]
    bytes: int
    top_k: TopK | None = None


class Loader:
    """Iterates over packed micro-batches, reading ahead. Use it as a context manager: its threads end with it.

    micro_batches: arrays of item numbers, in the order in which they are wanted; taken one by one as the reading goes.
    section.ahead_bytes bounds the states that are being read or wait to be taken; one micro-batch is always read,
    however large. bad_shards: `stop` raises a ShardCorrupt where its micro-batch would come; `skip` hands the sequence
    over without loss tokens, its states finite numbers of no meaning, and counts it. device: where the batches will go; memory is pinned for a GPU.
    buffers: memory that loaders after one another share: fresh pages cost more than decoding.
    An error while reading comes out of `next`, again and again.
    """

    def __init__(
        self,
        mixture: Mixture,
        items: Items,
        micro_batches: Iterable[NDArray[np.int64]],
        section: LoaderSection | None = None,
        *,
        bad_shards: str = "stop",
        device: torch.device | None = None,
        buffers: BufferPool | None = None,
    ) -> None:
        self.mixture, self.items, self.section = mixture, items, section or LoaderSection()
        self._skip, self._pinned = bad_shards == "skip", device is not None and device.type == "cuda"
        geometry = mixture.datasets[0].plan.geometry
        self._shape = (geometry.layers, geometry.hidden_size)
        absent = mixture.contract.final_state == "absent"
        self._k = topk_of(mixture.datasets[0].plan.teacher) if absent else 0
        if geometry.layers < 2 and not absent:
            raise DrafterError(
                f"{mixture.datasets[0].uri}: expected captured layers and the final state, found {geometry.layers} of them"
            )
        self._buffers = buffers or BufferPool(self.section.ahead_bytes)
        self._counts, self._began = Counts(), self._elsewhere()
        self._named: set[str] = set()  # damage that was said
        self._lock = threading.Condition()
        self._ready: deque[_Reading | BaseException | None] = deque()
        self._held = 0  # bytes being read or waiting
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._dispatch, args=(iter(micro_batches),), name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[PackedBatch | Planes]:
        while (batch := self.next()) is not None:
            yield batch

    def next(self) -> PackedBatch | Planes | None:
        """The next micro-batch, None after the last. Raises what reading it raised: StatehouseError, mostly."""
        began = time.perf_counter()
        try:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._ready))
                first = self._ready[0]
                if first is None:
                    return None
            if isinstance(first, BaseException):
                raise first
            try:
                for future in first.futures:
                    future.result()
            except BaseException as error:  # belongs to the consumer, who is told again if he asks again
                with self._lock:
                    self._ready[0] = error
                raise
            with self._lock:
                self._ready.popleft()
                self._held -= first.bytes
                self._lock.notify_all()
            return self._packed(first)
        finally:
            self._counts.waited_s += time.perf_counter() - began

    def close(self) -> None:
        """Ends the threads; what was read ahead is dropped."""
        self._stop.set()
        with self._lock:
            self._lock.notify_all()
        self._thread.join()

    def counts(self) -> Counts:
        """What loading took so far."""
        now, began = self._elsewhere(), self._began
        with self._lock:
            own = asdict(self._counts)
        return Counts(**{**own, **{name: now[name] - began[name] for name in now}})

    # ---- in its threads ----

    def _dispatch(self, micro_batches: Iterator[NDArray[np.int64]]) -> None:
        last: BaseException | None = None
        pool = ThreadPoolExecutor(self.section.threads, thread_name_prefix="loader")
        try:
            for chosen in micro_batches:
                size = 2 * int(self.items.length[chosen].sum()) * self._shape[0] * self._shape[1]
                with self._lock:
                    self._lock.wait_for(
                        lambda size=size: (  # type: ignore[misc]
                            self._stop.is_set() or not self._held or self._held + size <= self.section.ahead_bytes
                        )
                    )
                    if self._stop.is_set():
                        return
                    self._held += size
                reading = self._start(chosen, size, pool)
                with self._lock:
                    self._ready.append(reading)
                    self._lock.notify_all()
        except BaseException as error:  # belongs to the consumer
            last = error
        finally:
            with self._lock:
                self._ready.append(last)
                self._lock.notify_all()
            pool.shutdown(wait=True, cancel_futures=self._stop.is_set())

    def _start(self, chosen: NDArray[np.int64], size: int, pool: ThreadPoolExecutor) -> _Reading:
        """Takes memory for a micro-batch and sets the threads on it."""
        lengths = self.items.length[chosen]
        tokens, planes = int(lengths.sum()), self.section.decode == "device"
        shape = (2, tokens, *self._shape) if planes else (tokens, *self._shape)
        kind = torch.uint8 if planes else torch.int16
        if self._pinned:  # torch keeps pinned memory for the next one
            states = torch.empty(shape, dtype=kind, pin_memory=True)
        else:
            memory = self._buffers.take(size).view(np.uint8 if planes else _BITS)
            states = torch.from_numpy(memory.reshape(shape))
        token_ids_T = torch.empty(tokens, dtype=torch.int64, pin_memory=self._pinned)
        loss_mask_T = torch.empty(tokens, dtype=torch.bool, pin_memory=self._pinned)
        top_k = TopK.empty(tokens, self._k, self._pinned) if self._k else None
        reading = _Reading(chosen, token_ids_T, loss_mask_T, states, [], size, top_k)
        low = 0
        for item, length in zip(chosen.tolist(), lengths.tolist(), strict=True):
            reading.futures.append(pool.submit(self._read, reading, item, low, low + length))
            low += length
        return reading

    def _read(self, reading: _Reading, item: int, low: int, high: int) -> None:
        """One sequence, or piece of one, into its place in the micro-batch."""
        if self._stop.is_set():
            return
        began, bad = time.perf_counter(), False
        dataset, row = self.mixture.place(int(self.items.row[item]))
        first = int(self.items.low[item])
        part = (first, first + high - low)
        states = reading.states.numpy()
        try:
            token_ids, loss_mask = patiently(
                lambda: self._fill(dataset, row, part, states, low, high, reading.top_k),
                self.section.patience_s, self._stop,
            )  # fmt: skip
        except ShardCorrupt as error:
            if not self._skip:
                raise
            bad = True
            self._say(error)
            states[..., low:high, :, :] = 0
            if reading.top_k is not None:
                reading.top_k.blank(slice(low, high))
            token_ids, loss_mask = np.zeros(high - low, np.int32), np.zeros(high - low, np.bool_)
        reading.token_ids_T.numpy()[low:high] = token_ids
        reading.loss_mask_T.numpy()[low:high] = loss_mask
        with self._lock:
            counts = self._counts
            counts.sequences += 1
            counts.tokens += high - low
            counts.bytes += 2 * (high - low) * self._shape[0] * self._shape[1]
            counts.read_s += time.perf_counter() - began
            counts.bad_sequences += bad
            counts.bad_tokens += (high - low) * bad

    def _fill(
        self, dataset: Dataset, row: int, part: tuple[int, int], states: np.ndarray, low: int, high: int,
        top_k: TopK | None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        if top_k is not None:
            top_k.fill(low, dataset.teacher(row, part=part))
        if self.section.decode == "device":
            dataset.read_planes(row, out=states[:, low:high], part=part)
            token_ids, loss_mask = dataset.tokens(row)
            return token_ids[slice(*part)], loss_mask[slice(*part)]
        read = dataset.read(row, out=states[low:high], part=part)
        return read.token_ids, read.loss_mask

    def _say(self, error: ShardCorrupt) -> None:
        text = str(error)
        with self._lock:
            new = text not in self._named
            self._named.add(text)
        if new:
            log.warning("sequence of a damaged shard skipped: %s", text)

    def _elsewhere(self) -> dict[str, Any]:
        """What datasets and their caches count, added up."""
        spent = [dataset.spent for dataset in self.mixture.datasets]
        stores = [dataset.store for dataset in self.mixture.datasets]
        caches = [store.counts if isinstance(store, CachedStore) else CacheCounts() for store in stores]
        return {
            "fetched_bytes": sum(one.fetched_bytes for one in spent),
            "fetch_s": sum(one.fetch_s for one in spent),
            "decode_s": sum(one.decode_s for one in spent),
            "cache_hits": sum(one.hits for one in caches),
            "cache_misses": sum(one.misses for one in caches),
        }

    def _packed(self, reading: _Reading) -> PackedBatch | Planes:
        lengths = tuple(int(length) for length in self.items.length[reading.items])
        rows = tuple(int(item) for item in reading.items)
        tokens = reading.token_ids_T, reading.loss_mask_T
        if self.section.decode == "device":
            parts = self.items.part[reading.items].tolist()
            datasets = [self.mixture.datasets[part] for part in parts]
            coded = tuple((dataset.plan.codec, dataset.exponent_offset) for dataset in datasets)
            return Planes(*tokens, reading.states, lengths, rows, coded, reading.top_k)
        return PackedBatch.of_states(*tokens, reading.states.view(torch.bfloat16), lengths, rows, reading.top_k)


def until(
    leave: Callable[[], bool], batches: Iterable[PackedBatch | Planes], left: list[bool]
) -> Iterator[PackedBatch | Planes]:
    """The batches up to where `leave` says so, which is noted in `left` then."""
    for batch in batches:
        if leave():
            left.append(True)
            return
        yield batch
