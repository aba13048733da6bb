from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from storage.codecs import CODECS, codec_by_name
from storage.codecs.lossless import zstd_compress, zstd_decompress
from storage.errors import StatehouseError

BITS = arrays(np.uint16, st.tuples(*[st.integers(1, 6)] * 3), elements=st.integers(0, 0xFFFF))


def round_trip(name: str, bits: np.ndarray, offset: np.ndarray) -> np.ndarray:
    codec = codec_by_name(name)
    planes = codec.split(bits, offset)
    stored = [codec.decompress(memoryview(codec.compress(plane)), plane.size) for plane in planes]
    back = np.stack([np.frombuffer(one, np.uint8).reshape(bits.shape) for one in stored])
    out = np.empty_like(bits)
    codec.join(back, offset, out)
    return out


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None)
@given(bits=BITS, seed=st.integers(0, 1000))
def test_any_bits_come_back_whatever_the_offsets(name: str, bits: np.ndarray, seed: int) -> None:
    offset = np.random.default_rng(seed).integers(0, 256, bits.shape[1:]).astype(np.uint8)
    assert (round_trip(name, bits, offset) == bits).all()


@pytest.mark.parametrize("name", CODECS)
def test_every_bf16_value_comes_back_nan_infinities_zeros_and_subnormals_included(name: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 4, 64)
    for value in (0, 1, 127, 255):
        assert (round_trip(name, bits, np.full((4, 64), value, np.uint8)) == bits).all()


def test_lossless_stays_within_two_percent_of_the_order_0_bound() -> None:
    random = np.random.default_rng(0)
    scale = np.exp(random.normal(0, 2, (1, 1, 7168)))
    bits = (random.standard_normal((64, 1, 7168)) * scale).astype(np.float32)
    bits = (bits.view(np.uint32) >> 16).astype(np.uint16)
    codec = codec_by_name("lossless")
    offset = codec.calibrate(bits[:32])
    assert offset is not None
    planes = codec.split(bits, offset)
    stored = sum(len(codec.compress(plane)) for plane in planes)
    counts = np.bincount(planes[0].ravel(), minlength=256)
    share = counts[counts > 0] / planes[0].size
    bound = planes[0].size * (-(share * np.log2(share)).sum() + 8) / 8
    assert stored <= 1.02 * bound


def test_fill_values_decode_to_nothing_plausible_whatever_the_data() -> None:
    lossless = codec_by_name("lossless")
    for exponent in range(256):  # dead channels and huge ones included
        offset = lossless.calibrate(np.full((3, 1, 2), exponent << 7, np.uint16))
        assert offset is not None
        for codec in CODECS.values():
            planes = np.full((2, 1, 1, 2), codec.fill_value, np.uint8)
            out = np.empty((1, 1, 2), np.uint16)
            codec.join(planes, offset, out)
            value = abs((out.astype(np.uint32) << 16).view(np.float32)).ravel()
            assert np.isnan(value).all() or (value > 1e21).all()


def test_an_unknown_codec_is_refused_with_the_known_names() -> None:
    with pytest.raises(StatehouseError, match="lossless"):
        codec_by_name("gzip")


@settings(deadline=None)
@given(data=st.binary(min_size=1, max_size=2000), cut=st.integers(0, 100))
def test_a_truncated_or_longer_frame_is_an_error(data: bytes, cut: int) -> None:
    frame = zstd_compress(data)
    assert zstd_decompress(frame, len(data)) == data
    with pytest.raises(ValueError, match="zstd"):
        zstd_decompress(frame, len(data) + 1)
    with pytest.raises(ValueError, match="zstd"):
        zstd_decompress(frame[: max(0, len(frame) - 1 - cut)], len(data))
