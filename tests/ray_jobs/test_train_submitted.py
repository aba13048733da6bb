"""`ray job submit`, from bucket to bucket: killed twice, carried on by another number of workers, ends at the same tau.

On a tiny random verifier; with STATEHOUSE_SHOW_DATASET, the URI of recipes/smollm2.yaml's dataset and what lies beside it,
on SmolLM2. With STATEHOUSE_SHOW_DIR the jobs' logs and the report of the run that was killed are left there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from jobs import ROOT

from drafter.run import Run
from ray_jobs.training_report import put_report
from storage.objects import open_store

if TYPE_CHECKING:
    from tiny_run import TinyRun

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Subject:
    """What is trained. dataset: sealed, with -inputs and -vocab beside it. kill_after: updates between the two kills.
    learns: share of the first loss that the last must be below.
    """

    recipe: str
    dataset: str
    settings: tuple[str, ...]
    kill_after: int
    learns: float


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    if given := os.environ.get("STATEHOUSE_SHOW_DATASET"):
        settings = ("training.workers=1", "training.epochs=2", "training.checkpoint_every=5")
        return Subject("recipes/smollm2.yaml", given, settings, 10, 0.8)
    tiny_run: TinyRun = request.getfixturevalue("tiny_run")
    settings = (
        "training.epochs=200", "training.global_batch_tokens=400", "training.micro_batch_tokens=200",
        "training.lr=3e-3", "training.dtype=float32", "training.checkpoint_every=20", "drafter.ttt_steps=3",
    )  # fmt: skip
    return Subject(str(tiny_run.path), tiny_run.recipe.dataset.uri, settings, 40, 0.5)


def keep(name: str, data: bytes) -> None:
    if folder := os.environ.get("STATEHOUSE_SHOW_DIR"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_bytes(data)


class Submitter:
    """Jobs on the test's cluster, with the bucket's credentials in their runtime environment."""

    def __init__(self, cluster: dict[str, str], subject: Subject, uri: str) -> None:
        self.environment = {**os.environ, **cluster}
        del self.environment["RAY_ADDRESS"]
        self.subject, self.uri = subject, uri

    def submit(self, job: str, *settings: str) -> subprocess.Popen[str]:
        aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        command = [
            Path(sys.executable).parent / "ray", "job", "submit", "--working-dir", ".",
            "--runtime-env-json", json.dumps({"env_vars": aws}), "--",
            "python", "-m", f"ray_jobs.{job}", self.subject.recipe, f"dataset.uri={self.uri}",
            *self.subject.settings, *settings,
        ]  # fmt: skip
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self, job: str, *settings: str) -> str:
        process = self.submit(job, *settings)
        out, _ = process.communicate(timeout=400)
        assert process.returncode == 0, out
        return out


def wait_beyond(run: Run, update: int, process: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + 200
    while not (found := [one for one in run.checkpoints.updates() if one > update]):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[-1]


def driver_of(name: str) -> int:
    """The process that Ray's job manager started, not the shell around it nor the client."""
    found = [
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if f"training.run={name}" in (one.info["cmdline"] or []) and "ray_jobs.train" in one.info["cmdline"]
        and "submit" not in one.info["cmdline"]
    ]  # fmt: skip
    (pid,) = found
    return pid


def test_killed_twice_and_resumed_by_another_number_of_workers_it_ends_at_the_same_tau(
    subject: Subject, s3_server: str, ray_cluster: dict[str, str]
) -> None:
    uri = f"s3://statehouse/submitted-{os.getpid()}"
    for part in ("", "-inputs", "-vocab"):
        source, target = open_store(f"{subject.dataset}{part}"), open_store(f"{uri}{part}")
        for key in source.sizes():
            target.put(key, source.get(key))
    jobs = Submitter(ray_cluster, subject, uri)
    undisturbed = jobs.submit("train", "training.run=whole")

    run = Run(f"{uri}-runs/killed")
    submitted = jobs.submit("train", "training.run=killed")
    first = wait_beyond(run, 0, submitted)
    written_by = json.loads(run.store.get(f"checkpoints/{first:08d}/state.json"))["written_by"]
    os.kill(int(written_by["pid"]), signal.SIGKILL)  # the worker: Ray Train starts it again
    second = wait_beyond(run, first + subject.kill_after, submitted)
    os.kill(driver_of("killed"), signal.SIGKILL)
    out, _ = submitted.communicate(timeout=100)
    keep("killed.log", out.encode())
    assert submitted.returncode != 0
    assert "restarts=1" in out
    assert run.summary() is None, "it ended before it was killed"
    out = jobs.finish("train", "training.run=killed", "training.workers=2")
    keep("resumed.log", out.encode())
    assert "train resumed update=" in out
    summary = run.summary()
    assert summary is not None
    assert summary["workers"] == 2
    assert summary["resumed"] >= 2
    assert second < summary["updates"]
    out, _ = undisturbed.communicate(timeout=300)
    assert undisturbed.returncode == 0, out

    taus = []
    for name in ("whole", "killed"):
        keep(f"evaluate-{name}.log", jobs.finish("evaluate", f"training.run={name}").encode())
        found = json.loads(open_store(f"{uri}-runs/{name}").get("evaluation.json"))
        taus.append(found["sources"]["all"]["drafters"]["drafter"]["tau"]["3"]["tau"])
    put_report(run.uri)  # once more, with tau
    for name in ("report.html", "curves.png", "summary.json"):
        keep(name, run.store.get(name))
    # A random verifier says nothing that can be learnt, so tau is low; the curves say that the runs are the same.
    assert taus[1] == pytest.approx(taus[0], abs=0.02)
    whole, killed = (
        [json.loads(line)["loss"] for line in open_store(f"{uri}-runs/{name}").get("metrics.jsonl").splitlines()]
        for name in ("whole", "killed")
    )
    np.testing.assert_allclose(killed, whole, rtol=2e-2)
    assert min(whole) < subject.learns * whole[0]
