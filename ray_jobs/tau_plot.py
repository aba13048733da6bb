"""tau(k) over k as one small SVG: the drafter with its interval, its sources, the controls and the ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 380, 56, 150, 40, 44
# Colours that differ in lightness too, so that they stay apart in print.
_COLOURS = {"drafter": "#0b5fa5", "untrained": "#999999", "d2t off by one": "#c2571a", "ceiling": "#2b8a3e"}
_SOURCE = "#8fb8de"


def draw_taus(summary: dict[str, Any], draft_lengths: Sequence[int], title: str) -> str:
    """The SVG. summary: `ray_jobs.evaluate.summarise`; draft lengths ascending."""
    every = summary["all"]["drafters"]
    lines = [
        (source, "drafter", _SOURCE)
        for source in summary
        if source != "all" and "drafter" in summary[source]["drafters"]
    ]
    named = [("all", name, _COLOURS.get(name, "#444444")) for name in every]
    points = {
        (group, name): [(k, summary[group]["drafters"][name]["tau"][str(k)]["tau"]) for k in draft_lengths]
        for group, name, _ in lines + named
    }
    highest = max((tau for line in points.values() for _, tau in line if tau is not None), default=1.0)
    top = max(1.2, highest * 1.05)
    last = max(draft_lengths[-1], draft_lengths[0] + 1)

    def x(k: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (k - draft_lengths[0]) / (last - draft_lengths[0])

    def y(tau: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (tau - 1) / (top - 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for step in range(5):
        tau = 1 + (top - 1) * step / 4
        parts.append(f'<path d="M{_LEFT} {y(tau):.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tau) + 4:.1f}" text-anchor="end">{tau:.2f}</text>')
    for k in draft_lengths:
        parts.append(f'<text x="{x(k):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{k}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">drafts a pass, k</text>')
    for k in draft_lengths:
        low, high = every["drafter"]["tau"][str(k)]["interval_95"]
        if low is not None:
            parts.append(
                f'<path d="M{x(k):.1f} {y(low):.1f}V{y(high):.1f}" stroke="{_COLOURS["drafter"]}" opacity="0.5"/>'
            )
    ends = []
    for group, name, colour in lines + named:
        line = [(k, tau) for k, tau in points[group, name] if tau is not None]
        if not line:
            continue
        path = "L".join(f"{x(k):.1f} {y(tau):.1f}" for k, tau in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{1 if group != "all" else 2.5}"/>')
        parts += [f'<circle cx="{x(k):.1f}" cy="{y(tau):.1f}" r="2.5" fill="{colour}"/>' for k, tau in line]
        if group == "all":
            ends.append((y(line[-1][1]), x(line[-1][0]), f"{name} {line[-1][1]:.2f}", colour))
    lowest = _HEIGHT + 0.0
    for at, right, text, colour in sorted(ends, reverse=True):  # labels keep a line's height apart
        lowest = min(at, lowest - 14)
        parts.append(f'<text x="{right + 8:.1f}" y="{lowest + 4:.1f}" fill="{colour}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])
