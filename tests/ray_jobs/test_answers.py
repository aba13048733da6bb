"""Finished answers are kept at once, taken from there by whoever tries the unit next, and stored once as a unit."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_jobs import answers
from ray_jobs.answers import RESPONSES_SCHEMA, Parts, commit, find, read_parts, unit_key
from ray_jobs.replicas.replica import Sampling
from ray_jobs.thinking import Response
from ray_jobs.units import GenerateUnit
from storage.errors import StatehouseError, StoreError
from storage.layout import parquet_bytes
from storage.objects import LocalStore


def unit_of(uri: Path, count: int = 6, settings: str = "h") -> GenerateUnit:
    ids, drawn = [f"p{n}" for n in range(count)], [settings] * count
    token_ids = [np.array([n], np.int32) for n in range(count)]
    return GenerateUnit(
        str(uri), unit_key(ids, drawn), ids, token_ids, [Sampling(seed=3)] * count, [None] * count, drawn
    )


def said(number: int) -> Response:
    return Response(np.array([number, number, 2], np.int32), "stop", 1 if number == 4 else None)


def test_what_was_finished_is_found_by_the_next_try_of_the_whole_and_of_a_part(tmp_path: Path) -> None:
    store, unit = LocalStore(tmp_path), unit_of(tmp_path)
    with pytest.raises(RuntimeError), Parts(store, unit.part([1, 4])) as parts:
        parts.add(0, said(1))
        parts.add(1, said(4))
        raise RuntimeError
    found = read_parts(store, unit)
    assert sorted(found) == [1, 4]
    assert (found[4].token_ids.tolist(), found[4].forced) == ([4, 4, 2], 1)
    assert sorted(read_parts(store, unit.part([4, 5]))) == [0]
    assert read_parts(store, unit_of(tmp_path, settings="other")) == {}


def test_an_answer_lies_in_the_store_before_the_next_one_is_there(tmp_path: Path) -> None:
    store, unit = LocalStore(tmp_path), unit_of(tmp_path)
    with Parts(store, unit) as parts:
        for at in range(6):
            parts.add(at, said(at))
            deadline = time.monotonic() + 60  # storing waits for the disk, which may take its time
            while at not in read_parts(store, unit):
                assert time.monotonic() < deadline
                time.sleep(0.002)


def test_a_store_that_is_away_for_a_while_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_AGAIN_S", 0.01)
    unit, failures = unit_of(tmp_path), [3]

    class Away(LocalStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            if failures[0]:
                failures[0] -= 1
                raise StoreError("connection refused")
            super().put(key, data)

    with Parts(Away(tmp_path), unit) as parts:
        for at in range(6):
            parts.add(at, said(at))
        deadline = time.monotonic() + 60
        while failures[0]:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    assert sorted(read_parts(LocalStore(tmp_path), unit)) == [0, 1, 2, 3, 4, 5]


def test_a_damaged_part_is_drawn_again_and_a_damaged_unit_is_named(tmp_path: Path) -> None:
    store, unit = LocalStore(tmp_path), unit_of(tmp_path)
    with Parts(store, unit) as parts:
        parts.add(2, said(2))
    (key,) = store.sizes("parts")
    store.put(key, store.get(key)[:-7])
    assert read_parts(store, unit) == {}
    commit(store, unit, {at: said(at) for at in range(6)})
    (key,) = store.sizes("responses")
    whole = store.get(key)
    without_ids = pq.read_table(pa.BufferReader(whole)).to_pylist()
    without_ids[3]["token_ids"] = None
    flipped = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(4, 400, 9)]
    assert damaged_or_equal(store, key, flipped, unit) > 20
    for damaged in (whole[:-7], b"", parquet_bytes(pa.Table.from_pylist(without_ids, RESPONSES_SCHEMA))):
        store.put(key, damaged)
        with pytest.raises(StatehouseError, match=r"responses/.*: damaged; delete it"):
            find(store, unit)


def test_of_two_drivers_the_first_counts_and_the_other_adopts_it(tmp_path: Path) -> None:
    store, unit = LocalStore(tmp_path), unit_of(tmp_path)
    assert find(store, unit) is None
    assert commit(store, unit, {at: said(at) for at in range(6)})
    assert not commit(store, unit.without({2: "it died"}), {at: said(9) for at in (0, 1, 3, 4, 5)})
    found = find(store, unit)
    assert found is not None
    assert [found[at].token_ids[0] for at in range(6)] == [0, 1, 2, 3, 4, 5]
    assert len(store.sizes("responses")) == 1  # nobody quarantined what was answered


@pytest.mark.parametrize(("why", "kept"), [("", "no reason given"), ("it died\n  log", "it died")])
def test_a_quarantined_prompt_has_a_reason_of_one_line(tmp_path: Path, why: str, kept: str) -> None:
    store, unit = LocalStore(tmp_path), unit_of(tmp_path, 1)
    commit(store, unit.without({0: why}), {})
    (key,) = store.sizes("responses")
    assert [row["reason"] for row in answers.read_rows(store, key)] == [kept]


def damaged_or_equal(store: LocalStore, key: str, files: list[bytes], unit: GenerateUnit) -> int:
    """How many of the files are refused; the others must say the same answers."""
    refused = 0
    for data in files:
        store.put(key, data)
        try:
            found = find(store, unit)
        except StatehouseError:
            refused += 1
            continue
        assert found is not None
        assert [found[at].token_ids.tolist() for at in range(6)] == [said(at).token_ids.tolist() for at in range(6)]
    return refused
