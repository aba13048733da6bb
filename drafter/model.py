"""The EAGLE-3 drafter as SGLang serves it; its state dict has SGLang's names (`fc`, `midlayer.*`, `norm`, `lm_head`).

Row t is the pair (features of token t, embedding of token t+1) and predicts token t+2. How rows are unrolled over
several steps is `drafter.ttt`; this file holds what one step computes.

Shape suffixes: T rows of a packed batch, N rows at work, D hidden_size, F = K * target_hidden_size (K captured layers),
A attention heads, G key/value heads, C head_dim, I intermediate_size, V the verifier's vocabulary,
W the draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter.compiled import CompiledNorm, CompiledSwiGLU, is_compiled
from drafter.config import DrafterConfig
from drafter.errors import DrafterError
from drafter.projections import Projections
from vocab.mapping import DraftVocab


class Drafter(nn.Module):
    """fc, one decoder layer, norm and a head over the draft vocabulary; the embedding is the verifier's, frozen.

    embedding_VD: the verifier's input embedding, which is not copied: read from a file, it stays there. Raises
    DrafterError when it or the draft vocabulary does not fit the config. Trained parameters are torch's usual random
    initialisation until somebody loads others.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig, draft_vocab: DraftVocab, embedding_VD: Tensor) -> None:
        super().__init__()
        sizes = (config.draft_vocab_size, config.vocab_size)
        if (draft_vocab.size, draft_vocab.vocab_size) != sizes:
            raise DrafterError(
                f"draft vocabulary: expected {sizes[0]} of {sizes[1]} ids, as the config says, "
                f"found {draft_vocab.size} of {draft_vocab.vocab_size}"
            )
        if embedding_VD.shape != (config.vocab_size, config.hidden_size):
            raise DrafterError(
                f"embedding: expected [vocab_size, hidden_size] = {[config.vocab_size, config.hidden_size]}, "
                f"found {list(embedding_VD.shape)}"
            )
        self.config = config
        self.draft_vocab = draft_vocab
        self.embed_tokens = nn.Embedding.from_pretrained(embedding_VD.detach(), freeze=True)
        eps = config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps=eps) for _ in config.capture_layers)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, eps=eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.from_numpy(draft_vocab.d2t.copy()))
        self.register_buffer("t2d", torch.from_numpy(draft_vocab.t2d.copy()))

    def fused(self, features_NF: Tensor) -> Tensor:
        """What step 0 reads instead of an earlier step's output, [N, D], from the captured states of a token."""
        features_NF = features_NF.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            features_NF = self.input_norm(features_NF)
        if self.config.fc_norm:
            parts = features_NF.chunk(len(self.fc_norm), dim=-1)
            features_NF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused_ND: Tensor = self.fc(features_NF)
        return fused_ND

    def fed_back(self, hidden_ND: Tensor) -> Tensor:
        """What the next step reads, [N, D], from the layer's output."""
        fed_ND: Tensor = self.norm(hidden_ND) if self.config.norm_output else hidden_ND
        return fed_ND

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [N, W], from the layer's (pre-norm) output."""
        logits_NW: Tensor = self.lm_head(self.norm(hidden_ND))
        return logits_NW

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The verifier's ids of these draft ids, of the same shape."""
        return draft_ids + self.d2t[draft_ids]


class MidLayer(nn.Module):
    """The decoder layer. Its attention reads twice the width: a normed embedding and normed features."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.self_attn = Projections(config)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def embedded(self, embedding_TD: Tensor, embedding_OD: Tensor) -> Tensor:
        """What the embeddings of tokens add to queries, keys and values, [T, O], by their half of the weights."""
        dtype = torch.promote_types(embedding_TD.dtype, embedding_OD.dtype)
        normed_TD = self.input_layernorm(embedding_TD.to(dtype))
        return functional.linear(normed_TD.to(embedding_OD.dtype), embedding_OD)

    def projected(self, hidden_ND: Tensor, embedded_NO: Tensor, features_OD: Tensor) -> Tensor:
        """Queries, keys and values, [N, O], or some of their columns: those of the features added to the embeddings'."""
        return torch.addmm(embedded_NO, self.hidden_norm(hidden_ND).to(features_OD.dtype), features_OD.T)

    def outputs(self, hidden_ND: Tensor, attended_NAC: Tensor) -> Tensor:
        """The layer's output before the last norm, [N, D]: what the head reads and what the next step is fed."""
        hidden_ND = hidden_ND + self.self_attn.o_proj(attended_NAC.flatten(1))
        mixed_ND: Tensor = hidden_ND + self.mlp(self.post_attention_layernorm(hidden_ND))
        return mixed_ND


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        """Compiled on a CPU. Else, under autocast, x is bf16 and the weight fp32, for which torch has no fused norm."""
        if is_compiled(x) and self.weight.dtype == torch.float32:
            normed: Tensor = CompiledNorm.apply(x, self.weight, self.eps)
            return normed
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        gate_NI, up_NI = self.gate_proj(hidden_ND), self.up_proj(hidden_ND)
        inner_NI = CompiledSwiGLU.apply(gate_NI, up_NI) if is_compiled(gate_NI) else functional.silu(gate_NI) * up_NI
        mixed_ND: Tensor = self.down_proj(inner_NI)
        return mixed_ND
