"""Attention of one TTT step on a CPU: some rows of packed sequences, over the causal step-0 keys and their own later ones.

Forward: the causal part by torch's fused kernel, block by block of wanted rows, so that rows that nobody wants cost
nothing; it also returns log-sum-exps, by which the parts (keys before the block, keys in it, the row's own later keys)
are merged. Backward: with the merged output and the merged log-sum-exp L, every part's share is exp(score - L), so each
key tile is worked off alone, all heads that share a key in one matrix product. Torch's own backward kernel runs at 60
GFLOP/s whatever the dtype, this one at three times that. Scores are fp32 in both; nothing of size [T, T] exists.

Shape suffixes as in drafter/ttt.py, and: B rows of a block, U keys of a tile, Q = R * B queries that share a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows of a block and keys of a tile: 9 heads * 256 * 1,024 fp32 scores are 9 MiB.
_BLOCK, _TILE = 256, 1024
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
            for block in found:
                rows = slice(block.first, block.last)
                query = query_NAC[rows]
                mask = _hidden(rows_N[rows], block.own, block.end)
                out, lse = _fused(query, key_TGC, value_TGC, slice(block.own, block.end), scale, mask)
                if block.own > block.start:
                    before = _fused(query, key_TGC, value_TGC, slice(block.start, block.own), scale, None)
                    out, lse = _merged(out, lse, *before)
                out_NAC[rows], lse_NA[rows] = out, lse
            if own:
                score_JNA = _own_scores(query_NAC, own[0::2], scale)
                total_NA = torch.logaddexp(lse_NA, score_JNA.logsumexp(0))
                out_NAC.mul_((lse_NA - total_NA).exp_()[..., None])
                for score_NA, value_NGC in zip(score_JNA, own[1::2], strict=True):
                    share_NGR = _grouped((score_NA - total_NA).exp_(), value_NGC.shape[1])
                    out_NAC.view(*share_NGR.shape, out_NAC.shape[-1]).addcmul_(
                        share_NGR[..., None], value_NGC[:, :, None].to(wide)
                    )
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
        groups = key_TGC.shape[1]
        with torch.autocast("cpu", enabled=False):
            wide_grad_NAC = grad_NAC.to(wide)
            delta_NA = (wide_grad_NAC * out_NAC).sum(-1)
            grad_query_NAC = torch.zeros_like(query_NAC, dtype=wide)
            grad_key_TGC, grad_value_TGC = (torch.zeros_like(part, dtype=wide) for part in (key_TGC, value_TGC))
            # Heads first, and scores in fp32 from fp32: a bf16 score of 70 would be off by a quarter.
            key_GTC, value_GTC = key_TGC.transpose(0, 1).contiguous(), value_TGC.transpose(0, 1).contiguous()
            wide_key_GTC = key_GTC.to(wide)
            for block in ctx.blocks:
                rows = slice(block.first, block.last)
                query_GQC = _heads_first(query_NAC[rows], groups)
                wide_query_GQC = query_GQC.to(wide) * scale
                grad_GQC = _heads_first(grad_NAC[rows], groups)
                lse_GQ1, delta_GQ1 = (_heads_first(part[rows, :, None], groups) for part in (lse_NA, delta_NA))
                grad_query_GQC = torch.zeros_like(query_GQC, dtype=wide)
                for begin, end in _tiles(block):
                    keys = slice(begin, end)
                    share_GQU = torch.bmm(wide_query_GQC, wide_key_GTC[:, keys].transpose(1, 2)).sub_(lse_GQ1)
                    if end > block.own:
                        hidden_BU = torch.arange(begin, end) > rows_N[rows, None]
                        share_GQU.view(groups, -1, *hidden_BU.shape).masked_fill_(hidden_BU, -torch.inf)
                    share_GQU.exp_()
                    score_grad_GQU = torch.bmm(grad_GQC, value_GTC[:, keys].transpose(1, 2)).to(wide)
                    score_grad = score_grad_GQU.sub_(delta_GQ1).mul_(share_GQU).to(narrow)
                    grad_value_TGC[keys] += _tokens_first(torch.bmm(share_GQU.to(narrow).transpose(1, 2), grad_GQC))
                    grad_query_GQC += torch.bmm(score_grad, key_GTC[:, keys])
                    grad_key_TGC[keys] += _tokens_first(torch.bmm(score_grad.transpose(1, 2), query_GQC))
                count = block.last - block.first
                grad_query_NAC[rows] = grad_query_GQC.view(
                    len(query_GQC) * (query_GQC.shape[1] // count), count, -1
                ).transpose(0, 1)
            grad_key_TGC *= scale
            grad_query_NAC *= scale
            grad_own: list[Tensor] = []
            if own:
                rows, heads, width = query_NAC.shape
                shape = (rows, groups, heads // groups, width)
                query, grad = query_NAC.to(wide).view(shape), wide_grad_NAC.view(shape)
                shares_JNA = _own_scores(query_NAC, own[0::2], scale).sub_(lse_NA).exp_()
                for share_NA, key_NGC, value_NGC in zip(shares_JNA, own[0::2], own[1::2], strict=True):
                    score_grad_NA = (
                        (grad * value_NGC[:, :, None]).sum(-1).flatten(1).sub_(delta_NA).mul_(share_NA * scale)
                    )
                    score_grad_NGR1, share_NGR1 = (
                        _grouped(part, groups)[..., None] for part in (score_grad_NA, share_NA)
                    )
                    grad_query_NAC.view(shape).addcmul_(score_grad_NGR1, key_NGC[:, :, None].to(wide))
                    grad_own += [(score_grad_NGR1 * query).sum(2).to(narrow), (share_NGR1 * grad).sum(2).to(narrow)]
        grads = (part.to(narrow) for part in (grad_query_NAC, grad_key_TGC, grad_value_TGC))
        return (*grads, None, None, None, *grad_own)


def _hidden(rows_B: Tensor, own: int, end: int) -> Tensor | bool:
    """Which keys of [own, end) these rows do not see, [B, U] bool; True instead where that is simply those behind them."""
    if end - own == len(rows_B):
        return True
    return torch.arange(own, end) > rows_B[:, None]


def _fused(
    query_BAC: Tensor, key_TGC: Tensor, value_TGC: Tensor, keys: slice, scale: float, hidden: Tensor | bool | None
) -> tuple[Tensor, Tensor]:
    """(output [B, A, C], log-sum-exp [B, A]) over these keys. hidden: see `_hidden`; all keys are seen when left out."""
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


def _own_scores(query_NAC: Tensor, keys: Sequence[Tensor], scale: float) -> Tensor:
    """[J, N, A] of a row's own keys, one for each later step, in fp32 or better."""
    wide = torch.promote_types(query_NAC.dtype, torch.float32)
    rows, heads, width = query_NAC.shape
    groups = keys[0].shape[1]
    query_NGRC = query_NAC.to(wide).view(rows, groups, heads // groups, width)
    scores = [(query_NGRC * key[:, :, None]).sum(-1).view(rows, heads) for key in keys]
    return torch.stack(scores).mul_(scale)


def _grouped(part_NA: Tensor, groups: int) -> Tensor:
    """[N, G, R] of [N, A]."""
    return part_NA.view(len(part_NA), groups, part_NA.shape[1] // groups)


def _heads_first(part_BAC: Tensor, groups: int) -> Tensor:
    """[G, R * B, C] of [B, A, C]: the queries that share a key head, side by side."""
    return part_BAC.transpose(0, 1).reshape(groups, -1, part_BAC.shape[-1])


def _tokens_first(part_GUC: Tensor) -> Tensor:
    return part_GUC.transpose(0, 1)


def _tiles(block: Block) -> list[tuple[int, int]]:
    """Key ranges of a block: those that all its rows see, then those that some do."""
    before = [(begin, min(begin + _TILE, block.own)) for begin in range(block.start, block.own, _TILE)]
    return [*before, *((begin, min(begin + _TILE, block.end)) for begin in range(block.own, block.end, _TILE))]
