"""A finished (or running) run as pictures: report.html, one page that works offline, and curves.png.

python -m ray_jobs.training_report s3://states/kimi-k25-runs/first -o first.html
"""

from __future__ import annotations

import argparse
import html
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.run import CURVES, METRICS, REPORT, Run
from storage.errors import StatehouseError
from storage.objects import ObjectMissing
from vocab.svg import COLOURS, Line, line_chart

# Points of a curve: more would lie on one another.
_POINTS = 120
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:820px;margin:2em auto;padding:0 1em;color:#222}"
    "svg{width:100%;height:auto}.grid{stroke:#ddd}.tick{font-size:11px;fill:#555}.name,.axis{font-size:12px}"
    "td{padding:.1em 1em .1em 0}.mark{stroke:#999;stroke-dasharray:3 3}"
)


@dataclass(frozen=True)
class Panel:
    """One chart: what it shows, its curves, and how a value is written."""

    title: str
    y_label: str
    lines: Sequence[Line]
    digits: int

    def value(self, y: float) -> str:
        return f"{y:.{self.digits}f}"


def panels(metrics: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> list[Panel]:
    """Loss, greedy matches by step, rate and gradient, waiting for data; of the lines of metrics.jsonl. What is not finite
    (a loss that diverged) is no point of a curve."""

    def trained(name: str, scale: float = 1.0) -> list[tuple[float, float]]:
        return _thinned(_finite((one["update"] + 1.0, one.get(name)) for one in metrics), scale)

    def held(pick: Callable[[dict[str, Any]], float | None], scale: float = 1.0) -> list[tuple[float, float]]:
        return [(x, scale * y) for x, y in _finite((float(one["update"]), pick(one)) for one in evaluations)]

    steps = len(metrics[0]["accuracy"]) if metrics else 0
    loss = [Line("training", trained("loss"), COLOURS[0])]
    accuracy = [
        Line(
            f"step {step}",
            _thinned(_finite((one["update"] + 1.0, one["accuracy"][step]) for one in metrics), 100),
            COLOURS[step % 8],
        )
        for step in range(min(steps, 8))
    ]
    if evaluations:
        loss.append(Line("held out", held(lambda one: one["loss"]), COLOURS[1]))
        accuracy = [
            Line(f"step {step}", held(_accuracy(step), 100), COLOURS[step % 8]) for step in range(min(steps, 8))
        ]
    where = "held-out prompts" if evaluations else "training batches"
    made = [
        Panel("Loss", "loss a position", loss, 2),
        Panel(f"Greedy matches with the verifier, {where}", "%", accuracy, 1),
        Panel("Norm of the gradient", "norm", [Line("before clipping", trained("grad_norm"), COLOURS[2])], 2),
        Panel("Learning rate", "rate", [Line("rate", trained("lr"), COLOURS[3])], 6),
        Panel("Waiting for data", "% of the time", [Line("waiting", trained("wait_share", 100), COLOURS[4])], 1),
    ]
    return [one for one in made if any(line.points for line in one.lines)]


def _accuracy(step: int) -> Callable[[dict[str, Any]], float | None]:
    return lambda one: one["accuracy"][step]


def _finite(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _thinned(points: list[tuple[float, float]], scale: float = 1.0) -> list[tuple[float, float]]:
    """Means of neighbouring points, times scale, so that no more than _POINTS are left."""
    size = -(-len(points) // _POINTS) if points else 1
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], scale * sum(y for _, y in group) / len(group)) for group in groups]


def report_html(run: Run, metrics: Sequence[dict[str, Any]], summary: dict[str, Any] | None) -> str:
    identity = run.identity()
    evaluations = (summary or {}).get("evaluations", [])
    rows = {
        "run": run.uri,
        "state": ("ended early" if summary.get("ended_early") else "finished")
        if summary
        else f"at update {len(metrics)}",
        "datasets": ", ".join(f"{print_[:12]} x {weight:g}" for print_, weight in identity.get("datasets", {}).items()),
        "draft vocabulary": str(identity.get("draft_vocabulary", ""))[:12],
    }
    if summary:
        rows |= {
            "updates, epochs": f"{summary['updates']:,}, {summary['epochs']}",
            "tokens": f"{summary['tokens']:,} ({summary['tokens_per_s']:,.0f} a second, {100 * summary['wait_share']:.1f} % of the time waiting)",
            "parameters": f"{summary['parameters']['trained']:,} trained, {summary['parameters']['all']:,} in all",
        }
        if summary["loss_before"] is not None:
            rows["held-out loss"] = f"{summary['loss_before']:.3f} before, {summary['loss_after']:.3f} after"
        if summary.get("best"):
            rows["best"] = f"update {summary['best']['update']:,}: {summary['best']['loss']:.3f}"
    table = "".join(f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>" for key, value in rows.items())
    charts = "".join(
        f"<h2>{html.escape(panel.title)}</h2>"
        + line_chart(
            panel.lines, x_label="update", y_label=panel.y_label, x_format=lambda x: f"{x:,.0f}",
            y_format=panel.value, log_x=False,
        )
        for panel in panels(metrics, evaluations)
    )  # fmt: skip
    title = html.escape(run.uri.rsplit("/", 1)[-1])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>'
        f"<body><h1>Training run {title}</h1><table>{table}</table>{charts}</body></html>\n"
    )


def curves_png(shown: Sequence[Panel]) -> bytes | None:
    """The same charts under each other; None where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        return None
    width, height, left, right, top, bottom = 1000, 300, 90, 170, 34, 30
    image = Image.new("RGB", (width, height * max(1, len(shown))), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    for row, panel in enumerate(shown):
        up, down = row * height + top, (row + 1) * height - bottom
        points = [point for line in panel.lines for point in line.points]
        low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
        low_y, high_y = min(y for _, y in points), max(y for _, y in points)

        def at(
            x: float, y: float, box: tuple[float, ...] = (low_x, high_x, low_y, high_y, up, down)
        ) -> tuple[float, float]:
            x0, x1, y0, y1, upper, lower = box
            across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
            rise = (y - y0) / (y1 - y0) if y1 > y0 else 0.5
            return left + across * (width - left - right), lower - rise * (lower - upper)

        draw.text((left, up - 24), panel.title, fill="black", font=font)
        for step in range(5):
            y = low_y + (high_y - low_y) * step / 4
            _, line_y = at(low_x, y)
            draw.line([(left, line_y), (width - right, line_y)], fill="#dddddd")
            draw.text((left - 8, line_y), panel.value(y), fill="#555555", font=font, anchor="rm")
        for x in (low_x, (low_x + high_x) / 2, high_x):
            draw.text((at(x, low_y)[0], down + 6), f"{x:,.0f}", fill="#555555", font=font, anchor="mt")
        for number, line in enumerate(panel.lines):
            path = [at(x, y) for x, y in line.points]
            if len(path) > 1:
                draw.line(path, fill=line.colour, width=2, joint="curve")
            for x, y in path if len(path) < 40 else []:
                draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=line.colour)
            draw.text((width - right + 14, up + 18 * number), line.name, fill=line.colour, font=font)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def read_run(run: Run) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Lines of metrics.jsonl, and the summary of a finished run."""
    try:
        lines = run.store.get(METRICS).decode().splitlines()
    except ObjectMissing:
        lines = []
    return [json.loads(line) for line in lines], run.summary()


def put_report(uri: str) -> str:
    """Draws a run and stores the pictures in it; returns where the page is."""
    run = Run(uri)
    metrics, summary = read_run(run)
    run.store.put(REPORT, report_html(run, metrics, summary).encode())
    png = curves_png(panels(metrics, (summary or {}).get("evaluations", [])))
    if png is not None:
        run.store.put(CURVES, png)
    return f"{run.uri}/{REPORT}"


def main(argv: Sequence[str] | None = None) -> int:
    parsed = argparse.ArgumentParser(
        prog="python -m ray_jobs.training_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsed.add_argument("run", help="URI of a run, finished or not")
    parsed.add_argument(
        "-o", "--output", default="report.html", help="the page; its curves go beside it as .png (%(default)s)"
    )
    args = parsed.parse_args(argv)
    try:
        run = Run(args.run)
        metrics, summary = read_run(run)
        Path(args.output).write_text(report_html(run, metrics, summary))
        png = curves_png(panels(metrics, (summary or {}).get("evaluations", [])))
        if png is not None:
            Path(args.output).with_suffix(".png").write_bytes(png)
    except (StatehouseError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
