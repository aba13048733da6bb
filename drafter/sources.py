"""What a training run reads: a sealed dataset, a draft vocabulary, a few tensors of the verifier, checked to belong together."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError
from drafter.recipe import DrafterSection, TrainingSection
from drafter.sampler import check_lengths
from drafter.verifier_weights import VerifierWeights, read_verifier_weights
from drafter.weights_hash import weights_hash
from storage import Dataset, open_dataset
from storage.errors import ContractMismatch
from storage.objects import ObjectMissing, open_store
from vocab.mapping import HEADER, TENSORS, DraftVocab
from vocab.split import held_out_mask


@dataclass(frozen=True)
class Request:
    """What is asked for. dataset, vocabulary, run: URIs. verifier: a folder on this machine.

    held_out, split_seed: share of prompt groups that are never trained on. layer_ids: the server's numbers for the
    captured layers, where they are not those of the decoder outputs (`drafter.export.export_sglang`). owner: names the
    driver that asks, to all its workers (`drafter.run.Run.take_over`).
    """

    dataset: str
    vocabulary: str
    run: str
    verifier: str
    drafter: DrafterSection = field(default_factory=DrafterSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    held_out: float = 0.02
    split_seed: int = 0
    layer_ids: tuple[int, ...] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    owner: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True)
class Sources:
    """What training reads, checked against each other. training_rows, held_rows: rows of the dataset, ascending."""

    dataset: Dataset
    vocabulary: DraftVocab
    training_rows: NDArray[np.int64]
    held_rows: NDArray[np.int64]

    def identity(self, request: Request) -> dict[str, Any]:
        """What makes a run what it is: with any of these different, the same checkpoint cannot be carried on."""
        return {
            "dataset": self.dataset.fingerprint,
            "contract": self.dataset.contract.hash,
            "draft_vocabulary": self.vocabulary.hash,
            "verifier_weights": self.dataset.contract.weights_hash,
            "drafter": request.drafter.model_dump(mode="json"),
            "training": request.training.learnt(),
            "evaluation": {"held_out": request.held_out, "seed": request.split_seed},
        }


def open_sources(request: Request) -> Sources:
    """Opens dataset and draft vocabulary, and checks that there is something to train on, in sequences that fit.

    Raises StatehouseError: no dataset, one that is not sealed, a draft vocabulary that is not there or of another
    verifier, no loss tokens, a sequence longer than a micro-batch.
    """
    dataset = open_dataset(request.dataset)
    contract = dataset.contract
    if contract.final_state != "post_norm":
        raise DrafterError(
            f"{dataset.uri}: final_state: expected post_norm, which the verifier's lm_head reads, "
            f"found {contract.final_state}; extract the dataset with it"
        )
    vocabulary = _open_vocabulary(request.vocabulary, dataset)
    sequences = dataset.sequences
    held = held_out_mask(sequences["group"].to_pylist(), request.held_out, request.split_seed)
    loss_tokens = sequences["loss_tokens"].to_numpy()
    # A row counts where two tokens in a row bear loss (drafter.loss): a sequence with fewer teaches nothing.
    teaches = loss_tokens >= 2
    if not (teaches & ~held).any():
        raise DrafterError(
            f"{dataset.uri}: no loss tokens to train on: {len(sequences)} sequences, {int(held.sum())} of them held out, "
            f"and no other with two loss tokens or more; check the prompts' loss masks, or lower evaluation.held_out"
        )
    rows = np.flatnonzero(teaches & ~held), np.flatnonzero(teaches & held)
    check_lengths(sequences["length"].to_numpy()[teaches], request.training.micro_batch_tokens)
    return Sources(dataset, vocabulary, rows[0].astype(np.int64), rows[1].astype(np.int64))


def _open_vocabulary(uri: str, dataset: Dataset) -> DraftVocab:
    store, parts = open_store(uri), {}
    try:
        for name in (TENSORS, HEADER):
            parts[name] = store.get(name)
    except ObjectMissing as error:
        raise DrafterError(
            f"{error}: no draft vocabulary; make one with `python -m ray_jobs.coverage RECIPE`"
        ) from None
    vocabulary = DraftVocab.from_bytes(parts, store.uri)
    contract = dataset.contract
    made_for = {"vocab_size": vocabulary.vocab_size, **(vocabulary.provenance.get("verifier") or {})}
    for name, found in made_for.items():
        expected = getattr(contract, name, found)
        if found != expected:
            raise ContractMismatch(
                f"{store.uri}: a draft vocabulary of another verifier: {name}: expected {expected}, as {dataset.uri} has "
                f"it, found {found}; make one for this dataset with `python -m ray_jobs.coverage RECIPE`"
            )
    return vocabulary


def open_verifier_weights(folder: str, dataset: Dataset) -> VerifierWeights:
    """Embedding, lm_head and norm of the verifier that made the dataset. Raises StatehouseError for another one."""
    found = weights_hash(Path(folder))
    expected = dataset.contract.weights_hash
    if found != expected:
        raise ContractMismatch(
            f"{folder}: weights_hash: expected {expected[:12]}, of the verifier that made {dataset.uri}, "
            f"found {found[:12]}; point verifier.model at {dataset.contract.verifier}"
        )
    return read_verifier_weights(folder)
