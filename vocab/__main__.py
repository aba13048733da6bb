"""How large must a draft vocabulary be? For files that one machine can read; `python -m ray_jobs.coverage` for more.

    python -m vocab coverage corpus/*.parquet --vocab-size 163840 --hidden-size 7168 --held-out 0.1
    python -m vocab tradeoff --hidden-size 7168 --vocab-size 163840 --coverage 32000=0.983
    python -m vocab table --vocab-size 163840 --hidden-size 7168 --sizes 32000

Exit code 1: the input is not usable; 2: the command is not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from vocab.commands import coverage, maps, measure, tradeoff
from vocab.commands.arguments import Parser
from vocab.errors import VocabError


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m vocab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="coverage | tradeoff | table | merge | convert | overlap | report | measure",
    )
    for command in (coverage, tradeoff, maps, measure):
        command.add(commands)
    return parser


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
