"""What the drafter learns from: the verifier's probabilities at M positions, over the draft vocabulary.

They are formed a few positions at a time, never as [M, W]: from final hidden states and the draft rows of the
verifier's lm_head, or from a stored top-k.

Shape suffixes as in drafter/loss.py: T tokens, M teacher positions, S some of them, K stored logits of each, W draft
vocabulary, D the verifier's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafter.errors import DrafterError
from drafter.exponentials import exponentials
from drafter.verifier_head import VerifierHead
from storage.teacher import TeacherSummary


@dataclass(frozen=True)
class TopK:
    """The verifier's likeliest tokens after each token, as datasets without final states store them (`storage.teacher`).

    ids_TK: [T, K] int64, the likeliest first. logits_TK: [T, K] fp32. logsumexp_T: [T] fp32, over the whole vocabulary:
    what exp(logits - logsumexp) lack to 1 is the tail, of which nothing else is known.
    """

    ids_TK: Tensor
    logits_TK: Tensor
    logsumexp_T: Tensor

    @classmethod
    def empty(cls, tokens: int, k: int, pinned: bool = False) -> TopK:
        """Memory for so many tokens."""
        return cls(
            torch.empty(tokens, k, dtype=torch.int64, pin_memory=pinned),
            torch.empty(tokens, k, pin_memory=pinned),
            torch.empty(tokens, pin_memory=pinned),
        )

    @classmethod
    def of(cls, summaries: Sequence[TeacherSummary | None]) -> TopK:
        """Of sequences side by side. Raises DrafterError where one has no top-k."""
        widths = [0 if one is None or one.topk_ids is None else one.topk_ids.shape[1] for one in summaries]
        made = cls.empty(sum(0 if one is None else len(one) for one in summaries), max(widths, default=1))
        start = 0
        for one in summaries:
            made.fill(start, one)
            start += 0 if one is None else len(one)
        return made

    def fill(self, start: int, summary: TeacherSummary | None) -> None:
        """Writes the rows of a summary from row `start` on. Raises DrafterError where it has no such top-k."""
        ids = None if summary is None else summary.topk_ids
        if summary is None or ids is None or summary.topk_logits is None or ids.shape[1] != self.ids_TK.shape[1]:
            found = "none" if ids is None else f"{ids.shape[1]} of them"
            raise DrafterError(f"teacher: expected the {self.ids_TK.shape[1]} likeliest tokens, found {found}")
        rows = slice(start, start + len(ids))
        self.ids_TK.numpy()[rows] = ids
        self.logits_TK.numpy()[rows] = summary.topk_logits
        self.logsumexp_T.numpy()[rows] = summary.logsumexp

    def blank(self, rows: slice) -> None:
        """Rows that mean nothing: token 0 for certain. They may bear no loss."""
        self.ids_TK[rows] = 0
        self.logits_TK[rows] = 0
        self.logsumexp_T[rows] = float(np.log(self.ids_TK.shape[1]))

    def to(self, device: torch.device) -> TopK:
        return TopK(*(one.to(device, non_blocking=True) for one in (self.ids_TK, self.logits_TK, self.logsumexp_T)))

    def __getitem__(self, rows: Tensor | slice) -> TopK:
        return TopK(self.ids_TK[rows], self.logits_TK[rows], self.logsumexp_T[rows])


class Teacher(Protocol):
    # The verifier's probability of the draft vocabulary as a whole, [M] fp32 (of a stored top-k: of what is stored of it);
    # None where it is 1, or not asked for.
    inside_M: Tensor | None

    def shares(self, first: int, last: int, out_SW: Tensor) -> Tensor:
        """Writes what the probabilities of positions [first, last) are proportional to; returns the factors, [S] fp32."""
        ...


class HeadTeacher:
    """final_MD: the verifier's final states; head: the verifier's. inside_M: as `Teacher` has it."""

    def __init__(self, final_MD: Tensor, head: VerifierHead, inside_M: Tensor | None = None) -> None:
        self.final_MD, self.weight_WD, self.inside_M = head.read(final_MD), head.draft_weight_WD, inside_M

    def shares(self, first: int, last: int, out_SW: Tensor) -> Tensor:
        weight_WD, out = self.weight_WD, out_SW
        if weight_WD.dtype != out.dtype:
            out = torch.empty_like(out_SW, dtype=weight_WD.dtype)
        sums = exponentials(self.final_MD[first:last], weight_WD, out)
        if out is not out_SW:
            out_SW.copy_(out)
        return 1 / sums.sum


class TopKTeacher:
    """A stored top-k: what lies outside it has probability 0, and the rest of the draft vocabulary's shares add up to 1.

    So the tail is learnt as "never", whatever its mass; with K = V there is none, and this is `HeadTeacher`.
    ids_MK: [M, K] int64, tokens of the verifier. logits_MK: [M, K], or log-probabilities. logsumexp_M: [M], of all the
    verifier's logits; without it `inside_M` is None. Positions whose K tokens are all outside the draft vocabulary teach
    nothing: `known_M` is false there, and they must be left out. Raises DrafterError for shapes that differ.
    """

    def __init__(
        self, ids_MK: Tensor, logits_MK: Tensor, head: VerifierHead, logsumexp_M: Tensor | None = None
    ) -> None:
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
        inside_logits_MK = logits_MK.float().masked_fill(~inside_MK, -torch.inf)
        self.share_MK = inside_logits_MK.softmax(-1).nan_to_num_(0)
        self.inside_M = None
        if logsumexp_M is not None:
            self.inside_M = (inside_logits_MK.logsumexp(-1) - logsumexp_M.float()).exp().clamp(max=1)

    def shares(self, first: int, last: int, out_SW: Tensor) -> Tensor:
        share_SK = self.share_MK[first:last]
        out_SW.zero_().scatter_add_(1, self.draft_MK[first:last], share_SK.to(out_SW.dtype))
        return torch.ones(last - first, device=out_SW.device)
