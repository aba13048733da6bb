"""The whole way on SmolLM2 with real SGLang: what `make demo` does, smaller, with two replicas, checked by the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ray_jobs.replicas import open_replica
from ray_jobs.replicas.replica import ReplicaConfig
from ray_jobs.verifier import resolve_verifier
from storage import open_dataset

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.ray, pytest.mark.timeout(900)]


def test_the_demo_with_two_sglang_replicas_stores_what_transformers_computes(tmp_path: Path) -> None:
    uri = tmp_path / "smollm2"
    overrides = [
        *(f"prompts.{source}.limit=4" for source in range(5)),
        f"dataset.uri={uri}",
        "dataset.shard_tokens=384",
        "generation.max_new_tokens=16",
        "generation.batch_size=10",
        "extraction.replicas=2",
        "extraction.replica.dtype=float32",
        "extraction.replica.threads=1",
        "evaluation.held_out=0.3",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    demo = subprocess.run(
        [sys.executable, "-m", "ray_jobs.demo", "recipes/smollm2.yaml", *overrides],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert demo.returncode == 0, demo.stderr
    assert "Try next" in demo.stdout

    receipts = [json.loads(path.read_text()) for path in (uri / "receipts").iterdir()]
    assert len({receipt["written_by"]["pid"] for receipt in receipts}) == 2
    assert {receipt["written_by"]["engine"] for receipt in receipts} == {"sglang"}

    dataset = open_dataset(str(uri))
    assert len(dataset) == 20
    assert set(dataset.sequences["source"].to_pylist()) == {"code", "maths", "chat", "prose", "instructions"}
    folder = resolve_verifier("bundled:smollm2-135m-instruct")
    layers = dataset.contract.capture_layers
    with open_replica(ReplicaConfig(engine="transformers", dtype="float32", threads=2), folder, layers) as oracle:
        for states in dataset.stream():
            expected = oracle.prefill([states.token_ids])[0].astype(np.float64)
            stored = states.hidden.astype(np.float64)
            cosine = (stored * expected).sum(-1) / np.linalg.norm(stored, axis=-1) / np.linalg.norm(expected, axis=-1)
            assert cosine.min() > 0.99999  # what rounding to bf16 leaves
