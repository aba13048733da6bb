"""The sampler: every row once an epoch, the same batches for any number of workers, nothing above its budget."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.errors import DrafterError
from drafter.sampler import Epoch, pack_rows, shuffled_rows, updates_per_epoch

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
    return Epoch(seed, epoch, lengths, shards, global_batch_tokens=tokens, micro_batch_tokens=MICRO, window=3)


@given(corpora(), st.integers(0, 5), st.integers(0, 5))
@settings(deadline=None)
def test_every_row_comes_once_an_epoch_within_the_budgets(corpus: tuple, seed: int, number: int) -> None:
    lengths, _, tokens = corpus
    epoch = epoch_of(corpus, seed, number)
    batches = list(epoch)
    assert len(batches) == updates_per_epoch(lengths, tokens)
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
    with pytest.raises(DrafterError, match=r"training.micro_batch_tokens is 100, .* 101 tokens .*=101"):
        epoch_of((np.array([5, 101]), np.zeros(2), 50))
    with pytest.raises(DrafterError, match="no sequences to train on"):
        epoch_of((np.array([], np.int64), np.array([]), 50))


def test_a_million_sequences_give_their_first_batch_within_seconds() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(100, 4000, 1_000_000)
    began = time.monotonic()
    epoch = Epoch(0, 0, lengths, np.arange(1_000_000) // 4, global_batch_tokens=16384, micro_batch_tokens=8192)
    assert sum(len(part) for part in epoch[0]) > 0
    assert time.monotonic() - began < 20  # 0.5 s on an idle core
