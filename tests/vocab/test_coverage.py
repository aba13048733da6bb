"""Coverage curves against values worked out by hand, and what must hold for any counts."""

from __future__ import annotations

import json
from io import StringIO
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from vocab.counts import TokenCounts
from vocab.coverage import (
    CoverageTable,
    coverage_curve,
    default_sizes,
    frequency_order,
    held_out_coverage,
    lm_head_parameters,
    percent,
    unseen,
)
from vocab.errors import VocabError

quick = settings(deadline=None, max_examples=60)
some_counts = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any).map(lambda c: np.array(c, np.int64))


def two_counts(size: int) -> st.SearchStrategy[tuple[list[int], list[int]]]:
    one = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    return st.tuples(one, one)


def rendered(table: CoverageTable) -> str:
    file = StringIO()
    table.render(Console(file=file, width=100))
    return file.getvalue()


def test_the_curve_adds_up_falling_counts() -> None:
    # ids by frequency: 2 (50), 0 (30), 4 (15), 1 (5), 3 (0)
    assert coverage_curve(np.array([30, 5, 50, 0, 15]), [1, 2, 3, 4, 5]).tolist() == [0.5, 0.8, 0.95, 1.0, 1.0]
    assert coverage_curve(np.array([30, 5, 50, 0, 15]), [3, 1]).tolist() == [0.95, 0.5]


def test_ties_go_to_the_lower_id() -> None:
    assert frequency_order(np.array([2, 7, 2, 0, 7, 0])).tolist() == [1, 4, 0, 2, 3, 5]


def test_forced_ids_come_first() -> None:
    assert frequency_order(np.array([2, 7, 2, 0, 7, 0]), [5, 2, 5]).tolist() == [2, 5, 1, 4, 0, 3]


def test_held_out_tokens_are_covered_by_ids_chosen_on_others() -> None:
    chosen_on, held_out = np.array([9, 5, 1, 0]), np.array([1, 0, 2, 7])
    assert held_out_coverage(chosen_on, held_out, [1, 2, 3, 4]).tolist() == [0.1, 0.1, 0.3, 1.0]
    # id 3 is forced, then 0 and 1 by frequency
    assert held_out_coverage(chosen_on, held_out, [1, 2, 3], force_ids=[3]).tolist() == [0.7, 0.8, 0.8]


def test_each_source_has_a_curve_and_one_without_tokens_has_none() -> None:
    curves = held_out_coverage(np.array([3, 2, 1]), np.array([[1, 1, 2], [0, 0, 0], [4, 0, 0]]), [1, 2])
    assert curves[0].tolist() == [0.25, 0.5]
    assert np.isnan(curves[1]).all()
    assert curves[2].tolist() == [1.0, 1.0]


def test_unseen_ids_are_those_never_counted() -> None:
    assert unseen(np.array([0, 3, 0, 1])).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        (np.array([], np.int64), "expected .vocab. integers"),
        (np.array([[1]]), "expected .vocab. integers"),
        (np.array([0.5]), "float64"),
        (np.array([1, -2]), "-2 for token id 1"),
        (np.array([0, 0]), "no loss tokens"),
    ],
)
def test_unusable_counts_are_refused(counts: np.ndarray, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        coverage_curve(counts, [1])


@pytest.mark.parametrize("size", [0, -1, 3])
def test_sizes_outside_the_vocabulary_are_refused(size: int) -> None:
    with pytest.raises(VocabError, match=f"expected 1 to 2 .* found {size}"):
        coverage_curve(np.array([1, 1]), [1, size])


def test_held_out_counts_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(VocabError, match=r"counts_held_out: expected \[2\]"):
        held_out_coverage(np.array([1, 1]), np.array([1, 1, 1]), [1])
    with pytest.raises(VocabError, match="no loss tokens"):
        held_out_coverage(np.array([1, 1]), np.array([0, 0]), [1])
    with pytest.raises(VocabError, match="-1 for token id 0"):
        held_out_coverage(np.array([1, 1]), np.array([[-1, 1]]), [1])
    with pytest.raises(VocabError, match="force_ids: id 2 is outside"):
        held_out_coverage(np.array([1, 1]), np.array([1, 1]), [1], force_ids=[2])


def test_default_sizes_end_with_the_whole_vocabulary() -> None:
    assert default_sizes(163_840) == [1024, 2048, 4096, 8192, 16384, 32000, 32768, 49152, 65536, 131072, 163_840]
    assert default_sizes(49_152) == [1024, 2048, 4096, 8192, 16384, 32000, 32768, 49_152]
    assert default_sizes(100) == [100]


def test_the_heads_of_a_large_verifier_have_the_published_sizes() -> None:
    assert lm_head_parameters(32_000, 7_168) == 229_376_000
    assert lm_head_parameters(163_840, 7_168) == 1_174_405_120


def test_percentages_are_rounded_down() -> None:
    assert [percent(share) for share in (1.0, 0.99999, 0.98, 0.0, None)] == [
        "100.00 %",
        "99.99 %",
        "98.00 %",
        "0.00 %",
        "-",
    ]


@quick
@given(some_counts)
def test_coverage_rises_from_the_top_id_to_one(counts: np.ndarray) -> None:
    curve = coverage_curve(counts, range(1, counts.size + 1))
    assert curve[0] == counts.max() / counts.sum()
    assert curve[-1] == 1
    assert all(0 <= low <= high <= 1 for low, high in pairwise([0.0, *curve]))
    steps = np.diff(curve, prepend=0)
    assert np.all(steps[:-1] >= steps[1:] - 1e-12)


@quick
@given(some_counts)
def test_the_order_is_that_of_a_plain_sort(counts: np.ndarray) -> None:
    assert frequency_order(counts).tolist() == sorted(range(counts.size), key=lambda token: (-counts[token], token))


@quick
@given(some_counts, st.randoms())
def test_renaming_the_ids_does_not_change_the_curve(counts: np.ndarray, random: Random) -> None:
    shuffled = counts.tolist()
    random.shuffle(shuffled)
    sizes = range(1, counts.size + 1)
    assert coverage_curve(np.array(shuffled), sizes).tolist() == coverage_curve(counts, sizes).tolist()


@quick
@given(two_counts(12))
def test_no_choice_covers_more_than_the_held_out_text_s_own(counts: tuple[list[int], list[int]]) -> None:
    chosen_on, held_out = (np.array(part, np.int64) for part in counts)
    sizes = range(1, 13)
    curve = held_out_coverage(chosen_on, held_out, sizes)
    assert np.all(curve <= coverage_curve(held_out, sizes) + 1e-12)
    assert np.all(np.diff(curve) >= 0)
    assert curve[-1] == 1


def a_table(held_out: bool = True) -> CoverageTable:
    chosen_on = TokenCounts(np.array([[6, 0, 1, 0], [0, 3, 0, 0]]), ("chat", "code"), 4)
    other = TokenCounts(np.array([[1, 1, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0]]), ("chat", "code", "prose"), 4)
    return CoverageTable.measure(chosen_on, other if held_out else None, sizes=[4, 2, 2], hidden_size=10)


def test_the_table_holds_what_was_worked_out_by_hand() -> None:
    table = a_table()  # ids by frequency: 0 (6), 1 (3), 2 (1), 3 (0)
    assert (table.tokens, table.held_out_tokens, table.unseen_ids) == (10, 4, 1)
    small, full = table.rows
    assert (small.size, small.coverage, small.held_out, small.lm_head_parameters, small.share_of_full) == (
        2,
        0.9,
        0.5,
        20,
        0.5,
    )
    assert small.per_source == {"chat": 6 / 7, "code": 1.0}
    assert small.held_out_per_source == {"chat": 1.0, "code": 0.0, "prose": None}
    assert (full.size, full.coverage, full.held_out, full.lm_head_parameters) == (4, 1.0, 1.0, 40)


def test_the_table_is_plain_json() -> None:
    content = json.loads(json.dumps(a_table().to_dict(), allow_nan=False))
    assert content["vocab_size"] == 4
    assert content["rows"][0]["held_out_per_source"] == {"chat": 1.0, "code": 0.0, "prose": None}
    assert a_table(held_out=False).to_dict()["rows"][0]["held_out"] is None


def test_the_terminal_shows_every_size_and_source() -> None:
    text = rendered(a_table())
    for part in ("90.00 %", "50.00 %", "chat", "code", "prose", "held-out coverage by source", "1 never seen"):
        assert part in text
    text = rendered(a_table(held_out=False))
    assert "85.71 %" in text
    many = TokenCounts(np.ones((12, 3), np.int64), tuple(f"source-{i:02}" for i in range(12)), 3)
    text = rendered(CoverageTable.measure(many))
    assert all(name in text for name in many.sources)


def test_a_table_of_unusable_counts_is_refused() -> None:
    with pytest.raises(VocabError, match="no loss tokens"):
        CoverageTable.measure(TokenCounts.empty(4))
    with pytest.raises(VocabError, match="expected counts over 4 ids, found 5"):
        CoverageTable.measure(TokenCounts(np.ones((1, 4), np.int64), ("a",), 4), TokenCounts.empty(5))
    with pytest.raises(VocabError, match="hidden_size"):
        CoverageTable.measure(TokenCounts(np.ones((1, 4), np.int64), ("a",), 4), hidden_size=0)
