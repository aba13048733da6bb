"""Counts are exact, additive and checked: hand-made values, then properties against a plain Python count."""

from __future__ import annotations

from collections import Counter
from io import BytesIO
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import StatehouseError
from vocab.counts import TokenCounts, count_by_source, count_tokens
from vocab.errors import VocabError

quick = settings(deadline=None, max_examples=60)
VOCAB = 7
ids_and_masks = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), max_size=60)
sequences = st.lists(st.tuples(st.sampled_from("abc"), ids_and_masks), max_size=12)


def batch_of(rows: list[tuple[str, list[tuple[int, bool]]]]) -> TokenCounts:
    flat = [token for _, tokens in rows for token in tokens]
    ids = np.array([token for token, _ in flat], np.int32)
    mask = np.array([counted for _, counted in flat], np.bool_)
    return count_by_source(ids, mask, np.array([len(t) for _, t in rows]), [source for source, _ in rows], VOCAB)


def counts_of(values: list[list[int]], sources: tuple[str, ...]) -> TokenCounts:
    return TokenCounts(np.array(values, np.int64), sources, len(values[0]))


def test_only_positions_with_loss_are_counted() -> None:
    ids, mask = np.array([3, 0, 3, 1, 3]), np.array([True, True, False, False, True])
    assert count_tokens(ids, mask, 5).tolist() == [1, 0, 0, 2, 0]
    assert count_tokens(ids, None, 5).tolist() == [1, 1, 0, 3, 0]


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_type_counts_the_same(dtype: type) -> None:
    assert count_tokens(np.array([1, 1, 0], dtype), None, 3).tolist() == [1, 2, 0]


def test_nothing_counts_as_zeros() -> None:
    assert count_tokens(np.array([]), np.array([]), 3).tolist() == [0, 0, 0]


def test_blocks_add_up_and_positions_are_of_the_whole_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vocab.counts._BLOCK", 4)
    ids = np.array([0, 1, 2, 1, 1, 0, 2, 2, 2])
    assert count_tokens(ids, None, 3).tolist() == [2, 3, 4]
    with pytest.raises(VocabError, match="token id 9 at position 8"):
        count_tokens(np.append(ids[:8], 9), np.zeros(9, np.bool_), 3)


@pytest.mark.parametrize(("bad", "position"), [(-1, 2), (5, 2), (2**31, 2)])
def test_an_id_outside_the_vocabulary_is_named_with_its_position(bad: int, position: int) -> None:
    with pytest.raises(VocabError, match=f"token id {bad} at position {position} is outside .* of 5 ids"):
        count_tokens(np.array([4, 0, bad, 1]), None, 5)


@pytest.mark.parametrize(
    ("ids", "mask", "vocab_size", "named"),
    [
        (np.array([[1]]), None, 3, r"token_ids: .* shape \[1, 1\]"),
        (np.array([1.0]), None, 3, "token_ids: .* float64"),
        (np.array([1, 2]), np.array([True]), 3, r"loss_mask: expected bool of shape \[2\]"),
        (np.array([1, 2]), np.array([1, 0]), 3, "loss_mask: expected bool .* int64"),
        (np.array([1]), None, 0, "vocab_size"),
    ],
)
def test_wrong_arguments_are_named(ids: np.ndarray, mask: np.ndarray | None, vocab_size: int, named: str) -> None:
    with pytest.raises(VocabError, match=named):
        count_tokens(ids, mask, vocab_size)


def test_the_error_is_a_statehouse_error_and_a_value_error() -> None:
    assert issubclass(VocabError, StatehouseError)
    assert issubclass(VocabError, ValueError)


def test_sequences_are_counted_by_their_source() -> None:
    counts = count_by_source(np.array([0, 1, 1, 2, 2]), None, np.array([2, 0, 1, 2]), ["b", "c", "a", "b"], 3)
    assert counts.sources == ("a", "b", "c")
    assert counts.counts.tolist() == [[0, 1, 0], [1, 1, 2], [0, 0, 0]]
    assert counts.total().tolist() == [1, 2, 2]
    assert counts.of("b").tolist() == [1, 1, 2]
    with pytest.raises(VocabError, match="'d' was not counted"):
        counts.of("d")


@pytest.mark.parametrize(("lengths", "sources"), [([2, 2], ["a", "b"]), ([3], ["a", "b"]), ([4, -1], ["a", "b"])])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], sources: list[str]) -> None:
    with pytest.raises(VocabError, match=r"lengths: expected 2 lengths .* sum to 3 tokens"):
        count_by_source(np.array([0, 1, 1]), None, np.array(lengths), sources, 3)


def test_rows_are_kept_in_the_order_of_their_names() -> None:
    one, other = counts_of([[1, 2], [3, 4]], ("x", "b")), counts_of([[3, 4], [1, 2]], ("b", "x"))
    assert one == other
    assert one.hash == other.hash
    assert one.sources == ("b", "x")
    assert not one.counts.flags.writeable


def test_merging_unites_sources_and_adds_counts() -> None:
    merged = counts_of([[1, 2]], ("code",)) + counts_of([[5, 5], [1, 1]], ("maths", "code"))
    assert merged == counts_of([[2, 3], [5, 5]], ("code", "maths"))


def test_merging_different_vocabularies_is_refused() -> None:
    with pytest.raises(VocabError, match="over 2 ids and over 3"):
        counts_of([[1, 2]], ("a",)).merge(counts_of([[1, 2, 3]], ("a",)))


@pytest.mark.parametrize(
    ("counts", "sources", "vocab_size", "named"),
    [
        (np.zeros((1, 2), np.int64), ("a", "b"), 2, r"shape \[2, 2\]"),
        (np.zeros((1, 2), np.int64), ("a",), 3, r"shape \[1, 3\]"),
        (np.zeros((1, 2)), ("a",), 2, "float64"),
        (np.zeros((2, 2), np.int64), ("a", "a"), 2, "distinct"),
        (np.array([[0, -4]]), ("a",), 2, "token id 1 of source 'a' has -4"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    counts: np.ndarray, sources: tuple[str, ...], vocab_size: int, named: str
) -> None:
    with pytest.raises(VocabError, match=named):
        TokenCounts(counts, sources, vocab_size)


@quick
@given(sequences)
def test_counts_equal_a_plain_count(rows: list[tuple[str, list[tuple[int, bool]]]]) -> None:
    counts = batch_of(rows)
    expected = Counter((source, token) for source, tokens in rows for token, counted in tokens if counted)
    assert counts.sources == tuple(sorted({source for source, _ in rows}))
    for source in counts.sources:
        assert counts.of(source).tolist() == [expected[source, token] for token in range(VOCAB)]


@quick
@given(sequences)
def test_the_sum_of_counts_is_the_number_of_loss_tokens(rows: list[tuple[str, list[tuple[int, bool]]]]) -> None:
    counts = batch_of(rows)
    assert counts.tokens == counts.total().sum() == sum(counted for _, tokens in rows for _, counted in tokens)


@quick
@given(sequences, sequences)
def test_merging_equals_counting_everything_at_once(
    one: list[tuple[str, list[tuple[int, bool]]]], other: list[tuple[str, list[tuple[int, bool]]]]
) -> None:
    assert batch_of(one) + batch_of(other) == batch_of(one + other) == batch_of(other) + batch_of(one)
    assert batch_of(one) + TokenCounts.empty(VOCAB) == batch_of(one)


@quick
@given(sequences, st.randoms())
def test_the_order_of_sequences_does_not_matter(rows: list[tuple[str, list[tuple[int, bool]]]], random: Random) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert batch_of(shuffled).hash == batch_of(rows).hash


@quick
@given(sequences)
def test_parquet_gives_back_the_same_counts(rows: list[tuple[str, list[tuple[int, bool]]]]) -> None:
    counts, file = batch_of(rows), BytesIO()
    counts.to_parquet(file)
    back = TokenCounts.from_parquet(file.getvalue())
    assert back == counts
    assert back.hash == counts.hash
    assert TokenCounts.from_parquet(BytesIO(file.getvalue())) == counts


def test_parquet_rows_are_sparse_and_readable_by_anyone(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    counts_of([[0, 3, 0], [0, 0, 0], [2, 0, 1]], ("a", "empty", "b")).to_parquet(tmp_path / "counts.parquet")
    assert pq.read_table(tmp_path / "counts.parquet").to_pylist() == [
        {"source": "a", "token_id": 1, "count": 3},
        {"source": "b", "token_id": 0, "count": 2},
        {"source": "b", "token_id": 2, "count": 1},
    ]
    assert TokenCounts.from_parquet(tmp_path / "counts.parquet").sources == ("a", "b", "empty")


def test_a_parquet_file_with_one_changed_count_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "counts.parquet"
    counts_of([[5, 3]], ("a",)).to_parquet(path)
    table = pq.read_table(path)
    pq.write_table(table.set_column(2, "count", pa.array([5, 4])), path)
    with pytest.raises(VocabError, match=r"counts\.parquet: hash: expected .* damaged"):
        TokenCounts.from_parquet(path)
    pq.write_table(table.set_column(1, "token_id", pa.array([0, 2], pa.int32())), path)
    with pytest.raises(VocabError, match=r"counts\.parquet: rows name sources or token ids"):
        TokenCounts.from_parquet(path)
    pq.write_table(table.set_column(1, "token_id", pa.array([0, None], pa.int32())), path)
    with pytest.raises(VocabError, match=r"counts\.parquet: has rows with nothing in them"):
        TokenCounts.from_parquet(path)
    for column in (pa.array(["x", "y"]), pa.array([[1], [2]])):
        pq.write_table(table.set_column(1, "token_id", column), path)
        with pytest.raises(VocabError, match=r"counts\.parquet: not a file of token counts"):
            TokenCounts.from_parquet(path)
    pq.write_table(table.replace_schema_metadata(None), path)
    with pytest.raises(VocabError, match=r"counts\.parquet: not a file of token counts"):
        TokenCounts.from_parquet(path)


def test_files_that_are_missing_or_no_parquet_are_named(tmp_path: Path) -> None:
    with pytest.raises(VocabError, match=r"none\.parquet: cannot read .* No such file"):
        TokenCounts.from_parquet(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(VocabError, match=r"text\.parquet: not a file of token counts"):
        TokenCounts.from_parquet(tmp_path / "text.parquet")
    with pytest.raises(VocabError, match=r"cannot write token counts to .*No such file"):
        counts_of([[1]], ("a",)).to_parquet(tmp_path / "no" / "folder.parquet")
