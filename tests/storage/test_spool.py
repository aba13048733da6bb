"""Sequences that fit no memory: spooled to disk, they make the same plan and the same objects, byte for byte."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import contract, sequences

from storage.commit import publish_plan
from storage.errors import StatehouseError
from storage.layout import plan_objects
from storage.objects import LocalStore
from storage.plan import make_plan
from storage.sequences import TOKENS_SCHEMA, Sequence
from storage.spool import SequenceSpool
from storage.verify import verify


def shuffled_file(table: pa.Table, path: Path) -> Path:
    """In random order, with duplicates of which one has a source that comes first."""
    rows = [*table.to_pylist(), *table.slice(3, 9).to_pylist()]
    rows.append({**table.slice(5, 1).to_pylist()[0], "source": "aaa"})
    random.Random(0).shuffle(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=TOKENS_SCHEMA), path, row_group_size=7)
    return path


def as_spooled(table: pa.Table) -> pa.Table:
    """What deduplication leaves of `shuffled_file`."""
    rows = table.to_pylist()
    rows[5]["source"] = "aaa"
    return pa.Table.from_pylist(rows, schema=TOKENS_SCHEMA)


def test_a_spooled_corpus_is_planned_and_stored_as_one_in_memory(tmp_path: Path) -> None:
    table = sequences(80, 300)
    expected = as_spooled(table)
    plan = make_plan(expected, contract(), "lossless")
    with SequenceSpool(tmp_path) as spool:
        spool.add_parquet(shuffled_file(table, tmp_path / "tokens.parquet"))
        found = spool.finish()
        assert spool.count == 90
        spooled = make_plan(found, contract(), "lossless")
        assert spooled.hash == plan.hash
        assert dict(plan_objects(spooled, found)) == dict(plan_objects(plan, expected))
        store = LocalStore(tmp_path / "dataset")
        assert publish_plan(store, spooled, found)
        store.delete("tokens/c/0")
        assert not publish_plan(store, spooled, found)  # completed
    assert verify(store, full=True).ok
    assert not publish_plan(store, plan, expected)
    assert [path.name for path in tmp_path.iterdir() if "spool" in path.name] == []


def test_single_sequences_are_gathered_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.spool._BATCH_TOKENS", 500)
    made = [
        Sequence("chat", f"g{number}", np.arange(number + 1, dtype=np.int32), np.arange(number + 1) % 3 == 0)
        for number in range(50)
    ]
    with SequenceSpool(tmp_path) as spool:
        keys = [spool.add(one) for one in [*made, *made[:5]]]
        found = spool.finish()
        assert found.table["id"].to_pylist() == sorted({one.id for one in made})
        assert spool.count == 55
        assert keys[:50] == [one.id for one in made]
        for one in made:
            row = found.table["id"].to_pylist().index(one.id)
            assert found.row(row)[0].tolist() == one.token_ids.tolist()
            assert found.row(row)[1].tolist() == one.loss_mask.tolist()
            assert found.table["loss_tokens"][row].as_py() == int(one.loss_mask.sum())


def test_what_cannot_be_planned_is_named(tmp_path: Path) -> None:
    with SequenceSpool(tmp_path) as spool:
        spool.add(Sequence("chat", "g", np.array([3, 1000], np.int32), np.array([False, True])))
        with pytest.raises(StatehouseError, match=r"holds token id 1000, outside .* 1000"):
            make_plan(spool.finish(), contract(), "lossless")
    with SequenceSpool(tmp_path) as spool, pytest.raises(StatehouseError, match="nothing to plan"):
        make_plan(spool.finish(), contract(), "lossless")
    path = tmp_path / "tokens.parquet"
    rows = sequences(3).to_pylist()
    rows[1]["token_ids"][0] ^= 1
    for table, what in (
        (pa.Table.from_pylist(rows, schema=TOKENS_SCHEMA), f"sequence {rows[1]['id']}: its tokens and mask make id"),
        (pa.table({"id": ["x"]}), "no column 'source'"),
    ):
        pq.write_table(table, path)
        with SequenceSpool(tmp_path) as spool, pytest.raises(StatehouseError, match=what):
            spool.add_parquet(path)
    path.write_bytes(b"no parquet")
    with SequenceSpool(tmp_path) as spool, pytest.raises(StatehouseError, match=r"tokens\.parquet: no Parquet file"):
        spool.add_parquet(path)
