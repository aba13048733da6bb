"""The codec interface: bf16 bit patterns <-> two byte planes <-> bytes of one chunk.

Shapes: T tokens, L layers, H hidden size. A chunk holds one plane of C tokens: uint8 [C, L, H]. Everything a codec
does to its bytes is a stock Zarr v3 codec named in `zarr_codecs`, so that a stranger's Zarr library undoes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np


class Codec(ABC):
    """One way to store bf16 states. Stateless; safe to share between threads. Arrays are C-contiguous."""

    # As it stands in the recipe, the plan and the receipts, parameters included: `bitround(4)`.
    name: str
    # What a missing chunk reads as. Never a plausible number once the planes are joined.
    fill_value: int
    needs_offset: bool
    # Lossy codecs leave their error in every receipt.
    lossy: bool = False
    # Raw bytes over stored bytes on real states (SmolLM2-135M): what a plan's cost estimate assumes.
    typical_ratio: float = 1.0

    @property
    @abstractmethod
    def zarr_codecs(self) -> list[dict[str, Any]]:
        """The inner codec chain of the sharded array, as it stands in zarr.json (without the closing crc32c)."""

    @abstractmethod
    def split(
        self, bits_TLH: np.ndarray, offset_LH: np.ndarray | None, out_2TLH: np.ndarray | None = None
    ) -> np.ndarray:
        """uint16 bf16 bit patterns [T, L, H] -> uint8 planes [2, T, L, H], in `out_2TLH` if given."""

    @abstractmethod
    def join(self, planes_2TLH: np.ndarray, offset_LH: np.ndarray | None, out_TLH: np.ndarray) -> None:
        """The inverse of `split`, into uint16 `out_TLH`."""

    @abstractmethod
    def compress(self, plane: np.ndarray) -> bytes:
        """One contiguous uint8 chunk -> its bytes in the store (without crc32c)."""

    @abstractmethod
    def decompress(self, data: memoryview, size: int) -> bytes | memoryview:
        """The inverse of `compress`; `size` is the number of bytes expected. Raises ValueError when it differs."""

    @abstractmethod
    def decompress_into(self, data: memoryview, plane: np.ndarray) -> None:
        """The same into a contiguous uint8 chunk, which may be reused: fresh pages cost .3 s/GB."""

    def decode(
        self,
        chunks: Iterator[memoryview],
        rows: slice,
        offset_LH: np.ndarray | None,
        scratch_2CLH: np.ndarray,
        out_TLH: np.ndarray,
    ) -> None:
        """The bytes of plane 0 and of plane 1 of a chunk -> `rows` of its tokens, uint16 [T, L, H]. Raises ValueError.

        scratch_2CLH: uint8 memory for the planes of all its tokens.
        """
        for data, plane in zip(chunks, scratch_2CLH, strict=True):
            self.decompress_into(data, plane)
        self.join(scratch_2CLH[:, rows], offset_LH, out_TLH)

    def calibrate(self, bits_TLH: np.ndarray) -> np.ndarray | None:
        """Exponent offsets uint8 [L, H] from a sample of states, or None where the codec needs none."""
        return None
