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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.errors import DrafterError
from drafter.progress import over_sources
from drafter.run import CURVES, METRICS, REPORT, SUMMARY, Run
from storage.errors import StatehouseError
from storage.runs import read_run as find_run
from vocab.page import page
from vocab.svg import COLOURS, Line, line_chart, ticks

# Points of a curve: more would lie on one another.
_POINTS = 120


@dataclass(frozen=True)
class Panel:
    """One chart over the updates: what it shows, in which unit, its curves, and the lowest y that it must show."""

    title: str
    y_label: str
    lines: Sequence[Line]
    least: float | None = None

    def span(self) -> tuple[float, float, float, float]:
        """Lowest and highest x, lowest and highest y; apart, where all points are alike."""
        points = [point for line in self.lines for point in line.points]
        low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
        low_y, high_y = min(y for _, y in points), max(y for _, y in points)
        if self.least is not None:
            low_y = min(low_y, self.least)
        if high_y <= low_y:
            low_y, high_y = low_y - 0.05 * (abs(low_y) or 1), high_y + 0.05 * (abs(high_y) or 1)
        return low_x, high_x, low_y, high_y

    def ticks_x(self) -> list[float]:
        """Round numbers of updates."""
        low, high, *_ = self.span()
        return [x for x in ticks(low, max(high, low + 1), 8) if low <= x <= high and x == int(x)]


def _value(y: float) -> str:
    return f"{y:.4g}"


def panels(metrics: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> list[Panel]:
    """Loss, greedy matches by step and in a row, gradient, rate, waiting for data; of the lines of metrics.jsonl. What is not
    finite (a loss that diverged) is no point of a curve."""

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
    in_a_row = [
        Line(f"first {step + 1}" if step else "the first", held(_joint(step), 100), COLOURS[step % 8])
        for step in range(min(steps, 8))
    ]
    made = [
        Panel("Loss", "nats a position, weighted sum of the steps", loss),
        Panel(f"Greedy matches with the verifier, {where}", "% of the positions", accuracy, 0),
        Panel("Greedy matches in a row, held-out prompts", "% of the positions", in_a_row, 0),
        Panel("Norm of the gradient", "before clipping", [Line("norm", trained("grad_norm"), COLOURS[2])], 0),
        Panel("Learning rate", "of the optimiser", [Line("rate", trained("lr"), COLOURS[3])], 0),
        Panel("Waiting for data", "% of the time", [Line("waiting", trained("wait_share", 100), COLOURS[4])], 0),
    ]
    return [one for one in made if any(line.points for line in one.lines)]


def _accuracy(step: int) -> Callable[[dict[str, Any]], float | None]:
    return lambda one: one["accuracy"][step]


def _joint(step: int) -> Callable[[dict[str, Any]], float | None]:
    return lambda one: over_sources(one, "joint")[step]


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
    known, provenance = {}, run.provenance()
    for one in provenance.get("datasets", []):
        known[one["fingerprint"]] = one["uri"]
    rows = {
        "run": run.uri,
        "state": ("ended early" if summary.get("ended_early") else "finished")
        if summary
        else f"at update {len(metrics)}",
        "datasets": "\n".join(
            f"{known.get(print_, '')} {print_[:12]}" + (f" x {weight:g}" if weight != 1 else "")
            for print_, weight in identity.get("datasets", {}).items()
        ),
        "draft vocabulary": str(identity.get("draft_vocabulary", ""))[:12],
        "code": _code(provenance),
    }
    if summary:
        rows |= {
            "updates": f"{summary['updates']:,} ({summary['epochs']} epochs by the recipe)",
            "tokens": f"{summary['tokens']:,} ({summary['tokens_per_s']:,.0f} a second, {100 * summary['wait_share']:.1f} % of the time waiting)",
            "parameters": f"{summary['parameters']['trained']:,} trained, {summary['parameters']['all']:,} in all",
        }
        if summary["loss_before"] is not None:
            rows["held-out loss"] = f"{summary['loss_before']:.3f} before, {summary['loss_after']:.3f} after"
        if summary.get("best"):
            rows["best"] = f"update {summary['best']['update']:,}: {summary['best']['loss']:.3f}"
    if taus := find_run(run.store).tau:
        rows["acceptance length"] = ", ".join(f"τ({k}) = {tau:.3f}" for k, tau in taus.items())
    charts = [
        f"<h2>{html.escape(panel.title)}</h2>"
        + line_chart(
            panel.lines, x_label="update", y_label=panel.y_label, x_format=lambda x: f"{x:,.0f}", y_format=_value,
            log_x=False, ticks_x=panel.ticks_x(), mark_y=panel.least,
        )
        for panel in panels(metrics, evaluations)
    ]  # fmt: skip
    title = f"Training run {run.uri.rsplit('/', 1)[-1]}"
    about = "".join(
        f"<tr><td>{html.escape(key)}</td><td style='text-align:left'>{html.escape(value)}</td></tr>"
        for key, value in rows.items()
    )
    return page(title, [f"<h1>{html.escape(title)}</h1>", f"<table>{about}</table>", *charts])


def _code(provenance: Mapping[str, Any]) -> str:
    commit, source = provenance.get("git_commit"), provenance.get("source")
    named = [f"commit {commit[:12]}{'+changes' if commit.endswith('+changes') else ''}"] if commit else []
    return ", ".join([*named, *([f"source {source[:12]}"] if source else [])])


def curves_png(shown: Sequence[Panel]) -> bytes | None:
    """The same charts under each other; None where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        return None
    width, height, left, right, top, bottom = 1000, 320, 90, 150, 40, 44
    image = Image.new("RGB", (width, height * max(1, len(shown))), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    for row, panel in enumerate(shown):
        up, down = row * height + top, (row + 1) * height - bottom
        low_x, high_x, low_y, high_y = panel.span()
        ticks_y = ticks(low_y, high_y)
        low_y, high_y = ticks_y[0], ticks_y[-1]

        def at(
            x: float, y: float, box: tuple[float, ...] = (low_x, high_x, low_y, high_y, up, down)
        ) -> tuple[float, float]:
            x0, x1, y0, y1, upper, lower = box
            across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
            return left + across * (width - left - right), lower - (y - y0) / (y1 - y0) * (lower - upper)

        draw.text((left, up - 28), f"{panel.title} ({panel.y_label})", fill="black", font=font)
        for y in ticks_y:
            _, line_y = at(low_x, y)
            draw.line([(left, line_y), (width - right, line_y)], fill="#dddddd")
            draw.text((left - 10, line_y), _value(y), fill="#555555", font=font, anchor="rm")
        for x in panel.ticks_x():
            draw.text((at(x, low_y)[0], down + 7), f"{x:,.0f}", fill="#555555", font=font, anchor="mt")
        draw.text((width - right + 14, down + 7), "update", fill="#555555", font=font, anchor="lt")
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
    """Lines of metrics.jsonl, and the summary of a finished run. Raises DrafterError for what is neither."""
    return [json.loads(line) for line in run.metrics()], run.summary()


def draw(run: Run) -> tuple[str, bytes | None]:
    """The page, and the curves as PNG. Raises DrafterError for a run that is none of ours, or damaged."""
    metrics, summary = read_run(run)
    try:
        shown = panels(metrics, (summary or {}).get("evaluations", []))
        return report_html(run, metrics, summary), curves_png(shown)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise DrafterError(
            f"{run.uri}: expected {METRICS} and {SUMMARY} as training writes them, found {error!r}; start it over with --fresh"
        ) from None


def put_report(uri: str) -> str:
    """Draws a run and stores the pictures in it; returns where the page is."""
    run = Run(uri)
    text, png = draw(run)
    run.store.put(REPORT, text.encode())
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
        text, png = draw(Run(args.run))
        Path(args.output).write_text(text)
        if png is not None:
            Path(args.output).with_suffix(".png").write_bytes(png)
    except (StatehouseError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
