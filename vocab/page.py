"""The shell of a report: style, tables, cells. One file, no script, nothing to load; light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Charts and tables scroll sideways on a narrow screen: shrunk to its width, their text could not be read.
_STYLE = """
:root{color-scheme:light dark;--text:#1b1f24;--soft:#57606a;--line:#d8dee4;--faint:#eaeef2;--page:#fff;--mark:#f0f7ff;--code:#f3f4f6;--accent:#0072B2}
@media(prefers-color-scheme:dark){:root{--text:#e6edf3;--soft:#9da7b3;--line:#30363d;--faint:#262c33;--page:#0d1117;--mark:#12283d;--code:#21262d;--accent:#58a6e0}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);max-width:900px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2.2rem;border-top:1px solid var(--line);padding-top:1rem}
p.lead{color:var(--soft);margin-top:0}.wide{overflow-x:auto}.legend{display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;font-size:13px;font-weight:600}
.legend i{display:inline-block;width:22px;margin-right:.4em;vertical-align:middle}svg{width:100%;min-width:520px;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg .name{font-weight:600;fill:var(--text)}svg .axis{fill:var(--text)}
svg .grid{stroke:var(--faint)}svg .mark{stroke:var(--text);stroke-dasharray:2 3}svg .whisker{stroke:var(--text);stroke-width:2}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid var(--faint)}th:first-child,td:first-child{text-align:left}
td{white-space:pre}th{color:var(--soft);font-weight:600;vertical-align:bottom}tr.chosen td{background:var(--mark)}
.note{color:var(--soft);font-size:14px}.answer{background:var(--mark);border-left:4px solid var(--accent);padding:.6rem 1rem}
code{background:var(--code);padding:0 .25em}details summary{cursor:pointer;color:var(--accent)}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole HTML page of these parts, empty ones left out."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def wide(content: str) -> str:
    """Content that keeps its width and scrolls."""
    return f'<div class="wide">{content}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], chosen: str | None = None, code: bool = False) -> str:
    """An HTML table; the row whose first cell is `chosen` is marked. code: the first cells are code."""
    out = ["<table><thead><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr></thead><tbody>"]
    for row in rows:
        mark = ' class="chosen"' if row and row[0] == chosen else ""
        cells = [escape(cell) for cell in row]
        if code:
            cells[0] = f"<code>{cells[0]}</code>"
        out += [f"<tr{mark}>", *(f"<td>{cell}</td>" for cell in cells), "</tr>"]
    return wide("".join(out) + "</tbody></table>")


def percent(share: float | None, none: str = "-") -> str:
    return none if share is None else f"{share:.2%}"


def span(low: float, high: float, form: str) -> str:
    """`low–high` in this form; one of them where both look alike."""
    one, other = form.format(low), form.format(high)
    return one if one == other else f"{one}–{other}"
