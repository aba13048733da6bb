"""A repair may replace a shard while somebody reads it: what comes out is one version or an error, never a mixture."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import refill, sealed, sequences, states_of

from storage import decode, layout, open_dataset
from storage.errors import ShardCorrupt
from storage.objects import LocalStore, open_store
from storage.reader import Dataset
from storage.seal import reseal
from storage.states import States


def right(states: States) -> bool:
    return bool((states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all())


# raw chunks all have one size and checksums of their own: another version of a shard fits the index of the first.
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_an_open_reader_refuses_a_shard_that_was_extracted_again_with_other_states(uri: str, codec: str) -> None:
    plan, _ = sealed(uri, sequences(12, 300), codec)
    store = open_store(uri)
    dataset = open_dataset(uri)
    rows = [row for row, shard in enumerate(dataset.sequences["shard"].to_pylist()) if shard == 1]
    assert all(right(dataset.read(row)) for row in rows)  # footers are cached from now on
    store.delete(layout.shard_key(1))
    refill(uri, plan, {1}, noise=1)
    with pytest.raises(ShardCorrupt, match="replaced after the seal"):
        [dataset.read(row) for row in rows]
    seal = reseal(store, plan)
    with pytest.raises(ShardCorrupt, match=r"sealed anew since this dataset was opened.*open it again"):
        [dataset.read(row) for row in rows]
    again = open_dataset(uri)
    assert again.fingerprint == seal.fingerprint
    assert sum(not right(again.read(row)) for row in rows) == 1  # the new content, whole


def test_an_open_reader_goes_on_when_a_shard_was_restored(uri: str) -> None:
    sealed(uri, sequences(12, 300), "raw")
    store, dataset = open_store(uri), open_dataset(uri)
    assert right(dataset.read(0))
    for key in [key for key in store.sizes() if key.startswith("hidden/c")]:
        data = store.get(key)
        store.delete(key)
        store.create(key, data)
    assert all(right(states) for states in dataset.stream())


class ReplacedBetweenGets(LocalStore):
    """Another writer's shard takes the place of the first one after some GETs of a sequence."""

    other: bytes
    gets = 0

    def get_view(self, key: str, start: int, length: int, tag: str | None = None) -> memoryview:
        self.gets += 1
        if self.gets == 3:
            self.put(key, self.other)
        return super().get_view(key, start, length, tag)


def test_a_shard_replaced_within_one_sequence_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = sealed(str(tmp_path), sequences(2, 5000, seed=4), "raw")
    row = int(np.argmax(plan.column("length")))
    shard = int(plan.column("shard")[row])
    store = ReplacedBetweenGets(tmp_path)
    first = store.get(layout.shard_key(shard))
    store.delete(layout.shard_key(shard))
    refill(str(tmp_path), plan, {shard}, noise=1)
    store.other = store.get(layout.shard_key(shard))
    store.put(layout.shard_key(shard), first)

    def small_parts(footer: Any, low: int, high: int) -> list[decode.Part]:
        return decode.parts_of(footer, low, high, 300_000)

    monkeypatch.setattr("storage.fetch.parts_of", small_parts)
    dataset = Dataset(store, threads=1)
    with pytest.raises(ShardCorrupt, match="replaced after the seal"):
        dataset.read(row)
    assert store.gets >= 3


def test_readers_beside_a_repair_see_only_what_was_sealed(tmp_path: Path) -> None:
    plan, _ = sealed(str(tmp_path), sequences(12, 300), "raw")
    store, key = LocalStore(tmp_path), layout.shard_key(1)
    first = store.get(key)
    store.delete(key)
    refill(str(tmp_path), plan, {1}, noise=1)
    versions = [first, store.get(key)]
    store.put(key, first)
    dataset, stop = open_dataset(str(tmp_path)), threading.Event()
    rows = [row for row, shard in enumerate(dataset.sequences["shard"].to_pylist()) if shard == 1]

    def replace() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            store.put(key, versions[turn % 2])
            time.sleep(0.01)  # file times tick every 4 ms, and inodes are used again

    writer = threading.Thread(target=replace)
    writer.start()
    seen = {"right": 0, "refused": 0}
    try:
        deadline = time.monotonic() + 60  # each replacing waits for the disk, which may take its time
        while not all(seen.values()) and time.monotonic() < deadline:
            for row in rows:
                try:
                    assert right(dataset.read(row))
                    seen["right"] += 1
                except ShardCorrupt:
                    seen["refused"] += 1
    finally:
        stop.set()
        writer.join()
    assert all(seen.values())
