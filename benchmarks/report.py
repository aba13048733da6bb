"""What a benchmark found: every measurement, and the bars that an issue set, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """What the figures were measured on: no name of the host, only what matters to them."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def arguments(name: str, doc: str | None, parts: Sequence[str] = (), *, folder: bool = False) -> argparse.Namespace:
    """The command line that benchmarks share. parts: what `--only` chooses from, a list in the result; folder: `--folder`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less data and fewer repetitions, every figure")
    parser.add_argument("--json", metavar="FILE", help="write machine, rows and bars there")
    if parts:
        parser.add_argument("--only", default=",".join(parts), help=f"some of {','.join(parts)}")
    if folder:
        parser.add_argument("--folder", help="where synthetic data is written (a temporary folder)")
    args = parser.parse_args()
    if parts:
        args.only = args.only.split(",")
        if unknown := set(args.only) - set(parts):
            parser.error(f"--only {', '.join(sorted(unknown))}: expected some of {', '.join(parts)}")
    return args


@dataclass
class Report:
    """rows: {measurement, unit, values, ...}. bars: {name: {value, limit, better, what}}; value None: not measured, `note`
    says why. Each row goes to stderr as it comes, so that a long run shows where it is; `show` prints the tables to stdout.
    """

    name: str
    quick: bool
    machine: dict[str, Any] = field(default_factory=machine)
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: dict[str, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def row(self, measurement: str, unit: str, values: Sequence[float], **more: Any) -> float:
        """Adds a row; returns the median of its repetitions."""
        median = statistics.median(values)
        self.rows.append(
            {
                "measurement": measurement,
                "unit": unit,
                "median": median,
                "values": [float(f"{v:.5g}") for v in values],
                **more,
            }
        )
        self._say(f"{measurement}: {median:.4g} {unit}", more.get("note", ""))
        return median

    def absent(self, measurement: str, why: str) -> None:
        self.rows.append({"measurement": measurement, "unit": "-", "median": None, "values": [], "note": why})
        self._say(measurement, why)

    def _say(self, what: str, note: str) -> None:
        seconds = time.perf_counter() - self.began
        print(f"[{seconds:6.1f} s] {what}{f' ({note})' if note else ''}", file=sys.stderr, flush=True)

    def bar(self, name: str, value: float, limit: float, better: str, what: str) -> None:
        self.bars[name] = {"value": float(f"{value:.5g}"), "limit": limit, "better": better, "what": what}

    def expect(self, name: str, limit: float, better: str, what: str) -> None:
        """A bar that stays in the report as not measured until `measured` or `unmeasured` is called for it."""
        self.bars[name] = {"value": None, "limit": limit, "better": better, "what": what, "note": "not measured"}

    def measured(self, name: str, value: float) -> None:
        bar = self.bars[name]
        self.bar(name, value, bar["limit"], bar["better"], bar["what"])

    def unmeasured(self, why: str, *names: str) -> None:
        for name in names:
            self.bars[name]["note"] = f"not measured: {why}"

    def passed(self, name: str) -> bool:
        """False also for what was not measured."""
        bar = self.bars[name]
        if bar["value"] is None:
            return False
        return bar["value"] <= bar["limit"] if bar["better"] == "lower" else bar["value"] >= bar["limit"]

    def document(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "quick": self.quick,
            "machine": self.machine,
            "seconds": round(time.perf_counter() - self.began, 1),
            "rows": self.rows,
            "bars": self.bars,
        }

    def show(self, json_path: str | None) -> None:
        """Prints the tables; writes the JSON if a path is given."""
        console = Console(width=None if os.isatty(1) else 150)
        rows = Table(
            "measurement", "unit", "median", "lowest", "highest", "n", "note", title=self.name, title_justify="left"
        )
        for row in self.rows:
            values = row["values"]
            shown = [f"{row['median']:.4g}", f"{min(values):.4g}", f"{max(values):.4g}"] if values else ["-"] * 3
            rows.add_row(row["measurement"], row["unit"], *shown, str(len(values)), row.get("note", ""))
        console.print(rows)
        bars = Table("figure", "value", "limit", "", "what", title="against the limits", title_justify="left")
        for name, bar in self.bars.items():
            sign, value = "<=" if bar["better"] == "lower" else ">=", bar["value"]
            ended = bar["note"] if value is None else "ok" if self.passed(name) else "MISSED"
            shown = "-" if value is None else f"{value:.4g}"
            bars.add_row(name, shown, f"{sign} {bar['limit']:g}", ended, bar["what"])
        console.print(bars)
        console.print(f"machine: {', '.join(f'{key} {value}' for key, value in self.machine.items())}")
        if json_path:
            Path(json_path).write_text(json.dumps(self.document(), indent=1) + "\n")
