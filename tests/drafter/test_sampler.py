"""The sampler: every row once an epoch, the same batches for any number of workers, nothing above its budget."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.errors import DrafterError
from drafter.sampler import Epoch, Rows, cut, mixing, pack_rows, shuffled_rows

MICRO = 100


@st.composite
def corpora(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """lengths, shards, tokens of a global batch."""
    rows = draw(st.integers(1, 120))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = random.integers(1, draw(st.integers(1, MICRO)) + 1, rows)
    return lengths, random.integers(0, draw(st.integers(1, 12)), rows), draw(st.integers(1, 1000))


def epoch_of(corpus: tuple[np.ndarray, np.ndarray, int], seed: int = 0, epoch: int = 0) -> Epoch:
    lengths, shards, tokens = corpus
    rows = Rows.of_one(lengths, shards)
    return Epoch(seed, epoch, rows, global_batch_tokens=tokens, micro_batch_tokens=MICRO, window=3)


@given(corpora(), st.integers(0, 5), st.integers(0, 5))
@settings(deadline=None)
def test_every_row_comes_once_an_epoch_within_the_budgets(corpus: tuple, seed: int, number: int) -> None:
    lengths, _, tokens = corpus
    epoch = epoch_of(corpus, seed, number)
    batches = list(epoch)
    assert len(batches) == epoch.rows.updates_per_epoch(tokens)
    parts = [part for batch in batches for part in batch]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert all(0 < lengths[part].sum() <= MICRO for part in parts)
    share = lengths.sum() / len(batches)
    for batch in batches:  # a boundary is off by at most half of a row, unless rows are larger than batches
        size = sum(int(lengths[part].sum()) for part in batch)
        assert size <= share + lengths.max() or len(batches) == len(lengths) or lengths.max() > share


@given(corpora(), st.integers(1, 9))
@settings(deadline=None)
def test_any_number_of_workers_shares_out_the_same_batches(corpus: tuple, workers: int) -> None:
    epoch = epoch_of(corpus)
    for batch in epoch:
        dealt = [batch[rank::workers] for rank in range(workers)]
        assert sorted(int(row) for own in dealt for part in own for row in part) == sorted(
            int(row) for part in batch for row in part
        )


@given(corpora(), st.integers(0, 3))
@settings(deadline=None)
def test_a_batch_depends_on_seed_epoch_and_number_alone(corpus: tuple, number: int) -> None:
    once, again = epoch_of(corpus, 7, number), epoch_of(corpus, 7, number)
    for update in reversed(range(len(once))):  # resumed anywhere, in any order
        assert [part.tolist() for part in once[update]] == [part.tolist() for part in again[update]]


@given(corpora())
@settings(deadline=None)
def test_micro_batches_are_as_few_as_first_fit_needs_and_balanced(corpus: tuple) -> None:
    lengths = corpus[0]
    packed = pack_rows(np.arange(len(lengths)), lengths, MICRO)
    sizes = [int(lengths[part].sum()) for part in packed]
    assert len(packed) <= 2 * -(-int(lengths.sum()) // MICRO)
    assert max(sizes) - min(sizes) <= lengths.max()


def test_epochs_and_seeds_differ() -> None:
    corpus = np.full(60, 10), np.arange(60) // 5, 100
    orders = [epoch_of(corpus, seed, number).order.tolist() for seed, number in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order) for order in orders}) == 3


def test_a_window_of_shards_is_open_at_a_time_and_rows_mix_within_it() -> None:
    shards = np.repeat(np.arange(40), 25)
    order = shuffled_rows(np.random.default_rng(0), shards, window=8)
    opened = [set(shards[order[start : start + 200]]) for start in range(0, 1000, 200)]
    assert [len(one) for one in opened] == [8] * 5
    assert len(set().union(*opened)) == 40
    first = shards[order[:40]]  # a fifth of the window holds all its shards
    assert len(set(first)) == 8


def test_a_row_longer_than_a_micro_batch_is_refused_with_the_key_to_change() -> None:
    with pytest.raises(DrafterError, match=r"training.micro_batch_tokens is 100, .* 101 tokens; set .*=101 or more"):
        epoch_of((np.array([5, 101]), np.zeros(2), 50))
    with pytest.raises(DrafterError, match="no sequences to train on"):
        epoch_of((np.array([], np.int64), np.array([]), 50))


def test_a_million_sequences_give_their_first_batch_within_seconds() -> None:
    random = np.random.default_rng(0)
    rows = Rows.of_one(random.integers(100, 4000, 1_000_000), np.arange(1_000_000) // 4)
    began = time.monotonic()
    epoch = Epoch(0, 0, rows, global_batch_tokens=16384, micro_batch_tokens=8192)
    assert sum(len(part) for part in epoch[0]) > 0
    assert time.monotonic() - began < 20  # 0.5 s on an idle core


@st.composite
def mixtures(draw: st.DrawFn) -> Rows:
    """Up to three datasets with weights of quarters."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(4, 40), min_size=1, max_size=3))
    weights = tuple(draw(st.integers(1, 12)) / 4 for _ in sizes)
    parts = np.repeat(np.arange(len(sizes)), sizes)
    return Rows(random.integers(1, MICRO + 1, sum(sizes)), random.integers(0, 9, sum(sizes)), parts, weights)


@given(mixtures(), st.integers(0, 3), st.integers(1, 1000))
@settings(deadline=None)
def test_datasets_come_as_often_as_they_weigh(rows: Rows, seed: int, tokens: int) -> None:
    made = [Epoch(seed, number, rows, global_batch_tokens=tokens, micro_batch_tokens=MICRO) for number in range(4)]
    assert len({len(epoch) for epoch in made}) == 1  # so that an update's number says which epoch it is in
    weight_of = np.array(rows.weights)[rows.parts]
    total = np.zeros(len(rows.lengths), np.int64)
    for epoch in made:
        times = np.bincount(np.concatenate([part for batch in epoch for part in batch]), minlength=len(total))
        assert ((times >= np.floor(weight_of)) & (times <= np.ceil(weight_of))).all()
        total += times
    # In four epochs a share of quarters has walked through its dataset, to the rounding of each epoch's window.
    assert (abs(total - 4 * weight_of) <= 1).all()
    exact = np.array([(rows.parts == number).sum() % 4 == 0 for number in range(len(rows.weights))])[rows.parts]
    assert (total[exact] == (4 * weight_of)[exact]).all()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(1, 120))
def test_pieces_of_long_sequences_are_the_whole_of_them(lengths: list[int], longest: int) -> None:
    sequence, low, tokens = cut(np.array(lengths), longest)
    assert (tokens >= 1).all()
    assert (tokens <= longest).all()
    for number, length in enumerate(lengths):
        own = np.flatnonzero(sequence == number)
        assert len(own) == -(-length // longest)
        assert np.concatenate([np.arange(low[one], low[one] + tokens[one]) for one in own]).tolist() == list(
            range(length)
        )
        assert tokens[own].max() - tokens[own].min() <= 1


def test_a_window_mixes_sources_nearly_as_well_as_a_full_shuffle() -> None:
    # As a planner leaves them: shards of one source and near-equal lengths.
    random = np.random.default_rng(0)
    rows = 16_000
    shards = np.arange(rows) // 5
    source_of_shard = random.choice(4, rows // 5 + 1, p=[0.5, 0.3, 0.15, 0.05])
    made = Rows.of_one(random.integers(500, 3000, rows), shards)
    options = {"global_batch_tokens": 16384, "micro_batch_tokens": 8192}
    found = mixing(Epoch(0, 0, made, **options), source_of_shard[shards])
    assert found["entropy"] > 0.97
    assert abs(found["neighbours_alike"] - 1) < 0.06
    unmixed = mixing(Epoch(0, 0, made, **options, window=1), source_of_shard[shards])
    assert unmixed["entropy"] < 0.8


def test_weights_that_leave_nothing_are_refused() -> None:
    rows = Rows(np.array([5, 5]), np.array([0, 0]), np.array([0, 0]), (0.2,))
    with pytest.raises(DrafterError, match=r"training.datasets: weights \[0.2\]"):
        rows.updates_per_epoch(10)
