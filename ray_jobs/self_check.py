"""The self-check: a share of the sequences is forwarded twice, by two replicas, and what differs is written down.

It is done before the shard is stored, so its result lies in the shard's receipt, and states that have drifted too far are
never stored. The second pair of eyes is another replica; where there is only one, transformers on the CPU, if the verifier
fits into memory there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage.errors import StatehouseError
from storage.receipt import SelfCheck

# Of the free memory, what the verifier's weights may take for a check by transformers.
_MEMORY_SHARE = 0.25
# Tokens that are compared at a time: in float64, two sides of four states of 7,168 each take 118 MB, a long sequence gigabytes.
_BLOCK = 256


@dataclass(frozen=True)
class Reference:
    """What a second replica computed. states: {row of the unit: bf16 bits uint16 [T, L, H]}."""

    by: str
    states: dict[int, np.ndarray]


def chosen(ids: Sequence[str], share: float) -> set[str]:
    """Sequence ids that are checked: `share` of them, the same in every run, and at least one unless share is 0."""
    if not share or not ids:
        return set()
    draw = {key: int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big") / 2**56 for key in ids}
    return {key for key in ids if draw[key] < share} or {min(ids, key=draw.__getitem__)}


def compare(pairs: Mapping[int, tuple[np.ndarray, np.ndarray]], by: str) -> SelfCheck:
    """pairs: {sequence: (finite states, those of the second replica)}, bf16 bits uint16 [T, L, H] each; at least one."""
    layers = next(iter(pairs.values()))[0].shape[1]
    squares, given, largest = np.zeros(layers), np.zeros(layers), np.zeros(layers)
    cosine = np.ones(layers)
    for mine, theirs in pairs.values():
        for low in range(0, len(mine), _BLOCK):
            a, b = _values(mine[low : low + _BLOCK]), _values(theirs[low : low + _BLOCK])
            lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
            angle = np.einsum("tlh,tlh->tl", a, b) / np.maximum(lengths, 1e-300)
            cosine = np.minimum(cosine, angle.clip(-1, 1).min(0))
            given += np.einsum("tlh,tlh->l", b, b)
            a -= b
            squares += np.einsum("tlh,tlh->l", a, a)
            largest = np.maximum(largest, np.abs(a, out=a).max((0, 2)))
    relative = np.sqrt(squares / np.maximum(given, 1e-300))
    return SelfCheck(
        sequences=len(pairs),
        by=by,
        relative_l2=relative.tolist(),
        max_error=largest.tolist(),
        cosine=cosine.tolist(),
    )


def _values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def require_small(check: SelfCheck, limit: float, what: str) -> None:
    """Raises StatehouseError when any layer has drifted past the limit (relative L2)."""
    worst = int(np.argmax(check.relative_l2))
    if not check.relative_l2[worst] <= limit:
        raise StatehouseError(
            f"self-check of {what}: state {worst} of each token differs by {check.relative_l2[worst]:.3g} (relative L2) from what "
            f"{check.by} computes, smallest cosine {check.cosine[worst]:.4f}; extraction.self_check_limit is {limit:g}; "
            "nothing of it is stored: find out which replica is wrong, or raise the limit"
        )


def fits_beside(folder: Path) -> bool:
    """Whether the verifier's weights take so little of the free memory that transformers may load them, too."""
    weights = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    said = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return weights <= _MEMORY_SHARE * int(said["MemAvailable"].split()[0]) * 1024
