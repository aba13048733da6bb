"""The side of a sequence depends on its prompt group and the seed, and on nothing else."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vocab.errors import VocabError
from vocab.split import held_out_mask

quick = settings(deadline=None, max_examples=60)
groups = st.lists(st.text(max_size=4), max_size=40)
shares = st.floats(0, 1)
seeds = st.integers(-(2**70), 2**70)


@quick
@given(groups, shares, seeds)
def test_a_group_falls_on_one_side(names: list[str], share: float, seed: int) -> None:
    mask = held_out_mask(names + names, share, seed)
    sides: dict[str, set[bool]] = {}
    for name, side in zip(names + names, mask.tolist(), strict=True):
        sides.setdefault(name, set()).add(side)
    assert all(len(side) == 1 for side in sides.values())


@quick
@given(groups, shares, seeds, st.randoms())
def test_order_and_company_do_not_matter(names: list[str], share: float, seed: int, random: Random) -> None:
    alone = {name: bool(held_out_mask([name], share, seed)[0]) for name in names}
    shuffled = list(names)
    random.shuffle(shuffled)
    assert held_out_mask(shuffled, share, seed).tolist() == [alone[name] for name in shuffled]


@quick
@given(groups, shares, shares, seeds)
def test_a_larger_share_holds_out_the_same_and_more(names: list[str], one: float, other: float, seed: int) -> None:
    small, large = (held_out_mask(names, share, seed) for share in sorted([one, other]))
    assert np.all(large | ~small)


@quick
@given(groups, seeds)
def test_no_share_holds_out_none_and_the_whole_all(names: list[str], seed: int) -> None:
    assert not held_out_mask(names, 0, seed).any()
    assert held_out_mask(names, 1, seed).all()


@quick
@given(
    st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4), min_size=1), seeds
)
def test_text_bytes_and_numpy_arrays_give_the_same(names: list[str], seed: int) -> None:
    expected = held_out_mask(names, 0.5, seed).tolist()
    raw = [name.encode() for name in names]
    for same in (raw, np.array(names), np.array(raw), np.array(names, object)):
        assert held_out_mask(same, 0.5, seed).tolist() == expected


def test_binary_ids_that_end_in_nul_survive_numpy() -> None:
    raw = [bytes([i, 0]) for i in range(200)]
    assert held_out_mask(raw, 0.5, 0).tolist() == held_out_mask(np.array(raw), 0.5, 0).tolist()


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_about_that_share_of_groups_is_held_out(share: float) -> None:
    found = held_out_mask([f"group {i}" for i in range(20_000)], share, seed=3).mean()
    assert abs(found - share) < 4 * np.sqrt(share * (1 - share) / 20_000)


def test_seeds_give_different_splits() -> None:
    names = [str(i) for i in range(1000)]
    assert 0.15 < (held_out_mask(names, 0.5, 1) & held_out_mask(names, 0.5, 2)).mean() < 0.35


def test_the_split_never_changes_between_versions() -> None:
    sides = held_out_mask([f"group {i}" for i in range(32)], 0.5, 0).tolist()
    assert "".join("-x"[side] for side in sides) == "x---x--x--x-x-x--xx-xx-x--x--xx-"


def test_wrong_arguments_are_named() -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(VocabError, match="share: expected a number from 0 to 1"):
            held_out_mask(["a"], share, 0)
    with pytest.raises(VocabError, match="found NoneType at position 1"):
        held_out_mask(np.array(["a", None], object), 0.5, 0)
    with pytest.raises(VocabError, match="seed"):
        held_out_mask(["a"], 0.5, 2**200)
