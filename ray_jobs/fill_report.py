"""What a person and a dashboard see of a running extraction: lines, a bar, Ray metrics, and the summary at the end.

Metrics have the names of the line's fields, as `ray_statehouse_extract_<field>` on Ray's metrics port; docs/grafana.json
shows them.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Protocol

from ray_jobs import job
from ray_jobs.recipe import Recipe
from ray_jobs.stages import STAGES, shares
from ray_jobs.units import ExtractUnit
from storage.plan import Plan

GAUGES = {
    "shards": "shards that are stored",
    "shards_total": "shards of the plan",
    "tokens": "tokens stored by this run",
    "tokens_per_s": "tokens a second since the run began",
    "raw_gb_per_s": "bf16 bytes a second before the codec",
    "stored_gb_per_s": "bytes a second as they are stored",
    "eta_s": "seconds until the plan is filled",
    "replicas": "replicas that answer",
    "retries": "units that were handed out again",
    "restarts": "replicas that were replaced",
    "reissued": "units that were given to a second replica because they took long",
    "quarantined": "sequences that were given up",
    "adopted": "shards that somebody else had stored",
    "checked": "sequences that two replicas forwarded",
    "drift": "largest relative L2 difference of a self-check",
}


class Counts(Protocol):
    def counts(self) -> dict[str, int]: ...


class FillReport:
    def __init__(self, recipe: Recipe, plan: Plan, total: int, before: int, supervisor: Counts) -> None:
        self.recipe, self.plan, self.supervisor = recipe, plan, supervisor
        self.progress = job.Progress("extract", "shards", total, before)
        self.counts: Counter[str] = Counter()
        self.stages: Counter[str] = Counter()
        self.drift = 0.0
        self._metrics: dict[str, Any] | None = None
        self._last_metrics = 0.0
        self._seconds: float | None = None
        self._before = before

    def begin(self) -> None:
        """The clock starts when units do: calibration and the start of the engines are no throughput."""
        self.progress.restart()

    def step(self, unit: ExtractUnit, result: dict[str, Any]) -> None:
        """A unit is stored."""
        self.counts["stored_bytes"] += result["data_bytes"]
        self.counts["adopted"] += not result["created"]
        self.counts["quarantined"] += result.get("quarantined", 0)
        self.counts["checked"] += result.get("checked", 0)
        self.drift = max(self.drift, result.get("drift", 0.0))
        self.stages.update(result.get("stages", {}))
        self.progress.step(unit.tokens, self._shown)
        self._publish()

    def wait(self, in_flight: int) -> None:
        self.progress.extra.update(self._shown())
        self.progress.wait(in_flight)
        self._publish()

    def values(self) -> dict[str, float]:
        """Every gauge as it stands."""
        progress, seconds = self.progress, max(self.seconds, 1e-9)
        supervised = self.supervisor.counts()
        done = progress.done - self._before
        return {
            "shards": progress.done,
            "shards_total": progress.total,
            "tokens": progress.tokens,
            "tokens_per_s": progress.tokens / seconds,
            "raw_gb_per_s": progress.tokens * self.plan.geometry.bytes_per_token / 1e9 / seconds,
            "stored_gb_per_s": self.counts["stored_bytes"] / 1e9 / seconds,
            "eta_s": (progress.total - progress.done) * seconds / done if done else 0.0,
            "adopted": self.counts["adopted"],
            "checked": self.counts["checked"],
            "drift": self.drift,
            **{name: supervised.get(name, 0) for name in ("replicas", "retries", "restarts", "reissued")},
            "quarantined": self.counts["quarantined"],
        }

    @property
    def seconds(self) -> float:
        return self.progress.seconds if self._seconds is None else self._seconds

    def _shown(self) -> dict[str, object]:
        values = self.values()
        shown: dict[str, object] = {name: f"{values[name]:.3g}" for name in ("raw_gb_per_s", "stored_gb_per_s")}
        shown |= {name: int(values[name]) for name in ("replicas", "retries", "restarts", "quarantined", "adopted")}
        if sum(self.stages.values()):
            busiest = {stage: f"{share:.0%}" for stage, share in shares(self.stages).items()}
            shown["bottleneck"] = "/".join(f"{stage}:{share}" for stage, share in busiest.items())
        return shown

    def _publish(self, every_s: float = 2.0) -> None:
        """To Ray's metrics. Where there is no Ray (a test), to nobody."""
        now = time.monotonic()
        if now - self._last_metrics < every_s and self.progress.done < self.progress.total:
            return
        self._last_metrics = now
        if self._metrics is None:
            self._metrics = make_metrics()
        tags = {"dataset": self.recipe.dataset.uri, "recipe": self.recipe.name}
        if self._metrics:
            for name, value in self.values().items():
                self._metrics[name].set(float(value), tags)
            for stage, share in shares(self.stages).items():
                self._metrics["bottleneck"].set(share, {**tags, "stage": stage})

    def end(self) -> None:
        self._seconds = self.progress.seconds
        job.log.info("extract %s", " ".join(f"{name}={value}" for name, value in self.summary().items()))

    def summary(self) -> dict[str, str]:
        """The last line: how fast, what it waited for, what it cost."""
        values, bottleneck = self.values(), shares(self.stages)
        hours = self.seconds * self.recipe.extraction.replicas / 3600
        summary = {
            "filled": f"{values['tokens']:,.0f} tokens",
            "seconds": f"{self.seconds:.1f}",
            "tokens_per_s": f"{values['tokens_per_s']:,.0f}",
            "raw": f"{values['raw_gb_per_s']:.3g} GB/s",
            "stored": f"{values['stored_gb_per_s']:.3g} GB/s",
            "bottleneck": ", ".join(f"{stage} {bottleneck[stage]:.0%}" for stage in STAGES),
            "self_check": f"{self.counts['checked']} sequences, drift {self.drift:.3g}",
            "retries": f"{values['retries']:.0f}",
            "restarts": f"{values['restarts']:.0f}",
            "quarantined": f"{values['quarantined']:.0f}",
            "replica_hours": f"{hours:.3g}",
        }
        price = self.recipe.extraction.usd_per_replica_hour
        if price is not None and values["tokens"]:
            summary["usd_per_million_tokens"] = f"{price * hours / values['tokens'] * 1e6:.3g}"
        return summary


def make_metrics() -> dict[str, Any]:
    """A gauge each; none where Ray does not run."""
    import ray

    if not ray.is_initialized():
        return {}
    from ray.util.metrics import Gauge

    tags = ("dataset", "recipe")
    metrics: dict[str, Any] = {
        name: Gauge(f"statehouse_extract_{name}", description=what, tag_keys=tags) for name, what in GAUGES.items()
    }
    what = "share of the time in which everything else waited for this stage"
    metrics["bottleneck"] = Gauge("statehouse_extract_bottleneck", description=what, tag_keys=(*tags, "stage"))
    return metrics
