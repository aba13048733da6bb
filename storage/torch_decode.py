"""Joining byte planes on a device: the bus then carries 2 bytes a value, and the processor only undoes the Huffman stage.

    planes = dataset.read_planes(index)                       # uint8 [2, T, L, H], in the processor's memory
    hidden = join_planes(torch.from_numpy(planes).to("cuda"), dataset.plan.codec, offset)   # bfloat16 [T, L, H]

Elementwise torch operations in int16 and float32, the same on any device; the result equals `Dataset.read` to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from storage.codecs import codec_by_name
from storage.codecs.fp8 import BIAS, BLOCK, Fp8
from storage.errors import StatehouseError

if TYPE_CHECKING:
    import torch

    from storage.reader import Dataset


def join_planes(planes_2TLH: torch.Tensor, codec: str, offset_LH: torch.Tensor | None) -> torch.Tensor:
    """uint8 [2, T, L, H] -> bfloat16 [T, L, H] on the planes' device.

    offset_LH: uint8 [L, H] exponent offsets on that device, None for `raw`. Raises StatehouseError for an unknown codec.
    """
    import torch

    found = codec_by_name(codec)
    first, second = planes_2TLH[0], planes_2TLH[1]
    if not found.needs_offset:
        return ((first.to(torch.int16) << 8) | second.to(torch.int16)).view(torch.bfloat16)
    if offset_LH is None:
        raise StatehouseError(f"codec {codec} needs the dataset's exponent offsets; pass Dataset.exponent_offset")
    if isinstance(found, Fp8):
        hidden_size = first.shape[-1]
        scales = second[..., : -(-hidden_size // BLOCK)].to(torch.int32).repeat_interleave(BLOCK, dim=-1)
        power = scales[..., :hidden_size] + offset_LH.to(torch.int32) - BIAS
        return torch.ldexp(first.view(torch.float8_e4m3fn).to(torch.float64), power).to(torch.bfloat16)
    exponent = (first + offset_LH).to(torch.int16)  # uint8, wraps as it did when it was subtracted
    rest = second.to(torch.int16)
    return ((exponent << 7) | (rest & 0x7F) | ((rest & 0x80) << 8)).view(torch.bfloat16)


def read_on(dataset: Dataset, index: int, device: torch.device | str) -> torch.Tensor:
    """The states of one sequence as bfloat16 [T, L, H], joined on `device`. Raises what `Dataset.read` raises."""
    import torch

    offset = dataset.exponent_offset
    planes = torch.from_numpy(dataset.read_planes(index))
    on_device = None if offset is None else torch.from_numpy(np.array(offset)).to(device)
    return join_planes(planes.to(device), dataset.plan.codec, on_device)
