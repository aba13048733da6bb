"""RMS norm, RoPE and SwiGLU on a CPU, in a pass each way, where torch takes up to six and a dozen back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def is_compiled(x: Tensor) -> bool:
    """Whether x is for the loops of drafter/kernels_numba.py."""
    cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return cpu and x.dtype in (torch.float32, torch.bfloat16)


def bits(tensor: Tensor) -> np.ndarray:
    """A contiguous CPU tensor as drafter/kernels_numba.py takes it: bf16 as uint16. Without a copy."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class CompiledNorm(torch.autograd.Function):
    """x [..., D] in fp32 or bf16, weight [D] fp32: x / sqrt(mean of squares + eps) * weight, in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from drafter.kernels_numba import rms_norm

        x_ND = x.reshape(-1, x.shape[-1]).contiguous()
        weight = weight.detach().clone()  # FSDP frees its storage after an update, which none can that numpy has seen
        out_ND, scale_N = torch.empty_like(x_ND), torch.empty(len(x_ND))
        rms_norm(bits(x_ND), weight.numpy(), np.float32(eps), bits(out_ND), scale_N.numpy())
        ctx.save_for_backward(x_ND, weight, scale_N)
        return out_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        from drafter.kernels_numba import rms_norm_backward

        x_ND, weight, scale_N = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0]  # not that of a frozen embedding
        grad_x_ND, grad_weight = torch.empty_like(x_ND[: None if wanted else 0]), torch.zeros_like(weight)
        pulls = bits(grad.reshape(x_ND.shape).contiguous())
        rms_norm_backward(pulls, bits(x_ND), weight.numpy(), scale_N.numpy(), bits(grad_x_ND), grad_weight.numpy())
        return grad_x_ND.view(grad.shape) if wanted else None, grad_weight, None


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


class CompiledHeads(torch.autograd.Function):
    """Columns of projected_NO [N, heads * C] in fp32 or bf16 as parts [N, heads, C], some with RoPE over half-heads.

    cos_PC, sin_PC: [P, C / 2] fp32, by position. at_N: [N] int64, of each row. width: C. turned: heads of each part with
    RoPE; plain: of the one without, after them, which is left out where it has none.
    """

    @staticmethod
    def forward(
        ctx: Any, projected_NO: Tensor, cos_PC: Tensor, sin_PC: Tensor, at_N: Tensor, width: int,
        turned: tuple[int, ...], plain: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        from drafter.kernels_numba import turn

        projected_NO = projected_NO.contiguous()
        ctx.save_for_backward(cos_PC, sin_PC, at_N)
        ctx.turned = len(turned)
        parts = [projected_NO.new_empty(len(at_N), heads, width) for heads in turned]
        turns, first = (cos_PC.numpy(), sin_PC.numpy(), at_N.numpy()), 0
        for part in parts:  # written into through a flat view
            turn(bits(projected_NO), first, part.shape[1], *turns, np.float32(1), bits(part.flatten(1)), 0)
            first += part.shape[1] * width
        if plain:
            parts.append(projected_NO[:, first:].contiguous().view(-1, plain, width))
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from drafter.kernels_numba import turn

        turns, first = [one.numpy() for one in ctx.saved_tensors], 0
        rows, _, width = grads[0].shape
        grad_NO = grads[0].new_empty(rows, sum(part.shape[1] for part in grads) * width)
        for number, part in enumerate(grads):
            if number < ctx.turned:
                flat = bits(part.contiguous().flatten(1))
                turn(flat, 0, part.shape[1], *turns, np.float32(-1), bits(grad_NO), first)
            else:
                grad_NO[:, first:] = part.flatten(1)
            first += part.shape[1] * width
        return grad_NO, *[None] * 6
