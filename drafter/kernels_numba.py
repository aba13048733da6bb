"""Compiled loops over rows of fp32, or of bf16 as uint16 bit patterns: what torch on a CPU needs several slow passes for.

A number of a row costs 0.1 ns (fp32) or 0.3 (bf16) here for softmax's exponential and sum, and 0.8 or 0.7 in torch; torch
has no fused RMS norm for CPUs. Sums and products are fp32 (fp64 in `own_*` where the arrays are). Arrays are C-contiguous.

Shape suffixes as in drafter/model.py.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

_OPTIONS: Any = {"nogil": True, "cache": True, "fastmath": True, "error_model": "numpy"}


# Implementations of an overload must have its very signature, which therefore has no types.
def _wide(value):  # type: ignore[no-untyped-def]
    """fp32 of one number."""


def _narrow(value, like):  # type: ignore[no-untyped-def]
    """One fp32 number as `like` is kept, rounded to the nearest, to even where it is between two."""


def _order(value):  # type: ignore[no-untyped-def]
    """An integer that is greater where the number is, and greatest for NaN: its maximum is vectorised."""


@overload(_wide, inline="always")
def _wide_of(value):  # type: ignore[no-untyped-def]
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


@overload(_narrow, inline="always")
def _narrow_of(value, like):  # type: ignore[no-untyped-def]
    if like != types.uint16:
        return lambda value, like: value

    def rounded(value, like):  # type: ignore[no-untyped-def]
        bits = np.float32(value).view(np.uint32)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return rounded


@overload(_order, inline="always")
def _order_of(value):  # type: ignore[no-untyped-def]
    def of_half(value):  # type: ignore[no-untyped-def]
        bits = np.int16(value)
        return np.int16(bits ^ ((bits >> np.int16(15)) & np.int16(0x7FFF)))

    def of_single(value):  # type: ignore[no-untyped-def]
        bits = np.float32(value).view(np.int32)
        return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))

    return of_half if value == types.uint16 else of_single


@numba.njit(inline="always", **_OPTIONS)
def _exp(x: Any) -> Any:
    """exp of x <= 0 to 6e-7 of itself: 2^i times a polynomial in the rest, which is at most 1/2."""
    y = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    i = np.floor(y + np.float32(0.5))
    f = y - i
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1.0)
    return p * np.int32((np.int32(i) + np.int32(127)) << np.int32(23)).view(np.float32)


@numba.njit(**_OPTIONS)
def exponentials(z: Any, largest: Any, sums: Any, best: Any) -> None:
    """exp(z - the row's largest) in place. Of each row: largest fp32, sum fp32 of what is left there, best int64."""
    rows, width = z.shape
    for row in range(rows):
        top = _order(z[row, 0])
        for column in range(width):
            top = max(top, _order(z[row, column]))
        at = np.int32(width)  # no `break`: loops with one are not vectorised
        for column in range(width):
            at = min(at, np.int32(column) if _order(z[row, column]) == top else np.int32(width))
        best[row] = at
        biggest = _wide(z[row, at])
        total = np.float32(0)
        for column in range(width):
            power = _narrow(_exp(_wide(z[row, column]) - biggest), z[row, column])
            z[row, column] = power
            total += _wide(power)
        largest[row], sums[row] = biggest, total


@numba.njit(**_OPTIONS)
def rms_norm(x: Any, weight: Any, eps: Any, out: Any, scale: Any) -> None:
    """out = x * scale * weight, scale [rows] = 1 / sqrt(mean of squares + eps)."""
    rows, width = x.shape
    for row in range(rows):
        square = np.float32(0)
        for column in range(width):
            value = _wide(x[row, column])
            square += value * value
        scale[row] = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
        for column in range(width):
            out[row, column] = _narrow(_wide(x[row, column]) * scale[row] * weight[column], x[row, column])


@numba.njit(**_OPTIONS)
def rms_norm_backward(grad: Any, x: Any, weight: Any, scale: Any, grad_x: Any, grad_weight: Any) -> None:
    """Gradient of x, and what the rows add to that of the weight (fp32)."""
    rows, width = x.shape
    for row in range(rows):
        along = np.float32(0)
        for column in range(width):
            along += _wide(grad[row, column]) * weight[column] * _wide(x[row, column])
        by = scale[row]
        along = along * by * by / np.float32(width)
        for column in range(width):
            value, pull = _wide(x[row, column]), _wide(grad[row, column])
            grad_weight[column] += pull * value * by
            grad_x[row, column] = _narrow((pull * weight[column] - value * along) * by, x[row, column])


@numba.njit(**_OPTIONS)
def rotate(x: Any, cos: Any, sin: Any, back: Any, out: Any) -> None:
    """RoPE over half-heads of x [N, A, C], by cos and sin [N, C / 2]; the other way round where `back` is -1."""
    rows, heads, width = x.shape
    half = width // 2
    for row in range(rows):
        for head in range(heads):
            for column in range(half):
                low, high = _wide(x[row, head, column]), _wide(x[row, head, half + column])
                c, s = cos[row, column], sin[row, column] * back
                out[row, head, column] = _narrow(low * c - high * s, x[row, head, column])
                out[row, head, half + column] = _narrow(high * c + low * s, x[row, head, column])


@numba.njit(**_OPTIONS)
def own_scores(query: Any, key: Any, scale: Any, out: Any) -> None:
    """out [N, A] = scale * query . key, of query [N, A, C] and each row's own key [N, G, C]."""
    rows, heads, width = query.shape
    share = heads // key.shape[1]
    for row in range(rows):
        for head in range(heads):
            dot = np.float32(0)
            for column in range(width):
                dot += _wide(query[row, head, column]) * _wide(key[row, head // share, column])
            out[row, head] = dot * scale


@numba.njit(**_OPTIONS)
def own_values(share_NA: Any, value: Any, out: Any) -> None:
    """out [N, A, C] fp32 += share * value, of each row's own value [N, G, C]."""
    rows, heads, width = out.shape
    share = heads // value.shape[1]
    for row in range(rows):
        for head in range(heads):
            for column in range(width):
                out[row, head, column] += share_NA[row, head] * _wide(value[row, head // share, column])


@numba.njit(**_OPTIONS)
def own_backward(
    query: Any, key: Any, value: Any, grad: Any, lse: Any, delta: Any, scale: Any, grad_query: Any, grad_key: Any,
    grad_value: Any,
) -> None:  # fmt: skip
    """Gradients of one own key and value of every row, and grad_query [N, A, C] fp32 += what it adds to the query's.

    lse, delta: [N, A] fp32, as drafter/attention_cpu.py has them.
    """
    rows, heads, width = query.shape
    groups = key.shape[1]
    share = heads // groups
    sum_key, sum_value = np.empty(width, lse.dtype), np.empty(width, lse.dtype)
    for row in range(rows):
        for group in range(groups):
            sum_key[:] = 0
            sum_value[:] = 0
            for head in range(group * share, (group + 1) * share):
                dot, pull = np.float32(0), np.float32(0)
                for column in range(width):
                    dot += _wide(query[row, head, column]) * _wide(key[row, group, column])
                    pull += _wide(grad[row, head, column]) * _wide(value[row, group, column])
                taken = np.exp(dot * scale - lse[row, head])
                by = taken * (pull - delta[row, head]) * scale
                for column in range(width):
                    grad_query[row, head, column] += by * _wide(key[row, group, column])
                    sum_key[column] += by * _wide(query[row, head, column])
                    sum_value[column] += taken * _wide(grad[row, head, column])
            for column in range(width):
                grad_key[row, group, column] = _narrow(sum_key[column], key[row, group, column])
                grad_value[row, group, column] = _narrow(sum_value[column], key[row, group, column])
