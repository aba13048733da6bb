"""The verifier's likeliest token after each final state, computed once a sequence and then kept.

It takes a product with the whole lm_head: 49,152 rows for SmolLM2-135M, where that costs more than the drafter's own
forward and backward pass over 8,192. Kept, it is 4 bytes a token: 69 MB for 17.3 M tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from drafter.batch import PackedBatch
from drafter.loss import loss_rows
from drafter.verifier_head import VerifierHead


class ArgmaxCache:
    """Fills in `argmax_T` of batches, from memory where the sequence was seen before.

    Each sequence is multiplied on its own: so the result (at a near tie, a matter of rounding) does not depend on what
    it was packed with, and a resumed run trains on the very same teacher.
    """

    def __init__(self, head: VerifierHead) -> None:
        self.head = head
        self._known: dict[int, torch.Tensor] = {}  # by dataset row: int32 at the positions below, on the CPU

    @torch.no_grad()
    def fill(self, batch: PackedBatch) -> PackedBatch:
        """The batch with argmax_T; positions that the loss does not ask for are 0. Everything on the batch's device.

        A stored top-k says it outright.
        """
        if batch.top_k is not None:
            return replace(batch, argmax_T=batch.top_k.ids_TK[:, 0])
        assert batch.final_TD is not None
        device = batch.token_ids_T.device
        wanted_T = loss_rows(batch.loss_mask_T, batch.lengths, 1)[0].roll(1)  # the teacher of row t stands at t + 1
        argmax_T = torch.zeros_like(batch.token_ids_T)
        start = 0
        for row, length in zip(batch.rows, batch.lengths, strict=True):
            at_N = start + wanted_T[start : start + length].nonzero().squeeze(1)
            start += length
            if not len(at_N):
                continue
            if row not in self._known:
                self._known[row] = self.head.argmax(batch.final_TD[at_N]).to("cpu", torch.int32)
            argmax_T[at_N] = self._known[row].to(device, torch.int64)
        return replace(batch, argmax_T=argmax_T)
