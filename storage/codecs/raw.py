"""`raw`: the high and the low byte of each bf16 value in planes of their own, uncompressed.

For stores whose network is faster than a core decodes, and as the yardstick of every other codec.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from storage.codecs.codec import Codec
from storage.kernels import kernels


class Raw(Codec):
    name = "raw"
    fill_value = 255  # 0xFFFF is a NaN
    needs_offset = False

    @property
    def zarr_codecs(self) -> list[dict[str, Any]]:
        return [{"name": "bytes"}]

    def split(
        self, bits_TLH: np.ndarray, offset_LH: np.ndarray | None, out_2TLH: np.ndarray | None = None
    ) -> np.ndarray:
        planes = np.empty((2, *bits_TLH.shape), np.uint8) if out_2TLH is None else out_2TLH
        flat = (len(bits_TLH), -1)
        kernels().split_bytes(bits_TLH.reshape(flat), planes[0].reshape(flat), planes[1].reshape(flat))
        return planes

    def join(self, planes_2TLH: np.ndarray, offset_LH: np.ndarray | None, out_TLH: np.ndarray) -> None:
        flat = (len(out_TLH), -1)
        kernels().join_bytes(planes_2TLH[0].reshape(flat), planes_2TLH[1].reshape(flat), out_TLH.reshape(flat))

    def compress(self, plane: np.ndarray) -> bytes:
        return plane.tobytes()

    def decompress(self, data: memoryview, size: int) -> memoryview:
        if len(data) != size:
            raise ValueError(f"raw chunk holds {len(data)} bytes, expected {size}")
        return data

    def decompress_into(self, data: memoryview, plane: np.ndarray) -> None:
        plane.reshape(-1)[:] = np.frombuffer(self.decompress(data, plane.nbytes), np.uint8)
