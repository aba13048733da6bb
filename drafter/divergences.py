"""How far the drafter's probabilities q are from the verifier's p, by name, and the gradient for the drafter's logits.

    soft_cross_entropy  - sum p log q             as EAGLE-3 is trained; its gradient is that of kl
    kl                  sum p log(p / q)
    reverse_kl          sum q log(q / p)          prefers a few of the verifier's tokens to all of them
    tv                  1 - a,  a = sum min(m p, q) total variation: the share of drafts that rejection sampling refuses
    lk                  - log a                   tv with the gradient scaled up where little is accepted
    lk_hybrid           l kl + (1 - l) tv         l = exp(-3 A), no gradient through it: kl first, tv once most is accepted

p is the verifier's share *within the draft vocabulary*: it adds up to 1. m is the verifier's probability of that
vocabulary, so m p is what a server accepts drafts with, and a is its acceptance: what lies outside cannot be accepted.
A is a mean of a, given from outside; each row's own a where it is not.

The last two are the losses of "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding" (arXiv:2602.23881)
as SpecForge computes them: m p in a, p in kl, A the mean over a draft step's rows (docs/drafter.md says what is known of
the paper). Speculators has m = 1 and A = a. Both are among the golden values. Gradients are derived here.

Shape suffixes: N rows, W draft vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Kind = Literal["soft_cross_entropy", "kl", "reverse_kl", "tv", "lk", "lk_hybrid"]
KINDS: tuple[str, ...] = get_args(Kind)
# Those that look at what a server would accept.
ACCEPTANCE = ("tv", "lk", "lk_hybrid")
# Least probability under a logarithm: a stored top-k gives the others none at all.
_LEAST = 1e-20
_HYBRID_DECAY = 3.0


class Divergence(NamedTuple):
    """loss_N: [N] fp32. grad_NW: of each row's loss for its logits. accepted_N: a, for the losses that look at it."""

    loss_N: Tensor
    grad_NW: Tensor
    accepted_N: Tensor | None = None


def divergence(
    kind: str, draft_NW: Tensor, verifier_NW: Tensor, inside_N: Tensor | None = None, mean_N: Tensor | None = None
) -> Divergence:
    """Of q = softmax(logits) from p, both [N, W] in fp32. inside_N: m, 1 when left out. mean_N: A, own a when left out or NaN."""
    if kind in ("soft_cross_entropy", "kl"):
        loss = -(verifier_NW * draft_NW.clamp(min=_LEAST).log()).sum(-1)
        if kind == "kl":
            loss = loss + torch.special.xlogy(verifier_NW, verifier_NW).sum(-1)
        return Divergence(loss, draft_NW * verifier_NW.sum(-1, keepdim=True) - verifier_NW)
    if kind == "reverse_kl":
        ratio_NW = draft_NW.clamp(min=_LEAST).log() - verifier_NW.clamp(min=_LEAST).log()
        loss = (draft_NW * ratio_NW).sum(-1)
        return Divergence(loss, draft_NW * (ratio_NW - loss[:, None]))
    whole_NW = verifier_NW if inside_N is None else verifier_NW * inside_N[:, None]
    accepted = torch.minimum(draft_NW, whole_NW).sum(-1)
    # d a / d q is 1 where q < m p, else 0; through the softmax: q (that - its mean under q).
    rising_NW = (draft_NW < whole_NW).to(draft_NW.dtype)
    grad_NW = -draft_NW * (rising_NW - (draft_NW * rising_NW).sum(-1, keepdim=True))
    if kind == "tv":
        return Divergence(1 - accepted, grad_NW, accepted)
    if kind == "lk":
        bounded = accepted.clamp(min=_LEAST)
        return Divergence(-bounded.log(), grad_NW / bounded[:, None], accepted)
    mean_N = accepted if mean_N is None else torch.where(mean_N.isnan(), accepted, mean_N)
    share = torch.exp(-_HYBRID_DECAY * mean_N)
    kl, kl_grad_NW, _ = divergence("kl", draft_NW, verifier_NW)
    loss = share * kl + (1 - share) * (1 - accepted)
    return Divergence(loss, share[:, None] * kl_grad_NW + (1 - share)[:, None] * grad_NW, accepted)


def entropy(exp_NW: Tensor, scale_N: Tensor) -> Tensor:
    """[N] fp32, -sum p log p of p = exp * scale."""
    verifier_NW = exp_NW.float() * scale_N[:, None]
    return -torch.special.xlogy(verifier_NW, verifier_NW).sum(-1)
