"""Attention of one TTT step on a CPU: some rows of packed sequences, over the causal step-0 keys and their own later ones.

Rows are worked off in blocks, so that rows that nobody wants cost nothing, over tiles of keys, all heads that share a key
in one matrix product; parts (tiles, the row's own later keys) are merged by their log-sum-exps. Backward: with the merged
output and the merged log-sum-exp L, every part's share is exp(score - L), so each tile is worked off alone. Nothing of
size [T, T] exists.

In bf16 a score of 70 would be off by a quarter. So what the product yields is not the score but how far it is below L (or,
forward, below the row's largest), by extra columns, `_with_columns`: then it is the small ones, whose shares matter, that
are exact, and one product at the rate of bf16 and a bf16 exp are all (five and six times as fast as in fp32). In fp32 the
forward pass is torch's fused kernel; its backward runs at 60 GFLOP/s, this one at 90.

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

from drafter.exponentials import bits

# Rows of a block and keys of a tile: 9 heads * 256 * 1,024 fp32 scores are 9 MiB.
_BLOCK, _TILE = 256, 1024
# Columns added to each head: two are used, but products want multiples of eight.
_EXTRA = 8
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
    """attended_NAC of queries at rows_N; see the module. own: key, value, key, value, ... of later steps, [N, G, C] each."""

    @staticmethod
    def forward(
        ctx: Any, query_NAC: Tensor, key_TGC: Tensor, value_TGC: Tensor, rows_N: Tensor, lengths: Sequence[int],
        scale: float, *own: Tensor,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(query_NAC.dtype, torch.float32)
        found = blocks(rows_N.numpy(), lengths)
        with torch.autocast("cpu", enabled=False):
            out_NAC = torch.empty_like(query_NAC, dtype=wide)
            lse_NA = torch.empty(query_NAC.shape[:2], dtype=wide)
            causal = _fused_blocks if query_NAC.dtype == wide else _narrow_blocks
            causal(found, query_NAC, key_TGC, value_TGC, rows_N, scale, out_NAC, lse_NA)
            if own:
                from drafter.kernels_numba import own_scores, own_values

                score_JNA = torch.empty(len(own) // 2, *lse_NA.shape, dtype=wide)
                for score_NA, key_NGC in zip(score_JNA, own[0::2], strict=True):
                    own_scores(bits(query_NAC.contiguous()), bits(key_NGC.contiguous()), scale, score_NA.numpy())
                total_NA = torch.logaddexp(lse_NA, score_JNA.logsumexp(0))
                out_NAC.mul_((lse_NA - total_NA).exp_()[..., None])
                for share_NA, value_NGC in zip(score_JNA.sub_(total_NA).exp_(), own[1::2], strict=True):
                    own_values(share_NA.numpy(), bits(value_NGC.contiguous()), out_NAC.numpy())
                lse_NA = total_NA
            narrow_NAC = out_NAC.to(query_NAC.dtype)
        ctx.save_for_backward(query_NAC, key_TGC, value_TGC, rows_N, narrow_NAC, lse_NA, *own)
        ctx.blocks, ctx.scale = found, scale
        return narrow_NAC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NAC: Tensor) -> tuple[Tensor | None, ...]:
        query_NAC, key_TGC, value_TGC, rows_N, out_NAC, lse_NA, *own = ctx.saved_tensors
        wide, narrow, scale = lse_NA.dtype, query_NAC.dtype, ctx.scale
        (power, rest), groups = _split(scale), key_TGC.shape[1]
        with torch.autocast("cpu", enabled=False):
            wide_grad_NAC = grad_NAC.to(wide)
            delta_NA = (wide_grad_NAC * out_NAC).sum(-1)
            grad_query_NAC = torch.zeros_like(query_NAC, dtype=wide)
            grad_key_TGC, grad_value_TGC = (torch.zeros_like(part, dtype=wide) for part in (key_TGC, value_TGC))
            key_GTC, value_GTC = (part.transpose(0, 1).contiguous() for part in (key_TGC, value_TGC))
            key_GTX, value_GTX = (_with_columns(part, None) for part in (key_GTC, value_GTC))
            for block in ctx.blocks:
                rows = slice(block.first, block.last)
                query_GQC, grad_GQC = (_heads_first(part[rows], groups) for part in (query_NAC, grad_NAC))
                lse_GQ1, delta_GQ1 = (_heads_first(part[rows, :, None], groups) for part in (lse_NA, delta_NA))
                query_GQX, grad_GQX = (
                    _with_columns(query_GQC * power, lse_GQ1 / rest),
                    _with_columns(grad_GQC, delta_GQ1),
                )
                grad_query_GQC = torch.zeros_like(query_GQC, dtype=wide)
                for begin, end in _tiles(block):
                    keys = slice(begin, end)
                    below_GQU = torch.bmm(query_GQX, key_GTX[:, keys].transpose(1, 2))
                    below_GQU = below_GQU if rest == 1 else below_GQU.mul_(rest)
                    share_GQU = _hide(below_GQU, block, begin, end, rows_N).exp_()
                    score_grad_GQU = torch.bmm(grad_GQX, value_GTX[:, keys].transpose(1, 2)).mul_(share_GQU)
                    grad_value_TGC[keys] += torch.bmm(share_GQU.transpose(1, 2), grad_GQC).transpose(0, 1)
                    grad_query_GQC += torch.bmm(score_grad_GQU, key_GTC[:, keys])
                    grad_key_TGC[keys] += torch.bmm(score_grad_GQU.transpose(1, 2), query_GQC).transpose(0, 1)
                grad_query_NAC[rows] = _rows_first(grad_query_GQC, block.last - block.first)
            grad_key_TGC *= scale
            grad_query_NAC *= scale
            grad_own: list[Tensor] = []
            if own:
                from drafter.kernels_numba import own_backward

                fixed = [bits(part) for part in (grad_NAC.contiguous(), lse_NA, delta_NA)]
                query, factor = bits(query_NAC.contiguous()), fixed[1].dtype.type(scale)
                for key_NGC, value_NGC in zip(own[0::2], own[1::2], strict=True):
                    pair = key_NGC.contiguous(), value_NGC.contiguous()
                    grad_pair = [torch.empty_like(part) for part in pair]
                    found = (bits(part) for part in (grad_query_NAC, *grad_pair))
                    own_backward(query, *(bits(part) for part in pair), *fixed, factor, *found)
                    grad_own += grad_pair
        grads = (part.to(narrow) for part in (grad_query_NAC, grad_key_TGC, grad_value_TGC))
        return (*grads, None, None, None, *grad_own)


def _with_columns(part_GQC: Tensor, less_GQ1: Tensor | None) -> Tensor:
    """[G, Q, X]: products with the same of another part, given none, are those of the parts minus `less`.

    It goes into two columns, the second for what the dtype rounds off in the first.
    """
    columns = part_GQC.new_zeros(*part_GQC.shape[:2], _EXTRA)
    if less_GQ1 is None:
        columns[..., :2] = 1
    else:
        coarse_GQ1 = less_GQ1.to(part_GQC.dtype)
        columns[..., :1], columns[..., 1:2] = -coarse_GQ1, coarse_GQ1 - less_GQ1
    return torch.cat([part_GQC, columns], dim=-1)


def _split(scale: float) -> tuple[float, float]:
    """(a power of two, rest in [1, 2)): by the first a query can be multiplied without rounding, whatever its dtype."""
    mantissa, exponent = math.frexp(scale)
    return 2.0 ** (exponent - 1), 2 * mantissa


def _hide(score_GQU: Tensor, block: Block, begin: int, end: int, rows_N: Tensor) -> Tensor:
    """In place: -inf where keys [begin, end) come after the row. By addition, four times as fast as masked_fill_."""
    first = max(begin, block.own)
    if end > block.own + 1:  # all rows see the first of its own keys
        hidden_BU = torch.arange(first, end) > rows_N[block.first : block.last, None]
        mask_BU = torch.zeros(hidden_BU.shape, dtype=score_GQU.dtype).masked_fill_(hidden_BU, -torch.inf)
        score_GQU.view(len(score_GQU), -1, len(mask_BU), end - begin)[..., first - begin :] += mask_BU
    return score_GQU


def _narrow_blocks(
    found: Sequence[Block], query_NAC: Tensor, key_TGC: Tensor, value_TGC: Tensor, rows_N: Tensor, scale: float,
    out_NAC: Tensor, lse_NA: Tensor,
) -> None:  # fmt: skip
    """Causal attention of all blocks, into out_NAC and lse_NA (both fp32), by products in the queries' dtype."""
    (power, rest), groups, wide = _split(scale), key_TGC.shape[1], lse_NA.dtype
    key_GTC, value_GTC = (part.transpose(0, 1).contiguous() for part in (key_TGC, value_TGC))
    key_GTX = _with_columns(key_GTC, None)
    for block in found:
        rows, count = slice(block.first, block.last), block.last - block.first
        query_GQC = _heads_first(query_NAC[rows], groups) * power
        parts = []
        for begin, end in _tiles(block):
            score_GQU = torch.bmm(query_GQC, key_GTC[:, begin:end].transpose(1, 2))
            largest_GQ1 = _hide(score_GQU, block, begin, end, rows_N).amax(-1, keepdim=True).to(wide)
            largest_GQ1.clamp_(min=-1e30)  # a row that sees none of these keys
            below_GQU = torch.bmm(_with_columns(query_GQC, largest_GQ1), key_GTX[:, begin:end].transpose(1, 2))
            below_GQU = below_GQU if rest == 1 else below_GQU.mul_(rest)
            exp_GQU = _hide(below_GQU, block, begin, end, rows_N).exp_()
            sum_GQ1 = exp_GQU.sum(-1, keepdim=True, dtype=wide)
            out_GQC = torch.bmm(exp_GQU, value_GTC[:, begin:end]).to(wide).div_(sum_GQ1.clamp(min=1e-30))
            lse_GQ1 = sum_GQ1.log_().add_(largest_GQ1 * rest)
            parts.append((_rows_first(out_GQC, count), _rows_first(lse_GQ1, count)[..., 0]))
        out, lse = parts[0]
        for more in parts[1:]:
            out, lse = _merged(out, lse, *more)
        out_NAC[rows], lse_NA[rows] = out, lse


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
    query, key, value = (part.transpose(0, 1)[None] for part in (query_BAC, key_TGC[keys], value_TGC[keys]))
    mask = None
    if isinstance(hidden, Tensor):
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, hidden is True, attn_mask=mask, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from that over each."""
    total = torch.logaddexp(lse, more_lse)
    share = (lse - total).exp_()[..., None]
    return out * share + more * (more_lse - total).exp_()[..., None], total


def _heads_first(part_BAC: Tensor, groups: int) -> Tensor:
    """[G, R * B, C] of [B, A, C]: the queries that share a key head, side by side."""
    return part_BAC.transpose(0, 1).reshape(groups, -1, part_BAC.shape[-1])


def _rows_first(part_GQC: Tensor, count: int) -> Tensor:
    """[B, A, C] of [G, R * B, C]."""
    return part_GQC.view(-1, count, part_GQC.shape[-1]).transpose(0, 1)


def _tiles(block: Block) -> list[tuple[int, int]]:
    """Ranges of all keys of a block."""
    return [(begin, min(begin + _TILE, block.end)) for begin in range(block.start, block.end, _TILE)]
