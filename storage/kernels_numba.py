"""The loops of `kernels` in numba. Imported when first needed: numba takes about a second to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

# Signatures are given, so that each loop is compiled (and cached) once, not once more for every mix of read-only and
# writable arguments: a writable array goes for a read-only one.
_U8 = numba.types.Array(numba.uint8, 1, "C", readonly=True)
_U8_ROWS = numba.types.Array(numba.uint8, 2, "C", readonly=True)
_U16_ROWS = numba.types.Array(numba.uint16, 2, "C", readonly=True)
_U16_STATES = numba.types.Array(numba.uint16, 3, "C", readonly=True)
_U8_OUT, _U16_OUT = numba.uint8[:, ::1], numba.uint16[:, ::1]
_SUMS = numba.types.Tuple((numba.float64[::1], numba.int64[::1]))


def _compile(signature: Any) -> Callable[[Function], Function]:
    def compiled(function: Function) -> Function:
        try:
            return numba.njit(signature, cache=True, nogil=True)(function)
        except RuntimeError:  # no folder to keep a cache in: compiled anew in every process, a few seconds
            return numba.njit(signature, nogil=True)(function)

    return compiled


# Sums may be reordered, or they are not vectorised; NaN and infinities must keep their meaning.
_compile_sums = numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})


@_compile(numba.void(_U8_ROWS, _U8_ROWS, _U8, _U16_OUT))
def join_exponent(p0: np.ndarray, p1: np.ndarray, offset: np.ndarray, out: np.ndarray) -> None:
    for row in range(out.shape[0]):
        for at in range(out.shape[1]):
            exponent = np.uint16((p0[row, at] + offset[at]) & 0xFF)
            rest = np.uint16(p1[row, at])
            out[row, at] = (exponent << 7) | (rest & 0x7F) | ((rest & 0x80) << 8)


@_compile(numba.void(_U8_ROWS, _U8, numba.int64, _U8, _U16_OUT))
def join_stored(p0: np.ndarray, frame: np.ndarray, first: int, offset: np.ndarray, out: np.ndarray) -> None:
    values = out.shape[1]
    for row in range(out.shape[0]):
        low = 0
        while low < values:  # up to the end of the row, or of the block of 128 KiB
            at = first + row * values + low
            block = at >> 17
            high = min(values, low + ((block + 1) << 17) - at)
            begin = 12 + at + 3 * block
            rests, exponents = frame[begin : begin + high - low], p0[row, low:high]
            offsets, joined = offset[low:high], out[row, low:high]
            for k in range(high - low):
                exponent = np.uint16((exponents[k] + offsets[k]) & 0xFF)
                rest = np.uint16(rests[k])
                joined[k] = (exponent << 7) | (rest & 0x7F) | ((rest & 0x80) << 8)
            low = high


@_compile(numba.void(_U16_ROWS, _U8, _U8_OUT, _U8_OUT))
def split_exponent(bits: np.ndarray, offset: np.ndarray, p0: np.ndarray, p1: np.ndarray) -> None:
    for row in range(bits.shape[0]):
        for at in range(bits.shape[1]):
            value = bits[row, at]
            p0[row, at] = np.uint8((value >> 7) & 0xFF) - offset[at]
            p1[row, at] = np.uint8((value >> 8) & 0x80) | np.uint8(value & 0x7F)


@_compile(numba.void(_U8_ROWS, _U8_ROWS, _U16_OUT))
def join_bytes(p0: np.ndarray, p1: np.ndarray, out: np.ndarray) -> None:
    for row in range(out.shape[0]):
        for at in range(out.shape[1]):
            out[row, at] = (np.uint16(p0[row, at]) << 8) | np.uint16(p1[row, at])


@_compile(numba.void(_U16_ROWS, _U8_OUT, _U8_OUT))
def split_bytes(bits: np.ndarray, p0: np.ndarray, p1: np.ndarray) -> None:
    for row in range(bits.shape[0]):
        for at in range(bits.shape[1]):
            value = bits[row, at]
            p0[row, at] = np.uint8(value >> 8)
            p1[row, at] = np.uint8(value & 0xFF)


@_compile_sums
def _sum_of_squares(values: np.ndarray) -> np.float32:
    total = np.float32(0)
    for at in range(values.shape[0]):
        total += values[at] * values[at]
    return total


@numba.njit(nogil=True)
def _widen(bits: np.ndarray, wide: np.ndarray) -> np.uint16:
    """bf16 bits -> float32 bits; returns the largest magnitude. In 16-bit lanes: twice as many fit a register."""
    largest = np.uint16(0)
    for at in range(bits.shape[0]):
        wide[at] = np.uint32(bits[at]) << np.uint32(16)
        largest = max(largest, np.uint16(bits[at] & np.uint16(0x7FFF)))
    return largest


@_compile(_SUMS(_U16_STATES))
def statistics(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, layers, hidden_size = bits.shape
    squares, finite_values = np.zeros(layers), np.zeros(layers, np.int64)
    wide = np.empty(hidden_size, np.uint32)  # one row as float32: stays in the first-level cache
    values = wide.view(np.float32)
    for row in range(rows):
        for layer in range(layers):
            largest = _widen(bits[row, layer], wide)
            total = np.float64(_sum_of_squares(values))
            finite = hidden_size
            if largest >= 0x7F80 or not np.isfinite(total):  # squares above 1.8e19 leave float32
                total = np.float64(0)
                for at in range(hidden_size):
                    if (bits[row, layer, at] & 0x7F80) == 0x7F80:
                        finite -= 1
                    else:
                        total += np.float64(values[at]) * np.float64(values[at])
            squares[layer] += total
            finite_values[layer] += finite
    return squares, finite_values
