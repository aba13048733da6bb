"""Capture and teacher summary in real SGLang engines, family by family, against transformers: fp32, prefill in chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, make_family, wrap_as_kimi

from ray_jobs.replicas import open_replica, sglang
from ray_jobs.replicas.replica import ReplicaConfig
from storage.errors import ReplicaFailed

pytest.importorskip("sglang")
pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(280)]

LAYERS = (1, 3, 5)
CONFIG = ReplicaConfig(
    dtype="float32",
    start_timeout_s=240,
    request_timeout_s=120,
    max_total_tokens=4096,
    args={"chunked_prefill_size": 32},
)


def prompts() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(5, 1000, length) for length in (5, 17, 40, 100)]


def require_equal(verifier: Path, oracle_of: Path, config: ReplicaConfig = CONFIG) -> None:
    with open_replica(ReplicaConfig(engine="transformers", dtype="float32"), oracle_of, LAYERS, "topk(3)") as oracle:
        expected = oracle.forward(prompts())
    with open_replica(config, verifier, LAYERS, "topk(3)") as engine:
        found = engine.forward(prompts())
    for mine, theirs in zip(found, expected, strict=True):
        a, b = mine.states.astype(np.float64), theirs.states.astype(np.float64)
        assert a.shape == b.shape
        assert (np.abs(a - b).max((0, 2)) / np.abs(b).max((0, 2))).max() < 2e-5
        assert mine.teacher is not None
        assert theirs.teacher is not None
        np.testing.assert_allclose(mine.teacher.logsumexp, theirs.teacher.logsumexp, atol=1e-4)
        np.testing.assert_array_equal(mine.teacher.argmax, theirs.teacher.argmax)
        assert mine.teacher.topk_logits is not None
        np.testing.assert_allclose(mine.teacher.topk_logits, theirs.teacher.topk_logits, atol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3"])
def test_states_and_summary_equal_transformers(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path / "verifier", name)
    require_equal(folder, folder)


def test_kimis_wrapper_gives_the_states_of_its_language_model(tmp_path: Path) -> None:
    deepseek = make_family(tmp_path / "deepseek", "deepseek v3")
    require_equal(wrap_as_kimi(tmp_path / "kimi", deepseek), deepseek)


def test_tensor_parallel_ranks_make_one_summary(tmp_path: Path) -> None:
    """Two ranks hold half of the vocabulary each; their summaries are joined."""
    folder = make_family(tmp_path / "verifier", "llama")
    two = CONFIG.model_copy(update={"args": {**CONFIG.args, "tp_size": 2}})
    require_equal(folder, folder, two)


def test_the_canary_refuses_gemma3_whose_states_sglang_captures_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(tmp_path / "verifier", "gemma3")
    with pytest.raises(ReplicaFailed, match=r"gemma3_text.*extraction\.replica\.engine=transformers"):
        open_replica(CONFIG, folder, LAYERS)
    monkeypatch.setattr(sglang, "BROKEN_FAMILIES", {})  # and if nobody had known
    replica = open_replica(CONFIG, folder, LAYERS)
    with pytest.raises(ReplicaFailed, match=r"not the outputs of the layers asked for; gemma3_text"), replica:
        pass


def test_the_canary_refuses_layers_that_the_engine_reads_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(tmp_path / "verifier", "llama")
    replica = open_replica(CONFIG, folder, LAYERS)
    monkeypatch.setattr(replica, "_layer_ids", [2, 3, 5])  # as if SGLang had changed what an id means
    with pytest.raises(ReplicaFailed, match=r"expected relative error <= 0.02 at the canary; found layer 1"), replica:
        pass
