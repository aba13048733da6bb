"""What a worker looks for in states before they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faulty
import ml_dtypes
import numpy as np
import pytest
import tiny_run

from ray_jobs import answers, worker
from ray_jobs.policies import Outcome
from ray_jobs.recipe import load_recipe
from ray_jobs.replicas import open_replica
from ray_jobs.replicas.replica import Forwarded, ReplicaConfig, Sampling
from ray_jobs.units import CalibrationUnit, ExtractUnit, GenerateUnit, ProbeUnit
from ray_jobs.worker import _not_finite
from storage import open_dataset
from storage.errors import ReplicaFailed, StoreError
from storage.objects import ObjectMissing, open_store
from storage.reuse import Place


def test_every_bit_pattern_is_told_finite_or_not() -> None:
    for pattern in range(1 << 16):
        bits = np.array([[[pattern, 0x3F80, 0xBF80, 0x8000]]], np.uint16)
        finite = bool(np.isfinite(bits.view(ml_dtypes.bfloat16).astype(np.float32)).all())
        assert bool(_not_finite({0: bits})) == (not finite), hex(pattern)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_row_is_named_and_the_values_counted(value: float) -> None:
    states = np.ones((3, 2, 4), ml_dtypes.bfloat16)
    states[1, 0, :2] = value
    assert _not_finite({4: np.zeros((1, 2, 4), np.uint16), 7: states.view(np.uint16)}) == {
        7: "2 of 24 values are NaN or infinite"
    }


def test_without_the_final_state_the_teachers_top_k_stands_in_for_it(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"given": [{"prompt": f"Question {n}?", "response": f"Answer {n}."} for n in range(12)]}
    path = tiny_run.write_recipe(tmp_path, tiny_verifier, rows)
    text = path.read_text().replace("self_check: 0", "self_check: 0\n  layers: aux\n  teacher: topk(4)")
    path.write_text(text)
    recipe = tiny_run.make_dataset(path, monkeypatch)
    assert (recipe.extraction.layers, recipe.extraction.teacher) == ("aux", "topk(4)")
    dataset = open_dataset(recipe.dataset.uri)
    layers = dataset.contract.capture_layers
    assert (dataset.contract.final_state, dataset.contract.layers) == ("absent", len(layers))
    with open_replica(
        ReplicaConfig(engine="transformers", dtype="float32"), tiny_verifier, layers, "topk(4)"
    ) as oracle:
        for states in dataset.stream():
            (expected,) = oracle.forward([states.token_ids])
            assert states.hidden.shape == (len(states.token_ids), len(layers), 64)
            close = expected.states[:, :-1].astype(np.float32)
            assert np.abs(states.hidden.astype(np.float32) - close).max() <= np.abs(close).max() * 2**-8
            assert states.teacher is not None
            assert expected.teacher is not None
            np.testing.assert_allclose(states.teacher.topk_logits, expected.teacher.topk_logits, atol=1e-4)
            np.testing.assert_array_equal(states.argmax, expected.teacher.argmax)


def test_two_checks_at_once_share_one_oracle_and_a_broken_one_leaves_the_replica_alone(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(tiny_run.write_recipe(tmp_path, tiny_verifier, {"given": [{"prompt": "a", "response": "b"}]}))
    actor = tiny_run.InProcess(recipe).actor
    units = [ProbeUnit((at,), [np.arange(5 + at, 25, dtype=np.int32)]) for at in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(actor.reference, units))
    for unit, (why, reference) in zip(units, answers, strict=True):
        assert why is None
        assert reference is not None
        (expected,) = actor._replica.forward(unit.token_ids)
        assert (reference.states[unit.rows[0]] == actor._bits(expected)).all()
    broken = tiny_run.InProcess(recipe).actor
    monkeypatch.setattr(worker, "open_replica", lambda *_: 1 / 0)
    why, reference = broken.reference(units[0])
    assert reference is None
    assert "ZeroDivisionError" in str(why)


def actor_of(folder: Path, faults: dict[int, tuple[str, int]] | None = None, **extraction: Any) -> faulty.FaultyActor:
    """As a replica of a job with two of them."""
    case = faulty.Case(folder, **{"replicas": 2, **extraction})
    return faulty.FaultyActor(case.recipe, (str(folder / "flags"), faults or {}, 0.0, False))


def test_a_sequence_that_no_engine_may_be_given_is_left_out_of_the_self_check_and_of_probes(tmp_path: Path) -> None:
    actor = actor_of(tmp_path)
    given: list[int] = []
    forward = actor._replica.forward
    actor._replica.forward = lambda batch: given.extend(map(len, batch)) or forward(batch)  # type: ignore[method-assign, func-returns-value]
    too_long, short = np.ones(faulty.LONGEST + 1, np.int32), np.arange(9, dtype=np.int32)
    why, reference = actor.reference(ProbeUnit((4, 7), [too_long, short]))
    assert why is None
    assert reference is not None
    assert list(reference.states) == [7]
    why, reference = actor.reference(ProbeUnit((4,), [too_long]))
    assert (why, reference) == ("the engine takes none of its sequences", None)
    assert actor.probe(ProbeUnit((4, 7), [too_long, short])) == Outcome()
    assert actor.probe(ProbeUnit((4,), [too_long])) == Outcome()
    assert given == [9, 9]


def test_the_replica_whose_reference_states_are_not_finite_is_the_one_that_fails(tmp_path: Path) -> None:
    actor = actor_of(tmp_path, {901: ("nan", 1000)})
    bad = np.array([901, 5, 6], np.int32)
    with pytest.raises(ReplicaFailed, match="its reference states are not finite: 1 of 768 values"):
        actor.reference(ProbeUnit((3,), [bad]))


def test_a_final_state_that_is_not_finite_is_noticed_where_it_is_not_stored(tmp_path: Path) -> None:
    actor = actor_of(tmp_path, layers="aux", teacher="topk(4)")
    forward = actor._replica.forward

    def spoilt(batch: Sequence[np.ndarray]) -> list[Forwarded]:
        states = [one.states.copy() for one in forward(batch)]
        states[1][0, -1, 0] = np.nan
        return [Forwarded(one) for one in states]

    actor._replica.forward = spoilt  # type: ignore[method-assign]
    ids = [np.arange(4, dtype=np.int32), np.arange(5, dtype=np.int32)]
    actor._writer = lambda _uri: Nothing()  # type: ignore[method-assign, assignment, return-value]
    assert list(actor.extract(ExtractUnit("nowhere", 0, ["a", "b"], ids)).bad) == [1]
    assert list(actor.calibrate(CalibrationUnit("nowhere", ids)).bad) == [1]
    with pytest.raises(ReplicaFailed, match="not finite"):
        actor.reference(ProbeUnit((0, 1), ids))


class Nothing:
    """A writer of a dataset that has no shard yet."""

    def find(self, _shard: int, _tokens: int) -> None:
        return None


class Away:
    """What fails twice with an error of the store, and then does it; and the rest of what a worker asks of a store."""

    def __init__(self, does: Callable[..., Any] = lambda *_: None) -> None:
        self.does, self.tries = does, 0

    def __call__(self, *given: Any) -> Any:
        self.tries += 1
        if self.tries <= 2:
            raise StoreError("connection refused")
        return self.does(*given)


def test_whatever_a_replica_asks_of_a_store_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, uri = actor_of(tmp_path), "s3://elsewhere/dataset"
    monkeypatch.setattr(worker, "sleep", lambda _seconds: None)
    writer = Nothing()
    opened = Away(lambda _uri: writer)
    monkeypatch.setattr(worker.ShardWriter, "from_uri", opened)
    writer.calibrate = calibrated = Away()  # type: ignore[attr-defined]
    ids = [np.arange(4, dtype=np.int32), np.arange(5, dtype=np.int32)]
    assert actor.calibrate(CalibrationUnit(uri, ids)) == Outcome()
    assert (opened.tries, calibrated.tries) == (3, 3)

    def read(_place: Place, out: np.ndarray) -> None:
        out[:] = 7

    actor._sources.read = copied = Away(read)  # type: ignore[method-assign, assignment]
    unit = ExtractUnit(uri, 0, ["a", "b"], ids, {1: Place(uri, "f", 0, "b")})
    bits = actor._joined(unit, {0: np.zeros((4, 4, 64), np.uint16)})
    assert copied.tries == 3
    assert bits[:4].max() == 0
    assert (bits[4:] == 7).all()

    actor._sources.read = missing = Away()  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(missing, "tries", 2)
    missing.does = Raises(ObjectMissing("no object"))
    with pytest.raises(ObjectMissing):  # it will not come
        actor._joined(unit, {0: np.zeros((4, 4, 64), np.uint16)})
    assert missing.tries == 3


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: Any) -> None:
        raise self.error


def test_a_stored_unit_is_stored_whatever_becomes_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = actor_of(tmp_path)
    monkeypatch.setattr(answers, "clear_parts", Raises(StoreError("connection refused")))
    prompt = np.array([3, 5, 6], np.int32)
    unit = GenerateUnit(str(tmp_path / "inputs"), "key", ["p"], [prompt], [Sampling()], [None], ["h"])
    assert list(actor.generate(unit).value) == [0]
    assert answers.find(open_store(unit.uri), unit) is not None
