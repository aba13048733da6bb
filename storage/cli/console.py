"""What all commands share: how they are declared, tables, sizes, progress bars."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

URI_HELP = "a folder, or for instance s3://bucket/datasets/kimi-k25"


@dataclass(frozen=True)
class Outcome:
    """document: what --json prints. code: the exit code."""

    document: Any
    code: int = 0


def command(
    commands: Any,
    name: str,
    function: Callable[[argparse.Namespace, Console], Outcome],
    text: str,
    *uris: str,
    example: str = "",
) -> argparse.ArgumentParser:
    """Declares a command with its positional URIs, --json and the function's docstring as its description."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=_paragraph(function.__doc__ or text),
        epilog=f"example:\n  {example}" if example else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for uri in uris:
        parser.add_argument(uri, help=URI_HELP)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.set_defaults(function=function)
    return parser


def _paragraph(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def count(text: str) -> int:
    """An argument that must be a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {value}")
    return value


def amount(most: float, what: str) -> Callable[[str], float]:
    """An argument that must be a number from 0 to `most`; NaN and infinity are none."""

    def number(text: str) -> float:
        value = float(text)
        if not 0 <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {what} from 0 to {most:,g}, found {text}")
        return value

    return number


def size(amount: int) -> str:
    """Bytes for people: 1,234 B, 12.3 MiB, ..."""
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def facts(console: Console, title: str, rows: dict[str, str]) -> None:
    """A table of two columns: what, and how much."""
    table = Table(show_header=False, title=escape(title), title_justify="left")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)


@contextlib.contextmanager
def bar(args: argparse.Namespace, what: str, total: int | None, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
    """Progress on stderr: a bar on a terminal, elsewhere a line every few seconds; nothing beside --json.

    Yields what advances it by an amount of `unit`; any thread may call that.
    """
    if args.json:
        yield lambda _amount: None
        return
    if not sys.stderr.isatty():
        yield Lines(what, total, unit)
        return
    counted: tuple[ProgressColumn, ...] = (TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit),)
    if unit == "bytes":
        counted = (DownloadColumn(), TransferSpeedColumn())
    elif total is None:
        counted = (TextColumn("{task.completed:,.0f} " + unit),)
    columns = (TextColumn(what), BarColumn(), *counted, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)


class Lines:
    """Progress for logs: `copy 1.2 GiB of 4.0 GiB, 210.3 MiB/s, 14 s left`, at most every `every_s` seconds."""

    def __init__(self, what: str, total: int | None, unit: str, every_s: float = 5.0) -> None:
        self._what, self._total, self._unit, self._every_s = what, total, unit, every_s
        self._done, self._lock = 0, Lock()
        self._began = self._told = time.monotonic()

    def __call__(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._told < self._every_s:
                return
            self._told = now
            line = self._line(now - self._began)
        print(line, file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        def shown(count: float) -> str:
            return size(int(count)) if self._unit == "bytes" else f"{count:,.0f}"

        unit, rate = "" if self._unit == "bytes" else f" {self._unit}", self._done / seconds
        if self._total is None:
            return f"{self._what} {shown(self._done)}{unit}, {shown(rate)}/s"
        left = f", {(self._total - self._done) / rate:,.0f} s left" if 0 < self._done <= self._total else ""
        return f"{self._what} {shown(self._done)} of {shown(self._total)}{unit}, {shown(rate)}/s{left}"
