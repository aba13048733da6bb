"""RMS norm, RoPE and SwiGLU on a CPU, where torch takes up to six passes and a dozen back: 3 to 14 times what these do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafter.exponentials import bits


class CompiledNorm(torch.autograd.Function):
    """RMS norms of parts x [..., D_i] in fp32 or bf16, side by side: x / sqrt(mean of squares + eps) * weight [D_i] fp32.

    given: x, weight, x, weight, ... The output is in the dtype of the x, which is one.
    """

    @staticmethod
    def forward(ctx: Any, eps: float, *given: Tensor) -> Tensor:
        from drafter.kernels_numba import rms_norm

        parts = [one.reshape(-1, one.shape[-1]).contiguous() for one in given[0::2]]
        # Copies: FSDP frees a weight's storage after an update, which none can that numpy has seen.
        weights = [one.detach().clone() for one in given[1::2]]
        scale_PN = torch.empty(len(parts), len(parts[0]))
        out_ND = parts[0].new_empty(len(parts[0]), sum(one.shape[1] for one in parts))
        first, out = 0, bits(out_ND)
        for x_ND, weight, scale_N in zip(parts, weights, scale_PN, strict=True):
            rms_norm(bits(x_ND), weight.numpy(), np.float32(eps), first, out, scale_N.numpy())
            first += x_ND.shape[1]
        ctx.save_for_backward(scale_PN, *parts, *weights)
        return out_ND.view(*given[0].shape[:-1], out_ND.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from drafter.kernels_numba import rms_norm_backward

        scale_PN, *saved = ctx.saved_tensors
        count, first = len(scale_PN), 0
        found: list[Tensor | None] = [None]
        pulls = bits(grad.reshape(-1, grad.shape[-1]).contiguous())
        for at, (x_ND, weight, scale_N) in enumerate(zip(saved[:count], saved[count:], scale_PN, strict=True)):
            wanted = ctx.needs_input_grad[1 + 2 * at]  # not that of a frozen embedding
            grad_x_ND, grad_weight = torch.empty_like(x_ND[: None if wanted else 0]), torch.zeros_like(weight)
            rms_norm_backward(
                pulls, first, bits(x_ND), weight.numpy(), scale_N.numpy(), bits(grad_x_ND), grad_weight.numpy()
            )
            first += x_ND.shape[1]
            found += [grad_x_ND.view(*grad.shape[:-1], x_ND.shape[1]) if wanted else None, grad_weight]
        return tuple(found)


class CompiledSwiGLU(torch.autograd.Function):
    """gate * sigmoid(gate) * up, of [..., I] in fp32 or bf16."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from drafter.kernels_numba import swiglu

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        swiglu(*(_rows(one) for one in (gate, up, out)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from drafter.kernels_numba import swiglu_backward

        gate, up = ctx.saved_tensors
        found = torch.empty_like(gate), torch.empty_like(up)
        swiglu_backward(*(_rows(one) for one in (grad.contiguous(), gate, up, *found)))
        return found


def _rows(tensor: Tensor) -> np.ndarray:
    return bits(tensor.flatten(0, -2))


class CompiledRotation(torch.autograd.Function):
    """RoPE over half-heads of x [N, A, C] in fp32 or bf16. cos_NC, sin_NC: [N, C / 2] fp32."""

    @staticmethod
    def forward(ctx: Any, x_NAC: Tensor, cos_NC: Tensor, sin_NC: Tensor) -> Tensor:
        ctx.save_for_backward(cos_NC, sin_NC)
        return _rotated(x_NAC, cos_NC, sin_NC, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NAC: Tensor) -> tuple[Tensor, None, None]:
        cos_NC, sin_NC = ctx.saved_tensors
        return _rotated(grad_NAC, cos_NC, sin_NC, -1.0), None, None


def _rotated(x_NAC: Tensor, cos_NC: Tensor, sin_NC: Tensor, back: float) -> Tensor:
    from drafter.kernels_numba import rotate

    out_NAC = torch.empty(x_NAC.shape, dtype=x_NAC.dtype)
    rotate(bits(x_NAC.contiguous()), cos_NC.numpy(), sin_NC.numpy(), np.float32(back), bits(out_NAC))
    return out_NAC
