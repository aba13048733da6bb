"""A job on SmolLM2 with 240 real sequences, half of them reused from an earlier dataset; an actor and the driver are killed.

With STATEHOUSE_SHOW_DIR the log of the job and the dataset's card are left there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from jobs import ROOT, Finished, finish, start_driver
from test_jobs import shard_times, wait_for_shards, writer_of_a_shard

from storage import open_dataset
from storage.objects import LocalStore
from storage.verify import verify

pytest.importorskip("sglang")
pytestmark = [pytest.mark.ray, pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1500)]
ONE = ("extraction.replicas=1",)  # an engine takes most of a minute to start
SOURCES = ("code", "maths", "chat", "prose", "instructions")


def recipe(folder: Path, limit: int, **dataset: object) -> Path:
    document = {
        "name": "show",
        "verifier": {"model": "bundled:smollm2-135m-instruct"},
        "prompts": [{"path": str(ROOT / "prompts" / f"{name}.jsonl"), "limit": limit} for name in SOURCES],
        "generation": {"temperature": 0.7, "max_new_tokens": 16, "batch_size": 60},
        "dataset": {"uri": str(folder / "dataset"), "max_length": 1024, "shard_tokens": 512, **dataset},
        "extraction": {"replicas": 2, "self_check": 0.02, "usd_per_replica_hour": 0.1, "replica": {"engine": "sglang"}},
    }
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_two_hundred_and_forty_real_sequences_half_of_them_reused_through_two_kills(
    tmp_path: Path, ray_cluster: dict[str, str]
) -> None:
    log: list[str] = []
    folder = Path(os.environ.get("STATEHOUSE_SHOW_DIR") or tmp_path / "show")
    folder.mkdir(parents=True, exist_ok=True)

    def tell(command: str, err: str) -> None:
        log.extend([f"$ python -m ray_jobs.{command}", err])
        (folder / "extraction.log").write_text("\n".join(log).replace(str(tmp_path), "..."))

    def run(job: str, path: Path, *overrides: str) -> Finished:
        finished = finish(start_driver(job, path, *overrides, **ray_cluster), 600)
        tell(" ".join([job, f"{path.parent.name}/{path.name}", *overrides]), finished.err)
        assert finished.code == 0, finished.err
        return finished

    first = recipe(tmp_path / "first", 24)
    for job in ("prepare", "generate", "extract"):
        run(job, first, *ONE)
    second = recipe(tmp_path / "second", 48, reuse=[str(tmp_path / "first" / "dataset")])
    uri = tmp_path / "second" / "dataset"
    run("prepare", second)
    # The first half's answers, so that their sequences are the very same.
    shutil.copytree(tmp_path / "first" / "dataset-inputs" / "responses", f"{uri}-inputs/responses")
    run("generate", second, *ONE)

    driver = start_driver("extract", second, **ray_cluster)
    wait_for_shards(uri, 2, 300)
    os.kill(writer_of_a_shard(uri), signal.SIGKILL)
    wait_for_shards(uri, len(shard_times(uri)) + 3, 300)
    driver.kill()
    _, err = driver.communicate()
    tell("extract second/recipe.yaml    # an actor killed -9, then this driver", err)
    before = shard_times(uri)
    last = run("extract", second)
    assert "finished_before=" in last.err
    after = shard_times(uri)
    assert {key: after[key] for key in before} == before

    dataset = open_dataset(str(uri))
    assert len(dataset) == 240
    earlier = open_dataset(str(tmp_path / "first" / "dataset"))
    rows = {key: row for row, key in enumerate(dataset.sequences["id"].to_pylist())}
    for states in earlier.stream():
        same = dataset.read(rows[states.id])
        assert (same.hidden.view(np.uint16) == states.hidden.view(np.uint16)).all()
        assert (same.argmax == states.argmax).all()  # type: ignore[union-attr]
    receipts = [json.loads(row["receipt"]) for row in dataset.shards_table().to_pylist()]
    assert sum(one["written_by"].get("reused_sequences", 0) for one in receipts) == len(earlier) == 120
    checks = [one["self_check"] for one in receipts if one.get("self_check")]
    assert checks
    assert max(max(check["relative_l2"]) for check in checks) < 0.1
    assert verify(LocalStore(uri), full=True).ok
    card = [sys.executable, "-m", "storage.cli", "card", str(uri), "--output", str(folder / "card.html")]
    subprocess.run(card, check=True, cwd=ROOT)
