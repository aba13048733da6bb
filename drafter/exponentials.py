"""exp(logits - their largest), formed in place of the logits: what a softmax is before it is divided by its sum.

By hand, because torch's own softmax on a CPU takes 5.7 ns a number (bf16 or fp32), these four passes 1.3 together.

Shape suffixes: N rows, D hidden size, W vocabulary, B blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of one matrix product. Fewer make it slow (64: half the rate of 512), more fall out of the cache.
_ROWS_AT_ONCE = 512
# Columns of a block when the largest of a row is sought: torch's argmax over a row takes ten times as long as its max.
_BLOCK = 64


@dataclass(frozen=True)
class Sums:
    """Of each row's exponentials: largest [N] logit, sum [N] of exp(z - largest), both fp32; best_N, where the largest is."""

    largest: Tensor
    sum: Tensor
    best_N: Tensor

    @property
    def log(self) -> Tensor:
        """log-sum-exp of the logits, [N] fp32."""
        return self.largest + self.sum.log()


def exponentials(states_ND: Tensor, weight_WD: Tensor, out_NW: Tensor) -> Sums:
    """exp(z - max z) of the logits z = states W^T, into out_NW."""
    parts = []
    for states, out in zip(states_ND.split(_ROWS_AT_ONCE), out_NW.split(_ROWS_AT_ONCE), strict=True):
        torch.mm(states, weight_WD.T, out=out)
        largest, best = largest_of(out)
        out.sub_(largest[:, None]).exp_()
        parts.append((largest.float(), out.sum(-1, dtype=torch.float32), best))
    largest, sums, best = (torch.cat(part) for part in zip(*parts, strict=True))
    return Sums(largest, sums, best)


def largest_of(logits_NW: Tensor) -> tuple[Tensor, Tensor]:
    """(values [N], indices [N] int64) of each row's largest number, of the first one among equals."""
    width = logits_NW.shape[1]
    if width % _BLOCK or logits_NW.device.type != "cpu":
        best = logits_NW.argmax(-1)
        return logits_NW.gather(1, best[:, None])[:, 0], best
    blocks = logits_NW.view(len(logits_NW), -1, _BLOCK)
    largest_NB = blocks.amax(-1)
    block = largest_NB.argmax(-1)
    inside = blocks[torch.arange(len(blocks)), block].argmax(-1)
    return largest_NB.gather(1, block[:, None])[:, 0], block * _BLOCK + inside
