"""runs: training runs in a bucket, and which of them used a dataset."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from storage.cli.console import Outcome, command
from storage.runs import FoundRun, find_runs, fingerprints_of


def register(commands: Any) -> None:
    runs = command(
        commands,
        "runs",
        _runs,
        "training runs at or under a URI, what each was trained on and what came of it",
        "uri",
        example="statehouse runs s3://bucket --dataset s3://bucket/datasets/kimi-k25",
    )
    runs.add_argument("--dataset", metavar="URI", help="only those that used this dataset (URI or fingerprint)")


def _runs(args: argparse.Namespace, console: Console) -> Outcome:
    """Lists the training runs at or under a URI, up to four folders down.

    A run names its datasets by fingerprint; --dataset asks which runs used one, whatever it was called then.
    """
    found = find_runs(args.uri)
    if args.dataset is not None:
        wanted = fingerprints_of(args.dataset)
        found = [run for run in found if wanted & set(run.datasets)]
    if not found:
        console.print(f"no training runs at or under {escape(args.uri)}" + (" on this dataset" if args.dataset else ""))
    else:
        table = Table("run", "datasets", "draft vocabulary", "updates", "tokens", "held-out loss", "tau", "state")
        for run in found:
            table.add_row(*(escape(text) for text in _row(run)))
        console.print(table)
    return Outcome([_document(run) for run in found])


def _row(run: FoundRun) -> list[str]:
    if run.problem:
        return [run.uri, "", "", "", "", "", "", run.problem]
    summary, named = run.summary or {}, {one["fingerprint"]: one["uri"] for one in run.provenance.get("datasets", [])}
    datasets = [
        f"{named.get(print_, '').rstrip('/').rsplit('/', 1)[-1]} {print_[:12]}".strip()
        + (f" x {weight:g}" if weight != 1 else "")
        for print_, weight in run.datasets.items()
    ]
    loss = summary.get("loss_after")
    return [
        run.uri,
        "\n".join(datasets),
        str(summary.get("draft_vocab_size") or str(run.identity.get("draft_vocabulary", ""))[:12]),
        f"{summary['updates']:,}" if summary else "",
        f"{summary['tokens']:,}" if summary else "",
        "" if loss is None else f"{loss:.3f}",
        "" if not run.tau else ", ".join(f"{k}: {tau:.3f}" for k, tau in run.tau.items()),
        "finished" if summary else "unfinished",
    ]


def _document(run: FoundRun) -> dict[str, Any]:
    return {
        "uri": run.uri,
        "name": run.name,
        "datasets": run.datasets,
        "identity": run.identity,
        "summary": run.summary,
        "tau": run.tau,
        "problem": run.problem,
    }
