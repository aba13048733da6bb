"""What the drafter learns from: the verifier's probabilities at M positions, over the draft vocabulary.

They are formed a few positions at a time, never as [M, W]: from final hidden states and the draft rows of the
verifier's lm_head, or from a stored top-k.

Shape suffixes as in drafter/loss.py: M teacher positions, S some of them, K stored logits of each, W draft vocabulary,
D the verifier's width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from drafter.errors import DrafterError
from drafter.exponentials import exponentials
from drafter.verifier_head import VerifierHead


class Teacher(Protocol):
    def shares(self, first: int, last: int, out_SW: Tensor) -> Tensor:
        """Writes what the probabilities of positions [first, last) are proportional to; returns the factors, [S] fp32."""
        ...


class HeadTeacher:
    """final_MD: final states after the verifier's last norm; head: the verifier's."""

    def __init__(self, final_MD: Tensor, head: VerifierHead) -> None:
        self.final_MD, self.weight_WD = final_MD, head.draft_weight_WD

    def shares(self, first: int, last: int, out_SW: Tensor) -> Tensor:
        weight_WD, out = self.weight_WD, out_SW
        if weight_WD.dtype != out.dtype:
            out = torch.empty_like(out_SW, dtype=weight_WD.dtype)
        sums = exponentials(self.final_MD[first:last].to(weight_WD.dtype), weight_WD, out)
        if out is not out_SW:
            out_SW.copy_(out)
        return 1 / sums.sum


class TopKTeacher:
    """A stored top-k: what lies outside it has probability 0, and the rest of the draft vocabulary's shares add up to 1.

    ids_MK: [M, K] int64, tokens of the verifier. logits_MK: [M, K], or log-probabilities. Positions whose K tokens are
    all outside the draft vocabulary teach nothing: `known_M` is false there, and they must be left out.
    Raises DrafterError for shapes that differ.
    """

    def __init__(self, ids_MK: Tensor, logits_MK: Tensor, head: VerifierHead) -> None:
        if ids_MK.shape != logits_MK.shape or ids_MK.ndim != 2:
            raise DrafterError(
                f"teacher's top-k: expected ids and logits of one shape [positions, k], found {list(ids_MK.shape)} and "
                f"{list(logits_MK.shape)}"
            )
        inside_MK = head.in_draft_V[ids_MK]
        self.known_M = inside_MK.any(-1)
        draft_V = head.in_draft_V.cumsum(0) - 1
        # Outside the draft vocabulary: probability 0, added to draft id 0.
        self.draft_MK = torch.where(inside_MK, draft_V[ids_MK], 0)
        self.share_MK = logits_MK.float().masked_fill(~inside_MK, -torch.inf).softmax(-1).nan_to_num_(0)

    def shares(self, first: int, last: int, out_SW: Tensor) -> Tensor:
        share_SK = self.share_MK[first:last]
        out_SW.zero_().scatter_add_(1, self.draft_MK[first:last], share_SK.to(out_SW.dtype))
        return torch.ones(last - first, device=out_SW.device)
