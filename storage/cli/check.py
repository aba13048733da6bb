"""verify, seal, repair, gc: is it whole, and if not, what then."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from storage.cli.console import Outcome, amount, bar, command, count, size
from storage.commit import load_plan
from storage.gc import delete_garbage, find_garbage
from storage.objects import open_store
from storage.repair import repair
from storage.seal import seal_dataset
from storage.verify import Report, verify

_SHOWN = 40


def register(commands: Any) -> None:
    check = command(
        commands,
        "verify",
        _verify,
        "check a dataset: sizes and receipts, or every byte",
        "uri",
        example="statehouse verify --full s3://bucket/datasets/kimi-k25",
    )
    mode = check.add_mutually_exclusive_group()
    mode.add_argument(
        "--quick", action="store_true", help="list, sizes, receipts and tables: one request a shard (default)"
    )
    mode.add_argument("--full", action="store_true", help="every byte: digests, checksums, tokens, tables")
    check.add_argument("--threads", type=count, default=4, help="shards read at once (default 4)")

    seal = command(
        commands,
        "seal",
        _seal,
        "seal a dataset whose shards are all there",
        "uri",
        example="statehouse seal s3://bucket/datasets/kimi-k25",
    )
    seal.add_argument(
        "--max-quarantine",
        type=amount(1, "a share"),
        default=0.01,
        metavar="SHARE",
        help="accept this share of lost sequences (0.01)",
    )

    mend = command(
        commands,
        "repair",
        _repair,
        "bring damaged objects back, from what is left or from a copy",
        "uri",
        example="statehouse repair s3://bucket/datasets/kimi-k25 --from /backup/kimi-k25",
    )
    mend.add_argument("--from", dest="copy", metavar="COPY_URI", help="another copy of this very dataset")

    collect = command(
        commands,
        "gc",
        _gc,
        "list, and with --delete remove, what no plan and no seal names",
        "uri",
        example="statehouse gc s3://bucket/datasets/kimi-k25",
    )
    collect.add_argument("--delete", action="store_true", help="really delete; without it nothing is changed")
    collect.add_argument("--older-than", type=amount(1e6, "hours"), default=24.0, metavar="HOURS", help="default 24")


def _verify(args: argparse.Namespace, console: Console) -> Outcome:
    """Checks a dataset and names every bad object with the command that fixes it. Nothing is changed.

    --quick lists the store and reads plan, seals, tables and every shard's receipt and index.
    --full also reads every byte: digests of all objects, checksums of all chunks, tokens against the sequences' ids.
    The exit code is 1 when anything is wrong.
    """
    store = open_store(args.uri)
    total = sum(store.sizes().values()) if args.full else None
    with bar(args, "verify", total) as advance:
        report = verify(store, full=args.full, progress=advance, threads=args.threads)
    return show_report(report, console)


def show_report(report: Report, console: Console) -> Outcome:
    if report.findings:
        table = Table("object", "what is wrong", "what fixes it", title=escape(report.uri), title_justify="left")
        for finding in report.findings[:_SHOWN]:
            table.add_row(escape(finding.key), escape(finding.what), escape(finding.fix))
        console.print(table)
        if (more := len(report.findings) - _SHOWN) > 0:
            console.print(f"... and {more:,} more; --json lists all")
        if shards := report.bad_shards():
            numbers = ",".join(map(str, shards))
            console.print(
                f"all bad shards at once: python -m ray_jobs.extract RECIPE --repair --shards {escape(numbers)}",
                soft_wrap=True,
            )
    state = f"sealed {report.fingerprint[:12]}" if report.fingerprint else "not sealed"
    console.print(
        f"{'all is well' if report.ok else f'{len(report.findings):,} bad objects'}: {state}, "
        f"{report.shards_present:,} of {report.shards:,} shards, {report.objects:,} objects, "
        f"{size(report.bytes_checked)} read ({report.mode})"
        + (f"; {len(report.unplanned):,} unplanned keys, see `statehouse gc`" if report.unplanned else ""),
        soft_wrap=True,
        highlight=False,
    )
    return Outcome({**asdict(report), "ok": report.ok, "bad_shards": report.bad_shards()}, 0 if report.ok else 1)


def _seal(args: argparse.Namespace, console: Console) -> Outcome:
    """Seals a dataset whose shards are all there: checks each against its receipt, writes shards.parquet and seal.json.

    The extract job does the same at its end; this is for datasets whose driver died just before, or whose seal was lost.
    """
    store = open_store(args.uri)
    plan = load_plan(store)
    with bar(args, "seal", plan.geometry.shards, "shards") as advance:
        seal = seal_dataset(
            store, plan, {"sealed_with": "statehouse seal"}, max_quarantine_share=args.max_quarantine, progress=advance
        )
    console.print(
        f"sealed {seal.fingerprint}: {seal.sequences:,} sequences, {seal.tokens:,} tokens, {size(seal.stored_bytes)}"
    )
    return Outcome(seal.model_dump(mode="json"))


def _repair(args: argparse.Namespace, console: Console) -> Outcome:
    """Makes again what can be made without a verifier: copies and tables of receipts, exponent offsets.

    With --from, every damaged object is restored from another copy of the dataset, whatever it is. Shards without a copy
    are extracted again by `python -m ray_jobs.extract RECIPE --repair`. Everything is verified in full before and after.
    """
    store, copy = open_store(args.uri), open_store(args.copy) if args.copy else None
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        console.print(escape(line), highlight=False)

    with bar(args, "verify", None) as advance:
        report = repair(store, copy, say=say, progress=advance)
    outcome = show_report(report, console)
    return Outcome({**outcome.document, "repaired": lines}, outcome.code)


def _gc(args: argparse.Namespace, console: Console) -> Outcome:
    """Lists the keys of a sealed dataset that no plan and no seal names and that are older than a day.

    Such are left by killed writers, probes and interrupted repairs. Nothing is deleted without --delete.
    """
    store = open_store(args.uri)
    garbage = find_garbage(store, older_than=timedelta(hours=args.older_than))
    table = Table("key", "bytes", "last written", title=escape(args.uri), title_justify="left")
    for one in garbage:
        table.add_row(escape(one.key), f"{one.bytes:,}", one.modified.isoformat(timespec="seconds"))
    if garbage:
        console.print(table)
    freed = 0
    if args.delete:
        with bar(args, "gc", len(garbage), "keys") as advance:
            freed = delete_garbage(store, garbage, progress=advance)
    total = sum(one.bytes for one in garbage)
    console.print(
        f"deleted {len(garbage)} keys, {size(freed)}"
        if args.delete
        else f"{len(garbage)} keys, {size(total)}" + ("; --delete removes them" if garbage else ": nothing to do")
    )
    keys = [{"key": one.key, "bytes": one.bytes, "modified": one.modified.isoformat()} for one in garbage]
    return Outcome({"uri": args.uri, "garbage": keys, "bytes": total, "deleted": args.delete, "freed_bytes": freed})
