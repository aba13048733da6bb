"""Coverage of small files, and sizes of lm_heads, without Ray.

    python -m vocab coverage corpus/*.parquet --vocab-size 163840 --hidden-size 7168 --held-out 0.1
    python -m vocab table --vocab-size 163840 --hidden-size 7168 --sizes 32000

For large datasets there is `python -m ray_jobs.coverage`. Exit code 1: the input is not usable; 2: the command is not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.console import Console
from rich.table import Table

from vocab.counts import TokenCounts, count_by_source
from vocab.coverage import CoverageTable, check_size, default_sizes, lm_head_parameters, percent
from vocab.errors import VocabError
from vocab.inputs import read_batches
from vocab.split import held_out_mask


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _positive(text: str) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, found {text!r}")
    return value


def _sizes(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",") if part.strip()] or [_positive(text)]


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to below 1, found {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m vocab", description="How large must a draft vocabulary be?")
    commands = parser.add_subparsers(dest="command", required=True, metavar="coverage | table")
    coverage = commands.add_parser("coverage", help="coverage of the tokens in files, for several sizes")
    coverage.add_argument("files", nargs="+", metavar="FILE", help=".parquet or .jsonl[.gz] with a column token_ids")
    coverage.add_argument(
        "--vocab-size", type=_positive, help="of the verifier (default: the largest id found, plus 1)"
    )
    coverage.add_argument("--hidden-size", type=_positive, help="of the verifier, to count lm_head parameters")
    coverage.add_argument(
        "--held-out", type=_share, default=0.0, help="share of prompt groups to hold out (default: 0)"
    )
    coverage.add_argument("--group-column", default="prompt_group", help="column with the prompt group (prompt_group)")
    coverage.add_argument("--seed", type=int, default=0, help="of the choice of held-out groups (default: 0)")
    coverage.set_defaults(run=_coverage)
    table = commands.add_parser("table", help="lm_head parameters, for several sizes")
    table.add_argument("--vocab-size", type=_positive, required=True, help="of the verifier")
    table.add_argument("--hidden-size", type=_positive, required=True, help="of the verifier")
    table.set_defaults(run=_table)
    for command in (coverage, table):
        command.add_argument("--sizes", type=_sizes, help="draft-vocabulary sizes, as in 8192,32000")
        command.add_argument("--json", metavar="OUT", help="write the numbers to this file too")
    return parser


def _coverage(args: argparse.Namespace) -> None:
    vocab_size = args.vocab_size
    if vocab_size is None:
        largest = [
            batch.token_ids.max() for batch in read_batches(args.files, args.group_column) if batch.token_ids.size
        ]
        vocab_size = int(max(largest, default=0)) + 1
    sides = [TokenCounts.empty(vocab_size), TokenCounts.empty(vocab_size)]
    for batch in read_batches(args.files, args.group_column):
        held = np.zeros(batch.lengths.size, np.bool_)
        if args.held_out:
            if batch.groups is None:
                raise VocabError(
                    f"{batch.where}: --held-out needs the prompt group of every row, and column {args.group_column!r} "
                    "is missing or empty; name it with --group-column"
                )
            held = held_out_mask(batch.groups, args.held_out, args.seed)
        held_tokens = np.repeat(held, batch.lengths)
        for side, of_rows, of_tokens in ((0, ~held, ~held_tokens), (1, held, held_tokens)):
            sources = [source for source, mine in zip(batch.sources, of_rows, strict=True) if mine]
            if not sources:
                continue
            try:
                part = count_by_source(
                    batch.token_ids[of_tokens], batch.loss_mask[of_tokens], batch.lengths[of_rows], sources, vocab_size
                )
            except VocabError as error:
                raise VocabError(f"{batch.where}: {error}") from error
            sides[side] += part
    table = CoverageTable.measure(sides[0], sides[1], sizes=args.sizes, hidden_size=args.hidden_size)
    table.render(Console())
    _write_json(args.json, table.to_dict())


def _table(args: argparse.Namespace) -> None:
    sizes = default_sizes(args.vocab_size) if args.sizes is None else args.sizes
    rows = []
    for size in sorted({*(check_size(size, args.vocab_size) for size in sizes), args.vocab_size}):
        parameters = lm_head_parameters(size, args.hidden_size)
        rows.append({"size": size, "lm_head_parameters": parameters, "share_of_full": size / args.vocab_size})
    table = Table(title=f"lm_head over hidden size {args.hidden_size:,}")
    for heading in ("size", "lm_head parameters", "bf16 bytes", "of full"):
        table.add_column(heading, justify="right")
    for row in rows:
        parameters = int(row["lm_head_parameters"])
        table.add_row(f"{row['size']:,}", f"{parameters:,}", f"{2 * parameters:,}", percent(row["share_of_full"], 1))
    Console().print(table)
    _write_json(args.json, {"vocab_size": args.vocab_size, "hidden_size": args.hidden_size, "rows": rows})


def _write_json(path: str | None, content: dict[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors are one line on stderr."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except VocabError as error:
        print(f"python -m vocab: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"python -m vocab: error: {error.filename}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
