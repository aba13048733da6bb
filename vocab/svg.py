"""Line and bar charts as inline SVG: no library, no script, nothing to load. Values appear on hovering (<title>)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from vocab.page import wide

# Okabe and Ito's palette, told apart with any colour vision, in an order that keeps neighbours apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#8A6D00", "#666666", "#E69F00")
# For series that have an order (batch sizes); each is seen on a light and on a dark page.
SHADES = ("#56B4E9", "#2f7fc1", "#8a63d2")

_WIDTH, _HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 30, 14, 46

Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """A curve: points (x, y), and optionally a band (x, low, high) behind it."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    band: Sequence[tuple[float, float, float]] = ()
    dashed: bool = False


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_format: Format,
    y_format: Format,
    log_x: bool = True,
    ticks_x: Sequence[float] | None = None,
    mark_x: float | None = None,
    mark_y: float | None = None,
    y_top: float | None = None,
) -> str:
    """An SVG of curves over a (logarithmic) x axis, named above it. ticks_x: where x is written; by default at the points.
    mark_x, mark_y: thin guide lines. y_top: the most that y can be.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [v for line in lines for b in line.band for v in b[1:]]
    if not xs:
        return "<p>Nothing to draw.</p>"
    low_y, high_y = min(ys), max(ys) if y_top is None else y_top
    if mark_y is not None:
        low_y, high_y = min(low_y, mark_y), max(high_y, mark_y)
    if high_y <= low_y:  # a flat line
        low_y, high_y = (
            low_y - 0.05 * (abs(low_y) or 1),
            high_y + (0.0 if y_top is not None else 0.05 * (abs(high_y) or 1)),
        )
    ticks_y = [tick for tick in ticks(low_y, high_y) if y_top is None or tick <= y_top * (1 + 1e-9)]
    low_y, high_y = min(ticks_y[0], low_y), max(ticks_y[-1], high_y)
    scale = math.log if log_x else float
    low_x, high_x = scale(min(xs)), scale(max(xs))

    def at_x(x: float) -> float:
        share = (scale(x) - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)

    out = [_open(_HEIGHT, f"{y_label} over {x_label}")]
    for tick in ticks_y:
        out.append(_grid(at_y(tick), y_format(tick)))
    last = -1e9
    for x in sorted(set(xs)) if ticks_x is None else ticks_x:
        if at_x(x) - last >= 52:
            last = at_x(x)
            out.append(
                f'<text class="tick" x="{last:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{escape(x_format(x))}</text>'
            )
    if mark_x is not None and min(xs) <= mark_x <= max(xs):
        out.append(
            f'<line class="mark" x1="{at_x(mark_x):.1f}" x2="{at_x(mark_x):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        )
    if mark_y is not None:
        out.append(
            f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at_y(mark_y):.1f}" y2="{at_y(mark_y):.1f}"/>'
        )
    for line in lines:
        if line.band:
            upper = " ".join(f"{at_x(x):.1f},{at_y(high):.1f}" for x, _, high in line.band)
            lower = " ".join(f"{at_x(x):.1f},{at_y(low):.1f}" for x, low, _ in reversed(line.band))
            out.append(f'<polygon points="{upper} {lower}" fill="{line.colour}" opacity="0.15"/>')
    for line in lines:
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in line.points)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>')
        for x, y in line.points:
            tip = f"{line.name}: {x_format(x)}, {y_format(y)}"
            out.append(
                f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{line.colour}"><title>{escape(tip)}</title></circle>'
            )
    out.append(_label(x_label, y_label, _HEIGHT))
    return _legend(lines) + wide("".join(out) + "</svg>")


@dataclass(frozen=True)
class Bar:
    """A bar: value, and optionally the interval around it."""

    name: str
    value: float
    interval: tuple[float, float] | None = None


def bar_chart(bars: Sequence[Bar], *, value_format: Format, colour: str = COLOURS[0]) -> str:
    """An SVG of horizontal bars, from zero, with their values."""
    if not bars:
        return "<p>Nothing to draw.</p>"
    height = 26 * len(bars) + 12
    top = max([bar.value for bar in bars] + [bar.interval[1] for bar in bars if bar.interval])
    left = 160
    span = max(top, 1e-12)

    def at(value: float) -> float:
        return left + max(0.0, value) / span * (_WIDTH - left - 200)

    out = [_open(height, "bars")]
    for row, bar in enumerate(bars):
        y = 8 + 26 * row
        said = value_format(bar.value)
        if bar.interval:
            said += f" ({value_format(bar.interval[0])} to {value_format(bar.interval[1])})"
        out.append(
            f'<text class="name" x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(_short(bar.name, 22))}</text>'
        )
        out.append(
            f'<rect x="{left}" y="{y}" width="{max(1.0, at(bar.value) - left):.1f}" height="17" fill="{colour}" opacity="0.8"><title>{escape(bar.name)}: {said}</title></rect>'
        )
        if bar.interval:
            low, high = (at(value) for value in bar.interval)
            out.append(f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 8.5}" y2="{y + 8.5}"/>')
        end = max(at(bar.value), at(bar.interval[1]) if bar.interval else 0)
        out.append(f'<text class="tick" x="{end + 6:.1f}" y="{y + 13}">{said}</text>')
    return wide("".join(out) + "</svg>")


def _open(height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">'


def _grid(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def _legend(lines: Sequence[Line]) -> str:
    """A swatch and a name a line, above the plot, where they wrap on a narrow screen."""
    out = []
    for line in lines:
        style = f"border-top:3px {'dashed' if line.dashed else 'solid'} {line.colour}"
        out.append(f'<span><i style="{style}"></i>{escape(line.name)}</span>')
    return f'<div class="legend">{"".join(out)}</div>'


def _label(x_label: str, y_label: str, height: int) -> str:
    middle = (_TOP + height - _BOTTOM) / 2
    return (
        f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text class="axis" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
    )


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round values from below `low` to above `high`."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
