"""The dataset card: one HTML page about a sealed dataset, with inline SVG plots. It loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import numpy as np

from storage.reader import Dataset
from storage.seal import load_seals, some
from storage.stats import OUTLIER_TIMES, Stats

_WIDTH, _HEIGHT = 640, 220
_LEFT, _BOTTOM, _TOP, _RIGHT = 56, 34, 10, 12
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#97266d", "#285e61", "#4a5568")

_STYLE = """
:root { color-scheme: light dark; --ink: #1a202c; --soft: #5a6577; --line: #d8dee8; --page: #ffffff; --panel: #f7f9fc; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #9aa6b8; --line: #333d4d; --page: #12161d; --panel: #1a202a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto; padding: 2rem 1.2rem;
  max-width: 72rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
p.sub { color: var(--soft); margin: .2rem 0 1.4rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .8rem }
.figure { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem }
.figure b { display: block; font-size: 1.35rem } .figure span { color: var(--soft); font-size: .85rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.4rem }
figure { margin: 0 } figcaption { color: var(--soft); font-size: .88rem; margin-top: .2rem }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font: 11px system-ui, sans-serif }
svg .grid { stroke: var(--line) } svg .axis { stroke: var(--soft) }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .8rem .3rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere } th { font-weight: 600; white-space: nowrap }
td:first-child { white-space: nowrap; overflow-wrap: normal } .scroll { overflow-x: auto }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .8rem; overflow-x: auto }
"""


def card_html(dataset: Dataset, stats: Stats) -> str:
    """A whole HTML document. Raises DatasetNotSealed."""
    seals = load_seals(dataset.store)
    seal, contract, geometry = seals[-1], dataset.contract, dataset.plan.geometry
    ratio = stats.raw_bytes / stats.stored_bytes
    figures = [
        (f"{stats.sequences:,}", "sequences"),
        (_short(stats.tokens), "tokens"),
        (f"{100 * stats.loss_tokens / stats.tokens:.1f} %", "of them with loss"),
        (f"{_bytes(stats.stored_bytes)}", f"stored, of {_bytes(stats.raw_bytes)} raw"),
        (f"{ratio:.3f}x", f"codec {dataset.plan.codec}"),
        (f"{contract.layers} x {contract.hidden_size:,}", "states of a token"),
    ]
    tiles = "".join(f'<div class="figure"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in figures)
    plots = [
        (histogram_svg(stats.histogram), "Sequences by length in tokens. " + _lengths(stats)),
        (
            bars_svg([(source.name, float(source.tokens)) for source in stats.sources]),
            "Tokens by source.",
        ),
        (
            bars_svg([(layer.name, layer.rms) for layer in stats.layers]),
            "Root mean square of each layer's states, over the whole dataset.",
        ),
        (
            curves_svg([layer.name for layer in stats.layers], stats.channel_rms),
            f"Root mean square of each channel, in falling order ({stats.sampled_sequences:,} sequences, "
            f"{stats.sampled_tokens:,} tokens). A steep start means outlier channels.",
        ),
    ]
    drawn = "".join(f"<figure>{svg}<figcaption>{escape(text)}</figcaption></figure>" for svg, text in plots)
    layers = _table(
        ["layer", "rms", "largest", "median channel", f"channels over {OUTLIER_TIMES:g}x median", "the first of them"],
        [
            [
                layer.name,
                f"{layer.rms:,.3f}",
                f"{layer.largest:,.1f}",
                f"{layer.median_channel_rms:,.3f}",
                f"{len(layer.outliers):,}",
                ", ".join(f"{at} ({times:,.0f}x)" for at, times in layer.outliers[:4]) or "none",
            ]
            for layer in stats.layers
        ],
        numbers=(1, 2, 3, 4),
    )
    sources = _table(
        ["source", "sequences", "tokens", "with loss", "mean length"],
        [
            [s.name, f"{s.sequences:,}", f"{s.tokens:,}", f"{s.loss_tokens:,}", f"{s.tokens / s.sequences:,.0f}"]
            for s in stats.sources
        ],
        numbers=(1, 2, 3, 4),
    )
    fields = contract.model_dump(mode="json")
    fields["capture_layers"] = f"{list(contract.capture_layers)} (0-based outputs of decoder layers)"
    terms = _table(
        ["field", "value", ""],
        [
            [k, str(v), "recorded" if k in contract.RECORDED else "must match"]
            for k, v in fields.items()
            if v not in (None, {})
        ],
    )
    layout = _table(
        ["what", "value"],
        [
            ["fingerprint", seal.fingerprint],
            ["plan", seal.plan_hash],
            ["shards", f"{geometry.shards:,} of {geometry.shard_tokens:,} tokens, chunks of {geometry.chunk_tokens:,}"],
            ["teacher summary", seal.teacher],
            ["not finite", f"{stats.non_finite:,} values"],
            ["quarantined", f"{stats.quarantined:,} sequences"],
            ["sealed", f"{seal.sealed_at} by {_pairs(seal.written_by)}"],
            *[
                [f"seal {newer.number}", _history(older.fingerprint, newer)]
                for older, newer in zip(seals, seals[1:], strict=False)
            ],
        ],
    )
    snippet = (
        f'import storage\n\ndataset = storage.open_dataset("{dataset.uri}")\n'
        "states = dataset.read(0)          # token_ids [T], loss_mask [T], hidden [T, L, H] bfloat16\n"
        "for states in dataset.stream():   # as they lie in the store, read ahead\n    ..."
    )
    name = dataset.uri.rstrip("/").rsplit("/", 1)[-1]
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>"
        f'<h1>{escape(name)}</h1><p class="sub">Hidden states of {escape(contract.verifier)}, '
        f"{escape(dataset.uri)}, card of {made}</p>"
        f'<div class="figures">{tiles}</div>'
        f'<h2>At a glance</h2><div class="plots">{drawn}</div>'
        f"<h2>Sources</h2>{sources}<h2>Layers</h2>{layers}<h2>Contract</h2>{terms}<h2>Store</h2>{layout}"
        f"<h2>Reading it</h2><pre>{escape(snippet)}</pre></body></html>\n"
    )


def _history(before: str, seal: Any) -> str:
    if not seal.changed_shards:
        return f"same content as {before[:16]}"
    return f"replaces {before[:16]}: shards {some(seal.changed_shards)} were extracted again"


def _lengths(stats: Stats) -> str:
    names = ("shortest", "median", "mean", "p99", "longest")
    return ", ".join(f"{name} {stats.lengths[name]:,.0f}" for name in names) + "."


def _pairs(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _short(count: int) -> str:
    for limit, unit in ((10**9, "G"), (10**6, "M")):
        if count >= limit:
            return f"{count / limit:.2f} {unit}"
    return f"{count:,}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        marks = [' class="n"' if at in numbers else "" for at in range(len(row))]
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"


def _frame(content: str, label: str, height: int = _HEIGHT) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">{content}</svg>'


def _ticks(top: float) -> list[float]:
    """Round numbers from 0 to at most `top`, three to six of them."""
    if top <= 0:
        return [0.0]
    step = 10.0 ** np.floor(np.log10(top))
    step = next(step * part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if top / (step * part) <= 5)
    return [float(step * at) for at in range(int(top / step + 1e-9) + 1)]


def histogram_svg(bins: Sequence[tuple[int, int, int]]) -> str:
    """bins: (low, high, count), equally wide and in order."""
    most = max(count for _, _, count in bins)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    parts = []
    for tick in _ticks(most):
        y = _TOP + height * (1 - tick / most)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,.0f}</text>')
    step = width / len(bins)
    for at, (low, high, count) in enumerate(bins):
        tall = height * count / most
        parts.append(
            f'<rect x="{_LEFT + at * step + 1:.1f}" y="{_TOP + height - tall:.1f}" width="{max(1.0, step - 2):.1f}" '
            f'height="{tall:.1f}" fill="{_COLOURS[0]}"><title>{low:,} to {high - 1:,} tokens: {count:,}</title></rect>'
        )
        if at % max(1, len(bins) // 6) == 0:
            parts.append(f'<text x="{_LEFT + at * step:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{low:,}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 1}" text-anchor="end">tokens</text>')
    return _frame("".join(parts), "histogram of sequence lengths")


def bars_svg(rows: Sequence[tuple[str, float]], limit: int = 20) -> str:
    """Horizontal bars of named values; the largest `limit` of them, in the order given."""
    kept = sorted(sorted(rows, key=lambda row: -row[1])[:limit], key=lambda row: rows.index(row))
    most = max((value for _, value in kept), default=0) or 1
    height = max(60, 26 * len(kept) + 12)
    left, room = 130, _WIDTH - 130 - 100
    parts = []
    for at, (name, value) in enumerate(kept):
        y = 8 + 26 * at
        label = f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name[:18])}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{max(1.0, room * value / most):.1f}" height="19" rx="2" '
            f'fill="{_COLOURS[at % len(_COLOURS)]}"><title>{escape(name)}: {label}</title></rect>'
        )
        parts.append(f'<text x="{left + room * value / most + 6:.1f}" y="{y + 14}">{label}</text>')
    return _frame("".join(parts), "bars", height)


def curves_svg(names: Sequence[str], values: np.ndarray, points: int = 160) -> str:
    """One curve a row of `values` [L, H] (> 0), sorted downwards, both axes logarithmic: rank against value."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    ordered = -np.sort(-values, axis=1)
    positive = ordered[ordered > 0]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.1, 1.0)
    bottom, top = np.floor(np.log10(low)), max(np.ceil(np.log10(high)), np.floor(np.log10(low)) + 1)
    count = ordered.shape[1]
    ranks = np.unique(np.geomspace(1, count, min(points, count)).astype(int))
    span = np.log10(count) if count > 1 else 1.0
    parts = []
    for power in range(int(bottom), int(top) + 1):
        y = _TOP + height * (1 - (power - bottom) / (top - bottom))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for power in range(int(span) + 1):
        x = _LEFT + width * power / span
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{10**power:,}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 2}" text-anchor="end">channel, by rank</text>')
    for at, (name, row) in enumerate(zip(names, ordered, strict=True)):
        shown = [(rank, row[rank - 1]) for rank in ranks.tolist() if row[rank - 1] > 0]
        path = " ".join(
            f"{_LEFT + width * np.log10(rank) / span:.1f},"
            f"{_TOP + height * (1 - (np.log10(value) - bottom) / (top - bottom)):.1f}"
            for rank, value in shown
        )
        colour = _COLOURS[at % len(_COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        y = _TOP + 12 + 14 * at
        parts.append(f'<rect x="{_WIDTH - 110}" y="{y - 8}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - 95}" y="{y + 1}">{escape(name)}</text>')
    return _frame("".join(parts), "channel norms by rank")
