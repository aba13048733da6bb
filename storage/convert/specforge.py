"""SpecForge's offline features: one torch file a sample, `data_*.ckpt` or `.ckpt.gz`, in any folders below.

    input_ids [S] int64, loss_mask [S] int64, aux_hidden_state [1, S, K * H], hidden_state [1, S, H] after the last norm

torch is imported here only, and only unpickles tensors (`weights_only=True`).
"""

from __future__ import annotations

import gzip
import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

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
from storage.errors import ContractMismatch, ShardCorrupt, StatehouseError
from storage.reader import Dataset
from storage.sequences import Sequence

_KEYS = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
# SpecForge's loader sorts paths; folders of this many keep a listing quick (its users waited 1.7 hours for one).
_FILES_A_FOLDER = 2000


def import_specforge(
    folder: str | Path,
    uri: str,
    *,
    contract: str | None = None,
    codec: str = "lossless",
    source: str = "specforge",
    skip_bad: bool = False,
    verify: bool = True,
    step: Step | None = None,
) -> Imported:
    """Converts a folder of SpecForge features to a sealed dataset. contract: see `load_contract`.

    skip_bad: leave files out that cannot be read, and say so. Raises StatehouseError, ContractMismatch when the contract's
    final state is not the one after the norm, PlanConflict when the URI holds something else.
    """
    folder = Path(folder)
    terms = load_contract(contract, folder)
    if terms.final_state != "post_norm":
        raise ContractMismatch(
            f"{folder}: SpecForge's hidden_state is the final state after the last norm, the contract says "
            f"final_state {terms.final_state!r}; give a contract with 'post_norm'"
        )
    paths = sorted([*folder.rglob("*.ckpt"), *folder.rglob("*.ckpt.gz")])
    if not paths:
        raise StatehouseError(f"{folder}: no *.ckpt or *.ckpt.gz below it; give the folder of SpecForge's features")
    files = ((path, partial(_sample, path, terms, source)) for path in paths)
    origin = {"format": "specforge", "folder": str(folder.absolute())}
    return import_samples(files, uri, terms, codec, origin, skip_bad=skip_bad, verify=verify, step=step)


def _sample(path: Path, contract: Contract, source: str) -> Sample:
    data = load_features(path)
    ids = data["input_ids"].reshape(-1)
    if ids.is_floating_point() or ids.is_complex():
        raise ShardCorrupt(f"{path}: input_ids of {ids.dtype}, expected whole numbers; make it again or leave it out")
    token_ids = to_token_ids(ids.numpy(), str(path))
    loss_mask = (data["loss_mask"].reshape(-1) != 0).numpy()
    if loss_mask.shape != token_ids.shape:
        raise ShardCorrupt(
            f"{path}: loss_mask of {len(loss_mask)}, its input_ids are {len(token_ids)}; make it again or leave it out"
        )
    expected = {
        "aux_hidden_state": [len(token_ids), len(contract.capture_layers) * contract.hidden_size],
        "hidden_state": [len(token_ids), contract.hidden_size],
    }
    for name, shape in expected.items():
        found = list(data[name].shape)
        if found[-2:] != shape or (len(found) == 3 and found[0] != 1) or len(found) not in (2, 3):
            raise StatehouseError(
                f"{path}: {name} has shape {found}, its {len(token_ids)} tokens and the contract's "
                f"{len(contract.capture_layers)} layers of {contract.hidden_size} make {[1, *shape]}; correct the contract"
            )
    sequence = Sequence(source, prompt_group(token_ids, loss_mask), token_ids, loss_mask)
    return Sample(sequence, partial(_states, path, contract))


def _states(path: Path, contract: Contract) -> np.ndarray:
    data = load_features(path)
    layers, hidden_size = len(contract.capture_layers), contract.hidden_size
    aux = _bits(data["aux_hidden_state"], path).reshape(-1, layers, hidden_size)
    final = _bits(data["hidden_state"], path).reshape(-1, 1, hidden_size)
    return np.concatenate([aux, final], axis=1)


def _bits(tensor: Any, path: Path) -> np.ndarray:
    torch = _torch()
    if tensor.dtype != torch.bfloat16:
        raise StatehouseError(
            f"{path}: states of {tensor.dtype}, and a dataset keeps bfloat16; convert the features to torch.bfloat16 first"
        )
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def load_features(path: Path) -> dict[str, Any]:
    """The tensors of one file. Raises ShardCorrupt when it is truncated or something else, StatehouseError without torch."""
    torch = _torch()
    try:
        if path.suffix == ".gz":
            data = torch.load(io.BytesIO(gzip.decompress(path.read_bytes())), map_location="cpu", weights_only=True)
        else:
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch, its unpickler, zip and gzip each raise their own kinds for a damaged file
        what = " ".join(str(error).split())[:160] or type(error).__name__
        raise ShardCorrupt(
            f"{path}: cannot be read (truncated?): {what}; make it again, or leave such files out with --skip-bad"
        ) from None
    if not isinstance(data, dict) or any(not isinstance(data.get(key), torch.Tensor) for key in _KEYS):
        raise ShardCorrupt(f"{path}: expected a dict of the tensors {', '.join(_KEYS)}; leave it out with --skip-bad")
    return data


def export_specforge(
    dataset: Dataset,
    folder: str | Path,
    *,
    compress: bool = False,
    verifier: str | None = None,
    step: Step | None = None,
) -> int:
    """Writes every sequence as SpecForge's features; returns the number of files. Files that are there are kept.

    verifier: folder with the last norm, needed when the dataset's final state is before it.
    Every file is read back and compared. Raises ContractMismatch when the dataset has no final state.
    """
    torch = _torch()
    folder, contract = Path(folder), dataset.contract
    norm = _norm(dataset, verifier)
    suffix = ".ckpt.gz" if compress else ".ckpt"
    for index in range(len(dataset)):
        low = index // _FILES_A_FOLDER * _FILES_A_FOLDER
        path = folder / f"rows_{low}-{low + _FILES_A_FOLDER}" / f"data_{index}{suffix}"
        states = dataset.read(index)
        bits = states.hidden.view(np.uint16)
        final = bits[:, -1] if norm is None else norm.apply(np.ascontiguousarray(bits[:, -1]))
        tensors = {
            "input_ids": torch.from_numpy(states.token_ids.astype(np.int64)),
            "loss_mask": torch.from_numpy(states.loss_mask.astype(np.int64)),
            "aux_hidden_state": _tensor(bits[:, :-1].reshape(1, len(bits), -1)),
            "hidden_state": _tensor(final[None]),
        }
        if not path.exists():
            buffer = io.BytesIO()
            torch.save(tensors, buffer)
            data = buffer.getvalue()
            write_whole(path, gzip.compress(data, 6, mtime=0) if compress else data)
        found = load_features(path)
        # As bits: NaN is not equal to itself.
        if any(found[key].shape != value.shape or not _equal(found[key], value) for key, value in tensors.items()):
            raise ShardCorrupt(
                f"{path}: does not hold sequence {states.id}; delete the file and run the same command again"
            )
        if step:
            step(len(bits))
    about = {"format": "specforge", "final_state": "post_norm", "sequences": len(dataset)}
    write_note(folder, contract.model_copy(update={"final_state": "post_norm"}), dataset.fingerprint, about)
    return len(dataset)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise StatehouseError("SpecForge's files need torch to be read and written; pip install torch") from None
    return torch


def _norm(dataset: Dataset, verifier: str | None) -> FinalNorm | None:
    state = dataset.contract.final_state
    if state == "post_norm":
        return None
    if state == "absent":
        raise ContractMismatch(f"{dataset.uri}: has no final states, and SpecForge trains on them; extract them again")
    if verifier is None:
        raise ContractMismatch(
            f"{dataset.uri}: its final states are before the last norm, SpecForge's are after it; give --verifier DIR, "
            "whose norm will be applied"
        )
    norm = FinalNorm.from_verifier(verifier)
    norm.require_size(dataset.contract.hidden_size)
    return norm


def _tensor(bits: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


def _equal(one: Any, two: Any) -> bool:
    import torch

    if one.dtype == two.dtype == torch.bfloat16:
        one, two = one.view(torch.int16), two.view(torch.int16)
    return bool(torch.equal(one, two))
