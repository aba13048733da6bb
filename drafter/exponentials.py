"""exp(logits - their largest), formed in place of the logits: what a softmax is before it is divided by its sum.

By hand, because torch's own softmax on a CPU takes 5.7 ns a number (bf16 or fp32), four of its passes 1.3 together, and the
compiled loop of drafter/kernels_numba.py 0.3.

Shape suffixes: N rows, D hidden size, W vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.compiled import bits, is_compiled

# Rows of one matrix product. Fewer make it slow (64: half the rate of 512), more fall out of the cache.
_ROWS_AT_ONCE = 512


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
        parts.append(_in_place(out))
    largest, sums, best = (torch.cat(part) for part in zip(*parts, strict=True))
    return Sums(largest, sums, best)


def _in_place(out_NW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(largest, sum, place of the largest) of each row, whose exponentials take its place."""
    if is_compiled(out_NW):
        from drafter.kernels_numba import exponentials as compiled

        largest, sums = torch.empty(2, len(out_NW))
        best = torch.empty(len(out_NW), dtype=torch.int64)
        compiled(bits(out_NW), largest.numpy(), sums.numpy(), best.numpy())
        return largest, sums, best
    best = out_NW.argmax(-1)
    largest = out_NW.gather(1, best[:, None])
    out_NW.sub_(largest).exp_()
    return largest[:, 0].float(), out_NW.sum(-1, dtype=torch.float32), best
