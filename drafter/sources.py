"""What a training run reads: a sealed dataset, a draft vocabulary, a few tensors of the verifier, checked to belong together."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from drafter.errors import DrafterError
from drafter.recipe import DrafterSection, TrainingSection
from drafter.sampler import Rows, check_lengths, cut
from drafter.verifier_weights import VerifierWeights, read_verifier_weights
from drafter.weights_hash import weights_hash
from storage import Dataset, open_dataset
from storage.errors import ContractMismatch
from storage.mix import Filter, Mixture, Part
from storage.objects import ObjectMissing, open_store
from storage.teacher import topk_of
from vocab.mapping import HEADER, TENSORS, DraftVocab
from vocab.split import held_out_mask


@dataclass(frozen=True)
class Request:
    """What is asked for. dataset, vocabulary, run: URIs. verifier: a folder on this machine.

    held_out, split_seed: share of prompt groups that are never trained on. layer_ids: SGLang's numbers for the
    captured layers; as the verifier's family counts them where left out (`drafter.layer_ids`). owner: names the
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


@dataclass(frozen=True, eq=False)
class Items:
    """What can be trained on, numbered from 0: whole sequences, or pieces of long ones.

    row: [I] of the mixture. low: [I] first token of it. length: [I] tokens. shard: [I] numbered over all datasets.
    part: [I] number of its dataset. All int64.
    """

    row: NDArray[np.int64]
    low: NDArray[np.int64]
    length: NDArray[np.int64]
    shard: NDArray[np.int64]
    part: NDArray[np.int64]

    @classmethod
    def of(cls, mixture: Mixture, training: TrainingSection) -> Items:
        """All sequences of the mixture in pieces, less those that are dropped for their length."""
        sequences = mixture.sequences
        row, length = np.arange(len(sequences)), sequences["length"].to_numpy().astype(np.int64)
        if training.max_length is not None and training.long_sequences == "drop":
            row = np.flatnonzero(length <= training.max_length)
        longest = training.max_length or max(1, int(length.max(initial=1)))
        piece, low, tokens = cut(length[row], longest)
        row = row[piece]
        part = sequences["dataset"].to_numpy().astype(np.int64)[row]
        sizes = np.array([dataset.plan.geometry.shards for dataset in mixture.datasets])
        shard = sequences["shard"].to_numpy().astype(np.int64)[row] + (np.cumsum(sizes) - sizes)[part]
        return cls(row.astype(np.int64), low, tokens, shard, part)

    def rows(self, chosen: NDArray[np.int64], weights: tuple[float, ...]) -> Rows:
        """For the sampler, whose row r is item chosen[r]."""
        return Rows(self.length[chosen], self.shard[chosen], self.part[chosen], weights)


@dataclass(frozen=True)
class Sources:
    """What training reads, checked against each other. training_items, held_items: numbers of items, ascending."""

    mixture: Mixture
    vocabulary: DraftVocab
    items: Items
    training_items: NDArray[np.int64]
    held_items: NDArray[np.int64]
    # Numbers of items that are left out, having no two loss tokens.
    untaught: int = 0

    @property
    def dataset(self) -> Dataset:
        """The first one, whose contract all share."""
        return self.mixture.datasets[0]

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(part.weight for part in self.mixture.parts)

    def counts(self, steps: int) -> dict[str, int]:
        """For a run's summary. untaught: pieces that are left out, having no two loss tokens in all. short: pieces that
        are trained on but too short for the last of so many steps; the first ones learn from them.
        """
        return {
            "sequences": self.sequences(self.training_items),
            "held_out_sequences": self.sequences(self.held_items),
            "untaught": self.untaught,
            "short": int((self.items.length[self.training_items] < steps + 2).sum()),
        }

    def said(self, steps: int) -> str:
        """Those of these counts that are out of the ordinary, for a log line."""
        found = {"datasets": len(self.mixture.datasets)} | self.counts(steps)
        odd = {name: found[name] for name in ("untaught", "short") if found[name]}
        if found["datasets"] > 1:
            odd = {"datasets": found["datasets"]} | odd
        return "".join(f" {name}={count}" for name, count in odd.items())

    def sequences(self, items: NDArray[np.int64]) -> int:
        """How many sequences these items are of."""
        return len(np.unique(self.items.row[items]))

    def name_of(self, item: int) -> str:
        """The sequence of an item, for an error that ends with what was found in it."""
        dataset, row = self.mixture.place(int(self.items.row[item]))
        shard = int(dataset.sequences["shard"][row].as_py())
        return (
            f"{dataset.uri}: sequence {dataset.sequences['id'][row].as_py()[:12]} of shard {shard} (make it again with "
            f"`python -m ray_jobs.extract RECIPE --repair --shards {shard}`)"
        )

    def source_of(self, items: NDArray[np.int64]) -> dict[int, str]:
        """{item: source of its sequence}."""
        names = self.mixture.sequences["source"].take(self.items.row[items]).to_pylist()
        return dict(zip(items.tolist(), names, strict=True))

    def identity(self, request: Request) -> dict[str, Any]:
        """What makes a run what it is: with any of these different, the same checkpoint cannot be carried on."""
        return {
            "dataset": self.dataset.fingerprint,
            # In the order in which their sequences are numbered, which `Run.claim` compares, too.
            "datasets": {
                one.fingerprint: part.weight
                for one, part in zip(self.mixture.datasets, self.mixture.parts, strict=True)
            },
            "contract": self.dataset.contract.hash,
            "draft_vocabulary": self.vocabulary.hash,
            "verifier_weights": self.dataset.contract.weights_hash,
            "drafter": request.drafter.model_dump(mode="json"),
            "training": request.training.learnt(),
            "evaluation": {"held_out": request.held_out, "seed": request.split_seed},
        }

    def where(self) -> list[dict[str, Any]]:
        """Of each dataset: where it was found, its fingerprint, its sequences that are used. For a run's provenance."""
        used = np.bincount(self.items.part, minlength=len(self.mixture.datasets))
        return [
            {"uri": one.uri, "fingerprint": one.fingerprint, "weight": part.weight, "items": int(count)}
            for one, part, count in zip(self.mixture.datasets, self.mixture.parts, used, strict=True)
        ]


def open_sources(request: Request, open_one: Callable[[str], Dataset] = open_dataset) -> Sources:
    """Opens datasets and draft vocabulary, and checks that there is something to train on, in sequences that fit.

    open_one: opens a dataset, through a cache for instance. Raises StatehouseError: no dataset, one that is not sealed,
    contracts that differ, a draft vocabulary that is not there or of another verifier, no loss tokens, a sequence
    longer than a micro-batch.
    """
    mixture = _open_mixture(request, open_one)
    uri = mixture.datasets[0].uri
    _require_teacher(mixture)
    vocabulary = _open_vocabulary(request.vocabulary, mixture.datasets[0])
    items = Items.of(mixture, request.training)
    if not len(items.row):
        raise DrafterError(
            f"{uri}: training.max_length is {request.training.max_length}, and all {len(mixture.sequences)} sequences are "
            f"longer; raise it, or set training.long_sequences=split"
        )
    held = held_out_mask(mixture.sequences["group"].to_pylist(), request.held_out, request.split_seed)[items.row]
    # A row counts where two tokens in a row bear loss (drafter.loss): a sequence with fewer teaches nothing.
    teaches = (mixture.sequences["loss_tokens"].to_numpy() >= 2)[items.row]
    if not (teaches & ~held).any():
        raise DrafterError(
            f"{uri}: no loss tokens to train on: {len(items.row)} sequences, {int(held.sum())} of them held out, "
            f"and no other with two loss tokens or more; check the prompts' loss masks, or lower evaluation.held_out"
        )
    if not (teaches & held).any():
        _require_no_judge(request.training, uri)
    training, held_out = (np.flatnonzero(teaches & side).astype(np.int64) for side in (~held, held))
    check_lengths(items.length[teaches], request.training.micro_batch_tokens)
    return Sources(mixture, vocabulary, items, training, held_out, int((~teaches).sum()))


def _require_no_judge(training: TrainingSection, uri: str) -> None:
    """Raises DrafterError for settings that go by the held-out loss, where there is none."""
    if training.export == "best" or training.patience is not None:
        name = "export: expected last" if training.export == "best" else "patience: expected none"
        raise DrafterError(
            f"training.{name}, since none of the sequences of {uri} is held out to judge by; raise evaluation.held_out"
        )


def _require_teacher(mixture: Mixture) -> None:
    """Raises DrafterError unless every dataset says what the verifier would: by final states, or all by one top-k."""
    contract, kinds = mixture.contract, {dataset.plan.teacher: dataset.uri for dataset in mixture.datasets}
    if contract.final_state != "absent":
        return
    uri = mixture.datasets[0].uri
    if not all(map(topk_of, kinds)):
        raise DrafterError(
            f"{uri}: final_state: expected final states, or a stored top-k in their place, found none with teacher "
            f"{', '.join(sorted(kinds))}; extract the dataset again with extraction.layers=all, or with "
            f"extraction.teacher=topk(k)"
        )
    if len(kinds) > 1:
        said = ", ".join(f"{kind} of {where}" for kind, where in sorted(kinds.items()))
        raise DrafterError(f"{uri}: teacher: expected one top-k for all datasets, found {said}; train on those of one")


def _open_mixture(request: Request, open_one: Callable[[str], Dataset]) -> Mixture:
    """request.dataset with the others of training.datasets. Raises StatehouseError."""
    named = {open_store(request.dataset).uri: 1.0}
    for one in request.training.datasets:
        named[open_store(one.uri).uri] = one.weight  # the first one may be named again, to weigh it
    datasets = [open_one(uri) for uri in named]
    wanted = request.training.filter
    known = [set(pc.unique(dataset.sequences["source"]).to_pylist()) for dataset in datasets]
    if unknown := sorted(set(wanted.sources or ()) - set().union(*known)):
        raise DrafterError(
            f"training.filter.sources: expected some of {', '.join(sorted(set().union(*known)))}, found {unknown[0]!r}"
        )
    parts = []
    for (uri, weight), here in zip(named.items(), known, strict=True):
        sources = None if wanted.sources is None else tuple(name for name in wanted.sources if name in here)
        where = Filter(sources=sources, min_length=wanted.min_length, max_length=wanted.max_length)
        parts.append(Part(uri, weight, where))
    return Mixture(datasets, parts)


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
