"""Which verifier a folder of weights holds, whatever its name. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from storage.errors import StatehouseError

_SAMPLE_BYTES = 4 << 10


def weights_hash(folder: Path) -> str:
    """sha256 over the headers of all *.safetensors files and a sample of every tensor.

    It tells a finetuned verifier from its base, which share name, config and tokenizer: states of one would silently
    pass for the other's. 4 KiB from the middle of each tensor see whatever touches whole tensors, in a fraction of the
    hour that hashing the 600 GB of Kimi-K2.5 would take.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, size))
            digest.update(f"{path.name} {size}\n".encode() + header)
            for start, end in _tensor_spans(path, header):
                file.seek(8 + length + max(start, (start + end - _SAMPLE_BYTES) // 2))
                digest.update(file.read(min(_SAMPLE_BYTES, end - start)))
    return digest.hexdigest()


def _tensor_spans(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Bytes [start, end) of each tensor behind the header of a safetensors file, in the order of their names."""
    try:
        entries = json.loads(header)
        spans = [entries[name]["data_offsets"] for name in sorted(entries) if name != "__metadata__"]
        return [(int(start), int(end)) for start, end in spans]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise StatehouseError(f"{path} is no safetensors file (damaged header); download the verifier again") from None
