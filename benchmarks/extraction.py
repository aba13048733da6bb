"""What a job costs beside the engine: the hand-over of states, the whole pipeline, and scheduling at scale.

    python -m benchmarks.extraction
    python -m benchmarks.extraction --quick            # fewer repetitions, every figure
    python -m benchmarks.extraction --json out.json --only engine,pipeline,scale

engine: SmolLM2 in a real SGLang on the CPU. The same batches go through the engine alone, with capture, through SGLang's own
list-based return path, and through the whole job with one replica and with two; in shuffled order, so that drift strikes
all alike. pipeline: a synthetic replica at H = 7168 that is faster than the encoder. scale: 2,000 shards over 64 replicas
that do nothing, on a simulated cluster of 8 nodes.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.idle import IdleActor, IdleUnit
from benchmarks.report import Report, arguments
from benchmarks.synthetic import HIDDEN, SyntheticActor
from ray_jobs.filling import make_units
from ray_jobs.inputs import make_contract, open_verifier
from ray_jobs.recipe import Recipe, load_recipe
from ray_jobs.replicas.engine_process import EngineProcess
from ray_jobs.replicas.sglang import SGLangReplica
from ray_jobs.supervisor import Supervisor
from ray_jobs.units import ExtractUnit
from ray_jobs.worker import ReplicaActor
from storage.commit import publish_plan
from storage.objects import open_store
from storage.plan import Plan, make_plan
from storage.sequences import Sequence, sequence_table
from storage.token_chunks import TableRows
from storage.writer import ShardWriter, shard_identity

ROOT = Path(__file__).resolve().parent.parent
SHARDS, REPLICAS, NODES = 2000, 64, 8

BARS = {
    "job_over_bare_engine": (0.95, "higher", "tokens/s of the whole job over the bare engine's prefill of the same batches"),
    "two_replicas_over_one": (1.8, "higher", "tokens/s of two replicas on two cores over one"),
    "hand_over_cost": (0.05, "lower", "time that the hand-over of states adds to a prefill, as a share of it"),
    "pipeline_over_encoder": (0.8, "higher", "GB/s of a job at H = 7168 over the encoder's own limit in the same process"),
    "pipeline_memory_growth": (0.1, "lower", "growth of the worker's memory between the first and the last third of the shards"),
    "scheduling_overhead": (0.02, "lower", "time of 2,000 shards over 64 replicas on 8 nodes beyond what the shards take"),
}  # fmt: skip


class Settings:
    def __init__(self, quick: bool) -> None:
        self.repetitions = 3 if quick else 7
        self.pass_seconds = 4.0 if quick else 12.0
        self.pipeline_shards = 12 if quick else 40
        self.unit_seconds = 1.0 if quick else 3.0


class BenchActor(ReplicaActor):
    """The job's own worker, whose engine can also be asked alone."""

    def bare(self, batches: list[list[np.ndarray]], capture: bool) -> float:
        """Seconds for all batches, one after the other, with the states handed over or without any."""
        replica = self._replica
        assert isinstance(replica, SGLangReplica)
        began = time.perf_counter()
        for batch in batches:
            if capture:
                replica.forward(batch)
            else:
                replica._running().ask([(ids.tolist(), SAMPLING) for ids in batch], "bare-", capture=False)
        return time.perf_counter() - began


SAMPLING = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}


def start_ray(cpus: int) -> None:
    import ray

    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    names = ("STATEHOUSE_CACHE", "STATEHOUSE_LOG_DIR")
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **{n: os.environ[n] for n in names if n in os.environ}}
    ray.init(
        address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env}
    )


def supervise(actor: type, arguments: tuple[Any, ...], recipe: Recipe, **options: Any) -> Supervisor:
    import ray

    given = {"max_concurrency": 2, "concurrency_groups": {"health": 1}, "num_cpus": 1, **options}
    remote = ray.remote(**given)(actor)
    return Supervisor(lambda placed: remote.options(**placed).remote(*arguments), recipe.extraction, {"CPU": 1.0})


def planned(
    recipe: Recipe, uri: str, lengths: list[int], vocab: int, contract: Any, shard: int
) -> tuple[Plan, TableRows]:
    rows = np.random.default_rng(1)
    table = sequence_table(
        Sequence("chat", f"g{at}", rows.integers(5, vocab, length).astype(np.int32), np.ones(length, bool))
        for at, length in enumerate(lengths)
    )
    plan = make_plan(table, contract, "lossless", shard_length=shard, teacher=recipe.extraction.teacher)
    publish_plan(open_store(uri), plan, table)
    return plan, TableRows(table)


# Seconds that a second engine has to start.
_START_S = 60.0


def require_two(supervisor: Supervisor) -> None:
    if (up := len(supervisor.actors)) != 2:
        raise RuntimeError(f"expected two replicas at work, found {up}")


# ---- engine --------------------------------------------------------------------------------------------------------


def engine(report: Report, settings: Settings, folder: Path) -> None:
    names = ("job_over_bare_engine", "two_replicas_over_one", "hand_over_cost")
    try:
        import sglang  # noqa: F401

        recipe = load_recipe(
            ROOT / "recipes" / "smollm2.yaml",
            ["extraction.teacher=none", "extraction.self_check=0", f"dataset.uri={folder / 'smollm2'}"],
        )
        verifier = open_verifier(recipe)
    except Exception as error:  # without an engine or a verifier the other parts are still measured
        report.unmeasured(f"{type(error).__name__}: {error}"[:120], *names)
        return
    start_ray(2)
    contract = make_contract(recipe, verifier)
    one = recipe.model_copy(update={"extraction": recipe.extraction.model_copy(update={"replicas": 1})})
    with supervise(BenchActor, (one, verifier.capture_layers), one) as single:
        trial = [np.random.default_rng(0).integers(5, 49152, 128) for _ in range(4)]
        single.run("probe", [_probe(trial)], lambda *_: None, lambda _: None)
        actor = single.actors[0]
        rate = 512 / _ask(actor.bare.remote([trial], False))
        tokens = int(np.clip(rate * settings.pass_seconds, 1536, 1 << 15)) // 512 * 512
        lengths = [128] * (tokens // 128)
        report.row("engine: tokens of a pass", "tokens", [tokens], note=f"sequences of 128; about {rate:.0f} tokens/s")

        def units_of(name: str, lengths: list[int]) -> list[ExtractUnit]:
            uri = str(folder / name)
            plan, table = planned(one, uri, lengths, 49152, contract, 512)
            _calibrate(single, uri, trial)
            return make_units(uri, plan, table, set(range(plan.geometry.shards)))

        plans = [units_of(f"pass-{number}", lengths) for number in range(2 * settings.repetitions + 1)]
        batches = [unit.token_ids for unit in plans[0]]
        fresh = iter(plans)

        def job(supervisor: Supervisor) -> float:
            units = next(fresh)
            began = time.perf_counter()
            supervisor.run("extract", units, lambda *_: None, lambda _: None)
            return time.perf_counter() - began

        actions: dict[str, Callable[[], float]] = {
            "bare engine": lambda: _ask(actor.bare.remote(batches, False)),
            "engine with hand-over": lambda: _ask(actor.bare.remote(batches, True)),
            "whole job, one replica": lambda: job(single),
        }
        for name in ("bare engine", "engine with hand-over"):
            actions[name]()  # does not count
        found = shuffled(actions, settings.repetitions)
        for name, seconds in found.items():
            report.row(f"engine: {name}", "tokens/s", [tokens / s for s in seconds])
        bare = np.array(found["bare engine"])
        report.measured("hand_over_cost", float(np.median(np.array(found["engine with hand-over"]) / bare) - 1))
        report.measured("job_over_bare_engine", float(np.median(bare / np.array(found["whole job, one replica"]))))
        two = recipe.model_copy(update={"extraction": recipe.extraction.model_copy(update={"replicas": 2})})
        single.config = two.extraction  # the second replica joins the first
        # Enough work for it to be up before the end: a replica that starts when a run ends is let go of.
        passes = 1 + math.ceil(_START_S / float(np.median(bare)))
        single.run("extract", units_of("second", passes * lengths), lambda *_: None, lambda _: None)
        require_two(single)
        seconds = [job(single) for _ in range(settings.repetitions - 1)]
        report.row("engine: whole job, two replicas", "tokens/s", [tokens / s for s in seconds])
        alone = float(np.median(found["whole job, one replica"]))
        report.measured("two_replicas_over_one", alone / float(np.median(seconds)))
    _list_based(report, recipe, verifier, batches, float(np.median(bare)), tokens)
    _stop_ray()


def _probe(token_ids: list[np.ndarray]) -> Any:
    from ray_jobs.units import ProbeUnit

    return ProbeUnit(tuple(range(len(token_ids))), token_ids)


def _calibrate(supervisor: Supervisor, uri: str, token_ids: list[np.ndarray]) -> None:
    from ray_jobs.units import CalibrationUnit

    supervisor.run("calibrate", [CalibrationUnit(uri, token_ids[:1])], lambda *_: None, lambda _: None)


def _list_based(
    report: Report, recipe: Recipe, verifier: Any, batches: list[list[np.ndarray]], bare: float, tokens: int
) -> None:
    """SGLang's own way: states as Python lists in every response, from an engine without the plugin's capture."""
    replica = SGLangReplica(recipe.extraction.replica, Path(verifier.folder), verifier.capture_layers)

    def arguments(ports: list[int]) -> dict[str, Any]:
        return replica._arguments(ports) | {"enable_return_hidden_states": True}

    process = EngineProcess(recipe.extraction.replica, arguments, ())
    try:
        few = batches[: max(1, len(batches) // 3)]
        share = sum(len(ids) for batch in few for ids in batch) / tokens
        for capture, name in ((False, "none"), (True, "lists")):
            process.ask([(few[0][0].tolist(), SAMPLING)], f"warm-{name}-", capture=capture)
        began, listed = time.perf_counter(), 0
        for batch in few:
            replies = process.ask([(ids.tolist(), SAMPLING) for ids in batch], "lists-", capture=True)
            listed += sum(reply["listed"] for reply in replies)
        seconds = time.perf_counter() - began
    finally:
        process.stop()
    if not listed:
        report.absent("engine: SGLang's list-based return path", "this engine returned no states as lists")
        return
    report.row(
        "engine: SGLang's list-based return path", "tokens/s", [tokens * share / seconds],
        note=f"adds {seconds / (bare * share) - 1:.0%} to a prefill",
    )  # fmt: skip


def _ask(reference: Any) -> Any:
    import ray

    return ray.get(reference)


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def shuffled(actions: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each action, `repetitions` times in an order that is drawn anew each time."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for repetition in range(repetitions):
        names = list(actions)
        random.Random(repetition).shuffle(names)
        for name in names:
            found[name].append(actions[name]())
    return found


# ---- pipeline ------------------------------------------------------------------------------------------------------


def pipeline(report: Report, settings: Settings, folder: Path) -> None:
    """A replica that is faster than the encoder: then encoder and store set the pace, and memory must not grow."""
    from benchmarks.corpus import contract

    start_ray(2)
    recipe = Recipe.model_validate(
        {
            "name": "synthetic",
            "verifier": {"model": "synthetic"},
            "prompts": [{"path": "none"}],
            "dataset": {"uri": str(folder / "wide")},
            "extraction": {"self_check": 0},
        }
    )
    shard = 2048
    lengths = [512] * (4 * settings.pipeline_shards)
    plan, table = planned(recipe, recipe.dataset.uri, lengths, 900, contract(), shard)
    units = make_units(recipe.dataset.uri, plan, table, set(range(plan.geometry.shards)))
    resident: list[int] = []
    with supervise(SyntheticActor, (recipe, 0.0, 2600), recipe, max_concurrency=3) as supervisor:
        _calibrate(supervisor, recipe.dataset.uri, [units[0].token_ids[0]])
        actor = supervisor.actors[0]
        before = _ask(actor.encoder_limit.remote(shard, settings.repetitions))
        ends: list[float] = []

        def done(_unit: ExtractUnit, _value: Any) -> None:
            ends.append(time.perf_counter())
            resident.append(_ask(actor.resident.remote()))

        began = time.perf_counter()
        supervisor.run("extract", units, done, lambda _: None)
        seconds = ends[-1] - began
        after = _ask(actor.encoder_limit.remote(shard, settings.repetitions))
    gigabytes = plan.tokens * plan.geometry.bytes_per_token / 1e9
    limit = report.row(f"pipeline: the encoder alone, H = {HIDDEN}", "GB/s", before + after)
    rate = report.row(
        f"pipeline: the whole job, H = {HIDDEN}", "GB/s", [gigabytes / seconds], note=f"{gigabytes:.1f} GB"
    )
    report.measured("pipeline_over_encoder", rate / limit)
    third = max(1, len(resident) // 3)
    first, last = float(np.median(resident[:third])), float(np.median(resident[-third:]))
    report.row("pipeline: memory of the worker", "GB", [one / 1e9 for one in resident])
    report.measured("pipeline_memory_growth", last / first - 1)
    missing = set(range(plan.geometry.shards)) - {
        unit.shard
        for unit in units
        if ShardWriter(open_store(recipe.dataset.uri), shard_identity(plan)).find(unit.shard, unit.tokens)
    }
    assert not missing, missing
    _stop_ray()


# ---- scale ---------------------------------------------------------------------------------------------------------


def scale(report: Report, settings: Settings) -> None:
    import ray
    from ray.cluster_utils import Cluster

    seconds = settings.unit_seconds
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=REPLICAS // NODES)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
        recipe = load_recipe(ROOT / "recipes" / "smollm2.yaml", [f"extraction.replicas={REPLICAS}"])
        with supervise(IdleActor, (seconds,), recipe, max_concurrency=1000) as supervisor:
            began = time.perf_counter()
            supervisor.run("extract", [IdleUnit(at) for at in range(4 * REPLICAS)], lambda *_: None, lambda _: None)
            report.row("scale: 64 replicas start on 8 nodes", "s", [time.perf_counter() - began])
            units = [IdleUnit(shard) for shard in range(SHARDS)]
            done: set[int] = set()
            began, cpu = time.perf_counter(), time.process_time()
            supervisor.run("extract", units, lambda unit, _value: done.add(unit.shard), lambda _: None)
            took, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert len(done) == SHARDS
        least = math.ceil(SHARDS / REPLICAS) * seconds
        report.row("scale: 2,000 shards over 64 replicas", "s", [took], note=f"the shards alone: {least:g} s")
        report.row("scale: CPU of the driver", "ms a shard", [cpu / SHARDS * 1e3])
        report.measured("scheduling_overhead", took / least - 1)
    finally:
        ray.shutdown()
        cluster.shutdown()


PARTS = ("engine", "pipeline", "scale")


def main() -> None:
    args = arguments("extraction", __doc__, PARTS)
    wanted = args.only
    report, settings = Report("extraction", args.quick), Settings(args.quick)
    for name, (limit, better, what) in BARS.items():
        report.expect(name, limit, better, what)
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no engine may outlive this process
    folder = Path(
        tempfile.mkdtemp(prefix="statehouse-extraction-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    )
    try:
        steps: dict[str, Callable[[], None]] = {
            "engine": lambda: engine(report, settings, folder),
            "pipeline": lambda: pipeline(report, settings, folder),
            "scale": lambda: scale(report, settings),
        }
        for name, step in steps.items():
            if name in wanted:
                step()
                print(f"{name} done after {time.perf_counter() - began:.0f} s", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.row("this benchmark", "s", [time.perf_counter() - began])
    report.show(args.json)


if __name__ == "__main__":
    main()
