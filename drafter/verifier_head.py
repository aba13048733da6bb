"""The verifier's lm_head, frozen: what the verifier says of the token after each final hidden state.

Shape suffixes as in drafter/model.py: N rows, D width of the verifier's states, V its vocabulary, W the draft one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from drafter.errors import DrafterError
from vocab.mapping import DraftVocab

# Logits over the whole vocabulary that exist at one time: 2**24 are 102 rows of Kimi-K2.5, 32 MiB in bf16; a few times as
# much where the draft vocabulary's probability is asked for, which is computed in fp32.
_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class FinalNorm:
    """The verifier's last RMSNorm. weight_D: [D]."""

    weight_D: Tensor
    eps: float


class VerifierHead:
    """weight_VD: the verifier's lm_head (its embedding where they are tied), kept as it is, in its dtype and on its
    device; logits are rounded to that dtype, as the verifier's server rounds them. The draft rows are a copy.
    norm: the verifier's last one where final states are from before it, as the dataset's contract says; None after it.

    Raises DrafterError when the draft vocabulary is of another vocabulary.
    """

    def __init__(self, weight_VD: Tensor, draft_vocab: DraftVocab, norm: FinalNorm | None = None) -> None:
        if weight_VD.ndim != 2 or len(weight_VD) != draft_vocab.vocab_size:
            raise DrafterError(
                f"lm_head: expected [{draft_vocab.vocab_size}, hidden_size], as the draft vocabulary says, "
                f"found {list(weight_VD.shape)}"
            )
        self.norm = norm
        self.weight_VD = weight_VD.detach()
        self.in_draft_V = torch.from_numpy(draft_vocab.t2d.copy()).to(weight_VD.device)
        self.draft_weight_WD = self.weight_VD
        if draft_vocab.size < draft_vocab.vocab_size:
            self.draft_weight_WD = self.weight_VD[torch.from_numpy(draft_vocab.target_ids).to(weight_VD.device)]

    @torch.no_grad()
    def read(self, final_ND: Tensor) -> Tensor:
        """Final states as the rows of lm_head read them: normed, in the weight's dtype."""
        if self.norm is not None:
            weight_D = self.norm.weight_D.to(final_ND.device, torch.float32)
            final_ND = functional.rms_norm(final_ND.float(), weight_D.shape, weight_D, self.norm.eps)
        return final_ND.to(self.weight_VD.dtype)

    @torch.no_grad()
    def draft_logits(self, final_ND: Tensor) -> Tensor:
        """Logits of the draft vocabulary's tokens, [N, W] in the weight's dtype."""
        return self.read(final_ND) @ self.draft_weight_WD.T

    @torch.no_grad()
    def argmax(self, final_ND: Tensor) -> Tensor:
        """The likeliest token of the whole vocabulary, [N] int64, a few rows at a time."""
        return torch.cat([logits_NV.argmax(dim=-1) for logits_NV in self._logits(final_ND)])

    @torch.no_grad()
    def argmax_and_inside(self, final_ND: Tensor) -> tuple[Tensor, Tensor]:
        """`argmax`, and the probability of the draft vocabulary as a whole, [N] fp32."""
        if len(self.draft_weight_WD) == len(self.weight_VD):
            best_N = self.argmax(final_ND)
            return best_N, torch.ones(len(best_N), device=best_N.device)
        best, inside = [], []
        for logits_NV in self._logits(final_ND):
            best.append(logits_NV.argmax(dim=-1))
            drafted_NW = logits_NV[:, self.in_draft_V].float()
            inside.append((drafted_NW.logsumexp(-1) - logits_NV.float().logsumexp(-1)).exp().clamp(max=1))
        return torch.cat(best), torch.cat(inside)

    def _logits(self, final_ND: Tensor) -> Iterator[Tensor]:
        rows = max(1, _LOGITS_AT_ONCE // len(self.weight_VD))
        return (self.read(chunk) @ self.weight_VD.T for chunk in final_ND.split(rows))
