"""What is compiled for CPUs gives what torch gives, in fp32 and bf16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter.attention import attend
from drafter.compiled import CompiledHeads, CompiledNorm, CompiledSwiGLU
from drafter.exponentials import exponentials
from drafter.kernels_numba import shares

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
    out = CompiledNorm.apply(x, weight, 1e-5)
    for one, other in zip((out.detach(), *torch.autograd.grad(out, (x, weight), grad)), expected, strict=True):
        torch.testing.assert_close(one.float(), other, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


@DTYPES
@pytest.mark.parametrize("plain", [0, 2])
def test_heads_are_turned_by_their_positions_and_their_gradients_back(dtype: torch.dtype, plain: int) -> None:
    torch.manual_seed(0)
    angle, at = torch.rand(9, 4), torch.tensor([0, 3, 3, 8, 1])
    heads = 3 + 1 + plain
    x = torch.randn(5, heads * 8).to(dtype).requires_grad_()
    parts = CompiledHeads.apply(x, angle.cos(), angle.sin(), at, 8, (3, 1), plain)
    assert [part.shape[1] for part in parts] == [3, 1, *([plain] if plain else [])]
    low, high = x.detach().float().view(5, heads, 8)[:, :4].chunk(2, dim=-1)
    cos, sin = angle.cos()[at, None], angle.sin()[at, None]
    truth = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    found = torch.cat(parts, dim=1).detach().float()
    torch.testing.assert_close(found[:, :4], truth, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    assert torch.equal(found[:, 4:].flatten(1), x.detach().float()[:, 32:])
    back = torch.autograd.grad(parts, x, [part.detach() for part in parts])[0]
    torch.testing.assert_close(back.float(), x.detach().float(), atol=2 * ROUNDING[dtype], rtol=ROUNDING[dtype])


@DTYPES
def test_a_frozen_input_of_a_norm_has_no_gradient_and_the_weights_is_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(5, 24).to(dtype), torch.rand(24).requires_grad_(), torch.randn(5, 24).to(dtype)
    moving = x.clone().requires_grad_()
    frozen, both = (CompiledNorm.apply(one, weight, 1e-5) for one in (x, moving))
    expected = torch.autograd.grad(both, (moving, weight), grad)[1]
    assert torch.equal(torch.autograd.grad(frozen, weight, grad)[0], expected)


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
        assert CompiledNorm.apply(x, weight, 1e-5).isfinite().all(-1).tolist() == [True, False]
        assert CompiledSwiGLU.apply(x, torch.ones_like(x)).isfinite().all(-1).tolist() == [True, False]
        assert CompiledSwiGLU.apply(torch.ones_like(x), x).isfinite().all(-1).tolist() == [True, False]


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 7, 9, 15, 16, 17, 40])  # a vector of a CPU holds 8 or 16 scores
def test_a_nan_of_any_score_reaches_attentions_output(dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(0)
    # Positive, since a score of -inf is simply a key that is not attended to.
    parts = torch.rand(length, 2, 8), torch.rand(length, 1, 8), torch.rand(length, 1, 8)
    for at in range(3):
        for row in {0, length // 2, length - 1}:
            for bad in (torch.nan, torch.inf):
                given = [one.clone() for one in parts]
                given[at][row, 0, 1] = bad
                out = attend(*(one.to(dtype) for one in given), [], torch.arange(length), [length])
                assert not out[row].isfinite().all()


def test_the_exponential_of_what_is_far_above_its_bound_saturates() -> None:
    below, sums = torch.full((1, 1, 4), 200.0), torch.zeros(1, 1)
    shares(below.numpy(), np.float32(1), np.array([2]), 0, sums.numpy())
    assert below[0, 0].tolist() == [2.0**127] * 3 + [0.0]
