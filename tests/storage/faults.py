"""What the fault tests share: kinds of objects and of damage, a tally of what was tried."""

from __future__ import annotations

import re
from collections import Counter

# (damage, kind of object or step, how it ended) -> times. Printed at the end of the run by conftest.py.
TRIED: Counter[tuple[str, str, str]] = Counter()

KINDS = {
    "plan": r"plan\.json",
    "seal": r"seal(-\d+)?\.json",
    "table of receipts": r"shards(-\d+)?\.parquet",
    "sequences": r"sequences\.parquet",
    "tokens": r"(tokens|loss_mask)/c/\d+",
    "zarr metadata": r"(.*/)?zarr\.json",
    "offsets": r"exponent_offset/c/0/0",
    "copy of a receipt": r"receipts/\d+\.json",
    "shard": r"hidden/c/0/\d+/0/0",
}


def kind_of(key: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, key))


def part_of_shard(at: int, size: int, data_bytes: int, index_bytes: int) -> str:
    """Which part of a shard object a byte lies in."""
    if at < data_bytes:
        return "shard: data"
    if at < size - index_bytes - 12:
        return "shard: receipt"
    return "shard: trailer" if at < size - index_bytes else "shard: index"


def names_what_to_do(message: str) -> bool:
    """A named object or folder, and a command or an action."""
    return bool(
        re.search(r"`(statehouse|python -m ray_jobs)", message) or re.search(r"restore|run |delete|check", message)
    )


def summary() -> list[str]:
    """One line a kind of fault: how often it was tried and how it ended."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for (damage, kind, end), times in TRIED.items():
        rows.setdefault((damage, kind), Counter())[end] += times
    lines = []
    for (damage, kind), ends in sorted(rows.items()):
        told = ", ".join(f"{times} {end}" for end, times in sorted(ends.items()))
        lines.append(f"{damage:<28} {kind:<22} {sum(ends.values()):>5} tried: {told}")
    total = sum(TRIED.values())
    wrong = sum(times for (_, _, end), times in TRIED.items() if end == "WRONG NUMBERS")
    return [*lines, f"{total} faults tried, {wrong} wrong numbers"] if total else []
