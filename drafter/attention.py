"""Attention of one step of training-time test: which keys a row sees, and how that is computed without [T, k * T].

Shape suffixes as in drafter/model.py, and: S rows of one sequence, J later steps, R = A / G heads that share a key,
E the head width that fused attention is given, a little more than C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from drafter.attention_cpu import CausalAndOwn

# Columns added to each head for the sink: two are used, but fused kernels want multiples of eight.
_EXTRA = 8


class Later(NamedTuple):
    """Keys and values that a step after the first gave, [.., G, C] both, and their rows, [..] int64, ascending."""

    key_NGC: Tensor
    value_NGC: Tensor
    rows_N: Tensor

    def at(self, rows_N: Tensor) -> Tensor:
        """Where these rows, which are among its own, lie."""
        return torch.searchsorted(self.rows_N, rows_N)

    def of(self, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these rows, which are among its own."""
        if len(rows_N) == len(self.rows_N):
            return self.key_NGC, self.value_NGC
        at_N = self.at(rows_N)
        return self.key_NGC.index_select(0, at_N), self.value_NGC.index_select(0, at_N)


def attend(
    query_NAC: Tensor,
    key_TGC: Tensor,
    value_TGC: Tensor,
    later: Sequence[Later],
    rows_N: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """Attention of one step, [N, A, C]: causal over the step-0 keys of a row's sequence, and the row's own later keys.

    later: of each step after the first, of these rows and perhaps more.
    """
    if query_NAC.device.type != "cpu":
        return attend_by_sink(query_NAC, key_TGC, value_TGC, later, rows_N, lengths)
    own = [part for step in later for part in step[:2]]
    at = [step.at(rows_N) for step in later]
    scale = query_NAC.shape[-1] ** -0.5
    attended_NAC: Tensor = CausalAndOwn.apply(query_NAC, key_TGC, value_TGC, rows_N, lengths, scale, at, *own)
    return attended_NAC


def attend_by_sink(
    query_NAC: Tensor,
    key_TGC: Tensor,
    value_TGC: Tensor,
    later: Sequence[Later],
    rows_N: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """`attend` with torch's public attention alone, for any device.

    Exact, without a [T, k * T] matrix, and with ordinary fused attention only: a row's own later keys are folded into
    one *sink*, with the score log sum exp(s_j) and the value sum softmax(s)_j v_j. Every row must see a sink with a
    score of its own, so the score goes into the query, in extra columns where only the sink's key has a 1, and the
    share of attention that the sink took comes out in an extra column where only the sink's value has a 1. The sink
    stands before the sequence, so the mask stays causal; the row of queries that this adds is dropped.
    """
    width = query_NAC.shape[-1]
    scale = width**-0.5
    if not later:
        return _causal(query_NAC, key_TGC, value_TGC, rows_N, lengths, scale)
    score_NA, own_NAC = _fold(query_NAC, [step.of(rows_N) for step in later], scale)
    # A bf16 score would be off by up to 1/256 of itself, so the rounding goes into a second column.
    score_NA = score_NA / scale
    coarse_NA = score_NA.to(query_NAC.dtype)
    fine_NA = (score_NA - coarse_NA).to(query_NAC.dtype)
    query_NAE = torch.cat([query_NAC, torch.stack([coarse_NA, fine_NA], dim=-1)], dim=-1)
    sink_key_E = key_TGC.new_zeros(width + _EXTRA)
    sink_key_E[width : width + 2] = 1
    sink_value_E = value_TGC.new_zeros(width + _EXTRA)
    sink_value_E[width] = 1
    query_NAE = functional.pad(query_NAE, (0, _EXTRA - 2))
    key_TGE, value_TGE = functional.pad(key_TGC, (0, _EXTRA)), functional.pad(value_TGC, (0, _EXTRA))
    mixed_NAE = _causal(query_NAE, key_TGE, value_TGE, rows_N, lengths, scale, (sink_key_E, sink_value_E))
    return mixed_NAE[..., :width] + mixed_NAE[..., width, None] * own_NAC


def _fold(query_NAC: Tensor, later: Sequence[tuple[Tensor, Tensor]], scale: float) -> tuple[Tensor, Tensor]:
    """One key's worth of all later keys of a row: log-sum-exp of their scores [N, A] fp32, mean value [N, A, C]."""
    rows, heads, width = query_NAC.shape
    groups = later[0][0].shape[1]
    query_NGRC = query_NAC.view(rows, groups, heads // groups, width)
    wide = torch.promote_types(query_NAC.dtype, torch.float32)
    score_JNGR = torch.stack([(query_NGRC * key[:, :, None]).sum(-1, dtype=wide) for key, _ in later]) * scale
    share_JNGR = score_JNGR.softmax(dim=0).to(query_NAC.dtype)
    own_NGRC = torch.zeros_like(query_NGRC)
    for share_NGR, (_, value_NGC) in zip(share_JNGR, later, strict=True):
        own_NGRC = own_NGRC + share_NGR[..., None] * value_NGC[:, :, None]
    return score_JNGR.logsumexp(dim=0).view(rows, heads), own_NGRC.view(rows, heads, width)


def _causal(
    query_NAC: Tensor,
    key_TGC: Tensor,
    value_TGC: Tensor,
    rows_N: Tensor,
    lengths: Sequence[int],
    scale: float,
    sink: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of these rows within each sequence, with one more key [C] and value [C] before it, [N, A, C]."""
    query_TAC = query_NAC
    if len(rows_N) != len(key_TGC):  # rows that are not wanted get a zero query
        query_TAC = query_NAC.new_zeros(len(key_TGC), *query_NAC.shape[1:]).index_copy(0, rows_N, query_NAC)
    parts = (part.split(list(lengths)) for part in (query_TAC, key_TGC, value_TGC))
    attended = []
    for query, key, value in zip(*parts, strict=True):
        if sink is not None:
            query = functional.pad(query, (0, 0, 0, 0, 1, 0))
            key = torch.cat([sink[0].expand_as(key[:1]), key])
            value = torch.cat([sink[1].expand_as(value[:1]), value])
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        attended.append(mixed[0].transpose(0, 1)[int(sink is not None) :])
    attended_TAC = torch.cat(attended)
    return attended_TAC if query_TAC is query_NAC else attended_TAC[rows_N]
