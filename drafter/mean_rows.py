"""What drafter/head_loss.py computes over [rows, D] around its products: by a compiled loop on a CPU, else by torch.

Shape suffixes as there, and S teacher positions of a chunk. mean_SD: fp32, the teacher's mean head rows. slot_N: which of
them is a row's. share_N: a row's share in the loss. sums_N: of its exponentials.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.compiled import bits, is_compiled


def taught(
    states_ND: Tensor, mean_SD: Tensor, slot_N: Tensor, share_N: Tensor, sums_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(h . E [N], h * share / sum [N, D] in the states' dtype, the sum of h * share by teacher [S, D])."""
    taught_SD = torch.zeros_like(mean_SD)
    if not is_compiled(states_ND):
        wide_ND = states_ND.float()
        taught_SD.index_add_(0, slot_N, wide_ND * share_N[:, None])
        factor_ND = (wide_ND * (share_N / sums_N)[:, None]).to(states_ND.dtype)
        return (wide_ND * mean_SD.index_select(0, slot_N)).sum(-1), factor_ND, taught_SD
    from drafter.kernels_numba import taught as compiled

    along_N, factor_ND = torch.empty_like(sums_N), torch.empty_like(states_ND)
    numbers = (one.numpy() for one in (mean_SD, slot_N, share_N, sums_N, along_N))
    compiled(bits(states_ND), *numbers, bits(factor_ND), taught_SD.numpy())
    return along_N, factor_ND, taught_SD


def pull(
    drawn_ND: Tensor, mean_SD: Tensor, slot_N: Tensor, share_N: Tensor, sums_N: Tensor, at_N: Tensor, grad_ND: Tensor
) -> None:
    """Rows at_N of grad_ND become (q W - E) * share. drawn_ND: q W times sums_N."""
    if not (is_compiled(drawn_ND) and is_compiled(grad_ND)):
        found_ND = (drawn_ND.float() / sums_N[:, None]).sub_(mean_SD.index_select(0, slot_N)).mul_(share_N[:, None])
        grad_ND.index_copy_(0, at_N, found_ND.to(grad_ND.dtype))
        return
    from drafter.kernels_numba import pulled

    numbers = (one.numpy() for one in (mean_SD, slot_N, share_N, sums_N, at_N))
    pulled(bits(drawn_ND), *numbers, bits(grad_ND))
