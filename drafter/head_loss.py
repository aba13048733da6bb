"""lm_head and loss at once, forward and backward, in chunks: no [N, W] of drafter or teacher ever exists.

Why it looks as it does. With q = softmax(h W^T) and the teacher p, soft cross-entropy is

    loss = logsumexp(h W^T) - h . E    with E = p W, the teacher's mean head row,

and its gradients are dh = q W - E and dW = q^T h - p^T h. So the teacher's probabilities are needed once for each of
its positions, not once for each of the up to K rows that learn from one: rows are sorted by position, and a chunk holds
some positions with all their rows. Of q only e = exp(z - max z) is formed, in place of the logits: its normaliser is a
number a row, which goes into the thin factors of the matrix products. What is left of a chunk is three products and
four passes over [rows, W] that stay in cache. Other losses need both probabilities of a row, in fp32.

Shape suffixes as in drafter/loss.py: N rows, M teacher positions, W draft vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafter.divergences import Divergence, divergence, entropy
from drafter.exponentials import Sums, exponentials
from drafter.mean_rows import pull, taught
from drafter.precision import product_dtype
from drafter.teacher import Teacher

# Logits that exist at one time, drafter's and teacher's together: 262 rows of 32,000, 16 MiB in bf16. Below 256 rows the
# products are slow; a GPU wants more of them at once, and has the memory.
_LOGITS_AT_ONCE = {"cpu": 1 << 23, "cuda": 1 << 27}
_LEAST_ROWS = 256
# Rows of the weight's gradient that are made at one time.
_WIDTH_AT_ONCE = 4096


class HeadLoss(torch.autograd.Function):
    """(summed share * loss, loss_N, draft_N, accepted_N) of rows whose teachers are at slot_N; gradients are formed in
    forward.

    hidden_ND: after the last norm. weight_WD: the drafter's lm_head. slot_N: [N] int64 in [0, M), in any order.
    share_N: [N] fp32, of each row in the sum. kind: of `drafter.divergences.KINDS`. mean_N: [N] fp32 or None, as
    `divergence` takes it. loss_N: [N] fp32. draft_N: [N] int64, the likeliest draft id (the least one among equals).
    accepted_N: [N] fp32, zeros for a loss that does not look at it. Products are in the autocast dtype, else in the
    weight's; sums in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_WD: Tensor, teacher: Teacher, slot_N: Tensor, share_N: Tensor, kind: str,
        mean_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        device, wants_hidden, wants_weight = hidden_ND.device, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dtype = product_dtype(weight_WD)
        loss_N, accepted_N = torch.empty(len(hidden_ND), device=device), torch.zeros(len(hidden_ND), device=device)
        draft_N = torch.empty_like(slot_N)
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_WD = torch.zeros_like(weight_WD, dtype=torch.float32) if wants_weight else None
        by_mean_row = kind in ("soft_cross_entropy", "kl")
        with torch.autocast(device.type, enabled=False):
            weight_WD = weight_WD.to(dtype)
            width = len(weight_WD)
            budget = rows_at_once(width, device)
            if not by_mean_row:
                budget = max(2, budget // 4)  # up to ten of [rows, W] in fp32 exist for a moment
            order_N = slot_N.argsort(stable=True)
            buffer = torch.empty(0, dtype=dtype, device=device)
            for rows, first, last in chunks(slot_N[order_N], budget):
                at = order_N[rows]
                count, slots = len(at), last - first
                if not count:
                    continue
                if len(buffer) < (count + slots) * width:
                    buffer = torch.empty((count + slots) * width, dtype=dtype, device=device)
                exp_RW = buffer[: (count + slots) * width].view(-1, width)
                states = hidden_ND.index_select(0, at).to(dtype)
                scale_S = teacher.shares(first, last, exp_RW[count:])
                sums = exponentials(states, weight_WD, exp_RW[:count])
                draft_N[at] = sums.best_N
                given = states, weight_WD, exp_RW, sums, scale_S, slot_N[at] - first, share_N[at]
                if by_mean_row:
                    loss_N[at] = _by_mean_row(kind, *given, grad_hidden_ND, at, grad_weight_WD)
                    continue
                inside_S = None if teacher.inside_M is None else teacher.inside_M[first:last]
                mean = None if mean_N is None else mean_N[at]
                found = _by_logits(kind, *given, grad_hidden_ND, at, grad_weight_WD, inside_S, mean)
                loss_N[at] = found.loss_N
                if found.accepted_N is not None:
                    accepted_N[at] = found.accepted_N
        ctx.grads = grad_hidden_ND, grad_weight_WD
        ctx.mark_non_differentiable(loss_N, draft_N, accepted_N)
        return (loss_N * share_N).sum(), loss_N, draft_N, accepted_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # Given away, so that what becomes the weight's `.grad` is what forward made: 74 MB at 32,000 x 576.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("HeadLoss: a second backward pass through one forward pass")
        return (*(one if one is None else one.mul_(grad) for one in grads), None, None, None, None, None)


def _by_mean_row(
    kind: str, states: Tensor, weight_WD: Tensor, exp_RW: Tensor, sums: Sums, scale_S: Tensor, slot: Tensor,
    share: Tensor, grad_ND: Tensor | None, at: Tensor, grad_weight_WD: Tensor | None,
) -> Tensor:  # fmt: skip
    """Loss of a chunk's rows; writes the gradient of their states into rows `at`, and adds to that of the weight.

    exp_RW: the rows' exponentials, then those of the teacher. slot: where in the teacher each row's is.
    """
    count = len(states)
    mean_SD = (exp_RW[count:] @ weight_WD).float() * scale_S[:, None]
    along, factor, taught_SD = taught(states, mean_SD, slot, share, sums.sum)
    loss = sums.log - along
    if kind == "kl":
        loss -= entropy(exp_RW[count:], scale_S)[slot]
    if grad_weight_WD is not None:
        _add_product(grad_weight_WD, exp_RW, torch.cat([factor, (taught_SD * -scale_S[:, None]).to(states.dtype)]))
    if grad_ND is not None:
        pull(exp_RW[:count] @ weight_WD, mean_SD, slot, share, sums.sum, at, grad_ND)
    return loss


def _by_logits(
    kind: str, states: Tensor, weight_WD: Tensor, exp_RW: Tensor, sums: Sums, scale_S: Tensor, slot: Tensor,
    share: Tensor, grad_ND: Tensor | None, at: Tensor, grad_weight_WD: Tensor | None, inside_S: Tensor | None,
    mean: Tensor | None,
) -> Divergence:  # fmt: skip
    """`_by_mean_row` for any divergence: both probabilities and the gradient of the logits are formed, in fp32."""
    count = len(states)
    draft_NW = exp_RW[:count].float() / sums.sum[:, None]
    verifier_NW = (exp_RW[count:].float() * scale_S[:, None])[slot]
    found = divergence(kind, draft_NW, verifier_NW, None if inside_S is None else inside_S[slot], mean)
    grad = (found.grad_NW * share[:, None]).to(states.dtype)
    if grad_weight_WD is not None:
        _add_product(grad_weight_WD, grad, states)
    if grad_ND is not None:
        grad_ND.index_copy_(0, at, (grad @ weight_WD).to(grad_ND.dtype))
    return found


def _add_product(sum_WD: Tensor, left_RW: Tensor, right_RD: Tensor) -> None:
    """Adds left^T right, some rows at a time: what is to be added is then small, and still in the cache."""
    for sums, left in zip(sum_WD.split(_WIDTH_AT_ONCE), left_RW.split(_WIDTH_AT_ONCE, dim=1), strict=True):
        sums += left.T @ right_RD


def rows_at_once(width: int, device: torch.device) -> int:
    """How many rows of logits over `width` tokens exist at one time on this device."""
    return max(_LEAST_ROWS, _LOGITS_AT_ONCE.get(device.type, 1 << 25) // width)


def chunks(sorted_slot_N: Tensor, budget: int) -> Iterator[tuple[slice, int, int]]:
    """(rows, first, last): cuts rows that are sorted by slot into runs of whole slots [first, last).

    A run has rows + slots <= budget, or is a single slot with more.
    """
    if not len(sorted_slot_N):
        return
    slots = sorted_slot_N.cpu().numpy()
    ends = np.searchsorted(slots, np.arange(int(slots[-1]) + 1), side="right")  # rows up to and with each slot
    cost = ends + np.arange(1, len(ends) + 1)
    first = row = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(cost, row + first + budget, side="right")))
        yield slice(row, int(ends[last - 1])), first, last
        first, row = last, int(ends[last - 1])
