"""What the verifier's whole vocabulary says after each final state, computed once a sequence and then kept.

It takes a product with the whole lm_head: 49,152 rows for SmolLM2-135M, where that costs more than the drafter's own
forward and backward pass over 8,192. Kept, the likeliest token is 4 bytes a token: 69 MB for 17.3 M tokens; and so is
the draft vocabulary's probability, where the loss looks at it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from drafter.batch import PackedBatch
from drafter.loss import loss_rows
from drafter.verifier_head import VerifierHead


class VerifierCache:
    """Fills in `argmax_T` of batches, and `inside_T` if that is asked for, from memory where the sequence was seen before.

    Each sequence is multiplied on its own: so the result (at a near tie, a matter of rounding) does not depend on what
    it was packed with, and a resumed run trains on the very same teacher.
    """

    def __init__(self, head: VerifierHead, inside: bool = False) -> None:
        self.head, self.inside = head, inside
        # By dataset row, at the positions below, on the CPU: int32, and fp32 or nothing.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    @torch.no_grad()
    def fill(self, batch: PackedBatch) -> PackedBatch:
        """The batch with both; positions that the loss does not ask for are 0. Everything on the batch's device.

        A stored top-k says them outright.
        """
        if batch.top_k is not None:
            return replace(batch, argmax_T=batch.top_k.ids_TK[:, 0])
        assert batch.final_TD is not None
        device = batch.token_ids_T.device
        wanted_T = loss_rows(batch.loss_mask_T, batch.lengths, 1)[0].roll(1)  # the teacher of row t stands at t + 1
        argmax_T = torch.zeros_like(batch.token_ids_T)
        inside_T = torch.zeros(len(argmax_T), device=device) if self.inside else None
        start = 0
        for row, length in zip(batch.rows, batch.lengths, strict=True):
            at_N = start + wanted_T[start : start + length].nonzero().squeeze(1)
            start += length
            if not len(at_N):
                continue
            found = self._known.get(row) or self._ask(batch.final_TD[at_N])
            best_N, inside_N = found
            if inside_N is None or inside_N.isfinite().all():  # a shard that is damaged may be repaired
                self._known[row] = found
            argmax_T[at_N] = best_N.to(device, torch.int64)
            if inside_T is not None and inside_N is not None:
                inside_T[at_N] = inside_N.to(device)
        return replace(batch, argmax_T=argmax_T, inside_T=inside_T)

    def _ask(self, final_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.inside:
            return self.head.argmax(final_ND).to("cpu", torch.int32), None
        best_N, inside_N = self.head.argmax_and_inside(final_ND)
        return best_N.to("cpu", torch.int32), inside_N.cpu()
