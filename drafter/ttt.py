"""Training-time test: the drafter unrolled k steps on its own outputs, over packed sequences.

At step k (from 0) row t reads its own output of step k-1 (features of token t at step 0) and the embedding of token
t+1+k, sits at position t+k, and predicts token t+2+k. It attends to the step-0 keys of rows 0..t of its sequence and
to its own keys of steps 1..k: what a server has in its cache when it drafts k+1 tokens after token t+1.

So a row's later steps concern nobody but the row: from step 1 on, only rows whose loss is wanted are computed, and at
step 0 the others give keys and values only.

Shape suffixes as in drafter/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from drafter.attention import Later, attend
from drafter.errors import DrafterError
from drafter.model import Drafter


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

    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    queries, keys = attention.queries, attention.keys
    turns = attention.turns(max(lengths) + steps)
    embedding_OD, features_OD = attention.halves()
    # Of each token, and of token 0, which is fed where there is none.
    embedding_TD = drafter.embed_tokens(torch.cat([token_ids_T, token_ids_T.new_zeros(1)]))
    embedded_TO = layer.embedded(embedding_TD, embedding_OD)

    def heads(step: int, columns: slice, turned: Sequence[int], plain: int) -> list[Tensor]:
        """Some columns of the projections of the rows at work, which are fed the tokens of this step."""
        at_N = rows_N + 1 + step
        fed_N = torch.where(at_N < end_T[rows_N], at_N, len(token_ids_T))
        embedded_NO = embedded_TO[:, columns].index_select(0, fed_N)
        projected_NO = layer.projected(hidden_ND, embedded_NO, features_OD[columns])
        return attention.heads(projected_NO, turns, position_T[rows_N] + step, turned, plain)

    rows_N = torch.arange(len(position_T), device=device)
    hidden_ND = drafter.fused(features_TF)
    later: list[Later] = []
    for step in range(steps):
        keep = None if wanted_KT is None else wanted_KT[step][rows_N].nonzero().squeeze(1)
        some = keep is not None and len(keep) < len(rows_N)
        query_columns = slice(queries * attention.head_dim)
        if step == 0 and some:  # all rows give keys and values
            key_TGC, value_TGC = heads(0, slice(query_columns.stop, None), [keys], keys)
        if keep is not None and some:
            # index_select: there and back it takes a quarter of the time of `[keep]`.
            rows_N, hidden_ND = rows_N[keep], hidden_ND.index_select(0, keep)
        if step == 0 and some:
            (query_NAC,) = heads(0, query_columns, [queries], 0)
        elif step == 0:
            query_NAC, key_TGC, value_TGC = heads(0, slice(None), [queries, keys], keys)
        else:
            hidden_ND = drafter.fed_back(hidden_ND)
            query_NAC, key_NGC, value_NGC = heads(step, slice(None), [queries, keys], keys)
            later.append(Later(key_NGC, value_NGC, rows_N))
        attended_NAC = attend(query_NAC, key_TGC, value_TGC, later, rows_N, lengths)
        hidden_ND = layer.outputs(hidden_ND, attended_NAC)
        yield Step(rows_N, hidden_ND)


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
