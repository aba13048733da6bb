"""What must never happen: good objects deleted or overwritten on the word of a list, of one read, or of a damaged copy."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tiny import fill, planned, refill, sealed, sequences, unit_states

from storage import layout, open_dataset
from storage.cli import main
from storage.commit import signed_json
from storage.convert.filling import load_contract, to_token_ids
from storage.convert.safetensors_file import read_header
from storage.convert.speculators import read_rows
from storage.copy import copy_dataset
from storage.errors import PlanConflict, ShardCorrupt, StatehouseError, StoreError
from storage.gc import find_garbage
from storage.objects import LocalStore, RemoteStore
from storage.repair import clear_damaged_plan, damaged_shards, repair, replace_receipt, settle
from storage.seal import scan_shards, seal_dataset
from storage.shard import read_footer
from storage.verify import verify
from storage.writer import ShardWriter, shard_identity


def flip(store: LocalStore, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.put(key, bytes(data))


class Forgetful(LocalStore):
    """Its lists leave shards out."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {key: size for key, size in super().sizes(prefix).items() if not key.startswith("hidden/c")}


class FlipsOnce(LocalStore):
    """What it gives whole is damaged in transit the first `times` times."""

    def __init__(self, path: Path, times: int = 1) -> None:
        super().__init__(path)
        self.times = times
        self.asked: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self.asked[key] += 1
        return data if self.asked[key] > self.times else data[:20] + bytes([data[20] ^ 1]) + data[21:]


@pytest.mark.parametrize("seal", [False, True])
def test_a_list_that_leaves_shards_out_deletes_none(tmp_path: Path, seal: bool) -> None:
    extract = pytest.importorskip("ray_jobs.extract")
    plan = planned(str(tmp_path), sequences(120))
    fill(str(tmp_path), plan)
    if seal:
        seal_dataset(LocalStore(tmp_path), plan)
    before = LocalStore(tmp_path).sizes()
    store = Forgetful(tmp_path)
    assert damaged_shards(store, plan) == {}
    assert len(scan_shards(store, plan)[0]) == plan.geometry.shards
    assert extract.missing_shards(store, plan, repair=True) == set()
    assert LocalStore(tmp_path).sizes() == before


def test_shards_without_their_offsets_are_not_taken_for_damaged(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), sequences(120))
    store = LocalStore(tmp_path)
    assert damaged_shards(store, plan) == {}  # nothing is there yet
    fill(str(tmp_path), plan)
    store.delete(layout.OFFSET)
    with pytest.raises(ShardCorrupt, match="exponent_offset/c/0/0: missing, though shard"):
        damaged_shards(store, plan)
    assert len([key for key in store.sizes("hidden") if "/c/" in key]) == plan.geometry.shards


def test_a_folder_that_cannot_be_read_is_an_error_not_an_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed(str(tmp_path))
    real = os.scandir

    def refused(path: object = ".") -> object:
        if str(path).endswith(("hidden", "secret")):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refused)
    for ask in (LocalStore(tmp_path).sizes, LocalStore(tmp_path).written):
        with pytest.raises(StoreError, match="hidden: Permission denied"):
            ask()
    assert LocalStore(tmp_path).sizes("receipts")
    assert LocalStore(tmp_path).sizes("nowhere") == {}

    def denied(self: Path) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    (tmp_path / "secret").mkdir()
    with pytest.raises(SystemExit):
        main(["ls", str(tmp_path / "secret")])
    assert "Permission denied" in capsys.readouterr().err


def test_a_damaged_copy_overwrites_nothing(tmp_path: Path) -> None:
    uri, copy = tmp_path / "a", tmp_path / "b"
    sealed(str(uri), sequences(120))
    shutil.copytree(uri, copy)
    store, other = LocalStore(uri), LocalStore(copy)
    whole = {key: store.get(key) for key in store.sizes()}
    for key in ("tokens/c/0", layout.OFFSET, "receipts/1.json", layout.SHARDS, layout.shard_key(1)):
        flip(store, key, 30)
        mine = store.get(key)
        flip(other, key, 31)
        said: list[str] = []
        repair(store, other, say=said.append)
        assert any(line.startswith(f"{key}: not restored, the one in the copy") for line in said), (key, said)
        assert store.get(key) in (mine, whole[key])  # kept, or made again without the copy
        store.put(key, whole[key])
        other.put(key, whole[key])
    flip(store, layout.shard_key(1), 30)
    assert repair(store, FlipsOnce(copy), say=said.append).ok  # damage in transit is not damage
    assert {key: store.get(key) for key in store.sizes()} == whole


def test_settle_writes_back_only_what_was_sealed(tmp_path: Path) -> None:
    plan, seal = sealed(str(tmp_path), sequences(120))
    store, key = LocalStore(tmp_path), layout.shard_key(3)
    before = store.get(key)
    store.delete(key)
    refill(str(tmp_path), plan, {3})
    refilled = store.get(key)
    with pytest.raises(ShardCorrupt, match="its receipt says"):
        settle(Always(tmp_path, key), plan)
    assert store.get(key) == refilled
    assert settle(store, plan) == seal
    assert store.get(key) == before


class Always(LocalStore):
    """One object always comes damaged when it is asked for whole."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(path)
        self.key = key

    def get(self, key: str) -> bytes:
        data = super().get(key)
        return data[:20] + bytes([data[20] ^ 1]) + data[21:] if key == self.key else data


def test_a_plan_is_cleared_only_of_what_is_damaged_twice_and_comes_back_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sequences()
    plan, _ = sealed(str(tmp_path), table)
    store = LocalStore(tmp_path)
    assert clear_damaged_plan(FlipsOnce(tmp_path), plan, table) == []
    other = planned(str(tmp_path / "other"), sequences(seed=4))
    flip(store, "tokens/c/0", 40)
    assert clear_damaged_plan(store, other) == []  # another recipe deletes nothing
    with monkeypatch.context() as patch:
        patch.setattr("storage.token_chunks.encode_chunk", lambda block: b"other bytes")
        with pytest.raises(PlanConflict, match=r"tokens/c/0: damaged, and the versions here write it"):
            clear_damaged_plan(store, plan, table)
    assert store.exists("tokens/c/0")
    assert clear_damaged_plan(store, plan, table) == ["tokens/c/0"]


class LosesTheSeal(LocalStore):
    """The further seal is stored, and the answer lost: the next try meets its own object."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return super().create(key, data) and not key.startswith("seal-")


def test_a_further_seal_whose_answer_was_lost_is_adopted(tmp_path: Path) -> None:
    plan, first = sealed(str(tmp_path), sequences(120))
    store = LosesTheSeal(tmp_path)
    store.delete(layout.shard_key(2))
    writer = ShardWriter.from_uri(str(tmp_path))
    unit = next(unit for unit in plan.units() if unit.shard == 2)
    writer.write(2, unit_states(plan, unit) ^ 1, len(unit.rows))
    second = settle(store, plan)
    assert (second.number, second.parent, second.changed_shards) == (2, first.fingerprint, [2])


def test_the_fingerprint_covers_the_exponent_offsets(tmp_path: Path) -> None:
    _, seal = sealed(str(tmp_path))
    changed = seal.model_copy(update={"offset_hash": "0" * 64})
    (tmp_path / "seal.json").write_bytes(signed_json(changed))
    report = verify(LocalStore(tmp_path))
    assert any("is not that of its contract, plan, offsets and shards" in finding.what for finding in report.findings)


def test_gc_keeps_away_from_what_it_cannot_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, seal = sealed(str(tmp_path))
    store = LocalStore(tmp_path)
    store.put("seal-0003.json", b"{}")
    store.put("shards-0003.parquet", b"x")
    with pytest.raises(ShardCorrupt, match=r"seal-0002\.json: missing, though seal-0003\.json"):
        find_garbage(store, older_than=timedelta(0))
    assert "seal-0002.json" in [finding.key for finding in verify(store).findings]
    store.delete("seal-0003.json")
    with pytest.raises(ShardCorrupt, match=r"seal-0002\.json: missing, though shards-0003\.parquet"):
        find_garbage(store, older_than=timedelta(0))
    store.delete("shards-0003.parquet")
    store.put(
        "shards-0002.parquet", b"x"
    )  # as a repair leaves it that was cut off: the next one may take it up meanwhile
    store.put("left-over", b"x")
    assert [one.key for one in find_garbage(store, older_than=timedelta(0))] == ["left-over"]
    store.put("seal.json", signed_json(seal.model_copy(update={"format_version": "1.9"})))
    with pytest.raises(StatehouseError, match=r"format version 1\.9"):
        find_garbage(store, older_than=timedelta(0))
    for wrong in ("nan", "inf", "-1", "x"):
        with pytest.raises(SystemExit) as caught:
            main(["gc", str(tmp_path), "--older-than", wrong])
        assert caught.value.code == 2
    assert "--older-than" in capsys.readouterr().err


def test_stores_without_suffix_ranges_are_asked_for_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import NotSupportedError

    class Azure:
        data = bytes(range(100))

        def get(self, _store: object, _key: str, options: object = None) -> object:
            raise NotSupportedError("Operation not supported: Azure does not support suffix range requests")

        def head(self, _store: object, _key: str) -> dict[str, int]:
            return {"size": len(self.data)}

        def get_range(self, _store: object, _key: str, start: int, end: int) -> bytes:
            return self.data[start:end]

    store = RemoteStore("s3://bucket/x")
    monkeypatch.setattr(store, "_obstore", Azure())
    assert store.get_tail("key", 10)[:2] == (Azure.data[-10:], 100)
    assert store.get_tail("key", 1000)[:2] == (Azure.data, 100)
    monkeypatch.setattr(Azure, "data", b"")
    assert store.get_tail("key", 10)[:2] == (b"", 0)


@pytest.mark.parametrize("entry", [[], {"dtype": "BF16", "shape": [1], "data_offsets": [0]}, {"data_offsets": [0, 0]}, {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 0]}, {"shape": [0], "data_offsets": [0, 0]}])  # fmt: skip
def test_malformed_safetensors_headers_are_named(tmp_path: Path, entry: object) -> None:
    text = json.dumps({"x": entry}).encode()
    (tmp_path / "f.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ShardCorrupt, match="f.safetensors: no whole safetensors file .*tensor 'x'"):
        read_header(tmp_path / "f.safetensors")


@pytest.mark.parametrize("ids", [[1, None], None, [2**31], [-1], [0.5], []])
def test_what_is_no_token_id_is_named_with_its_row(tmp_path: Path, ids: list[float] | None) -> None:
    kind = pa.float64() if ids == [0.5] else pa.int64()
    schema = pa.schema([("input_ids", pa.list_(kind)), ("loss_mask", pa.list_(pa.int64()))])
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_batch(
            pa.record_batch([pa.array([[1], ids], schema.field(0).type), pa.array([[1], [1]])], schema=schema)
        )
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with pytest.raises(ShardCorrupt, match=r"data\.arrow: row [01]: "):
        list(read_rows(tmp_path))


def test_specforge_ids_do_not_wrap() -> None:
    with pytest.raises(ShardCorrupt, match="token id 4294967297"):
        to_token_ids(np.array([1, 2**32 + 1]), "file")
    assert to_token_ids(np.array([0, 2**31 - 1]), "file").dtype == np.int32


@pytest.mark.parametrize("text", ['{"plan": [1]}', "[1]", '{"plan": {"contract": 3}}', "{" * 100000])
def test_a_malformed_contract_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(StatehouseError, match=r"c\.json: .*expected JSON") as caught:
        load_contract(str(tmp_path / "c.json"), tmp_path)
    assert "\n" not in str(caught.value)


def test_json_of_states_that_are_not_finite_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(str(tmp_path))
    writer = ShardWriter.from_uri(str(tmp_path))
    for unit in plan.units():
        bits = unit_states(plan, unit)
        if not writer.calibrated:
            writer.calibrate(bits)
        bits[:, 1] = 0x7FC0
        writer.write(unit.shard, bits, len(unit.rows))
    seal_dataset(LocalStore(tmp_path), plan)
    main(["head", str(tmp_path), "--json"])

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert document[0]["tokens"][0]["rms"][1] is None


def test_a_receipt_that_json_cannot_hold_is_refused_before_it_is_written(tmp_path: Path) -> None:
    plan = planned(str(tmp_path))
    unit = next(iter(plan.units()))
    writer = ShardWriter.from_uri(str(tmp_path))
    writer.calibrate(unit_states(plan, unit))
    for bad in ({"seconds": {"prefill": float("inf")}}, {"written_by": {"rate": float("nan")}}):
        with pytest.raises(ValueError, match="shard 0: its receipt cannot hold"):
            writer.write(unit.shard, unit_states(plan, unit), len(unit.rows), **bad)  # type: ignore[arg-type]
    assert not LocalStore(tmp_path).exists(layout.shard_key(0))


def test_receipts_of_a_later_minor_version_are_sealed_and_copied_as_they_are(tmp_path: Path) -> None:
    uri = str(tmp_path / "a")
    plan = planned(uri)
    fill(uri, plan)
    store, identity, key = LocalStore(uri), shard_identity(plan), layout.shard_key(0)
    offset = scan_shards(store, plan)[0][0].receipt.offset_hash
    footer = read_footer(store, key, identity, 0, offset=offset)
    text = json.dumps({**json.loads(footer.text), "later": 1}).encode()
    store.put(key, replace_receipt(store.get(key), identity, footer.receipt, text))
    seal_dataset(store, plan)
    assert verify(store, full=True).ok
    target = LocalStore(tmp_path / "b")
    assert copy_dataset(store, target, full=True).ok
    assert target.get(key) == store.get(key)
    written = (target.root / key).stat().st_mtime_ns
    assert copy_dataset(store, target).ok
    assert (target.root / key).stat().st_mtime_ns == written


def test_a_copy_checks_every_object_and_reads_damage_twice(tmp_path: Path) -> None:
    sealed(str(tmp_path / "a"))
    source, target = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    assert copy_dataset(FlipsOnce(tmp_path / "a"), target).ok
    assert {key: target.get(key) for key in target.sizes()} == {key: source.get(key) for key in source.sizes()}
    for number, key in enumerate(("receipts/0.json", layout.OFFSET, layout.PLAN, layout.SEAL)):
        place = LocalStore(tmp_path / f"c{number}")
        with pytest.raises(ShardCorrupt, match=key):
            copy_dataset(Always(tmp_path / "a", key), place)
        assert not place.exists(key)


def test_a_dataset_is_refused_in_a_fork_and_opened_again_by_pickle(tmp_path: Path) -> None:
    sealed(str(tmp_path), sequences(12, 50))
    dataset = open_dataset(str(tmp_path), threads=3)
    dataset.read(0)
    again = pickle.loads(pickle.dumps(dataset))
    assert (again.fingerprint, again._reader.threads) == (dataset.fingerprint, 3)
    assert (again.read(1).hidden.view(np.uint16) == dataset.read(1).hidden.view(np.uint16)).all()
    pid = os.fork()
    if pid == 0:
        try:
            dataset.read(0)
        except StatehouseError as error:
            os._exit(7 if "open_dataset in each process" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
