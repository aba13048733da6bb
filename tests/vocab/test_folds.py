"""Cross-fitting, groups and intervals: by hand, against a direct recount, and in a simulation of their coverage."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vocab.bootstrap import ratio_interval
from vocab.counting import SideCounts, Split, Units, count_sides, cover_units, side_tables
from vocab.counts import TokenCounts, count_by_key, count_tokens
from vocab.coverage import held_out_coverage
from vocab.errors import VocabError
from vocab.folds import FoldCounts, cross_fit, fold_orders
from vocab.groups import GroupCoverage, bands
from vocab.inputs import Batch
from vocab.policies import policy_order
from vocab.split import fold_of, prefix_groups

quick = settings(deadline=None, max_examples=40)
VOCAB = 9
Row = tuple[str, str, list[tuple[int, bool]]]
rows_of = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from([f"g{i}" for i in range(12)]),
        st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), min_size=1, max_size=12),
    ),
    min_size=4,
    max_size=40,
)


def batch_of(rows: list[Row]) -> Batch:
    flat = [token for _, _, tokens in rows for token in tokens]
    return Batch(
        token_ids=np.array([token for token, _ in flat], np.int32),
        loss_mask=np.array([kept for _, kept in flat], np.bool_),
        lengths=np.array([len(tokens) for _, _, tokens in rows], np.int64),
        sources=[source for source, _, _ in rows],
        groups=[group for _, group, _ in rows],
        where="here",
    )


def counts_of(*folds: list[int]) -> FoldCounts:
    return FoldCounts(tuple(TokenCounts(np.array([row]), ("all",), len(row)) for row in folds), 0)


def test_counts_by_key_are_those_of_each_kind_alone() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 50, 200)
    ids, mask = random.integers(0, VOCAB, lengths.sum()), random.random(lengths.sum()) < 0.5
    keys = random.integers(0, 4, 200)
    found = np.zeros((5, VOCAB), np.int64)
    count_by_key(ids, mask, lengths, keys, list(found), VOCAB)
    of_token = np.repeat(keys, lengths)
    for key in range(5):
        assert found[key].tolist() == count_tokens(ids[of_token == key], mask[of_token == key], VOCAB).tolist()
    with pytest.raises(VocabError, match="expected 200 keys below 3"):
        count_by_key(ids, mask, lengths, keys, list(found[:3]), VOCAB)
    ids[-1] = 99
    with pytest.raises(VocabError, match=f"token id 99 at position {ids.size - 1}"):
        count_by_key(ids, mask, lengths, keys, list(found), VOCAB)


def test_each_fold_is_judged_by_the_others() -> None:
    # Without fold 0 the order is 1, 0, 2; without fold 1 it is 0, 2, 1.
    curves = cross_fit(counts_of([5, 1, 2], [2, 8, 0]), [1, 2])
    assert curves.by_fold.tolist() == [[1 / 8, 6 / 8], [2 / 10, 2 / 10]]
    assert curves.pooled.tolist() == [3 / 18, 8 / 18]
    assert curves.worst_source() == [("all", 3 / 18), ("all", 8 / 18)]
    # All together: order 1 (9), 0 (7), 2. Of its first id fold 0's choice has it, fold 1's has not.
    assert curves.stability.tolist() == [0.5, (2 / 2 + 1 / 2) / 2]


def test_folds_without_tokens_are_not_judged() -> None:
    assert counts_of([5, 1], [0, 0]).usable() == []
    with pytest.raises(VocabError, match="all tokens are in one fold"):
        cross_fit(counts_of([5, 1], [0, 0]), [1])
    assert np.isnan(cross_fit(counts_of([5, 1], [0, 0], [1, 1]), [1]).by_fold[1]).all()


@quick
@given(rows_of, st.randoms())
def test_counting_in_any_order_and_in_parts_gives_the_same_sides(rows: list[Row], random: Random) -> None:
    split = Split(folds=3, held_out=0.2, seed=1)
    whole = count_sides([batch_of(rows)], VOCAB, split)
    shuffled = list(rows)
    random.shuffle(shuffled)
    half = len(rows) // 2
    parts = count_sides([batch_of(shuffled[:half]), batch_of(shuffled[half:])], VOCAB, split)
    added = count_sides([batch_of(rows[:half])], VOCAB, split) + count_sides([batch_of(rows[half:])], VOCAB, split)
    for other in (parts, added):
        assert [fold.total().tolist() for fold in other.folds.folds] == [f.total().tolist() for f in whole.folds.folds]
        assert other.held_out.total().tolist() == whole.held_out.total().tolist()
    loss = sum(kept for _, _, tokens in rows for _, kept in tokens)
    assert whole.folds.total().tokens + whole.held_out.tokens == loss


@quick
@given(rows_of)
def test_group_coverage_adds_up_to_the_cross_fit(rows: list[Row]) -> None:
    split = Split(folds=3, held_out=0.2, seed=1)
    counts = count_sides([batch_of(rows)], VOCAB, split)
    if not counts.folds.usable():
        return
    sizes = [1, 3, 6, VOCAB]
    whole = policy_order("frequency", counts.folds.total())
    tables = side_tables(fold_orders(counts.folds), whole, sizes, split)
    half = len(rows) // 2
    units = cover_units([batch_of(rows[:half]), batch_of(rows[half:])], split, tables, len(sizes))
    for held in (False, True):
        coverage, by_source = units.side(held)
        covered, tokens = coverage.covered()
        part = counts.held_out if held else counts.folds.total()
        assert int(tokens.sum()) == part.tokens
        assert sum(int(tokens[rows_].sum()) for rows_ in by_source.values()) == part.tokens
        if held and part.tokens:
            expected = held_out_coverage(counts.folds.total().total(), part.total(), sizes)
            assert (covered.sum(axis=0) / tokens.sum()).tolist() == pytest.approx(expected.tolist())
        if not held and len(counts.folds.usable()) == 3:
            expected = cross_fit(counts.folds, sizes).pooled
            assert (covered.sum(axis=0) / tokens.sum()).tolist() == pytest.approx(expected.tolist())
    assert int(units.coverage.positions.sum()) == counts.folds.total().tokens + counts.held_out.tokens
    pairs = {(group, source) for source, group, _ in rows}
    assert len(units.group) == len(pairs)
    assert (units + Units.empty(len(sizes))).coverage.counts.tolist() == units.coverage.counts.tolist()


def test_bands_say_at_which_size_an_id_enters() -> None:
    assert bands(np.array([3, 0, 2, 1]), [1, 3]).tolist() == [1, 2, 1, 0]
    with pytest.raises(VocabError, match="ascending"):
        bands(np.arange(4), [3, 1])


def test_positions_are_those_in_the_response() -> None:
    tables = bands(np.arange(4), [1, 4])[None]
    found = GroupCoverage.empty(1, 2)
    mask = np.array([False, True, True, True, True, False, True, True])
    found.add(np.array([3, 0, 0, 1, 0, 0, 1, 0]), mask, np.array([5, 3]), np.zeros(2, int), tables, np.zeros(2, int))
    assert found.by_position() == [
        {"from": 0, "tokens": 2, "coverage": [0.5, 1.0]},
        {"from": 1, "tokens": 2, "coverage": [1.0, 1.0]},
        {"from": 2, "tokens": 2, "coverage": [0.5, 1.0]},
    ]


def test_folds_are_even_and_independent_of_the_hold_out() -> None:
    names = [f"group {i}" for i in range(20_000)]
    side = Split(folds=5, held_out=0.2, seed=3).side_of(names)
    sizes = np.bincount(side, minlength=6)
    assert abs(sizes[5] - 4000) < 250
    assert np.abs(sizes[:5] - 3200).max() < 250
    assert fold_of(["a", b"a"], 4, 0).tolist() == [fold_of(["a"], 4, 0)[0]] * 2
    with pytest.raises(VocabError, match="at least 2, found 1"):
        fold_of(names, 1, 0)


def test_rows_with_the_same_prompt_are_a_group() -> None:
    ids, mask = np.array([1, 2, 7, 1, 2, 8, 1, 3, 7, 5]), np.array([0, 0, 1, 0, 0, 1, 0, 0, 1, 0], bool)
    first, second, third, whole = prefix_groups(ids, mask, np.array([3, 3, 3, 1]))
    assert first == second
    assert len({first, third, whole}) == 3


def test_folds_made_differently_do_not_add() -> None:
    with pytest.raises(VocabError, match="expected 2 folds of seed 0, found 3"):
        counts_of([1], [1]) + counts_of([1], [1], [1])
    with pytest.raises(VocabError, match="one vocabulary"):
        counts_of([1], [1, 1])
    assert SideCounts.empty(4, Split()).held_out.tokens == 0


# ---- intervals -----------------------------------------------------------------------------------------------------


def test_the_interval_covers_the_truth_at_its_nominal_rate() -> None:
    random = np.random.default_rng(0)
    rounds, groups, truth, hits = 300, 120, 0.0, 0
    rate = random.beta(9, 1, 200_000)
    size = random.integers(5, 60, 200_000)
    truth = float((rate * size).sum() / size.sum())
    for trial in range(rounds):
        p, n = random.beta(9, 1, groups), random.integers(5, 60, groups)
        low, high = ratio_interval(random.binomial(n, p), n, resamples=400, seed=trial)
        hits += bool(low[0] <= truth <= high[0])
    assert 0.91 <= hits / rounds <= 0.985  # 95 % nominal; three standard errors of 300 trials are 3.8 points


def test_tokens_of_a_group_are_not_taken_for_independent() -> None:
    groups = np.repeat([0.0, 100.0], 50)
    low, high = ratio_interval(groups, np.full(100, 100.0))
    assert high[0] - low[0] > 0.15  # by tokens it would be 0.02


def test_intervals_of_several_sizes_and_of_too_few_groups() -> None:
    low, high = ratio_interval(np.array([[1, 2], [1, 2]]), np.array([2, 2]))
    assert (low.tolist(), high.tolist()) == ([0.5, 1.0], [0.5, 1.0])
    low, _ = ratio_interval(np.array([1, 0]), np.array([2, 0]))
    assert np.isnan(low).all()
    with pytest.raises(VocabError, match="found \\[2, 1\\] and \\[3\\]"):
        ratio_interval(np.array([1, 2]), np.array([1, 2, 3]))
    with pytest.raises(VocabError, match="expected a level"):
        ratio_interval(np.array([1]), np.array([1]), level=1.0)
