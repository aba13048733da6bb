"""Work units: what a replica actor is handed. Plain values, small enough to be sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ray_jobs.replicas.replica import Sampling
from ray_jobs.thinking import Budget
from storage.reuse import Place


@dataclass(frozen=True)
class ProbeUnit:
    """Some sequences of a unit, to be prefilled and stored nowhere. rows: their indices in that unit."""

    rows: tuple[int, ...]
    token_ids: list[np.ndarray]


@dataclass(frozen=True)
class ExtractUnit:
    """One shard, or a run of shards: the token ids of its sequences, in the order in which they lie in it.

    known: {index into token_ids: where its states lie already}; quarantined: {index: why} of those that are given up; the
    others are prefilled. check: indices of those that another replica forwards, too.
    """

    uri: str
    shard: int
    ids: list[str]
    token_ids: list[np.ndarray]
    known: Mapping[int, Place] = field(default_factory=dict)
    quarantined: Mapping[int, str] = field(default_factory=dict)
    check: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def suspects(self) -> list[int]:
        return [at for at in range(len(self.token_ids)) if at not in self.known and at not in self.quarantined]

    def part(self, rows: Sequence[int]) -> ProbeUnit:
        return ProbeUnit(tuple(rows), [self.token_ids[row] for row in rows])

    def without(self, reasons: Mapping[int, str]) -> ExtractUnit:
        return replace(self, quarantined={**self.quarantined, **reasons})

    def to_check(self) -> list[int]:
        return [at for at in self.check if at in self.suspects()]


@dataclass(frozen=True)
class CalibrationUnit:
    """Sequences whose states calibrate the exponent offsets. What cannot be extracted is left out."""

    uri: str
    token_ids: list[np.ndarray]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def suspects(self) -> list[int]:
        return [at for at, ids in enumerate(self.token_ids) if len(ids)]

    def part(self, rows: Sequence[int]) -> ProbeUnit:
        return ProbeUnit(tuple(rows), [self.token_ids[row] for row in rows])

    def without(self, reasons: Mapping[int, str]) -> CalibrationUnit:
        kept = [ids[:0] if at in reasons else ids for at, ids in enumerate(self.token_ids)]
        return replace(self, token_ids=kept)

    def to_check(self) -> list[int]:
        return []


@dataclass(frozen=True)
class GenerateUnit:
    """Prompts to be answered. key: what its files at `uri` are named after. hashes: of the settings of each prompt.

    quarantined: {index: why} of those that are given up.
    """

    uri: str
    key: str
    prompt_ids: list[str]
    token_ids: list[np.ndarray]
    samplings: list[Sampling]
    budgets: list[Budget | None]
    hashes: list[str]
    quarantined: Mapping[int, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(len(ids) + one.max_new_tokens for ids, one in zip(self.token_ids, self.samplings, strict=True))

    def suspects(self) -> list[int]:
        return [at for at in range(len(self.prompt_ids)) if at not in self.quarantined]

    def part(self, rows: Sequence[int]) -> GenerateUnit:
        """The same unit with these prompts only; what is answered of it counts for the whole."""
        return GenerateUnit(
            self.uri,
            self.key,
            [self.prompt_ids[row] for row in rows],
            [self.token_ids[row] for row in rows],
            [self.samplings[row] for row in rows],
            [self.budgets[row] for row in rows],
            [self.hashes[row] for row in rows],
        )

    def without(self, reasons: Mapping[int, str]) -> GenerateUnit:
        return replace(self, quarantined={**self.quarantined, **reasons})

    def to_check(self) -> list[int]:
        return []
