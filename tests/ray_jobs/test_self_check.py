"""The self-check's arithmetic and its choice of sequences."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from ray_jobs.self_check import chosen, compare, require_small
from storage.errors import StatehouseError


def test_the_same_sequences_are_chosen_every_time_about_as_many_as_asked_and_at_least_one() -> None:
    ids = [f"{number:032x}" for number in range(20_000)]
    some = chosen(ids, 0.01)
    assert some == chosen(ids[::-1], 0.01)
    assert 140 < len(some) < 260
    assert chosen(ids[:5], 0.0001)
    assert chosen(ids, 0) == set()
    assert chosen(ids, 1.0) == set(ids)


def bits(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def test_errors_are_per_layer_and_drift_is_named() -> None:
    random = np.random.default_rng(0)
    one = random.normal(size=(7, 3, 16))
    two = one.copy()
    two[4, 1, 3] += 2.0
    check = compare({0: (bits(one), bits(one)), 5: (bits(two), bits(one))}, "another")
    assert (check.sequences, check.by) == (2, "another")
    assert check.relative_l2[0] == check.relative_l2[2] == 0
    assert check.max_error[1] == pytest.approx(2, abs=0.05)
    assert check.cosine[0] == pytest.approx(1)
    assert check.cosine[1] < 0.99
    require_small(check, 1.0, "shard 3")
    with pytest.raises(StatehouseError, match=r"self-check of shard 3: state 1 .*self_check_limit is 0.01"):
        require_small(check, 0.01, "shard 3")


def test_a_long_sequence_is_compared_in_little_memory_and_as_exactly() -> None:
    random = np.random.default_rng(1)
    one = random.normal(size=(1500, 3, 64))
    two = one + random.normal(size=one.shape) * 0.05
    mine, theirs = bits(one), bits(two)
    tracemalloc.start()
    check = compare({0: (mine, theirs)}, "another")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 * mine.size  # one copy in float64; it was four of them and more
    a, b = (side.view(ml_dtypes.bfloat16).astype(np.float64) for side in (mine, theirs))
    assert check.relative_l2 == pytest.approx(np.sqrt(((a - b) ** 2).sum((0, 2)) / (b**2).sum((0, 2))))
    assert check.max_error == pytest.approx(np.abs(a - b).max((0, 2)))
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert check.cosine == pytest.approx(cosine.min(0))
