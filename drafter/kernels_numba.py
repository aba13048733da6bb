"""Compiled loops over rows of fp32, or of bf16 as uint16 bit patterns: what torch on a CPU needs several slow passes for.

A number of a row costs 0.1 ns (fp32) or 0.3 (bf16) with AVX512 for softmax's exponential and sum, and 0.8 or 0.7 in torch;
torch has no fused RMS norm for CPUs. Sums and products are fp32 (in attention's loops fp64 where the arrays are). Arrays are
C-contiguous. One file, since numba looks for changes in the file of a function only, not where it was inlined from.

Shape suffixes as in drafter/model.py and, from `with_columns` on, drafter/attention_cpu.py: there a block's queries lie
heads first, query r * B + b of group g is head g * R + r of the block's row b; rows [B] are the last keys that they see;
tiles begin at key `begin`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload


def _cacheable() -> bool:
    """Whether there is a folder to keep compiled code in; without one all is compiled anew in every process."""
    try:
        numba.njit(cache=True)(_cacheable)
    except RuntimeError:
        return False
    return True


# Sums may be taken in any order, which vectorises them. Not all of "fastmath": it would let a NaN be taken for anything.
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}
_OPTIONS: Any = {"nogil": True, "cache": _cacheable(), "fastmath": _FAST, "error_model": "numpy"}


# Implementations of an overload must have its very signature, which therefore has no types.
def _wide(value):  # type: ignore[no-untyped-def]
    """fp32 of one number."""


def _narrow(value, like):  # type: ignore[no-untyped-def]
    """One fp32 number as `like` is kept, rounded to the nearest, to even where it is between two."""


def _order(value):  # type: ignore[no-untyped-def]
    """An integer that is greater where the number is: its maximum is vectorised. NaN is beyond infinity, by its sign."""


def _unordered(order, like):  # type: ignore[no-untyped-def]
    """The number, of the kind of `like`, that `_order` gave this integer."""


def _power(x):  # type: ignore[no-untyped-def]
    """exp of x, which may be a little above 0."""


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


@overload(_unordered, inline="always")
def _unordered_of(order, like):  # type: ignore[no-untyped-def]
    def of_half(order, like):  # type: ignore[no-untyped-def]
        return np.uint16(order ^ ((order >> np.int16(15)) & np.int16(0x7FFF)))

    def of_single(order, like):  # type: ignore[no-untyped-def]
        return np.int32(order ^ ((order >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)

    return of_half if like == types.uint16 else of_single


@overload(_power, inline="always")
def _power_of(x):  # type: ignore[no-untyped-def]
    return (lambda x: np.exp(x)) if x == types.float64 else (lambda x: _exp(x))


@numba.njit(inline="always", **_OPTIONS)
def _exp(x: Any) -> Any:
    """exp of x to 6e-7 of itself, between 2^-126 and 2^127: 2^i times a polynomial in the rest, which is at most 1/2."""
    y = min(max(x * np.float32(1.4426950408889634), np.float32(-126.0)), np.float32(127.0))
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
        one, normed, square = x[row], out[row], np.float32(0)
        for column in range(width):
            value = _wide(one[column])
            square += value * value
        by = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
        scale[row] = by
        for column in range(width):
            normed[column] = _narrow(_wide(one[column]) * by * weight[column], one[column])


@numba.njit(**_OPTIONS)
def rms_norm_backward(grad: Any, x: Any, weight: Any, scale: Any, grad_x: Any, grad_weight: Any) -> None:
    """Gradient of x, where grad_x has rows, and what the rows add to that of the weight (fp32)."""
    rows, width = x.shape
    for row in range(rows):
        one, pulls, by = x[row], grad[row], scale[row]
        for column in range(width):
            grad_weight[column] += _wide(pulls[column]) * _wide(one[column]) * by
        if len(grad_x):
            along = np.float32(0)
            for column in range(width):
                along += _wide(pulls[column]) * weight[column] * _wide(one[column])
            along = along * by * by / np.float32(width)
            found = grad_x[row]
            for column in range(width):
                value, pull = _wide(one[column]), _wide(pulls[column])
                found[column] = _narrow((pull * weight[column] - value * along) * by, one[column])


@numba.njit(**_OPTIONS)
def turn(
    x: Any, x_first: Any, heads: Any, cos_PC: Any, sin_PC: Any, at_N: Any, back: Any, out: Any, first: Any
) -> None:
    """RoPE over half-heads of columns of x, from x_first on, into those of out from `first` on, both [N, ..].

    cos, sin: [P, C / 2], of which row at_N is a row's. back: 1, or -1 for the other way round, which is the gradient.
    """
    half = cos_PC.shape[1]
    for row in range(len(at_N)):
        cos, sin = cos_PC[at_N[row]], sin_PC[at_N[row]]
        for head in range(heads):
            low_x = x[row, x_first + 2 * head * half : x_first + (2 * head + 1) * half]
            high_x = x[row, x_first + (2 * head + 1) * half : x_first + (2 * head + 2) * half]
            low_out = out[row, first + 2 * head * half : first + (2 * head + 1) * half]
            high_out = out[row, first + (2 * head + 1) * half : first + (2 * head + 2) * half]
            for column in range(half):
                low, high, s = _wide(low_x[column]), _wide(high_x[column]), sin[column] * back
                low_out[column] = _narrow(low * cos[column] - high * s, low_x[column])
                high_out[column] = _narrow(high * cos[column] + low * s, low_x[column])


@numba.njit(inline="always", **_OPTIONS)
def _sigmoid(x: Any) -> Any:
    return np.float32(1) / (np.float32(1) + _exp(min(-x, np.float32(87))))


@numba.njit(**_OPTIONS)
def swiglu(gate: Any, up: Any, out: Any) -> None:
    """out = gate * sigmoid(gate) * up, of [rows, width]."""
    rows, width = gate.shape
    for row in range(rows):
        gates, ups, outs = gate[row], up[row], out[row]
        for column in range(width):
            g = _wide(gates[column])
            outs[column] = _narrow(g * _sigmoid(g) * _wide(ups[column]), gates[column])


@numba.njit(**_OPTIONS)
def swiglu_backward(grad: Any, gate: Any, up: Any, grad_gate: Any, grad_up: Any) -> None:
    rows, width = gate.shape
    for row in range(rows):
        pulls, gates, ups, to_gate, to_up = grad[row], gate[row], up[row], grad_gate[row], grad_up[row]
        for column in range(width):
            g, pull = _wide(gates[column]), _wide(pulls[column])
            share = _sigmoid(g)
            slope = share * (np.float32(1) + g * (np.float32(1) - share))
            to_gate[column] = _narrow(pull * _wide(ups[column]) * slope, gates[column])
            to_up[column] = _narrow(pull * g * share, gates[column])


@numba.njit(**_OPTIONS)
def taught(
    states_ND: Any, mean_SD: Any, slot_N: Any, share_N: Any, sums_N: Any, along_N: Any, factor_ND: Any, taught_SD: Any
) -> None:
    """Of drafter/head_loss.py: along = h . E; factor = h * share / sum; taught += h * share, at the row's teacher."""
    rows, width = states_ND.shape
    for row in range(rows):
        states, mean, factor, sums = states_ND[row], mean_SD[slot_N[row]], factor_ND[row], taught_SD[slot_N[row]]
        share, by, along = share_N[row], share_N[row] / sums_N[row], np.float32(0)
        for column in range(width):
            along += _wide(states[column]) * mean[column]
        for column in range(width):
            value = _wide(states[column])
            factor[column] = _narrow(value * by, states[column])
            sums[column] += value * share
        along_N[row] = along


@numba.njit(**_OPTIONS)
def pulled(drawn_ND: Any, mean_SD: Any, slot_N: Any, share_N: Any, sums_N: Any, at_N: Any, grad_ND: Any) -> None:
    """Row at_N of grad_ND = (q W - E) * share, where drawn is q W times the row's sum."""
    rows, width = drawn_ND.shape
    for row in range(rows):
        drawn, mean, grad = drawn_ND[row], mean_SD[slot_N[row]], grad_ND[at_N[row]]
        share, by = share_N[row], share_N[row] / sums_N[row]
        for column in range(width):
            grad[column] = _narrow(_wide(drawn[column]) * by - mean[column] * share, grad[column])


@numba.njit(**_OPTIONS)
def with_columns(part_NAC: Any, first: Any, factor: Any, less_NA: Any, by: Any, out_GQX: Any) -> None:
    """Rows of a block from row `first` on, times `factor`, heads first; and minus less * by, in two more columns.

    The second is for what is rounded off in the first. Other columns are zero.
    """
    groups, queries, wide = out_GQX.shape
    heads, width = part_NAC.shape[1:]
    share = heads // groups
    rows = queries // share
    for group in range(groups):
        for head in range(share):
            for row in range(rows):
                part, out = part_NAC[first + row, group * share + head], out_GQX[group, head * rows + row]
                for column in range(width):
                    out[column] = _narrow(_wide(part[column]) * factor, part[column])
                less = less_NA[first + row, group * share + head] * by
                coarse = _narrow(-less, part[0])
                out[width] = coarse
                out[width + 1] = _narrow(-less - _wide(coarse), part[0])
                for column in range(width + 2, wide):
                    out[column] = 0


@numba.njit(**_OPTIONS)
def largest(score_GQU: Any, rows: Any, begin: Any, first: Any, found_NA: Any) -> None:
    """found_NA, from row `first` on: at least the greatest of the scores that each row sees here."""
    groups, queries, keys = score_GQU.shape
    count = len(rows)
    share = queries // count
    for group in range(groups):
        for query in range(queries):
            row = query % count
            seen = min(keys, rows[row] - begin + 1)
            if seen > 0:
                score = score_GQU[group, query]
                top = _order(score[0])
                for key in range(seen):
                    top = max(top, _order(score[key]))
                head = group * share + query // count
                here = _wide(_unordered(top, score[0]))
                before = found_NA[first + row, head]
                found_NA[first + row, head] = before if before > here else here


@numba.njit(**_OPTIONS)
def shares(below_GQU: Any, rest: Any, rows: Any, begin: Any, sums_GQ: Any) -> None:
    """exp(rest * below) in place, 0 where the row does not see the key; sums_GQ += what is left there."""
    groups, queries, keys = below_GQU.shape
    count = len(rows)
    for group in range(groups):
        for query in range(queries):
            seen = max(0, min(keys, rows[query % count] - begin + 1))
            below = below_GQU[group, query]
            total = np.float32(0)
            for key in range(seen):
                power = _narrow(_power(_wide(below[key]) * rest), below[key])
                below[key] = power
                total += _wide(power)
            sums_GQ[group, query] += total
            for key in range(seen, keys):
                below[key] = 0


@numba.njit(**_OPTIONS)
def shares_and_pulls(below_GQU: Any, pull_GQU: Any, rest: Any, rows: Any, begin: Any) -> None:
    """exp(rest * below) in place, 0 where the row does not see the key; pull *= that."""
    groups, queries, keys = below_GQU.shape
    count = len(rows)
    for group in range(groups):
        for query in range(queries):
            seen = max(0, min(keys, rows[query % count] - begin + 1))
            below, pull = below_GQU[group, query], pull_GQU[group, query]
            for key in range(seen):
                power = _power(_wide(below[key]) * rest)
                below[key] = _narrow(power, below[key])
                pull[key] = _narrow(power * _wide(pull[key]), pull[key])
            for key in range(seen, keys):
                below[key] = 0
                pull[key] = 0


@numba.njit(**_OPTIONS)
def mixed(values_GQC: Any, sums_GQ: Any, rest: Any, first: Any, out_NAC: Any, lse_NA: Any) -> None:
    """Rows of a block, rows first: values over their sums, and lse = log sum + rest * what lse_NA holds."""
    groups, queries, width = values_GQC.shape
    share = lse_NA.shape[1] // groups
    count = queries // share
    for group in range(groups):
        for query in range(queries):
            row, head = first + query % count, group * share + query // count
            total = sums_GQ[group, query]
            lse_NA[row, head] = np.log(total) + rest * lse_NA[row, head]
            by = np.float32(1) / total
            for column in range(width):
                out_NAC[row, head, column] = values_GQC[group, query, column] * by


@numba.njit(**_OPTIONS)
def rows_first(part_GQC: Any, factor: Any, first: Any, out_NAC: Any) -> None:
    """out_NAC, from row `first` on: the block's part times `factor`."""
    groups, queries, width = part_GQC.shape
    share = out_NAC.shape[1] // groups
    count = queries // share
    for group in range(groups):
        for query in range(queries):
            out, part = out_NAC[first + query % count, group * share + query // count], part_GQC[group, query]
            for column in range(width):
                out[column] = part[column] * factor


@numba.njit(**_OPTIONS)
def dots(one_NAC: Any, other_NAC: Any, out_NA: Any) -> None:
    """out = the sum of products over a head."""
    rows, heads, width = one_NAC.shape
    for row in range(rows):
        for head in range(heads):
            one, other = one_NAC[row, head], other_NAC[row, head]
            dot = out_NA.dtype.type(0)
            for column in range(width):
                dot += _wide(one[column]) * _wide(other[column])
            out_NA[row, head] = dot


@numba.njit(**_OPTIONS)
def own_scores(query: Any, key: Any, at: Any, scale: Any, out: Any) -> None:
    """out [N, A] = scale * query . key, of query [N, A, C] and each row's own key, which is row at [N] of [.., G, C]."""
    rows, heads, width = query.shape
    share = heads // key.shape[1]
    for row in range(rows):
        for head in range(heads):
            dot, one, own = np.float32(0), query[row, head], key[at[row], head // share]
            for column in range(width):
                dot += _wide(one[column]) * _wide(own[column])
            out[row, head] = dot * scale


@numba.njit(**_OPTIONS)
def own_values(share_NA: Any, value: Any, at: Any, out: Any) -> None:
    """out [N, A, C] fp32 += share * value, of each row's own value, which is row at [N] of [.., G, C]."""
    rows, heads, width = out.shape
    share = heads // value.shape[1]
    for row in range(rows):
        for head in range(heads):
            # Sliced first: what is written could else be what is read, and the loop would not be vectorised.
            taken, own, mixed = share_NA[row, head], value[at[row], head // share], out[row, head]
            for column in range(width):
                mixed[column] += taken * _wide(own[column])


@numba.njit(**_OPTIONS)
def own_backward(
    query: Any, key: Any, value: Any, at: Any, grad: Any, lse: Any, delta: Any, scale: Any, grad_query: Any,
    grad_key: Any, grad_value: Any,
) -> None:  # fmt: skip
    """Gradients of one own key and value of every row, and grad_query [N, A, C] fp32 += what it adds to the query's.

    lse, delta: [N, A] fp32, as drafter/attention_cpu.py has them. at: as in `own_scores`, each at most once.
    """
    rows, heads, width = query.shape
    groups = key.shape[1]
    share = heads // groups
    sum_key, sum_value = np.empty(width, lse.dtype), np.empty(width, lse.dtype)
    for row in range(rows):
        own = at[row]
        for group in range(groups):
            sum_key[:] = 0
            sum_value[:] = 0
            for head in range(group * share, (group + 1) * share):
                dot, pull = np.float32(0), np.float32(0)
                for column in range(width):
                    dot += _wide(query[row, head, column]) * _wide(key[own, group, column])
                    pull += _wide(grad[row, head, column]) * _wide(value[own, group, column])
                taken = np.exp(dot * scale - lse[row, head])
                by = taken * (pull - delta[row, head]) * scale
                for column in range(width):
                    grad_query[row, head, column] += by * _wide(key[own, group, column])
                    sum_key[column] += by * _wide(query[row, head, column])
                    sum_value[column] += taken * _wide(grad[row, head, column])
            for column in range(width):
                grad_key[own, group, column] = _narrow(sum_key[column], key[own, group, column])
                grad_value[own, group, column] = _narrow(sum_value[column], key[own, group, column])
