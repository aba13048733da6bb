"""`python -m vocab tradeoff`: what each size costs and brings."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from vocab.acceptance_model import load_walks
from vocab.commands.arguments import positive, read_json, sizes, write_json
from vocab.counts import TokenCounts
from vocab.errors import VocabError
from vocab.fitted import with_walks
from vocab.hardware import GPUS, gpu
from vocab.roofline import Assumptions, Machine
from vocab.shapes import VERIFIERS, Drafter, Verifier, known_verifier, verifier_of
from vocab.tables import render_tradeoff
from vocab.tradeoff import BATCHES, DRAFT_LENGTHS, Question, answer, parse_pairs

_EXAMPLES = """\
examples:
  the story: 32,000 ids that cover 98.3 % of the tokens, on 8 RTX PRO 6000
    python -m vocab tradeoff --hidden-size 7168 --vocab-size 163840 --sizes 16000,32000,64000 --coverage 32000=0.983
  with what a full-vocabulary drafter reached, and coverage that was measured
    python -m vocab tradeoff --verifier qwen3-8b --gpu h200 --tensor-parallel 1 --tau 3=2.4 --coverage-json coverage.json
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "tradeoff",
        help="weights, step time, tau, tokens/s and a recommendation, for several sizes",
        description="What does each draft-vocabulary size cost, and what does it bring?",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--verifier", help=f"one of {', '.join(VERIFIERS)}; or give the two sizes of one of them")
    parser.add_argument("--verifier-config", metavar="FILE", help="config.json of any verifier")
    parser.add_argument("--vocab-size", type=positive, help="of the verifier")
    parser.add_argument("--hidden-size", type=positive, help="of the verifier")
    parser.add_argument(
        "--drafter-config",
        metavar="FILE",
        help="config.json of the drafter (default: one layer of the verifier's widths)",
    )
    parser.add_argument(
        "--drafter-parameters",
        type=float,
        metavar="N",
        help="of the drafter with the whole vocabulary, embedding included",
    )
    parser.add_argument("--sizes", type=sizes, help="draft-vocabulary sizes, as in 8192,32000")
    parser.add_argument(
        "--coverage",
        action="append",
        default=[],
        metavar="SIZE=SHARE",
        help="as in 32000=0.983, of tokens not chosen on",
    )
    parser.add_argument(
        "--coverage-json", metavar="FILE", help="coverage.json of `ray_jobs.coverage` or `vocab coverage --json`"
    )
    parser.add_argument(
        "--tau",
        action="append",
        default=[],
        metavar="K=TAU",
        help="measured, of a full-vocabulary drafter (default: 3=2.0, assumed)",
    )
    parser.add_argument(
        "--walks", metavar="FILE", help="walks of a full-vocabulary drafter (.npz): a fit, not a bracket"
    )
    parser.add_argument("--counts", metavar="FILE", help="counts.parquet that ids are chosen on, for --walks")
    parser.add_argument("--step-times", metavar="FILE", help="JSON of `vocab measure`, instead of the roofline")
    parser.add_argument("--gpu", default="rtx-pro-6000", help=f"one of {', '.join(GPUS)} (rtx-pro-6000)")
    parser.add_argument(
        "--tensor-parallel", type=positive, help="GPUs that share the weights (8 for Kimi-K2.5, else 1)"
    )
    parser.add_argument(
        "--server", choices=("sglang", "vllm"), default="sglang", help="how a drafted id is mapped back (sglang)"
    )
    parser.add_argument("--batches", type=sizes, help="batch sizes (1,2,4,...,256)")
    parser.add_argument("--draft-lengths", type=sizes, help="drafts a round (1,2,...,8)")
    parser.add_argument("--context", type=int, default=2048, help="tokens in the KV cache of a sequence (2048)")
    parser.add_argument("--draft-overhead-us", type=float, default=60.0, help="fixed time of a draft step (60)")
    parser.add_argument("--verify-overhead-us", type=float, default=400.0, help="fixed time of a verifier step (400)")
    parser.add_argument("--ttt-steps", type=positive, default=7, help="of training (7)")
    parser.add_argument("--workers", type=positive, default=8, help="of training (8)")
    parser.add_argument("--json", metavar="OUT", help="write all numbers to this file too")
    parser.add_argument("--html", metavar="OUT", help="write them as one self-contained page too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    verifier, drafter = models(args)
    parallel = args.tensor_parallel or (8 if verifier.name == "Kimi-K2.5" else 1)
    assumed = Assumptions(
        draft_overhead_us=args.draft_overhead_us, verify_overhead_us=args.verify_overhead_us, context=args.context
    )
    coverage = coverage_of(read_json(args.coverage_json), args.coverage_json) if args.coverage_json else {}
    coverage |= parse_pairs(args.coverage)
    taus = parse_pairs(args.tau, "--tau", "3=2.4")
    wanted = {*(args.sizes or ()), *(size for size in coverage if not args.sizes)}
    measured = step_times(read_json(args.step_times), args.step_times, args.server) if args.step_times else {}
    question = Question(
        verifier,
        drafter,
        Machine(gpu(args.gpu), parallel, assumed, args.server, measured),
        sizes=tuple(sorted(wanted | set(parse_pairs(args.coverage)))),
        coverage={size: value for size, value in coverage.items() if size <= drafter.vocab_size},
        taus=taus or {3: 2.0},
        assumed_tau=not taus,
        batches=tuple(args.batches or BATCHES),
        draft_lengths=tuple(args.draft_lengths or DRAFT_LENGTHS),
        ttt_steps=args.ttt_steps,
        training_workers=args.workers,
    )
    if args.walks:
        if not args.counts:
            raise VocabError(
                "--walks: name the counts that draft vocabularies are chosen on with --counts counts.parquet"
            )
        counts = TokenCounts.from_parquet(args.counts)
        if counts.vocab_size != drafter.vocab_size:
            raise VocabError(
                f"{args.counts}: counts over {counts.vocab_size:,} ids, the verifier has {drafter.vocab_size:,}"
            )
        question = with_walks(question, load_walks(args.walks), counts)
    found = answer(question)
    render_tradeoff(found, Console())
    write_json(args.json, found.to_dict())
    if args.html:
        from vocab.report import write_report

        write_report(args.html, title=f"Draft vocabulary of {verifier.name}", tradeoff=found.to_dict())


def models(args: argparse.Namespace) -> tuple[Verifier, Drafter]:
    """Verifier and drafter of the arguments. Raises VocabError when they name none, or two that do not fit."""
    if args.verifier_config:
        config = read_json(args.verifier_config)
        verifier, drafter = Verifier.from_config(config), Drafter.from_config(config)
    else:
        name = args.verifier
        if name is None:
            if args.vocab_size is None or args.hidden_size is None:
                raise VocabError("tradeoff: give --verifier, --verifier-config, or --vocab-size with --hidden-size")
            name = verifier_of(args.vocab_size, args.hidden_size)
            if name is None:
                raise VocabError(
                    f"tradeoff: no known verifier has vocabulary {args.vocab_size:,} and hidden size {args.hidden_size:,}; "
                    "give its config.json with --verifier-config"
                )
        verifier, drafter = known_verifier(name)
    for given, there, what in (
        (args.vocab_size, verifier.vocab_size, "--vocab-size"),
        (args.hidden_size, verifier.hidden_size, "--hidden-size"),
    ):
        if given is not None and given != there:
            raise VocabError(f"{what}: expected {there:,}, as {verifier.name} has, found {given:,}")
    if args.drafter_config:
        drafter = Drafter.from_config(read_json(args.drafter_config))
    if args.drafter_parameters:
        drafter = Drafter.of_total(
            int(args.drafter_parameters), vocab_size=verifier.vocab_size, hidden_size=verifier.hidden_size
        )
    return verifier, drafter


def step_times(content: dict[str, Any], where: str, server: str) -> dict[tuple[int, int], float]:
    """{(size, batch): seconds} of the path that the server takes. Raises VocabError when it is no output of `measure`."""
    path = {"sglang": "gather", "vllm": "scatter"}[server]
    try:
        steps = [(int(r["size"]), int(r["batch"]), str(r["path"]), float(r["seconds"])) for r in content["steps"]]
    except (KeyError, TypeError, ValueError) as error:
        raise VocabError(f"{where}: expected the JSON of `vocab measure`, found none ({error!r})") from error
    mapped = {size for size, _, taken, _ in steps if taken == path}
    return {(size, batch): s for size, batch, taken, s in steps if taken == (path if size in mapped else "none")}


def coverage_of(content: dict[str, Any], where: str) -> dict[int, float]:
    """{size: held-out coverage, or that on the tokens chosen on} of a coverage.json. Raises VocabError when it is none."""
    try:
        rows = content["rows"]
        return {
            int(row["size"]): float(row["coverage"] if row["held_out"] is None else row["held_out"]) for row in rows
        }
    except (KeyError, TypeError, ValueError) as error:
        raise VocabError(
            f"{where}: expected a coverage.json with rows of size and coverage, found none ({error!r})"
        ) from error
