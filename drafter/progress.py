"""How far a run is, and what it says of itself: counters that go into every checkpoint, and one line an update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drafter.loader import Counts
from drafter.trainer import Measured

# Of loading, summed over workers.
TELEMETRY = (
    "waited_s", "bytes", "read_s", "fetched_bytes", "fetch_s", "decode_s", "cache_hits", "cache_misses",
    "bad_sequences", "bad_tokens", "padding",
)  # fmt: skip


@dataclass
class Progress:
    """Counters of a run; all but `update` are told by every checkpoint. waited_s: for data, mean of the workers."""

    update: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    skipped: int = 0
    bad_sequences: int = 0
    resumed: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "update"}

    def best(self) -> dict[str, Any] | None:
        """The evaluation with the lowest held-out loss, of those after some training; the first of equals."""
        finite = [one for one in self.evaluations if one["update"] and math.isfinite(one["loss"])]
        return min(finite, key=lambda one: one["loss"], default=None)

    def without_gain(self) -> int:
        """Evaluations since the best one; those before any training do not count."""
        trained, best = [one["update"] for one in self.evaluations if one["update"]], self.best()
        return len(trained) - (trained.index(best["update"]) + 1 if best else 0)

    def evaluation_due(self, every: int, total: int) -> bool:
        """Whether the held-out loss belongs to this update and was not measured; the first and last ones are due anyway."""
        return (
            self.update % every == 0 and bool(self.evaluations) and self.evaluations[-1]["update"] < self.update < total
        )

    def summary(self) -> dict[str, Any]:
        """What a finished run says of its way."""
        before, after = (self.evaluations[at] if self.evaluations else {} for at in (0, -1))
        best = self.best()
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "tokens_per_s": round(self.tokens / max(self.seconds, 1e-9), 1),
            "wait_share": round(self.waited_s / max(self.seconds, 1e-9), 4),
            "loss_before": before.get("loss"),
            "loss_after": after.get("loss"),
            "accuracy_before": before.get("accuracy"),
            "accuracy_after": after.get("accuracy"),
            "best": best and {name: best[name] for name in ("update", "loss", "accuracy")},
            "evaluations": self.evaluations,
            "skipped_updates": self.skipped,
            "bad_sequences": self.bad_sequences,
            "resumed": self.resumed,
        }


def evaluation_entry(update: int, measured: Measured) -> dict[str, Any]:
    """What is kept of an evaluation, as JSON can hold it."""
    return {
        "update": update,
        "loss": measured.loss,
        "accuracy": list(measured.accuracy),
        "covered": list(measured.covered),
        "positions": measured.positions,
        "fair": {source: one.shares() for source, one in measured.fair.items()},
    }


def update_line(
    update: int, epoch: int, measured: Measured, lr: float, tokens: int, seconds: float, loading: Counts, workers: int
) -> dict[str, Any]:
    """What `metrics.jsonl` says of an update. seconds: that it took. loading: since the one before, over all workers."""
    reads = loading.cache_hits + loading.cache_misses
    line = {
        "update": update,
        "epoch": epoch,
        "loss": measured.loss if math.isfinite(measured.loss) else None,
        "accuracy": [round(share, 5) for share in measured.accuracy],
        "positions": measured.positions,
        "lr": lr,
        "grad_norm": measured.grad_norm if math.isfinite(measured.grad_norm) else None,
        "tokens": tokens,
        "padding": loading.padding,
        "seconds": round(seconds, 4),
        "wait_share": round(min(1.0, loading.waited_s / workers / max(seconds, 1e-9)), 4),
        "read_gb_per_s": round(loading.bytes / 1e9 / max(seconds, 1e-9), 4),
        "fetched_bytes": loading.fetched_bytes,
        "fetch_s": round(loading.fetch_s, 4),
        "decode_s": round(loading.decode_s, 4),
        "cache_hits": round(loading.cache_hits / reads, 4) if reads else None,
    }
    if measured.skipped:
        line["skipped"] = True
    if loading.bad_sequences:
        line["bad_sequences"] = loading.bad_sequences
    return line


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by the names that curves get."""
    found = {
        f"train/{name}": float(value)
        for name, value in line.items()
        if isinstance(value, (int, float)) and name not in ("update", "epoch", "skipped")
    }
    found |= {f"train/accuracy_{step}": share for step, share in enumerate(line["accuracy"])}
    return found


# Of the fair numbers (drafter.metrics), what curves are drawn of: greedy drafts right in a row, and sum min(p, q) at T = 1.
_FAIR = ("joint", "overlap_T1")


def evaluation_scalars(entry: dict[str, Any]) -> dict[str, float]:
    """The same of a held-out evaluation."""
    found = {"held_out/loss": entry["loss"]}
    found |= {f"held_out/accuracy_{step}": share for step, share in enumerate(entry["accuracy"])}
    for name in _FAIR:
        shares = over_sources(entry, name)
        found |= {f"held_out/{name}_{step}": share for step, share in enumerate(shares) if share is not None}
    return found


def over_sources(entry: Mapping[str, Any], name: str) -> list[float | None]:
    """[K]: a share of `Fair.shares`, over the positions of all sources of an evaluation; None where there are none."""
    found: list[float | None] = []
    for step in range(len(entry["accuracy"])):
        parts = [(one["positions"][step], one[name][step]) for one in entry.get("fair", {}).values()]
        positions = sum(count for count, _ in parts)
        found.append(sum(count * (share or 0.0) for count, share in parts) / positions if positions else None)
    return found


def describe(summary: Mapping[str, Any], uri: str) -> str:
    """One line of fields about a finished run."""
    loss = (
        f"loss={summary['loss_before']:.3f}->{summary['loss_after']:.3f} acc={shares(summary['accuracy_after'])} "
        if summary["loss_before"] is not None
        else ""
    )
    return f"updates={summary['updates']} seconds={summary['seconds']:.0f} {loss}where={uri}"


def shares(values: Any) -> str:
    """`[.27 .11]`: shares by step, for a log line."""
    return "[" + " ".join(f"{share:.2f}".lstrip("0") or "0" for share in values) + "]"
