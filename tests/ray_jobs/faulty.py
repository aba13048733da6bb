"""A replica whose states follow from the token ids, and which misbehaves when it is asked to: for tests of the supervisor."""

from __future__ import annotations

import os
import signal
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import tiny

from ray_jobs.filling import fill
from ray_jobs.recipe import Recipe
from ray_jobs.replicas.replica import Forwarded, Generation, Heard, Replica, Sampling, unheard
from ray_jobs.supervisor import Supervisor
from ray_jobs.verifier import VerifierShape
from ray_jobs.worker import ReplicaActor
from storage import open_dataset
from storage.commit import publish_plan
from storage.errors import ReplicaFailed
from storage.objects import open_store
from storage.plan import Plan, make_plan
from storage.reuse import Reusable
from storage.seal import seal_dataset
from storage.sequences import Sequence as Conversation
from storage.sequences import sequence_table
from storage.teacher import TeacherSummary
from storage.token_chunks import TableRows

ROOT = Path(__file__).resolve().parent.parent.parent
VOCAB = tiny.VOCAB
LONGEST = 300
# (fault, how it ended) -> times, for the table at the end of the run (conftest.py).
TRIED: Counter[tuple[str, str]] = Counter()


def states_of(ids: np.ndarray) -> np.ndarray:
    """bf16 [T, L, H], a function of the token ids."""
    random = np.random.default_rng(zlib.crc32(np.asarray(ids, np.int32).tobytes()))
    return random.standard_normal((len(ids), tiny.LAYERS, tiny.HIDDEN)).astype(ml_dtypes.bfloat16)


def teacher_of(ids: np.ndarray) -> TeacherSummary:
    return TeacherSummary((np.asarray(ids, np.int32) * 7 + 1) % VOCAB, np.asarray(ids, np.float32) / 8)


class FaultyReplica(Replica):
    """faults: {first token id of a sequence: (kind, times)}; kinds: crash, fail, hang, stop, nan, short. times: of all replicas
    together, counted by files in `folder`. nan_owner: the replica that starts first returns nothing but NaN."""

    shape = VerifierShape(vocab_size=VOCAB, hidden_size=tiny.HIDDEN, num_layers=8)
    longest = LONGEST

    def __init__(self, folder: str, faults: dict[int, tuple[str, int]], seconds: float, nan_owner: bool) -> None:
        self.folder, self.faults, self.seconds = Path(folder), faults, seconds
        self.all_nan = nan_owner and self._claim("nan-owner")

    def _claim(self, name: str) -> bool:
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def start(self) -> None:
        (self.folder / f"replica-{os.getpid()}").touch()

    def forward(self, batch: Sequence[np.ndarray]) -> list[Forwarded]:
        time.sleep(self.seconds)
        return [self._one(np.asarray(ids)) for ids in batch]

    def _one(self, ids: np.ndarray) -> Forwarded:
        kind, times = self.faults.get(int(ids[0]), ("", 0))
        if kind and not any(self._claim(f"{ids[0]}-{number}") for number in range(times)):
            kind = ""
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "hang":
            time.sleep(10_000)
        elif kind == "fail":
            raise ReplicaFailed("the engine died\n  log tail:\n    Segmentation fault")
        states = states_of(ids)
        if kind == "nan" or self.all_nan:
            states = states.copy()
            states[-1, 0, 0] = np.nan
        return Forwarded(states[:-1] if kind == "short" else states, teacher_of(ids))

    def generate(
        self, prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], heard: Heard = unheard
    ) -> list[Generation]:
        """The prompt backwards; a file in `folder` for each time that one is drawn."""
        made = []
        for at, prompt in enumerate(prompts):
            time.sleep(self.seconds)
            self._one(np.asarray(prompt))  # as faulty as a prefill
            made.append(Generation(np.asarray(prompt, np.int32)[::-1], "stop"))
            (self.folder / f"drawn-{int(prompt[0])}-{uuid.uuid4().hex}").touch()
            heard(at, made[-1])
        return made

    def describe(self) -> dict[str, Any]:
        return {"engine": "faulty", "engine_version": "1", "tp_size": 1, "engine_dtype": "bfloat16"}

    def stop(self) -> None:
        pass


class FaultyActor(ReplicaActor):
    def __init__(self, recipe: Recipe, replica: tuple[str, dict[int, tuple[str, int]], float, bool]) -> None:
        self._given = replica
        super().__init__(recipe, (1, 3, 4))

    def _open(self) -> Replica:
        return FaultyReplica(*self._given)


class Case:
    """A planned dataset and the replicas that fill it."""

    def __init__(
        self, folder: Path, uri: str | None = None, count: int = 60, first: Sequence[int] = (), **extraction: Any
    ):
        """first: first token ids that some sequences are given, so that the replica knows them."""
        self.folder, self.uri = folder, uri or str(folder / "dataset")
        (folder / "flags").mkdir(exist_ok=True)
        random = np.random.default_rng(3)
        lengths = [int(length) for length in random.integers(5, 60, count)]
        ids = [random.integers(0, 900, length).astype(np.int32) for length in lengths]
        for at, marker in enumerate(first):
            ids[3 + 5 * at][0] = marker
        self.marked = {marker: ids[3 + 5 * at] for at, marker in enumerate(first)}
        self.sequences: pa.Table = sequence_table(
            Conversation("code", f"g{at}", one, np.ones(len(one), bool)) for at, one in enumerate(ids)
        )
        self.recipe = Recipe.model_validate(
            {
                "name": "faulty",
                "verifier": {"model": "none"},
                "prompts": [{"path": "none"}],
                "dataset": {"uri": self.uri},
                "extraction": {
                    "self_check": 0,
                    "health_timeout_s": 60,
                    "replica": {"engine": "transformers"},
                    **extraction,
                },
            }
        )
        self.plan: Plan = make_plan(
            self.sequences, tiny.contract(), "lossless", shard_length=self.recipe.dataset.shard_tokens, teacher="argmax"
        )
        publish_plan(open_store(self.uri), self.plan, self.sequences)

    def supervisor(
        self,
        faults: dict[int, tuple[str, int]] | None = None,
        seconds: float = 0.0,
        nan_owner: bool = False,
        **options: Any,
    ) -> Supervisor:
        import ray

        given = (str(self.folder / "flags"), faults or {}, seconds, nan_owner)
        actor = ray.remote(max_concurrency=2, concurrency_groups={"health": 1}, max_restarts=0, num_cpus=1)(FaultyActor)
        return Supervisor(
            lambda placed: actor.options(**{**placed, **options}).remote(self.recipe, given),
            self.recipe.extraction,
            None if options else {"CPU": 1.0},
        )

    def missing(self) -> set[int]:
        from ray_jobs.extract import missing_shards

        return missing_shards(open_store(self.uri), self.plan, repair=False)

    def fill(self, supervisor: Supervisor) -> Any:
        rows = TableRows(self.sequences)
        with supervisor:
            return fill(self.recipe, open_store(self.uri), self.plan, rows, self.missing(), supervisor, Reusable())

    def seal(self) -> None:
        share = self.recipe.extraction.max_quarantined
        seal_dataset(open_store(self.uri), self.plan, max_quarantine_share=share)

    def require_whole(self, fault: str, quarantined: int = 0) -> dict[str, str]:
        """Sealed; every sequence there once with its own states, or quarantined with a reason. Returns the reasons."""
        self.seal()
        dataset = open_dataset(self.uri)
        assert dataset.seal is not None
        reasons = dataset.seal.quarantined
        found = [states.id for states in dataset.stream()]
        assert len(found) == len(set(found))
        assert set(found) | set(reasons) == set(self.plan.table["id"].to_pylist())
        assert not set(found) & set(reasons)
        assert len(reasons) == quarantined, reasons
        assert all(reasons.values())
        for states in dataset.stream():
            assert (states.hidden.view(np.uint16) == states_of(states.token_ids).view(np.uint16)).all()
            assert states.argmax is not None
            assert (states.argmax == teacher_of(states.token_ids).argmax).all()
        TRIED[fault, "whole" if not quarantined else f"{quarantined} quarantined, the rest whole"] += 1
        return dict(reasons)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
