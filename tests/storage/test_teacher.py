"""The teacher summary: stored beside the states, proved like them, read back to the bit, and by a stranger."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tiny import contract, sequences, states_of, unit_states

from storage import layout, open_dataset
from storage.commit import publish_plan
from storage.copy import copy_dataset
from storage.errors import PlanConflict, ShardCorrupt, StatehouseError
from storage.objects import LocalStore, open_store
from storage.plan import Plan, WorkUnit, make_plan
from storage.repair import damaged_shards, settle
from storage.reuse import Sources, fill_reusable, find_reusable
from storage.seal import Seal, load_seals, seal_dataset
from storage.teacher import TeacherSummary, blank, join, parse_teacher, teacher_keys, topk_of, write_teacher
from storage.verify import verify
from storage.writer import ShardWriter

KINDS = ["argmax", "topk(3)"]


def summary_of(sequence_id: str, length: int, teacher: str) -> TeacherSummary:
    random = np.random.default_rng(int(sequence_id[-12:], 16))
    argmax, lse = random.integers(0, 1000, length).astype(np.int32), random.normal(20, 3, length).astype(np.float32)
    if not (k := topk_of(teacher)):
        return TeacherSummary(argmax, lse)
    ids = random.integers(0, 1000, (length, k)).astype(np.int32)
    return TeacherSummary(argmax, lse, ids, random.normal(size=(length, k)).astype(np.float32))


def unit_summary(plan: Plan, unit: WorkUnit) -> TeacherSummary:
    ids, lengths = plan.table["id"], plan.column("length")
    return join([summary_of(ids[int(row)].as_py(), int(lengths[row]), plan.teacher) for row in unit.rows])


def planned(uri: str, teacher: str, table: pa.Table | None = None, **more: object) -> Plan:
    table = sequences() if table is None else table
    plan = make_plan(table, contract(), "lossless", teacher=teacher, **more)  # type: ignore[arg-type]
    publish_plan(open_store(uri), plan, table)
    return plan


def fill(uri: str, plan: Plan, shards: set[int] | None = None) -> None:
    writer = ShardWriter.from_uri(uri)
    for unit in plan.units():
        if shards is None or unit.shard in shards:
            bits = unit_states(plan, unit)
            if not writer.calibrated:
                writer.calibrate(bits)
            writer.write(unit.shard, bits, len(unit.rows), teacher=unit_summary(plan, unit))


def sealed(uri: str, teacher: str, table: pa.Table | None = None, **more: object) -> tuple[Plan, Seal]:
    plan = planned(uri, teacher, table, **more)
    fill(uri, plan)
    return plan, seal_dataset(open_store(uri), plan)


def same(one: TeacherSummary | None, two: TeacherSummary) -> bool:
    assert one is not None
    mine, theirs = one.arrays(), two.arrays()
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[n], theirs[n], equal_nan=True) for n in mine)


@pytest.mark.parametrize("teacher", KINDS)
def test_every_row_is_read_back_and_sequences_longer_than_a_shard_are_joined(tmp_path: Path, teacher: str) -> None:
    table = sequences(40, 3000)
    sealed(str(tmp_path), teacher, table, shard_length=1024)
    dataset = open_dataset(str(tmp_path))
    assert max(dataset.sequences["length"].to_pylist()) > 1024
    for states in dataset.stream():
        expected = summary_of(states.id, len(states.token_ids), teacher)
        assert same(states.teacher, expected)
        assert states.argmax is not None
        assert np.array_equal(states.argmax, expected.argmax)
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()
    assert same(dataset.teacher(3), summary_of(dataset.sequences["id"][3].as_py(), len(dataset.tokens(3)[0]), teacher))
    assert verify(LocalStore(tmp_path), full=True).ok
    assert not verify(LocalStore(tmp_path), full=True).unplanned


def test_a_stranger_reads_it_with_zarr_alone(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    plan, _ = sealed(str(tmp_path), "topk(3)")
    group = zarr.open_group(str(tmp_path), mode="r")
    for row in range(0, len(plan.table), 7):
        start, length = int(plan.column("start")[row]), int(plan.column("length")[row])
        expected = summary_of(plan.table["id"][row].as_py(), length, "topk(3)").arrays()
        for name, values in expected.items():
            assert np.array_equal(group["teacher"][name][start : start + length], values)
    assert (group["teacher/argmax"][:] == -1).sum() == plan.geometry.tokens - plan.tokens


def test_datasets_without_a_summary_are_what_they_were(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), "none")
    writer = ShardWriter.from_uri(str(tmp_path))
    for unit in plan.units():
        bits = unit_states(plan, unit)
        writer.calibrate(bits)
        receipt = writer.write(unit.shard, bits, len(unit.rows)).receipt
        assert "teacher" not in json.loads(receipt.model_dump_json())
    seal_dataset(writer.store, plan)
    dataset = open_dataset(str(tmp_path))
    assert (dataset.teacher(0), dataset.read(0).argmax) == (None, None)
    assert not [key for key in writer.store.sizes() if key.startswith("teacher")]
    # The plan hash of format 1.0, worked out before there were summaries.
    assert plan.hash == make_plan(sequences(), contract(), "lossless").hash


def test_kinds_are_different_plans_and_different_content(tmp_path: Path) -> None:
    plans = [make_plan(sequences(), contract(), "lossless", teacher=kind) for kind in ("none", *KINDS, "topk(4)")]
    assert len({plan.hash for plan in plans}) == 4
    planned(str(tmp_path), "argmax")
    with pytest.raises(PlanConflict, match=r"extraction.teacher: argmax != topk\(3\)"):
        planned(str(tmp_path), "topk(3)")


def test_the_summary_must_be_of_the_planned_kind(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), "argmax")
    unit = next(plan.units())
    bits, writer = unit_states(plan, unit), ShardWriter.from_uri(str(tmp_path))
    writer.calibrate(bits)
    for wrong in (None, blank("topk(3)", unit.tokens), blank("argmax", unit.tokens - 1)):
        with pytest.raises(ValueError, match="teacher summary of kind argmax"):
            writer.write(unit.shard, bits, len(unit.rows), teacher=wrong)


@pytest.mark.parametrize("kind", ["topk", "topk(0)", "topk(2000)", "ARGMAX", "topk(-1)"])
def test_unknown_kinds_are_named(kind: str) -> None:
    with pytest.raises(StatehouseError, match=r"none, argmax or topk\(k\)"):
        parse_teacher(kind)


def test_what_a_cut_off_writer_left_is_adopted_or_replaced_but_never_under_a_shard(tmp_path: Path) -> None:
    plan, store = planned(str(tmp_path), "argmax"), LocalStore(tmp_path)
    fill(str(tmp_path), plan)
    first, second, third = teacher_keys("argmax", 1)[0], teacher_keys("argmax", 2)[0], teacher_keys("argmax", 3)[0]
    good = {key: store.get(key) for key in (first, second, third)}
    for shard in (1, 2):
        store.delete(layout.shard_key(shard))
    store.put(second, b"junk")  # and shard 1's is whole
    store.put(third, b"junk")  # under a shard that is there
    fill(str(tmp_path), plan)
    assert store.get(first) == good[first]
    assert store.get(second) == good[second]
    assert store.get(third) == b"junk"
    with pytest.raises(ShardCorrupt, match=third):
        seal_dataset(store, plan)


def test_what_another_shard_said_is_not_adopted(tmp_path: Path) -> None:
    plan, store = planned(str(tmp_path), "argmax"), LocalStore(tmp_path)
    fill(str(tmp_path), plan)
    keys = teacher_keys("argmax", 1)
    good = {key: store.get(key) for key in keys}
    for key, other in zip(keys, teacher_keys("argmax", 2), strict=True):
        store.put(key, store.get(other))
    store.delete(layout.shard_key(1))
    fill(str(tmp_path), plan)
    assert {key: store.get(key) for key in keys} == good


def test_the_writer_whose_shard_counts_puts_its_summary_back(tmp_path: Path) -> None:
    """Another one, which knows more rows, replaces it while the first still encodes."""
    plan, store = planned(str(tmp_path), "argmax"), LocalStore(tmp_path)
    unit = next(plan.units())
    bits, whole, unknown = unit_states(plan, unit), unit_summary(plan, unit), blank("argmax", 5)
    assert unknown is not None
    first, second = ShardWriter.from_uri(str(tmp_path)), ShardWriter.from_uri(str(tmp_path))
    first.calibrate(bits)

    @contextlib.contextmanager
    def overtaken(stage: str) -> Iterator[None]:
        if stage == "encode":
            size = plan.geometry.shard_tokens
            write_teacher(second.store, "argmax", unit.shard, whole, size, lambda: False)
        yield

    written = first.write(unit.shard, bits, len(unit.rows), teacher=join([unknown, whole[5:]]), stage=overtaken)
    assert written.created
    fill(str(tmp_path), plan)
    seal_dataset(store, plan)
    assert verify(store, full=True).ok


def test_states_take_their_summary_along(tmp_path: Path) -> None:
    sealed(str(tmp_path), "argmax")
    states = open_dataset(str(tmp_path)).read(3)
    moved = pickle.loads(pickle.dumps(states))
    assert (moved.argmax == states.argmax).all()
    assert (moved.hidden.view(np.uint16) == states.hidden.view(np.uint16)).all()


def test_rows_that_were_not_known_before_are_filled_in(tmp_path: Path) -> None:
    plan, store = planned(str(tmp_path), "argmax"), LocalStore(tmp_path)
    unit = next(plan.units())
    bits, writer = unit_states(plan, unit), ShardWriter.from_uri(str(tmp_path))
    writer.calibrate(bits)
    whole, empty = unit_summary(plan, unit), blank("argmax", 5)
    assert empty is not None
    writer.write(unit.shard, bits, len(unit.rows), teacher=join([empty, whole[5:]]))
    store.delete(layout.shard_key(unit.shard))
    writer.write(unit.shard, bits, len(unit.rows), teacher=whole)
    fill(str(tmp_path), plan)
    seal_dataset(store, plan)
    assert all((one.argmax >= 0).all() for one in open_dataset(str(tmp_path)).stream() if one.argmax is not None)


@pytest.mark.parametrize("damage", ["missing", "junk", "flipped"])
def test_damage_is_noticed_by_readers_verify_and_repair(tmp_path: Path, damage: str) -> None:
    plan, _ = sealed(str(tmp_path), "argmax")
    store, key = LocalStore(tmp_path), teacher_keys("argmax", 2)[1]
    good = store.get(key)
    if damage == "missing":
        store.delete(key)
    else:
        store.put(key, b"junk" if damage == "junk" else good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    dataset = open_dataset(str(tmp_path))
    row = int(np.flatnonzero(dataset.sequences["shard"].to_numpy() == 2)[0])
    dataset.read(row)  # the states are whole
    with pytest.raises(ShardCorrupt, match=key):
        dataset.teacher(row)
    found = verify(store, full=True).findings
    assert [(one.key, one.shard) for one in found] == [(key, 2)]
    assert bool(verify(store).ok) == (damage == "flipped")
    assert key in damaged_shards(store, plan)[2]


def test_extracting_a_shard_again_gives_the_sealed_bytes_or_another_seal(tmp_path: Path) -> None:
    plan, seal = sealed(str(tmp_path), "argmax")
    store = LocalStore(tmp_path)
    before = {key: store.get(key) for key in store.sizes()}
    for key in [layout.shard_key(2), *teacher_keys("argmax", 2)]:
        store.delete(key)
    fill(str(tmp_path), plan)
    assert settle(store, plan).fingerprint == seal.fingerprint
    assert {key: store.get(key) for key in store.sizes()} == before
    unit = next(unit for unit in plan.units() if unit.shard == 2)
    for key in [layout.shard_key(2), *teacher_keys("argmax", 2)]:
        store.delete(key)
    other = unit_summary(plan, unit)
    other.argmax[0] ^= 1
    ShardWriter.from_uri(str(tmp_path)).write(2, unit_states(plan, unit), len(unit.rows), teacher=other)
    again = settle(store, plan)
    assert again.fingerprint != seal.fingerprint
    assert load_seals(store)[1].changed_shards == [2]
    assert verify(store, full=True).ok


def test_a_copy_takes_the_summary_along_and_proves_it(tmp_path: Path) -> None:
    sealed(str(tmp_path / "a"), "argmax")
    source, target = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    assert copy_dataset(source, target, full=True).ok
    key = teacher_keys("argmax", 1)[0]
    source.put(key, target.get(key)[:-1] + b"x")
    with pytest.raises(ShardCorrupt, match=key):
        copy_dataset(source, LocalStore(tmp_path / "c"))


def test_summaries_are_reused_with_the_states_and_cut_to_the_kind_that_is_wanted(tmp_path: Path) -> None:
    table, old = sequences(20, 200), str(tmp_path / "old")
    sealed(old, "topk(3)", table.slice(0, 12))
    ids = table["id"].to_pylist()
    assert (
        "teacher summary is topk(3), topk(4) is wanted"
        in find_reusable([old], contract(), ids, teacher="topk(4)").skipped[old]
    )
    uri = str(tmp_path / "new")
    plan = planned(uri, "argmax", table, shard_length=1024)
    reusable, lengths = find_reusable([old], contract(), ids, teacher="argmax"), plan.column("length")
    assert len(reusable) == 12
    writer, filled = ShardWriter.from_uri(uri), fill_reusable(ShardWriter.from_uri(uri), plan, reusable)
    for unit in plan.units():
        if unit.shard not in filled:
            known, rows = reusable.known(plan, unit), lengths[unit.rows].tolist()
            others = [int(row) for at, row in enumerate(unit.rows) if at not in known]
            extracted = join([summary_of(ids[row], int(lengths[row]), "argmax") for row in others])
            if not writer.calibrated:
                writer.calibrate(unit_states(plan, unit))
            summary = Sources().complete_teacher(rows, known, "argmax", extracted)
            writer.write(unit.shard, unit_states(plan, unit), len(unit.rows), teacher=summary)
    seal_dataset(open_store(uri), plan)
    dataset = open_dataset(uri)
    for row, key in enumerate(ids):
        kind = "topk(3)" if key in reusable else "argmax"
        expected = summary_of(key, int(lengths[row]), kind)
        assert same(dataset.teacher(row), TeacherSummary(expected.argmax, expected.logsumexp))
