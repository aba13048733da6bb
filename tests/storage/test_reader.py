"""Reading: into reused memory, ahead of the caller within a bound, across shards, and joined elsewhere."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tiny import HIDDEN, LAYERS, contract, planned, sealed, sequences, states_of, unit_states

from storage import open_dataset
from storage.buffers import BufferPool
from storage.commit import publish_plan
from storage.decode import parts_of
from storage.errors import DatasetNotSealed, ShardCorrupt
from storage.layout import shard_key
from storage.objects import LocalStore, open_store
from storage.plan import make_plan
from storage.reader import Dataset
from storage.seal import seal_dataset
from storage.shard import Footer
from storage.writer import ShardWriter


def right(states: object) -> bool:
    from storage import States

    assert isinstance(states, States)
    return bool((states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all())


def test_buffers_come_back_when_the_last_view_is_gone_and_not_before() -> None:
    pool = BufferPool(1 << 20)
    lent = pool.take(10_000)
    view = lent[:8000].view(np.uint16).reshape(4, 10, 100).view(ml_dtypes.bfloat16)[1:]
    address = lent.__array_interface__["data"][0]
    del lent
    gc.collect()
    assert pool.idle() == 0
    other = pool.take(10_000)
    assert other.__array_interface__["data"][0] != address
    del view
    assert pool.take(10_000).__array_interface__["data"][0] == address


def test_idle_buffers_are_bounded_and_far_larger_ones_are_not_lent() -> None:
    pool = BufferPool(100_000)
    large = [pool.take(60_000) for _ in range(3)]
    del large
    assert 60_000 <= pool.idle() <= 100_000
    small = pool.take(1000)
    assert pool.idle() >= 60_000
    del small


def test_states_that_are_still_held_are_never_written_over(tmp_path: Path) -> None:
    sealed(str(tmp_path), sequences(30, 100))
    dataset = open_dataset(str(tmp_path))
    held = [states for number, states in enumerate(dataset.stream(list(range(30)) * 3)) if number % 2]
    assert len(held) == 45
    assert all(right(states) for states in held)


def test_reading_into_the_callers_memory(uri: str) -> None:
    sealed(uri)
    dataset = open_dataset(uri)
    longest = int(dataset.sequences["length"].to_numpy().max())
    memory = np.zeros((longest + 3, LAYERS, HIDDEN), ml_dtypes.bfloat16)
    for index in (0, 5, 17):
        states = dataset.read(index, out=memory)
        assert np.shares_memory(states.hidden, memory)
        assert len(states.hidden) == len(states.token_ids)
        assert right(states)
    for wrong in (memory[:1], memory[:, :2], memory.astype(np.float32), memory[::2]):
        with pytest.raises(ValueError, match="out must be"):
            dataset.read(5, out=wrong)


def test_pinned_torch_memory_can_be_read_into(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sealed(str(tmp_path))
    memory = torch.zeros((400, LAYERS, HIDDEN), dtype=torch.bfloat16)
    states = open_dataset(str(tmp_path)).read(0, out=memory.view(torch.int16).numpy())
    assert right(states)
    assert (memory[: len(states.token_ids)].view(torch.int16).numpy() == states.hidden.view(np.int16)).all()


def test_parts_cover_all_chunks_once_and_none_is_larger_than_asked() -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(1000, 2000, (2, 50))
    ends = np.cumsum(sizes.T.ravel()).reshape(50, 2).T
    index = np.stack([ends - sizes, sizes], -1).astype("<u8")
    footer = Footer(None, index, 0)  # type: ignore[arg-type]
    for limit in (1, 5000, 40_000, 10**6):
        parts = parts_of(footer, 3, 44, limit)
        assert [part.first for part in parts] == [3, *(part.last + 1 for part in parts[:-1])]
        assert parts[-1].last == 44
        for part in parts:
            assert part.start == index[0, part.first, 0]
            assert part.length == sizes[:, part.first : part.last + 1].sum()
            assert part.length <= limit or part.first == part.last
        if limit >= 5000:
            assert max(p.length for p in parts) < 2.5 * min(p.length for p in parts)


def test_a_stream_holds_no_more_than_its_setting_and_keeps_reading_ahead(tmp_path: Path) -> None:
    sealed(str(tmp_path), sequences(60, 200))
    dataset = Dataset(LocalStore(tmp_path))
    lengths = dataset.sequences["length"].to_numpy()
    per_token = dataset.plan.geometry.bytes_per_token
    limit = 5 * int(lengths.max()) * per_token
    started: list[int] = []
    read = dataset.read

    def recorded(index: int, out: np.ndarray | None = None) -> object:
        started.append(index)
        return read(index, out)

    dataset.read = recorded  # type: ignore[method-assign, assignment]
    order = np.random.default_rng(0).permutation(60).tolist()
    most = 0
    for number, states in enumerate(dataset.stream(order, ahead_bytes=limit)):
        assert right(states)
        time.sleep(0.005)
        ahead = sum(int(lengths[index]) for index in order[number + 1 : len(started)]) * per_token
        assert ahead <= limit
        most = max(most, ahead)
    assert most > limit / 2  # it does read ahead
    assert sorted(started) == sorted(order)  # several threads at once: not quite in that order


def test_a_stream_that_is_left_early_or_fails_ends_its_threads(tmp_path: Path) -> None:
    sealed(str(tmp_path), sequences(60, 200))
    dataset = open_dataset(str(tmp_path))
    before = threading.active_count()
    for _ in zip(dataset.stream(ahead=8), range(3)):  # noqa: B905
        pass
    gc.collect()
    with pytest.raises(IndexError):
        list(dataset.stream([0, 1, 999]))
    assert threading.active_count() <= before + 8  # those of the reader itself


def test_a_sequence_longer_than_a_shard_is_written_adopted_and_read_as_one(uri: str) -> None:
    table = sequences(12, 4000, seed=3)
    plan = make_plan(table, contract(), "lossless", shard_length=1024)
    store = open_store(uri)
    publish_plan(store, plan, table)
    writer = ShardWriter.from_uri(uri)
    units = list(plan.units())
    runs = [unit for unit in units if unit.shards > 2]
    assert runs
    writer.calibrate(unit_states(plan, units[0]))
    first = runs[0]
    assert writer.find(first.shard, first.tokens) is None
    for unit in units:
        assert writer.write(unit.shard, unit_states(plan, unit), len(unit.rows)).created
        assert writer.find(unit.shard, unit.tokens) is not None
    assert not writer.write(first.shard, unit_states(plan, first), len(first.rows)).created
    seal_dataset(store, plan)
    dataset = open_dataset(uri)
    assert all(right(states) for states in dataset.stream())
    ids = {row["id"]: row["token_ids"] for row in table.to_pylist()}
    assert all(states.token_ids.tolist() == ids[states.id] for states in dataset.stream())


def test_a_run_that_lost_a_shard_is_not_finished(tmp_path: Path) -> None:
    table = sequences(12, 4000, seed=3)
    plan = make_plan(table, contract(), "raw", shard_length=1024)
    publish_plan(open_store(str(tmp_path)), plan, table)
    writer = ShardWriter.from_uri(str(tmp_path))
    unit = next(unit for unit in plan.units() if unit.shards > 2)
    writer.write(unit.shard, unit_states(plan, unit), len(unit.rows))
    assert {states.id for states in open_dataset(str(tmp_path), partial=True).stream()} == {
        plan.table["id"][int(row)].as_py() for row in unit.rows
    }
    (tmp_path / shard_key(unit.shard + 1)).unlink()
    assert writer.find(unit.shard, unit.tokens) is None
    left = open_dataset(str(tmp_path), partial=True)
    assert all(right(states) for states in left.stream())
    assert plan.table["id"][int(unit.rows[0])].as_py() not in left.sequences["id"].to_pylist()


def test_quarantined_sequences_are_skipped(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), sequences(20, 60))
    writer = ShardWriter.from_uri(str(tmp_path))
    poison = plan.table["id"][3].as_py()
    for unit in plan.units():
        bits = unit_states(plan, unit)
        if not writer.calibrated:
            writer.calibrate(bits)
        bad = {poison: "engine error"} if 3 in unit.rows else {}
        writer.write(unit.shard, bits, len(unit.rows), quarantined=bad)
    partial = open_dataset(str(tmp_path), partial=True)
    seal_dataset(open_store(str(tmp_path)), plan, max_quarantine_share=0.1)
    for dataset in (partial, open_dataset(str(tmp_path))):
        assert len(dataset) == 19
        assert poison not in {states.id for states in dataset.stream()}
        assert all(right(states) for states in dataset.stream())


@pytest.mark.parametrize("codec", ["lossless", "raw", "bitround(3)", "fp8"])
def test_planes_joined_by_torch_equal_those_joined_here(tmp_path: Path, codec: str) -> None:
    torch = pytest.importorskip("torch")
    from storage.torch_decode import read_on

    table = sequences(6, 60)
    plan = planned(str(tmp_path), table, codec)
    writer = ShardWriter.from_uri(str(tmp_path))
    for unit in plan.units():
        bits = unit_states(plan, unit)
        bits[0, 0, :8] = (0x7FC0, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x7F7F, 0x0080, 0xFF7F)
        writer.calibrate(bits)
        writer.write(unit.shard, bits, len(unit.rows))
    seal_dataset(open_store(str(tmp_path)), plan)
    dataset = open_dataset(str(tmp_path))
    for index in range(6):
        joined = read_on(dataset, index, "cpu")
        assert joined.dtype == torch.bfloat16
        ours, theirs = dataset.read(index).hidden.astype(np.float32), joined.float().numpy()
        assert (np.isnan(ours) == np.isnan(theirs)).all()
        assert (ours.view(np.uint32) == theirs.view(np.uint32))[~np.isnan(ours)].all()


def test_numpy_alone_reads_what_compiled_loops_wrote(tmp_path: Path) -> None:
    import subprocess
    import sys

    sealed(str(tmp_path), sequences(12, 60))
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from storage import open_dataset
from storage.kernels import kernels
from tiny import states_of
assert not kernels().compiled
for states in open_dataset({str(tmp_path)!r}).stream():
    assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "STATEHOUSE_KERNELS": "numpy"})


def test_many_threads_read_one_dataset(uri: str) -> None:
    sealed(uri, sequences(40, 100))
    dataset = open_dataset(uri, threads=3)
    wrong: list[int] = []

    def read(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(0, 40, 30).tolist():
            if not right(dataset.read(index)):
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_above_10_000_shards_opening_lists_nothing_and_a_missing_shard_is_named_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.reader._LISTED_SHARDS", 2)
    plan, _ = sealed(str(tmp_path), sequences(120))
    (tmp_path / shard_key(1)).unlink()
    dataset = open_dataset(str(tmp_path))
    for unit in plan.units():
        if unit.shard == 1:
            with pytest.raises(ShardCorrupt, match="shard 1 is missing"):
                dataset.read(int(unit.rows[0]))
        else:
            assert right(dataset.read(int(unit.rows[0])))


@pytest.mark.parametrize("keep", [0, 1000])
def test_a_shard_cut_off_while_it_is_read_is_corrupt_not_short(uri: str, keep: int) -> None:
    plan, _ = sealed(uri, sequences(30, 200))
    dataset = open_dataset(uri)
    unit = next(iter(plan.units()))
    last = int(unit.rows[-1])
    assert right(dataset.read(last))
    store = open_store(uri)
    store.put(shard_key(unit.shard), store.get(shard_key(unit.shard))[:keep])
    with pytest.raises(ShardCorrupt, match=rf"{shard_key(unit.shard)}: .*(truncated|no receipt|{keep} bytes from 0)"):
        dataset.read(last)


def test_an_unsealed_dataset_has_no_fingerprint(tmp_path: Path) -> None:
    planned(str(tmp_path))
    with pytest.raises(DatasetNotSealed):
        _ = open_dataset(str(tmp_path), partial=True).fingerprint
