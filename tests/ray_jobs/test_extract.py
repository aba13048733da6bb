"""What `extract` does to a store, apart from Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import contract, fill, planned, sealed, sequences, unit_states

from ray_jobs import extract
from storage import layout, open_dataset
from storage.commit import publish_plan
from storage.errors import ShardCorrupt, StatehouseError
from storage.objects import LocalStore
from storage.plan import make_plan
from storage.repair import damaged_shards
from storage.writer import ShardWriter


def test_bad_shards_are_an_error_and_with_repair_they_and_only_they_are_deleted(tmp_path: Path) -> None:
    plan, store = planned(str(tmp_path), sequences(120)), LocalStore(tmp_path)
    fill(str(tmp_path), plan)
    store.put(layout.shard_key(2), b"junk")
    with pytest.raises(ShardCorrupt, match="--repair"):
        extract.missing_shards(store, plan, repair=False)
    assert store.get(layout.shard_key(2)) == b"junk"
    assert extract.missing_shards(store, plan, repair=True) == {2}
    left = {key for key in store.sizes("hidden") if "/c/" in key}
    assert left == {layout.shard_key(shard) for shard in range(plan.geometry.shards)} - {layout.shard_key(2)}


@pytest.mark.parametrize("sealed_meanwhile", [True, False])
def test_repair_leaves_shards_alone_that_another_driver_repaired_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed_meanwhile: bool
) -> None:
    table, uri = sequences(120), str(tmp_path)
    plan, store = planned(uri, table), LocalStore(tmp_path)
    fill(uri, plan)
    store.put(layout.shard_key(2), b"junk")

    def scan_then_be_overtaken(store: LocalStore, plan: object, only: object = None) -> object:
        monkeypatch.setattr(extract, "damaged_shards", damaged_shards)
        found = damaged_shards(store, plan)  # type: ignore[arg-type]
        store.delete(layout.shard_key(2))
        if sealed_meanwhile:
            sealed(uri, table)
        else:
            fill(uri, planned(uri, table), {2})
        return found

    monkeypatch.setattr(extract, "damaged_shards", scan_then_be_overtaken)
    if sealed_meanwhile:
        with pytest.raises(ShardCorrupt, match="sealed by another driver"):
            extract.missing_shards(store, plan, repair=True)
        assert len(list(open_dataset(uri).stream())) == 120
    else:
        extract.missing_shards(store, plan, repair=True)
        assert store.exists(layout.shard_key(2))


def test_after_the_seal_repair_deletes_only_what_is_damaged_to_the_last_byte(tmp_path: Path) -> None:
    plan, _ = sealed(str(tmp_path), sequences(120))
    store = LocalStore(tmp_path)
    data = bytearray(store.get(layout.shard_key(1)))
    data[40] ^= 4
    store.put(layout.shard_key(1), bytes(data))
    store.delete(layout.shard_key(3))
    assert extract.missing_shards(store, plan, repair=True, only={1}) == {1, 3}  # whatever is missing is missing
    assert not store.exists(layout.shard_key(1))
    with pytest.raises(StatehouseError, match="the plan has shards 0 to"):
        extract.missing_shards(store, plan, repair=True, only={999})


def test_a_retry_deletes_the_whole_run_of_a_sequence_that_is_longer_than_a_shard(tmp_path: Path) -> None:
    table = sequences(30, 3000)
    plan = make_plan(table, contract(), "lossless", shard_length=1024)
    store = LocalStore(tmp_path)
    publish_plan(store, plan, table)
    unit = next(unit for unit in plan.units() if unit.shards > 1)
    writer = ShardWriter.from_uri(str(tmp_path))
    for one in plan.units():
        bits = unit_states(plan, one)
        writer.calibrate(bits)
        why = {"some id": "NaN"} if one.shard == unit.shard else {}
        writer.write(one.shard, bits, len(one.rows), quarantined=why)
    good = extract.existing_shards(store, plan, repair=False)
    extract.forget_quarantined(store, plan, good)
    run = set(range(unit.shard, unit.shard + unit.shards))
    assert set(good) == set(range(plan.geometry.shards)) - run
    assert extract.missing_shards(store, plan, repair=False) == run
