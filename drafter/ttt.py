"""Training-time test: the drafter unrolled k steps on its own outputs, over packed sequences.

At step k (from 0) row t reads its own output of step k-1 (features of token t at step 0) and the embedding of token
t+1+k, sits at position t+k, and predicts token t+2+k. It attends to the step-0 keys of rows 0..t of its sequence and
to its own keys of steps 1..k: what a server has in its cache when it drafts k+1 tokens after token t+1.

So a row's later steps concern nobody but the row: from step 1 on, only rows whose loss is wanted are computed, and at
step 0 the others give keys and values only.

Shape suffixes as in drafter/model.py, and: S rows of one sequence, J later steps, R = A / G heads that share a key,
E the head width that attention is given, a little more than C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from drafter.errors import DrafterError
from drafter.model import Drafter

# Columns added to each head for the sink: two are used, but fused kernels want multiples of eight.
_EXTRA = 8


@dataclass(frozen=True)
class Step:
    """One step of the unroll. rows_N: [N] int64 into the packed batch, ascending. hidden_ND: the layer's output."""

    rows_N: Tensor
    hidden_ND: Tensor


def unroll(
    drafter: Drafter,
    token_ids_T: Tensor,
    features_TF: Tensor,
    lengths: Sequence[int],
    steps: int,
    wanted_KT: Tensor | None = None,
) -> Iterator[Step]:
    """Yield each step's rows and outputs; `drafter.logits(step.hidden_ND)` are its logits.

    token_ids_T: [T] int64, sequences one after the other. features_TF: [T, K * target_hidden_size], captured states in
    the order of `capture_layers`. lengths: tokens of each sequence, T in all.
    wanted_KT: [steps, T] bool, the rows to compute at each step; a row wanted at a step is wanted at all before it.
    Every row when left out: then the last 1+k rows of a sequence, which have no token t+1+k, are fed token 0 and mean
    nothing at step k. Raises DrafterError for shapes that do not agree.
    """
    check_batch(drafter, token_ids_T, features_TF, lengths, steps)
    device = token_ids_T.device
    # For each row: position in its sequence, and where that sequence ends.
    position_T = torch.cat([torch.arange(length, device=device) for length in lengths])
    ends = zip(lengths, accumulate(lengths), strict=True)
    end_T = torch.cat([torch.full((length,), end, device=device) for length, end in ends])

    layer = drafter.midlayer
    attention = layer.self_attn
    rows_N = torch.arange(len(position_T), device=device)
    hidden_ND = drafter.fc(features_TF.to(drafter.fc.weight.dtype))
    later: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        if step == 0:
            inputs = layer.inputs(_embedding(drafter, token_ids_T, rows_N, end_T, 1), hidden_ND)
            key_TGC, value_TGC = attention.key_value(inputs, position_T)
        if wanted_KT is not None:
            keep = wanted_KT[step][rows_N].nonzero().squeeze(1)
            rows_N, hidden_ND = rows_N[keep], hidden_ND[keep]
            later = [(key[keep], value[keep]) for key, value in later]
            if step == 0:
                inputs = inputs[keep]
        if step > 0:
            inputs = layer.inputs(_embedding(drafter, token_ids_T, rows_N, end_T, 1 + step), hidden_ND)
            later.append(attention.key_value(inputs, position_T[rows_N] + step))
        query_NAC = attention.query(inputs, position_T[rows_N] + step)
        attended_NAC = attend(query_NAC, key_TGC, value_TGC, later, rows_N, lengths)
        hidden_ND = layer.outputs(hidden_ND, attended_NAC)
        yield Step(rows_N, hidden_ND)


def attend(
    query_NAC: Tensor,
    key_TGC: Tensor,
    value_TGC: Tensor,
    later: Sequence[tuple[Tensor, Tensor]],
    rows_N: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """Attention of one step, [N, A, C]: causal over the step-0 keys of a row's sequence, and the row's own later keys.

    later: a pair [N, G, C] of keys and values for each step after the first, of the same rows as the queries.
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
    score_NA, own_NAC = _fold(query_NAC, later, scale)
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


def _embedding(drafter: Drafter, token_ids_T: Tensor, rows_N: Tensor, end_T: Tensor, ahead: int) -> Tensor:
    """Embeddings of the tokens `ahead` of these rows, [N, D]; of token 0 where the sequence ends before."""
    at_N = rows_N + ahead
    ids_N = token_ids_T[at_N.clamp(max=len(token_ids_T) - 1)] * (at_N < end_T[rows_N])
    embedding_ND: Tensor = drafter.embed_tokens(ids_N)
    return embedding_ND


def check_batch(drafter: Drafter, token_ids_T: Tensor, features_TF: Tensor, lengths: Sequence[int], steps: int) -> None:
    """Raises DrafterError unless the parts of a packed batch are of one length and of this drafter's widths."""
    tokens = len(token_ids_T)
    if steps < 1:
        raise DrafterError(f"steps: expected at least 1, found {steps}")
    if sum(lengths) != tokens or min(lengths, default=0) < 1:
        raise DrafterError(f"lengths: expected positive ones that add up to {tokens} tokens, found {list(lengths)}")
    if features_TF.shape != (tokens, drafter.config.feature_size):
        raise DrafterError(
            f"features: expected [{tokens}, {drafter.config.feature_size}] "
            f"({len(drafter.config.capture_layers)} captured layers of {drafter.config.target_hidden_size}), "
            f"found {list(features_TF.shape)}"
        )
