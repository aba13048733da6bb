"""The Ray actor that owns one replica. Hidden states leave it for the store only (and, of a self-check, for one other)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter, sleep
from typing import Any, TypeVar

import numpy as np

from ray_jobs import answers
from ray_jobs.inputs import Verifier
from ray_jobs.policies import Outcome, first_line
from ray_jobs.recipe import Recipe
from ray_jobs.replicas import open_replica
from ray_jobs.replicas.replica import Forwarded, Replica, ReplicaConfig, validate_ids, validate_prompts
from ray_jobs.self_check import Reference, compare, fits_beside, require_small
from ray_jobs.stages import StageClock
from ray_jobs.supervisor import Supervisor, require_resources
from ray_jobs.thinking import respond
from ray_jobs.units import CalibrationUnit, ExtractUnit, GenerateUnit, ProbeUnit
from ray_jobs.verifier import resolve_verifier
from storage.buffers import BufferPool
from storage.errors import ReplicaFailed, StatehouseError, StoreError, StoreRefused
from storage.objects import ObjectMissing, ObjectStore, open_store
from storage.receipt import SelfCheck
from storage.reuse import Sources, origins
from storage.shard import to_bits
from storage.teacher import TeacherSummary, blank, join
from storage.writer import ShardWriter

__all__ = ["ExtractUnit", "GenerateUnit", "ReplicaActor", "replicas_of"]

Result = TypeVar("Result")
# The states of one unit wait for the next one.
_IDLE_BYTES = 1 << 30
BF16_NAN = np.uint16(0x7FC0)


class ReplicaActor:
    """Two calls may run at once: the engine is behind a lock, so one prefills while the other encodes and stores."""

    def __init__(self, recipe: Recipe, capture_layers: tuple[int, ...]) -> None:
        self._engine = Lock()
        self._stages = StageClock()
        self._writers: dict[str, ShardWriter] = {}
        self._sources = Sources()
        self._buffers = BufferPool(_IDLE_BYTES)
        self._recipe, self._layers = recipe, capture_layers
        began = perf_counter()
        self._teacher = recipe.extraction.teacher
        self._final = recipe.extraction.layers == "all"
        self._second: Replica | None = None
        self._beside = Lock()
        self._replica = self._open()
        self._replica.start()
        self._about = {
            **self._replica.describe(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start_seconds": round(perf_counter() - began, 1),
        }
        self._stages.take()  # an engine that starts does not wait for work

    def _open(self) -> Replica:
        return open_replica(self._config(), self._folder(), self._layers, self._teacher)

    def _folder(self) -> Path:
        return resolve_verifier(self._recipe.verifier.model, revision=self._recipe.verifier.revision)

    def _config(self) -> ReplicaConfig:
        config = self._recipe.extraction.replica
        if not self._recipe.verifier.trust_remote_code:
            return config
        return config.model_copy(update={"args": {**config.args, "trust_remote_code": True}})

    def describe(self) -> dict[str, Any]:
        return self._about

    def alive(self) -> bool:
        """Answered beside the work, in a thread of its own: whether this process lives."""
        return True

    def _writer(self, uri: str) -> ShardWriter:
        if uri not in self._writers:
            self._writers[uri] = self._patiently(uri, lambda: ShardWriter.from_uri(uri))
        return self._writers[uri]

    # ---- the engine ----

    def _refused(self, token_ids: Sequence[np.ndarray], rows: Sequence[int]) -> dict[int, str]:
        """{row: why} of sequences that no engine may be given; they would take others with them."""
        bad = {}
        for row in rows:
            try:
                validate_ids([token_ids[row]], self._replica.shape.vocab_size, self._replica.longest)
            except StatehouseError as error:
                bad[row] = str(error)
        return bad

    def _prefill(self, batch: Sequence[np.ndarray]) -> list[Forwarded]:
        """Raises ReplicaFailed when a length is wrong."""
        with self._engine, self._stages.at("prefill"):
            forwarded = self._replica.forward(batch)
        for index, (token_ids, one) in enumerate(zip(batch, forwarded, strict=True)):
            if len(one.states) != len(token_ids):
                raise ReplicaFailed(f"sequence {index}: {len(one.states)} rows of states for {len(token_ids)} tokens")
        return forwarded

    def _bits(self, forwarded: Forwarded) -> np.ndarray:
        """bf16 bits uint16 [T, L, H] of all states of a sequence: where the final one is not stored, the teacher's top-k was
        still made from it."""
        return to_bits(forwarded.states)

    def _stored(self, bits: np.ndarray) -> np.ndarray:
        return bits if self._final else bits[:, :-1]

    # ---- work ----

    def calibrate(self, unit: CalibrationUnit) -> Outcome:
        rows = unit.suspects()
        if bad := self._refused(unit.token_ids, rows):
            return Outcome(None, bad, certain=True)
        bits = [self._bits(one) for one in self._prefill([unit.token_ids[row] for row in rows])]
        if bad := _not_finite(dict(zip(rows, bits, strict=True))):
            return Outcome(None, bad)
        if not bits:
            raise StatehouseError(f"{unit.uri}: none of the sequences chosen for calibration can be extracted")
        writer, sample = self._writer(unit.uri), np.concatenate([self._stored(one) for one in bits])
        self._patiently(unit.uri, lambda: writer.calibrate(sample))
        self._stages.take()  # it comes before the clock of the filling starts
        return Outcome()

    def probe(self, unit: ProbeUnit | GenerateUnit) -> Outcome:
        """Whether these sequences can be prefilled, or these prompts answered, at all."""
        if isinstance(unit, GenerateUnit):
            return self._answer(unit, open_store(unit.uri))
        _, token_ids = self._accepted(unit)
        if token_ids:
            self._prefill(token_ids)
        return Outcome()

    def _accepted(self, unit: ProbeUnit) -> tuple[list[int], list[np.ndarray]]:
        """Rows and token ids that an engine may be given. The others are quarantined when their unit runs."""
        bad = self._refused(unit.token_ids, range(len(unit.token_ids)))
        kept = [at for at in range(len(unit.token_ids)) if at not in bad]
        return [unit.rows[at] for at in kept], [unit.token_ids[at] for at in kept]

    def reference(self, unit: ProbeUnit) -> tuple[str | None, Reference | None]:
        """(why there is none, states of these sequences), for another replica's self-check."""
        rows, token_ids = self._accepted(unit)
        if not token_ids:
            return "the engine takes none of its sequences", None
        if self._recipe.extraction.replicas > 1:
            forwarded, about = self._prefill(token_ids), self._replica.describe()
        else:
            try:
                with self._beside:  # two calls may come at once, and transformers cannot be imported twice at a time
                    forwarded, about = self._forward_beside(token_ids)
            except Exception as error:  # whatever it is: the check is left out, the replica is not to blame
                return f"transformers beside the only replica: {type(error).__name__}: {error}", None
        states = {row: self._bits(one) for row, one in zip(rows, forwarded, strict=True)}
        if bad := _not_finite(states):
            why = f"its reference states are not finite: {next(iter(bad.values()))}"
            if self._recipe.extraction.replicas > 1:
                raise ReplicaFailed(why)  # it is replaced, and the unit goes on without
            return f"transformers beside the only replica: {why}", None
        by = f"{about['engine']} {about['engine_version']} on {socket.gethostname()}, pid {os.getpid()}"
        return None, Reference(by, {row: self._stored(bits) for row, bits in states.items()})

    def _forward_beside(self, token_ids: Sequence[np.ndarray]) -> tuple[list[Forwarded], dict[str, Any]]:
        """By transformers on the CPU, started when first needed."""
        if self._second is None:
            folder = self._folder()
            if self._recipe.extraction.replica.engine != "transformers" and not fits_beside(folder):
                raise MemoryError("the verifier takes more than a quarter of the free memory")
            remote = {"trust_remote_code": True} if self._recipe.verifier.trust_remote_code else {}
            config = self._config().model_copy(update={"engine": "transformers", "gpus": 0, "args": remote})
            second = open_replica(config, folder, self._layers)
            second.start()
            self._second = second
        return self._second.forward(token_ids), self._second.describe()

    def extract(self, unit: ExtractUnit, reference: Reference | None = None) -> Outcome:
        """Prefills, encodes and stores one shard, or adopts the one that another driver stored meanwhile.

        Sequences that come back without a finite number are said, and then nothing is stored.
        """
        writer = self._writer(unit.uri)
        if (found := self._patiently(unit.uri, lambda: writer.find(unit.shard, unit.tokens))) is not None:
            value = {"shard": unit.shard, "created": False, "data_bytes": found.data_bytes}
            return Outcome({**value, "quarantined": len(found.quarantined), "stages": self._stages.take()})
        rows = unit.suspects()
        if bad := self._refused(unit.token_ids, rows):
            return Outcome(None, bad, certain=True)
        began = perf_counter()
        forwarded = dict(zip(rows, self._prefill([unit.token_ids[row] for row in rows]) if rows else [], strict=True))
        seconds = {"prefill": round(perf_counter() - began, 4)}
        states = {row: self._bits(one) for row, one in forwarded.items()}
        if bad := _not_finite(states):
            return Outcome(None, bad)
        states = {row: self._stored(bits) for row, bits in states.items()}
        check = self._check(unit, states, reference)
        with self._stages.at("encode"):
            bits, teacher = self._joined(unit, states), self._summary(unit, forwarded)
        del states, forwarded
        quarantined = {unit.ids[row]: first_line(reason)[:300] for row, reason in unit.quarantined.items()}
        written = self._patiently(
            unit.uri,
            lambda: writer.write(
                unit.shard,
                bits,
                len(unit.token_ids),
                teacher=teacher,
                self_check=check,
                stage=self._stages.at,
                written_by={**self._about, **origins(unit.known)},
                seconds=seconds,
                quarantined=quarantined,
            ),
        )
        return Outcome(
            {
                "shard": unit.shard,
                "created": written.created,
                "data_bytes": written.receipt.data_bytes,
                "quarantined": len(written.receipt.quarantined),
                "checked": check.sequences if check else 0,
                "drift": max(check.relative_l2) if check else 0.0,
                "stages": self._stages.take(),
            }
        )

    def _patiently(self, uri: str, work: Callable[[], Result]) -> Result:
        """Tries again while an object store is away: the states are here, and computing them again costs more."""
        until, wait = perf_counter() + self._recipe.extraction.store_patience_s, 1.0
        while True:
            try:
                return work()
            except StoreError as error:
                lasting = isinstance(error, StoreRefused | ObjectMissing) or "://" not in uri
                if lasting or perf_counter() + wait > until:
                    raise
            sleep(wait)
            wait = min(2 * wait, 15.0)

    def _check(self, unit: ExtractUnit, states: dict[int, np.ndarray], reference: Reference | None) -> SelfCheck | None:
        pairs = {} if reference is None else {k: (states[k], v) for k, v in reference.states.items() if k in states}
        if reference is None or not pairs:
            return None
        check = compare(pairs, reference.by)
        require_small(check, self._recipe.extraction.self_check_limit, f"shard {unit.shard}")
        return check

    def _joined(self, unit: ExtractUnit, states: dict[int, np.ndarray]) -> np.ndarray:
        """States of the whole unit: extracted, copied from other datasets, or NaN. In memory that is used again."""
        shape = (unit.tokens, len(self._layers) + self._final, self._replica.shape.hidden_size)
        bits = self._buffers.take(2 * int(np.prod(shape))).view(np.uint16).reshape(shape)
        low = 0
        for at, ids in enumerate(unit.token_ids):
            rows = bits[low : low + len(ids)]
            low += len(ids)
            if at in states:
                rows[:] = states[at]
            elif (place := unit.known.get(at)) is not None:
                self._patiently(place.uri, partial(self._sources.read, place, rows))
            else:
                rows[:] = BF16_NAN
        return bits

    def _summary(self, unit: ExtractUnit, forwarded: dict[int, Forwarded]) -> TeacherSummary | None:
        """The teacher summary of the whole unit; the quarantined say nothing."""
        parts = [
            forwarded[at].teacher if at in forwarded else blank(self._teacher, len(ids))
            for at, ids in enumerate(unit.token_ids)
            if at not in unit.known
        ]
        given = [part for part in parts if part is not None]
        lengths = [len(ids) for ids in unit.token_ids]
        made = join(given) if given else None
        places = [place.uri for place in unit.known.values()]
        return self._patiently(
            places[0] if places else unit.uri,
            lambda: self._sources.complete_teacher(lengths, unit.known, self._teacher, made),
        )

    def generate(self, unit: GenerateUnit) -> Outcome:
        """Answers the prompts of a unit and stores them, or adopts what another driver stored meanwhile.

        value: {index of the prompt: its response}.
        """
        store = open_store(unit.uri)
        if (found := self._patiently(unit.uri, lambda: answers.find(store, unit))) is not None:
            return Outcome(found)
        outcome = self._answer(unit, store)
        if not outcome.bad:
            self._patiently(unit.uri, lambda: answers.commit(store, unit, outcome.value))
            with contextlib.suppress(StoreError):  # they are of no use any more; the job clears what is left
                answers.clear_parts(store, unit.key)
        return outcome

    def _answer(self, unit: GenerateUnit, store: ObjectStore) -> Outcome:
        """As `generate`, without the last word: what is finished lies in parts, and what lies there is not asked for again."""
        found = self._patiently(unit.uri, lambda: answers.read_parts(store, unit))
        rows = [row for row in unit.suspects() if row not in found]
        if bad := self._without_room(unit, rows):
            return Outcome(None, bad, certain=True)
        if rows:
            left = unit.part(rows)
            with self._engine, answers.Parts(store, left) as parts:
                given = respond(self._replica.generate, left.token_ids, left.samplings, left.budgets, parts.add)
            found.update(zip(rows, given, strict=True))
        return Outcome(found)

    def _without_room(self, unit: GenerateUnit, rows: Sequence[int]) -> dict[int, str]:
        bad = {}
        for row in rows:
            try:
                validate_prompts(
                    [unit.token_ids[row]],
                    [unit.samplings[row]],
                    self._replica.shape.vocab_size,
                    self._replica.longest,  # what is longer could not be extracted
                )
            except StatehouseError as error:
                bad[row] = str(error)
        return bad

    def stop(self) -> None:
        self._replica.stop()
        if self._second is not None:
            self._second.stop()


def _not_finite(states: dict[int, np.ndarray]) -> dict[int, str]:
    """{row: what is wrong} of sequences that hold NaN or infinity. states: bf16 bits uint16 [T, L, H]."""
    bad = {}
    for row, bits in states.items():
        # Exponents of all ones are the largest numbers of each sign: two maxima are ten times as fast as a mask.
        if bits.max() >= 0xFF80 or bits.view(np.int16).max() >= 0x7F80:
            missing = int(((bits & 0x7F80) == 0x7F80).sum())
            bad[row] = f"{missing:,} of {bits.size:,} values are NaN or infinite"
    return bad


def replicas_of(recipe: Recipe, verifier: Verifier) -> Supervisor:
    """A supervisor of ReplicaActors with the CPUs and GPUs of the recipe. Needs Ray.

    Raises ReplicaFailed when the cluster cannot hold them.
    """
    import ray

    require_resources(recipe.extraction)
    config = recipe.extraction.replica
    actor = ray.remote(
        num_cpus=config.cpus,
        num_gpus=config.gpus,
        max_concurrency=2,
        concurrency_groups={"health": 1},
        max_restarts=0,
    )(ReplicaActor)
    bundle = {"CPU": float(config.cpus), **({"GPU": float(config.gpus)} if config.gpus else {})}
    return Supervisor(
        lambda options: actor.options(**options).remote(recipe, verifier.capture_layers), recipe.extraction, bundle
    )
