"""Several datasets as one: weights, and a filter over the sequences of each. No copy is made.

>>> mixture = open_mixture(
...     [
...         Part("s3://hidden-states/kimi-k25-chat", weight=0.5),
...         Part("s3://hidden-states/kimi-k25-code", where=Filter(sources=("code",), max_length=4096)),
...     ]
... )  # doctest: +SKIP

Contracts must agree in every field that must match. A sequence that lies in several datasets counts once, where it is met
first; quarantined sequences are left out, as by any reader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.contract import Contract, sha256_json
from storage.errors import ContractMismatch, StatehouseError
from storage.reader import Dataset, open_dataset
from storage.states import States
from storage.stream import read_ahead


@dataclass(frozen=True)
class Filter:
    """Which sequences of a dataset are used; what is left out does not restrict.

    Lengths are in tokens, bounds included. ids and without: sequence ids (32 hex digits), or a file with one on each line.
    """

    sources: Sequence[str] | None = None
    min_length: int | None = None
    max_length: int | None = None
    min_loss_tokens: int | None = None
    ids: Sequence[str] | str | Path | None = None
    without: Sequence[str] | str | Path | None = None

    def keep(self, sequences: pa.Table, where: str) -> np.ndarray:
        """bool [n] over the rows of PLAN_SCHEMA. Raises StatehouseError for a source or an id that is not there."""
        kept = np.ones(len(sequences), bool)
        if self.sources is not None:
            known = set(pc.unique(sequences["source"]).to_pylist())
            if unknown := sorted(set(self.sources) - known):
                raise StatehouseError(f"{where}: no source {unknown[0]!r}; it has {', '.join(sorted(known))}")
            kept &= pc.is_in(sequences["source"], pa.array(list(self.sources), pa.string())).to_numpy(
                zero_copy_only=False
            )
        length, loss = sequences["length"].to_numpy(), sequences["loss_tokens"].to_numpy()
        if self.min_length is not None:
            kept &= length >= self.min_length
        if self.max_length is not None:
            kept &= length <= self.max_length
        if self.min_loss_tokens is not None:
            kept &= loss >= self.min_loss_tokens
        if self.ids is not None:
            listed = _ids(self.ids)
            found = pc.is_in(sequences["id"], listed).to_numpy(zero_copy_only=False)
            if int(found.sum()) < len(listed):
                there = set(sequences["id"].to_pylist())
                lost = next(key for key in listed.to_pylist() if key not in there)
                raise StatehouseError(f"{where}: no sequence {lost} (of {len(listed)} ids listed); check the list")
            kept &= found
        if self.without is not None:
            kept &= ~pc.is_in(sequences["id"], _ids(self.without)).to_numpy(zero_copy_only=False)
        return kept


def _ids(listed: Sequence[str] | str | Path) -> pa.Array:
    if isinstance(listed, (str, Path)):
        try:
            listed = Path(listed).read_text().split()
        except OSError as error:
            raise StatehouseError(
                f"{listed}: {error.strerror}; expected a file with a sequence id on each line"
            ) from None
    return pa.array(sorted(set(listed)), pa.string())


@dataclass(frozen=True)
class Part:
    """weight: how often an epoch passes over these sequences; 0.5 takes a half that changes with every epoch."""

    uri: str
    weight: float = 1.0
    where: Filter = Filter()


class Mixture:
    """Sequences of several datasets, numbered through. Use `open_mixture`.

    `sequences`: PLAN_SCHEMA with `dataset` (index into `datasets`) and `row` (index into that dataset's sequences).
    """

    def __init__(self, datasets: Sequence[Dataset], parts: Sequence[Part]) -> None:
        if not parts:
            raise StatehouseError("a mixture needs at least one dataset")
        self.datasets, self.parts = list(datasets), list(parts)
        first = self.datasets[0]
        differing = [
            f"{dataset.uri}: {'; '.join(found)}"
            for dataset in self.datasets[1:]
            if (found := first.contract.differences(dataset.contract))
        ]
        if differing:
            raise ContractMismatch(
                f"these datasets cannot be used together with {first.uri}, their contracts differ in {' | '.join(differing)}"
            )
        seen: set[str] = set()
        tables = []
        self.duplicates = 0
        for number, (dataset, part) in enumerate(zip(self.datasets, self.parts, strict=True)):
            if part.weight <= 0:
                raise StatehouseError(
                    f"{part.uri}: weight {part.weight:g}, expected more than 0; leave the dataset out"
                )
            kept = np.flatnonzero(part.where.keep(dataset.sequences, dataset.uri)).tolist()
            ids, rows = dataset.sequences["id"].to_pylist(), []
            for row in kept:
                if ids[row] in seen:
                    self.duplicates += 1
                else:
                    rows.append(row)
                    seen.add(ids[row])
            if not rows:
                why = "is new: they lie in the datasets before it" if kept else "is left by its filter"
                raise StatehouseError(
                    f"{part.uri}: no sequence of {len(dataset)} {why}; widen the filter or leave the dataset out"
                )
            table = dataset.sequences.take(rows)
            table = table.append_column("dataset", pa.array(np.full(len(rows), number, np.int32)))
            tables.append(table.append_column("row", pa.array(rows, pa.int32())))
        self.sequences = pa.concat_tables(tables)
        self._dataset = self.sequences["dataset"].to_numpy()
        self._row = self.sequences["row"].to_numpy()

    @property
    def contract(self) -> Contract:
        return self.datasets[0].contract

    @property
    def fingerprint(self) -> str:
        """Names the content: datasets, weights, chosen sequences. Raises DatasetNotSealed."""
        chosen = hashlib.sha256("\n".join(self.sequences["id"].to_pylist()).encode()).hexdigest()
        parts = [[d.fingerprint, p.weight] for d, p in zip(self.datasets, self.parts, strict=True)]
        return sha256_json({"parts": parts, "sequences": chosen})

    def __len__(self) -> int:
        return len(self.sequences)

    def place(self, index: int) -> tuple[Dataset, int]:
        """The dataset of a sequence and its row there. Raises IndexError."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self.datasets[int(self._dataset[index])], int(self._row[index])

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """token_ids [T] int32 and loss_mask [T] bool of one sequence."""
        dataset, row = self.place(index)
        return dataset.tokens(row)

    def read(self, index: int) -> States:
        """One sequence. Raises IndexError, ShardCorrupt, StoreError."""
        dataset, row = self.place(index)
        return dataset.read(row)

    def stream(self, order: Sequence[int], **options: Any) -> Iterator[States]:
        """Sequences in `order`, read ahead across the datasets. options: those of `Dataset.stream`."""
        return read_ahead([self.place(index) for index in order], **options)

    def epoch(self, epoch: int, seed: int = 0) -> np.ndarray:
        """Indices of one epoch in random order: [n] int64. A pure function of (mixture, epoch, seed).

        A part of weight w contributes each sequence floor(w) times, and a share of w - floor(w) of its sequences once more;
        over epochs that share walks through the part, so that all its sequences come up equally often.
        """
        chosen = []
        for number, part in enumerate(self.parts):
            members = np.flatnonzero(self._dataset == number)
            whole, share = int(part.weight), part.weight - int(part.weight)
            chosen += [members] * whole
            if share:
                shuffled = np.random.default_rng([seed, number]).permutation(members)
                low, high = (round(share * len(members) * at) for at in (epoch, epoch + 1))
                chosen.append(shuffled[np.arange(low, high) % len(members)])
        together = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        return np.random.default_rng([seed, len(self.parts), epoch]).permutation(together)


def open_mixture(parts: Sequence[Part | str]) -> Mixture:
    """Opens several sealed datasets as one; a URI alone stands for all its sequences, once an epoch.

    Raises ContractMismatch listing the fields that differ, StatehouseError for a filter that leaves nothing, and whatever
    `open_dataset` raises.
    """
    given = [part if isinstance(part, Part) else Part(part) for part in parts]
    return Mixture([open_dataset(part.uri) for part in given], given)
