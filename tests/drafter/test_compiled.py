"""What is compiled for CPUs gives what torch gives, in fp32 and bf16."""

from __future__ import annotations

import pytest
import torch

from drafter.compiled import CompiledNorm, CompiledRotation, CompiledSwiGLU
from drafter.exponentials import exponentials

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@DTYPES
@pytest.mark.parametrize("width", [1, 63, 64, 1000])
def test_exponentials_sums_and_the_first_of_the_largest(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    states, weight = torch.randn(7, 16).to(dtype), torch.randn(width, 16).to(dtype)
    weight[width // 2 :] = weight[: width - width // 2].clone()  # equal logits, far apart
    found = torch.empty(7, width, dtype=dtype)
    sums = exponentials(states, weight, found)
    logits = (states @ weight.T).float()
    assert torch.equal(sums.largest, logits.amax(-1))
    assert torch.equal(sums.best_N, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))
    torch.testing.assert_close(found.float(), (logits - sums.largest[:, None]).exp(), atol=0, rtol=ROUNDING[dtype])
    torch.testing.assert_close(sums.sum, found.float().sum(-1))


@DTYPES
def test_a_nan_is_not_lost_in_the_log_sum_exp(dtype: torch.dtype) -> None:
    states = torch.ones(2, 8, dtype=dtype)
    states[1, 3] = torch.nan
    log = exponentials(states, torch.ones(40, 8, dtype=dtype), torch.empty(2, 40, dtype=dtype)).log
    assert log.isfinite().tolist() == [True, False]


@DTYPES
def test_norm_and_its_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 48).to(dtype).requires_grad_(), torch.rand(48).requires_grad_()
    grad = torch.randn(5, 48).to(dtype)
    wide = x.detach().float().requires_grad_()
    truth = torch.nn.functional.rms_norm(wide, (48,), weight, 1e-5)
    expected = (truth.detach(), *torch.autograd.grad(truth, (wide, weight), grad.float()))
    out = CompiledNorm.apply(1e-5, x, weight)
    for one, other in zip((out.detach(), *torch.autograd.grad(out, (x, weight), grad)), expected, strict=True):
        torch.testing.assert_close(one.float(), other, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


@DTYPES
def test_the_gradient_of_a_rotation_is_the_rotation_back(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    angle = torch.rand(5, 4)
    x = torch.randn(5, 3, 8).to(dtype).requires_grad_()
    turned = CompiledRotation.apply(x, angle.cos(), angle.sin())
    low, high = x.detach().float().chunk(2, dim=-1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    truth = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    torch.testing.assert_close(turned.detach().float(), truth, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    back = torch.autograd.grad(turned, x, turned.detach())[0]
    torch.testing.assert_close(back.float(), x.detach().float(), atol=2 * ROUNDING[dtype], rtol=ROUNDING[dtype])


@DTYPES
def test_norms_side_by_side_are_those_norms_and_a_frozen_part_has_no_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    frozen, x = torch.randn(5, 24).to(dtype), torch.randn(5, 48).to(dtype).requires_grad_()
    weights = [torch.rand(24).requires_grad_(), torch.rand(48).requires_grad_()]
    grad = torch.randn(5, 72).to(dtype)
    both = CompiledNorm.apply(1e-5, frozen, weights[0], x, weights[1])
    apart = torch.cat([CompiledNorm.apply(1e-5, *pair) for pair in zip((frozen, x), weights, strict=True)], -1)
    assert torch.equal(both, apart)
    found, expected = (torch.autograd.grad(out, (x, *weights), grad) for out in (both, apart))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@DTYPES
def test_swiglu_and_its_gradients_at_any_size_of_the_gate(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate = torch.cat(
        [torch.randn(5, 40), torch.tensor([-1e20, -200.0, -90.0, 0.0, 90.0, 200.0, 1e20]).expand(5, 7)], -1
    )
    gate, up = gate.to(dtype).requires_grad_(), torch.randn(5, 47).to(dtype).requires_grad_()
    grad = torch.randn(5, 47).to(dtype)
    wide = [one.detach().double().requires_grad_() for one in (gate, up)]
    truth = torch.nn.functional.silu(wide[0]) * wide[1]
    out = CompiledSwiGLU.apply(gate, up)
    found = (out.detach(), *torch.autograd.grad(out, (gate, up), grad))
    expected = (truth.detach(), *torch.autograd.grad(truth, wide, grad.double()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


@DTYPES
def test_a_nan_or_an_infinity_in_a_norm_or_a_gate_is_not_lost(dtype: torch.dtype) -> None:
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2, 40).to(dtype)
        x[1, 3] = bad
        weight = torch.ones(40)
        assert CompiledNorm.apply(1e-5, x, weight).isfinite().all(-1).tolist() == [True, False]
        assert CompiledSwiGLU.apply(x, torch.ones_like(x)).isfinite().all(-1).tolist() == [True, False]
        assert CompiledSwiGLU.apply(torch.ones_like(x), x).isfinite().all(-1).tolist() == [True, False]
