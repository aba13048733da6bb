"""The fault matrix: whatever happens to the objects or the writers, a dataset recovers or says what is wrong and what to run.

Never wrong numbers. What was tried is counted and shown at the end of the run.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import faults
import numpy as np
import pytest
from faults import TRIED, kind_of, names_what_to_do, part_of_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import contract, fill, planned, sealed, sequences, states_of, unit_states

from benchmarks.proxy import Fault, Proxy
from storage import layout, open_dataset
from storage.commit import load_offset, load_plan, offset_hash, publish_plan
from storage.errors import PlanConflict, ShardCorrupt, StatehouseError
from storage.objects import LocalStore, ObjectStore, RemoteStore, open_store
from storage.plan import make_plan
from storage.repair import repair
from storage.seal import seal_dataset
from storage.shard import read_footer
from storage.verify import verify
from storage.writer import ShardWriter, shard_identity

Whole = tuple[str, dict[str, bytes]]
SMALL, SMALL_OTHER = sequences(16, 500), sequences(16, 500, seed=8)  # five shards
expected = functools.cache(states_of)


def whole_dataset(uri: str) -> Whole:
    sealed(uri, SMALL)
    store = open_store(uri)
    return uri, {key: store.get(key) for key in store.sizes()}


@pytest.fixture(scope="module")
def local_whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return whole_dataset(str(tmp_path_factory.mktemp("whole") / "dataset"))


@pytest.fixture(scope="module")
def s3_whole(s3_server: str) -> Whole:
    return whole_dataset(f"s3://statehouse/faults-{uuid.uuid4().hex}")


def read_all(uri: str) -> str:
    """ "read right" or the name of the error; anything else fails the test."""
    try:
        count, right = 0, True
        for states in open_dataset(uri).stream():
            right &= bool((states.hidden.view(np.uint16) == expected(states.id, len(states.token_ids))).all())
            count += 1
        if not right or count != len(SMALL):
            TRIED["any", "any", "WRONG NUMBERS"] += 1
            pytest.fail(f"{count} sequences read, right: {right}")
        return "read right"
    except StatehouseError as error:
        assert names_what_to_do(str(error)), error
        return type(error).__name__


def found_by_verify(store: ObjectStore, key: str) -> None:
    """A full verification names the damaged object, and how to fix it."""
    try:
        report = verify(store, full=True)
    except StatehouseError as error:  # without a plan nothing else can be checked
        assert kind_of(key) == "plan"
        assert names_what_to_do(str(error))
        return
    assert not report.ok, key
    named = [finding for finding in report.findings if finding.key == key]
    # The loss of the only seal looks like an unsealed dataset, and says so.
    assert named, (key, report.findings)
    assert all(finding.fix for finding in report.findings)


def try_damage(
    store: ObjectStore, uri: str, objects: dict[str, bytes], damage: str, key: str, damaged: bytes | None
) -> None:
    """One fault: read, verify, then put the good object back."""
    good, kind = objects[key], kind_of(key)
    if damaged == good:
        return
    if damaged is None:
        store.delete(key)
    else:
        store.put(key, damaged)
    try:
        end = read_all(uri)
        if kind == "seal" and damaged is None:
            assert end == "DatasetNotSealed"
            assert not verify(store).sealed
        else:
            found_by_verify(store, key)
        if damage == "flipped bit" and kind == "shard":
            kind = where(store, objects, key, damaged)
        TRIED[damage, kind, end] += 1
    finally:
        store.put(key, good)


def where(store: ObjectStore, objects: dict[str, bytes], key: str, damaged: bytes | None) -> str:
    assert damaged is not None
    plan = load_plan(store)
    identity, shard = shard_identity(plan), int(key.split("/")[3])
    at = next(i for i, (one, two) in enumerate(zip(objects[key], damaged, strict=True)) if one != two)
    store.put(key, objects[key])
    offset = offset_hash(plan.codec, load_offset(store, (plan.geometry.layers, plan.geometry.hidden_size)))
    footer = read_footer(store, key, identity, shard, offset=offset)
    return part_of_shard(at, len(damaged), footer.receipt.data_bytes, identity.index_bytes)


DAMAGE = st.sampled_from(["flipped bit", "truncated", "bytes appended", "a block of zeros"])


def damage_bytes(data: st.DataObject, damage: str, good: bytes) -> bytes:
    # The ends of an object hold what describes it: half of the tries go there.
    tail = data.draw(st.sampled_from([len(good), 2000, 60]))
    at = data.draw(st.integers(max(0, len(good) - tail), len(good) - 1))
    if damage == "flipped bit":
        changed = bytearray(good)
        changed[at] ^= 1 << data.draw(st.integers(0, 7))
        return bytes(changed)
    if damage == "truncated":
        return good[:at]
    if damage == "bytes appended":
        return good + data.draw(st.binary(min_size=1, max_size=8))
    return good[:at] + bytes(len(good[at : at + 64])) + good[at + 64 :]


@pytest.mark.parametrize("times", [5, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", faults.KINDS)
def test_damage_to_every_kind_of_object_is_noticed_and_named(local_whole: Whole, kind: str, times: int) -> None:
    uri, objects = local_whole
    store = LocalStore(uri)
    keys = sorted(key for key in objects if kind_of(key) == kind)

    @settings(
        max_examples=4 * times if kind == "shard" else times,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(data=st.data())
    def damaged_somehow(data: st.DataObject) -> None:
        key, damage = data.draw(st.sampled_from(keys)), data.draw(DAMAGE)
        try_damage(store, uri, objects, damage, key, damage_bytes(data, damage, objects[key]))

    damaged_somehow()


def neutral(kind: str) -> bool:
    """Objects that our reader does not read: strangers do, or people; `verify` checks them."""
    return kind in ("zarr metadata", "copy of a receipt")


def test_every_object_may_be_deleted_or_emptied_and_is_missed(local_whole: Whole) -> None:
    uri, objects = local_whole
    for key in sorted(objects):
        for damage, damaged in (("deleted", None), ("zero length", b"")):
            try_damage(LocalStore(uri), uri, objects, damage, key, damaged)
    for (damage, kind, end), _ in TRIED.items():
        if damage in ("deleted", "zero length"):
            assert (end == "read right") == neutral(kind), (damage, kind, end)


@pytest.mark.parametrize("kinds", [("plan", "shard"), pytest.param(tuple(faults.KINDS), marks=pytest.mark.slow)])
def test_damage_on_a_real_s3_server(s3_whole: Whole, kinds: tuple[str, ...]) -> None:
    uri, objects = s3_whole
    store, random = open_store(uri), np.random.default_rng(0)
    for kind in kinds:
        key = sorted(key for key in objects if kind_of(key) == kind)[0]
        good = objects[key]
        flipped = bytearray(good)
        flipped[int(random.integers(len(good)))] ^= 16
        for damage, damaged in (
            ("S3: flipped bit", bytes(flipped)),
            ("S3: truncated", good[: int(random.integers(len(good)))]),
            ("S3: zero length", b""),
            ("S3: deleted", None),
        ):
            try_damage(store, uri, objects, damage, key, damaged)


def test_swapped_shards_and_shards_of_another_plan_attempt_or_array_are_refused(uri: str) -> None:
    table = SMALL
    plan, _ = sealed(uri, table)
    store = open_store(uri)
    objects = {key: store.get(key) for key in store.sizes()}
    other = f"{uri}-other"
    sealed(other, SMALL_OTHER)
    stale = f"{uri}-stale"  # the same plan, filled by an earlier attempt whose states were others
    publish_plan(open_store(stale), plan, table)
    writer = ShardWriter.from_uri(stale)
    for unit in plan.units():
        bits = unit_states(plan, unit)
        bits[0, 0, 0] ^= 1
        if not writer.calibrated:
            writer.calibrate(unit_states(plan, unit))
        writer.write(unit.shard, bits, len(unit.rows))
    first, second = layout.shard_key(0), layout.shard_key(1)
    for fault, changes in {
        "two shards swapped": {first: objects[second], second: objects[first]},
        "a shard of another plan": {first: open_store(other).get(first)},
        "a stale shard": {first: open_store(stale).get(first)},
        "an object of another kind": {first: objects["sequences.parquet"]},
    }.items():
        for key, data in changes.items():
            store.put(key, data)
        end = read_all(uri)
        assert end == "ShardCorrupt"
        for key in changes:
            found_by_verify(store, key)
            store.put(key, objects[key])
        TRIED[fault, "shard", end] += 1
    assert read_all(uri) == "read right"


def test_before_the_seal_a_stale_shard_stops_the_writer_and_the_seal(tmp_path: Path) -> None:
    sealed(str(tmp_path / "old"), SMALL_OTHER)
    plan = planned(str(tmp_path / "new"), SMALL)
    store = LocalStore(tmp_path / "new")
    store.put(layout.shard_key(1), LocalStore(tmp_path / "old").get(layout.shard_key(1)))
    with pytest.raises(ShardCorrupt, match=r"hidden/c/0/1/0/0.*plan_hash.*--repair"):
        fill(store.uri, plan)
    with pytest.raises(ShardCorrupt, match="--repair"):
        seal_dataset(store, plan)
    TRIED["a stale shard", "before the seal", "ShardCorrupt"] += 1


def test_writers_of_one_shard_with_different_states_leave_one_of_them_whole(uri: str) -> None:
    """As two GPUs would: neither loses silently, and the seal names the winner's."""
    plan = planned(uri, SMALL)
    fill(uri, plan, {0})
    writers = [ShardWriter.from_uri(uri) for _ in range(4)]
    units = [unit for unit in plan.units() if unit.shard]
    receipts: dict[tuple[int, int], str] = {}

    def write(number: int) -> None:
        for unit in units:
            bits = unit_states(plan, unit)
            bits[0, 0, 0] ^= number
            receipts[number, unit.shard] = writers[number].write(unit.shard, bits, len(unit.rows)).receipt.data_sha256

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for unit in units:
        assert len({receipts[number, unit.shard] for number in range(4)}) == 1  # all were told the same
        TRIED["four writers on one shard", "shard", "recovered"] += 1
    seal_dataset(open_store(uri), plan)
    assert verify(open_store(uri), full=True).ok


def test_of_two_planners_with_different_input_one_wins_whole_and_the_other_is_told(uri: str) -> None:
    for round_number in range(4):
        store = open_store(f"{uri}/{round_number}")
        tables = [SMALL, SMALL_OTHER]
        plans = [make_plan(table, contract(), "lossless") for table in tables]
        ends: list[str] = []
        barrier = threading.Barrier(2)

        def publish(number: int, store=store, plans=plans, tables=tables, ends=ends, barrier=barrier) -> None:  # type: ignore[no-untyped-def]
            barrier.wait()
            try:
                publish_plan(store, plans[number], tables[number])
                ends.append("committed")
            except PlanConflict as error:
                assert "already holds another plan" in str(error)
                ends.append("PlanConflict")

        threads = [threading.Thread(target=publish, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ends) == ["PlanConflict", "committed"]
        assert verify(store, full=True).ok
        for end in ends:
            TRIED["two planners at once", "plan", end] += 1


@pytest.mark.parametrize(
    ("kind", "stride"), [("local", 7), *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("local", "s3"))]
)
def test_a_writer_killed_at_any_write_step_is_carried_on_and_nothing_is_written_twice(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, stride: int
) -> None:
    if kind == "s3":
        request.getfixturevalue("s3_server")
    place = str(tmp_path) if kind == "local" else f"s3://statehouse/kill-{uuid.uuid4().hex}"
    script = Path(__file__).parent / "kill_steps.py"
    run = subprocess.run(
        [sys.executable, str(script), place, kind, str(stride)], capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr[-3000:]
    ended = json.loads(run.stdout)
    assert len(ended) >= 7
    for step, end in ended.items():
        assert end == "recovered", (step, run.stderr[-3000:])
        TRIED["SIGKILL", f"{kind} write step", end] += 1


def test_puts_whose_responses_are_lost_are_adopted_and_nothing_is_encoded_again(
    s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the object, the client saw the connection break: its retry meets its own object."""
    name = f"lost-{uuid.uuid4().hex}"
    host, port = s3_server.split("//")[1].split(":")
    proxy = Proxy((host, int(port)), fault=Fault("lost", method="PUT", path=f"{name}/(?!.*probe)"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    encoded: list[int] = []
    from storage import writer as writing

    real = writing.encode_shard_view

    def counted(*args: object, **kwargs: object) -> object:
        encoded.append(1)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "encode_shard_view", counted)
    uri = f"s3://statehouse/{name}"
    try:
        plan, _ = sealed(uri, SMALL)
        assert proxy.counts["lost"] >= plan.geometry.shards + 5  # every PUT of the plan, the shards and the seal
        assert len(encoded) == plan.geometry.shards
        assert read_all(uri) == "read right"
        assert verify(open_store(uri), full=True).ok
        TRIED["PUT response lost", "any object", "recovered"] += proxy.counts["lost"]
    finally:
        proxy.close()


class LosesTheSecondAnswer(LocalStore):
    """A store whose `create` fails after it has worked, as a network does."""

    def create(self, key: str, data: bytes) -> bool:
        made = super().create(key, data)
        if made and key.startswith("hidden/c"):
            raise ConnectionResetError("no answer")
        return made


def test_a_shard_whose_put_seemed_to_fail_is_found_by_the_next_worker(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), SMALL)
    fill(str(tmp_path), plan, {0})
    writer = ShardWriter(LosesTheSecondAnswer(tmp_path), shard_identity(plan))
    for unit in plan.units():
        if unit.shard:
            with pytest.raises(ConnectionResetError):
                writer.write(unit.shard, unit_states(plan, unit), len(unit.rows))
            assert writer.find(unit.shard, unit.tokens) is not None  # so that its next worker does not extract it
            TRIED["PUT response lost", "shard", "recovered"] += 1
    seal_dataset(LocalStore(tmp_path), plan)
    assert read_all(str(tmp_path)) == "read right"


def test_a_damaged_s3_dataset_is_repaired_from_a_local_copy(
    s3_whole: Whole, local_whole: Whole, tmp_path: Path
) -> None:
    uri, objects = s3_whole
    copy = LocalStore(tmp_path)
    for key, data in objects.items():
        copy.create(key, data)
    store = open_store(uri)
    assert isinstance(store, RemoteStore)
    for key in (layout.shard_key(0), "seal.json", "plan.json", "tokens/c/0"):
        store.delete(key)
    assert repair(store, copy, say=lambda _line: None).ok
    assert {key: store.get(key) for key in store.sizes()} == objects
    TRIED["repaired from a copy", "four objects", "recovered"] += 1
    assert os.environ["AWS_ENDPOINT_URL"]
