"""The loss of training-time test: distance to the verifier on the draft vocabulary, and fair counts.

Row t at step k drafts token t+2+k; its teacher is the final state of token t+1+k. The row counts if the loss mask holds
for all of tokens t+1 .. t+2+k: a server drafts there only after the verifier wrote what precedes. Where the verifier's
likeliest token is outside the draft vocabulary there is nothing right to learn: such positions give no loss (unless it
is asked for), but they stay in the denominator (so that vocabularies of any size train at one rate) and count as misses.

Shape suffixes as in drafter/model.py, and: K steps, M teacher positions, which are as many as step 0 has rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from drafter.divergences import ACCEPTANCE
from drafter.errors import DrafterError
from drafter.head_loss import HeadLoss
from drafter.model import Drafter
from drafter.teacher import HeadTeacher, Teacher, TopK, TopKTeacher
from drafter.ttt import check_batch, unroll
from drafter.verifier_head import VerifierHead


@dataclass(frozen=True)
class Loss:
    """What one batch gave. `loss` is a scalar to call backward on, the others are [K] counts or sums to add up.

    positions: rows that count. covered: those whose verifier argmax is in the draft vocabulary. matched: those where
    the drafter's likeliest token is the verifier's, of its *whole* vocabulary: matched / positions compares drafters of
    any vocabulary. learnt: rows that are learnt from. cross_entropy: fp32 sum of the loss by name over these. accepted:
    fp32 sum over these of what a server that samples would accept, for a loss that looks at it (`drafter.divergences`).
    """

    loss: Tensor
    positions: Tensor
    covered: Tensor
    matched: Tensor
    cross_entropy: Tensor
    learnt: Tensor
    accepted: Tensor


def ttt_loss(
    drafter: Drafter,
    head: VerifierHead,
    token_ids_T: Tensor,
    loss_mask_T: Tensor,
    features_TF: Tensor,
    final_TD: Tensor | None,
    lengths: Sequence[int],
    *,
    steps: int,
    decay: float = 0.8,
    denominator: int | Tensor | None = None,
    argmax_T: Tensor | None = None,
    inside_T: Tensor | None = None,
    kind: str = "soft_cross_entropy",
    out_of_vocabulary: str = "mask",
    step_weights: Sequence[float] | None = None,
    top_k: TopK | None = None,
    accepted_K: Sequence[float] | None = None,
    rows: str = "served",
) -> Loss:
    """Loss of a packed batch: sum over steps k of decay^k times the summed loss of the rows, over the denominator.

    token_ids_T, features_TF, lengths: as for `drafter.ttt.unroll`. loss_mask_T: [T] bool. final_TD: [T, D] the
    verifier's final hidden states, as `head` reads them; not read where there is a top_k.
    denominator: positions of step 0, this batch's when left out; the whole step's when it is accumulated or
    distributed, and then losses are to be *added* over its parts.
    argmax_T: [T] int64, the verifier's likeliest token after each one, where it is known. inside_T: [T] fp32, its
    probability of the draft vocabulary, where it is known; only losses that look at acceptance read it.
    kind: of `drafter.divergences`. out_of_vocabulary: what is learnt where the verifier's likeliest token is outside
    the draft vocabulary: nothing (`mask`), or its shares of the tokens inside (`renormalise`).
    step_weights: [K], instead of decay^k. top_k: the verifier's likeliest tokens where they are stored: the teacher,
    instead of final_TD's (`drafter.teacher.TopKTeacher` says what becomes of the others). accepted_K: [K], the mean
    acceptance of each step that `lk_hybrid` weighs its parts by; each row's own when left out, or NaN. rows: whose
    positions count, see `counted_rows`. Raises DrafterError for shapes that do not agree.
    """
    check_batch(drafter, token_ids_T, features_TF, lengths, steps)
    for name, part, shape in (
        ("loss mask", loss_mask_T, token_ids_T.shape),
        ("final states", final_TD, (len(token_ids_T), head.weight_VD.shape[1])),
        ("argmax", argmax_T, token_ids_T.shape),
        ("inside", inside_T, token_ids_T.shape),
        ("accepted", None if accepted_K is None else torch.tensor(accepted_K), torch.Size([steps])),
        ("top-k", None if top_k is None else top_k.logsumexp_T, token_ids_T.shape),
        ("step weights", None if step_weights is None else torch.tensor(step_weights), torch.Size([steps])),
    ):
        if part is not None and part.shape != shape:
            raise DrafterError(f"{name}: expected {list(shape)}, found {list(part.shape)}")
    wanted_KT = counted_rows(rows, loss_mask_T, lengths, steps)
    taught_T = torch.stack([row.roll(1 + k) for k, row in enumerate(wanted_KT)]).any(0)
    teacher_M = taught_T.nonzero().squeeze(1)
    if argmax_T is None and top_k is not None:
        argmax_T = top_k.ids_TK[:, 0]
    weighed = kind in ACCEPTANCE and top_k is None  # which says it itself
    best_M, inside_M = _verifiers(head, final_TD, teacher_M, argmax_T, inside_T, weighed)
    covered_M = head.in_draft_V[best_M]
    taught_M = covered_M if out_of_vocabulary == "mask" else torch.ones_like(covered_M)
    if top_k is not None:
        taught_M = taught_M & head.in_draft_V[top_k.ids_TK[teacher_M]].any(-1)
    taught = taught_M.nonzero().squeeze(1)
    teacher_M, best_M, covered_M = teacher_M[taught], best_M[taught], covered_M[taught]
    if top_k is not None:
        stored = top_k[teacher_M]
        teacher: Teacher = TopKTeacher(stored.ids_TK, stored.logits_TK, head, stored.logsumexp_T)
    else:
        inside_M = None if inside_M is None else inside_M[taught]
        teacher = HeadTeacher(_known(final_TD)[teacher_M], head, inside_M)
    device = token_ids_T.device
    slot_T = torch.full((len(token_ids_T),), -1, device=device)  # where in M a position is
    slot_T[teacher_M] = torch.arange(len(teacher_M), device=device)

    hidden, slots, positions = [], [], []
    needed_KT = wanted_KT.flip(0).cummax(0).values.flip(0)  # a row is computed up to its last step that counts
    for k, step in enumerate(unroll(drafter, token_ids_T, features_TF, lengths, steps, needed_KT)):
        counted = wanted_KT[k][step.rows_N].nonzero().squeeze(1)
        slot_N = slot_T[step.rows_N[counted] + 1 + k]
        keep = (slot_N >= 0).nonzero().squeeze(1)
        hidden.append(step.hidden_ND.index_select(0, counted[keep]))
        slots.append(slot_N[keep])
        positions.append(len(counted))
    counts = [len(slot) for slot in slots]
    if denominator is None:
        denominator = positions[0]
    weight_K = decay ** torch.arange(steps, device=device)
    if step_weights is not None:
        weight_K = torch.tensor(step_weights, device=device)
    share_K = weight_K / torch.as_tensor(denominator, device=device).clamp(min=1)
    share_N = share_K.repeat_interleave(torch.tensor(counts, device=device))
    slot_N = torch.cat(slots)
    normed_ND = drafter.norm(torch.cat(hidden))
    mean_N = None
    if accepted_K is not None:
        mean_N = torch.tensor(accepted_K, device=device).repeat_interleave(torch.tensor(counts, device=device))
    weight_WD = drafter.lm_head.weight
    loss, loss_N, draft_N, accepted_N = HeadLoss.apply(normed_ND, weight_WD, teacher, slot_N, share_N, kind, mean_N)
    match_N = drafter.target_ids(draft_N) == best_M[slot_N]
    return Loss(
        loss=loss,
        positions=torch.tensor(positions, device=device),
        covered=torch.stack([part.sum() for part in covered_M[slot_N].split(counts)]),
        matched=torch.stack([part.sum() for part in match_N.split(counts)]),
        cross_entropy=torch.stack([part.sum() for part in loss_N.split(counts)]),
        learnt=torch.tensor(counts, device=device),
        accepted=torch.stack([part.sum() for part in accepted_N.split(counts)]),
    )


def _verifiers(
    head: VerifierHead, final_TD: Tensor | None, teacher_M: Tensor, argmax_T: Tensor | None, inside_T: Tensor | None,
    weighed: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Of each teacher position the likeliest token, and, if it is asked for, the draft vocabulary's probability."""
    if argmax_T is not None and (inside_T is not None or not weighed):
        return argmax_T[teacher_M], None if inside_T is None else inside_T[teacher_M]
    final_MD = _known(final_TD)[teacher_M]
    if not weighed:
        return head.argmax(final_MD), None
    best_M, inside_M = head.argmax_and_inside(final_MD)
    return (
        best_M if argmax_T is None else argmax_T[teacher_M],
        inside_M if inside_T is None else inside_T[teacher_M],
    )


def _known(final_TD: Tensor | None) -> Tensor:
    if final_TD is None:
        raise DrafterError("final states: expected them, or a stored top-k, found neither")
    return final_TD


def counted_rows(rows: str, loss_mask_T: Tensor, lengths: Sequence[int], steps: int) -> Tensor:
    """[K, T] bool, the rows that count at each step: `served` as this module says, or a peer's, to compare with it.

    specforge: the mask holds for token t + k, which is not the last. speculators: it holds for token t + 1 + k. Both
    count rows whose chain left the response and came back, and draft tokens that no server would.
    """
    if rows == "served":
        return loss_rows(loss_mask_T, lengths, steps)
    ahead, least = {"specforge": (0, 1), "speculators": (1, 0)}[rows]
    at_T = torch.arange(len(loss_mask_T), device=loss_mask_T.device)
    ends = zip(lengths, accumulate(lengths), strict=True)
    end_T = torch.cat([torch.full((length,), end, device=at_T.device) for length, end in ends])
    found = []
    for k in range(steps):
        token_T = at_T + ahead + k
        found.append((token_T + least < end_T) & loss_mask_T.bool()[token_T.clamp(max=len(at_T) - 1)])
    return torch.stack(found)


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
