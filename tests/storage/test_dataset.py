"""A dataset from plan to reading: what comes back is what went in, or an error that says which object is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import contract, fill, planned, sealed, sequences, states_of, unit_states

from storage import layout, open_dataset
from storage.commit import load_plan, publish_plan
from storage.contract import sha256_json
from storage.encode import encode_shard_view
from storage.errors import (
    ContractMismatch,
    DatasetMissing,
    DatasetNotSealed,
    PlanConflict,
    ShardCorrupt,
    StatehouseError,
    StoreError,
)
from storage.objects import LocalStore, open_store
from storage.plan import make_plan
from storage.seal import scan_shards, seal_dataset
from storage.writer import ShardWriter, shard_identity


@pytest.mark.parametrize("codec", ["lossless", "raw"])
def test_every_sequence_reads_back_bit_for_bit(uri: str, codec: str) -> None:
    table = sequences()
    sealed(uri, table, codec)
    dataset = open_dataset(uri)
    assert len(dataset) == len(table)
    for index, states in enumerate(dataset.read_many(range(len(dataset)))):
        assert states.id == table["id"][index].as_py()
        assert states.token_ids.tolist() == table["token_ids"][index].as_py()
        assert states.loss_mask.tolist() == table["loss_mask"][index].as_py()
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()


def test_streaming_gives_the_order_asked_for(tmp_path: Path) -> None:
    sealed(str(tmp_path))
    dataset = open_dataset(str(tmp_path))
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    ids = dataset.sequences["id"].to_pylist()
    assert [states.id for states in dataset.stream(order)] == [ids[index] for index in order]
    assert sorted(states.id for states in dataset.stream()) == sorted(ids)


def test_zarr_alone_reads_the_same_bits(tmp_path: Path) -> None:
    import zarr

    plan, _ = sealed(str(tmp_path))
    group = zarr.open_group(str(tmp_path), mode="r")
    assert group.attrs["contract"]["verifier"] == "tiny"
    offset = group["exponent_offset"][:]
    for row in plan.table.slice(0, 8).to_pylist():
        at = slice(row["start"], row["start"] + row["length"])
        exponent, rest = group["hidden"][:, at].astype(np.uint16)
        bits = ((exponent + offset) & 0xFF) << 7 | rest & 0x7F | (rest & 0x80) << 8
        assert (bits == states_of(row["id"], row["length"])).all()
        assert len(group["tokens"][at]) == row["length"] == len(group["loss_mask"][at])


def test_states_become_torch_tensors_on_the_same_memory(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the storage extra works without torch")
    sealed(str(tmp_path))
    states = open_dataset(str(tmp_path)).read(0)
    tensor = states.torch()
    assert tensor.dtype == torch.bfloat16
    assert tensor.float().numpy().tolist() == states.hidden.astype(np.float32).tolist()
    tensor.zero_()
    assert not states.hidden.view(np.uint16).any()


def test_the_size_on_disk_is_what_the_seal_says_and_padding_is_not_stored(tmp_path: Path) -> None:
    _, seal = sealed(str(tmp_path))
    sizes = {key: size for key, size in LocalStore(tmp_path).sizes("hidden").items() if "/c/" in key}
    assert seal.stored_bytes == sum(sizes.values())
    assert seal.raw_bytes == seal.tokens * 2 * 4 * 64


def test_a_second_writer_adopts_every_shard(uri: str) -> None:
    plan = planned(uri)
    assert all(fill(uri, plan))
    assert not any(fill(uri, plan))


def test_writers_at_once_make_one_correct_dataset(uri: str) -> None:
    plan = planned(uri, sequences(120))
    created: list[bool] = []
    threads = [threading.Thread(target=lambda: created.extend(fill(uri, plan))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(created) == plan.geometry.shards
    seal_dataset(open_store(uri), plan)
    for states in open_dataset(uri).stream():
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()


def test_planners_at_once_with_equal_input_agree_and_another_input_conflicts(uri: str) -> None:
    table, store = sequences(), open_store(uri)
    plan = make_plan(table, contract(), "lossless")
    committed: list[bool] = []
    threads = [threading.Thread(target=lambda: committed.append(publish_plan(store, plan, table))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(committed) == [False, False, False, True]
    assert load_plan(store).hash == plan.hash
    other = sequences(seed=5)
    with pytest.raises(PlanConflict, match="already holds another plan"):
        publish_plan(store, make_plan(other, contract(), "lossless"), other)
    with pytest.raises(PlanConflict, match="config_hash: 'c' != 'd'"):
        publish_plan(store, make_plan(table, contract(config_hash="d"), "lossless"), table)


def test_a_plan_cut_off_after_its_commit_point_is_completed(tmp_path: Path) -> None:
    table, store = sequences(), LocalStore(tmp_path)
    plan = planned(str(tmp_path), table)
    whole = {key: store.get(key) for key in store.sizes()}
    for key in whole:
        if key != layout.PLAN:
            store.delete(key)
    assert not publish_plan(store, plan, table)
    assert {key: store.get(key) for key in store.sizes()} == whole


def test_an_unsealed_dataset_is_refused_unless_partial_and_then_shows_finished_shards_only(uri: str) -> None:
    plan = planned(uri, sequences(120))
    fill(uri, plan, {0, 2})
    with pytest.raises(DatasetNotSealed, match="ray_jobs.extract"):
        open_dataset(uri)
    dataset = open_dataset(uri, partial=True)
    assert set(dataset.sequences["shard"].to_pylist()) == {0, 2}
    for states in dataset.stream():
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()


def test_sealing_an_incomplete_dataset_names_the_missing_shards(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), sequences(120))
    fill(str(tmp_path), plan, set(range(plan.geometry.shards)) - {1, 3})
    with pytest.raises(DatasetNotSealed, match=r"2 of \d+ shards are missing \(1, 3\)"):
        seal_dataset(open_store(str(tmp_path)), plan)
    assert not (tmp_path / "seal.json").exists()


def test_sealing_twice_gives_the_first_seal(uri: str) -> None:
    plan, seal = sealed(uri)
    assert seal_dataset(open_store(uri), plan) == seal
    assert open_dataset(uri).fingerprint == seal.fingerprint


def test_equal_content_has_an_equal_fingerprint_wherever_it_lies(tmp_path: Path) -> None:
    assert sealed(str(tmp_path / "a"))[1].fingerprint == sealed(str(tmp_path / "b"))[1].fingerprint


def test_shards_of_another_plan_or_in_another_place_do_not_count(tmp_path: Path) -> None:
    plan, _ = sealed(str(tmp_path / "a"), sequences(120))
    other, _ = sealed(str(tmp_path / "b"), sequences(120, seed=9))
    store = LocalStore(tmp_path / "a")
    first, second = (store.get(layout.shard_key(shard)) for shard in (0, 1))
    store.put(layout.shard_key(0), second)
    store.put(layout.shard_key(1), first)
    store.put(layout.shard_key(2), LocalStore(tmp_path / "b").get(layout.shard_key(2)))
    _, bad = scan_shards(store, plan)
    assert set(bad) == {0, 1, 2}
    assert "plan_hash" in bad[2]
    assert other.hash != plan.hash
    with pytest.raises(ShardCorrupt, match=r"hidden/c/0/\d/0/0: \d+ bytes, sealed with"):
        open_dataset(str(tmp_path / "a"))


def test_a_shard_replaced_by_another_of_its_size_after_the_seal_is_refused(tmp_path: Path) -> None:
    """The size is right, every checksum is right, the plan is right: only the seal tells."""
    plan, _ = sealed(str(tmp_path), sequences(120), "raw")
    store = LocalStore(tmp_path)
    unit = next(iter(plan.units()))
    for noise in range(200):
        bits = unit_states(plan, unit)
        bits[0, 0, 0] ^= noise + 1
        data, _ = encode_shard_view(bits, shard_identity(plan), unit.shard, len(unit.rows), None)
        if len(data) == store.sizes("hidden")[layout.shard_key(unit.shard)]:
            break
    else:
        pytest.fail("no shard of the same size")
    store.put(layout.shard_key(unit.shard), data)
    dataset = open_dataset(str(tmp_path))
    with pytest.raises(ShardCorrupt, match="replaced after the seal"):
        dataset.read(int(unit.rows[0]))


def test_a_missing_shard_is_noticed_when_a_sealed_dataset_is_opened(uri: str) -> None:
    sealed(uri)
    open_store(uri).delete(layout.shard_key(1))
    with pytest.raises(ShardCorrupt, match="hidden/c/0/1/0/0: no bytes, sealed with"):
        open_dataset(uri)


def test_a_shard_of_zero_bytes_is_bad_not_missing(uri: str) -> None:
    plan = planned(uri, sequences(120))
    fill(uri, plan)
    open_store(uri).put(layout.shard_key(2), b"")
    _, bad = scan_shards(open_store(uri), plan)
    assert set(bad) == {2}
    assert "truncated" in bad[2]


def test_documents_of_a_later_minor_version_are_read_and_their_new_keys_ignored(tmp_path: Path) -> None:
    sealed(str(tmp_path))
    for name in ("plan.json", "seal.json"):
        document = {**json.loads((tmp_path / name).read_text()), "format_version": "1.7", "new_key": 1}
        del document["document_sha256"]
        document["document_sha256"] = sha256_json(document)
        (tmp_path / name).write_text(json.dumps(document))
    assert len(open_dataset(str(tmp_path)))


def test_the_seal_completes_the_copies_of_receipts(tmp_path: Path) -> None:
    plan = planned(str(tmp_path))
    fill(str(tmp_path), plan)
    (tmp_path / "receipts" / "1.json").unlink()
    (tmp_path / "shards.parquet").write_bytes(b"junk")
    with pytest.raises(ShardCorrupt, match=r"shards\.parquet"):
        seal_dataset(LocalStore(tmp_path), plan)
    (tmp_path / "shards.parquet").unlink()
    seal_dataset(LocalStore(tmp_path), plan)
    assert (tmp_path / "receipts" / "1.json").exists()


def test_a_deleted_object_is_an_error_that_names_it(tmp_path: Path) -> None:
    sealed(str(tmp_path))
    store = LocalStore(tmp_path)
    for key in [key for key in store.sizes() if not key.endswith("zarr.json") and not key.startswith("receipts/")]:
        kept = store.get(key)
        store.delete(key)
        with pytest.raises(
            StatehouseError, match=r"missing|not sealed|no dataset|exponent_offset|changed|mixed|no bytes"
        ):
            for _ in open_dataset(str(tmp_path)).stream():
                pass
        store.put(key, kept)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    uri = str(tmp_path_factory.mktemp("whole"))
    sealed(uri, sequences(30, 60))
    store = LocalStore(uri)
    return uri, {key: store.get(key) for key in store.sizes() if not key.startswith("receipts/")}


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_reads_as_other_states(whole: tuple[str, dict[str, bytes]], data: st.DataObject) -> None:
    """A flipped bit or a truncation anywhere: an error of ours, or what was written."""
    uri, objects = whole
    key = data.draw(st.sampled_from(sorted(objects)))
    good, store = objects[key], LocalStore(uri)
    at = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        damaged = bytearray(good)
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        store.put(key, bytes(damaged))
    else:
        store.put(key, good[:at])
    try:
        for states in open_dataset(uri).stream():
            assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()
    except StatehouseError as error:
        assert str(error)
    finally:
        store.put(key, good)


def test_non_finite_values_are_kept_and_counted(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), sequences(4, 30))
    writer = ShardWriter.from_uri(str(tmp_path))
    for unit in plan.units():
        bits = unit_states(plan, unit)
        bits[0, 0, :3] = (0x7FC0, 0x7F80, 0xFF80)  # NaN, inf, -inf
        if not writer.calibrated:
            writer.calibrate(bits)
        receipt = writer.write(unit.shard, bits, len(unit.rows)).receipt
        assert receipt.non_finite == 3
        assert np.isfinite(receipt.layer_rms).all()
    seal_dataset(open_store(str(tmp_path)), plan)
    first = open_dataset(str(tmp_path)).read(int(next(iter(plan.units())).rows[0]))
    assert first.hidden.view(np.uint16)[0, 0, :3].tolist() == [0x7FC0, 0x7F80, 0xFF80]


def test_an_empty_place_and_a_newer_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing, match=r"no plan\.json"):
        open_dataset(str(tmp_path))
    sealed(str(tmp_path))
    document = json.loads((tmp_path / "plan.json").read_text())
    document["format_version"] = "2.0"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(StatehouseError, match="install a newer Statehouse"):
        open_dataset(str(tmp_path))


def test_contracts_that_differ_are_told_apart_field_by_field() -> None:
    with pytest.raises(ContractMismatch, match="hidden_size: 64 != 128"):
        contract().require_match(contract(hidden_size=128), "mixing a and b")
    contract().require_match(contract(engine="other", tp_size=4), "what is only recorded may differ")


def test_importing_storage_is_light() -> None:
    heavy = ["torch", "ray", "zarr", "sglang", "transformers", "s3fs", "pandas"]
    code = f"import storage, sys; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert result.stdout.strip() == "[]"


class Overwrites(LocalStore):
    def create(self, key: str, data: bytes | memoryview) -> bool:
        self.put(key, data)
        return True


def test_a_writer_refuses_a_store_that_lets_writers_overwrite_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(str(tmp_path))
    fill(str(tmp_path), plan, {0})
    monkeypatch.setattr("storage.writer._probed", set())
    monkeypatch.setattr("storage.writer.open_store", Overwrites)
    with pytest.raises(StoreError, match="second create-only PUT"):
        ShardWriter.from_uri(str(tmp_path))
