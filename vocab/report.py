"""Coverage and trade-off as one self-contained HTML page. It works offline: inline SVG, inline style, no script.

`report_html` takes the dicts of `vocab.study.study` and `Tradeoff.to_dict`; either may be missing. The same numbers are
in the JSON beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from vocab.errors import VocabError
from vocab.page import page, percent, span, table
from vocab.svg import COLOURS, SHADES, Bar, Line, bar_chart, line_chart
from vocab.tables import TEACHER_HEAD, billions, teacher_rows


def report_html(title: str, study: dict[str, Any] | None, tradeoff: dict[str, Any] | None) -> str:
    """The page. study: of `vocab.study.study`. tradeoff: of `Tradeoff.to_dict`. Raises VocabError when both are missing."""
    if study is None and tradeoff is None:
        raise VocabError("report: nothing to report; give a coverage study, a trade-off or both")
    parts = [f"<h1>{escape(title)}</h1>", _lead(study, tradeoff)]
    if tradeoff is not None:
        parts.append(_answer(tradeoff))
    if study is not None:
        parts += [_curves(study), _teacher(study), _sources(study), _policies(study), _positions(study)]
    if tradeoff is not None:
        parts += [_weights(tradeoff), _tau(tradeoff), _speed(tradeoff), _break_even(tradeoff), _training(tradeoff)]
    if study is not None:
        parts.append(_lost(study))
    if tradeoff is not None:
        parts.append(_assumed(tradeoff))
    return page(title, parts)


def write_report(
    path: str, *, title: str, study: dict[str, Any] | None = None, tradeoff: dict[str, Any] | None = None
) -> None:
    """Write `report_html` to a file. Raises OSError when that is not possible."""
    Path(path).write_text(report_html(title, study, tradeoff), encoding="utf-8")


def _lead(study: dict[str, Any] | None, tradeoff: dict[str, Any] | None) -> str:
    said = []
    if study is not None:
        held = f", {study['held_out_tokens']:,} more held out" if study["held_out_tokens"] else ""
        said.append(
            f"{study['tokens']:,} tokens of {len(study['sources'])} sources{held}; {study['unseen_ids']:,} of the "
            f"verifier's {study['vocab_size']:,} ids never occur."
        )
    if tradeoff is not None:
        said.append(f"Drafter of {tradeoff['verifier']['name']} on {_where(tradeoff)}.")
    return f'<p class="lead">{escape(" ".join(said))}</p>'


def _where(tradeoff: dict[str, Any]) -> str:
    return f"{tradeoff['tensor_parallel']} × {tradeoff['gpu']['name']}, {tradeoff['server']}"


def _answer(tradeoff: dict[str, Any]) -> str:
    chosen = tradeoff["recommendation"]
    count = len(chosen["sensitivity"])
    causes: dict[int, list[str]] = {}
    for what, size in chosen["sensitivity"].items():
        if size != chosen["size"]:
            causes.setdefault(size, []).append(what)
    others = "".join(f"<li><b>{size:,}</b> with {escape(', or '.join(causes[size]))}</li>" for size in sorted(causes))
    varied = f"{count} things were varied, one at a time. " if count else ""
    changed = (
        f"<p>{varied}Another size would be recommended:</p><ul>{others}</ul>"
        if others
        else f"<p>{varied}None changes it.</p>"
    )
    return (
        f'<div class="answer"><p><b>Recommended: {chosen["size"]:,} ids.</b> {escape(chosen["reason"])}.</p>'
        f"{changed if count else ''}"
        f"<p>{escape(chosen['warning'])}</p></div>"
    )


def _curves(study: dict[str, Any]) -> str:
    sizes = study["sizes"]

    def line(name: str, values: Sequence[float | None], colour: str, **more: Any) -> Line:
        points = [(float(size), value) for size, value in zip(sizes, values, strict=True) if value is not None]
        return Line(name, points, colour, **more)

    lines = [line("on its own tokens", study["chosen_on"], COLOURS[6], dashed=True)]
    if "cross_fitted" in study:
        band = []
        if "interval" in study:
            spans = zip(sizes, study["interval"]["low"], study["interval"]["high"], strict=True)
            band = [(float(size), low, high) for size, low, high in spans if low is not None]
        lines.append(line("held out, cross-fitted", study["cross_fitted"], COLOURS[0], band=band))
    if study.get("held_out"):
        ends = study.get("held_out_interval", {"low": [], "high": []})
        split = [(float(k), *two) for k, *two in zip(sizes, ends["low"], ends["high"], strict=False) if None not in two]
        lines.append(line("held-out split", study["held_out"], COLOURS[1], band=split))
    chart = line_chart(
        lines,
        x_label="ids in the draft vocabulary",
        y_label="share of tokens covered",
        x_format=lambda size: f"{size:,.0f}",
        y_format=lambda share: f"{share:.1%}",
        mark_x=study.get("size"),
        y_top=1.0,
    )
    rows = []
    interval = study.get("interval", {"low": [None] * len(sizes), "high": [None] * len(sizes)})
    for at, size in enumerate(sizes):
        crossed = study["cross_fitted"][at] if "cross_fitted" in study else None
        ends = (interval["low"][at], interval["high"][at])
        worst = study["worst_source"][at] if "worst_source" in study else None
        rows.append(
            [
                f"{size:,}",
                percent(study["chosen_on"][at]),
                percent(crossed),
                f"{percent(ends[0])} to {percent(ends[1])}",
                percent(study["held_out"][at] if study.get("held_out") else None),
                "-" if worst is None else f"{percent(worst['coverage'])} ({worst['source']})",
                percent(study["stability"][at] if "stability" in study else None),
            ]
        )
    head = [
        "ids",
        "chosen on",
        "held out",
        f"{study['level']:.0%} interval",
        "held-out split",
        "worst source",
        "stability",
    ]
    return (
        "<h2>Coverage</h2>"
        + chart
        + table(head, rows, chosen=f"{study['size']:,}" if study.get("size") else None)
        + f'<p class="note">Held out: each of {study["folds"]} folds of prompt groups is judged by the ids chosen on the '
        "others. Interval: bootstrap over prompt groups. Stability: share of the choice that is chosen again without one fold.</p>"
    )


def _teacher(study: dict[str, Any]) -> str:
    if not study.get("teacher"):
        return ""
    return (
        "<h2>What the verifier would say</h2>"
        + table(TEACHER_HEAD, teacher_rows(study), chosen=f"{study['size']:,}" if study.get("size") else None)
        + f'<p class="note">At {study["teacher"]["positions"]:,} positions of the teacher summary, each judged by ids that '
        "were chosen on other prompts. Likeliest token: a greedy verifier accepts nothing else. Probability: what the verifier "
        "gives to the ids inside; a range where a part of it lies outside the stored top-k.</p>"
    )


def _sources(study: dict[str, Any]) -> str:
    if "by_source" not in study or len(study["by_source"]) < 2:
        return ""
    at = _at(study)
    bars = []
    for name, values in study["by_source"].items():
        if values[at] is None:
            continue
        ends = study.get("interval_by_source", {}).get(name)
        known = ends is not None and ends["low"][at] is not None
        error = (1 - ends["high"][at], 1 - ends["low"][at]) if ends and known else None
        bars.append(Bar(name, 1 - values[at], error))
    bars.sort(key=lambda bar: -bar.value)
    chart = bar_chart(bars, value_format=lambda share: f"{share:.2%}")
    return (
        f"<h2>Tokens outside, by source, {study['sizes'][at]:,} ids</h2>{chart}"
        f'<p class="note">Share of held-out tokens that are not covered, with its {study["level"]:.0%} interval.</p>'
    )


def _policies(study: dict[str, Any]) -> str:
    if "policies" not in study:
        return ""
    rows = []
    size = study["sizes"][_at(study)]
    for name, policy in study["policies"].items():
        if size not in policy["sizes"]:
            continue
        at = policy["sizes"].index(size)
        shared = policy["overlap_with_frequency"]
        rows.append(
            [name, percent(policy["held_out"][at]), percent(policy["worst_source"][at]), percent(policy["stability"][at]), f"{shared['both']:,} of {shared['size']:,}"]
        )  # fmt: skip
    head = ["policy", "held out", "worst source", "stability", "ids shared with frequency"]
    chosen = "frequency + special tokens" if study["forced_ids"] and study["policy"] == "frequency" else study["policy"]
    return f"<h2>Policies, {size:,} ids</h2>" + table(head, rows, chosen=chosen)


def _positions(study: dict[str, Any]) -> str:
    rows = study.get("by_position", [])
    if len(rows) < 2:
        return ""
    at = _at(study)
    lines = [
        Line(f"{study['sizes'][at]:,} ids", [(max(row["from"], 0.5), row["coverage"][at]) for row in rows], COLOURS[2])
    ]
    chart = line_chart(
        lines,
        x_label="position in the response (first of each power of two)",
        y_label="share of tokens covered",
        x_format=lambda x: f"{int(x):,}",
        y_format=lambda share: f"{share:.1%}",
        y_top=1.0,
    )
    return f"<h2>By position in the response</h2>{chart}"


def _weights(tradeoff: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['size']:,}",
            f"{row['lm_head_parameters']:,}",
            billions(row["drafter_parameters"]),
            f"{row['share_of_drafter']:.1%}",
            billions(row["step_parameters"]),
            f"{row['share_of_step']:.1%}",
            percent(row["coverage"]),
        ]
        for row in tradeoff["sizes"]
    ]
    head = ["ids", "lm_head parameters", "drafter", "lm_head of it", "a step reads", "lm_head of it", "coverage"]
    return (
        "<h2>Weights</h2>"
        + table(head, rows, chosen=f"{tradeoff['recommendation']['size']:,}")
        + '<p class="note">The drafter is counted with its frozen embedding, of which a step reads only a few rows.</p>'
    )


def _tau(tradeoff: dict[str, Any]) -> str:
    known = [row for row in tradeoff["sizes"] if row["tau"]]
    if len(known) < 2:
        return ""
    lengths, fitted = list(known[-1]["tau"]), bool(tradeoff.get("fitted"))
    form = "{:.3f}" if fitted else "{:.2f}"
    rows = [
        [f"{row['size']:,}", *(span(row["tau"][k]["average"], row["tau"][k]["none"], form) if k in row["tau"] else "-" for k in lengths)]
        for row in known
    ]  # fmt: skip
    said = (
        "Fitted to the rounds of a drafter with the whole vocabulary, by frequency of the token and step of the chain."
        if fitted
        else "From: tokens outside the vocabulary would have been accepted as often as any other. To: they would never have been."
    )
    assumed = " The whole vocabulary's τ is assumed: give a measured one." if tradeoff["taus_assumed"] else ""
    return (
        "<h2>Acceptance length τ by draft length</h2>"
        + table(["ids", *(f"k = {k}" for k in lengths)], rows)
        + f'<p class="note">{said}{assumed}</p>'
    )


def _speed(tradeoff: dict[str, Any]) -> str:
    best: dict[tuple[int, int], tuple[float, float]] = {}
    for row in tradeoff["speeds"]:
        if row["low"] is not None:
            at = (row["size"], row["batch"])
            low, high = best.get(at, (0.0, 0.0))
            best[at] = (max(low, row["low"]), max(high, row["high"]))
    batches = sorted({batch for _, batch in best})
    sizes = sorted({size for size, _ in best})
    if len(sizes) < 2:
        return ""
    whole = sizes[-1]
    shown = [batch for batch in (1, 4, 16, 64, 256) if batch in batches] or batches[:5]
    drawn = [batch for batch in (1, 16, 256) if batch in batches] or batches[:3]
    lines = []
    for colour, batch in zip(SHADES, drawn, strict=False):
        full = best[whole, batch][0]
        band = [(float(size), best[size, batch][0] / full - 1, best[size, batch][1] / full - 1) for size in sizes]
        points = [(size, low) for size, low, _ in band]  # what is sure; the band shows the rest
        lines.append(Line(f"batch {batch}", points, colour, band=band))
    chart = line_chart(
        lines,
        x_label="ids in the draft vocabulary",
        y_label="tokens/s over the whole vocabulary",
        x_format=lambda size: f"{size:,.0f}",
        y_format=lambda gain: f"{gain:+.1%}",
        mark_x=tradeoff["recommendation"]["size"],
        mark_y=0.0,
    )
    rows = []
    for size in sizes:
        cells = []
        for batch in shown:
            low, high = best[size, batch]
            top = max(
                (r for r in tradeoff["speeds"] if (r["size"], r["batch"]) == (size, batch) and r["low"]),
                key=lambda r: r["low"],
            )
            speedup = span(top["speedup_low"], top["speedup_high"], "{:.2f}")
            cells.append(f"{span(low, high, '{:,.0f}')}\n{speedup}×, k={top['k']}")
        rows.append([f"{size:,}", *cells])
    speeds = table(
        ["ids", *(f"batch {batch}" for batch in shown)], rows, chosen=f"{tradeoff['recommendation']['size']:,}"
    )
    return (
        f"<h2>Speed on {escape(_where(tradeoff))}</h2>{chart}{speeds}"
        '<p class="note">Tokens per second of the whole batch at the best draft length, the speed-up over no speculation, '
        f"and that draft length.{'' if tradeoff.get('fitted') else ' Bands: the two ends of τ.'}</p>"
    )


def _break_even(tradeoff: dict[str, Any]) -> str:
    lengths = sorted({row["k"] for row in tradeoff["speeds"]})
    k = min(lengths, key=lambda length: abs(length - 3))
    batches = sorted({row["batch"] for row in tradeoff["speeds"]})
    found = {(row["size"], row["batch"]): row["break_even"] for row in tradeoff["speeds"] if row["k"] == k}
    sizes = [row["size"] for row in tradeoff["sizes"]][:-1]
    rows = [[f"{size:,}", *(percent(found[size, batch], "never") for batch in batches)] for size in sizes]
    return (
        f"<h2>Break-even coverage at draft length {k}</h2>"
        + table(["ids", *(f"B = {batch}" for batch in batches)], rows)
        if rows
        else ""
    )


def _training(tradeoff: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['size']:,}",
            billions(row["training"]["trained_parameters"]),
            f"{row['training']['flops_per_token'] / 1e9:,.3g}",
            f"{row['training']['state_bytes'] / 1e9:,.3g}",
            f"{row['training']['gradient_bytes'] / 1e9:,.3g}",
        ]
        for row in tradeoff["sizes"]
    ]
    head = ["ids", "trained parameters", "GFLOP a token", "weights and Adam, GB", "gradients sent an update, GB"]
    return "<h2>Training cost</h2>" + table(head, rows, chosen=f"{tradeoff['recommendation']['size']:,}")


def _lost(study: dict[str, Any]) -> str:
    lost = study.get("lost")
    if not lost:
        return ""
    rows = [
        [repr(row["text"]) if "text" in row else "-", f"{row['id']:,}", f"{row['count']:,}", row.get("source", "-")]
        for row in lost["top"]
    ]
    head = ["text", "id", "count", "mostly in"]
    return (
        f"<h2>What {study['size']:,} ids lose</h2><p>{lost['ids']:,} ids that occur are outside: {lost['tokens']:,} tokens, "
        f"{lost['share']:.2%}. The most frequent:</p>"
        + table(head, rows[:25], code=True)
        + (
            f"<details><summary>{len(rows) - 25} more</summary>{table(head, rows[25:], code=True)}</details>"
            if len(rows) > 25
            else ""
        )
    )


def _assumed(tradeoff: dict[str, Any]) -> str:
    given = ", ".join(f"{name} {value:g}" for name, value in tradeoff["assumptions"].items())
    taus = ", ".join(f"τ({k}) = {tau:g}" for k, tau in tradeoff["taus_full"].items())
    return (
        f'<h2>Assumptions</h2><p class="note">Step times: {escape(tradeoff["step_times"])}. {escape(given)}. {escape(taus)}. '
        f"{escape(tradeoff['gpu']['source'])}.</p>"
    )


def _at(study: dict[str, Any]) -> int:
    """Index of the size that is asked for, or of the middle one where that is none or all ids."""
    sizes, size = study["sizes"], study.get("size")
    return sizes.index(size) if size in sizes and size != study["vocab_size"] else len(sizes) // 2
