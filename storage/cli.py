"""The `statehouse` command: looks at datasets. What needs a verifier or runs for long lives in ray_jobs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from storage.commit import PlanDocument, load_plan_document
from storage.errors import DatasetMissing, DatasetNotSealed, StatehouseError
from storage.objects import open_store
from storage.reader import Dataset, find_datasets, open_dataset
from storage.seal import Seal, load_seal


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="statehouse",
        description="Looks at datasets of hidden states, in a folder or on object storage (s3://, gs://, az://).",
        epilog="Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...) or the usual chain.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, show, text in (
        ("ls", _ls, "datasets at or under a URI"),
        ("info", _info, "what a dataset holds: verifier, layers, sequences, sources, size"),
        ("head", _head, "the first tokens of some sequences beside the norms of their states"),
    ):
        command = commands.add_parser(name, help=text, description=(show.__doc__ or text).strip())
        command.add_argument("uri", help="for instance s3://bucket/datasets/kimi-k25")
        command.add_argument("--json", action="store_true", help="one JSON document instead of a table")
        command.set_defaults(function=show)
        if name == "head":
            command.add_argument("-n", type=_count, default=3, metavar="N", help="sequences to show (default 3)")
            command.add_argument("--tokens", type=_count, default=8, metavar="T", help="tokens of each (default 8)")
            command.add_argument("--tokenizer", metavar="DIR", help="verifier folder with tokenizer.json, to show text")
            command.add_argument("--partial", action="store_true", help="finished shards of an unsealed dataset")
    args = parser.parse_args(argv)
    function: Callable[[argparse.Namespace, Console], Any] = args.function
    try:
        # A pipe is not 80 columns wide: let lines be as long as they are.
        console = Console(quiet=args.json, width=None if sys.stdout.isatty() else 160)
        document = function(args, console)
        if args.json:
            print(json.dumps(document, indent=1))
    except StatehouseError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {value}")
    return value


def _seal(uri: str) -> tuple[PlanDocument, Seal | None]:
    store = open_store(uri)
    document = load_plan_document(store)
    try:
        return document, load_seal(store)
    except DatasetNotSealed:
        return document, None


def _ls(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Lists the datasets at or under a URI, up to three folders down."""
    rows: list[dict[str, Any]] = []
    table = Table("dataset", "verifier", "sequences", "tokens", "stored", "state")
    for uri in find_datasets(args.uri):
        try:
            plan, seal = _seal(uri)
        except StatehouseError as error:  # one bad dataset must not hide the others
            rows.append({"uri": uri, "error": str(error)})
            table.add_row(escape(uri), "-", "-", "-", "-", escape(f"unreadable: {error}"))
            continue
        rows.append(
            {
                "uri": uri,
                "verifier": plan.contract.verifier,
                "sequences": plan.sequences,
                "tokens": plan.tokens,
                "stored_bytes": seal.stored_bytes if seal else None,
                "sealed": seal is not None,
                "fingerprint": seal.fingerprint if seal else None,
            }
        )
        table.add_row(
            escape(uri),
            escape(plan.contract.verifier),
            f"{plan.sequences:,}",
            f"{plan.tokens:,}",
            size(seal.stored_bytes) if seal else "-",
            f"sealed {seal.fingerprint[:12]}" if seal else "not sealed",
        )
    if not rows:
        raise DatasetMissing(f"{args.uri}: no datasets here, down to three folders; check the URI")
    console.print(table)
    return rows


def _info(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Shows what a dataset holds, from its plan and its seal."""
    plan, seal = _seal(args.uri)
    contract = plan.contract
    dataset = open_dataset(args.uri) if seal else None
    document: dict[str, Any] = {"uri": args.uri, "plan": plan.model_dump(mode="json", exclude={"objects"})}
    document["seal"] = seal.model_dump(mode="json") if seal else None
    rows = {
        "verifier": contract.verifier + (f" @ {contract.revision}" if contract.revision else ""),
        "layers": f"outputs of decoder layers {list(contract.capture_layers)} (0-based of {contract.num_layers}), "
        f"final state {contract.final_state}",
        "hidden size": f"{contract.hidden_size:,}, vocabulary {contract.vocab_size:,}",
        "engine": f"{contract.engine} {contract.engine_version}, {contract.engine_dtype}, tp {contract.tp_size}",
        "sequences": f"{plan.sequences:,}, {plan.tokens:,} tokens, {plan.loss_tokens:,} with loss",
        "shards": f"{plan.geometry.shards:,} of {plan.geometry.shard_tokens:,} tokens, "
        f"in chunks of {plan.geometry.chunk_tokens}",
        "codec": plan.codec,
        "plan": plan.plan_hash[:16],
    }
    if seal:
        rows["stored"] = (
            f"{size(seal.stored_bytes)} of {size(seal.raw_bytes)} raw, {seal.raw_bytes / seal.stored_bytes:.3f}x"
        )
        rows["sealed"] = f"{seal.sealed_at}, fingerprint {seal.fingerprint[:16]}"
    else:
        rows["sealed"] = "no: finish it with `python -m ray_jobs.extract RECIPE`"
    if dataset is not None:
        document["sources"] = _sources(dataset)
        document["layer_rms"] = _layer_rms(dataset)
        rows["sources"] = ", ".join(f"{name} {count:,}" for name, count in document["sources"].items())
        rows["layer rms"] = ", ".join(f"{value:,.1f}" for value in document["layer_rms"])
    table = Table(show_header=False, title=escape(args.uri), title_justify="left")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)
    return document


def _sources(dataset: Dataset) -> dict[str, int]:
    return dict(sorted(Counter(dataset.sequences["source"].to_pylist()).items()))


def _layer_rms(dataset: Dataset) -> list[float]:
    """Root mean square of each stored layer over the whole dataset, from the receipts: [L]."""
    shards = dataset.shards_table()
    rows = shards["rows"].to_numpy().astype(np.float64)
    rms = np.array(shards["layer_rms"].to_pylist())
    return np.sqrt((rms**2 * rows[:, None]).sum(0) / rows.sum()).tolist()


def _head(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Reads some sequences and shows their first tokens beside the root mean square of each layer's state."""
    dataset = open_dataset(args.uri, partial=args.partial)
    decode = _decoder(args.tokenizer)
    names = [f"layer {layer}" for layer in dataset.contract.capture_layers]
    names += ["final"] if dataset.contract.final_state != "absent" else []
    rows = []
    for index in range(min(args.n, len(dataset))):
        states = dataset.read(index)
        hidden = states.hidden[: args.tokens].astype(np.float32)
        rms = np.sqrt((hidden**2).mean(-1))
        title = f"{index}: {states.id} {states.source}, {len(states.token_ids):,} tokens, {int(states.loss_mask.sum()):,} with loss"
        table = Table("position", "token", "text", "loss", *names, title=escape(title), title_justify="left")
        tokens = []
        for position in range(len(hidden)):
            token, loss = int(states.token_ids[position]), bool(states.loss_mask[position])
            text = decode(token)
            norms = [float(value) for value in rms[position]]
            table.add_row(
                str(position), str(token), escape(text), "x" if loss else "", *(f"{value:,.2f}" for value in norms)
            )
            tokens.append({"token_id": token, "text": text, "loss": loss, "rms": norms})
        console.print(table)
        rows.append({"id": states.id, "source": states.source, "length": len(states.token_ids), "tokens": tokens})
    return rows


def _decoder(folder: str | None) -> Callable[[int], str]:
    if folder is None:
        return lambda _token: ""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise StatehouseError("--tokenizer needs the package tokenizers; pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    except Exception as error:  # tokenizers raises bare Exceptions
        raise StatehouseError(f"--tokenizer {folder}: expected a folder with tokenizer.json ({error})") from None
    return lambda token: repr(tokenizer.decode([token], skip_special_tokens=False))


def size(count: int) -> str:
    """Bytes for people: 1,234 B, 12.3 MiB, ..."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


if __name__ == "__main__":
    main()
