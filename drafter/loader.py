"""Packed micro-batches straight from the store: no padding, read ahead in a thread, in bounded memory.

Shape suffixes as in drafter/model.py, and L = K + 1 stored states of a token: the captured layers, then the final one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.errors import DrafterError
from storage.reader import Dataset, States

# Packed micro-batches that wait for the trainer; one more is being read and one is being trained on.
_AHEAD = 2
# Sequences of a micro-batch that are read at one time; decoding releases the GIL.
_THREADS = 4


@dataclass(frozen=True)
class PackedBatch:
    """Sequences side by side, without padding.

    token_ids_T: [T] int64. loss_mask_T: [T] bool. features_TF: [T, F] bf16, the captured layers in ascending order.
    final_TD: [T, D] bf16, the verifier's state after its last norm. lengths, rows: of each sequence; rows are the
    dataset's. argmax_T: [T] int64, the verifier's likeliest next token where the loss asks for it, if it is known.
    """

    token_ids_T: Tensor
    loss_mask_T: Tensor
    features_TF: Tensor
    final_TD: Tensor
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    argmax_T: Tensor | None = None

    def to(self, device: torch.device) -> PackedBatch:
        """On this device; the host's copy is pinned on the way to a GPU, so that it need not wait."""
        if device.type == "cpu":
            return self
        names = ("token_ids_T", "loss_mask_T", "features_TF", "final_TD")
        moved = {name: getattr(self, name).pin_memory().to(device, non_blocking=True) for name in names}
        return replace(self, **moved)


def pack(rows: Sequence[int], states: Sequence[States]) -> PackedBatch:
    """The sequences `rows`, as they were read, side by side. features_TF and final_TD are views of one tensor.

    Raises DrafterError for states without the final one.
    """
    hidden_TLH = np.concatenate([one.hidden.view(np.int16) for one in states])
    if hidden_TLH.shape[1] < 2:
        raise DrafterError(f"states: expected captured layers and the final state, found {hidden_TLH.shape[1]} of them")
    states_TLH = torch.from_numpy(hidden_TLH).view(torch.bfloat16)
    return PackedBatch(
        token_ids_T=torch.from_numpy(np.concatenate([one.token_ids for one in states]).astype(np.int64)),
        loss_mask_T=torch.from_numpy(np.concatenate([one.loss_mask for one in states]).astype(np.bool_)),
        features_TF=states_TLH[:, :-1].flatten(1),
        final_TD=states_TLH[:, -1],
        lengths=tuple(len(one.token_ids) for one in states),
        rows=tuple(int(row) for row in rows),
    )


class Loader:
    """Iterates over packed micro-batches, reading ahead. Use it as a context manager: its thread ends with it.

    micro_batches: arrays of dataset rows, in the order in which they are wanted; taken one by one as the reading goes.
    waited_s: seconds the consumer waited for data so far. An error while reading comes out of `next`.
    """

    def __init__(self, dataset: Dataset, micro_batches: Iterable[NDArray[np.int64]], *, ahead: int = _AHEAD) -> None:
        self.dataset = dataset
        self.waited_s = 0.0
        self._ready: queue.Queue[PackedBatch | BaseException | None] = queue.Queue(maxsize=max(1, ahead))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(iter(micro_batches),), name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[PackedBatch]:
        while (batch := self.next()) is not None:
            yield batch

    def next(self) -> PackedBatch | None:
        """The next micro-batch, None after the last. Raises what reading it raised: StatehouseError, mostly."""
        began = time.perf_counter()
        batch = self._ready.get()
        self.waited_s += time.perf_counter() - began
        if batch is None or isinstance(batch, BaseException):
            self._ready.put(batch)  # whoever asks again is told again
            if batch is not None:
                raise batch
        return batch

    def close(self) -> None:
        """Ends the thread; what was read ahead is dropped."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.05)

    def _read(self, micro_batches: Iterator[NDArray[np.int64]]) -> None:
        last: PackedBatch | BaseException | None = None
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="loader") as pool:
            try:
                for rows in micro_batches:
                    if self._stop.is_set():
                        return
                    numbers = [int(row) for row in rows]
                    self._put(pack(numbers, list(pool.map(self.dataset.read, numbers))))
            except BaseException as error:  # belongs to the consumer
                last = error
        self._put(last)

    def _put(self, batch: PackedBatch | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(batch, timeout=0.1)
                return
            except queue.Full:
                continue
