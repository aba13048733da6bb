"""What a worker looks for in states before they are stored."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ray_jobs.worker import _not_finite


def test_every_bit_pattern_is_told_finite_or_not() -> None:
    for pattern in range(1 << 16):
        bits = np.array([[[pattern, 0x3F80, 0xBF80, 0x8000]]], np.uint16)
        finite = bool(np.isfinite(bits.view(ml_dtypes.bfloat16).astype(np.float32)).all())
        assert bool(_not_finite({0: bits})) == (not finite), hex(pattern)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_row_is_named_and_the_values_counted(value: float) -> None:
    states = np.ones((3, 2, 4), ml_dtypes.bfloat16)
    states[1, 0, :2] = value
    assert _not_finite({4: np.zeros((1, 2, 4), np.uint16), 7: states.view(np.uint16)}) == {
        7: "2 of 24 values are NaN or infinite"
    }
