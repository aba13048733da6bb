"""`raw`: the high and the low byte of each bf16 value in planes of their own, uncompressed.

For stores whose network is faster than a core decodes, and as the yardstick of every other codec.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from storage.codecs.codec import Codec


class Raw(Codec):
    name = "raw"
    fill_value = 255  # 0xFFFF is a NaN
    needs_offset = False

    @property
    def zarr_codecs(self) -> list[dict[str, Any]]:
        return [{"name": "bytes"}]

    def split(self, bits_TLH: np.ndarray, offset_LH: np.ndarray | None) -> np.ndarray:
        planes = np.empty((2, *bits_TLH.shape), np.uint8)
        np.right_shift(bits_TLH, 8, out=planes[0], casting="unsafe")
        np.bitwise_and(bits_TLH, 0xFF, out=planes[1], casting="unsafe")
        return planes

    def join(self, planes_2TLH: np.ndarray, offset_LH: np.ndarray | None, out_TLH: np.ndarray) -> None:
        np.left_shift(planes_2TLH[0], 8, out=out_TLH, dtype=np.uint16)
        out_TLH |= planes_2TLH[1]

    def compress(self, plane: np.ndarray) -> bytes:
        return plane.tobytes()

    def decompress(self, data: memoryview, size: int) -> memoryview:
        if len(data) != size:
            raise ValueError(f"raw chunk holds {len(data)} bytes, expected {size}")
        return data
