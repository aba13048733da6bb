"""cp, convert, export: datasets from one place or format to another."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from storage.cli.check import show_report
from storage.cli.console import Outcome, bar, command, count, size
from storage.convert.filling import Imported
from storage.convert.specforge import export_specforge, import_specforge
from storage.convert.speculators import export_speculators, import_speculators
from storage.copy import copy_bytes, copy_dataset
from storage.objects import open_store
from storage.reader import open_dataset

_FORMATS = ("specforge", "speculators")


def register(commands: Any) -> None:
    copy = command(
        commands,
        "cp",
        _cp,
        "copy a sealed dataset to another store, checked",
        "source",
        "target",
        example="statehouse cp s3://bucket/datasets/kimi-k25 /backup/kimi-k25",
    )
    copy.add_argument("--full", action="store_true", help="read every byte of the copy again at the end")
    copy.add_argument(
        "--threads", type=count, default=2, help="shards on their way at once, each in memory (default 2)"
    )

    take = command(
        commands,
        "convert",
        _convert,
        "make a dataset of the features of SpecForge or speculators",
        example="statehouse convert specforge cache/hidden_states s3://bucket/datasets/x --contract contract.json",
    )
    take.add_argument("format", choices=_FORMATS, help="what the folder holds")
    take.add_argument("folder", help="specforge: *.ckpt[.gz] below it; speculators: data-*.arrow and hidden_states/")
    take.add_argument("uri", help="where the dataset is made")
    take.add_argument(
        "--contract", metavar="FILE|URI", help="what the states are states of: JSON, or a dataset like it"
    )
    take.add_argument("--codec", default="lossless", help="default lossless")
    take.add_argument("--source", metavar="NAME", help="source label of the sequences (default: the format's name)")
    take.add_argument(
        "--verifier", metavar="DIR", help="checkpoint whose last norm is applied (speculators, post_norm)"
    )
    take.add_argument("--skip-bad", action="store_true", help="leave out files that cannot be read, and list them")
    take.add_argument("--no-verify", action="store_true", help="do not read everything back at the end")

    give = command(
        commands,
        "export",
        _export,
        "write a dataset as features of SpecForge or speculators",
        example="statehouse export speculators s3://bucket/datasets/x out/x --verifier out/checkpoint",
    )
    give.add_argument("format", choices=_FORMATS, help="what is written")
    give.add_argument("uri", help="a sealed dataset")
    give.add_argument("folder", help="where the files go; those that are there are compared and kept")
    give.add_argument(
        "--verifier", metavar="DIR", help="checkpoint with the last norm, where the final states differ by it"
    )
    give.add_argument("--gzip", action="store_true", help="write .ckpt.gz (specforge)")


def _cp(args: argparse.Namespace, console: Console) -> Outcome:
    """Copies a sealed dataset. Every object is checked on its way; the seal is written last, and the copy verified.

    Run it again after an interruption: what is there and right is not sent twice. Nothing is ever overwritten.
    """
    source, target = open_store(args.source), open_store(args.target)
    with bar(args, "copy", copy_bytes(source)) as advance:
        report = copy_dataset(source, target, full=args.full, threads=args.threads, progress=advance)
    return show_report(report, console)


def _convert(args: argparse.Namespace, console: Console) -> Outcome:
    """Makes a sealed dataset of another project's files, then reads it back and compares it with them bit for bit.

    Run it again after an interruption: finished shards are kept. Their files do not say which verifier made them, so a
    contract must be given, unless `statehouse export` wrote them. SpecForge keeps the final state after the last norm,
    speculators the one before it; where the contract wants the other one, --verifier names the norm that is applied.
    """
    options: dict[str, Any] = {
        "contract": args.contract,
        "codec": args.codec,
        "source": args.source or args.format,
        "skip_bad": args.skip_bad,
        "verify": not args.no_verify,
    }
    convert: Callable[..., Imported] = import_specforge
    if args.format == "speculators":
        convert, options["verifier"] = import_speculators, args.verifier
    with _tokens(args, "convert") as step:
        done = convert(args.folder, args.uri, step=step, **options)
    seal = done.seal
    for path, why in done.skipped.items():
        console.print(f"left out: {escape(path)}: {escape(why)}", highlight=False, soft_wrap=True)
    console.print(
        f"sealed {seal.fingerprint[:12]}: {seal.sequences:,} sequences, {seal.tokens:,} tokens, {size(seal.stored_bytes)} of "
        f"{size(seal.raw_bytes)} raw; {done.duplicates:,} duplicates dropped, {len(done.skipped):,} files left out"
    )
    return Outcome({"seal": seal.model_dump(mode="json"), "duplicates": done.duplicates, "skipped": done.skipped})


def _export(args: argparse.Namespace, console: Console) -> Outcome:
    """Writes every sequence of a dataset as another project's files, and compares each with the dataset.

    What is written loads in their own dataset classes. A statehouse.json beside it lets `convert` read it back.
    """
    dataset = open_dataset(args.uri)
    with _tokens(args, "export", dataset.plan.tokens) as step:
        if args.format == "specforge":
            files = export_specforge(dataset, args.folder, compress=args.gzip, verifier=args.verifier, step=step)
        else:
            files = export_speculators(dataset, args.folder, verifier=args.verifier, step=step)
    console.print(f"wrote {files:,} files to {escape(args.folder)}")
    return Outcome({"uri": args.uri, "folder": args.folder, "files": files})


def _tokens(args: argparse.Namespace, what: str, total: int | None = None) -> Any:
    return bar(args, what, total, unit="tokens")
