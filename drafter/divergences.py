"""How far the drafter's probabilities q are from the verifier's p, by name, and the gradient for the drafter's logits.

    soft_cross_entropy  - sum p log q             as EAGLE-3 is trained; its gradient is that of kl
    kl                  sum p log(p / q)
    reverse_kl          sum q log(q / p)          prefers a few of the verifier's tokens to all of them
    tv                  1 - a,  a = sum min(p, q) total variation: the share of drafts that rejection sampling refuses
    lk                  - log a                   tv with the gradient scaled up where little is accepted
    lk_hybrid           l kl + (1 - l) tv         l = exp(-3 a), no gradient through it: kl first, tv once most is accepted

The last two are the losses of "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding"
(arXiv:2602.23881), as the peers write them; the paper itself could not be had here. `lk` equals SpecForge's LK^alpha
(core/lk_loss.py) in value, and `lk_hybrid` speculators' lk_hybrid with eta = 3, in values and gradients
(tests/drafter/golden). SpecForge takes l from the *mean* a of a draft step over the batch; here, as in speculators, each
row has its own, so that an update does not depend on how its batch is cut into micro-batches. Gradients are derived here.
p is the verifier's share within the draft vocabulary (it adds up to 1), so `a` is the acceptance that the vocabulary
allows, not that of a server.

Shape suffixes: N rows, W draft vocabulary.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["soft_cross_entropy", "kl", "reverse_kl", "tv", "lk", "lk_hybrid"]
KINDS: tuple[str, ...] = get_args(Kind)
# Least probability under a logarithm: a stored top-k gives the others none at all.
_LEAST = 1e-20
_HYBRID_DECAY = 3.0


def divergence(kind: str, draft_NW: Tensor, verifier_NW: Tensor) -> tuple[Tensor, Tensor]:
    """(loss [N], gradient of each row's loss for its logits [N, W]) of q = softmax(logits), fp32."""
    if kind in ("soft_cross_entropy", "kl"):
        loss = -(verifier_NW * draft_NW.clamp(min=_LEAST).log()).sum(-1)
        if kind == "kl":
            loss = loss + torch.special.xlogy(verifier_NW, verifier_NW).sum(-1)
        return loss, draft_NW * verifier_NW.sum(-1, keepdim=True) - verifier_NW
    if kind == "reverse_kl":
        ratio_NW = draft_NW.clamp(min=_LEAST).log() - verifier_NW.clamp(min=_LEAST).log()
        loss = (draft_NW * ratio_NW).sum(-1)
        return loss, draft_NW * (ratio_NW - loss[:, None])
    accepted = torch.minimum(draft_NW, verifier_NW).sum(-1)
    # d a / d q is 1 where q < p, else 0; through the softmax: q (that - its mean under q).
    rising_NW = (draft_NW < verifier_NW).to(draft_NW.dtype)
    grad_NW = -draft_NW * (rising_NW - (draft_NW * rising_NW).sum(-1, keepdim=True))
    if kind == "tv":
        return 1 - accepted, grad_NW
    if kind == "lk":
        bounded = accepted.clamp(min=_LEAST)
        return -bounded.log(), grad_NW / bounded[:, None]
    share = torch.exp(-_HYBRID_DECAY * accepted)
    kl, kl_grad_NW = divergence("kl", draft_NW, verifier_NW)
    return share * kl + (1 - share) * (1 - accepted), share[:, None] * kl_grad_NW + (1 - share)[:, None] * grad_NW


def entropy(exp_NW: Tensor, scale_N: Tensor) -> Tensor:
    """[N] fp32, -sum p log p of p = exp * scale."""
    verifier_NW = exp_NW.float() * scale_N[:, None]
    return -torch.special.xlogy(verifier_NW, verifier_NW).sum(-1)
