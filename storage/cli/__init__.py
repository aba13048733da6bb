"""The `statehouse` command: looks at datasets, checks, repairs, copies and converts them.

What needs a verifier or a cluster lives in ray_jobs. One module for each kind of work; each registers its commands.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from storage.cli import check, describe, look, runs, transfer
from storage.cli.console import Outcome, size
from storage.errors import StatehouseError

__all__ = ["main", "size"]

_EPILOG = """\
a dataset's life:
  python -m ray_jobs.extract RECIPE     plans, fills and seals it
  statehouse ls s3://bucket/datasets    finds it
  statehouse info URI                   what it holds; stats, head and card show more
  statehouse verify --full URI          reads every byte; names what is wrong and the command that fixes it
  statehouse cp URI s3://other/place    copies it, checked

URI is a folder or an object-store URI (s3://, gs://, az://). Credentials come from the environment (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, ...) or the store's usual chain. Every command takes --json. Exit code: 0 when all is well, 1 when not.
"""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="statehouse",
        description="Looks after datasets of hidden states, in a folder or on object storage.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (look, describe, check, transfer, runs):
        module.register(commands)
    args = parser.parse_args(argv)
    function: Callable[[argparse.Namespace, Console], Outcome] = args.function
    try:
        # A pipe is not 80 columns wide: let lines be as long as they are.
        console = Console(quiet=args.json, width=None if sys.stdout.isatty() else 160)
        outcome = function(args, console)
        if args.json:
            print(json.dumps(_finite(outcome.document), indent=1, allow_nan=False))
        if outcome.code:
            sys.exit(outcome.code)
    except StatehouseError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        print("stopped; nothing is half written, the same command carries on", file=sys.stderr)
        sys.exit(130)


def _finite(value: Any) -> Any:
    """A document with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
