"""A micro-batch: sequences side by side, without padding.

Shape suffixes as in drafter/model.py, and L stored states of a token: the captured layers, then the final one, unless the
dataset stores the verifier's likeliest tokens instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drafter.errors import DrafterError
from drafter.teacher import TopK
from storage.states import States
from storage.torch_decode import join_planes


@dataclass(frozen=True)
class PackedBatch:
    """token_ids_T: [T] int64. loss_mask_T: [T] bool. features_TF: [T, F] bf16, the captured layers in ascending order.
    final_TD: [T, D] bf16, the verifier's final state, on the side of its last norm that the contract says
    (`VerifierHead.norm`); None where top_k is what the verifier says.
    lengths, rows: of each sequence; rows tell them apart over a run. argmax_T: [T] int64, the verifier's likeliest next
    token where the loss asks for it, if it is known. inside_T: [T] fp32, its probability of the draft vocabulary, likewise.
    states_TLH: [T, L, D], what features and final states are views of, if they are.
    """

    token_ids_T: Tensor
    loss_mask_T: Tensor
    features_TF: Tensor
    final_TD: Tensor | None
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    argmax_T: Tensor | None = None
    states_TLH: Tensor | None = None
    top_k: TopK | None = None
    inside_T: Tensor | None = None

    @classmethod
    def of_states(
        cls,
        token_ids_T: Tensor,
        loss_mask_T: Tensor,
        states_TLH: Tensor,
        lengths: tuple[int, ...],
        rows: tuple[int, ...],
        top_k: TopK | None = None,
    ) -> PackedBatch:
        """From bf16 states [T, L, D], which are captured layers alone where there is a top_k.

        Raises DrafterError for states without a captured layer and the final one.
        """
        if top_k is not None:
            features = states_TLH.flatten(1)
            return cls(token_ids_T, loss_mask_T, features, None, lengths, rows, None, states_TLH, top_k)
        if states_TLH.shape[1] < 2:
            raise DrafterError(
                f"states: expected captured layers and the final state, found {states_TLH.shape[1]} of them"
            )
        features, final = states_TLH[:, :-1].flatten(1), states_TLH[:, -1]
        return cls(token_ids_T, loss_mask_T, features, final, lengths, rows, None, states_TLH)

    def without(self, rows: set[int]) -> PackedBatch:
        """The batch with these sequences as zeros that bear no loss."""
        kept_T = torch.tensor([row not in rows for row in self.rows]).repeat_interleave(torch.tensor(self.lengths))
        kept_T = kept_T.to(self.token_ids_T.device)
        features_TF = self.features_TF.masked_fill(~kept_T[:, None], 0)
        final_TD = None if self.final_TD is None else self.final_TD.masked_fill(~kept_T[:, None], 0)
        return replace(
            self, loss_mask_T=self.loss_mask_T & kept_T, features_TF=features_TF, final_TD=final_TD, states_TLH=None
        )

    def to(self, device: torch.device) -> PackedBatch:
        """On this device. From pinned memory it need not wait."""
        if self.token_ids_T.device.type == device.type:
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        token_ids, loss_mask = moved(self.token_ids_T), moved(self.loss_mask_T)
        top_k = None if self.top_k is None else self.top_k.to(device)
        if self.states_TLH is None:
            features = moved(self.features_TF)
            final = None if self.final_TD is None else moved(self.final_TD)
            return PackedBatch(token_ids, loss_mask, features, final, self.lengths, self.rows, top_k=top_k)
        return PackedBatch.of_states(token_ids, loss_mask, moved(self.states_TLH), self.lengths, self.rows, top_k)


@dataclass(frozen=True)
class Planes:
    """A micro-batch as it was stored, uncompressed: byte planes that a device joins (`storage.torch_decode`).

    planes_2TLH: uint8 [2, T, L, D]. coded: of each sequence its codec, and exponent offsets uint8 [L, D] or None.
    """

    token_ids_T: Tensor
    loss_mask_T: Tensor
    planes_2TLH: Tensor
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    coded: tuple[tuple[str, np.ndarray | None], ...]
    top_k: TopK | None = None

    def to(self, device: torch.device) -> PackedBatch:
        """Joined, on this device."""
        planes = self.planes_2TLH.to(device, non_blocking=True)
        states = torch.empty(planes.shape[1:], dtype=torch.bfloat16, device=device)
        low = 0
        offsets = {id(one): torch.from_numpy(np.array(one)).to(device) for _, one in self.coded if one is not None}
        for length, (codec, offset) in zip(self.lengths, self.coded, strict=True):
            known = None if offset is None else offsets[id(offset)]
            states[low : low + length] = join_planes(planes[:, low : low + length], codec, known)
            low += length
        token_ids, loss_mask = (one.to(device, non_blocking=True) for one in (self.token_ids_T, self.loss_mask_T))
        top_k = None if self.top_k is None else self.top_k.to(device)
        return PackedBatch.of_states(token_ids, loss_mask, states, self.lengths, self.rows, top_k)


def pack(rows: Sequence[int], states: Sequence[States]) -> PackedBatch:
    """Sequences as they were read, side by side. rows: what tells them apart."""
    hidden = np.concatenate([one.hidden.view(np.int16) for one in states])
    return PackedBatch.of_states(
        torch.from_numpy(np.concatenate([one.token_ids for one in states]).astype(np.int64)),
        torch.from_numpy(np.concatenate([one.loss_mask for one in states]).astype(np.bool_)),
        torch.from_numpy(hidden).view(torch.bfloat16),
        tuple(len(one.token_ids) for one in states),
        tuple(int(row) for row in rows),
    )
