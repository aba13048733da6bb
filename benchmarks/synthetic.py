"""A replica that produces states at a set rate without any model: what a job costs beside the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.corpus import synthetic_states
from ray_jobs.recipe import Recipe
from ray_jobs.replicas.replica import Forwarded, Generation, Heard, Replica, Sampling, unheard
from ray_jobs.verifier import VerifierShape
from ray_jobs.worker import ReplicaActor
from storage.teacher import TeacherSummary

LAYERS, HIDDEN, VOCAB = 4, 7168, 163840


class SyntheticReplica(Replica):
    """States of real ones' statistics, cut from one block of memory. rate: tokens a second; 0 as fast as they can be cut."""

    shape = VerifierShape(vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=61)
    longest = 1 << 20

    def __init__(self, rate: float, block: int) -> None:
        self.rate, self.block = rate, block

    def start(self) -> None:
        import ml_dtypes

        self._states = synthetic_states(self.block).view(ml_dtypes.bfloat16)

    def forward(self, batch: Sequence[np.ndarray]) -> list[Forwarded]:
        began, tokens = time.perf_counter(), sum(map(len, batch))
        made = []
        for ids in batch:
            at = int(ids[0]) % max(1, self.block - len(ids))
            made.append(
                Forwarded(
                    self._states[at : at + len(ids)],
                    TeacherSummary(np.asarray(ids, np.int32), np.ones(len(ids), np.float32)),
                )
            )
        if self.rate:
            time.sleep(max(0.0, tokens / self.rate - (time.perf_counter() - began)))
        return made

    def generate(
        self, prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], heard: Heard = unheard
    ) -> list[Generation]:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return {"engine": "synthetic", "engine_version": "1", "tp_size": 1, "engine_dtype": "bfloat16"}

    def stop(self) -> None:
        pass


class SyntheticActor(ReplicaActor):
    """The job's own worker around it."""

    def __init__(self, recipe: Recipe, rate: float, block: int) -> None:
        self._rate, self._block = rate, block
        super().__init__(recipe, (1, 29, 57))

    def _open(self) -> Replica:
        return SyntheticReplica(self._rate, self._block)

    def resident(self) -> int:
        """Bytes of this process that lie in memory."""
        from benchmarks.memory import resident

        return resident()

    def encoder_limit(self, tokens: int, repetitions: int) -> list[float]:
        """GB/s of the encoder alone, in this very process: bytes made, thrown away."""
        from storage.encode import encode_shard_view

        (writer,) = self._writers.values()
        bits = np.ascontiguousarray(synthetic_states(self._block))[:tokens]
        found = []
        for _ in range(repetitions + 1):
            began = time.perf_counter()
            encode_shard_view(bits, writer.identity, 0, 1, writer.offset(), teacher={})
            found.append(bits.nbytes / 1e9 / (time.perf_counter() - began))
        return found[1:]
