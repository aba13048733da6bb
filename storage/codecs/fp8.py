"""`fp8`: e4m3 codes in plane 0, one power-of-two scale for every 32 channels of a token in plane 1, Huffman behind.

    state = e4m3(code) * 2 ** (scale + exponent_offset[l, h] - 215)

The channel's offset takes out what differs between channels (a fixed outlier channel is 10,000 times its neighbours),
the scale what differs between tokens. It is made from the very 32 values it scales, so nothing is ever clipped, however
far the data are from those the offsets were calibrated on. Scales are powers of two, so scaling itself is exact and the
only error is rounding to 3 mantissa bits: at most 1/16 of a value, or 2**-18 of the largest of its 32 where that is more.
Infinity becomes NaN: e4m3 (the `fn` kind, as torch and GPUs have it) has none.

Plane 1 of a token and layer holds ceil(H / 32) scales and then zeros, which cost next to nothing behind zstd.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from storage.codecs.codec import Codec
from storage.codecs.lossless import Lossless

BLOCK = 32
# Largest relative exponent is 254 - 80 (offsets are clipped to 80..135), so that scales fit a byte: 174 - 8 + 88 = 254.
_SCALE_BIAS = 88
BIAS = _SCALE_BIAS + 127
_INFINITY, _NAN, _LARGEST = 0x7F80, 0x7FC0, 0x7F70  # bf16 bits
_E4M3_TOP = 8  # 448 = 1.75 * 2**8 is the largest e4m3 value


@cache
def _e4m3_values() -> np.ndarray:
    """What each of the 256 codes means: [256] float32."""
    import ml_dtypes

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def block_scales(magnitude: np.ndarray, offset_LH: np.ndarray) -> np.ndarray:
    """The smallest scale with which none of 32 neighbouring channels leaves e4m3: uint8 [T, L, ceil(H / 32)].

    magnitude: bf16 bits without their sign, uint16 [T, L, H], finite.
    """
    tokens, layers, hidden_size = magnitude.shape
    blocks = -(-hidden_size // BLOCK)
    # Order of magnitude and mantissa in one integer, relative to the channel: the largest is the largest value.
    # Subnormals and zeros count as 2**-126, which is above them.
    key = np.maximum(magnitude, np.uint16(0x80)).astype(np.int32) - (offset_LH.astype(np.int32) << 7)
    if blocks * BLOCK != hidden_size:
        key = np.pad(key, ((0, 0), (0, 0), (0, blocks * BLOCK - hidden_size)), constant_values=-(1 << 30))
    largest = key.reshape(tokens, layers, blocks, BLOCK).max(-1)
    # Mantissas above 104/128 round to 1.875 or 2, which at the top exponent is beyond 448.
    exponent = (largest >> 7) + ((largest & 0x7F) > 104)
    return np.clip(exponent - _E4M3_TOP + _SCALE_BIAS, 0, 254).astype(np.uint8)


class Fp8(Lossless):
    """Shares the Zarr codecs and the calibration of `lossless`; the planes mean something else."""

    name = "fp8"
    fill_value = 255  # code 255 is NaN
    lossy = True
    typical_ratio = 2.4

    decode = Codec.decode  # its plane 1 holds no mantissas, wherever it lies

    def split(
        self, bits_TLH: np.ndarray, offset_LH: np.ndarray | None, out_2TLH: np.ndarray | None = None
    ) -> np.ndarray:
        import ml_dtypes

        assert offset_LH is not None
        planes = np.empty((2, *bits_TLH.shape), np.uint8) if out_2TLH is None else out_2TLH
        magnitude = bits_TLH & np.uint16(0x7FFF)
        finite = magnitude < _INFINITY
        # Three mantissa bits round what is above 1.875 * 2**127 to infinity.
        magnitude = np.where(finite, np.minimum(magnitude, np.uint16(_LARGEST)), np.uint16(_NAN))
        scales = block_scales(np.where(finite, magnitude, np.uint16(0)), offset_LH)
        values = ((magnitude | bits_TLH & np.uint16(0x8000)).astype(np.uint32) << 16).view(np.float32)
        scaled = np.ldexp(values, -_exponents(scales, offset_LH))
        planes[0] = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        planes[1] = 0
        planes[1, ..., : scales.shape[-1]] = scales
        return planes

    def join(self, planes_2TLH: np.ndarray, offset_LH: np.ndarray | None, out_TLH: np.ndarray) -> None:
        import ml_dtypes

        assert offset_LH is not None
        blocks = -(-out_TLH.shape[-1] // BLOCK)
        values = _e4m3_values()[planes_2TLH[0]]
        scaled = np.ldexp(values, _exponents(planes_2TLH[1][..., :blocks], offset_LH))
        out_TLH[:] = scaled.astype(ml_dtypes.bfloat16).view(np.uint16)


def _exponents(scales: np.ndarray, offset_LH: np.ndarray) -> np.ndarray:
    """The power of two of every value: int32 [T, L, H]."""
    wide = np.repeat(scales.astype(np.int32), BLOCK, axis=-1)[..., : offset_LH.shape[-1]]
    wide += offset_LH.astype(np.int32) - BIAS
    return wide
