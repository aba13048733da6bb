"""Reusing states: sequences that already lie in sealed, contract-equal datasets need not be extracted again.

Sequences are identified by their content, so the same conversation in another dataset is the same id. `find_reusable`
says which of a plan's sequences are there; `fill_reusable` writes every shard that needs no verifier; for the others
`Reusable.states` gives what is known, sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from storage.codecs import codec_by_name
from storage.contract import Contract
from storage.errors import StatehouseError
from storage.plan import Plan, WorkUnit
from storage.reader import Dataset, open_dataset
from storage.writer import ShardWriter


@dataclass
class Reusable:
    """places: {sequence id: (dataset, row)}. skipped: {uri: why it gives nothing}."""

    places: dict[str, tuple[Dataset, int]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self.places

    def __len__(self) -> int:
        return len(self.places)

    def states(self, sequence_id: str) -> np.ndarray:
        """bf16 bit patterns uint16 [T, L, H] of one sequence. Raises KeyError, ShardCorrupt, StoreError."""
        dataset, row = self.places[sequence_id]
        return dataset.read(row).hidden.view(np.uint16)

    def split(self, plan: Plan, unit: WorkUnit) -> tuple[list[int], list[int]]:
        """Rows of a work unit whose states are known, and rows to be extracted, both in the unit's order."""
        ids = plan.table["id"]
        known = [int(row) for row in unit.rows if ids[int(row)].as_py() in self.places]
        have = set(known)
        return known, [int(row) for row in unit.rows if int(row) not in have]

    def units(self, plan: Plan) -> Iterator[WorkUnit]:
        """Work units that need no verifier at all."""
        for unit in plan.units():
            if not self.split(plan, unit)[1]:
                yield unit

    def unit_states(self, plan: Plan, unit: WorkUnit) -> np.ndarray:
        """uint16 [rows, L, H] of a whole shard, in the order in which it is stored. Raises KeyError for a gap."""
        ids = plan.table["id"]
        return np.concatenate([self.states(ids[int(row)].as_py()) for row in unit.rows])


def find_reusable(
    uris: Iterable[str], contract: Contract, sequence_ids: Sequence[str], *, codec: str = "lossless"
) -> Reusable:
    """Which of `sequence_ids` lie in sealed datasets whose contract equals `contract`; of several the first counts.

    codec: the one they will be stored with. States that a codec has rounded serve only for that very codec, and only where
    rounding twice is rounding once (bitround): a dataset says of itself what it lost. Datasets that cannot serve are no
    error: `skipped` says why.
    """
    found = Reusable()
    wanted = set(sequence_ids)
    codec = codec_by_name(codec).name
    for uri in uris:
        try:
            dataset = open_dataset(uri)
        except StatehouseError as error:
            found.skipped[uri] = str(error)
            continue
        if differing := dataset.contract.differences(contract):
            found.skipped[uri] = f"the contracts differ in {'; '.join(differing)}"
            continue
        kept = dataset.plan.codec
        if getattr(codec_by_name(kept), "lossy", False) and not (kept == codec and kept.startswith("bitround")):
            found.skipped[uri] = f"its codec {kept} has lost what codec {codec} promises to keep"
            continue
        for row, key in enumerate(dataset.sequences["id"].to_pylist()):
            if key in wanted:
                found.places.setdefault(key, (dataset, row))
    return found


def fill_reusable(writer: ShardWriter, plan: Plan, reusable: Reusable) -> list[int]:
    """Writes every shard of `plan` whose sequences are all known; returns their numbers, adopted ones included.

    Receipts say where the states came from. Memory: one shard. Raises ShardCorrupt, StoreError.
    """
    written: list[int] = []
    for unit in reusable.units(plan):
        if writer.calibrated and writer.find(unit.shard, unit.tokens) is not None:
            written += range(unit.shard, unit.shard + unit.shards)
            continue
        bits = reusable.unit_states(plan, unit)
        if not writer.calibrated:
            writer.calibrate(bits)
        ids = plan.table["id"]
        origins = sorted({reusable.places[ids[int(row)].as_py()][0].fingerprint[:16] for row in unit.rows})
        writer.write(unit.shard, bits, len(unit.rows), written_by={"reused_from": ", ".join(origins)})
        written += range(unit.shard, unit.shard + unit.shards)
    return written
