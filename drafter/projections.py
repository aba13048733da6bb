"""Queries, keys and values of the drafter's attention, with RoPE on them, and the way back to its width.

Their weights read the embedding of a token and the features beside it, so they fall into two halves. The embedding's
half is the same whichever step of training-time test feeds the token: it is computed once for each token, not once for
each of the up to k rows that are fed it, and added to the features' half. That saves nearly half of these products.

Shape suffixes as in drafter/model.py, and: O = (A + 2 G) * C columns of queries, keys and values side by side, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from drafter.compiled import CompiledHeads, is_compiled
from drafter.config import DrafterConfig
from drafter.precision import product_dtype
from drafter.rope import frequencies


class Projections(nn.Module):
    """Who attends to whom is decided in `drafter.ttt` and computed in `drafter.attention`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries, self.keys = config.num_attention_heads, config.num_key_value_heads
        queries, keys = self.queries * config.head_dim, self.keys * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias == "o_proj")
        found = frequencies(config.rope_scaling, config.rope_theta, config.head_dim, config.max_position_embeddings)
        # Not a buffer: a model cast to bf16 would take its frequencies along.
        self.frequencies, self.rope_factor = found[0].tolist(), found[1]

    def halves(self) -> tuple[Tensor, Tensor]:
        """(what reads the embedding, what reads the features), [O, D] each, in the dtype of the products."""
        weights = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        embedding_OD, features_OD = _Halves.apply(product_dtype(weights[0]), *weights)
        return embedding_OD, features_OD

    def turns(self, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions 0 .. count-1, [P, C / 2] in fp32 or better."""
        weight = self.q_proj.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        angle_C = torch.tensor(self.frequencies, device=weight.device, dtype=wide)
        angles_PC = torch.arange(count, device=weight.device)[:, None] * angle_C
        return angles_PC.cos() * self.rope_factor, angles_PC.sin() * self.rope_factor

    def heads(
        self, projected_NO: Tensor, turns: tuple[Tensor, Tensor], at_N: Tensor, turned: Sequence[int], plain: int
    ) -> list[Tensor]:
        """Parts of these columns, [N, heads, C]: of `turned` heads each, with RoPE at positions at_N, and `plain` ones.

        RoPE goes over half-heads (Llama's, not interleaved), angles and products in fp32 or better.
        """
        if is_compiled(projected_NO):
            return list(CompiledHeads.apply(projected_NO, *turns, at_N, self.head_dim, tuple(turned), plain))
        cos_NC, sin_NC = (one[at_N, None] for one in turns)
        every = projected_NO.unflatten(-1, (-1, self.head_dim)).split([*turned, *([plain] if plain else [])], dim=1)
        return [_turned(part, cos_NC, sin_NC) for part in every[: len(turned)]] + list(every[len(turned) :])


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = heads.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(heads.dtype)


class _Halves(torch.autograd.Function):
    """Left and right halves of weights [O_i, 2 D], one below the other, [O, D] each, in another dtype."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.rows, ctx.dtypes = [len(one) for one in weights], [one.dtype for one in weights]
        width = weights[0].shape[1] // 2
        made = tuple(weights[0].new_empty(sum(ctx.rows), width, dtype=dtype) for _ in range(2))
        for half, first in zip(made, (0, width), strict=True):
            for part, weight in zip(half.split(ctx.rows), weights, strict=True):
                part.copy_(weight[:, first : first + width])
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, left_OD: Tensor, right_OD: Tensor) -> tuple[Tensor | None, ...]:
        parts = zip(left_OD.split(ctx.rows), right_OD.split(ctx.rows), ctx.dtypes, strict=True)
        return None, *(torch.cat([left.to(dtype), right.to(dtype)], dim=1) for left, right, dtype in parts)
