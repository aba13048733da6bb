"""Strangers' Zarr libraries read our stores to the bit: zarr-python, TensorStore and zarrs, for every codec.

Each gives the stored planes; the formulas that join them are written out here as docs/dataset-format.md states them, in
plain numpy, so that they and our own reader check each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiny import fill, planned, sequences, states_of

from storage import open_dataset
from storage.objects import open_store
from storage.plan import Plan
from storage.seal import seal_dataset

CODECS = ["lossless", "raw", "bitround(4)", "fp8"]


@pytest.fixture(params=CODECS)
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Plan]:
    """With sequences that end and begin inside chunks, and one whose shard is not full."""
    plan = planned(str(tmp_path), sequences(12, 500), request.param)
    fill(str(tmp_path), plan)
    seal_dataset(open_store(str(tmp_path)), plan)
    return tmp_path, plan


def joined(codec: str, first: np.ndarray, second: np.ndarray, offset: np.ndarray | None) -> np.ndarray:
    """Planes uint8 [T, L, H] each -> float32 [T, L, H], by the formulas of the format's page."""
    if codec == "raw":
        bits = first.astype(np.uint32) << 8 | second
        return (bits << 16).view(np.float32)
    assert offset is not None
    if codec == "fp8":
        blocks = -(-first.shape[-1] // 32)
        scale = np.repeat(second[..., :blocks].astype(np.int32), 32, axis=-1)[..., : first.shape[-1]]
        return np.ldexp(first.view(ml_dtypes.float8_e4m3fn).astype(np.float32), scale + offset - 215)
    exponent = (first.astype(np.uint32) + offset) & 0xFF
    bits = exponent << 7 | (second & 0x7F) | (second & 0x80).astype(np.uint32) << 8
    return (bits << 16).view(np.float32)


def check(folder: Path, plan: Plan, read: Any) -> None:
    """read(array, slice or None) -> numpy; every sequence must equal what our own reader gives."""
    offset = None if plan.codec == "raw" else read("exponent_offset", None)
    ours = open_dataset(str(folder))
    for index, row in enumerate(plan.table.to_pylist()):
        at = slice(row["start"], row["start"] + row["length"])
        planes = read("hidden", at)
        assert planes.dtype == np.uint8
        theirs, states = joined(plan.codec, planes[0], planes[1], offset), ours.read(index)
        assert (theirs.view(np.uint32) == states.hidden.astype(np.float32).view(np.uint32)).all()
        assert (read("tokens", at) == states.token_ids).all()
        assert (read("loss_mask", at) == states.loss_mask).all()
        if plan.codec in ("lossless", "raw"):
            assert (states.hidden.view(np.uint16) == states_of(row["id"], row["length"])).all()


def taken(array: Any, name: str, at: slice | None) -> np.ndarray:
    return np.asarray(array[:] if at is None else array[:, at] if name == "hidden" else array[at])


def test_zarr_python_reads_every_codec(dataset: tuple[Path, Plan]) -> None:
    zarr = pytest.importorskip("zarr")
    folder, plan = dataset
    group = zarr.open_group(str(folder), mode="r")
    assert group.attrs["codec"] == plan.codec
    check(folder, plan, lambda name, at: taken(group[name], name, at))


@pytest.fixture
def zarrs_pipeline() -> Iterator[None]:
    """zarr-python with its codecs done by zarrs, a Rust implementation of the specification."""
    zarr = pytest.importorskip("zarr")
    pytest.importorskip("zarrs")
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        yield


@pytest.mark.usefixtures("zarrs_pipeline")
def test_zarrs_reads_every_codec(dataset: tuple[Path, Plan]) -> None:
    import zarr

    folder, plan = dataset
    group = zarr.open_group(str(folder), mode="r")
    check(folder, plan, lambda name, at: taken(group[name], name, at))
    assert "zarrs" in type(group["hidden"].async_array.codec_pipeline).__module__


def test_tensorstore_reads_every_codec(dataset: tuple[Path, Plan]) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    folder, plan = dataset

    def read(name: str, at: slice | None) -> np.ndarray:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/{name}/"}}
        array = tensorstore.open(spec, read=True).result()
        view = array if at is None else array[:, at] if name == "hidden" else array[at]
        return np.asarray(view.read().result())

    check(folder, plan, read)


def test_a_missing_shard_reads_as_fill_with_strangers_and_never_as_plausible(dataset: tuple[Path, Plan]) -> None:
    """Zarr gives fill for what is not there; joined, that is no number anybody would take for a state."""
    zarr = pytest.importorskip("zarr")
    folder, plan = dataset
    (folder / "hidden/c/0/0/0/0").unlink()
    group = zarr.open_group(str(folder), mode="r")
    offset = None if plan.codec == "raw" else group["exponent_offset"][:]
    planes = group["hidden"][:, : plan.geometry.chunk_tokens]
    with np.errstate(over="ignore"):
        states = joined(plan.codec, planes[0], planes[1], offset)
    assert (np.isnan(states) | (np.abs(states) > 1e21)).all()
