"""RMS norm and RoPE on a CPU, where torch takes six passes and a dozen back: 14 times what these compiled loops do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafter.exponentials import bits


class CompiledNorm(torch.autograd.Function):
    """x [..., D] in fp32 or bf16, weight [D] fp32: x / sqrt(mean of squares + eps) * weight, in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from drafter.kernels_numba import rms_norm

        x_ND = x.reshape(-1, x.shape[-1]).contiguous()
        weight = weight.detach().clone()  # FSDP frees its storage after an update, which none can that numpy has seen
        out_ND, scale_N = torch.empty_like(x_ND), torch.empty(len(x_ND))
        rms_norm(bits(x_ND), bits(weight), np.float32(eps), bits(out_ND), scale_N.numpy())
        ctx.save_for_backward(x_ND, weight, scale_N)
        return out_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from drafter.kernels_numba import rms_norm_backward

        x_ND, weight, scale_N = ctx.saved_tensors
        grad_ND = grad.reshape(x_ND.shape).contiguous()
        grad_x_ND, grad_weight = torch.empty_like(x_ND), torch.zeros_like(weight)
        rms_norm_backward(
            bits(grad_ND), bits(x_ND), bits(weight), scale_N.numpy(), bits(grad_x_ND), grad_weight.numpy()
        )
        return grad_x_ND.view(grad.shape), grad_weight, None


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
