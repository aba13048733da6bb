from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny import planned, sequences, unit_states

from storage.codecs import CODECS, codec_by_name
from storage.codecs.bitround import round_mantissa
from storage.codecs.fp8 import BLOCK
from storage.codecs.zstd import compress_plane, is_stored, zstd_compress, zstd_decompress, zstd_decompress_into
from storage.config import DatasetConfig
from storage.errors import StatehouseError
from storage.kernels import NUMPY, kernels
from storage.writer import ShardWriter

BITS = arrays(np.uint16, st.tuples(*[st.integers(1, 6)] * 3), elements=st.integers(0, 0xFFFF))
EXACT = [name for name, codec in CODECS.items() if not codec.lossy]
LOSSY = [name for name, codec in CODECS.items() if codec.lossy]


def round_trip(name: str, bits: np.ndarray, offset: np.ndarray | None) -> np.ndarray:
    codec = codec_by_name(name)
    planes = codec.split(bits, offset)
    back = np.empty_like(planes)
    for plane, into in zip(planes, back, strict=True):
        stored = memoryview(codec.compress(plane))
        codec.decompress_into(stored, into)
        assert bytes(codec.decompress(stored, plane.size)) == into.tobytes()
    out = np.empty_like(bits)
    codec.join(back, offset, out)
    return out


def values(bits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bits(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None)
@given(bits=BITS, seed=st.integers(0, 1000))
def test_any_bits_come_back_whatever_the_offsets(name: str, bits: np.ndarray, seed: int) -> None:
    offset = np.random.default_rng(seed).integers(0, 256, bits.shape[1:]).astype(np.uint8)
    assert (round_trip(name, bits, offset) == bits).all()


@pytest.mark.parametrize("name", EXACT)
def test_every_bf16_value_comes_back_nan_infinities_zeros_and_subnormals_included(name: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 4, 64)
    for value in (0, 1, 127, 255):
        assert (round_trip(name, bits, np.full((4, 64), value, np.uint8)) == bits).all()


@settings(deadline=None)
@given(bits=BITS, seed=st.integers(0, 1000))
def test_compiled_loops_and_numpy_give_equal_bits(bits: np.ndarray, seed: int) -> None:
    fast = kernels()
    if not fast.compiled:
        pytest.skip("numba is not installed")
    flat = bits.reshape(len(bits), -1)
    offset = np.random.default_rng(seed).integers(0, 256, flat.shape[1]).astype(np.uint8)
    offset.flags.writeable = False
    made: list[list[np.ndarray]] = []
    for one in (fast, NUMPY):
        split, halves = np.empty((2, *flat.shape), np.uint8), np.empty((2, *flat.shape), np.uint8)
        back, whole = np.empty_like(flat), np.empty_like(flat)
        one.split_exponent(flat, offset, split[0], split[1])
        one.join_exponent(split[0], split[1], offset, back)
        one.split_bytes(flat, halves[0], halves[1])
        one.join_bytes(halves[0], halves[1], whole)
        assert (back == flat).all()
        assert (whole == flat).all()
        squares, finite = one.statistics(bits)
        made.append([split, halves, finite, squares])
    for fast_one, numpy_one in zip(made[0][:3], made[1][:3], strict=True):
        assert (fast_one == numpy_one).all()
    assert made[0][3] == pytest.approx(made[1][3], rel=1e-5)


def order_0_bound(bits: np.ndarray) -> float:
    """Bytes that no code of single exponents beats: entropy of each channel's exponents relative to its median, and 8 bits."""
    exponent = ((bits >> 7) & 0xFF).astype(np.int64)
    relative = exponent - np.median(exponent, axis=0).astype(np.int64)
    counts = np.bincount((relative & 0xFF).ravel(), minlength=256)
    share = counts[counts > 0] / bits.size
    return bits.size * (-(share * np.log2(share)).sum() + 8) / 8


@pytest.mark.parametrize("drift", [0.0, 0.3], ids=["own offsets", "offsets of another domain"])
def test_lossless_stays_within_two_percent_of_the_order_0_bound(drift: float) -> None:
    """drift: each channel's scale differs by e**(drift * normal) between the domain calibrated on and this one."""
    random = np.random.default_rng(0)
    scale = np.exp(random.normal(0, 2, (1, 1, 7168)))
    sample = to_bits(random.standard_normal((64, 1, 7168)) * scale * np.exp(random.normal(0, drift, scale.shape)))
    bits = to_bits(random.standard_normal((64, 1, 7168)) * scale)
    codec = codec_by_name("lossless")
    planes = codec.split(bits, codec.calibrate(sample))
    stored = sum(len(codec.compress(plane)) for plane in planes)
    assert stored <= 1.02 * order_0_bound(bits)


@pytest.mark.parametrize("keep", range(1, 7))
def test_bitround_rounds_every_value_to_nearest_even_and_leaves_nan_and_infinities(keep: int) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1, 64)
    rounded = round_trip(f"bitround({keep})", bits, np.full((1, 64), 120, np.uint8))
    assert (rounded == round_mantissa(bits, keep)).all()
    strange = (bits & 0x7F80) == 0x7F80
    assert (rounded[strange] == bits[strange]).all()
    given, step = values(bits[~strange]), 2.0 ** (7 - keep)
    # The value in units of the kept mantissa's last place: numpy's own rounding is to nearest even.
    exponent = np.maximum((bits[~strange] >> 7) & 0xFF, 1).astype(np.int64) - 127 - 7
    wanted = np.ldexp(np.round(np.ldexp(given, -exponent) / step) * step, exponent)
    top = values(np.array([0x7F80 - int(step)], np.uint16))[0]
    assert (values(rounded[~strange]) == np.clip(wanted, -top, top)).all()
    assert (np.signbit(values(rounded[~strange])) == np.signbit(given)).all()


FAR = arrays(np.uint16, st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 31, 32, 40, 100])), elements=st.integers(0, 0xFFFF))  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(bits=FAR, seed=st.integers(0, 1000))
@example(bits=np.array([[[0x7F7F, 0x3F80]]], np.uint16), seed=0)
@example(bits=np.array([[[0x43EA, 0x43E8]]], np.uint16), seed=0)
@example(bits=np.full((1, 1, 31), 117, np.uint16), seed=0)
def test_fp8_never_clips_and_errs_by_a_sixteenth_at_most(bits: np.ndarray, seed: int) -> None:
    """Whatever the values and however wrong the offsets: 1/16 of a value, or of the smallest that its block can tell."""
    offset = np.random.default_rng(seed).integers(80, 136, bits.shape[1:]).astype(np.uint8)
    back = round_trip("fp8", bits, offset)
    strange = (bits & 0x7F80) == 0x7F80
    assert (((back & 0x7F80) == 0x7F80) == strange).all()  # NaN stays NaN, infinity becomes NaN, nothing else does
    given, stored = np.where(strange, 0, values(bits)), np.where(strange, 0, values(back))
    channel = np.exp2(offset.astype(np.float64) - 127)
    relative = np.abs(given) / channel
    blocks = -(-bits.shape[-1] // BLOCK)
    padded = np.pad(relative, ((0, 0), (0, 0), (0, blocks * BLOCK - bits.shape[-1])))
    largest = np.repeat(padded.reshape(*bits.shape[:2], blocks, BLOCK).max(-1), BLOCK, -1)[..., : bits.shape[-1]]
    # 2**-93: the smallest scale. Subnormal bf16 values are beyond all this and may become zero.
    allowed = np.abs(given) / 16 + channel * np.maximum(largest * 2.0**-17, 2.0**-95) + 2.0**-126
    assert (np.abs(stored - given) <= allowed).all()


def test_fp8_keeps_ordinary_channels_beside_an_outlier_of_25000() -> None:
    random = np.random.default_rng(0)
    scale = np.ones((1, 1, 128))
    scale[..., 7] = 25_000
    bits = to_bits(random.standard_normal((256, 1, 128)) * scale)
    codec = codec_by_name("fp8")
    back = round_trip("fp8", bits, codec.calibrate(bits[:64]))
    error = np.linalg.norm(values(back) - values(bits), axis=0) / np.linalg.norm(values(bits), axis=0)
    assert error.max() < 0.035


@pytest.mark.parametrize("name", LOSSY)
def test_every_receipt_of_a_lossy_codec_records_its_error_by_layer(tmp_path: Path, name: str) -> None:
    plan = planned(str(tmp_path), sequences(8, 40), name)
    writer, unit = ShardWriter.from_uri(str(tmp_path)), next(iter(plan.units()))
    bits = unit_states(plan, unit)
    bits[0, 0, 0] = 0x7FC0
    writer.calibrate(bits)
    receipt = writer.write(unit.shard, bits, len(unit.rows)).receipt
    assert receipt.lossy_error is not None
    back = round_trip(name, bits, writer.offset())
    assert np.isnan(values(back)[0, 0, 0])
    given, stored = np.nan_to_num(values(bits)), np.nan_to_num(values(back))
    relative = np.sqrt(((given - stored) ** 2).sum((0, 2)) / (given**2).sum((0, 2)))
    cosine = (given * stored).sum(-1) / np.sqrt((given**2).sum(-1) * (stored**2).sum(-1))
    assert receipt.lossy_error.relative_l2 == pytest.approx(relative.tolist())
    assert receipt.lossy_error.cosine == pytest.approx(cosine.mean(0).tolist())
    assert max(receipt.lossy_error.relative_l2) > 0


def test_exact_codecs_record_no_error(tmp_path: Path) -> None:
    plan = planned(str(tmp_path), sequences(8, 40), "raw")
    unit = next(iter(plan.units()))
    receipt = ShardWriter.from_uri(str(tmp_path)).write(unit.shard, unit_states(plan, unit), len(unit.rows)).receipt
    assert receipt.lossy_error is None


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
    for name in ("gzip", "bitround", "bitround(7)", "bitround(0)"):
        with pytest.raises(StatehouseError, match="lossless"):
            codec_by_name(name)


def test_a_recipe_names_codecs_with_their_parameters() -> None:
    assert DatasetConfig(uri="x", codec="bitround( 4 )").codec == "bitround(4)"
    assert DatasetConfig(uri="x", codec="fp8").codec == "fp8"
    with pytest.raises(ValueError, match=r"lossless, raw, bitround\(1\) to bitround\(6\), fp8"):
        DatasetConfig(uri="x", codec="bitround(9)")


def test_fp8_is_never_joined_as_lossless_though_its_plane_lies_raw() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (1 << 17, 1, 1)).astype(np.uint16)
    codec, offset = codec_by_name("fp8"), np.full((1, 1), 80, np.uint8)
    planes = codec.split(bits, offset)
    chunks = [memoryview(codec.compress(plane)) for plane in planes]
    expected, out = np.empty_like(bits), np.empty_like(bits)
    codec.join(planes, offset, expected)
    codec.decode(iter(chunks), slice(0, len(bits)), offset, np.empty_like(planes), out)
    assert is_stored(chunks[1], planes[1].nbytes)  # or this test tests nothing
    assert (out == expected).all()


def test_planes_are_coded_by_what_they_are() -> None:
    """Random ones are stored as they are, exponents take their entropy, repetitions next to nothing."""
    random = np.random.default_rng(0)
    size = 300_001
    noise = random.integers(0, 256, size).astype(np.uint8)
    exponents = np.clip(random.normal(0, 1.5, size).round(), -6, 6).astype(np.int8).view(np.uint8)
    scales = np.zeros((100, 3000), np.uint8)
    scales[:, :94] = random.integers(120, 130, (100, 94))
    counts = np.bincount(exponents)
    share = counts[counts > 0] / size
    entropy = -(share * np.log2(share)).sum() / 8
    for plane, low, high in ((noise, 1.0, 1.001), (exponents, entropy, 1.03 * entropy), (scales, 0.0, 0.04)):
        frame = compress_plane(plane)
        into = np.empty(plane.size, np.uint8)
        zstd_decompress_into(frame, into)
        assert (into == plane.ravel()).all()
        assert low <= len(frame) / plane.size <= high


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 40_000)),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 99),
)
def test_planes_that_are_stored_raw_are_joined_where_they_lie_to_the_same_bits(
    shape: tuple[int, int, int], cut: tuple[float, float], seed: int
) -> None:
    random = np.random.default_rng(seed)
    codec = codec_by_name("lossless")
    bits = random.integers(0, 1 << 16, shape).astype(np.uint16)  # signs and mantissas without any order
    offset = random.integers(0, 256, shape[1:]).astype(np.uint8)
    planes = codec.split(bits, offset)
    exponents, rest = (memoryview(codec.compress(plane)) for plane in planes)
    assert is_stored(rest, planes[1].nbytes) == (planes[1].nbytes >= 1 << 16)
    low, high = sorted(round(share * shape[0]) for share in cut)
    out = np.zeros((high - low, *shape[1:]), np.uint16)
    codec.decode(iter((exponents, rest)), slice(low, high), offset, np.empty_like(planes), out)
    assert (out == bits[low:high]).all()
    if planes[1].nbytes >= 1 << 16:
        for damaged in (rest[:-1], bytes(rest[:9]) + b"\xff" + bytes(rest[10:])):
            assert not is_stored(memoryview(damaged), planes[1].nbytes)
            with pytest.raises(ValueError, match="zstd"):
                codec.decode(
                    iter((exponents, memoryview(damaged))), slice(low, high), offset, np.empty_like(planes), out
                )


@settings(deadline=None)
@given(data=st.binary(min_size=1, max_size=2000), cut=st.integers(0, 30))
def test_zstd_refuses_what_is_cut_or_of_another_size(data: bytes, cut: int) -> None:
    frame = zstd_compress(data)
    assert zstd_decompress(frame, len(data)) == data
    into = np.empty(len(data), np.uint8)
    zstd_decompress_into(frame, into)
    assert into.tobytes() == data
    short = frame[: max(0, len(frame) - 1 - cut)]
    with pytest.raises(ValueError, match="zstd"):
        zstd_decompress(frame, len(data) + 1)
    with pytest.raises(ValueError, match="zstd"):
        zstd_decompress(short, len(data))
    with pytest.raises(ValueError, match="zstd"):
        zstd_decompress_into(short, into)
    with pytest.raises(ValueError, match="zstd"):
        zstd_decompress_into(frame, np.empty(len(data) + 1, np.uint8))
