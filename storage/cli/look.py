"""ls, info, head: what is there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from storage.cli.console import Outcome, command, count, facts, size
from storage.commit import PlanDocument, load_plan_document
from storage.errors import DatasetMissing, DatasetNotSealed, StatehouseError
from storage.objects import open_store
from storage.reader import find_datasets, open_dataset
from storage.seal import Seal, load_seals, resolve_fingerprint, some
from storage.stats import layer_names, layer_rms, sources_of


def register(commands: Any) -> None:
    command(commands, "ls", _ls, "datasets at or under a URI", "uri", example="statehouse ls s3://bucket/datasets")
    info = command(
        commands,
        "info",
        _info,
        "what a dataset holds: verifier, layers, sequences, sources, size, seals",
        "uri",
        example="statehouse info s3://bucket/datasets/kimi-k25 --json | jq .plan.contract > contract.json",
    )
    info.add_argument(
        "--fingerprint", metavar="HEX", help="ask what became of this fingerprint (as a checkpoint names it)"
    )
    head = command(
        commands,
        "head",
        _head,
        "the first tokens of some sequences beside the norms of their states",
        "uri",
        example="statehouse head out/smollm2 -n 1 --tokenizer out/smollm2-checkpoint",
    )
    head.add_argument("-n", type=count, default=3, metavar="N", help="sequences to show (default 3)")
    head.add_argument("--tokens", type=count, default=8, metavar="T", help="tokens of each (default 8)")
    head.add_argument("--tokenizer", metavar="DIR", help="verifier folder with tokenizer.json, to show text")
    head.add_argument("--partial", action="store_true", help="finished shards of an unsealed dataset")


def _seals(uri: str) -> tuple[PlanDocument, list[Seal]]:
    store = open_store(uri)
    document = load_plan_document(store)
    try:
        return document, load_seals(store)
    except DatasetNotSealed:
        return document, []


def _ls(args: argparse.Namespace, console: Console) -> Outcome:
    """Lists the datasets at or under a URI, up to three folders down."""
    rows: list[dict[str, Any]] = []
    table = Table("dataset", "verifier", "sequences", "tokens", "stored", "state")
    for uri in find_datasets(args.uri):
        try:
            plan, seals = _seals(uri)
        except StatehouseError as error:  # one bad dataset must not hide the others
            rows.append({"uri": uri, "error": str(error)})
            table.add_row(escape(uri), "-", "-", "-", "-", escape(f"unreadable: {error}"))
            continue
        seal = seals[-1] if seals else None
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
    return Outcome(rows)


def _info(args: argparse.Namespace, console: Console) -> Outcome:
    """Shows what a dataset holds, from its plan and its seals."""
    plan, seals = _seals(args.uri)
    contract, seal = plan.contract, seals[-1] if seals else None
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
        "teacher summary": plan.teacher,
        "plan": plan.plan_hash[:16],
    }
    if seal:
        rows["stored"] = (
            f"{size(seal.stored_bytes)} of {size(seal.raw_bytes)} raw, {seal.raw_bytes / seal.stored_bytes:.3f}x"
        )
        rows["sealed"] = f"{seal.sealed_at}, fingerprint {seal.fingerprint[:16]}"
    else:
        rows["sealed"] = "no: finish it with `python -m ray_jobs.extract RECIPE`"
    for older, newer in zip(seals, seals[1:], strict=False):
        rows[f"seal {newer.number}"] = (
            f"shards {some(newer.changed_shards)} replaced, before: {older.fingerprint[:16]} of {older.sealed_at}"
            if newer.changed_shards
            else f"same content as {older.fingerprint[:16]} of {older.sealed_at}"
        )
    if dataset is not None and seal is not None:
        document["sources"] = {source.name: source.sequences for source in sources_of(dataset.sequences)}
        document["layer_rms"] = layer_rms(dataset.shards_table()).tolist()
        rows["sources"] = ", ".join(f"{name} {amount:,}" for name, amount in document["sources"].items())
        rows["layer rms"] = ", ".join(f"{value:,.1f}" for value in document["layer_rms"])
        if seal.quarantined:
            key, why = min(seal.quarantined.items())
            rows["quarantined"] = f"{len(seal.quarantined):,} sequences, for instance {key}: {why}"
    if args.fingerprint:
        _, message = resolve_fingerprint(open_store(args.uri), args.fingerprint)
        document["fingerprint_message"] = message
        rows["fingerprint"] = message or "this is the newest"
    facts(console, args.uri, rows)
    return Outcome(document)


def _head(args: argparse.Namespace, console: Console) -> Outcome:
    """Reads some sequences and shows their first tokens beside the root mean square of each layer's state."""
    dataset = open_dataset(args.uri, partial=args.partial)
    decode = _decoder(args.tokenizer)
    names = layer_names(dataset.contract)
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
    return Outcome(rows)


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
