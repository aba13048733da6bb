"""`python -m vocab convert`, `overlap` and `report`: draft vocabularies in other formats, two compared, a page again."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console

from vocab.commands.arguments import positive, read_json, write_json
from vocab.convert import FORMATS, load_any, padded, save_as
from vocab.counts import TokenCounts
from vocab.coverage import percent
from vocab.policies import overlap

_SOURCES = "a folder of ours, SpecForge's .pt, a speculators folder or d2t file, or a checkpoint's .safetensors"


def add(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="a draft vocabulary in another format",
        description=f"Read a draft vocabulary ({_SOURCES}), check it, write it in another format.",
        epilog="example: python -m vocab convert draft-vocab/ vocab_mapping.pt --to specforge",
    )
    convert.add_argument("source", help=_SOURCES)
    convert.add_argument("target", help="folder (statehouse, speculators) or .pt file (specforge, token-map)")
    convert.add_argument("--to", choices=FORMATS, required=True, help="token-map: SGLang's --speculative-token-map")
    convert.add_argument("--vocab-size", type=positive, help="it must be of a verifier with so many ids")
    convert.add_argument("--size", type=positive, help="it must have so many ids")
    convert.add_argument("--hash", help="it must have this hash")
    convert.add_argument("--pad-to", type=positive, help="rows of the verifier's padded embedding")
    convert.set_defaults(run=run_convert)
    compare = commands.add_parser("overlap", help="how much two draft vocabularies share")
    compare.add_argument("first", help=_SOURCES)
    compare.add_argument("second", help=_SOURCES)
    compare.add_argument("--counts", metavar="FILE", help="counts.parquet, to weigh ids by their tokens")
    compare.add_argument("--json", metavar="OUT", help="write the numbers to this file too")
    compare.set_defaults(run=run_overlap)
    report = commands.add_parser("report", help="the HTML page of a saved coverage.json")
    report.add_argument(
        "coverage", help="coverage.json of `ray_jobs.coverage`, or of `vocab coverage --folds 5 --json`"
    )
    report.add_argument("out", help="the page to write")
    report.add_argument("--tradeoff", metavar="FILE", help="JSON of `vocab tradeoff`, instead of the one inside")
    report.set_defaults(run=run_report)


def run_convert(args: argparse.Namespace) -> None:
    found = load_any(args.source, vocab_size=args.vocab_size, size=args.size, expected_hash=args.hash)
    if args.pad_to:
        found = padded(found, args.pad_to)
    files = save_as(found, args.target, args.to)
    said = f"{found.size:,} of {found.vocab_size:,} ids, hash {found.hash}"
    Console().print(f"{said} -> {', '.join(map(str, files))}", highlight=False, soft_wrap=True, markup=False)


def run_overlap(args: argparse.Namespace) -> None:
    counts = TokenCounts.from_parquet(args.counts).total() if args.counts else None
    found = overlap(load_any(args.first), load_any(args.second), counts)
    said = f"both {found.both:,}, first only {found.only_first:,}, second only {found.only_second:,}, Jaccard {found.jaccard:.4f}"
    if found.tokens is not None:
        both, first, second = (percent(share) for share in found.tokens)
        said += f"; of the tokens {both} in both, {first} in the first only, {second} in the second only"
    Console().print(said, highlight=False, soft_wrap=True)
    write_json(args.json, asdict(found))


def run_report(args: argparse.Namespace) -> None:
    from vocab.report import write_report

    content = read_json(args.coverage)
    tradeoff = read_json(args.tradeoff) if args.tradeoff else content.get("tradeoff")
    write_report(args.out, title="Draft vocabulary", study=content.get("study"), tradeoff=tradeoff)
