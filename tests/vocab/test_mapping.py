"""A draft vocabulary maps both ways without loss, and one that is not whole is never loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from vocab.coverage import coverage_curve, held_out_coverage
from vocab.errors import VocabError
from vocab.mapping import HEADER, TENSORS, DraftVocab

quick = settings(deadline=None, max_examples=60)
some_counts = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any).map(lambda c: np.array(c, np.int64))
COUNTS = np.array([0, 4, 9, 0, 4, 1, 2])


@st.composite
def counts_size_forced(draw: st.DrawFn) -> tuple[np.ndarray, int, list[int]]:
    counts = draw(some_counts)
    size = draw(st.integers(1, counts.size))
    forced = draw(st.lists(st.integers(0, counts.size - 1), max_size=size, unique=True))
    return counts, size, forced


def small() -> DraftVocab:
    return DraftVocab.from_counts(COUNTS, 3, provenance={"dataset": "a"})


def with_header(parts: dict[str, bytes], **changed: Any) -> dict[str, bytes]:
    return parts | {HEADER: json.dumps(json.loads(parts[HEADER]) | changed).encode()}


def with_tensors(parts: dict[str, bytes], **tensors: np.ndarray) -> dict[str, bytes]:
    return parts | {TENSORS: safetensors.numpy.save(tensors)}


def test_the_most_frequent_ids_are_chosen_and_sorted() -> None:
    vocab = DraftVocab.from_counts(COUNTS, 3)  # by frequency: 2, then 1 and 4 alike
    assert vocab.target_ids.tolist() == [1, 2, 4]
    assert vocab.d2t.tolist() == [1, 1, 2]
    assert vocab.t2d.tolist() == [False, True, True, False, True, False, False]
    assert (vocab.size, vocab.vocab_size) == (3, 7)
    assert vocab.draft_ids().tolist() == [-1, 0, 1, -1, 2, -1, -1]
    assert vocab.coverage(COUNTS) == 17 / 20


def test_ties_go_to_the_lower_id_and_ids_never_seen_fill_the_rest() -> None:
    assert DraftVocab.from_counts(COUNTS, 2).target_ids.tolist() == [1, 2]
    rest = DraftVocab.from_counts(COUNTS, 6)
    assert rest.target_ids.tolist() == [0, 1, 2, 4, 5, 6]
    assert rest.provenance == {"policy": "frequency", "forced": 0, "coverage": 1.0, "unseen": 1}


def test_forced_ids_take_the_places_of_the_least_frequent() -> None:
    vocab = DraftVocab.from_counts(COUNTS, 3, force_ids=[3, 0, 3])
    assert vocab.target_ids.tolist() == [0, 2, 3]
    assert vocab.provenance["forced"] == 2


def test_given_ids_are_sorted_and_repeated_ones_count_once() -> None:
    assert DraftVocab.from_ids([5, 1, 5], 6) == DraftVocab.from_ids(np.array([1, 5]), 6)
    assert DraftVocab.from_ids([5, 1], 6).d2t.tolist() == [1, 4]
    assert DraftVocab.from_ids([5, 1], 6) != DraftVocab.from_ids([5, 1], 7)


def test_the_full_vocabulary_has_no_offsets() -> None:
    full = DraftVocab.full(5)
    assert full.d2t.tolist() == [0] * 5
    assert full == DraftVocab.from_ids(range(5), 5)


@pytest.mark.parametrize("size", [0, -3, 8])
def test_sizes_outside_the_vocabulary_are_refused(size: int) -> None:
    with pytest.raises(VocabError, match=rf"expected 1 to 7 .* found {size}"):
        DraftVocab.from_counts(COUNTS, size)


def test_unusable_requests_are_refused() -> None:
    with pytest.raises(VocabError, match="no loss tokens"):
        DraftVocab.from_counts(np.zeros(4, np.int64), 2)
    with pytest.raises(VocabError, match="3 ids do not fit into a draft vocabulary of 2"):
        DraftVocab.from_counts(COUNTS, 2, force_ids=[0, 1, 2])
    with pytest.raises(VocabError, match="force_ids: id 7 is outside"):
        DraftVocab.from_counts(COUNTS, 2, force_ids=[7])
    with pytest.raises(VocabError, match="target_ids: id -1 is outside"):
        DraftVocab.from_ids([-1], 4)
    with pytest.raises(VocabError, match="expected 1 to 4"):
        DraftVocab.from_ids([], 4)
    with pytest.raises(VocabError, match="provenance"):
        DraftVocab.from_ids([1], 4, provenance={"not json": object()})
    with pytest.raises(VocabError, match="expected 7 ids, as the draft vocabulary, found 2"):
        small().coverage(np.array([1, 1]))


def test_arrays_that_disagree_are_refused() -> None:
    t2d = np.array([False, True, True, False])
    with pytest.raises(VocabError, match=r"draft id 1 to be target id 2, .* found 3"):
        DraftVocab(np.array([1, 2]), t2d)
    with pytest.raises(VocabError, match="expected 1 ids, as d2t has, found 2"):
        DraftVocab(np.array([1]), t2d)
    with pytest.raises(VocabError, match=r"d2t: expected \[draft_vocab\] int64, found int32"):
        DraftVocab(np.array([1, 1], np.int32), t2d)
    with pytest.raises(VocabError, match=r"t2d: expected \[vocab\] bool, found uint8"):
        DraftVocab(np.array([1, 1]), t2d.astype(np.uint8))


def test_the_arrays_cannot_be_changed_afterwards() -> None:
    offsets, mask = np.array([1, 1]), np.array([False, True, True])
    vocab = DraftVocab(offsets, mask)
    before = vocab.hash
    offsets[0] = mask[0] = 0
    assert vocab.hash == before
    with pytest.raises(ValueError, match="read-only"):
        vocab.d2t[0] = 0


@quick
@given(counts_size_forced())
def test_d2t_and_t2d_are_inverse(case: tuple[np.ndarray, int, list[int]]) -> None:
    counts, size, forced = case
    vocab = DraftVocab.from_counts(counts, size, force_ids=forced)
    drafts = np.arange(size)
    assert vocab.size == size
    assert np.array_equal(vocab.draft_ids()[drafts + vocab.d2t], drafts)
    assert np.array_equal(np.flatnonzero(vocab.t2d), vocab.target_ids)
    assert np.array_equal(vocab.draft_ids() >= 0, vocab.t2d)
    assert set(forced) <= set(vocab.target_ids.tolist())
    assert np.all(np.diff(vocab.target_ids) > 0)


@quick
@given(counts_size_forced())
def test_its_coverage_is_the_point_on_the_curve(case: tuple[np.ndarray, int, list[int]]) -> None:
    counts, size, forced = case
    assert DraftVocab.from_counts(counts, size).coverage(counts) == coverage_curve(counts, [size])[0]
    with_forced = DraftVocab.from_counts(counts, size, force_ids=forced)
    assert with_forced.coverage(counts) == held_out_coverage(counts, counts, [size], force_ids=forced)[0]
    assert with_forced.coverage(counts) == with_forced.provenance["coverage"]


@quick
@given(counts_size_forced())
def test_bytes_give_back_the_same(case: tuple[np.ndarray, int, list[int]]) -> None:
    counts, size, forced = case
    vocab = DraftVocab.from_counts(counts, size, force_ids=forced, provenance={"run": [1, "ä", None]})
    back = DraftVocab.from_bytes(vocab.to_bytes())
    assert back == vocab
    assert back.hash == vocab.hash
    assert back.provenance == vocab.provenance
    assert np.array_equal(back.d2t, vocab.d2t)
    assert np.array_equal(back.t2d, vocab.t2d)
    assert back.to_bytes() == vocab.to_bytes()


def test_the_same_ids_from_elsewhere_are_the_same_vocabulary() -> None:
    assert small() == DraftVocab.from_ids([4, 2, 1], 7, provenance={"from": "a colleague"})
    assert len({small(), DraftVocab.from_ids([4, 2, 1], 7)}) == 1
    assert small().hash == "442107c4de4cb512da51d2719a72bba74d10154ac2d8bff9355ce47b900247e5"


def test_a_folder_gives_back_the_same(tmp_path: Path) -> None:
    small().save(tmp_path / "new" / "folder")
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [HEADER, TENSORS]
    assert DraftVocab.load(tmp_path / "new" / "folder") == small()
    tensors = safetensors.numpy.load_file(tmp_path / "new" / "folder" / TENSORS)
    assert {name: (array.dtype.name, array.shape) for name, array in tensors.items()} == {
        "d2t": ("int64", (3,)),
        "t2d": ("bool", (7,)),
    }


def test_a_folder_can_be_written_again(tmp_path: Path) -> None:
    small().save(tmp_path)
    DraftVocab.full(9).save(tmp_path)
    assert DraftVocab.load(tmp_path) == DraftVocab.full(9)


def test_files_of_two_vocabularies_are_refused(tmp_path: Path) -> None:
    small().save(tmp_path)
    (tmp_path / TENSORS).write_bytes(DraftVocab.from_ids([1, 2, 5], 7).to_bytes()[TENSORS])
    with pytest.raises(VocabError, match=r"draft_vocab\.json: hash: expected .* not of one draft vocabulary; make"):
        DraftVocab.load(tmp_path)


@pytest.mark.parametrize("name", [TENSORS, HEADER])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    small().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(VocabError, match=rf"{tmp_path}/{name}: expected this file, found none"):
        DraftVocab.load(tmp_path)


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VocabError, match=r"cannot write the draft vocabulary to .*/file"):
        small().save(tmp_path / "file")
    with pytest.raises(VocabError, match=r"file/draft_vocab\.safetensors: cannot read it"):
        DraftVocab.load(tmp_path / "file")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"format": "other-1"}, "format: expected statehouse-draft-vocab-1, found other-1"),
        ({"vocab_size": "7"}, "vocab_size: expected int, found '7'"),
        ({"draft_vocab_size": True}, "draft_vocab_size: expected int, found True"),
        ({"hash": None}, "hash: expected str, found None"),
        ({"provenance": []}, r"provenance: expected dict, found \[\]"),
        ({"vocab_size": 8}, r"t2d: expected shape \[8\] \(vocab_size in draft_vocab.json\), found \[7\]"),
        ({"draft_vocab_size": 4}, r"d2t: expected shape \[4\] \(draft_vocab_size in .*\), found \[3\]"),
        ({"hash": "0" * 64}, "hash: expected .* found 0000"),
    ],
)
def test_a_wrong_field_of_the_header_is_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(VocabError, match=named):
        DraftVocab.from_bytes(with_header(small().to_bytes(), **changed))


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_a_header_that_is_no_object_is_refused(header: bytes) -> None:
    with pytest.raises(VocabError, match=r"s3://bucket/vocab/draft_vocab\.json"):
        DraftVocab.from_bytes(small().to_bytes() | {HEADER: header}, "s3://bucket/vocab/")


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"d2t": small().d2t}, r"expected tensors \['d2t', 't2d'\], found \['d2t'\]"),
        ({"d2t": small().d2t, "t2d": small().t2d, "x": small().d2t}, r"found \['d2t', 't2d', 'x'\]"),
        ({"d2t": small().d2t.astype(np.int32), "t2d": small().t2d}, "d2t: expected int64, found int32"),
        ({"d2t": small().d2t, "t2d": small().t2d.astype(np.uint8)}, "t2d: expected bool, found uint8"),
        ({"d2t": small().d2t[None], "t2d": small().t2d}, r"d2t: expected shape \[3\] .* found \[1, 3\]"),
        ({"d2t": small().target_ids, "t2d": small().t2d}, "d2t: .* d2t holds offsets"),
        ({"d2t": small().d2t, "t2d": ~small().t2d}, "t2d: expected 3 ids, as d2t has, found 4"),
    ],
)
def test_wrong_tensors_are_named(tensors: dict[str, np.ndarray], named: str) -> None:
    with pytest.raises(VocabError, match=named):
        DraftVocab.from_bytes(with_tensors(small().to_bytes(), **tensors))


@quick
@given(st.data())
def test_a_damaged_file_never_loads_as_another_vocabulary(data: st.DataObject) -> None:
    parts = small().to_bytes()
    whole = parts[TENSORS]
    at = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    flipped = whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]
    try:
        loaded = DraftVocab.from_bytes(parts | {TENSORS: flipped})
    except VocabError:
        return
    assert np.array_equal(loaded.d2t, small().d2t)
    assert np.array_equal(loaded.t2d, small().t2d)


def test_any_flipped_bit_of_the_ids_is_refused() -> None:
    parts = small().to_bytes()
    whole = parts[TENSORS]
    start = 8 + int.from_bytes(whole[:8], "little")
    for at in range(start, len(whole)):
        for bit in range(8):
            flipped = whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]
            with pytest.raises(VocabError):
                DraftVocab.from_bytes(parts | {TENSORS: flipped})


@pytest.mark.parametrize("name", [TENSORS, HEADER])
def test_a_file_cut_short_is_refused(name: str) -> None:
    parts = small().to_bytes()
    for length in range(len(parts[name]) - 2):
        with pytest.raises(VocabError, match=name):
            DraftVocab.from_bytes(parts | {name: parts[name][:length]})


def test_a_large_vocabulary_makes_the_round_trip(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).zipf(1.2, 163_840).astype(np.int64).clip(0, 10**9)
    vocab = DraftVocab.from_counts(counts, 32_000, force_ids=range(163_584, 163_840))
    vocab.save(tmp_path)
    assert DraftVocab.load(tmp_path) == vocab
    assert vocab.t2d[163_584:].all()
