"""The dtype in which matrix products are made: autocast's where it is on, else the weights'."""

from __future__ import annotations

import torch
from torch import Tensor


def product_dtype(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
