"""`python -m vocab measure`: whole draft steps on this device."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from vocab.commands.arguments import positive, sizes, write_json


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "measure",
        help="time whole draft steps on this device (needs torch)",
        description="Time draft steps: no map, an identity map, a real d2t by gather (SGLang) and by scatter (vLLM).",
        epilog="example: python -m vocab measure --hidden-size 576 --intermediate-size 1536 --heads 9 --kv-heads 3 "
        "--vocab-size 49152 --sizes 8192,49152",
    )
    parser.add_argument("--vocab-size", type=positive, required=True, help="of the verifier")
    parser.add_argument("--hidden-size", type=positive, required=True)
    parser.add_argument("--intermediate-size", type=positive, required=True)
    parser.add_argument("--heads", type=positive, required=True)
    parser.add_argument("--kv-heads", type=positive, required=True)
    parser.add_argument("--head-dim", type=positive, help="hidden size over heads by default")
    parser.add_argument("--context", type=positive, default=512, help="tokens in the cache (512)")
    parser.add_argument("--sizes", type=sizes, required=True, help="draft-vocabulary sizes; name the whole one too")
    parser.add_argument("--batches", type=sizes, default=[1], help="batch sizes (1)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (cpu)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--json", metavar="OUT", help="write the numbers to this file too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from vocab.measure import StepShape, measure_steps

    head_dim = args.head_dim or args.hidden_size // args.heads
    shape = StepShape(args.hidden_size, args.intermediate_size, args.heads, args.kv_heads, head_dim, args.context)
    found = measure_steps(
        shape, args.vocab_size, args.sizes, args.batches, device=args.device, dtype=args.dtype, repeats=args.repeats
    )
    table = Table(title=f"draft steps on {args.device}, {args.dtype}")
    for heading in ("size", "batch", "path", "median ms", "fastest ms"):
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(f"{row.size:,}", str(row.batch), row.path, f"{row.seconds * 1e3:.3f}", f"{row.fastest * 1e3:.3f}")
    Console().print(table)
    write_json(args.json, {"device": args.device, "dtype": args.dtype, "steps": [asdict(row) for row in found]})
