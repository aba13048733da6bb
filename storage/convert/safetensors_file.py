"""safetensors files without torch: bf16 as uint16 bit patterns.

u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes, little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from storage.errors import ShardCorrupt, StatehouseError

_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}
_NAMES = {np.dtype("<u2"): "BF16", np.dtype("<i8"): "I64", np.dtype("<f4"): "F32", np.dtype("<i4"): "I32"}
_HEADER_LIMIT = 100 << 20


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and the position of the first tensor's bytes. Raises StatehouseError, ShardCorrupt when truncated."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _HEADER_LIMIT:
                raise ValueError(f"a header of {length} bytes")
            text = file.read(length)
            header = json.loads(text)
            if len(text) < length or not isinstance(header, dict):
                raise ValueError("the header is cut off")
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for name, entry in entries.items():
                _require_entry(name, entry)
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            if path.stat().st_size != 8 + length + end:
                raise ValueError(f"{path.stat().st_size:,} bytes, its header makes {8 + length + end:,}")
    except FileNotFoundError:
        raise StatehouseError(f"{path}: no such file; check the folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ShardCorrupt(f"{path}: no whole safetensors file ({error}); make it again or leave it out") from None
    return header, 8 + length


def _require_entry(name: str, entry: Any) -> None:
    """Raises ValueError when a tensor's entry in the header is not {dtype, shape, data_offsets}."""
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name!r} is described by {type(entry).__name__}, expected dtype, shape, data_offsets")
    offsets, shape = entry.get("data_offsets"), entry.get("shape")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {name!r} has data_offsets {offsets}, expected [begin, end]")
    if not _whole_numbers(shape) or not isinstance(entry.get("dtype"), str):
        raise ValueError(f"tensor {name!r} has dtype {entry.get('dtype')} and shape {shape}, expected a name and sizes")


def _whole_numbers(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def read_tensor(path: Path, name: str) -> tuple[np.ndarray, str]:
    """One tensor and its dtype's name; BF16 comes as uint16 bit patterns."""
    header, base = read_header(path)
    if name not in header:
        known = ", ".join(key for key in header if key != "__metadata__")
        raise StatehouseError(f"{path}: no tensor {name!r}; it has {known}")
    entry = header[name]
    if entry["dtype"] not in _DTYPES:
        raise StatehouseError(f"{path}: tensor {name!r} has dtype {entry['dtype']}, expected {', '.join(_DTYPES)}")
    dtype, (low, high) = np.dtype(_DTYPES[entry["dtype"]]), entry["data_offsets"]
    with open(path, "rb") as file:
        file.seek(base + low)
        data = file.read(high - low)
    if len(data) != math.prod(entry["shape"]) * dtype.itemsize:
        raise ShardCorrupt(f"{path}: tensor {name!r} is cut off; make the file again or leave it out")
    return np.frombuffer(data, dtype).reshape(entry["shape"]), entry["dtype"]


def to_safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file; uint16 arrays are taken for bf16 bit patterns."""
    header: dict[str, Any] = {}
    parts, position = [], 0
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [position, position + len(data)],
        }
        position += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])
