"""The jobs, for real: Ray, actors, a tiny random verifier in transformers; killed, doubled, starved, and fed nonsense."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from jobs import GIVEN, ROOT, Finished, finish, ok, start_driver

from ray_jobs.inputs import Inputs
from ray_jobs.replicas import open_replica
from ray_jobs.replicas.replica import ReplicaConfig
from storage import open_dataset
from storage.objects import LocalStore
from storage.seal import load_seals
from storage.verify import verify
from vocab.mapping import DraftVocab

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]
Recipe = Callable[..., Path]
Run = Callable[..., Finished]
Prepared = Callable[[Path], Path]
Start = Callable[..., subprocess.Popen[str]]


def assert_states_are_the_verifiers(uri: str, verifier: Path, sequences: int = 6) -> None:
    dataset = open_dataset(uri)
    layers = dataset.contract.capture_layers
    with open_replica(ReplicaConfig(engine="transformers", dtype="float32"), verifier, layers) as oracle:
        for index in np.linspace(0, len(dataset) - 1, sequences).astype(int):
            states = dataset.read(int(index))
            expected = oracle.prefill([states.token_ids])[0].astype(np.float64)
            stored = states.hidden.astype(np.float64)
            assert np.abs(stored - expected).max() <= np.abs(expected).max() * 2**-8  # bf16 keeps 8 bits


def test_the_way_from_prompts_to_coverage(recipe: Recipe, run_job: Run, tiny_verifier: Path, tmp_path: Path) -> None:
    path = recipe()
    uri = str(tmp_path / "dataset")
    for job, complaint in (("generate", "no prepared prompts"), ("coverage", "no dataset here")):
        early = run_job(job, path)
        assert early.code == 1, early.err
        assert complaint in early.errors[0]
    ok(run_job("prepare", path))
    early = run_job("extract", path)
    assert early.code == 1, early.err
    assert "24 of 24 prompts have no response yet" in early.errors[0]
    ok(run_job("generate", path))
    ok(run_job("extract", path, "extraction.replicas=2"))
    ok(run_job("coverage", path))
    assert_states_are_the_verifiers(uri, tiny_verifier)

    dataset = open_dataset(uri)
    inputs = Inputs(f"{uri}-inputs")
    prompts = {tuple(row["token_ids"]) for row in pq.read_table(f"{uri}-inputs/prompts.parquet").to_pylist()}
    assert len(dataset) == len(prompts) == 24
    for states in dataset.stream():
        assert tuple(states.token_ids[~states.loss_mask].tolist()) in prompts
        assert 1 <= states.loss_mask.sum() <= 8
    assert inputs.read_summary()["kinds"] == {"generate": 24}  # type: ignore[index]

    vocabulary = DraftVocab.load(f"{uri}-vocab")
    assert vocabulary.size == 512
    assert {0, 1, 2} <= set(vocabulary.target_ids.tolist())  # the special tokens

    again = ok(run_job("extract", path))
    assert "found" in again.err
    assert "extract start" not in again.err  # nothing was left to do
    assert "all answered before" in ok(run_job("generate", path)).err


@pytest.mark.slow
def test_a_job_alone_starts_a_ray_of_its_own(recipe: Recipe, prepared: Prepared, tmp_path: Path) -> None:
    path = prepared(recipe(GIVEN[:20]))
    finished = ok(finish(start_driver("extract", path, RAY_ADDRESS="")))
    assert "ray local" in finished.err
    assert len(open_dataset(str(tmp_path / "dataset"))) == 20


def test_ray_job_submit_runs_the_job_and_says_so_when_it_fails(
    recipe: Recipe, prepared: Prepared, ray_cluster: dict[str, str], tmp_path: Path
) -> None:
    path = prepared(recipe(GIVEN[:20]))

    def submit(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).parent / "ray", "job", "submit", "--working-dir", ".", "--"]
        command += ["python", "-m", "ray_jobs.extract", str(path), *overrides]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | ray_cluster
        del environment["RAY_ADDRESS"]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    lost = submit("dataset.uri=relative/folder")
    assert lost.returncode == 1
    assert "relative to a folder that Ray deletes" in lost.stdout + lost.stderr
    done = submit()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "extract sealed fingerprint=" in done.stdout + done.stderr
    assert len(open_dataset(str(tmp_path / "dataset"))) == 20


@pytest.mark.slow
def test_the_way_on_object_storage(
    recipe: Recipe, prepared: Prepared, run_job: Run, s3_server: str, tiny_verifier: Path
) -> None:
    uri = f"s3://statehouse/jobs-{os.getpid()}"
    path = prepared(recipe(GIVEN, dataset={"uri": uri}))
    for job in ("extract", "coverage"):
        ok(run_job(job, path))
    assert_states_are_the_verifiers(uri, tiny_verifier)
    assert len(open_dataset(uri)) == 500


def shard_times(uri: Path) -> dict[str, int]:
    return {key: (uri / key).stat().st_mtime_ns for key in LocalStore(uri).sizes("hidden") if "/c/" in key}


def wait_for_shards(uri: Path, count: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while len(shard_times(uri)) < count:
        assert time.monotonic() < deadline, "no shards"
        time.sleep(0.005)


def writer_of_a_shard(uri: Path) -> int:
    """The pid of the actor that wrote one, as its receipt says."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for receipt in (uri / "receipts").glob("*.json"):
            if pid := json.loads(receipt.read_text())["written_by"].get("pid"):  # the driver's own copies have none
                return int(pid)
        time.sleep(0.01)
    raise AssertionError("no actor has written a shard")


@pytest.mark.slow
def test_a_driver_killed_half_way_is_carried_on_without_redoing_finished_shards(
    recipe: Recipe, prepared: Prepared, start_job: Start, run_job: Run, tiny_verifier: Path, tmp_path: Path
) -> None:
    path = prepared(recipe(GIVEN, dataset={"shard_tokens": 1024}))
    uri = tmp_path / "dataset"
    stopped = start_job("extract", path)
    wait_for_shards(uri, 2)
    stopped.terminate()  # as `ray job stop` does
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 143
    assert "run the same command again" in err
    process = start_job("extract", path)
    wait_for_shards(uri, len(shard_times(uri)) + 2)
    process.kill()
    process.wait()
    time.sleep(3)  # Ray notices and ends the driver's actors
    before = shard_times(uri)
    assert not (uri / "seal.json").exists()
    ok(run_job("extract", path))
    after = shard_times(uri)
    assert {key: after[key] for key in before} == before
    assert len(after) > len(before)
    assert_states_are_the_verifiers(str(uri), tiny_verifier)


@pytest.mark.slow
def test_two_drivers_at_once_end_in_one_correct_dataset(
    recipe: Recipe, prepared: Prepared, start_job: Start, run_job: Run, tiny_verifier: Path, tmp_path: Path
) -> None:
    path = prepared(recipe(GIVEN, dataset={"shard_tokens": 1024}))
    drivers = [start_job("extract", path) for _ in range(2)]
    results = [driver.communicate(timeout=240) for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], results
    fingerprints = {
        line.split("fingerprint=")[1][:12] for _, err in results for line in err.splitlines() if "fingerprint=" in line
    }
    assert len(fingerprints) == 1
    assert len(open_dataset(str(tmp_path / "dataset"))) == 500
    assert_states_are_the_verifiers(str(tmp_path / "dataset"), tiny_verifier)


@pytest.mark.slow
def test_a_replica_killed_at_work_is_replaced(
    recipe: Recipe, prepared: Prepared, start_job: Start, run_job: Run, tiny_verifier: Path, tmp_path: Path
) -> None:
    path = prepared(recipe(GIVEN, dataset={"shard_tokens": 1024}))
    uri = tmp_path / "dataset"
    process = start_job("extract", path)
    wait_for_shards(uri, 3)
    os.kill(writer_of_a_shard(uri), signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "replica replaced" in err
    assert "restarts=1" in err
    assert_states_are_the_verifiers(str(uri), tiny_verifier)


@pytest.mark.slow
def test_a_damaged_shard_is_named_and_repair_extracts_it_again(
    recipe: Recipe, prepared: Prepared, start_job: Start, run_job: Run, tiny_verifier: Path, tmp_path: Path
) -> None:
    path = prepared(recipe(GIVEN, dataset={"shard_tokens": 1024}))
    ok(run_job("extract", path))
    uri = tmp_path / "dataset"
    for name in ("seal.json", "shards.parquet"):
        (uri / name).unlink()
    shard = uri / "hidden/c/0/1/0/0"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    refused = run_job("extract", path)
    assert refused.code == 1, refused.err
    assert "hidden/c/0/1/0/0" in refused.errors[0]
    assert "--repair" in refused.errors[0]
    assert not (uri / "seal.json").exists()
    ok(run_job("extract", path, "--repair"))
    assert_states_are_the_verifiers(str(uri), tiny_verifier)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_after_the_seal_repair_restores_a_shard_to_the_byte_or_seals_what_came_out_differently(
    recipe: Recipe, prepared: Prepared, run_job: Run, tmp_path: Path
) -> None:
    path = prepared(recipe(GIVEN[:60], dataset={"shard_tokens": 1024}))
    ok(run_job("extract", path))
    uri = tmp_path / "dataset"
    fingerprint = open_dataset(str(uri)).fingerprint
    shard, tokens = uri / "hidden/c/0/1/0/0", uri / "tokens/c/0"
    whole = {file: file.read_bytes() for file in (shard, tokens)}
    shard.write_bytes(whole[shard][:-100])
    tokens.write_bytes(whole[tokens][:-1] + b"x")  # of the right size: only its digest tells
    refused = run_job("extract", path)
    assert refused.code == 1
    assert "hidden/c/0/1/0/0" in refused.errors[0]
    assert "--repair --shards 1" in refused.errors[0]
    repaired = ok(run_job("extract", path, "--repair"))
    assert "the sealed content is whole again" in repaired.err
    assert {file: file.read_bytes() for file in whole} == whole
    assert open_dataset(str(uri)).fingerprint == fingerprint
    assert not (uri / "seal-0002.json").exists()

    shard.unlink()  # and now by an engine that computes otherwise
    repaired = ok(run_job("extract", path, "--repair", "--shards", "1", "extraction.replica.dtype=bfloat16"))
    assert "sealed anew number=2 changed=1" in repaired.err
    seals = load_seals(LocalStore(uri))
    assert (seals[1].parent, seals[1].changed_shards) == (fingerprint, [1])
    assert open_dataset(str(uri)).fingerprint == seals[1].fingerprint
    assert verify(LocalStore(uri), full=True).ok


@pytest.mark.slow
def test_a_dataset_of_another_plan_is_left_alone(
    recipe: Recipe, prepared: Prepared, run_job: Run, tmp_path: Path
) -> None:
    path = prepared(recipe(GIVEN[:20]))
    ok(run_job("extract", path))
    before = LocalStore(tmp_path / "dataset").sizes()
    recipe(GIVEN[:30])
    stale = run_job("extract", path, "dataset.max_length=150")
    assert stale.code == 1, stale.err
    assert "prepared from other prompts" in stale.errors[0]
    prepared(path)
    failed = run_job("extract", path)
    assert failed.code == 1, failed.err
    assert "already holds another plan" in failed.errors[0]
    assert LocalStore(tmp_path / "dataset").sizes() == before


def test_no_free_port_is_named_by_the_job(recipe: Recipe, prepared: Prepared, run_job: Run, smollm2: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = recipe(
            [{"prompt": "x"}],
            verifier={"model": str(smollm2)},
            extraction={"replica": {"engine": "sglang", "ports": f"{port}-{port}"}, "max_attempts": 1},
        )
        failed = run_job("generate", prepared(path))
    assert failed.code == 1, failed.err
    assert "port" in failed.errors[0]
    assert str(port) in failed.errors[0]
    assert len(failed.errors) == 1


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(500)
def test_a_real_engine_killed_at_work_is_replaced_and_the_states_and_summary_are_right(
    recipe: Recipe, prepared: Prepared, start_job: Start, tiny_verifier: Path, tmp_path: Path
) -> None:
    """SGLang on the CPU: kill -9 of the scheduler, beside the process that owns it. Self-check by transformers."""
    replica = {"engine": "sglang", "dtype": "float32", "max_total_tokens": 4096, "start_timeout_s": 200}
    extraction = {"replica": replica, "self_check": 0.05, "self_check_limit": 0.01, "teacher": "topk(2)"}
    path = prepared(recipe(GIVEN, dataset={"shard_tokens": 1024}, extraction=extraction))
    uri = tmp_path / "dataset"
    process = start_job("extract", path)
    wait_for_shards(uri, 2, 240)
    family = psutil.Process(writer_of_a_shard(uri)).children(recursive=True)
    schedulers = [one for one in family if "scheduler" in " ".join([one.name(), *one.cmdline()])]
    assert schedulers, [one.cmdline() for one in family]
    os.kill(schedulers[0].pid, signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "the SGLang engine died" in err
    assert_states_are_the_verifiers(str(uri), tiny_verifier)
    dataset = open_dataset(str(uri))
    with open_replica(
        replica_config("transformers"), tiny_verifier, dataset.contract.capture_layers, "topk(2)"
    ) as oracle:
        for states in (dataset.read(index) for index in range(0, len(dataset), 100)):
            (expected,) = oracle.forward([states.token_ids])
            assert expected.teacher is not None
            assert states.teacher is not None
            np.testing.assert_allclose(states.logsumexp, expected.teacher.logsumexp, atol=1e-3)
            assert (states.argmax == expected.teacher.argmax).mean() > 0.98
    checks = [json.loads(row["receipt"]).get("self_check") for row in dataset.shards_table().to_pylist()]
    found = [check for check in checks if check]
    assert sum(check["sequences"] for check in found) >= 10
    assert all(check["by"].startswith("transformers") for check in found)
    assert max(max(check["relative_l2"]) for check in found) < 0.01


def replica_config(engine: Any) -> ReplicaConfig:
    return ReplicaConfig(engine=engine, dtype="float32")
