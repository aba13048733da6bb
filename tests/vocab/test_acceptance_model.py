"""The bracket against hand-worked chains; the fit against walks whose truth is known, on rounds it was not fitted on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vocab.acceptance_model import (
    AcceptanceModel,
    Walks,
    bracket,
    chain_from_tau,
    join_walks,
    leading_matches,
    load_walks,
    rescued,
    tau_of,
    walks_bytes,
    walks_of,
)
from vocab.errors import VocabError

quick = settings(deadline=None, max_examples=60)
chains = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(np.array)


def test_tau_adds_up_survivals() -> None:
    assert tau_of(np.array([0.5, 0.5, 0.5]), 3) == 1 + 0.5 + 0.25 + 0.125
    assert tau_of(np.array([1.0, 0.0, 1.0]), 3) == 2.0


def test_a_chain_gives_back_the_taus_it_was_made_from() -> None:
    chain = chain_from_tau({1: 1.7, 3: 2.3}, 5)
    assert tau_of(chain, 1) == pytest.approx(1.7)
    assert tau_of(chain, 3) == pytest.approx(2.3)
    assert chain[1] == chain[2] == chain[4]
    assert chain_from_tau({3: 2.0}, 3)[0] == pytest.approx(0.5437, abs=1e-4)
    assert chain_from_tau({2: 1.0}, 4).max() < 1e-9
    assert chain_from_tau({2: 3.0}, 4).min() == pytest.approx(1)


def test_the_storys_bracket_is_between_nothing_and_one_point_four_percent() -> None:
    found = bracket(chain_from_tau({3: 2.0}, 3), 0.983, 3)
    assert found.none == pytest.approx(2.0)
    assert 1 - found.average / found.none == pytest.approx(0.014, abs=0.0005)
    assert found.hardest < found.average


def test_a_bracket_by_hand() -> None:
    found = bracket(np.array([0.5, 0.5]), 0.8, 2)
    assert found.average == pytest.approx(1 + 0.4 + 0.16)
    assert found.hardest == pytest.approx(1 + 0.3 + 0.09)
    assert bracket(np.array([0.1]), 0.5, 1).hardest == 1.0


@quick
@given(chains, st.floats(0, 1))
def test_a_bracket_is_ordered_and_closes_at_full_coverage(chain: np.ndarray, coverage: float) -> None:
    found = bracket(chain, coverage, chain.size)
    assert 1 <= found.hardest <= found.average + 1e-9
    assert found.average <= found.none + 1e-9
    whole = bracket(chain, 1.0, chain.size)
    assert whole.none == whole.average == pytest.approx(whole.hardest)


@pytest.mark.parametrize(
    ("taus", "named"),
    [
        ({}, "expected {draft length"),
        ({3: 0.9}, "expected {draft length"),
        ({3: 4.1}, "expected {draft length"),
        ({0: 1.0}, "expected {draft length"),
        ({1: 1.8, 2: 1.5}, "expected tau to rise"),
        ({1: 1.1, 2: 2.0}, "1 more drafts cannot add"),
    ],
)
def test_taus_that_cannot_be_are_refused(taus: dict[int, float], named: str) -> None:
    with pytest.raises(VocabError, match=named):
        chain_from_tau(taus, 3)


# ---- walks ---------------------------------------------------------------------------------------------------------


def test_walks_follow_kept_drafts_and_the_verifiers_own_token() -> None:
    # tokens   0  1  2  3  4  5  6 ; the response is 2..6; chains after tokens 2 and 5 start rounds
    ids, mask = np.arange(10, 17), np.array([0, 0, 1, 1, 1, 1, 1], bool)
    accepted = np.array([-1, -1, 2, 0, 0, 1, 0])
    walks = walks_of(accepted, ids, mask, 2)
    assert walks is not None
    assert walks.matched.tolist() == [2, 1]
    assert walks.targets.tolist() == [[13, 14], [16, -1]]
    assert walks.tau() == 1 + 3 / 2
    assert walks.tau(1) == 2.0  # drafts beyond the first are cut off, the rounds stay
    assert walks.survival().tolist() == [1.0, 0.5]
    assert walks_of(accepted, ids, np.zeros(7, bool), 2) is None


def test_a_restricted_vocabulary_cuts_a_round_at_its_first_id_outside() -> None:
    walks = Walks(np.array([3, 2, 0]), np.array([[1, 2, 3], [2, 4, 1], [4, 1, 1]]))
    t2d = np.array([False, True, True, False, False])
    assert walks.restricted(t2d).matched.tolist() == [2, 1, 0]
    assert walks.restricted(np.ones(5, bool)).matched.tolist() == [3, 2, 0]


def test_what_may_be_rescued_is_a_miss_outside_with_a_target_inside() -> None:
    targets = np.array([[1, 2], [1, 2], [3, 2], [1, 2]])
    walks = Walks(np.array([0, 1, 0, 2]), targets, np.array([3, 1, 3, -1]))
    t2d = np.array([False, True, True, False])
    assert rescued(walks, t2d) == 0.25  # only the first: the second proposed inside, the third's target is outside
    with pytest.raises(VocabError, match="give `proposals`"):
        rescued(Walks(np.array([0]), np.array([[1]])), t2d)


def test_walks_are_saved_and_joined(tmp_path: Path) -> None:
    one, other = Walks(np.array([1]), np.array([[3, 4]])), Walks(np.array([2]), np.array([[5, 6]]), np.array([-1]))
    both = join_walks([one, other])
    assert both.matched.tolist() == [1, 2]
    (tmp_path / "walks.npz").write_bytes(walks_bytes(other))
    again = load_walks(str(tmp_path / "walks.npz"))
    assert again.targets.tolist() == [[5, 6]]
    assert again.proposals is not None
    for wrong in (b"x", b"", walks_bytes(other)[:-40]):
        (tmp_path / "bad.npz").write_bytes(wrong)
        with pytest.raises(VocabError, match=r"bad\.npz: expected walks"):
            load_walks(str(tmp_path / "bad.npz"))
    with pytest.raises(VocabError, match=r"none\.npz: expected walks .* No such file"):
        load_walks(str(tmp_path / "none.npz"))
    with pytest.raises(VocabError, match="parts of one draft length"):
        join_walks([one, Walks(np.array([0]), np.array([[1]]))])


@pytest.mark.parametrize(
    ("matched", "targets", "named"),
    [
        ([1], [[1], [2]], r"matched \[rounds\] and targets"),
        ([], np.zeros((0, 2)), "at least one round"),
        ([3], [[1, 2]], "round 0: expected 0 to 2 kept drafts, found 3"),
        ([2], [[1, -1]], "round 0: expected 0 to 1 kept drafts, found 2"),
        ([-1], [[1, 1]], "found -1"),
    ],
)
def test_walks_that_do_not_fit_are_refused(matched: list[int], targets: list[list[int]], named: str) -> None:
    with pytest.raises(VocabError, match=named):
        Walks(np.array(matched, np.int64), np.array(targets, np.int64))


def simulated(rounds: int, seed: int, k: int = 4, vocab: int = 2000) -> tuple[Walks, np.ndarray]:
    """Rounds of a drafter that hits frequent tokens more often, and the counts of the ids. Rare tokens come in runs."""
    random = np.random.default_rng(seed)
    share = 1 / np.arange(1, vocab + 1) ** 1.1
    share /= share.sum()
    first = random.choice(vocab, rounds, p=share)
    targets = np.empty((rounds, k), np.int64)
    targets[:, 0] = first
    for step in range(1, k):
        fresh = random.choice(vocab, rounds, p=share)
        near = np.minimum(targets[:, step - 1] + random.integers(0, 50, rounds), vocab - 1)
        targets[:, step] = np.where(random.random(rounds) < 0.3, near, fresh)
    chance = 0.85 * (1 + targets) ** -0.12 * 0.9 ** np.arange(k)
    hits = random.random((rounds, k)) < chance
    return Walks(np.cumprod(hits, axis=1).sum(axis=1), targets), np.round(share * 1e6).astype(np.int64) + 1


@pytest.mark.parametrize("size", [100, 400, 1000])
def test_a_fit_predicts_restricted_walks_it_never_saw_within_three_percent(size: int) -> None:
    walks, counts = simulated(20_000, 0)
    fresh, _ = simulated(20_000, 1)
    model = AcceptanceModel.fit(walks, counts)
    t2d = np.arange(counts.size) < size
    for k in (1, 2, 4):
        truth = fresh.restricted(t2d).tau(k)
        assert model.tau(t2d, k, counts=counts) == pytest.approx(truth, rel=0.03)
    bounds = bracket(chain_from_tau({k: fresh.tau(k) for k in (1, 2, 3, 4)}, 4), counts[:size].sum() / counts.sum(), 4)
    assert bounds.average < fresh.restricted(t2d).tau() < bounds.none


def test_a_fit_gives_back_the_full_drafters_tau() -> None:
    walks, counts = simulated(20_000, 2)
    model = AcceptanceModel.fit(walks, counts)
    assert model.tau(np.ones(counts.size, bool), 4) == pytest.approx(walks.tau(), rel=0.01)
    assert tau_of(model.chain(4), 4) == pytest.approx(walks.tau(), rel=0.01)
    assert model.tau(np.zeros(counts.size, bool), 4) == 1.0


def test_a_fit_rises_with_the_vocabulary() -> None:
    walks, counts = simulated(3_000, 3)
    model = AcceptanceModel.fit(walks, counts)
    taus = [model.tau(np.arange(counts.size) < size, 4, counts=counts) for size in (0, 10, 100, 500, 2000)]
    assert all(low <= high for low, high in pairwise(taus))


def test_a_fit_refuses_what_it_has_not_seen() -> None:
    walks, counts = simulated(100, 4)
    model = AcceptanceModel.fit(walks, counts)
    with pytest.raises(VocabError, match=r"expected 1 to 4 \(the fit's\), found 5"):
        model.tau(np.ones(counts.size, bool), 5)
    with pytest.raises(VocabError, match="outside the 10 counted ids"):
        AcceptanceModel.fit(walks, counts[:10])


def test_leading_matches_stop_at_the_first_miss() -> None:
    assert leading_matches([1, 2, 9, 4], [1, 2, 3, 4]) == 2
    assert leading_matches([9], [1]) == 0
