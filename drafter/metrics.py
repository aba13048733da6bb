"""Numbers about drafts that are fair to any draft vocabulary: all positions in one denominator, the verifier's whole softmax.

For each step k, over the rows that a server would draft at (`drafter.loss.loss_rows`): whether the drafter's likeliest
token is the verifier's (`greedy`), whether it was at all steps up to k (`joint`), and of those it was right at before k
(`conditional`); the verifier's probability of the drafter's likeliest token (`top1`, what greedy drafting is accepted
with); sum min(p, q) (`overlap`, what rejection sampling is accepted with). The last two at temperatures 0, 0.6 and 1,
which divide both sides' logits. Where the draft vocabulary lacks a token, q is 0 there and p is not. All are
teacher-forced: none is an acceptance length.

From a stored top-k instead of final states, `greedy`, `joint` and `conditional` are the same numbers. A token outside the
top-k has p = 0: so at temperature 1, where the stored log-sum-exp gives the others' p, `top1` and `overlap` are lower
bounds, by at most the tail's mass; at 0.6 p is the share among the stored ones, since nobody knows the tail's there.

Shape suffixes as in drafter/loss.py, and: H temperatures, V the verifier's vocabulary, S teacher positions, K stored logits
of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.errors import DrafterError
from drafter.head_loss import chunks
from drafter.loss import loss_rows
from drafter.model import Drafter
from drafter.teacher import TopK
from drafter.ttt import unroll
from drafter.verifier_head import VerifierHead

TEMPERATURES = (0.0, 0.6, 1.0)
# fp32 logits of the verifier's whole vocabulary that exist at one time.
_LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Fair:
    """Sums over rows; add them up with `+`. positions, matched, joint, reached: [K]; top1, overlap: [H, K].

    reached: rows whose drafts before step k were all right.
    """

    positions: NDArray[np.int64]
    matched: NDArray[np.int64]
    joint: NDArray[np.int64]
    reached: NDArray[np.int64]
    top1: NDArray[np.float64]
    overlap: NDArray[np.float64]

    @classmethod
    def zero(cls, steps: int) -> Fair:
        return cls.of_flat(torch.zeros((4 + 2 * len(TEMPERATURES)) * steps, dtype=torch.float64), steps)

    def __add__(self, other: Fair) -> Fair:
        return Fair(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    def flat(self) -> Tensor:
        """All sums in one float64 vector, for workers to add up."""
        return torch.from_numpy(np.concatenate([np.ravel(part).astype(np.float64) for part in vars(self).values()]))

    @classmethod
    def of_flat(cls, flat: Tensor, steps: int) -> Fair:
        counts, sums = np.split(flat.cpu().numpy(), [4 * steps])
        top1, overlap = sums.reshape(2, len(TEMPERATURES), steps)
        positions, matched, joint, reached = counts.round().astype(np.int64).reshape(4, steps)
        return cls(positions, matched, joint, reached, top1.copy(), overlap.copy())

    def shares(self) -> dict[str, Any]:
        """As JSON: each over `positions` (`conditional`: over the rows reached); null where there are none."""

        def share(part: NDArray[Any], of: NDArray[Any]) -> list[float | None]:
            return [round(float(n / d), 6) if d else None for n, d in zip(part, of, strict=True)]

        return {
            "positions": self.positions.tolist(),
            "greedy": share(self.matched, self.positions),
            "joint": share(self.joint, self.positions),
            "conditional": share(self.joint, self.reached),
            **{
                f"{name}_T{temperature:g}": share(sums, self.positions)
                for name, both in (("top1", self.top1), ("overlap", self.overlap))
                for temperature, sums in zip(TEMPERATURES, both, strict=True)
            },
        }


@torch.no_grad()
def fair_metrics(
    drafter: Drafter, head: VerifierHead, token_ids_T: Tensor, loss_mask_T: Tensor, features_TF: Tensor,
    final_TD: Tensor | None, lengths: Sequence[int], groups: Sequence[str], steps: int, top_k: TopK | None = None,
) -> dict[str, Fair]:  # fmt: skip
    """{group: sums} of a packed batch. groups: of each sequence, its source for instance. Others as for `ttt_loss`.

    Raises DrafterError for shapes that do not agree.
    """
    if final_TD is None and top_k is None:
        raise DrafterError("final states: expected them, or a stored top-k, found neither")
    if len(groups) != len(lengths):
        raise DrafterError(f"groups: expected one for each of {len(lengths)} sequences, found {len(groups)}")
    wanted_KT = loss_rows(loss_mask_T, lengths, steps)
    teacher_M = wanted_KT[0].nonzero().squeeze(1) + 1
    slot_T = torch.full_like(token_ids_T, -1)
    slot_T[teacher_M] = torch.arange(len(teacher_M), device=slot_T.device)
    unrolled = list(unroll(drafter, token_ids_T, features_TF, lengths, steps, wanted_KT))
    counts = [len(step.rows_N) for step in unrolled]
    row_N = torch.cat([step.rows_N for step in unrolled])
    slot_N = torch.cat([slot_T[step.rows_N + 1 + k] for k, step in enumerate(unrolled)])
    hidden_ND = torch.cat([step.hidden_ND for step in unrolled])
    value_NX = torch.empty(len(row_N), 1 + 2 * len(TEMPERATURES), dtype=torch.float64, device=row_N.device)
    order_N = slot_N.argsort(stable=True)
    budget = max(2, _LOGITS_AT_ONCE // len(head.weight_VD))
    for rows, first, last in chunks(slot_N[order_N], budget):
        at = order_N[rows]
        if len(at):
            said = teacher_M[first:last]
            verifier = _Whole(final_TD[said], head) if top_k is None else _Stored(top_k[said])  # type: ignore[index]
            value_NX[at] = _of_chunk(drafter, verifier, hidden_ND[at], slot_N[at] - first)
    return _by_group(value_NX.cpu(), row_N.cpu(), counts, lengths, groups, steps)


class _Whole:
    """The verifier's whole softmax at S positions, from their final states."""

    def __init__(self, final_SD: Tensor, head: VerifierHead) -> None:
        self.logits_SV = (head.read(final_SD) @ head.weight_VD.T).float()
        self.best_S = self.logits_SV.argmax(-1)

    def accepts(
        self, temperature: float, slot_N: Tensor, drafted_N: Tensor, share_NW: Tensor, target_W: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(p of the drafted tokens, sum min(p, q)), both [N]. share_NW: q of each row; target_W: its tokens."""
        share_SV = (self.logits_SV / temperature).softmax(-1)
        return share_SV[slot_N, drafted_N], torch.minimum(share_SV[:, target_W][slot_N], share_NW).sum(-1)


class _Stored:
    """What a stored top-k knows of it."""

    def __init__(self, top_k: TopK) -> None:
        self.top_k, self.best_S = top_k, top_k.ids_TK[:, 0]

    def accepts(
        self, temperature: float, slot_N: Tensor, drafted_N: Tensor, share_NW: Tensor, target_W: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `_Whole.accepts`, with nothing outside the top-k."""
        ids_SK, logits_SK = self.top_k.ids_TK, self.top_k.logits_TK
        if temperature == 1:
            share_SK = (logits_SK - self.top_k.logsumexp_T[:, None]).exp()
        else:
            share_SK = (logits_SK / temperature).softmax(-1)
        last = max(int(ids_SK.max()), int(target_W.max()))
        draft_V = torch.full((last + 1,), -1, device=target_W.device)
        draft_V[target_W] = torch.arange(len(target_W), device=target_W.device)
        draft_NK, share_NK = draft_V[ids_SK][slot_N], share_SK[slot_N]
        least_NK = torch.minimum(share_NK, share_NW.gather(1, draft_NK.clamp(min=0)))
        return (share_NK * (ids_SK[slot_N] == drafted_N[:, None])).sum(-1), (least_NK * (draft_NK >= 0)).sum(-1)


def _of_chunk(drafter: Drafter, verifier: _Whole | _Stored, hidden_ND: Tensor, slot_N: Tensor) -> Tensor:
    """[N, 1 + 2H]: whether the draft is the verifier's likeliest, then top1 and overlap at each temperature."""
    draft_NW = drafter.logits(hidden_ND).float()
    drafted_N = drafter.target_ids(draft_NW.argmax(-1))
    target_W = torch.arange(len(drafter.d2t), device=drafter.d2t.device) + drafter.d2t
    hit_N = (drafted_N == verifier.best_S[slot_N]).double()
    found = [hit_N]
    for temperature in TEMPERATURES:
        if temperature == 0:
            found += [hit_N, hit_N]
        else:
            found += verifier.accepts(temperature, slot_N, drafted_N, (draft_NW / temperature).softmax(-1), target_W)
    return torch.stack([part.double() for part in found], dim=-1)


def _by_group(
    value_NX: Tensor, row_N: Tensor, counts: Sequence[int], lengths: Sequence[int], groups: Sequence[str], steps: int
) -> dict[str, Fair]:
    names = sorted(set(groups))
    group_T = torch.tensor([names.index(group) for group in groups]).repeat_interleave(torch.tensor(list(lengths)))
    right_T = torch.ones(len(group_T), dtype=torch.bool)
    found = {name: Fair.zero(steps) for name in names}
    parts = zip(value_NX.split(list(counts)), row_N.split(list(counts)), strict=True)
    for k, (value, row) in enumerate(parts):
        hit, before = value[:, 0] > 0.5, right_T[row].clone()
        right_T[row] = before & hit
        for at, name in enumerate(names):
            own, fair = group_T[row] == at, found[name]
            fair.positions[k], fair.matched[k] = int(own.sum()), int((hit & own).sum())
            fair.reached[k], fair.joint[k] = int((before & own).sum()), int((before & hit & own).sum())
            sums = value[own, 1:].sum(0).view(-1, 2)
            fair.top1[:, k], fair.overlap[:, k] = sums[:, 0].numpy(), sums[:, 1].numpy()
    return found
