"""What `extract` does to a store, apart from Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import fill, planned, sealed, sequences

from ray_jobs import extract
from storage import layout, open_dataset
from storage.errors import ShardCorrupt
from storage.objects import LocalStore
from storage.seal import scan_shards


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
        monkeypatch.setattr(extract, "scan_shards", scan_shards)
        found = scan_shards(store, plan)  # type: ignore[arg-type]
        store.delete(layout.shard_key(2))
        if sealed_meanwhile:
            sealed(uri, table)
        else:
            fill(uri, planned(uri, table), {2})
        return found

    monkeypatch.setattr(extract, "scan_shards", scan_then_be_overtaken)
    if sealed_meanwhile:
        with pytest.raises(ShardCorrupt, match="sealed by another driver"):
            extract.missing_shards(store, plan, repair=True)
        assert len(list(open_dataset(uri).stream())) == 120
    else:
        extract.missing_shards(store, plan, repair=True)
        assert store.exists(layout.shard_key(2))
