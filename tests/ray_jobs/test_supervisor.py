"""The supervisor on a real Ray, with replicas that die, hang and lie. After each fault the dataset is whole.

One Ray for the module, one or two seconds a test: states come from a function of the token ids, not from an engine.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import faulty
import numpy as np
import pytest
from faulty import TRIED, Case, wait_for

from ray_jobs.answers import read_rows, unit_key
from ray_jobs.replicas.replica import Sampling
from ray_jobs.thinking import Response
from ray_jobs.units import GenerateUnit
from storage import open_dataset
from storage.errors import DatasetNotSealed, ReplicaFailed, StatehouseError
from storage.objects import open_store
from storage.repair import settle
from storage.verify import verify

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    import ray

    path = [faulty.ROOT, *(faulty.ROOT / "tests" / name for name in ("ray_jobs", "storage"))]
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_poison_prompt_that_kills_its_replica_every_time_is_found_and_quarantined(tmp_path: Path) -> None:
    case = Case(tmp_path, first=[901], replicas=2, max_quarantined=0.02, max_attempts=2)
    supervisor = case.supervisor({901: ("crash", 1000)})
    report = case.fill(supervisor)
    reasons = case.require_whole("poison prompt, kills the replica", 1)
    assert "it died" in next(iter(reasons.values()))
    assert report.values()["quarantined"] == 1
    assert verify(open_store(case.uri), full=True).ok
    dataset = open_dataset(case.uri)
    table = dataset.plan.table
    row = table["id"].to_pylist().index(next(iter(reasons)))
    start, length = (int(dataset.plan.column(name)[row]) for name in ("start", "length"))
    bits = np.empty((length, 4, 64), np.uint16)
    dataset._reader.read(start, bits)
    assert np.isnan((bits.astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param("fail", "the engine died", marks=pytest.mark.slow),
        pytest.param("short", "rows of states for", marks=pytest.mark.slow),
        ("nan", "NaN or infinite"),
    ],
)
def test_a_sequence_that_can_never_be_extracted_is_quarantined_with_its_reason(
    tmp_path: Path, kind: str, said: str
) -> None:
    case = Case(tmp_path, first=[901], replicas=2, max_quarantined=0.02, max_attempts=2)
    case.fill(case.supervisor({901: (kind, 1000)}))
    assert said in next(iter(case.require_whole(f"poison prompt, {kind}", 1).values()))


def test_a_sequence_too_long_for_the_engine_is_quarantined_without_a_try(tmp_path: Path) -> None:
    case = Case(tmp_path, replicas=1, max_quarantined=0.02)
    longest = sorted(map(len, case.sequences["token_ids"].to_pylist()))[-2]
    supervisor = case.supervisor()
    supervisor.make_actor = _limited(case, longest)
    case.fill(supervisor)
    assert f"expected 1 to {longest}" in next(iter(case.require_whole("sequence too long", 1).values()))
    assert supervisor.counts()["restarts"] == 0


def _limited(case: Case, longest: int):  # type: ignore[no-untyped-def]
    import ray

    class Limited(faulty.FaultyActor):
        def _open(self):  # type: ignore[no-untyped-def]
            replica = super()._open()
            replica.longest = longest  # type: ignore[misc]
            return replica

    actor = ray.remote(max_concurrency=2, concurrency_groups={"health": 1}, num_cpus=1)(Limited)
    given = (str(case.folder / "flags"), {}, 0.0, False)
    return lambda placed: actor.options(**placed).remote(case.recipe, given)


@pytest.mark.parametrize(
    "kind", ["crash", *(pytest.param(k, marks=pytest.mark.slow) for k in ("fail", "short", "stop"))]
)
def test_a_fault_that_passes_costs_nothing_but_time(tmp_path: Path, kind: str) -> None:
    patience = {"health_timeout_s": 5} if kind == "stop" else {}  # elsewhere a busy machine is no fault
    case = Case(tmp_path, first=[901, 902], replicas=2, max_quarantined=0, **patience)
    supervisor = case.supervisor({901: (kind, 1), 902: (kind, 1)})
    case.fill(supervisor)
    case.require_whole(f"passing fault, {kind}")
    assert supervisor.counts()["restarts"] >= 1


@pytest.mark.slow
def test_a_replica_that_hangs_is_replaced(tmp_path: Path) -> None:
    case = Case(tmp_path, first=[901], replicas=2, unit_timeout_s=3)
    supervisor = case.supervisor({901: ("hang", 1)})
    case.fill(supervisor)
    case.require_whole("hanging replica")


@pytest.mark.slow
def test_a_replica_that_returns_nan_where_another_does_not_is_replaced(tmp_path: Path) -> None:
    case = Case(tmp_path, replicas=2, max_quarantined=0)
    supervisor = case.supervisor(nan_owner=True, seconds=0.05)
    case.fill(supervisor)
    case.require_whole("NaN replica")
    assert supervisor.counts()["restarts"] >= 1


@pytest.mark.slow
def test_more_quarantined_than_accepted_fails_before_the_seal_and_a_retry_brings_them_back(tmp_path: Path) -> None:
    case = Case(tmp_path, first=[901, 902], replicas=1, max_quarantined=0.02, max_attempts=1)
    with pytest.raises(ReplicaFailed, match="extraction.max_quarantined accepts 1"):
        case.fill(case.supervisor({901: ("fail", 1000), 902: ("fail", 1000)}))
    with pytest.raises(DatasetNotSealed):
        case.seal()
    TRIED["too many poison prompts", "refused, resumable"] += 1
    # The engine is mended: what lacks a sequence is made again.
    from ray_jobs.extract import existing_shards, forget_quarantined

    store = open_store(case.uri)
    forget_quarantined(store, case.plan, existing_shards(store, case.plan, repair=False))
    case.fill(case.supervisor())
    case.require_whole("retry of the quarantined")


def test_after_the_seal_a_retry_brings_a_quarantined_sequence_back_under_a_seal_of_its_own(tmp_path: Path) -> None:
    from ray_jobs.extract import existing_shards, forget_quarantined

    case = Case(tmp_path, first=[901], replicas=1, max_quarantined=0.02, max_attempts=2)
    case.fill(case.supervisor({901: ("nan", 1000)}))
    case.require_whole("poison prompt, nan", 1)
    store = open_store(case.uri)
    first = open_dataset(case.uri)
    forget_quarantined(store, case.plan, existing_shards(store, case.plan, repair=False))
    assert len(case.missing()) == 1
    case.fill(case.supervisor())
    again = settle(store, case.plan)
    assert (again.number, again.parent, again.quarantined) == (2, first.fingerprint, {})
    assert len(open_dataset(case.uri)) == len(first) + 1
    assert verify(store, full=True).ok
    TRIED["retry of the quarantined, after the seal", "whole"] += 1


@pytest.mark.slow
def test_a_killed_replica_and_another_number_of_replicas_at_the_next_start(tmp_path: Path) -> None:
    case = Case(tmp_path, count=400, replicas=1)
    supervisor = case.supervisor(seconds=0.5)  # 13 shards: a busy machine needs its time to come and kill
    flags = tmp_path / "flags"

    def kill() -> None:
        wait_for(lambda: len(case.missing()) <= case.plan.geometry.shards - 2)
        os.kill(int(next(flags.glob("replica-*")).name.split("-")[1]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    case.fill(supervisor)
    killer.join()
    assert supervisor.counts()["restarts"] == 1
    case.require_whole("actor killed -9")


def test_states_that_drift_stop_the_job_and_are_not_stored(tmp_path: Path) -> None:
    case = Case(tmp_path, replicas=2, self_check=1.0, self_check_limit=0.01)
    case.fill(case.supervisor())
    case.require_whole("self-check of everything")
    checks = [one.receipt.self_check for one in _receipts(case)]
    assert sum(check.sequences for check in checks if check) == len(case.plan.table)
    assert all(max(check.relative_l2) == 0 and min(check.cosine) > 0.999 for check in checks if check)

    drifting = Case(_folder(tmp_path), replicas=2, self_check=1.0, self_check_limit=0.01)
    supervisor = drifting.supervisor()
    supervisor.make_actor = _drifting(drifting)
    with (
        supervisor,
        pytest.raises(StatehouseError, match=r"self-check of shard \d+: state 2 of each token differs by 0\.0"),
    ):
        drifting.fill(supervisor)
    TRIED["states drift", "stopped, nothing of it stored"] += 1


@pytest.mark.slow
def test_reference_states_that_went_with_their_node_cost_the_check_and_no_replica(tmp_path: Path) -> None:
    import ray

    class Bereft(faulty.FaultyActor):
        def extract(self, unit, reference=None):  # type: ignore[no-untyped-def]
            if reference is not None:  # as Ray does for an argument whose node was killed
                raise ray.exceptions.ObjectLostError("0" * 56, None, "")
            return super().extract(unit)

    case = Case(tmp_path, replicas=2, self_check=1.0, max_quarantined=0)
    actor = ray.remote(max_concurrency=2, concurrency_groups={"health": 1}, num_cpus=1)(Bereft)
    given = (str(case.folder / "flags"), {}, 0.0, False)
    supervisor = case.supervisor()
    supervisor.make_actor = lambda placed: actor.options(**placed).remote(case.recipe, given)
    case.fill(supervisor)
    case.require_whole("reference states lost")
    counts = supervisor.counts()
    assert (counts["restarts"], counts["retries"] > 0) == (0, True)
    assert not any(one.receipt.self_check for one in _receipts(case))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crash", "fail"])
def test_of_a_units_answers_only_the_poison_prompt_is_lost_and_none_is_drawn_twice(tmp_path: Path, kind: str) -> None:
    case = Case(tmp_path, replicas=2, max_attempts=2)
    prompts = [np.array([at if at != 7 else 901, 5, 6], np.int32) for at in range(24)]
    ids = [f"p{at}" for at in range(24)]
    units = []
    for low in (0, 12):
        some = ids[low : low + 12]
        units.append(
            GenerateUnit(
                case.uri,
                unit_key(some, ["h"]),
                some,
                prompts[low : low + 12],
                [Sampling()] * 12,
                [None] * 12,
                ["h"] * 12,
            )
        )
    given: dict[str, list[int]] = {}
    quarantined: dict[str, str] = {}

    def done(unit: GenerateUnit, answers: dict[int, Response]) -> None:
        given.update({unit.prompt_ids[at]: one.token_ids.tolist() for at, one in answers.items()})
        quarantined.update({unit.prompt_ids[at]: why for at, why in unit.quarantined.items()})

    with case.supervisor({901: (kind, 1000)}, seconds=0.05) as supervisor:
        supervisor.run("generate", units, done, lambda _: None, 1)
        restarts = supervisor.counts()["restarts"]
    assert list(quarantined) == ["p7"]
    assert ("it died" if kind == "crash" else "the engine died") in quarantined["p7"]
    assert given == {key: prompt[::-1].tolist() for key, prompt in zip(ids, prompts, strict=True) if key != "p7"}
    rows = [row for key in open_store(case.uri).sizes("responses") for row in read_rows(open_store(case.uri), key)]
    assert sorted(row["prompt_id"] for row in rows) == sorted(ids)
    assert {row["prompt_id"] for row in rows if row["reason"]} == {"p7"}
    assert not open_store(case.uri).sizes("parts")
    drawn = len(list((tmp_path / "flags").glob("drawn-*")))
    assert 23 <= drawn <= 23 + restarts  # of what a killed process was just about to store
    TRIED[f"poison prompt, {kind}, while answering", "quarantined, no other answer lost"] += 1


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "drifting"
    folder.mkdir()
    return folder


def _receipts(case: Case):  # type: ignore[no-untyped-def]
    from storage.seal import scan_shards

    return list(scan_shards(open_store(case.uri), case.plan)[0].values())


def _drifting(case: Case):  # type: ignore[no-untyped-def]
    import ray

    class Drifting(faulty.FaultyActor):
        def _bits(self, forwarded):  # type: ignore[no-untyped-def]
            bits = super()._bits(forwarded).copy()
            bits[:, 2] ^= np.random.default_rng(os.getpid()).integers(0, 32, bits[:, 2].shape, np.uint16)
            return bits

    actor = ray.remote(max_concurrency=2, concurrency_groups={"health": 1}, num_cpus=1)(Drifting)
    given = (str(case.folder / "flags"), {}, 0.0, False)
    return lambda placed: actor.options(**placed).remote(case.recipe, given)


@pytest.mark.slow
def test_a_replica_that_never_starts_is_named(tmp_path: Path) -> None:
    case = Case(tmp_path, replicas=1, max_attempts=2)
    supervisor = case.supervisor()
    import ray

    class Broken(faulty.FaultyActor):
        def _open(self):  # type: ignore[no-untyped-def]
            raise ReplicaFailed("no free port in 1-1")

    actor = ray.remote(max_concurrency=2, concurrency_groups={"health": 1}, num_cpus=1)(Broken)
    given = (str(case.folder / "flags"), {}, 0.0, False)
    supervisor.make_actor = lambda placed: actor.options(**placed).remote(case.recipe, given)
    with pytest.raises(ReplicaFailed, match="no replica came up in 2 tries, the last time with: no free port in 1-1"):
        case.fill(supervisor)


@pytest.mark.slow
def test_replicas_that_no_node_has_room_for_end_the_job_and_say_what_they_need(tmp_path: Path) -> None:
    import ray

    holder = ray.remote(num_cpus=4)(_Holder).remote()  # the whole cluster
    ray.get(holder.here.remote())
    case = Case(tmp_path, replicas=2, placement_timeout_s=3)
    try:
        with pytest.raises(
            ReplicaFailed, match=r"no node had room .* each needs 1 CPUs on one node, the cluster has 4 CPUs .* 0 CPUs"
        ):
            case.fill(case.supervisor())
        TRIED["no room for any replica", "said so, resumable"] += 1
        timer = threading.Timer(2, lambda: ray.kill(holder))
        timer.start()
        case.fill(case.supervisor())  # room comes in time
        case.require_whole("no room for a while")
    finally:
        ray.kill(holder)


class _Holder:
    def here(self) -> None:
        pass


def test_the_report_adds_up(tmp_path: Path) -> None:
    case = Case(tmp_path, replicas=2, usd_per_replica_hour=3.0)
    report = case.fill(case.supervisor(seconds=0.02))
    values, summary = report.values(), report.summary()
    assert values["shards"] == values["shards_total"] == sum(1 for _ in case.plan.units())
    assert values["tokens"] == case.plan.tokens
    assert "usd_per_million_tokens" in summary
    assert sum(report.stages.values()) > 0
    case.require_whole("none")
