"""Several datasets as one, and states that need not be extracted again."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tiny import contract, fill, planned, sealed, sequences, states_of, unit_states

from storage import open_dataset
from storage.commit import publish_plan
from storage.errors import ContractMismatch, DatasetMissing, DatasetNotSealed, ShardCorrupt, StatehouseError
from storage.mix import Filter, Mixture, Part, open_mixture
from storage.objects import LocalStore, open_store
from storage.plan import WorkUnit, make_plan
from storage.reader import Dataset
from storage.reuse import Sources, fill_reusable, find_reusable, origins
from storage.seal import seal_dataset
from storage.states import States
from storage.writer import ShardWriter


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, pa.Table]:
    """The first 40 and the last 30 of 60 sequences: ten lie in both."""
    folder, table = tmp_path_factory.mktemp("two"), sequences()
    sealed(str(folder / "a"), table.slice(0, 40))
    sealed(str(folder / "b"), table.slice(30))
    return str(folder / "a"), str(folder / "b"), table


def assert_right(mixture: Mixture, indices: list[int]) -> None:
    ids = mixture.sequences["id"].to_pylist()
    for index, states in zip(indices, mixture.stream(indices), strict=True):
        assert states.id == ids[index]
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()
        assert mixture.tokens(index)[0].tolist() == states.token_ids.tolist()


def test_a_mixture_holds_every_sequence_once(two: tuple[str, str, pa.Table]) -> None:
    a, b, table = two
    mixture = open_mixture([a, b])
    assert len(mixture) == 60
    assert mixture.duplicates == 10
    assert sorted(mixture.sequences["id"].to_pylist()) == table["id"].to_pylist()
    assert_right(mixture, list(range(0, 60, 7)))
    assert mixture.read(-1).id == mixture.sequences["id"][59].as_py()
    with pytest.raises(IndexError):
        mixture.read(60)


def test_a_stream_reads_ahead_across_the_datasets(
    two: tuple[str, str, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In random order every sequence but a few lies in another dataset than the one before."""
    mixture = open_mixture(list(two[:2]))
    order = np.random.default_rng(0).permutation(60).tolist()
    assert len(set(mixture.sequences["dataset"].to_pylist())) == 2
    begun: list[int] = []
    real = Dataset.read

    def counted(self: Dataset, index: int, out: np.ndarray | None = None) -> States:
        begun.append(index)
        return real(self, index, out)

    monkeypatch.setattr(Dataset, "read", counted)
    stream = mixture.stream(order, ahead=6)
    for at, states in enumerate(stream):
        assert states.id == mixture.sequences["id"][order[at]].as_py()
        deadline = time.monotonic() + 30
        while len(begun) < min(60, at + 3) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert len(begun) >= min(60, at + 3)
        if at == 30:
            break
    stream.close()  # type: ignore[attr-defined]
    assert len(begun) <= 31 + 6


def test_filters_restrict_by_source_length_loss_and_ids(two: tuple[str, str, pa.Table], tmp_path: Path) -> None:
    a, b, table = two
    where = Filter(sources=("code", "chat"), min_length=50, max_length=200, min_loss_tokens=40)
    mixture = open_mixture([Part(a, where=where), b])
    kept = [row for row in mixture.sequences.to_pylist() if row["dataset"] == 0]
    assert kept
    for row in kept:
        assert row["source"] in ("code", "chat")
        assert 50 <= row["length"] <= 200
        assert row["loss_tokens"] >= 40
    ids = table["id"].to_pylist()[:5]
    (tmp_path / "ids.txt").write_text("\n".join(ids))
    for listed in (ids, str(tmp_path / "ids.txt")):
        assert open_mixture([Part(a, where=Filter(ids=listed))]).sequences["id"].to_pylist() == ids
        assert len(open_mixture([Part(a, where=Filter(without=listed))])) == 35


def test_a_filter_that_names_what_is_not_there_or_leaves_nothing_is_refused(two: tuple[str, str, pa.Table]) -> None:
    a, _, _ = two
    for where, message in (
        (Filter(sources=("mahts",)), "no source 'mahts'; it has chat, code, maths"),
        (Filter(ids=["0" * 32]), f"no sequence {'0' * 32}"),
        (Filter(min_length=10_000), "no sequence of 40 is left"),
        (Filter(ids="absent.txt"), "absent.txt: No such file"),
    ):
        with pytest.raises(StatehouseError, match=message):
            open_mixture([Part(a, where=where)])
    for parts, message in (([], "at least one"), ([Part(a, weight=0)], "weight 0")):
        with pytest.raises(StatehouseError, match=message):
            open_mixture(parts)


def test_contracts_that_differ_are_refused_field_by_field(two: tuple[str, str, pa.Table], tmp_path: Path) -> None:
    a, _, table = two
    plan = planned(str(tmp_path), table, config_hash="z", vocab_size=2000)
    fill(str(tmp_path), plan)
    seal_dataset(LocalStore(tmp_path), plan)
    with pytest.raises(ContractMismatch, match=r"config_hash: 'c' != 'z'; vocab_size: 1000 != 2000"):
        open_mixture([a, str(tmp_path)])
    planned(str(tmp_path / "unsealed"), table)
    with pytest.raises(DatasetNotSealed):
        open_mixture([a, str(tmp_path / "unsealed")])


def test_weights_say_how_often_an_epoch_passes_over_a_part(two: tuple[str, str, pa.Table]) -> None:
    a, b, _ = two
    mixture = open_mixture([Part(a, weight=2.0), Part(b, weight=0.25)])
    first = mixture.epoch(0, seed=3)
    assert first.tolist() == mixture.epoch(0, seed=3).tolist()
    assert first.tolist() != mixture.epoch(1, seed=3).tolist()
    assert first.tolist() != mixture.epoch(0, seed=4).tolist()
    times = Counter(first.tolist())
    assert {times[index] for index in range(40)} == {2}
    assert sum(times[index] for index in range(40, 60)) == 5
    over_four = Counter(index for epoch in range(4) for index in mixture.epoch(epoch).tolist())
    assert {over_four[index] for index in range(40, 60)} == {1}  # a quarter each time, all of them in four
    assert_right(mixture, first[:6].tolist())
    assert mixture.fingerprint != open_mixture([Part(a), Part(b, weight=0.25)]).fingerprint
    assert mixture.fingerprint == open_mixture([Part(a, weight=2.0), Part(b, weight=0.25)]).fingerprint


def test_what_is_reusable_is_found_by_content_and_only_under_an_equal_contract(
    two: tuple[str, str, pa.Table], tmp_path: Path
) -> None:
    a, b, table = two
    ids = table["id"].to_pylist()
    found = find_reusable([a, b], contract(engine="another", tp_size=8), ids)
    assert len(found) == 60
    assert found.skipped == {}
    assert (found.states(ids[35]) == states_of(ids[35], len(table["token_ids"][35]))).all()
    assert len(find_reusable([a], contract(), ids[30:50])) == 10
    none = find_reusable([a], contract(weights_hash="finetuned"), ids)
    assert len(none) == 0
    assert "weights_hash: 'w' != 'finetuned'" in none.skipped[a]
    with pytest.raises(DatasetMissing, match="no dataset here"):  # a slip of the pen costs GPU hours
        find_reusable([a, str(tmp_path)], contract(), ids)


def test_what_a_codec_rounded_serves_that_codec_only(tmp_path: Path) -> None:
    table = sequences()
    sealed(str(tmp_path), table, "bitround(3)")
    ids = table["id"].to_pylist()
    assert "has lost" in find_reusable([str(tmp_path)], contract(), ids).skipped[str(tmp_path)]
    again = find_reusable([str(tmp_path)], contract(), ids, codec="bitround(3)")
    assert len(again) == 60
    uri = str(tmp_path / "again")
    plan = planned(uri, table, "bitround(3)")
    fill_reusable(ShardWriter.from_uri(uri), plan, again)
    seal_dataset(open_store(uri), plan)
    one, two = (open_dataset(place).read(5) for place in (str(tmp_path), uri))
    assert (one.hidden.view(np.uint16) == two.hidden.view(np.uint16)).all()


def test_a_plan_is_filled_from_what_is_known_and_only_the_rest_is_extracted(
    two: tuple[str, str, pa.Table], uri: str
) -> None:
    a, b, table = two
    more = pa.concat_tables([table, sequences(20, 100, seed=7)]).sort_by("id")
    plan = make_plan(more, contract(), "lossless", shard_length=1024)
    publish_plan(open_store(uri), plan, more)
    reusable = find_reusable([a, b], plan.contract, plan.table["id"].to_pylist())
    assert len(reusable) == 60
    writer = ShardWriter.from_uri(uri)
    written = fill_reusable(writer, plan, reusable)
    assert fill_reusable(writer, plan, reusable) == written  # adopted
    sources, extracted = Sources(), 0  # as a worker has them: opened by URI
    lengths = plan.column("length")
    for unit in plan.units():
        known = reusable.known(plan, unit)
        assert (unit.shard in written) == (len(known) == len(unit.rows))
        if unit.shard in written:
            continue
        ids = plan.table["id"].take(unit.rows).to_pylist()
        wanted: list[str] = []

        def extract(
            which: list[int], ids: list[str] = ids, wanted: list[str] = wanted, unit: WorkUnit = unit
        ) -> np.ndarray:
            wanted += [ids[at] for at in which]
            return np.concatenate([states_of(ids[at], int(lengths[unit.rows[at]])) for at in which])

        bits = sources.complete(lengths[unit.rows].tolist(), known, extract)
        assert set(wanted) == set(ids) - set(reusable.places)
        assert (bits == unit_states(plan, unit)).all()
        extracted += len(wanted)
        if not writer.calibrated:
            writer.calibrate(bits)
        writer.write(unit.shard, bits, len(unit.rows), written_by=origins(known))
    assert extracted == 20
    seal_dataset(open_store(uri), plan)
    dataset = open_dataset(uri)
    for states in dataset.stream():
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()
    told = [row["receipt"] for row in dataset.shards_table().to_pylist() if "reused_from" in row["receipt"]]
    assert len(told) >= len(written)
    assert sum(json.loads(one)["written_by"]["reused_sequences"] for one in told) == 60


def test_states_of_a_dataset_that_was_sealed_anew_meanwhile_are_not_taken(two: tuple[str, str, pa.Table]) -> None:
    a, _, table = two
    found = find_reusable([a], contract(), table["id"].to_pylist())
    place = found.places[table["id"][0].as_py()]
    out = np.empty((len(table["token_ids"][0]), 4, 64), np.uint16)
    Sources().read(place, out)
    for changed in (replace(place, fingerprint="0" * 64), replace(place, row=place.row + 1)):
        with pytest.raises(ShardCorrupt, match="sealed anew"):
            Sources().read(changed, out)


def test_a_sequence_longer_than_a_shard_is_reused_whole(tmp_path: Path) -> None:
    table = sequences(6, 3000, seed=2)
    sealed(str(tmp_path / "a"), table)
    uri = str(tmp_path / "b")
    plan = make_plan(table, contract(), "lossless", shard_length=1024)
    publish_plan(open_store(uri), plan, table)
    reusable = find_reusable([str(tmp_path / "a")], plan.contract, plan.table["id"].to_pylist())
    assert sorted(fill_reusable(ShardWriter.from_uri(uri), plan, reusable)) == list(range(plan.geometry.shards))
    seal_dataset(open_store(uri), plan)
    for states in open_dataset(uri).stream():
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()
