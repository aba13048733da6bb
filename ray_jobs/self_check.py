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
    """pairs: {sequence: (states, states of the second replica)}, bf16 bits uint16 [T, L, H] each."""
    squares = given = largest = cosine = None
    for mine, theirs in pairs.values():
        a, b = _values(mine), _values(theirs)
        wrong, norm = ((a - b) ** 2).sum((0, 2)), (b**2).sum((0, 2))
        lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        angle = ((a * b).sum(-1) / np.maximum(lengths, 1e-300)).clip(-1, 1).min(0)
        most = np.abs(a - b).max((0, 2))
        squares = wrong if squares is None else squares + wrong
        given = norm if given is None else given + norm
        largest = most if largest is None else np.maximum(largest, most)
        cosine = angle if cosine is None else np.minimum(cosine, angle)
    assert squares is not None
    assert given is not None
    assert largest is not None
    assert cosine is not None
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
