"""The loader: what it packs is what was stored, it reads no further ahead than it may, and errors reach the trainer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import Tiny, make_dataset, make_verifier

from drafter.batch import pack
from drafter.loader import Loader
from drafter.loss import loss_rows
from drafter.recipe import LoaderSection, TrainingSection
from drafter.sources import Items
from drafter.verifier_cache import VerifierCache
from drafter.verifier_head import VerifierHead
from drafter.verifier_weights import read_verifier_weights
from storage import layout, open_dataset
from storage.errors import ShardCorrupt, StoreError
from storage.mix import Mixture, Part
from storage.reader import Dataset
from vocab.mapping import DraftVocab

CPU = torch.device("cpu")


def load(dataset: Dataset, wanted: Iterable[Any], training: TrainingSection | None = None, **options: Any) -> Loader:
    mixture = Mixture([dataset], [Part(dataset.uri)])
    section = LoaderSection(**{name: options.pop(name) for name in list(options) if name != "bad_shards"})
    items = Items.of(mixture, training or TrainingSection())
    return Loader(mixture, items, (np.array(one) for one in wanted), section, **options)


@pytest.mark.parametrize("decode", ["host", "device"])
def test_a_packed_batch_holds_the_stored_sequences_side_by_side(tiny: Tiny, decode: str) -> None:
    dataset = open_dataset(f"{tiny.root}/dataset")
    wanted = [[3, 0], [7], [1, 2, 4]]
    with load(dataset, wanted, decode=decode) as loader:
        batches = [batch.to(CPU) for batch in loader]
        counts = loader.counts()
    assert [list(batch.rows) for batch in batches] == wanted
    tokens = 0
    for batch in batches:
        start = 0
        for row, length in zip(batch.rows, batch.lengths, strict=True):
            states = dataset.read(row)
            part = slice(start, start + length)
            hidden = states.torch()
            assert torch.equal(batch.token_ids_T[part], torch.tensor(states.token_ids).long())
            assert torch.equal(batch.loss_mask_T[part], torch.tensor(states.loss_mask))
            assert torch.equal(batch.features_TF[part], hidden[:, :-1].flatten(1))
            assert torch.equal(batch.final_TD[part], hidden[:, -1])
            start += length
        assert start == len(batch.token_ids_T) == len(batch.features_TF)
        tokens += start
    assert (counts.sequences, counts.tokens, counts.padding, counts.bad_sequences) == (6, tokens, 0, 0)
    assert counts.bytes == tokens * dataset.plan.geometry.bytes_per_token
    assert counts.fetched_bytes > 0
    assert min(counts.fetch_s, counts.decode_s, counts.read_s, counts.waited_s) > 0
    assert counts.since(counts).tokens == 0


@pytest.mark.parametrize("decode", ["host", "device"])
def test_a_dataset_without_final_states_brings_the_verifiers_likeliest_tokens(tmp_path: Path, decode: str) -> None:
    verifier = make_verifier(tmp_path / "verifier")
    make_dataset(str(tmp_path / "dataset"), verifier, top_k=5)
    dataset = open_dataset(str(tmp_path / "dataset"))
    with load(dataset, [[3, 0], [7]], decode=decode) as loader:
        batches = [batch.to(CPU) for batch in loader]
    for batch in batches:
        assert batch.final_TD is None
        assert batch.top_k is not None
        start = 0
        for row, length in zip(batch.rows, batch.lengths, strict=True):
            part = slice(start, start + length)
            assert torch.equal(batch.features_TF[part], dataset.read(row).torch().flatten(1))
            said = dataset.teacher(row)
            found = batch.top_k[part]
            np.testing.assert_array_equal(found.ids_TK, said.topk_ids)
            np.testing.assert_array_equal(found.logits_TK, said.topk_logits)
            np.testing.assert_array_equal(found.logsumexp_T, said.logsumexp)
            start += length
    training = TrainingSection(max_length=9, long_sequences="split")
    items = Items.of(Mixture([dataset], [Part(dataset.uri)]), training)
    piece = int(np.flatnonzero(items.low)[0])
    with load(dataset, [[piece]], training) as loader:
        (batch,) = loader
    low, row = int(items.low[piece]), int(items.row[piece])
    np.testing.assert_array_equal(batch.top_k.ids_TK, dataset.teacher(row).topk_ids[low : low + batch.lengths[0]])


@given(st.integers(5, 50), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=10)
def test_pieces_of_long_sequences_put_together_are_the_sequences(tiny: Tiny, longest: int, seed: int) -> None:
    dataset = open_dataset(f"{tiny.root}/dataset")
    training = TrainingSection(max_length=longest, long_sequences="split")
    items = Items.of(Mixture([dataset], [Part(dataset.uri)]), training)
    order = np.random.default_rng(seed).permutation(len(items.row))
    found: dict[int, dict[int, torch.Tensor]] = {}
    with load(dataset, np.array_split(order, 7), training) as loader:
        for batch in loader:
            for item, part in zip(batch.rows, batch.states_TLH.split(batch.lengths), strict=True):
                found.setdefault(int(items.row[item]), {})[int(items.low[item])] = part.clone()
    for row in range(len(dataset)):
        whole = torch.cat([found[row][low] for low in sorted(found[row])])
        assert torch.equal(whole, dataset.read(row).torch())


def test_short_sequences_wait_for_a_far_store_together(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(f"{tiny.root}/dataset")
    fetch, waiting, most, lock = dataset.store.get_view, 0, 0, threading.Lock()

    def far(*args: Any) -> memoryview:
        nonlocal waiting, most
        with lock:
            waiting += 1
            most = max(most, waiting)
        time.sleep(0.1)
        with lock:
            waiting -= 1
        return fetch(*args)

    monkeypatch.setattr(dataset.store, "get_view", far)
    with load(dataset, [[row] for row in range(min(32, len(dataset)))]) as loader:
        assert sum(1 for _ in loader) >= 16
    assert most >= 12


def test_it_reads_ahead_but_no_further_than_it_may(tiny: Tiny) -> None:
    asked: list[int] = []
    dataset = open_dataset(f"{tiny.root}/dataset")
    lengths = dataset.sequences["length"].to_numpy()

    def micro_batches() -> Iterator[np.ndarray]:
        for row in range(20):
            asked.append(row)
            yield np.array([row])

    # Room for rows 1 and 2, not for 3: which is asked for, and waits.
    ahead = int(lengths[1:3].sum()) * dataset.plan.geometry.bytes_per_token
    with load(dataset, micro_batches(), ahead_bytes=ahead) as loader:
        assert loader.next() is not None
        deadline = time.monotonic() + 20
        while len(asked) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert len(asked) == 4
        assert loader._held <= ahead
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())
    with load(dataset, [[0], [1]], ahead_bytes=1) as loader:  # one is always read, however large
        assert [batch.rows for batch in loader] == [(0,), (1,)]


def test_an_error_while_reading_comes_out_of_next_again_and_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(f"{tiny.root}/dataset")
    read = dataset.read

    def broken(row: int, **options: Any) -> object:
        if row == 2:
            raise ShardCorrupt("hidden/c/0/1/0/0: bad checksum")
        return read(row, **options)

    monkeypatch.setattr(dataset, "read", broken)
    with load(dataset, [[0], [1, 2]]) as loader:
        assert loader.next() is not None
        for _ in range(2):
            with pytest.raises(ShardCorrupt, match="bad checksum"):
                loader.next()


@pytest.mark.parametrize("decode", ["host", "device"])
def test_a_damaged_shard_is_skipped_and_counted_if_that_is_wanted(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, decode: str
) -> None:
    import shutil

    uri = shutil.copytree(f"{tiny.root}/dataset", tmp_path / "dataset")
    dataset = open_dataset(str(uri))
    shards = dataset.sequences["shard"].to_numpy()
    path = uri / layout.shard_key(1)
    data = bytearray(path.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    path.write_bytes(data)
    order = [[row] for row in range(len(dataset))]
    with load(dataset, order) as loader, pytest.raises(ShardCorrupt, match=layout.shard_key(1)):
        list(loader)
    with (
        caplog.at_level(logging.WARNING, "statehouse"),
        load(dataset, order, decode=decode, bad_shards="skip") as loader,
    ):
        batches = [batch.to(CPU) for batch in loader]
        counts = loader.counts()
    bad = [batch.rows[0] for batch in batches if not batch.loss_mask_T.any()]
    assert bad
    assert set(shards[bad]) == {1}
    assert counts.bad_sequences == len(bad)
    assert counts.bad_tokens == sum(batch.lengths[0] for batch in batches if batch.rows[0] in bad)
    assert all(batches[row].features_TF.isfinite().all() for row in bad)
    assert f"{layout.shard_key(1)}" in caplog.text


def test_a_store_that_is_down_is_waited_for(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(f"{tiny.root}/dataset")
    read, failures = dataset.read, iter([True, True, False])

    def down(row: int, **options: Any) -> object:
        if next(failures, False):
            raise StoreError("s3://bucket: the store failed")
        return read(row, **options)

    monkeypatch.setattr(dataset, "read", down)
    monkeypatch.setattr("drafter.patience._FIRST_WAIT_S", 0.01)
    with load(dataset, [[0], [1]]) as loader:
        assert [batch.rows for batch in loader] == [(0,), (1,)]
    failures = iter([True] * 100)
    with load(dataset, [[0]], patience_s=0.05) as loader, pytest.raises(StoreError, match="the store failed"):
        loader.next()


def test_the_verifiers_argmax_is_computed_once_a_sequence_whatever_it_is_packed_with(tiny: Tiny) -> None:
    dataset = open_dataset(f"{tiny.root}/dataset")
    vocabulary = DraftVocab.from_ids(range(9), dataset.contract.vocab_size)
    head = VerifierHead(read_verifier_weights(tiny.verifier).lm_head_VD, vocabulary)
    cache = VerifierCache(head)
    states = [dataset.read(row) for row in range(4)]
    for rows in ([0, 1, 2], [2, 3, 0]):
        batch = cache.fill(pack(rows, [states[row] for row in rows]))
        assert batch.argmax_T is not None
        teacher_M = loss_rows(batch.loss_mask_T, batch.lengths, 1)[0].nonzero().squeeze(1) + 1
        assert len(teacher_M) > 0
        assert torch.equal(batch.argmax_T[teacher_M], head.argmax(batch.final_TD[teacher_M]))
    cache.head = None  # type: ignore[assignment]  # all four are known by now
    cache.fill(pack([3, 1], [states[3], states[1]]))
    both = VerifierCache(head, inside=True)
    for _ in range(2):
        filled = both.fill(pack([3, 1], [states[3], states[1]]))
        teacher_M = loss_rows(filled.loss_mask_T, filled.lengths, 1)[0].nonzero().squeeze(1) + 1
        assert filled.argmax_T is not None
        assert filled.inside_T is not None
        best, inside = head.argmax_and_inside(filled.final_TD[teacher_M])
        assert torch.equal(filled.argmax_T[teacher_M], best)
        torch.testing.assert_close(filled.inside_T[teacher_M], inside)
    spoilt, healthy = (pack([0], [states[0]]) for _ in range(2))
    spoilt = replace(spoilt, final_TD=torch.full_like(spoilt.final_TD, torch.nan))
    assert both.fill(spoilt).inside_T.isnan().any()
    assert both.fill(healthy).inside_T.isfinite().all()  # a shard was repaired
