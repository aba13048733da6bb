"""The inner loops over bf16 bit patterns, compiled where numba is installed, numpy otherwise.

`pip install statehouse[fast]` brings numba. It earns its 170 MB where datasets are read for training: joining the planes
costs 0.03 CPU s/GB compiled and 0.38 in numpy, which makes as many passes over memory as the formula has operators, and
a shard is split, its norms summed and its NaN counted in one pass instead of eight. Both give equal bits; a test compares
them. The compiled loops release the GIL and are kept in numba's cache, so a process pays about a second once.

Arrays are C-contiguous. R: rows (tokens), V = L * H: values of a row, L: layers, H: hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

# Rows converted at once when statistics are taken in numpy: bounds the temporary float64 copy to about 32 MiB.
_BLOCK_VALUES = 1 << 22


@dataclass(frozen=True)
class Kernels:
    """compiled: whether these are the numba ones.

    join_exponent(p0 [R, V] uint8, p1, offset [V] uint8, out [R, V] uint16): the inverse of split_exponent.
    split_exponent(bits [R, V] uint16, offset [V], p0, p1): (exponent - offset) mod 256, and sign << 7 | mantissa.
    join_bytes / split_bytes(...): high and low byte, without an offset.
    join_stored(p0 [R, V], frame [n] uint8, first, offset, out): join_exponent, with p1 as it lies in a zstd frame of raw
    blocks (`codecs.zstd.is_stored`), from byte `first` of the plane on. None where it would not be worth while.
    statistics(bits [R, L, H]) -> (sums of squares of the finite values [L] float64, finite values [L] int64).
    """

    compiled: bool
    join_exponent: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
    split_exponent: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
    join_bytes: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    split_bytes: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    statistics: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    join_stored: Callable[[np.ndarray, np.ndarray, int, np.ndarray, np.ndarray], None] | None = None


@cache
def kernels() -> Kernels:
    """The fastest that are installed; STATEHOUSE_KERNELS=numpy chooses the others."""
    if os.environ.get("STATEHOUSE_KERNELS") != "numpy":
        try:
            from storage import kernels_numba as fast
        except ImportError:
            pass
        else:
            return Kernels(
                True,
                fast.join_exponent,
                fast.split_exponent,
                fast.join_bytes,
                fast.split_bytes,
                fast.statistics,
                fast.join_stored,
            )
    return NUMPY


def _join_exponent(p0: np.ndarray, p1: np.ndarray, offset: np.ndarray, out: np.ndarray) -> None:
    exponent = p0 + offset  # uint8, wraps as it did when the offset was subtracted
    np.left_shift(exponent, 7, out=out, dtype=np.uint16)
    out |= p1 & 0x7F
    out |= np.left_shift(p1 & 0x80, 8, dtype=np.uint16)


def _split_exponent(bits: np.ndarray, offset: np.ndarray, p0: np.ndarray, p1: np.ndarray) -> None:
    np.right_shift(bits, 7, out=p0, casting="unsafe")
    np.subtract(p0, offset, out=p0)
    sign = (bits >> 8).astype(np.uint8)
    sign &= 0x80
    np.bitwise_and(bits, 0x7F, out=p1, casting="unsafe")
    p1 |= sign


def _join_bytes(p0: np.ndarray, p1: np.ndarray, out: np.ndarray) -> None:
    np.left_shift(p0, 8, out=out, dtype=np.uint16)
    out |= p1


def _split_bytes(bits: np.ndarray, p0: np.ndarray, p1: np.ndarray) -> None:
    np.right_shift(bits, 8, out=p0, casting="unsafe")
    np.bitwise_and(bits, 0xFF, out=p1, casting="unsafe")


def _statistics(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, layers, hidden_size = bits.shape
    squares, finite_values = np.zeros(layers), np.zeros(layers, np.int64)
    step = max(1, _BLOCK_VALUES // (layers * hidden_size))
    for low in range(0, rows, step):
        block = (bits[low : low + step].astype(np.uint32) << 16).view(np.float32)
        finite = np.isfinite(block)
        if not finite.all():
            block = np.where(finite, block, 0)
        squares += np.einsum("tlh,tlh->l", block, block, dtype=np.float64)
        finite_values += finite.sum(axis=(0, 2))
    return squares, finite_values


NUMPY = Kernels(False, _join_exponent, _split_exponent, _join_bytes, _split_bytes, _statistics)
