"""What the verifier says after each token, in short: log-sum-exp of its logits, and the likeliest ids with theirs.

Logits exist for a block of rows and a block of the vocabulary at a time, never as [tokens, vocabulary]: at 163,840 ids
and 8,192 tokens that would be 5 GB. Products are summed in fp32 whatever the weights' dtype, so an engine in bf16 gives the
summary of its own final states, not of logits rounded to 8 bits. It imports nothing of the project: it runs in the engine.

A packed summary is [T, 1 + 2k] float32: log-sum-exp, k logits (falling, equal ones by id), k ids (exact below 2**24).
"""

import torch

ROWS, COLUMNS = 2048, 16384  # 128 MiB of fp32 logits


def summarise(final_TH, head_VH, k, *, first_id=0, bias_V=None, scale=None, softcap=None):
    """Packed summary [T, 1 + 2k] of final states [T, H] (as the lm_head reads them) and an lm_head [V, H], or a part
    of one that begins at the id `first_id`. scale, softcap: what the verifier does to its logits, in that order."""
    parts = [
        _block(final_TH[low : low + ROWS], head_VH, k, first_id, bias_V, scale, softcap)
        for low in range(0, len(final_TH), ROWS)
    ]
    return torch.cat(parts) if parts else final_TH.new_zeros((0, 1 + 2 * k), dtype=torch.float32)


def _block(final_BH, head_VH, k, first_id, bias_V, scale, softcap):
    packed = []
    for low in range(0, len(head_VH), COLUMNS):
        rows_CH = head_VH[low : low + COLUMNS]
        logits_BC = _product(final_BH, rows_CH)
        if bias_V is not None:
            logits_BC += bias_V[low : low + COLUMNS].float()
        if scale is not None:
            logits_BC *= scale
        if softcap:
            logits_BC = torch.tanh(logits_BC / softcap) * softcap
        packed.append(_pack(logits_BC, k, first_id + low))
    return combine(torch.stack(packed), k)


def _product(final_BH, rows_CH):
    if final_BH.is_cuda and final_BH.dtype == rows_CH.dtype and final_BH.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(final_BH, rows_CH.T, out_dtype=torch.float32)
    return final_BH.float() @ rows_CH.float().T


def _pack(logits_BC, k, first_id):
    most = min(k, logits_BC.shape[1])
    values, ids = (x[:, None] for x in logits_BC.max(-1)) if most == 1 else logits_BC.topk(most, dim=-1)
    if most < k:  # a vocabulary smaller than k, or the tail of one
        values = torch.nn.functional.pad(values, (0, k - most), value=float("-inf"))
        ids = torch.nn.functional.pad(ids, (0, k - most), value=0)
    return torch.cat((logits_BC.logsumexp(-1, keepdim=True), values, (ids + first_id).float()), dim=1)


def combine(packed_PTC, k):
    """One packed summary of those of P disjoint parts of the vocabulary: [P, T, 1 + 2k] -> [T, 1 + 2k]."""
    norm_T1 = packed_PTC[:, :, 0].logsumexp(0)[:, None]
    values_TM = packed_PTC[:, :, 1 : 1 + k].transpose(0, 1).flatten(1)
    ids_TM = packed_PTC[:, :, 1 + k :].transpose(0, 1).flatten(1)
    by_id = ids_TM.argsort(dim=1)
    values_TM, ids_TM = values_TM.gather(1, by_id), ids_TM.gather(1, by_id)
    best = values_TM.argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.cat((norm_T1, values_TM.gather(1, best), ids_TM.gather(1, best)), dim=1)


class Head:
    """The lm_head of an SGLang model as this tensor-parallel rank holds it. `of` raises RuntimeError that says what to do."""

    def __init__(self, weight_VH, bias_V, first_id, group, scale, softcap):
        self.weight_VH, self.bias_V, self.first_id = weight_VH, bias_V, first_id
        self.group, self.scale, self.softcap = group, scale, softcap

    @classmethod
    def of(cls, model):
        owner = next(
            (one for one in model.modules() if hasattr(one, "lm_head") and hasattr(one, "logits_processor")), None
        )
        head = None if owner is None else owner.lm_head
        weight = getattr(head, "weight", None)
        indices = getattr(head, "shard_indices", None)
        if (
            not torch.is_tensor(weight)
            or indices is None
            or not weight.is_floating_point()
            or weight.element_size() < 2
        ):
            raise RuntimeError("no plain lm_head in this engine's model (quantised?): set extraction.teacher=none")
        if getattr(head, "use_intel_amx_backend", False):
            raise RuntimeError("the lm_head of this engine is packed for AMX: set extraction.teacher=none")
        rows = indices.org_vocab_end_index - indices.org_vocab_start_index  # the rest is padding
        processor = owner.logits_processor
        bias = getattr(head, "bias", None)
        return cls(
            weight[:rows],
            None if bias is None else bias[:rows],
            indices.org_vocab_start_index,
            head.tp_group if getattr(head, "tp_size", 1) > 1 else None,
            getattr(processor, "logit_scale", None),
            getattr(processor, "final_logit_softcapping", None),
        )

    def summarise(self, final_TH, k):
        """Every rank must call it with the same rows; every rank gets the whole answer."""
        packed = summarise(
            final_TH.to(self.weight_VH.dtype), self.weight_VH, k, first_id=self.first_id, bias_V=self.bias_V,
            scale=self.scale, softcap=self.softcap,
        )  # fmt: skip
        if self.group is None:
            return packed
        return combine(self.group.all_gather(packed[None].contiguous(), dim=0), k)
