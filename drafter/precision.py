"""The dtype in which matrix products are made, and whether this machine is any good at it."""

from __future__ import annotations

import time

import torch
from torch import Tensor


def product_dtype(weight: Tensor) -> torch.dtype:
    """Autocast's where it is on, else the weight's."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def bf16_over_fp32(size: int = 192) -> float:
    """How many times as long this CPU takes for a product in bf16 as in fp32: 50 without AVX512 or AMX, .25 with the best."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.ones(size, size, dtype=dtype)
        found = []
        for _ in range(3):
            began = time.perf_counter()
            one @ one
            found.append(time.perf_counter() - began)
        seconds[dtype] = min(found)
    return seconds[torch.bfloat16] / seconds[torch.float32]
