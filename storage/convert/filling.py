"""Filling a dataset from files of another project: what its importers share.

An importer gives `Sample`s: tokens and mask at once (the planner needs all lengths), states when asked. Everything else is
a dataset's usual life: plan, fill, seal. Run it again after any failure: finished shards are found and kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from storage.codecs import codec_by_name
from storage.commit import load_plan_document, package_versions, publish_plan
from storage.contract import Contract
from storage.errors import ShardCorrupt, StatehouseError
from storage.objects import ObjectStore, open_store
from storage.plan import Plan, make_plan
from storage.reader import open_dataset
from storage.seal import Seal, seal_dataset
from storage.sequences import Sequence, sequence_id
from storage.spool import SequenceSpool
from storage.writer import ShardWriter

# Sequences whose states calibrate the exponent offsets: spread over the ids, so over all files.
_CALIBRATION = 16
# Our own note in an exported folder: with it, importing the folder again needs no --contract.
NOTE = "statehouse.json"
Step = Callable[[int], None]


class Sample(NamedTuple):
    """states(): bf16 bit patterns uint16 [T, L, H], read when they are needed; raises StatehouseError."""

    sequence: Sequence
    states: Callable[[], np.ndarray]


class States(NamedTuple):
    """What is kept of a sample. where: the file, for messages."""

    where: str
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Imported:
    """duplicates: samples whose tokens and mask another one has, too. skipped: {file: why} with skip_bad."""

    seal: Seal
    duplicates: int
    skipped: dict[str, str]


def import_samples(
    files: Iterable[tuple[Path, Callable[[], Sample]]],
    uri: str,
    contract: Contract,
    codec: str,
    origin: dict[str, Any],
    *,
    skip_bad: bool = False,
    verify: bool = True,
    step: Step | None = None,
) -> Imported:
    """Makes a sealed dataset at `uri`. Tokens wait on disk; in memory lie ids, file names and the states of one shard.

    files: each with what reads it. origin: for the provenance; the number of files is added.
    skip_bad: leave out what cannot be read, and say so. verify: read every sequence back and compare it with the file, bit
    for bit (lossless codecs) or in shape. step(tokens): called as sequences are written, and again as they are verified.
    Raises PlanConflict when the URI holds something else, ShardCorrupt when a comparison fails.
    """
    store = open_store(uri)
    step = step or (lambda _tokens: None)
    states: dict[str, States] = {}
    skipped: dict[str, str] = {}
    count = 0
    with SequenceSpool() as spool:
        for path, read in files:
            count += 1
            try:
                sample = read()
            except StatehouseError as error:
                if not skip_bad:
                    raise
                skipped[str(path)] = str(error)
                continue
            states.setdefault(spool.add(sample.sequence), States(str(path), sample.states))
        if not states:
            raise StatehouseError(f"{origin.get('folder', 'the folder')}: no samples to convert")
        sequences = spool.finish()
        plan = make_plan(sequences, contract, codec)
        store.probe()
        publish_plan(store, plan, sequences)
    _fill(store, plan, states, step)
    about = {"converted_from": {**origin, "files": count}, "versions": package_versions("statehouse", "numpy")}
    seal = seal_dataset(store, plan, about)
    if verify:
        _compare(uri, states, step)
    return Imported(seal, spool.count - len(states), skipped)


def _fill(store: ObjectStore, plan: Plan, by_id: dict[str, States], step: Step) -> None:
    writer = ShardWriter.from_uri(store.uri)
    ids, lengths = plan.table["id"].to_pylist(), plan.column("length")
    shape = (plan.geometry.layers, plan.geometry.hidden_size)
    if not writer.calibrated:
        rows = np.unique(np.linspace(0, len(ids) - 1, min(_CALIBRATION, len(ids))).astype(int))
        writer.calibrate(np.concatenate([_states(by_id[ids[row]], int(lengths[row]), shape) for row in rows]))
    for unit in plan.units():
        if writer.find(unit.shard, unit.tokens) is None:
            bits = np.concatenate([_states(by_id[ids[row]], int(lengths[row]), shape) for row in unit.rows.tolist()])
            writer.write(
                unit.shard, bits, len(unit.rows), written_by={"converted": by_id[ids[int(unit.rows[0])]].where}
            )
        step(unit.tokens)


def _states(sample: States, length: int, shape: tuple[int, int]) -> np.ndarray:
    bits, expected = sample.read(), (length, *shape)
    if bits.shape != expected:
        raise StatehouseError(
            f"{sample.where}: states of shape {list(bits.shape)}, its tokens and the contract make {list(expected)}; "
            "correct capture_layers and hidden_size of the contract, or leave the file out"
        )
    return bits


def _compare(uri: str, by_id: dict[str, States], step: Step) -> None:
    dataset = open_dataset(uri)
    lossy = codec_by_name(dataset.plan.codec).lossy
    for states in dataset.stream():
        sample = by_id[states.id]
        bits = sample.read()
        same = states.hidden.shape == bits.shape and (lossy or bool((states.hidden.view(np.uint16) == bits).all()))
        if not same or sequence_id(states.token_ids, states.loss_mask) != states.id:
            raise ShardCorrupt(
                f"{uri}: sequence {states.id} does not read back as {sample.where} holds it; did the file change "
                f"meanwhile? run `statehouse verify --full {uri}`"
            )
        step(len(states.token_ids))


def to_token_ids(values: np.ndarray, where: str) -> np.ndarray:
    """Token ids as int32 [T]. Raises ShardCorrupt for what is none: nulls, fractions, ids below 0 or from 2**31 on."""
    if not len(values):
        raise ShardCorrupt(f"{where}: holds no tokens; leave it out")
    if values.dtype.kind not in "iu":
        raise ShardCorrupt(f"{where}: input_ids of {values.dtype} (nulls?), expected whole numbers; make it again")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= 2**31:
        raise ShardCorrupt(
            f"{where}: token id {low if low < 0 else high}, expected 0 to {2**31 - 1:,}; make it again or leave it out"
        )
    return values.astype(np.int32)


def prompt_group(token_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """The id of what stands before the first loss token: samples that share a prompt share their group."""
    first = int(np.argmax(loss_mask)) if loss_mask.any() else len(token_ids)
    prompt = token_ids[: max(1, first)]
    return sequence_id(prompt, np.zeros(len(prompt), bool))


def load_contract(given: str | None, folder: Path) -> Contract:
    """From a JSON file (a contract, or what `statehouse info --json` prints), a dataset's URI, or the folder's own note.

    Raises StatehouseError naming the field that is missing or wrong.
    """
    where = given or str(folder / NOTE)
    if given is not None and not os.path.isfile(given):
        return load_plan_document(open_store(given)).contract
    try:
        document = json.loads(Path(where).read_text())
        if isinstance(document, dict):
            document = document.get("plan", document)
        if isinstance(document, dict):
            document = document.get("contract", document)
        return Contract.model_validate(document)
    except FileNotFoundError:
        raise StatehouseError(
            f"{folder}: these files do not say what their states are states of; give --contract FILE or DATASET_URI "
            "(a dataset of the same verifier has one: `statehouse info URI --json | jq .plan.contract > contract.json`)"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise StatehouseError(
            f"{where}: {f'contract field {field}' if field else 'no contract'}: {first['msg']}; expected JSON with the fields "
            "of a contract, as `statehouse info URI --json | jq .plan.contract` prints it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise StatehouseError(f"{where}: no contract ({error}); expected JSON with the fields of a contract") from None


def write_note(folder: Path, contract: Contract, fingerprint: str, about: dict[str, Any]) -> None:
    """Says in the exported folder what its states are states of."""
    note = {"contract": contract.model_dump(mode="json"), "dataset_fingerprint": fingerprint, **about}
    write_whole(folder / NOTE, json.dumps(note, indent=1).encode() + b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is either absent or whole, whenever the process dies. Raises StatehouseError."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise StatehouseError(f"{path}: {error.strerror}; free some space or choose another folder") from None
