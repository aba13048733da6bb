"""The loss of training-time test: soft cross-entropy to the verifier on the draft vocabulary, and fair counts.

Row t at step k drafts token t+2+k; its teacher is the final state of token t+1+k. The row counts if the loss mask holds
for all of tokens t+1 .. t+2+k: a server drafts there only after the verifier wrote what precedes. Where the verifier's
likeliest token is outside the draft vocabulary there is nothing right to learn: such positions give no loss, but they
stay in the denominator (so that vocabularies of any size train at one rate) and count as misses.

Shape suffixes as in drafter/model.py, and: K steps, M teacher positions, which are as many as step 0 has rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafter.errors import DrafterError
from drafter.model import Drafter
from drafter.ttt import check_batch, unroll
from drafter.verifier_head import VerifierHead

# fp32 logits that exist at one time, of each of drafter and teacher: 1,048 rows of 32,000.
_LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Loss:
    """What one batch gave. `loss` is a scalar to call backward on, the others are [K] counts or sums to add up.

    positions: rows that count. covered: those whose verifier argmax is in the draft vocabulary. matched: those where
    the drafter's likeliest token is the verifier's, of its *whole* vocabulary: matched / positions compares drafters of
    any vocabulary. cross_entropy: fp32 sum over the covered ones.
    """

    loss: Tensor
    positions: Tensor
    covered: Tensor
    matched: Tensor
    cross_entropy: Tensor


def ttt_loss(
    drafter: Drafter,
    head: VerifierHead,
    token_ids_T: Tensor,
    loss_mask_T: Tensor,
    features_TF: Tensor,
    final_TD: Tensor,
    lengths: Sequence[int],
    *,
    steps: int,
    decay: float = 0.8,
    denominator: int | Tensor | None = None,
    argmax_T: Tensor | None = None,
) -> Loss:
    """Loss of a packed batch: sum over steps k of decay^k times the summed cross-entropy, over the denominator.

    token_ids_T, features_TF, lengths: as for `drafter.ttt.unroll`. loss_mask_T: [T] bool. final_TD: [T, D] the
    verifier's final hidden states, after its last norm.
    denominator: positions of step 0, this batch's when left out; the whole step's when it is accumulated or
    distributed, and then losses are to be *added* over its parts.
    argmax_T: [T] int64, the verifier's likeliest token after each one, where the dataset stores it.
    Raises DrafterError for shapes that do not agree.
    """
    check_batch(drafter, token_ids_T, features_TF, lengths, steps)
    for name, part, shape in (
        ("loss mask", loss_mask_T, token_ids_T.shape),
        ("final states", final_TD, (len(token_ids_T), head.weight_VD.shape[1])),
        ("argmax", argmax_T, token_ids_T.shape),
    ):
        if part is not None and part.shape != shape:
            raise DrafterError(f"{name}: expected {list(shape)}, found {list(part.shape)}")
    wanted_KT = loss_rows(loss_mask_T, lengths, steps)
    teacher_M = wanted_KT[0].nonzero().squeeze(1) + 1
    final_MD = final_TD[teacher_M]
    best_M = head.argmax(final_MD) if argmax_T is None else argmax_T[teacher_M]
    covered_M = head.in_draft_V[best_M]
    device = token_ids_T.device
    slot_T = torch.full((len(token_ids_T),), -1, device=device)  # where in M a position is
    slot_T[teacher_M] = torch.arange(len(teacher_M), device=device)

    hidden, slots, positions = [], [], []
    for k, step in enumerate(unroll(drafter, token_ids_T, features_TF, lengths, steps, wanted_KT)):
        slot_N = slot_T[step.rows_N + 1 + k]
        keep = covered_M[slot_N].nonzero().squeeze(1)
        hidden.append(step.hidden_ND[keep])
        slots.append(slot_N[keep])
        positions.append(len(step.rows_N))
    counts = [len(slot) for slot in slots]
    if denominator is None:
        denominator = positions[0]
    share_K = decay ** torch.arange(steps, device=device) / torch.as_tensor(denominator, device=device).clamp(min=1)
    share_N = share_K.repeat_interleave(torch.tensor(counts, device=device))
    slot_N = torch.cat(slots)
    loss, loss_N, draft_N = _HeadLoss.apply(
        drafter.norm(torch.cat(hidden)), drafter.lm_head.weight, head.draft_logits(final_MD), slot_N, share_N
    )
    match_N = drafter.target_ids(draft_N) == best_M[slot_N]
    return Loss(
        loss=loss,
        positions=torch.tensor(positions, device=device),
        covered=torch.tensor(counts, device=device),
        matched=torch.stack([part.sum() for part in match_N.split(counts)]),
        cross_entropy=torch.stack([part.sum() for part in loss_N.split(counts)]),
    )


def loss_rows(loss_mask_T: Tensor, lengths: Sequence[int], steps: int) -> Tensor:
    """[K, T] bool: row t at step k has tokens t+1 .. t+2+k in its sequence and the loss mask holds for all of them."""
    at_T = torch.arange(len(loss_mask_T), device=loss_mask_T.device)
    ends = zip(lengths, accumulate(lengths), strict=True)
    end_T = torch.cat([torch.full((length,), end, device=at_T.device) for length, end in ends])

    def ahead(tokens: int) -> Tensor:
        return (at_T + tokens < end_T) & loss_mask_T.bool()[(at_T + tokens).clamp(max=len(at_T) - 1)]

    rows = [ahead(1) & ahead(2)]
    for step in range(1, steps):
        rows.append(rows[-1] & ahead(2 + step))
    return torch.stack(rows)


class _HeadLoss(torch.autograd.Function):
    """lm_head and soft cross-entropy in chunks of rows, gradients included, so that no [N, W] outlives a chunk.

    The gradient of the logits is share * (softmax(logits) - softmax(teacher)), known as soon as the loss is: forward
    turns it into those of states and weight, and backward only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_WD: Tensor, teacher_MW: Tensor, slot_N: Tensor, share_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        device, wants_hidden, wants_weight = hidden_ND.device, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight_WD.dtype
        loss_N = torch.empty(len(hidden_ND), device=device)
        draft_N = torch.empty_like(slot_N)
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_WD = torch.zeros_like(weight_WD, dtype=torch.float32) if wants_weight else None
        with torch.autocast(device.type, enabled=False):
            weight_WD = weight_WD.to(dtype)
            chunk = max(1, _LOGITS_AT_ONCE // len(weight_WD))
            for start in range(0, len(hidden_ND), chunk):
                rows = slice(start, start + chunk)
                states = hidden_ND[rows].to(dtype)
                log_draft = (states @ weight_WD.T).float().log_softmax(dim=-1)
                teacher = teacher_MW[slot_N[rows]].float().softmax(dim=-1)
                loss_N[rows] = -(teacher * log_draft).sum(dim=-1)
                draft_N[rows] = log_draft.argmax(dim=-1)
                if grad_hidden_ND is None and grad_weight_WD is None:
                    continue
                grad_logits = (log_draft.exp_().sub_(teacher) * share_N[rows, None]).to(dtype)
                if grad_hidden_ND is not None:
                    grad_hidden_ND[rows] = (grad_logits @ weight_WD).to(hidden_ND.dtype)
                if grad_weight_WD is not None:
                    grad_weight_WD += grad_logits.T @ states
        ctx.save_for_backward(grad_hidden_ND, grad_weight_WD)
        ctx.mark_non_differentiable(loss_N, draft_N)
        return (loss_N * share_N).sum(), loss_N, draft_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden_ND, grad_weight_WD = ctx.saved_tensors
        return (
            None if grad_hidden_ND is None else grad_hidden_ND * grad,
            None if grad_weight_WD is None else grad_weight_WD * grad,
            None,
            None,
            None,
        )
