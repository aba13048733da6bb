"""speculators' training data: a Hugging Face dataset on disk beside one safetensors file a row.

    data-*.arrow, state.json       input_ids, loss_mask, seq_len
    hidden_states/hs_<row>.safetensors   token_ids [S] int64, hidden_states [S, K + 1, H], the last slot *before* the norm

Neither torch nor datasets is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from storage.contract import Contract
from storage.convert.filling import (
    Imported,
    Sample,
    Step,
    import_samples,
    load_contract,
    prompt_group,
    to_token_ids,
    write_note,
    write_whole,
)
from storage.convert.norm import FinalNorm
from storage.convert.safetensors_file import read_header, read_tensor, to_safetensors
from storage.errors import ContractMismatch, ShardCorrupt, StatehouseError
from storage.reader import Dataset
from storage.sequences import Sequence

_ARROW = "data-00000-of-00001.arrow"
_ROWS_A_BATCH = 1000


def import_speculators(
    folder: str | Path,
    uri: str,
    *,
    contract: str | None = None,
    verifier: str | None = None,
    codec: str = "lossless",
    source: str = "speculators",
    skip_bad: bool = False,
    verify: bool = True,
    step: Step | None = None,
) -> Imported:
    """Converts speculators' data to a sealed dataset. contract: see `load_contract`.

    With final_state "pre_norm" the last slot is kept as it is; with "post_norm" the norm of `verifier` (a checkpoint
    folder) is applied to it. skip_bad: leave rows out whose file is missing, damaged or of other tokens, and say so.
    Raises StatehouseError, ContractMismatch, PlanConflict when the URI holds something else.
    """
    folder = Path(folder)
    terms = load_contract(contract, folder)
    norm = None
    if terms.final_state == "absent":
        raise ContractMismatch(f"{folder}: holds final states, the contract says final_state 'absent'; correct it")
    if terms.final_state == "post_norm":
        if verifier is None:
            raise ContractMismatch(
                f"{folder}: speculators keeps the final state before the last norm, the contract says 'post_norm'; give "
                "--verifier DIR, whose norm will be applied, or a contract with final_state 'pre_norm'"
            )
        norm = FinalNorm.from_verifier(verifier)
        norm.require_size(terms.hidden_size)
    files = (
        (
            path := folder / "hidden_states" / f"hs_{index}.safetensors",
            partial(_sample, path, *row, terms, norm, source),
        )
        for index, row in enumerate(read_rows(folder))
    )
    origin = {"format": "speculators", "folder": str(folder.absolute()), "norm_applied": norm is not None}
    return import_samples(files, uri, terms, codec, origin, skip_bad=skip_bad, verify=verify, step=step)


def read_rows(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(input_ids [S] int32, loss_mask [S] bool) of every row of the Arrow dataset. Raises StatehouseError."""
    try:
        state = json.loads((folder / "state.json").read_text())
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StatehouseError(
            f"{folder}: expected a dataset saved with save_to_disk (state.json, data-*.arrow): {error}; "
            "give the folder that speculators' training takes"
        ) from None
    for name in names:
        try:
            with pa.memory_map(str(folder / name)) as file, pa.ipc.open_stream(file) as reader:
                row = 0
                for batch in reader:
                    for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
                        yield _row(ids.as_py(), mask.as_py(), f"{folder / name}: row {row}")
                        row += 1
        except (OSError, KeyError, pa.ArrowException) as error:
            raise ShardCorrupt(f"{folder / name}: cannot be read ({error}); save the dataset again") from None


def _row(ids: Any, mask: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """One row of the Arrow dataset. Raises ShardCorrupt when it has nulls or what is no token id."""
    if not isinstance(ids, list) or not isinstance(mask, list) or None in ids or None in mask:
        raise ShardCorrupt(f"{where}: input_ids or loss_mask is null or has nulls; save the dataset again without")
    return to_token_ids(np.asarray(ids), where), np.asarray(mask) != 0


def _sample(
    path: Path,
    token_ids: np.ndarray,
    loss_mask: np.ndarray,
    contract: Contract,
    norm: FinalNorm | None,
    source: str,
) -> Sample:
    header, _ = read_header(path)
    stored, _ = read_tensor(path, "token_ids")
    if stored.shape != token_ids.shape or (stored != token_ids).any() or loss_mask.shape != token_ids.shape:
        raise ShardCorrupt(
            f"{path}: holds the states of {stored.size} other tokens than its row ({token_ids.size}); extract it again, or "
            "leave it out with --skip-bad"
        )
    entry = header.get("hidden_states", {})
    expected = [len(token_ids), contract.layers, contract.hidden_size]
    if entry.get("shape") != expected or entry.get("dtype") != "BF16":
        raise StatehouseError(
            f"{path}: hidden_states {entry.get('dtype')} {entry.get('shape')}, its tokens and the contract make BF16 "
            f"{expected}; correct the contract, or convert the states to bfloat16 first"
        )

    sequence = Sequence(source, prompt_group(token_ids, loss_mask), token_ids, loss_mask)
    return Sample(sequence, partial(_states, path, norm))


def _states(path: Path, norm: FinalNorm | None) -> np.ndarray:
    bits, _ = read_tensor(path, "hidden_states")
    if norm is None:
        return bits
    return np.concatenate([bits[:, :-1], norm.apply(np.ascontiguousarray(bits[:, -1]))[:, None]], axis=1)


def export_speculators(
    dataset: Dataset, folder: str | Path, *, verifier: str | None = None, step: Step | None = None
) -> int:
    """Writes a dataset as speculators' training data; returns the number of rows. Files that are there are kept.

    verifier: folder with the last norm, needed when the dataset's final state is after it: the file then holds the state
    divided by the norm's weight, from which their norm makes the stored one again (to bf16's precision).
    Every file is read back and compared. Raises ContractMismatch when that cannot be done.
    """
    folder, norm = Path(folder), _norm(dataset, verifier)
    for index in range(len(dataset)):
        path = folder / "hidden_states" / f"hs_{index}.safetensors"
        states = dataset.read(index)
        bits = states.hidden.view(np.uint16)
        if norm is not None:
            final = norm.unapply(np.ascontiguousarray(bits[:, -1]), f"{dataset.uri}: sequence {states.id}")
            bits = np.concatenate([bits[:, :-1], final[:, None]], axis=1)
        data = to_safetensors({"token_ids": states.token_ids.astype(np.int64), "hidden_states": bits})
        if not path.exists():
            write_whole(path, data)
        if path.read_bytes() != data:
            raise ShardCorrupt(
                f"{path}: does not hold sequence {states.id}; delete the file and run the same command again"
            )
        if step:
            step(len(bits))
    _write_arrow(dataset, folder)
    about = {
        "format": "speculators",
        "final_state": "divided by the norm's weight" if norm else "pre_norm",
        "sequences": len(dataset),
    }
    # A state divided by the norm's weight is before the norm in form: importing it applies the norm again.
    write_note(folder, dataset.contract, dataset.fingerprint, about)
    return len(dataset)


def _norm(dataset: Dataset, verifier: str | None) -> FinalNorm | None:
    state = dataset.contract.final_state
    if state == "pre_norm":
        return None
    if state == "absent":
        raise ContractMismatch(
            f"{dataset.uri}: has no final states, and speculators trains on them; extract them again"
        )
    if verifier is None:
        raise ContractMismatch(
            f"{dataset.uri}: its final states are after the last norm, speculators' are before it; give --verifier DIR, whose "
            "norm's weight will be divided out"
        )
    norm = FinalNorm.from_verifier(verifier)
    norm.require_size(dataset.contract.hidden_size)
    return norm


def _write_arrow(dataset: Dataset, folder: Path) -> None:
    """The Arrow dataset as `datasets.save_to_disk` writes it, in torch format."""
    features: dict[str, Any] = {
        "input_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
        "loss_mask": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
        "seq_len": {"dtype": "int64", "_type": "Value"},
    }
    schema = pa.schema(
        [("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    temporary = folder / f".tmp-{_ARROW}"
    sha = hashlib.sha256()
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for low in range(0, len(dataset), _ROWS_A_BATCH):
            rows = [dataset.tokens(index) for index in range(low, min(low + _ROWS_A_BATCH, len(dataset)))]
            for ids, _ in rows:
                sha.update(ids.tobytes())
            columns = [
                pa.array([ids.astype(np.int64) for ids, _ in rows], schema.field(0).type),
                pa.array([mask.astype(np.int64) for _, mask in rows], schema.field(1).type),
                pa.array([len(ids) for ids, _ in rows], pa.int64()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    temporary.replace(folder / _ARROW)
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    write_whole(folder / "dataset_info.json", json.dumps(info, indent=2).encode())
    state = {
        "_data_files": [{"filename": _ARROW}],
        "_fingerprint": sha.hexdigest()[:16],
        "_format_columns": list(features),
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    write_whole(folder / "state.json", json.dumps(state, indent=2).encode())
