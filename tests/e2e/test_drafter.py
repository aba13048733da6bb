"""From the store to a drafter that real SGLang serves, on SmolLM2: trained briefly, measured offline, served, compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ray_jobs.verifier import resolve_verifier

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.ray, pytest.mark.timeout(1500)]


def python(*arguments: str, seconds: float = 900) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_briefly_trained_drafter_is_served_with_the_verifiers_own_output_and_the_offline_tau(tmp_path: Path) -> None:
    uri = tmp_path / "smollm2"
    overrides = [
        *(f"prompts.{source}.limit=16" for source in range(5)),
        f"dataset.uri={uri}",
        "generation.max_new_tokens=40",
        "extraction.replicas=1",
        "extraction.replica.threads=1",  # two collapse on busy cores
        "vocab.size=2048",
        "evaluation.held_out=0.15",
        "evaluation.serve_prompts=10",
        "evaluation.serve_tokens=40",
        "drafter.lm_head=frozen",
        "drafter.config.attention_bias=o_proj",  # what the demo, which serves too, has not
        "training.run=brief",
    ]
    for job in ("prepare", "generate", "extract", "coverage"):
        python("-m", f"ray_jobs.{job}", "recipes/smollm2.yaml", *overrides)
    python(
        "-m", "drafter.train", "--dataset", str(uri), "--draft-vocab", f"{uri}-vocab", "--run", f"{uri}-runs/brief",
        "--verifier", str(resolve_verifier("bundled:smollm2-135m-instruct")),
        "drafter.lm_head=frozen", "drafter.config.attention_bias=o_proj", "drafter.ttt_steps=3", "training.lr=2e-3",
        "training.epochs=10",
        "training.global_batch_tokens=1024", "training.dtype=float32",
        "evaluation.held_out=0.15",
    )  # fmt: skip
    python("-m", "ray_jobs.evaluate", "recipes/smollm2.yaml", *overrides)
    out = python("-m", "ray_jobs.serve", "recipes/smollm2.yaml", *overrides, "--controls")
    assert "Controls" in out

    run = Path(f"{uri}-runs/brief")
    assert load_file(run / "drafter" / "model.safetensors")["midlayer.self_attn.o_proj.bias"].abs().max() > 0.01
    evaluation = json.loads((run / "evaluation.json").read_text())["sources"]["all"]["drafters"]
    taus = {name: one["tau"]["3"]["tau"] for name, one in evaluation.items()}
    assert taus["ceiling"] > taus["drafter"] > max(taus["untrained"], taus["d2t off by one"]) + 0.02

    served: dict[str, Any] = json.loads((run / "serve.json").read_text())["served"]
    trained, untrained, shifted, alone = (
        served[kind] for kind in ("drafter", "untrained", "d2t off by one", "no drafter")
    )
    assert trained["total"]["responses"] >= 8
    for one in (trained, untrained, shifted, alone):
        assert one["total"]["identical"] == one["total"]["responses"], "not the verifier's own greedy output"
    assert trained["total"]["accepted"] > max(one["total"]["accepted"] for one in (untrained, shifted))
    assert alone["total"]["verifies"] == 0
    for row in trained["responses"] + untrained["responses"] + shifted["responses"]:
        assert not row["differing_passes"]
        if not row["draft_ties"]:
            assert row["passes"][:-1] == row["offline_passes"][:-1]
        assert row["last_block_agrees"] or row["draft_ties"]
