"""The Ray actor that owns one replica. Hidden states never leave it but for the store."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np

from ray_jobs.inputs import Verifier
from ray_jobs.recipe import Recipe
from ray_jobs.replicas import open_replica
from ray_jobs.replicas.replica import Sampling
from ray_jobs.supervisor import Supervisor, require_resources
from ray_jobs.verifier import resolve_verifier
from storage.errors import ReplicaFailed
from storage.reuse import Place, Sources, origins
from storage.shard import to_bits
from storage.writer import ShardWriter


@dataclass(frozen=True)
class ExtractUnit:
    """One shard: the token ids of its sequences, in the order in which they lie in it.

    known: {index into token_ids: where its states lie already}; the others are prefilled.
    """

    shard: int
    token_ids: list[np.ndarray]
    known: dict[int, Place] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True)
class GenerateUnit:
    prompt_ids: list[str]
    token_ids: list[np.ndarray]
    samplings: list[Sampling]


class ReplicaActor:
    """Two calls may run at once: the engine is behind a lock, so one prefills while the other encodes and stores."""

    def __init__(self, recipe: Recipe, capture_layers: tuple[int, ...]) -> None:
        self._engine = Lock()
        self._writers: dict[str, ShardWriter] = {}
        self._sources = Sources()
        began = perf_counter()
        folder = resolve_verifier(recipe.verifier.model, revision=recipe.verifier.revision)
        config = recipe.extraction.replica
        if recipe.verifier.trust_remote_code:
            config = config.model_copy(update={"args": {**config.args, "trust_remote_code": True}})
        self._replica = open_replica(config, folder, capture_layers)
        self._replica.start()
        self._about = {
            **self._replica.describe(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start_seconds": round(perf_counter() - began, 1),
        }

    def describe(self) -> dict[str, Any]:
        return self._about

    def _writer(self, uri: str) -> ShardWriter:
        if uri not in self._writers:
            self._writers[uri] = ShardWriter.from_uri(uri)
        return self._writers[uri]

    def _prefill(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        """bf16 bit patterns uint16 [sum of lengths, L, H]. Raises ReplicaFailed when a length is wrong."""
        states = self._replica.prefill(batch)
        for index, (token_ids, one) in enumerate(zip(batch, states, strict=True)):
            if len(one) != len(token_ids):
                raise ReplicaFailed(f"sequence {index}: {len(one)} rows of states for {len(token_ids)} tokens")
        return np.concatenate([to_bits(one) for one in states])

    def calibrate(self, uri: str, batch: list[np.ndarray]) -> None:
        with self._engine:
            bits = self._prefill(batch)
        self._writer(uri).calibrate(bits)

    def extract(self, work: tuple[str, ExtractUnit]) -> dict[str, Any]:
        """Prefills, encodes and stores one shard, or adopts the one that another driver stored meanwhile."""
        uri, unit = work
        writer = self._writer(uri)
        with self._engine:
            if (found := writer.find(unit.shard, unit.tokens)) is not None:
                return {"shard": unit.shard, "created": False, "data_bytes": found.data_bytes, "seconds": {}}
            began = perf_counter()
            bits = self._sources.complete(
                [len(ids) for ids in unit.token_ids],
                unit.known,
                lambda wanted: self._prefill([unit.token_ids[at] for at in wanted]),
            )
            seconds = {"prefill": round(perf_counter() - began, 4)}
        about = {**self._about, **origins(unit.known)}
        written = writer.write(unit.shard, bits, len(unit.token_ids), written_by=about, seconds=seconds)
        return {
            "shard": unit.shard,
            "created": written.created,
            "data_bytes": written.receipt.data_bytes,
            "non_finite": written.receipt.non_finite,
            "seconds": written.receipt.seconds,
        }

    def generate(self, unit: GenerateUnit) -> list[tuple[np.ndarray, str]]:
        """(token ids, finish reason) of each prompt's response."""
        with self._engine:
            responses = self._replica.generate(unit.token_ids, unit.samplings)
        return [(np.asarray(response.token_ids, np.int32), response.finish_reason) for response in responses]

    def stop(self) -> None:
        self._replica.stop()


def replicas_of(recipe: Recipe, verifier: Verifier) -> Supervisor:
    """A supervisor of ReplicaActors with the CPUs and GPUs of the recipe. Needs Ray.

    Raises ReplicaFailed when the cluster cannot hold them.
    """
    import ray

    require_resources(recipe.extraction)
    config = recipe.extraction.replica
    actor = ray.remote(num_cpus=config.cpus, num_gpus=config.gpus, max_concurrency=2, max_restarts=0)(ReplicaActor)
    return Supervisor(lambda: actor.remote(recipe, verifier.capture_layers), recipe.extraction)
