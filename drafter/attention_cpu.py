"""Attention of one TTT step on a CPU: some rows of packed sequences, over the causal step-0 keys and their own later ones.

Rows are worked off in blocks, so that rows that nobody wants cost nothing, over tiles of keys, all heads that share a key
in one matrix product; parts (tiles, the row's own later keys) are merged by their log-sum-exps. Backward: with the merged
output and the merged log-sum-exp L, every part's share is exp(score - L), so each tile is worked off alone. Nothing of
size [T, T] exists.

In bf16 a score of 70 would be off by a quarter. So what the product yields is not the score but how far it is below L (or,
forward, below the row's largest), by extra columns, `with_columns`: then it is the small ones, whose shares matter, that
are exact, and one product at the rate of bf16 is all (twice that of fp32 with AVX512-BF16, more with AMX). What is between
the products is compiled (drafter/kernels_numba.py). In fp32 the forward pass is torch's fused kernel, but of a few keys.

Shape suffixes as in drafter/ttt.py, and: B rows of a block, U keys of a tile, Q = R * B queries that share a key head, X a
head's width with extra columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafter.compiled import bits

# Rows of a block and keys of a tile: 9 heads * 256 * 1,024 fp32 scores are 9 MiB.
_BLOCK, _TILE = 256, 1024
# Columns added to each head: two are used, but products want multiples of eight.
_EXTRA = 8
# Of fewer keys than one vector holds (16 fp32 with AVX512), torch's fused kernel takes a row of NaN scores for a masked one,
# and yields zeros.
_SHORT = 16
# Rows that follow within this many positions go into one block: its keys in between are masked.
_GAP = 32


@dataclass(frozen=True)
class Block:
    """Rows [first, last) of the wanted ones; they see keys from `start`, all of those before `own` and, in part, [own, end)."""

    first: int
    last: int
    start: int
    own: int
    end: int


def blocks(rows: np.ndarray[Any, np.dtype[np.int64]], lengths: Sequence[int]) -> list[Block]:
    """Cuts ascending rows into blocks of one sequence, without wide gaps. rows: [N] int64 into the packed batch."""
    if not len(rows):
        return []
    starts = np.array([0, *accumulate(lengths)])
    sequence = np.searchsorted(starts, rows, side="right") - 1
    new = (np.diff(rows) > _GAP) | (np.diff(sequence) > 0)
    edges = [0, *(np.flatnonzero(new) + 1).tolist(), len(rows)]
    found = []
    for first, last in zip(edges, edges[1:], strict=False):
        for begin in range(first, last, _BLOCK):
            stop = min(begin + _BLOCK, last)
            found.append(Block(begin, stop, int(starts[sequence[begin]]), int(rows[begin]), int(rows[stop - 1]) + 1))
    return found


class CausalAndOwn(torch.autograd.Function):
    """attended_NAC of queries at rows_N; see the module.

    at: of each later step, [N] int64, which of its keys and values are a row's own. own: key, value, key, value, ... of
    those steps, [.., G, C] each.
    """

    @staticmethod
    def forward(
        ctx: Any, query_NAC: Tensor, key_TGC: Tensor, value_TGC: Tensor, rows_N: Tensor, lengths: Sequence[int],
        scale: float, at: Sequence[Tensor], *own: Tensor,
    ) -> Tensor:  # fmt: skip
        from drafter.kernels_numba import own_scores, own_values

        wide = torch.promote_types(query_NAC.dtype, torch.float32)
        found = blocks(rows_N.numpy(), lengths)
        with torch.autocast("cpu", enabled=False):
            query_NAC = query_NAC.contiguous()
            own = tuple(part.contiguous() for part in own)
            out_NAC = torch.empty_like(query_NAC, dtype=wide)
            lse_NA = torch.empty(query_NAC.shape[:2], dtype=wide)
            causal = _fused_blocks if query_NAC.dtype == wide else _narrow_blocks
            causal(found, query_NAC, key_TGC, value_TGC, rows_N, scale, out_NAC, lse_NA)
            if own:
                score_JNA, factor = torch.empty(len(at), *lse_NA.shape, dtype=wide), _number(scale, wide)
                for score_NA, key_NGC, rows in zip(score_JNA, own[0::2], at, strict=True):
                    own_scores(bits(query_NAC), bits(key_NGC), rows.numpy(), factor, score_NA.numpy())
                total_NA = torch.logaddexp(lse_NA, score_JNA.logsumexp(0))
                out_NAC.mul_((lse_NA - total_NA).exp_()[..., None])
                for share_NA, value_NGC, rows in zip(score_JNA.sub_(total_NA).exp_(), own[1::2], at, strict=True):
                    own_values(share_NA.numpy(), bits(value_NGC), rows.numpy(), out_NAC.numpy())
                lse_NA = total_NA
            narrow_NAC = out_NAC.to(query_NAC.dtype)
        ctx.save_for_backward(query_NAC, key_TGC, value_TGC, rows_N, narrow_NAC, lse_NA, *own)
        ctx.blocks, ctx.scale, ctx.at = found, scale, at
        return narrow_NAC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NAC: Tensor) -> tuple[Tensor | None, ...]:
        from drafter.kernels_numba import dots, own_backward, rows_first, shares_and_pulls, with_columns

        query_NAC, key_TGC, value_TGC, rows_N, out_NAC, lse_NA, *own = ctx.saved_tensors
        wide, narrow, scale = lse_NA.dtype, query_NAC.dtype, ctx.scale
        (power, rest), (groups, width), rows = _split(scale), key_TGC.shape[1:], rows_N.numpy()
        one, factor, step = _number(1, wide), _number(power, wide), _number(rest, wide)
        with torch.autocast("cpu", enabled=False):
            grad_NAC = grad_NAC.contiguous()
            query, grad, lse = bits(query_NAC), bits(grad_NAC), lse_NA.numpy()
            delta_NA = torch.empty_like(lse_NA)
            delta = delta_NA.numpy()
            dots(grad, bits(out_NAC), delta)
            grad_query_NAC = torch.empty_like(query_NAC, dtype=wide)
            key_GTX, value_GTX = (_heads_with_ones(part) for part in (key_TGC, value_TGC))
            grad_key_GTC, grad_value_GTC = torch.zeros(2, groups, len(key_TGC), width, dtype=wide)
            for block in ctx.blocks:
                first, seen = block.first, rows[block.first : block.last]
                query_GQX, grad_GQX = torch.empty(
                    2, groups, _queries(block, query_NAC, groups), width + _EXTRA, dtype=narrow
                )
                with_columns(query, first, factor, lse, 1 / step, bits(query_GQX))
                with_columns(grad, first, one, delta, one, bits(grad_GQX))
                grad_query_GQC = torch.zeros(*query_GQX.shape[:2], width, dtype=wide)
                for begin, end in _tiles(block):
                    keys = slice(begin, end)
                    share_GQU = torch.bmm(query_GQX, key_GTX[:, keys].transpose(1, 2))
                    pull_GQU = torch.bmm(grad_GQX, value_GTX[:, keys].transpose(1, 2))
                    shares_and_pulls(bits(share_GQU), bits(pull_GQU), step, seen, begin)
                    _add_product(grad_value_GTC[:, keys], share_GQU.transpose(1, 2), grad_GQX[..., :width])
                    _add_product(grad_key_GTC[:, keys], pull_GQU.transpose(1, 2), query_GQX[..., :width])
                    _add_product(grad_query_GQC, pull_GQU, key_GTX[:, keys, :width])
                rows_first(grad_query_GQC.numpy(), _number(scale, wide), first, grad_query_NAC.numpy())
            grad_own: list[Tensor] = []
            for key_NGC, value_NGC, own_rows in zip(own[0::2], own[1::2], ctx.at, strict=True):
                grads = torch.zeros_like(key_NGC), torch.zeros_like(value_NGC)
                own_backward(
                    query, bits(key_NGC), bits(value_NGC), own_rows.numpy(), grad, lse, delta, _number(scale, wide),
                    grad_query_NAC.numpy(), *(bits(part) for part in grads),
                )  # fmt: skip
                grad_own += grads
        grad_key_GTC *= scale / power
        grad_key_TGC, grad_value_TGC = (part.transpose(0, 1).to(narrow) for part in (grad_key_GTC, grad_value_GTC))
        return grad_query_NAC.to(narrow), grad_key_TGC, grad_value_TGC, *[None] * 4, *grad_own


def _number(value: float, dtype: torch.dtype) -> Any:
    """As compiled loops take it: a Python float would make them compute in fp64."""
    return np.float64(value) if dtype == torch.float64 else np.float32(value)


def _queries(block: Block, query_NAC: Tensor, groups: int) -> int:
    """Q of a block."""
    return (block.last - block.first) * query_NAC.shape[1] // groups


def _heads_with_ones(part_TGC: Tensor) -> Tensor:
    """[G, T, X]: with ones where `kernels_numba.with_columns` puts what is to be subtracted."""
    part_GTX = part_TGC.new_zeros(part_TGC.shape[1], part_TGC.shape[0], part_TGC.shape[2] + _EXTRA)
    part_GTX[..., : part_TGC.shape[2]] = part_TGC.transpose(0, 1)
    part_GTX[..., part_TGC.shape[2] : part_TGC.shape[2] + 2] = 1
    return part_GTX


def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """sums += left @ right, of [G, .., ..] each; sums are fp32 or wider."""
    if sums.dtype == left.dtype:
        sums.baddbmm_(left, right)
    else:
        sums += torch.bmm(left, right)


def _split(scale: float) -> tuple[float, float]:
    """(a power of two, rest in [1, 2)): by the first a query can be multiplied without rounding, whatever its dtype."""
    mantissa, exponent = math.frexp(scale)
    return 2.0 ** (exponent - 1), 2 * mantissa


def _narrow_blocks(
    found: Sequence[Block], query_NAC: Tensor, key_TGC: Tensor, value_TGC: Tensor, rows_N: Tensor, scale: float,
    out_NAC: Tensor, lse_NA: Tensor,
) -> None:  # fmt: skip
    """Causal attention of all blocks, into out_NAC and lse_NA (both fp32), by products in the queries' dtype."""
    from drafter.kernels_numba import largest, mixed, shares, with_columns

    (power, rest), groups, width, rows = _split(scale), key_TGC.shape[1], key_TGC.shape[2], rows_N.numpy()
    factor, one, step = _number(power, lse_NA.dtype), _number(1, lse_NA.dtype), _number(rest, lse_NA.dtype)
    query, out, lse = bits(query_NAC), out_NAC.numpy(), lse_NA.numpy()
    key_GTX, value_GTC = _heads_with_ones(key_TGC), value_TGC.transpose(0, 1).contiguous()
    lse_NA.fill_(-torch.inf)  # holds the largest score until its row is done
    none_NA = np.zeros_like(lse)
    for block in found:
        first, seen = block.first, rows[block.first : block.last]
        query_GQX = query_NAC.new_empty(groups, _queries(block, query_NAC, groups), width + _EXTRA)
        with_columns(query, first, factor, none_NA, one, bits(query_GQX))
        for begin, end in _tiles(block):
            score_GQU = torch.bmm(query_GQX, key_GTX[:, begin:end].transpose(1, 2))
            largest(bits(score_GQU), seen, begin, first, lse)
        with_columns(query, first, factor, lse, one, bits(query_GQX))
        sums_GQ = torch.zeros(query_GQX.shape[:2], dtype=lse_NA.dtype)
        values_GQC = torch.zeros(*query_GQX.shape[:2], width, dtype=lse_NA.dtype)
        for begin, end in _tiles(block):
            share_GQU = torch.bmm(query_GQX, key_GTX[:, begin:end].transpose(1, 2))
            shares(bits(share_GQU), step, seen, begin, sums_GQ.numpy())
            _add_product(values_GQC, share_GQU, value_GTC[:, begin:end])
        mixed(values_GQC.numpy(), sums_GQ.numpy(), step, first, out, lse)
    if not lse_NA.isfinite().all():  # values of a row whose scores are not finite may be
        out_NAC.masked_fill_(~lse_NA.isfinite()[..., None], torch.nan)


def _fused_blocks(
    found: Sequence[Block], query_NAC: Tensor, key_TGC: Tensor, value_TGC: Tensor, rows_N: Tensor, scale: float,
    out_NAC: Tensor, lse_NA: Tensor,
) -> None:  # fmt: skip
    """`_narrow_blocks` by torch's fused kernel, whose scores are fp32 or better: keys before a block, then those in it."""
    for block in found:
        rows = slice(block.first, block.last)
        query, own = query_NAC[rows], slice(block.own, block.end)
        hidden: Tensor | bool = True  # simply the keys behind each row
        if block.end - block.own != block.last - block.first:
            hidden = torch.arange(block.own, block.end) > rows_N[rows, None]
        out, lse = _fused(query, key_TGC, value_TGC, own, scale, hidden)
        if block.own > block.start:
            before = _fused(query, key_TGC, value_TGC, slice(block.start, block.own), scale, None)
            out, lse = _merged(out, lse, *before)
        out_NAC[rows], lse_NA[rows] = out, lse


def _fused(
    query_BAC: Tensor, key_TGC: Tensor, value_TGC: Tensor, keys: slice, scale: float, hidden: Tensor | bool | None
) -> tuple[Tensor, Tensor]:
    """(output [B, A, C], log-sum-exp [B, A]) over these keys. hidden: [B, U], True for causal, None for nothing."""
    if keys.stop - keys.start < _SHORT:
        return _dense(query_BAC, key_TGC[keys], value_TGC[keys], scale, hidden)
    query, key, value = (part.transpose(0, 1)[None] for part in (query_BAC, key_TGC[keys], value_TGC[keys]))
    mask = None
    if isinstance(hidden, Tensor):
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, hidden is True, attn_mask=mask, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _dense(
    query_BAC: Tensor, key_UGC: Tensor, value_UGC: Tensor, scale: float, hidden: Tensor | bool | None
) -> tuple[Tensor, Tensor]:
    """`_fused` of a few keys, where a NaN stays one."""
    share = query_BAC.shape[1] // key_UGC.shape[1]
    key_UAC, value_UAC = (part.repeat_interleave(share, dim=1) for part in (key_UGC, value_UGC))
    score_BAU = torch.einsum("bac,uac->bau", query_BAC, key_UAC) * scale
    if hidden is True:
        hidden = torch.ones(len(query_BAC), len(key_UGC), dtype=torch.bool).triu(1)
    if isinstance(hidden, Tensor):
        score_BAU.masked_fill_(hidden[:, None], -torch.inf)
    lse_BA = score_BAU.logsumexp(-1)
    return torch.einsum("bau,uac->bac", (score_BAU - lse_BA[..., None]).exp(), value_UAC), lse_BA


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from that over each."""
    total = torch.logaddexp(lse, more_lse)
    share = (lse - total).exp_()[..., None]
    return out * share + more * (more_lse - total).exp_()[..., None], total


def _tiles(block: Block) -> list[tuple[int, int]]:
    """Ranges of all keys of a block."""
    return [(begin, min(begin + _TILE, block.end)) for begin in range(block.start, block.end, _TILE)]
