"""stats, diff, card: datasets in numbers and pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from storage.card import card_html
from storage.cli.console import Outcome, bar, command, count, facts, size
from storage.diff import diff_datasets
from storage.errors import StoreError
from storage.reader import open_dataset
from storage.seal import some
from storage.stats import OUTLIER_TIMES, dataset_stats

_BAR = 40


def register(commands: Any) -> None:
    stats = command(
        commands,
        "stats",
        _stats,
        "lengths, sources, norms of the layers, channels that stick out",
        "uri",
        example="statehouse stats s3://bucket/datasets/kimi-k25 --sample 256",
    )
    stats.add_argument("--sample", type=count, default=64, metavar="N", help="sequences read for the channels (64)")

    diff = command(
        commands,
        "diff",
        _diff,
        "how two datasets differ: contract, sequences, states",
        "a",
        "b",
        example="statehouse diff s3://bucket/datasets/kimi-k25 /backup/kimi-k25",
    )
    diff.add_argument(
        "--sample", type=count, default=32, metavar="N", help="shared sequences whose states are read (32)"
    )

    card = command(
        commands,
        "card",
        _card,
        "one HTML page about a dataset, with plots",
        "uri",
        example="statehouse card s3://bucket/datasets/kimi-k25 -o kimi-k25.html",
    )
    card.add_argument("-o", "--output", default="card.html", metavar="FILE", help="where to write it (card.html)")
    card.add_argument("--sample", type=count, default=64, metavar="N", help="sequences read for the channels (64)")


def _stats(args: argparse.Namespace, console: Console) -> Outcome:
    """Shows a dataset in numbers. Counts and norms cover all of it; channels are measured on a sample of sequences."""
    dataset = open_dataset(args.uri)
    with bar(args, "stats", min(args.sample, len(dataset)), "sequences") as advance:
        stats = dataset_stats(dataset, sample=args.sample, progress=advance)
    facts(
        console,
        args.uri,
        {
            "sequences": f"{stats.sequences:,}, {stats.tokens:,} tokens, {stats.loss_tokens:,} with loss",
            "stored": f"{size(stats.stored_bytes)} of {size(stats.raw_bytes)} raw, "
            f"{stats.raw_bytes / stats.stored_bytes:.3f}x",
            "lengths": ", ".join(f"{name} {value:,.0f}" for name, value in stats.lengths.items()),
            "not finite": f"{stats.non_finite:,} values, {stats.quarantined:,} sequences quarantined",
        },
    )
    table = Table("source", "sequences", "tokens", "with loss", title="sources", title_justify="left")
    for source in stats.sources:
        table.add_row(escape(source.name), f"{source.sequences:,}", f"{source.tokens:,}", f"{source.loss_tokens:,}")
    console.print(table)
    table = Table("tokens", "sequences", "", title="lengths", title_justify="left")
    most = max(amount for _, _, amount in stats.histogram)
    for low, high, amount in stats.histogram:
        table.add_row(f"{low:,}-{high - 1:,}", f"{amount:,}", "█" * -(-amount * _BAR // most))
    console.print(table)
    title = f"layers (channels: {stats.sampled_sequences:,} sequences, {stats.sampled_tokens:,} tokens)"
    table = Table(
        "layer", "rms", "largest", "median channel", f"channels over {OUTLIER_TIMES:g}x", "first of them", title=title
    )
    for layer in stats.layers:
        first = ", ".join(f"{at} ({times:,.0f}x)" for at, times in layer.outliers[:5])
        table.add_row(
            layer.name,
            f"{layer.rms:,.3f}",
            f"{layer.largest:,.1f}",
            f"{layer.median_channel_rms:,.3f}",
            str(len(layer.outliers)),
            first,
        )
    console.print(table)
    return Outcome(stats.json())


def _diff(args: argparse.Namespace, console: Console) -> Outcome:
    """Compares two datasets: contracts, layout, sequences by their ids, and the states of sequences that both hold.

    The exit code is 0 when their fingerprints are equal, and 1 otherwise.
    """
    with bar(args, "diff", args.sample, "sequences") as advance:
        found = diff_datasets(open_dataset(args.a), open_dataset(args.b), sample=args.sample, progress=advance)
    rows = {
        "contract": "; ".join(found.contract) or "equal: they can be used together",
        "recorded": "; ".join(found.recorded) or "equal",
        "layout": "; ".join(found.layout) or "equal",
        "sequences": f"{found.shared:,} in both; {found.only_a:,} only in a ({found.only_a_tokens:,} tokens), "
        f"{found.only_b:,} only in b ({found.only_b_tokens:,} tokens)",
        "sources": ", ".join(f"{name} {one:,} / {two:,}" for name, (one, two) in found.sources.items()),
    }
    if found.shards is not None:
        rows["shards"] = f"{len(found.shards):,} hold other bytes: {some(found.shards)}" if found.shards else "equal"
    if states := found.states.compared:
        rows["states"] = f"{found.states.equal:,} of {states:,} compared sequences are equal bit for bit"
    for name in found.states.relative_l2 or {}:
        assert found.states.relative_l2 is not None
        assert found.states.cosine is not None
        rows[f"  {name}"] = f"relative L2 {found.states.relative_l2[name]:.2e}, cosine {found.states.cosine[name]:.8f}"
    rows["same"] = "yes: equal fingerprints" if found.same else "no"
    facts(console, f"a: {args.a}\nb: {args.b}", rows)
    return Outcome(found.json(), 0 if found.same else 1)


def _card(args: argparse.Namespace, console: Console) -> Outcome:
    """Writes one self-contained HTML page about a dataset: contract, sizes, lengths, sources, norms. It loads nothing."""
    dataset = open_dataset(args.uri)
    with bar(args, "card", min(args.sample, len(dataset)), "sequences") as advance:
        html = card_html(dataset, dataset_stats(dataset, sample=args.sample, progress=advance))
    try:
        Path(args.output).write_text(html, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{args.output}: {error.strerror}; choose another file with -o") from None
    console.print(f"wrote {args.output}, {size(len(html.encode()))}")
    return Outcome({"uri": args.uri, "file": args.output, "bytes": len(html.encode())})
