"""Small random drafters and batches, and the unroll written as naively as it can be: one dense softmax a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.model import Drafter
from drafter.teacher import TopK
from drafter.verifier_head import VerifierHead
from vocab.mapping import DraftVocab


def small_config(**changed: Any) -> DrafterConfig:
    fields = {
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 30, "draft_vocab_size": 11,
        "max_position_embeddings": 64, "capture_layers": (1, 3, 4),
    }  # fmt: skip
    return DrafterConfig(**(fields | changed))


def small_drafter(seed: int = 0, dtype: torch.dtype = torch.float32, **changed: Any) -> Drafter:
    """Every parameter random, norms too; scaled so that attention is far from uniform."""
    config = small_config(**changed)
    torch.manual_seed(seed)
    ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].tolist()
    vocab = DraftVocab.from_ids(ids, config.vocab_size)
    drafter = Drafter(config, vocab, torch.randn(config.vocab_size, config.hidden_size)).to(dtype)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif name != "embed_tokens.weight":
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    return drafter


@dataclass
class Batch:
    token_ids: Tensor
    loss_mask: Tensor
    features: Tensor
    final: Tensor
    lengths: list[int]

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
        return self.token_ids, self.loss_mask, self.features, self.final, self.lengths


def small_batch(drafter: Drafter, lengths: Sequence[int], seed: int = 1, masked: float = 0.25) -> Batch:
    config, tokens = drafter.config, sum(lengths)
    torch.manual_seed(seed)
    return Batch(
        torch.randint(0, config.vocab_size, (tokens,)),
        torch.rand(tokens) >= masked,
        torch.randn(tokens, config.feature_size).to(drafter.fc.weight.dtype),
        torch.randn(tokens, config.target_hidden_size).to(drafter.fc.weight.dtype),
        list(lengths),
    )


def small_head(drafter: Drafter, seed: int = 2) -> VerifierHead:
    torch.manual_seed(seed)
    weight = torch.randn(drafter.config.vocab_size, drafter.config.target_hidden_size)
    return VerifierHead(weight.to(drafter.fc.weight.dtype), drafter.draft_vocab)


def stored_top_k(head: VerifierHead, batch: Batch, k: int) -> TopK:
    """What a dataset with teacher topk(k) would hold of the batch."""
    logits = batch.final.float() @ head.weight_VD.float().T
    best = logits.topk(k, dim=-1)
    return TopK(best.indices, best.values, logits.logsumexp(-1))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x: [S, heads, C], each pair (c, c + C/2) turned as a complex number."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    turned = (
        torch.complex(x[..., :half].double(), x[..., half:].double())
        * torch.polar(torch.ones(()).double(), angle)[:, None]
    )
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def dense_unroll(
    drafter: Drafter, token_ids: Tensor, features: Tensor, lengths: Sequence[int], steps: int
) -> list[Tensor]:
    """The layer's output at each step, [T, D], every sequence by itself and every key in one [S, (k + 1) S] matrix."""
    outputs: list[list[Tensor]] = [[] for _ in range(steps)]
    for ids, states in zip(token_ids.split(list(lengths)), features.split(list(lengths)), strict=True):
        for step, hidden in enumerate(_dense_sequence(drafter, ids, states, steps)):
            outputs[step].append(hidden)
    return [torch.cat(parts) for parts in outputs]


def _dense_sequence(drafter: Drafter, ids: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    config, layer, rows = drafter.config, drafter.midlayer, len(ids)
    eps, heads, groups = config.rms_norm_eps, config.num_attention_heads, config.num_key_value_heads
    hidden = features @ drafter.fc.weight.T
    keys, values, found = [], [], []
    for step in range(steps):
        at = torch.arange(rows) + 1 + step
        token = torch.where(at < rows, ids[at.clamp(max=rows - 1)], 0)
        embedding = norm(drafter.embed_tokens.weight[token], layer.input_layernorm.weight, eps)
        x = torch.cat([embedding, norm(hidden, layer.hidden_norm.weight, eps)], dim=-1)
        positions = torch.arange(rows) + step
        query = (x @ layer.self_attn.q_proj.weight.T).view(rows, heads, -1)
        key = (x @ layer.self_attn.k_proj.weight.T).view(rows, groups, -1)
        value = (x @ layer.self_attn.v_proj.weight.T).view(rows, groups, -1)
        keys.append(rope(key, positions, config.rope_theta).repeat_interleave(heads // groups, 1))
        values.append(value.repeat_interleave(heads // groups, 1))
        query = rope(query, positions, config.rope_theta)
        scores = torch.einsum("sac,uac->asu", query, torch.cat(keys)) / config.head_dim**0.5
        visible = torch.cat([torch.ones(rows, rows).tril()] + [torch.eye(rows)] * step, dim=1).bool()
        shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("asu,uac->sac", shares, torch.cat(values)).reshape(rows, -1)
        hidden = hidden + attended @ layer.self_attn.o_proj.weight.T
        if config.attention_bias:
            hidden = hidden + layer.self_attn.o_proj.bias
        x = norm(hidden, layer.post_attention_layernorm.weight, eps)
        gate = x @ layer.mlp.gate_proj.weight.T
        hidden = hidden + (gate * gate.sigmoid() * (x @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
        found.append(hidden)
    return found
