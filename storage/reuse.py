"""Reusing states: sequences that already lie in sealed, contract-equal datasets need not be extracted again.

Sequences are identified by their content, so the same conversation in another dataset is the same id. `find_reusable`
says which of a plan's sequences are there, `fill_reusable` writes every shard that needs no verifier, and
`Sources.complete` puts together a shard of which some sequences are known, in the worker that extracts the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from storage.codecs import codec_by_name
from storage.contract import Contract
from storage.errors import ShardCorrupt
from storage.plan import Plan, WorkUnit
from storage.reader import Dataset, open_dataset
from storage.teacher import NONE, TeacherSummary, join, topk_of
from storage.writer import ShardWriter, Written


@dataclass(frozen=True)
class Place:
    """Where the states of one sequence lie. Small, so that it can be sent to the process that copies them."""

    uri: str
    fingerprint: str
    row: int
    id: str


class Sources:
    """Datasets that states are copied from, opened when first needed. Safe to share between threads."""

    def __init__(self) -> None:
        self._datasets: dict[str, Dataset] = {}
        self._lock = Lock()

    def add(self, dataset: Dataset) -> None:
        self._datasets[dataset.uri] = dataset

    def dataset(self, uri: str) -> Dataset:
        with self._lock:
            if uri not in self._datasets:
                self._datasets[uri] = open_dataset(uri)
            return self._datasets[uri]

    def read(self, place: Place, out_TLH: np.ndarray) -> None:
        """bf16 bits of one sequence into uint16 [T, L, H]. Raises ShardCorrupt when something else lies there now."""
        dataset = self.dataset(place.uri)
        if dataset.fingerprint != place.fingerprint or dataset.sequences["id"][place.row].as_py() != place.id:
            raise ShardCorrupt(
                f"{place.uri}: sealed anew while its states were reused (fingerprint {dataset.fingerprint[:12]}, was "
                f"{place.fingerprint[:12]}); run the same command again"
            )
        dataset.read(place.row, out=out_TLH)

    def complete(
        self,
        lengths: Sequence[int],
        known: Mapping[int, Place],
        extract: Callable[[list[int]], np.ndarray] | None = None,
    ) -> np.ndarray:
        """States of all sequences of a work unit, in order: uint16 [sum of T, L, H].

        lengths: T of each. known: {index into lengths: where its states lie}. extract(indices): the states of the others,
        uint16 [sum of their T, L, H]; it is not called when there are none. Raises ShardCorrupt, StoreError, and what
        `extract` raises.
        """
        unknown = [at for at in range(len(lengths)) if at not in known]
        extracted = extract(unknown) if unknown and extract is not None else None
        if extracted is not None and not known:
            return extracted
        geometry = self.dataset(next(iter(known.values())).uri).plan.geometry
        bits = np.empty((sum(lengths), geometry.layers, geometry.hidden_size), np.uint16)
        low = taken = 0
        for at, length in enumerate(lengths):
            rows = bits[low : low + length]
            if at in known:
                self.read(known[at], rows)
            else:
                assert extracted is not None
                rows[:] = extracted[taken : taken + length]
                taken += length
            low += length
        return bits

    def complete_teacher(
        self, lengths: Sequence[int], known: Mapping[int, Place], kind: str, extracted: TeacherSummary | None = None
    ) -> TeacherSummary | None:
        """The teacher summary of all sequences of a work unit, as `complete` gives their states; None for kind `none`.

        extracted: that of the sequences that are not known, together, in order.
        """
        if kind == NONE or not known:
            return extracted
        parts, taken = [], 0
        for at, length in enumerate(lengths):
            if at in known:
                found = self.dataset(known[at].uri).teacher(known[at].row)
                assert found is not None  # `find_reusable` has looked
                parts.append(found if topk_of(kind) else TeacherSummary(found.argmax, found.logsumexp))
            else:
                assert extracted is not None
                parts.append(extracted[taken : taken + length])
                taken += length
        return join(parts)


@dataclass
class Reusable:
    """places: {sequence id: where its states lie}. skipped: {uri: why it gives nothing}."""

    sources: Sources = field(default_factory=Sources)
    places: dict[str, Place] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self.places

    def __len__(self) -> int:
        return len(self.places)

    def states(self, sequence_id: str) -> np.ndarray:
        """bf16 bit patterns uint16 [T, L, H] of one sequence. Raises KeyError, ShardCorrupt, StoreError."""
        place = self.places[sequence_id]
        return self.sources.dataset(place.uri).read(place.row).hidden.view(np.uint16)

    def known(self, plan: Plan, unit: WorkUnit) -> dict[int, Place]:
        """{index into the unit's rows: where its states lie} of those that need not be extracted."""
        ids = plan.table["id"].take(unit.rows).to_pylist()
        return {at: self.places[key] for at, key in enumerate(ids) if key in self.places}

    def units(self, plan: Plan) -> Iterator[WorkUnit]:
        """Work units that need no verifier at all."""
        if self.places:
            yield from (unit for unit in plan.units() if len(self.known(plan, unit)) == len(unit.rows))


def find_reusable(
    uris: Iterable[str],
    contract: Contract,
    sequence_ids: Sequence[str],
    *,
    codec: str = "lossless",
    teacher: str = NONE,
) -> Reusable:
    """Which of `sequence_ids` lie in sealed datasets whose contract equals `contract`; of several the first counts.

    codec: the one they will be stored with. States that a codec has rounded serve only for that very codec, and only where
    rounding twice is rounding once (bitround): a dataset says of itself what it lost. teacher: the kind of summary they will
    be stored with; a dataset must have it, or a larger one. Datasets that cannot serve are no
    error: `skipped` says why. Raises whatever `open_dataset` raises: a dataset that is not there is a mistake, not a choice.
    """
    found = Reusable()
    wanted = set(sequence_ids)
    codec = codec_by_name(codec).name
    for uri in uris:
        dataset = open_dataset(uri)
        if differing := dataset.contract.differences(contract):
            found.skipped[uri] = f"the contracts differ in {'; '.join(differing)}"
            continue
        kept = dataset.plan.codec
        if codec_by_name(kept).lossy and not (kept == codec and kept.startswith("bitround")):
            found.skipped[uri] = f"its codec {kept} has lost what codec {codec} promises to keep"
            continue
        if teacher not in (NONE, kind := dataset.plan.teacher) and not (teacher == "argmax" and topk_of(kind)):
            found.skipped[uri] = f"its teacher summary is {kind}, {teacher} is wanted"
            continue
        found.sources.add(dataset)
        fingerprint = dataset.fingerprint
        for row, key in enumerate(dataset.sequences["id"].to_pylist()):
            if key in wanted:
                found.places.setdefault(key, Place(dataset.uri, fingerprint, row, key))
    return found


def origins(known: Mapping[int, Place]) -> dict[str, str | int]:
    """What a receipt's `written_by` says of sequences that were copied; nothing where none were."""
    if not known:
        return {}
    return {
        "reused_sequences": len(known),
        "reused_from": ", ".join(sorted({place.fingerprint[:16] for place in known.values()})),
    }


def fill_reusable(
    writer: ShardWriter,
    plan: Plan,
    reusable: Reusable,
    *,
    units: Iterable[WorkUnit] | None = None,
    done: Callable[[WorkUnit, Written | None], None] | None = None,
    threads: int = 2,
) -> list[int]:
    """Writes every shard of `plan` whose sequences are all known; returns their numbers, adopted ones included.

    units: some of `reusable.units(plan)`, all by default. done(unit, what was written, or None where it was there) is called after each unit.
    Receipts say where the states came from. Memory: `threads` work units. Raises ShardCorrupt, StoreError.
    """
    length = plan.column("length")

    def fill(unit: WorkUnit) -> tuple[WorkUnit, Written | None]:
        if writer.calibrated and writer.find(unit.shard, unit.tokens) is not None:
            return unit, None
        known = reusable.known(plan, unit)
        lengths = length[unit.rows].tolist()
        bits = reusable.sources.complete(lengths, known)
        if not writer.calibrated:
            writer.calibrate(bits)
        teacher = reusable.sources.complete_teacher(lengths, known, plan.teacher)
        return unit, writer.write(unit.shard, bits, len(unit.rows), teacher=teacher, written_by=origins(known))

    shards: list[int] = []
    with ThreadPoolExecutor(threads) as pool:
        for unit, written in pool.map(fill, reusable.units(plan) if units is None else units):
            shards += range(unit.shard, unit.shard + unit.shards)
            if done is not None:
                done(unit, written)
    return shards
