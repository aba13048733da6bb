"""Verifying, sealing and repairing: what is wrong is named with the command that fixes it, and that command fixes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import fill, planned, refill, sealed, sequences, states_of, unit_states

from storage import layout, open_dataset
from storage.cli import main
from storage.commit import publish_plan
from storage.errors import DatasetNotSealed, PlanConflict, ShardCorrupt, StatehouseError
from storage.objects import LocalStore, open_store
from storage.plan import Plan
from storage.repair import clear_damaged_plan, damaged_shards, repair, require_whole, restore_offset, settle
from storage.seal import load_seal, load_seals, resolve_fingerprint, seal_dataset
from storage.verify import verify
from storage.writer import ShardWriter


def flip(store: LocalStore, key: str, at: int, bit: int = 0) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 1 << bit
    store.put(key, bytes(data))


def assert_whole(uri: str) -> None:
    dataset = open_dataset(uri)
    for states in dataset.stream():
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()
    report = verify(open_store(uri), full=True)
    assert report.ok, report.findings


@pytest.mark.parametrize("codec", ["lossless", "raw", "bitround(3)", "fp8"])
def test_a_whole_dataset_verifies_and_every_byte_is_read(uri: str, codec: str) -> None:
    sealed(uri, sequences(), codec)
    store = open_store(uri)
    seen: list[int] = []
    report = verify(store, full=True, progress=seen.append)
    assert report.ok, report.findings
    assert report.sealed
    sizes = store.sizes()
    assert report.shards_present == report.shards == len([key for key in sizes if key.startswith("hidden/c/")])
    assert sum(seen) == report.bytes_checked
    data = sum(size for key, size in sizes.items() if key.startswith(("hidden/c", "tokens", "loss_mask", "sequences")))
    assert report.bytes_checked > 0.8 * data
    quick = verify(store)
    assert quick.ok
    assert quick.bytes_checked < report.bytes_checked


def test_an_unsealed_dataset_verifies_as_far_as_it_goes(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), sequences(120))
    fill(str(tmp_path), plan, {0, 3})
    report = verify(LocalStore(tmp_path), full=True)
    assert report.ok
    assert not report.sealed
    assert report.shards_present == 2
    flip(LocalStore(tmp_path), layout.shard_key(3), 100)
    report = verify(LocalStore(tmp_path), full=True)
    assert report.bad_shards() == [3]
    assert "--repair --shards 3" in report.findings[0].fix


def test_a_flipped_data_byte_is_seen_by_full_only_and_named_with_its_chunk(tmp_path: Path) -> None:
    sealed(str(tmp_path))
    store = LocalStore(tmp_path)
    flip(store, layout.shard_key(1), 1000)
    assert verify(store).ok
    report = verify(store, full=True)
    assert [finding.key for finding in report.findings] == [layout.shard_key(1)]
    assert "chunk 0, plane 0: crc32c" in report.findings[0].what


def test_verify_is_a_command_that_names_the_bad_shards_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed(str(tmp_path), sequences(120))
    main(["verify", "--full", str(tmp_path)])
    assert "all is well" in capsys.readouterr().out
    store = LocalStore(tmp_path)
    flip(store, layout.shard_key(2), 50)
    store.put(layout.shard_key(4), store.get(layout.shard_key(4))[:-1])
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--full", str(tmp_path)])
    assert caught.value.code == 1
    out = capsys.readouterr().out
    assert "python -m ray_jobs.extract RECIPE --repair --shards 2,4" in out
    with pytest.raises(SystemExit):
        main(["verify", "--quick", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["bad_shards"] == [4]
    assert not document["ok"]


def test_seal_is_a_command_for_a_filled_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(str(tmp_path))
    with pytest.raises(SystemExit):
        main(["seal", str(tmp_path)])
    assert "shards are missing" in capsys.readouterr().err
    fill(str(tmp_path), plan)
    main(["seal", str(tmp_path)])
    seal = load_seal(LocalStore(tmp_path))
    assert seal.fingerprint in capsys.readouterr().out
    main(["seal", str(tmp_path)])  # again: the same seal
    assert load_seals(LocalStore(tmp_path)) == [seal]
    assert_whole(str(tmp_path))


def test_a_lost_seal_is_made_again_with_the_same_fingerprint(tmp_path: Path) -> None:
    plan, seal = sealed(str(tmp_path))
    (tmp_path / "seal.json").unlink()
    assert seal_dataset(LocalStore(tmp_path), plan).fingerprint == seal.fingerprint


def test_a_changed_number_in_plan_or_seal_is_noticed(tmp_path: Path) -> None:
    plan, _ = sealed(str(tmp_path))
    for name in ("plan.json", "seal.json"):
        text = (tmp_path / name).read_text()
        changed = text.replace(f'"tokens":{plan.tokens}', f'"tokens":{plan.tokens + 1}')
        assert changed != text
        (tmp_path / name).write_text(changed)
        with pytest.raises(ShardCorrupt, match=rf"{name}: changed since it was written.*statehouse repair"):
            open_dataset(str(tmp_path))
        (tmp_path / name).write_text(text)


def test_too_many_quarantined_sequences_are_not_sealed(tmp_path: Path) -> None:
    plan = planned(str(tmp_path))
    writer = ShardWriter.from_uri(str(tmp_path))
    for unit in plan.units():
        bits = unit_states(plan, unit)
        if not writer.calibrated:
            writer.calibrate(bits)
        lost = plan.table["id"][int(unit.rows[0])].as_py()
        bits[: int(plan.column("length")[unit.rows[0]])] = 0x7FC0
        writer.write(unit.shard, bits, len(unit.rows), quarantined={lost: "the engine failed 5 times"})
    with pytest.raises(DatasetNotSealed, match=r"of 60 sequences are quarantined.*--max-quarantine"):
        seal_dataset(LocalStore(tmp_path), plan)
    seal = seal_dataset(LocalStore(tmp_path), plan, max_quarantine_share=0.5)
    assert len(seal.quarantined) == plan.geometry.shards


def test_repair_before_the_seal_finds_what_only_reading_every_byte_shows(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), sequences(120))
    fill(str(tmp_path), plan, {0, 1, 2})
    store = LocalStore(tmp_path)
    flip(store, layout.shard_key(1), 77)
    bad = damaged_shards(store, plan)
    assert list(bad) == [1]
    assert "hidden/c/0/1/0/0" in bad[1]
    assert "--repair" in bad[1]


def test_a_repaired_shard_with_the_same_states_is_restored_byte_for_byte(uri: str) -> None:
    plan, seal = sealed(uri, sequences(120))
    store = open_store(uri)
    key = layout.shard_key(3)
    before = store.get(key)
    store.delete(key)
    assert damaged_shards(store, plan) == {}  # missing is not damaged
    refill(uri, plan, {3})
    assert store.get(key) != before  # other seconds in its receipt
    assert settle(store, plan) == seal
    assert store.get(key) == before
    assert_whole(uri)


def test_a_repaired_shard_with_other_states_makes_a_second_seal_that_names_the_first(uri: str) -> None:
    plan, first = sealed(uri, sequences(120))
    store = open_store(uri)
    for shard in (2, 5):
        store.delete(layout.shard_key(shard))
    refill(uri, plan, {2, 5}, noise=1)
    with pytest.raises(ShardCorrupt):
        [states.id for states in open_dataset(uri).stream()]
    second = settle(store, plan, {"recipe": "r"})
    assert (second.number, second.parent, second.changed_shards) == (2, first.fingerprint, [2, 5])
    assert second.fingerprint != first.fingerprint
    assert store.exists("seal-0002.json")
    assert open_dataset(uri).fingerprint == second.fingerprint
    assert verify(store, full=True).ok
    assert settle(store, plan) == second  # nothing left to do

    newest, message = resolve_fingerprint(store, first.fingerprint)
    assert newest == second
    assert message is not None
    assert "2 of" in message
    assert "(2, 5)" in message
    assert resolve_fingerprint(store, second.fingerprint[:12])[1] is None
    with pytest.raises(ShardCorrupt, match="never had the fingerprint"):
        resolve_fingerprint(store, "f" * 64)


def test_seals_form_a_chain_of_which_no_link_may_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri, store = str(tmp_path), LocalStore(tmp_path)
    plan, _ = sealed(uri, sequences(120))
    for noise in (1, 2):
        store.delete(layout.shard_key(noise))
        refill(uri, plan, {noise}, noise)
        settle(store, plan)
    assert [seal.number for seal in load_seals(store)] == [1, 2, 3]
    main(["info", uri, "--fingerprint", load_seals(store)[0].fingerprint[:16]])
    out = capsys.readouterr().out
    assert "seal 3" in out
    assert "superseded" in out
    for name in ("seal.json", "seal-0002.json", "seal-0003.json"):
        kept = store.get(name)
        store.delete(name)
        with pytest.raises(StatehouseError):  # at once, or when a changed shard is read
            [states.id for states in open_dataset(uri).stream()]
        assert not verify(store).ok
        store.create(name, kept)
    assert verify(store, full=True).ok
    swapped = store.get("seal-0002.json"), store.get("seal-0003.json")
    store.put("seal-0002.json", swapped[1])
    with pytest.raises(ShardCorrupt, match=r"seal-0002\.json: says number 3"):
        open_dataset(uri)


def test_a_repair_cut_off_before_its_seal_is_refused_by_readers_and_carried_on(tmp_path: Path) -> None:
    uri, store = str(tmp_path), LocalStore(tmp_path)
    plan, first = sealed(uri, sequences(120))
    store.delete(layout.shard_key(0))
    refill(uri, plan, {0}, noise=1)  # killed here: no second seal
    report = verify(store)
    assert report.bad_shards() == [0]
    assert damaged_shards(store, plan) == {}  # whole, and not to be extracted a second time
    second = settle(store, plan)
    assert second.changed_shards == [0]
    assert second.parent == first.fingerprint


def test_repair_makes_again_what_needs_no_verifier(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, seal = sealed(uri)
    store = open_store(uri)
    for key in ("receipts/1.json", "exponent_offset/c/0/0", "shards.parquet"):
        store.delete(key)
    store.put("receipts/2.json", b"{}")
    assert {finding.key for finding in verify(store).findings} >= {"exponent_offset/c/0/0", "shards.parquet"}
    main(["repair", uri])
    assert "all is well" in capsys.readouterr().out
    assert_whole(uri)
    assert load_seal(store).fingerprint == seal.fingerprint


def test_any_object_is_restored_from_a_copy(tmp_path: Path) -> None:
    uri, copy = str(tmp_path / "a"), str(tmp_path / "b")
    sealed(uri)
    shutil.copytree(uri, copy)
    store, whole = LocalStore(uri), LocalStore(copy)
    for number, key in enumerate(sorted(whole.sizes())):
        if number % 2:
            store.delete(key)
        else:
            store.put(key, store.get(key)[:-3])
        report = repair(store, whole, say=lambda _line: None)
        assert report.ok, (key, report.findings)
        assert {k: store.get(k) for k in store.sizes()} == {k: whole.get(k) for k in whole.sizes()}, key


def test_a_copy_with_the_same_damage_repairs_nothing_and_the_report_says_so(tmp_path: Path) -> None:
    sealed(str(tmp_path / "a"))
    for key in ("tokens/c/0", layout.shard_key(1)):
        flip(LocalStore(tmp_path / "a"), key, 40)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    report = repair(LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b"), say=lambda _line: None)
    assert [finding.key for finding in report.findings] == ["tokens/c/0", layout.shard_key(1)]


def test_a_whole_dataset_is_not_changed_by_a_copy_that_was_sealed_anew(tmp_path: Path) -> None:
    uri, copy = str(tmp_path / "a"), str(tmp_path / "b")
    plan, first = sealed(uri, sequences(120))
    shutil.copytree(uri, copy)
    LocalStore(copy).delete(layout.shard_key(2))
    refill(copy, plan, {2}, noise=1)
    second = settle(LocalStore(copy), plan)
    assert repair(LocalStore(uri), LocalStore(copy), say=lambda _line: None).ok
    assert open_dataset(uri).fingerprint == first.fingerprint
    LocalStore(uri).delete(layout.shard_key(2))  # now it needs the copy's
    assert repair(LocalStore(uri), LocalStore(copy), say=lambda _line: None).ok
    assert open_dataset(uri).fingerprint == second.fingerprint


def test_something_else_is_no_copy(tmp_path: Path) -> None:
    sealed(str(tmp_path / "a"))
    sealed(str(tmp_path / "b"), sequences(seed=4))
    store, other = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    before = {key: store.get(key) for key in store.sizes()}

    def refused(match: str, key: str) -> None:
        with pytest.raises(PlanConflict, match=match):
            repair(store, other, say=lambda _line: None)
        store.put(key, before[key])
        assert {key: store.get(key) for key in store.sizes()} == before  # nothing was taken from it

    refused("is no copy of", "plan.json")
    store.put("plan.json", b"{")
    refused("nothing else here says", "plan.json")
    plan = publish_other_fill(tmp_path)
    other = LocalStore(tmp_path / "fill")
    store.delete("seal.json")
    refused(r"is no copy of .*shard 0 holds.*statehouse seal", "seal.json")
    assert plan.hash == json.loads(before["plan.json"])["plan_hash"]


def publish_other_fill(folder: Path) -> Plan:
    """The same plan, filled with other states."""
    plan, uri = planned(str(folder / "fill")), str(folder / "fill")
    writer = ShardWriter.from_uri(uri)
    writer.calibrate(unit_states(plan, next(iter(plan.units()))))
    for unit in plan.units():
        writer.write(unit.shard, unit_states(plan, unit) ^ 1, len(unit.rows))
    seal_dataset(LocalStore(uri), plan)
    return plan


def test_damaged_plan_objects_are_written_again_from_the_same_input(tmp_path: Path) -> None:
    table, store = sequences(), LocalStore(tmp_path)
    plan, _ = sealed(str(tmp_path), table)
    whole = {key: store.get(key) for key in store.sizes()}
    keys = [
        "plan.json",
        "zarr.json",
        "hidden/zarr.json",
        "tokens/zarr.json",
        "tokens/c/0",
        "loss_mask/c/0",
        "sequences.parquet",
    ]
    for key in keys:
        flip(store, key, len(whole[key]) // 2)
        assert clear_damaged_plan(store, plan) == [key]
        publish_plan(store, plan, table)
        assert {k: store.get(k) for k in store.sizes()} == whole, key
    store.delete("exponent_offset/c/0/0")
    assert restore_offset(store)
    assert not restore_offset(store)
    assert {k: store.get(k) for k in store.sizes()} == whole


def test_a_damaged_plan_is_replaced_only_by_the_plan_that_was_there(tmp_path: Path) -> None:
    plan, _ = sealed(str(tmp_path))
    other = planned(str(tmp_path / "other"), sequences(seed=4))
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanConflict, match="nothing else here says"):
        clear_damaged_plan(LocalStore(tmp_path), other)
    assert (tmp_path / "plan.json").exists()
    assert clear_damaged_plan(LocalStore(tmp_path), plan) == ["plan.json"]


def test_what_a_job_promises_is_checked(tmp_path: Path) -> None:
    sealed(str(tmp_path), sequences(120))
    store = LocalStore(tmp_path)
    require_whole(store)
    store.delete(layout.shard_key(1))
    store.delete(layout.shard_key(4))
    with pytest.raises(ShardCorrupt, match=r"hidden/c/0/1/0/0: missing \(2 bad objects.*--repair --shards 1"):
        require_whole(store)
