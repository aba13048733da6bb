"""Compiled loops of drafter/attention_cpu.py, over what its matrix products take and give. Kinds as in kernels_numba.py.

Shape suffixes as in drafter/attention_cpu.py. A block's queries lie heads first: query r * B + b of group g is head
g * R + r of the block's row b. rows: [B], the last key that each row sees; tiles begin at key `begin`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from drafter.kernels_numba import OPTIONS, _narrow, _order, _power, _unordered, _wide


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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
