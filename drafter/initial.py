"""The weights a drafter starts from."""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.model import Drafter
from drafter.recipe import DrafterSection
from drafter.verifier_weights import VerifierWeights
from vocab.mapping import DraftVocab

# Chosen on SmolLM2-135M with 6,558 loss tokens and 104 updates, by loss and greedy matches on held-out prompts:
# torch's defaults gave 4.44 and 23.8 %, the first two 4.15 and 26.9 %, all three 3.80 and 27.0 %. (From 15.1, 12.2, 6.3.)
# With a random head they do harm: 4.45 and 21.3 % against 4.25 and 24.8 % of torch's defaults, which it keeps.
_FEATURES_THROUGH = 1.0  # `fc` begins as the highest captured layer, passed through
_OUTPUTS = 0.1  # of torch's usual range, for what attention and MLP add to it
# Spread of an embedding of the drafter's own; its rows are normed before they are read, so it sets their pace only.
_EMBEDDING = 0.02
_NORM = 0.2  # of the verifier's last norm: its rows are sure of a token before the drafter knows which


def new_drafter(
    config: DrafterConfig, vocabulary: DraftVocab, weights: VerifierWeights, section: DrafterSection, seed: int
) -> Drafter:
    """An untrained drafter on the CPU, the same for the same seed: fp32, with the verifier's embedding as it is.

    A drafter of another width cannot use that: its embedding is its own, random, and trained, as the servers expect.
    section.lm_head: `trained` starts everything at random; `initialised` and `frozen` start the head at the verifier's
    rows, the last norm at the verifier's, which is what those rows expect, scaled down, and the rest as said above.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config, vocabulary, _embedding(config, weights))
    if config.attention_bias:
        torch.nn.init.zeros_(drafter.midlayer.self_attn.o_proj.bias)
    if section.lm_head != "trained":
        with torch.no_grad():
            if config.target_hidden_size == config.hidden_size:
                drafter.fc.weight.zero_()
                drafter.fc.weight[:, -config.hidden_size :].fill_diagonal_(_FEATURES_THROUGH)
            drafter.midlayer.self_attn.o_proj.weight *= _OUTPUTS
            drafter.midlayer.mlp.down_proj.weight *= _OUTPUTS
            drafter.lm_head.weight.copy_(weights.lm_head_VD[torch.from_numpy(vocabulary.target_ids)])
            drafter.norm.weight.copy_(weights.norm_D * _NORM)
    drafter.lm_head.weight.requires_grad = section.lm_head != "frozen"
    drafter.embed_tokens.weight.requires_grad = config.own_embedding
    return drafter


def _embedding(config: DrafterConfig, weights: VerifierWeights) -> Tensor:
    if config.own_embedding:
        return torch.randn(config.vocab_size, config.hidden_size) * _EMBEDDING
    return weights.embedding_VD


def parameter_counts(drafter: Drafter) -> dict[str, int]:
    """`trained`: parameters that training changes. `all`: those and the frozen ones (embedding, frozen head)."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in drafter.parameters()]
    return {"trained": sum(size for size, trained in sizes if trained), "all": sum(size for size, _ in sizes)}
