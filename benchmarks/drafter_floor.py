"""How fast a training step could be: the matrix products it cannot do without, at the rate measured, and its attention.

Counted are rows that the loss needs: all rows give step-0 keys and values; a row with loss at step k is computed at
steps 0 .. k; what a token's embedding adds to queries, keys and values is the same at every step and counted once. Each
product is measured alone, in its own shape, forward and both ways back. Left out: norms, RoPE, softmax, sums, the optimiser.
What a step takes beyond this floor is overhead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from benchmarks.drafter_sides import LAYERS, Shape, loss_mask
from drafter.attention import Later, attend
from drafter.loss import loss_rows


def seconds(function: Callable[[], object], repeats: int = 3) -> float:
    """Least CPU time of a call, after one that does not count."""
    function()
    found = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        found.append(time.process_time() - began)
    return min(found)


@cache
def product(
    rows: int, inside: int, out: int, dtype: torch.dtype, input_grad: bool = True, weight_grad: bool = True
) -> float:
    """Seconds of a linear layer on `rows` rows: forward, gradient of its input, gradient of its weight."""
    if rows == 0:
        return 0.0
    x, w, y = (torch.randn(shape).to(dtype) for shape in ((rows, inside), (out, inside), (rows, out)))
    found = seconds(lambda: x @ w.T)
    if input_grad:
        found += seconds(lambda: y @ w)
    if weight_grad:
        found += seconds(lambda: y.T @ x)
    return found


def rate(dtype: torch.dtype, size: int = 1536) -> float:
    """GFLOP/s of a square product, the best of several."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, 5) / 1e9


def wanted(shape: Shape) -> torch.Tensor:
    """[K, T] bool, the rows with loss at each step."""
    return loss_rows(loss_mask(shape), shape.lengths, shape.steps)


def attention(shape: Shape, dtype: torch.dtype) -> float:
    """Seconds of all steps' attention, forward and backward, as training calls it, alone."""
    heads, width = shape.heads()["num_attention_heads"], shape.heads()["head_dim"]
    groups = shape.heads()["num_key_value_heads"]
    key, value = (torch.randn(shape.tokens, groups, width).to(dtype).requires_grad_() for _ in range(2))
    found = 0.0
    later: list[Later] = []
    for step, wanted_T in enumerate(wanted(shape)):
        rows = wanted_T.nonzero().squeeze(1)
        query = torch.randn(len(rows), heads, width).to(dtype).requires_grad_()
        if step:
            own = (torch.randn(len(rows), groups, width).to(dtype).requires_grad_() for _ in range(2))
            later.append(Later(*own, rows))
        grad = torch.randn_like(query)
        if len(rows):
            found += seconds(lambda: attend(query, key, value, later, rows, shape.lengths).backward(grad), 2)  # noqa: B023
    return found


def floor(shape: Shape, dtype: torch.dtype, lm_head_trained: bool = True) -> dict[str, float]:
    """{layer, head, attention} in seconds of CPU, of one step of training."""
    rows = [int(count) for count in wanted(shape).sum(1)]
    sizes, width = shape.heads(), shape.hidden
    heads, groups = (sizes[name] * sizes["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    inner = sizes["intermediate_size"]
    layer = product(shape.tokens, len(LAYERS) * width, width, dtype, input_grad=False)
    # Of queries, keys and values: the embedding's half once a token, the features' half once a row and step.
    layer += product(shape.tokens, width, heads + 2 * groups, dtype)
    for step, count in enumerate(rows):
        if step == 0:
            layer += product(shape.tokens, width, 2 * groups, dtype) + product(count, width, heads, dtype)
        else:
            layer += product(count, width, heads + 2 * groups, dtype)
        layer += product(count, heads, width, dtype)
        layer += 2 * product(count, width, inner, dtype) + product(count, inner, width, dtype)
    # 512 rows of the head's product are enough to know its rate.
    some = max(1, min(512, sum(rows)))
    head = product(some, width, shape.draft, dtype, weight_grad=lm_head_trained) * sum(rows) / some
    taught = max(1, min(512, rows[0]))  # teacher's logits, its mean head row, its part of the head's gradient
    head += product(taught, width, shape.draft, dtype, weight_grad=lm_head_trained) * rows[0] / taught
    return {"layer": layer, "head": head, "attention": attention(shape, dtype)}
