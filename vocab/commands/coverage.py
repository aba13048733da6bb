"""`python -m vocab coverage`, `table` and `merge`: counting small files, sizes of lm_heads, adding up counts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vocab.ahead import ahead
from vocab.commands.arguments import positive, share, sizes, write_json
from vocab.counting import SideCounts, Split, Units, count_sides, cover_units, side_tables
from vocab.counts import TokenCounts, count_by_source
from vocab.coverage import CoverageTable, check_size, default_sizes, lm_head_parameters, percent
from vocab.errors import VocabError
from vocab.files import find_files
from vocab.folds import fold_orders
from vocab.inputs import Batch, largest_id, read_batches
from vocab.keep import read_ids
from vocab.policies import POLICIES, choose, policy_order
from vocab.split import prefix_groups
from vocab.study import study

_EXAMPLES = """\
examples:
  python -m vocab coverage corpus/*.parquet --vocab-size 163840 --hidden-size 7168 --held-out 0.1
  python -m vocab coverage ids.jsonl --vocab-size 49152 --folds 5 --size 8192 --html report.html --save draft-vocab/
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "coverage",
        help="coverage of the tokens in files, for several sizes",
        description="Count the tokens of files and say how much each draft-vocabulary size covers.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help=".parquet, .arrow or .jsonl[.gz] with a column token_ids; s3:// too"
    )
    parser.add_argument("--vocab-size", type=positive, help="of the verifier (default: the largest id found, plus 1)")
    parser.add_argument("--hidden-size", type=positive, help="of the verifier, to count lm_head parameters")
    parser.add_argument("--held-out", type=share, default=0.0, help="share of prompt groups to hold out (default: 0)")
    parser.add_argument(
        "--folds", type=positive, help="judge each of so many folds of groups by the others (2 or more)"
    )
    parser.add_argument("--group-column", default="prompt_group", help="column with the prompt group (prompt_group)")
    parser.add_argument(
        "--group-by-prefix", action="store_true", help="rows with the same tokens before the loss are a group"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of held-out groups and folds (default: 0)")
    parser.add_argument("--policy", choices=POLICIES, default="frequency", help="how ids are chosen (frequency)")
    parser.add_argument("--force", metavar="FILE", help="ids that are always in: a JSON list, or one id a line")
    parser.add_argument("--keep", metavar="FILE", help="ids of policy list: a JSON list, or a saved draft vocabulary")
    parser.add_argument("--size", type=positive, help="the draft vocabulary to save and to list lost tokens for")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json, for the strings of lost tokens")
    parser.add_argument("--save", metavar="FOLDER", help="save the draft vocabulary of --size here")
    parser.add_argument(
        "--counts", metavar="OUT", help="save the counts here (.parquet), to merge without counting again"
    )
    parser.add_argument("--html", metavar="OUT", help="write one self-contained page too (needs --folds)")
    parser.set_defaults(run=run)
    table = commands.add_parser("table", help="lm_head parameters, for several sizes")
    table.add_argument("--vocab-size", type=positive, required=True, help="of the verifier")
    table.add_argument("--hidden-size", type=positive, required=True, help="of the verifier")
    table.set_defaults(run=run_table)
    merge = commands.add_parser("merge", help="add up saved counts, and say what they cover")
    merge.add_argument("files", nargs="+", metavar="COUNTS", help="counts.parquet files over one vocabulary")
    merge.add_argument("--out", metavar="OUT", help="save the sum here")
    merge.add_argument("--hidden-size", type=positive, help="of the verifier, to count lm_head parameters")
    merge.set_defaults(run=run_merge)
    for command in (parser, table, merge):
        command.add_argument("--sizes", type=sizes, help="draft-vocabulary sizes, as in 8192,32000")
        command.add_argument("--json", metavar="OUT", help="write the numbers to this file too")


def run(args: argparse.Namespace) -> None:
    args.files = find_files(args.files, "coverage")
    vocab_size = args.vocab_size or max(largest_id(args.files), 0) + 1
    if args.save and args.size is None:
        raise VocabError("--save: say how many ids with --size")
    if args.html and args.folds is None:
        raise VocabError("--html: the page shows cross-fitted coverage; say how many folds of groups with --folds 5")
    forced = read_ids(args.force) if args.force else np.zeros(0, np.int64)
    listed = read_ids(args.keep) if args.keep else np.zeros(0, np.int64)
    choice: dict[str, Any] = {"policy": args.policy, "force_ids": forced, "listed": listed}
    split = Split(args.folds or 2, args.held_out, args.seed)
    if args.folds or args.held_out:
        counts = count_sides(_batches(args), vocab_size, split)
        chosen_on, held_out = counts.folds.total(), counts.held_out
    else:
        counts, chosen_on, held_out = None, _all(args, vocab_size), TokenCounts.empty(vocab_size)
    if not chosen_on.tokens:
        raise VocabError(
            f"{_named(args.files)}: no loss tokens to choose a vocabulary on; are the loss masks all false, or all groups "
            "held out?"
        )
    if args.size is not None:
        check_size(args.size, vocab_size)
    table = CoverageTable.measure(chosen_on, held_out, sizes=args.sizes, hidden_size=args.hidden_size, force_ids=forced)
    table.render(Console())
    content = table.to_dict()
    if args.folds and counts is not None:
        content["study"] = found = _study(args, counts, split, choice)
        _render_study(found, Console())
        if args.html:
            from vocab.report import write_report

            write_report(args.html, title="Draft vocabulary", study=found)
    if args.counts:
        chosen_on.to_parquet(args.counts)
    if args.save:
        choose(counts=chosen_on, size=args.size, **choice).save(args.save)
    write_json(args.json, content)


def _study(args: argparse.Namespace, counts: SideCounts, split: Split, choice: dict[str, Any]) -> dict[str, Any]:
    vocab_size = counts.folds.vocab_size
    wanted = sorted({*(args.sizes or default_sizes(vocab_size)), *([args.size] if args.size else [])})
    whole = policy_order(counts=counts.folds.total(), **choice)
    tables = side_tables(fold_orders(counts.folds, **choice), whole, wanted, split)
    units: Units = cover_units(_batches(args), split, tables, len(wanted))
    groups, sources = units.side(held_out=False)
    return study(
        counts.folds,
        wanted,
        held_out=counts.held_out,
        groups=groups,
        group_sources=sources,
        held_out_groups=units.side(held_out=True)[0],
        special_ids=choice["force_ids"],
        size=args.size,
        text_of=_strings(args.tokenizer) if args.tokenizer else None,
        **choice,
    )


def _all(args: argparse.Namespace, vocab_size: int) -> TokenCounts:
    total = TokenCounts.empty(vocab_size)
    for batch in ahead(read_batches(args.files, args.group_column)):
        try:
            total += count_by_source(batch.token_ids, batch.loss_mask, batch.lengths, batch.sources, vocab_size)
        except VocabError as error:
            raise batch.located(error, vocab_size) from error
    return total


def _batches(args: argparse.Namespace) -> Iterator[Batch]:
    for batch in ahead(read_batches(args.files, args.group_column)):
        if args.group_by_prefix:
            yield replace(batch, groups=prefix_groups(batch.token_ids, batch.loss_mask, batch.lengths))
        elif batch.groups is None:
            raise VocabError(
                f"{batch.where}: --held-out and --folds need the prompt group of every row, and column "
                f"{args.group_column!r} is missing or empty; name it with --group-column, or use --group-by-prefix"
            )
        else:
            yield batch


def _named(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _strings(path: str) -> Callable[[int], str]:
    """id -> string by a tokenizer.json. Raises VocabError when the library is missing or the file is none."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise VocabError("--tokenizer needs the library tokenizers; pip install 'statehouse[jobs]'") from error
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises a bare Exception
        raise VocabError(f"{path}: expected a tokenizer.json, found {error}") from error
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))


def _render_study(found: dict[str, Any], console: Console) -> None:
    if "cross_fitted" not in found:
        return
    table = Table(
        title=f"held out, {found['folds']} folds of prompt groups, {found['level']:.0%} intervals over groups"
    )
    for heading in ("size", "held out", "interval", "worst source", "stability"):
        table.add_column(heading, justify="right")
    for at, size in enumerate(found["sizes"]):
        worst = found["worst_source"][at]
        ends = (found["interval"]["low"][at], found["interval"]["high"][at])
        table.add_row(
            f"{size:,}",
            percent(found["cross_fitted"][at]),
            f"{percent(ends[0])} to {percent(ends[1])}",
            "-" if worst is None else f"{percent(worst['coverage'])} {worst['source']}",
            percent(found["stability"][at], 1),
        )
    console.print(table)
    if found.get("lost"):
        lost = found["lost"]
        console.print(
            f"{found['size']:,} ids lose {lost['ids']:,} ids that occur, {percent(lost['share'])} of the tokens; most "
            f"often {', '.join(str(row.get('text', row['id'])) for row in lost['top'][:8])}",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip


def run_table(args: argparse.Namespace) -> None:
    wanted = default_sizes(args.vocab_size) if args.sizes is None else args.sizes
    rows = []
    for size in sorted({*(check_size(size, args.vocab_size) for size in wanted), args.vocab_size}):
        parameters = lm_head_parameters(size, args.hidden_size)
        rows.append({"size": size, "lm_head_parameters": parameters, "share_of_full": size / args.vocab_size})
    table = Table(title=f"lm_head over hidden size {args.hidden_size:,}")
    for heading in ("size", "lm_head parameters", "bf16 bytes", "of full"):
        table.add_column(heading, justify="right")
    for row in rows:
        parameters = int(row["lm_head_parameters"])
        table.add_row(f"{row['size']:,}", f"{parameters:,}", f"{2 * parameters:,}", percent(row["share_of_full"], 1))
    Console().print(table)
    write_json(args.json, {"vocab_size": args.vocab_size, "hidden_size": args.hidden_size, "rows": rows})


def run_merge(args: argparse.Namespace) -> None:
    parts = [TokenCounts.from_parquet(path) for path in args.files]
    total = parts[0]
    for path, part in zip(args.files[1:], parts[1:], strict=True):
        if part.vocab_size != total.vocab_size:
            raise VocabError(
                f"{path}: counts over {part.vocab_size:,} ids, {args.files[0]} over {total.vocab_size:,}; "
                "token ids of two tokenisers cannot be added"
            )
        total = total + part
    table = CoverageTable.measure(total, sizes=args.sizes, hidden_size=args.hidden_size)
    table.render(Console())
    if args.out:
        total.to_parquet(args.out)
    write_json(args.json, table.to_dict())
